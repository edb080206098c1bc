"""Model families as data, which adapt the decoder (``fly.models.llama``) to each family. Knows nothing of tensors.

To add a family, add a ``Family`` here; the tests then compare it with transformers like the others. If ``Family``
cannot express a difference yet, add a field for it, and a branch in the decoder and in the compiled kernels.
docs/contributing.md has the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["FAMILIES", "FULL", "OPTIONS", "SLIDING", "Activation", "Family", "family_of"]

Activation = Literal["silu", "gelu_tanh"]
FULL, SLIDING = "full_attention", "sliding_attention"  # as config.json names the kinds of layers


def _none_slide(raw: Mapping[str, Any], layers: int) -> list[str]:
    return [FULL] * layers


def _all_slide(raw: Mapping[str, Any], layers: int) -> list[str]:
    return [SLIDING] * layers


def _from_max_window_layers(raw: Mapping[str, Any], layers: int) -> list[str]:
    """Return the attention of each layer: full, but sliding from ``max_window_layers`` on if ``use_sliding_window``."""
    first = raw["max_window_layers"] if raw["use_sliding_window"] else layers
    return [SLIDING if number >= first else FULL for number in range(layers)]


def _all_but_each_nth(raw: Mapping[str, Any], layers: int) -> list[str]:
    """Return the attention of each layer: sliding, but full in every ``sliding_window_pattern``-th layer."""
    return [SLIDING if (number + 1) % raw["sliding_window_pattern"] else FULL for number in range(layers)]


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama. The defaults are Llama's."""

    name: str  # config.json: model_type
    architecture: str  # config.json: architectures
    options: frozenset[str] = frozenset()  # optional fields of a configuration that this family has (see OPTIONS)
    qkv_bias: bool = False  # query, key and value have a bias, whatever ``attention_bias`` says
    # Whether queries and keys are normalised before the rotary embedding: head by head, or all heads at once.
    query_norm: Literal["none", "heads", "whole"] = "none"
    norm_offset: float = 0.0  # added to the stored weights of norms
    input_norms: bool = True  # the inputs of attention and feed-forward are normalised
    output_norms: bool = False  # the outputs of attention and feed-forward are normalised before they are added
    fused: bool = False  # files store query, key and value as one tensor, and gate and up as another one
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of their width
    activation: Activation = "silu"
    activation_key: str = "hidden_act"  # the field of config.json that names the activation,
    activation_name: str = "silu"  # and the name that it must have there
    layer_types: Callable[[Mapping[str, Any], int], list[str]] = _none_slide  # used if config.json does not list them
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults of transformers for absent fields
    refused: tuple[str, ...] = ()  # fields of config.json that must not be set, since the decoder does not support them


_WINDOW = frozenset({"sliding_window", "layer_types"})
_MULTIPLIERS = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}

_ALL = (
    Family("llama", "LlamaForCausalLM", frozenset({"attention_bias", "mlp_bias"})),
    Family(
        "mistral",
        "MistralForCausalLM",
        _WINDOW,
        layer_types=_all_slide,
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    ),
    Family("qwen2", "Qwen2ForCausalLM", _WINDOW, qkv_bias=True, layer_types=_from_max_window_layers, defaults=_QWEN),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _WINDOW | {"attention_bias"},
        query_norm="heads",
        layer_types=_from_max_window_layers,
        defaults={**_QWEN, "head_dim": 128},
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        frozenset({"attention_bias", "mlp_bias", *_MULTIPLIERS}),
        defaults=dict.fromkeys(_MULTIPLIERS, 1.0),
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _WINDOW,
        fused=True,
        layer_types=_all_slide,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        refused=("rope_scaling",),  # transformers reads "yarn" and "su" as longrope there
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        frozenset({"attention_bias"}),
        query_norm="whole",
        input_norms=False,
        output_norms=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _WINDOW | {"attention_bias", "query_pre_attn_scalar", "rope_local_base_freq"},
        query_norm="heads",
        norm_offset=1.0,
        output_norms=True,
        scaled_embedding=True,
        activation="gelu_tanh",
        activation_key="hidden_activation",
        activation_name="gelu_pytorch_tanh",
        layer_types=_all_but_each_nth,
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "tie_word_embeddings": True,
        },
        refused=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    ),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ALL})
# Fields of a configuration that only some families have. In all other families they keep their defaults.
OPTIONS = frozenset[str]().union(*(family.options for family in _ALL))


def family_of(architectures: object) -> Family | None:
    """Return the family that a configuration's ``architectures`` name, or None."""
    names = architectures if isinstance(architectures, list) else []
    return next((family for family in FAMILIES.values() if family.architecture in names), None)
