"""Families: configurations as their makers publish them, and what is refused by name. That their models compute what
transformers does is in tests/test_model.py and tests/test_kernels.py, which draw every family."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.cache import PagedKVCache
from fly.models import CheckpointError, LlamaConfig
from fly.models.families import FAMILIES
from fly.ops import tree_mask
from tests.toys import build_llama, llama_configs
from tests.twins import Twin, assert_within

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
# What configurations on the hub look like, but for the sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 3.2": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 8,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "mistral 0.1": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "mistral 0.3": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "mistral that says little": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "qwen 2.5": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen 2 with a window": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_window_layers": 5,
        "rope_theta": 1000000.0,
        "sliding_window": 1024,
        "use_sliding_window": True,
    },
    "qwen 3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "gemma 3 of 1B": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "granite 3.1": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
    },
    "granite that says little": {"architectures": ["GraniteForCausalLM"], "model_type": "granite"},
    "phi 3 mini": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
    },
    "phi 4": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "max_position_embeddings": 16384,
        "rope_theta": 250000,
        "sliding_window": None,
    },
    "olmo 2": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
    },
    "gemma 3 that stretches": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_as_transformers_reads_it(name: str) -> None:
    """Whatever it leaves out or derives is what transformers writes in full."""
    raw = SIZES | PUBLISHED[name]
    theirs = transformers.AutoConfig.for_model(**raw)
    config = LlamaConfig.from_hf(raw)
    assert LlamaConfig.from_hf(theirs.to_dict() | {"architectures": raw["architectures"]}) == config
    assert LlamaConfig.from_hf(config.to_hf()) == config
    if "layer_types" not in config.traits.options:
        assert config.windows == [None] * 7
    elif config.family in ("mistral", "phi3"):
        assert config.windows == [theirs.sliding_window] * 7
    else:
        kinds = theirs.layer_types
        assert config.windows == [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.head_dim == (theirs.head_dim if hasattr(theirs, "head_dim") else 8)


def test_a_context_that_yarn_stretches_is_the_stretched_one() -> None:
    """As the makers of Qwen 2.5 say to do it: they state the trained context beside it."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    raw = SIZES | PUBLISHED["qwen 2.5"] | {"rope_scaling": scaling}
    assert LlamaConfig.from_hf(raw).max_position_embeddings == 131072
    assert LlamaConfig.from_hf(raw | {"max_position_embeddings": 262144}).max_position_embeddings == 262144


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen 2.5", {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 60}, "Qwen2MoeForCausalLM.*experts"),
        ("llama 3.2", {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "MixtralForCausalLM.*experts"),
        ("llama 3.2", {"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM.*Gemma3ForCausalLM"),
        ("llama 3.2", {"architectures": None}, "missing"),
        ("qwen 2.5", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'.*GGUF"),
        ("qwen 2.5", {"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ("qwen 3", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("qwen 3", {"hidden_act": "relu"}, "relu.*silu"),
        ("gemma 3 of 1B", {"hidden_activation": "gelu"}, "'gelu'.*gelu_pytorch_tanh"),
        ("gemma 3 of 1B", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma 3 of 1B", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama 3.2", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*yarn"),
        ("qwen 3", {"layer_types": ["sliding_attention"], "sliding_window": 4}, "layer_types"),
        ("phi 3 mini", {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "rope_scaling.*su.*must be null"),
        ("phi 3 mini", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("phi 4", {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
        ("granite 3.1", {"architectures": ["GraniteMoeForCausalLM"]}, "GraniteMoeForCausalLM.*GraniteForCausalLM"),
        ("olmo 2", {"architectures": ["OlmoForCausalLM"]}, "OlmoForCausalLM.*Olmo2ForCausalLM"),
        ("qwen 3", {"layer_types": ["linear_attention"] * 7, "sliding_window": 4}, "layer_types"),
    ],
)
def test_what_no_family_does_is_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        LlamaConfig.from_hf(SIZES | PUBLISHED[name] | changes)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"sliding_window": 4}),
        ("qwen2", {"mlp_bias": True}),
        ("qwen3", {"query_pre_attn_scalar": 9}),
        ("mistral", {"rope_local_base_freq": 10.0}),
        ("llama", {"residual_multiplier": 0.5}),
        ("olmo2", {"logits_scaling": 2.0}),
        ("mamba", {}),
    ],
)
def test_a_configuration_holds_nothing_that_its_family_has_no_use_for(family: str, change: dict[str, Any]) -> None:
    named = next(iter(change), family)
    with pytest.raises(ValueError, match=named):
        LlamaConfig(family=family, **(SIZES | change))  # type: ignore[arg-type]


@given(llama_configs(), st.integers(0, 99), st.data())
def test_a_tree_sees_the_window_of_each_path(config: LlamaConfig, seed: int, data: st.DataObject) -> None:
    """Every node's hidden state is that of its path alone, whatever lies between in the tree."""
    model, generator = build_llama(config, seed), torch.Generator().manual_seed(seed)
    twin = Twin(model)
    parents = data.draw(st.lists(st.integers(-1, 9), min_size=1, max_size=9))
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]
    before = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, before - 1))
    tokens = torch.randint(0, config.vocab_size, (before + len(parents),), generator=generator)
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    cache = PagedKVCache(config, 12, 3)
    cache.resize(0, len(tokens))
    if start:
        model(tokens[:start], torch.arange(start), cache.batch([0], [0], [start]))
    places = torch.tensor([*range(start, before), *(before + depth for depth in depths)])
    kv = cache.batch([0], [start], [len(places)], [tree_mask(start, before, parents)])
    hidden = model(tokens[start:], places, kv)
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.insert(0, before + at)
            at = parents[at]
        alone = torch.cat([tokens[:before], tokens[path]])
        assert_within(hidden[before - start + node], lambda alone=alone: twin.hidden(alone)[:, -1])


def test_every_family_is_drawn() -> None:
    seen: set[str] = set()

    @settings(max_examples=400)
    @given(llama_configs())
    def draw(config: LlamaConfig) -> None:
        seen.add(config.family)

    draw()
    assert seen == set(FAMILIES)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_parameters": {"sliding_attention": "x"}},
        {"rope_parameters": {"full_attention": "x"}},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": ["awq"]},
    ],
)
def test_odd_settings_are_refused(raw: dict[str, Any]) -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    with pytest.raises(CheckpointError):
        LlamaConfig.from_hf({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2, **sizes, **raw})
