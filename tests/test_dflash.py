"""DFlash and DSpark heads: their checkpoints, and their blocks, held to a naive twin and to ``speculators``.

Shape legend: T tokens, K places of a block, F hidden states of the target side by side, C hidden width, U draft
vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from fly.backends.heads import TorchDFlashHead
from fly.cache import PagedKVCache
from fly.models import LlamaConfig
from fly.models.config import CheckpointError
from fly.models.dflash import DFlashConfig, DFlashHead, load_dflash_head, save_dflash_head
from fly.models.heads import DFLASH, head_kind
from fly.runner.executor import Batch
from tests.test_eagle import changed, randomise

VOCABULARY, MASK = 40, 39
SLIDING = {"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_window": 3}
# Kinds of heads: options of ``DFlashConfig``, beside the sizes.
KINDS: dict[str, dict[str, Any]] = {
    "fill-in": {},
    "anchor-first": {"anchor_first": True},
    "reduced": {"draft_vocab_size": 24},
    "sliding": {"layers": SLIDING, "causal": (True, False, True)},
    "sliding, not causal": {"layers": SLIDING, "causal": (False, False, False)},
    "sliding from each place": {"layers": SLIDING, "causal": (True, False, True), "anchored": False},
    "sliding from each place, not causal": {"layers": SLIDING, "causal": (False, False, False), "anchored": False},
    "one kv head": {"layers": {"num_key_value_heads": 1, "attention_bias": True}},
    "vanilla": {"anchor_first": True, "markov": "vanilla", "markov_rank": 6},
    "gated": {"anchor_first": True, "markov": "gated", "markov_rank": 6, "confidence": True, "draft_vocab_size": 24},
    "rnn": {"anchor_first": True, "markov": "rnn", "markov_rank": 6, "confidence": True},
    "rnn, fill-in": {"markov": "rnn", "markov_rank": 6, "confidence": True, "confidence_with_markov": True},
    "confident": {"anchor_first": True, "markov": "vanilla", "markov_rank": 6, "confidence": True,
                  "confidence_with_markov": True},
}  # fmt: skip
PACKAGED = [kind for kind in KINDS if "each place" not in kind]  # those that the package ``speculators`` has


def make_layer(**options: Any) -> LlamaConfig:
    """The configuration of a head's layers, by default those of Qwen3."""
    sizes = {
        "family": "qwen3", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaConfig.model_validate({**sizes, **options})


def make_config(layers: dict[str, Any] | None = None, **options: Any) -> DFlashConfig:
    usual: dict[str, Any] = {
        "draft_vocab_size": VOCABULARY, "target_hidden_size": 32, "states": (1, 2, 4), "block_size": 5,
        "mask_token_id": MASK, "causal": (False,) * 3,
    }  # fmt: skip
    return DFlashConfig(layer=make_layer(**(layers or {})), **{**usual, **options})


def make_head(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> DFlashHead:
    """A random head with an embedding and an output matrix of its own."""
    head = DFlashHead(make_config(**options), embedding=True, output=True).to(dtype)
    randomise(head, seed)
    size = head.config.draft_vocab_size
    head.to_target_U.copy_(torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:size].sort()[0])
    return head.eval().requires_grad_(False)


# What a head computes


def turn(x_THD: Tensor, positions: list[int], theta: float) -> Tensor:
    """RoFormer (arXiv 2104.09864), with value i of a head paired with value i + D/2."""
    half = x_THD.shape[-1] // 2
    angle_TD = torch.tensor([[at * theta ** (-i / half) for i in range(half)] for at in positions], dtype=x_THD.dtype)
    cos, sin = angle_TD.cos().unsqueeze(1), angle_TD.sin().unsqueeze(1)
    first, second = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def naive_block(head: DFlashHead, states_TF: Tensor, anchor: int) -> Tensor:
    """The hidden states [K, C] of a block after a text, by the paper's description alone (arXiv 2602.06036): the whole
    context from the start, one place after another. Windows are those of speculators 0.9
    (``create_anchor_block_mask_mod``) or of z-lab's code (``_attention_mask`` in ``dflash/model.py``)."""
    config, layer, weights = head.config, head.config.layer, dict(head.stored())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + layer.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))

    length, size, width = len(states_TF), config.block_size, layer.head_dim
    context_TC = norm(linear(states_TF, "fc"), "hidden_norm")
    x_KC = weights["embed_tokens.weight"][[anchor] + [config.mask_token_id] * (size - 1)]
    positions = list(range(length + size))
    group = layer.num_attention_heads // layer.num_key_value_heads
    for number, window in enumerate(layer.windows):
        name = f"layers.{number}"
        normed_KC, own = norm(x_KC, f"{name}.input_layernorm"), f"{name}.self_attn"
        seen = torch.cat([context_TC, normed_KC])  # the context has no input norm
        q = norm(linear(normed_KC, f"{own}.q_proj").unflatten(-1, (-1, width)), f"{own}.q_norm")
        k = norm(linear(seen, f"{own}.k_proj").unflatten(-1, (-1, width)), f"{own}.k_norm")
        v = linear(seen, f"{own}.v_proj").unflatten(-1, (-1, width))
        q, k = turn(q, positions[length:], layer.rope_theta), turn(k, positions, layer.rope_theta)
        out = torch.zeros_like(q)
        for place in range(size):
            at = length + place
            first = 0
            last = length + size
            if window is not None and config.anchored:
                first = max(length - window, 0)
            elif window is not None:
                first, last = max(at - window + 1, 0), min(at + window, last)
            if config.causal[number]:
                last = at + 1
            for each in range(layer.num_attention_heads):
                scores = k[first:last, each // group] @ q[place, each] / math.sqrt(width)
                out[place, each] = scores.softmax(0) @ v[first:last, each // group]
        x_KC = x_KC + linear(out.flatten(1), f"{own}.o_proj")
        normed_KC = norm(x_KC, f"{name}.post_attention_layernorm")
        gate, up = linear(normed_KC, f"{name}.mlp.gate_proj"), linear(normed_KC, f"{name}.mlp.up_proj")
        x_KC = x_KC + linear(gate * gate.sigmoid() * up, f"{name}.mlp.down_proj")
    return norm(x_KC, "norm")


def naive_logits(head: DFlashHead, hidden_KC: Tensor, anchor: int, drafted: list[int]) -> tuple[Tensor, Tensor | None]:
    """The logits [drafts, U] of a block's places, and what the confidence head says there. ``drafted`` are the tokens
    that the places drafted (DSpark)."""
    config, weights = head.config, dict(head.stored())
    first = 0 if config.anchor_first else 1
    before = [anchor] * first + [anchor, *drafted]
    base, logits, chances = hidden_KC @ weights["lm_head.weight"].T, [], []
    state = torch.zeros(config.markov_rank, dtype=base.dtype)
    for place in range(config.block_size):
        h, bias = hidden_KC[place], torch.zeros(1, dtype=base.dtype)
        e = weights["markov_head.markov_w1.weight"][before[place]] if config.markov else h[:0]
        if config.markov:
            out = e
            if config.markov == "gated":
                w, b = (weights[f"markov_head.gate_proj.{name}"] for name in ("weight", "bias"))
                out = (w @ torch.cat([h, e]) + b).sigmoid() * e
            elif config.markov == "rnn":
                w, b = (weights[f"markov_head.joint_proj.{name}"] for name in ("weight", "bias"))
                gate, new, out = (w @ torch.cat([state, e, h]) + b).split(config.markov_rank)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                out = out.tanh()
            bias = weights["markov_head.markov_w2.weight"] @ out
        logits.append(base[place] + bias)
        if config.confidence:
            w, b = (weights[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
            features = torch.cat([h, e]) if config.confidence_with_markov else h
            chances.append((w @ features + b).sigmoid())
    return torch.stack(logits)[first:], torch.cat(chances)[first:] if chances else None


def blocks(head: DFlashHead, parts: list[list[Tensor]], anchors: list[int], drafted: list[list[int]]) -> list[Any]:
    """Run the executor on a batch of blocks. Return, for each row, its logits [drafts, V] and chances at all places.
    ``parts`` are each row's hidden states, which are read in several calls."""
    runs, rows = TorchDFlashHead(head), range(len(parts))
    cache = PagedKVCache.for_model(runs, 256, 4)
    done = [0] * len(parts)
    for number in range(max(map(len, parts))):
        reading = [b for b in rows if number < len(parts[b])]
        counts = [len(parts[b][number]) for b in reading]
        for b, count in zip(reading, counts):
            cache.resize(b, done[b] + count + head.config.block_size)
        kv = cache.batch(reading, [done[b] for b in reading], counts)
        batch = Batch.of([[0] * count for count in counts], kv)
        states_TF = torch.cat([parts[b][number] for b in reading])
        last = [number == len(parts[b]) - 1 for b in reading]
        if all(last) and len(reading) == len(parts):
            follow = runs.block(batch, states_TF, anchors, [head.config.drafts] * len(parts))
        else:
            runs.read(batch, states_TF)
        for b, count in zip(reading, counts):
            done[b] += count
            cache.resize(b, done[b])
    found: list[list[Any]] = [[] for _ in rows]
    tokens = anchors
    for place in range(head.config.drafts):
        said = follow(list(rows), tokens)
        for b in rows:
            found[b].append((said.logits_AV[b], None if said.chance_A is None else said.chance_A[b]))
        tokens = [own[min(place, len(own) - 1)] for own in drafted]
    return found


def expect_twin(
    head: DFlashHead, lengths: list[int], cuts: list[int], seed: int, ours: DFlashHead | None = None
) -> None:
    """Compare a batch of blocks of ``ours``, by default the same head, with the naive twin's."""
    generator = torch.Generator().manual_seed(seed)
    width = head.config.inputs * head.config.target_hidden_size
    states = [torch.randn(length, width, dtype=torch.float64, generator=generator) for length in lengths]
    anchors = torch.randint(0, VOCABULARY, (len(lengths),), generator=generator).tolist()
    drafted = torch.randint(0, VOCABULARY, (len(lengths), head.config.drafts), generator=generator).tolist()
    parts = [[each[:cut], each[cut:]] for each, cut in zip(states, cuts)]
    found = blocks(ours or head, parts, anchors, drafted)
    for b, states_TF in enumerate(states):
        hidden_KC = naive_block(head, states_TF, anchors[b])
        logits_KU, chances_K = naive_logits(head, hidden_KC, anchors[b], drafted[b])
        logits_KV = torch.stack([logits_V for logits_V, _ in found[b][: len(drafted[b])]])
        torch.testing.assert_close(logits_KV[:, head.to_target_U].double(), logits_KU, atol=2e-5, rtol=2e-5)
        outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill_(0, head.to_target_U, False)
        assert (logits_KV[:, outside] == -torch.inf).all()
        if chances_K is not None:
            chances = torch.stack([chance for _, chance in found[b]]).double()
            torch.testing.assert_close(chances, chances_K, atol=1e-5, rtol=1e-5)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(list(KINDS)), st.lists(st.tuples(st.integers(2, 12), st.integers(1, 11)), min_size=1, max_size=3),
    st.integers(0, 9),
)  # fmt: skip
def test_a_ragged_batch_of_blocks_says_what_the_naive_twin_says(
    kind: str, rows: list[tuple[int, int]], seed: int
) -> None:
    lengths = [length for length, _ in rows]
    expect_twin(make_head(seed, **KINDS[kind]), lengths, [min(cut, length - 1) for length, cut in rows], seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_the_naive_twin_says(kind: str) -> None:
    expect_twin(make_head(3, **KINDS[kind]), [9, 4], [5, 1], 3)


def need_speculators() -> None:
    """Skip the test if the package ``speculators`` is not installed."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("the package speculators is not installed (pip install speculators==0.9.0)")
    sys.modules.setdefault("datasets", types.SimpleNamespace(load_from_disk=None))  # type: ignore[arg-type]


def speculators_logits(
    path: Path, head: DFlashHead, documents: list[Tensor], anchors: list[int], drafted: list[list[int]]
) -> list[Tensor]:
    """The logits [drafts, U] of each document's block by the package ``speculators`` (0.9), of a saved head."""
    need_speculators()
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel

    raw = json.loads((path / "config.json").read_text())
    spark = raw["speculators_model_type"] == "dspark"
    config = (DSparkSpeculatorConfig if spark else DFlashSpeculatorConfig)(**raw)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = (DSparkDraftModel if spark else DFlashDraftModel)(config).double().eval()
    tensors = load_file(path / "model.safetensors") | {"embed_tokens.weight": head.stored()["embed_tokens.weight"]}
    tensors |= {"lm_head.weight": head.stored()["lm_head.weight"]}
    lost = model.load_state_dict(tensors, strict=False)
    assert not [name for name in lost.missing_keys if not name.startswith("verifier_")]
    assert set(lost.unexpected_keys) <= {"d2t", "t2d"}
    # What the package saves, we load.
    model.float().save_pretrained(path / "saved")
    model.double().load_state_dict(tensors, strict=False)
    again = load_dflash_head(path / "saved", torch.float64)
    assert again.config == head.config
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter, dict(head.named_parameters())[name])
    # Documents one after another, each with room for its block.
    size = head.config.block_size
    states, tokens, places, ids, positions = [], list[int](), [], list[int](), list[int]()
    for number, (states_TF, anchor, own) in enumerate(zip(documents, anchors, drafted)):
        length = len(states_TF)
        places.append(len(tokens) + length)
        states += [states_TF, torch.randn(size + 1, states_TF.shape[1], dtype=torch.float64)]
        tokens += [*[7] * length, anchor, *own, *[7] * (size - len(own))]
        ids += [number] * (length + size + 1)
        positions += range(length + size + 1)
    tokens_1T = torch.tensor([[*tokens, *[7] * size]])
    pad = torch.zeros(size, states[0].shape[1], dtype=torch.float64)
    mask_1T = torch.zeros_like(tokens_1T, dtype=torch.float64)
    mask_1T[0, places] = 1.0
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            torch.cat([*states, pad])[None], tokens_1T, mask_1T,
            torch.zeros(1, tokens_1T.shape[1], head.config.layer.hidden_size, dtype=torch.float64),
            torch.tensor([[*ids, *[-1] * size]]), torch.tensor([[*positions, *range(size)]]), max_anchors=len(places),
        )  # fmt: skip
        logits = logits.view(len(places), size, -1)
        if spark and model.markov_head is not None:
            block = torch.stack([tokens_1T[0, place : place + size] for place in places])
            before = block if config.sample_from_anchor else torch.cat([block[:, :1], block[:, :-1]], 1)
            hidden = hidden.view(len(places), size, -1)
            logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    return list(logits[:, 0 if config.sample_from_anchor else 1 :])


@pytest.mark.parametrize("kind", PACKAGED)
def test_the_naive_twin_says_what_speculators_says(kind: str, tmp_path: Path) -> None:
    """Of three documents at once, of other lengths each."""
    head, generator = make_head(5, **KINDS[kind]), torch.Generator().manual_seed(5)
    save_dflash_head(head, tmp_path, torch.float64)
    documents = [torch.randn(length, 96, dtype=torch.float64, generator=generator) for length in (9, 2, 5)]
    anchors = torch.randint(0, VOCABULARY, (3,), generator=generator).tolist()
    drafted = torch.randint(0, VOCABULARY, (3, head.config.drafts), generator=generator).tolist()
    found = speculators_logits(tmp_path, head, documents, anchors, drafted)
    worst = 0.0
    for states_TF, anchor, own, logits_KU in zip(documents, anchors, drafted, found):
        expected_KU, _ = naive_logits(head, naive_block(head, states_TF, anchor), anchor, own)
        worst = max(worst, float((logits_KU - expected_KU).abs().max() / expected_KU.abs().max()))
    assert worst < 1e-6  # its rotary tables are rounded to float32


# The silent traps: each gives drafts that are merely worse, so each must be seen here.


def interleaved(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """The other rotary pairing: value 2i with value 2i + 1."""
    half = x_THD.shape[-1] // 2
    cos, sin = cos_T1D[..., :half], sin_T1D[..., half:]
    first, second = x_THD[..., ::2], x_THD[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


@pytest.mark.parametrize("trap", ["causal block", "layout", "rotary pairing", "context through the input norm"])
def test_a_planted_trap_is_seen(trap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head(3)
    expect_twin(head, [9, 4], [5, 1], 3)
    ours = head
    if trap == "causal block":
        ours = head_of(head, causal=(True,) * 3)
    elif trap == "layout":
        ours = head_of(head, anchor_first=True)
    elif trap == "rotary pairing":
        monkeypatch.setattr("fly.models.llama.rotate", interleaved)
    else:
        fuse = DFlashHead.fuse
        norm: Any = head.layers[0].input_layernorm
        monkeypatch.setattr(DFlashHead, "fuse", lambda self, states_TF: norm(fuse(self, states_TF)))
    with pytest.raises(AssertionError, match="not close"):
        expect_twin(head, [9, 4], [5, 1], 3, ours)


def head_of(head: DFlashHead, **options: Any) -> DFlashHead:
    """The same weights under a configuration that says something else."""
    other = DFlashHead(head.config.model_copy(update=options), embedding=True, output=True).to(head.dtype)
    other.load_state_dict(head.state_dict())
    return other.requires_grad_(False)


# Checkpoints


def zlab(raw: dict[str, Any]) -> dict[str, Any]:
    """The same head in z-lab's format (``config.json`` of Qwen3-8B-DFlash-b16)."""
    return {
        **raw["transformer_layer_config"], "architectures": ["DFlashDraftModel"], "block_size": raw["block_size"],
        "num_target_layers": 4, "dflash_config": {
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [number - 1 for number in raw["aux_hidden_state_layer_ids"]],
        },
    }  # fmt: skip


def deepspec(raw: dict[str, Any]) -> dict[str, Any]:
    """The same head in DeepSpec's format (``deepspec/modeling/dspark/qwen3/config.py``)."""
    markov = {name: raw.get(name, default) for name, default in (("markov_rank", 0), ("enable_confidence_head", False))}
    markov |= {name: raw[name] for name in ("markov_head_type", "confidence_head_with_markov") if name in raw}
    return {
        **raw["transformer_layer_config"], "architectures": ["Qwen3DSparkModel"], "block_size": raw["block_size"],
        "num_target_layers": 4, "mask_token_id": raw["mask_token_id"], "num_anchors": 512, **markov,
        "target_layer_ids": [number - 1 for number in raw["aux_hidden_state_layer_ids"]],
    }  # fmt: skip


def specforge(raw: dict[str, Any]) -> dict[str, Any]:
    """The same head in SpecForge's format: z-lab's, with DSpark's fields in ``dflash_config``."""
    found = zlab(raw)
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    found["dflash_config"] |= {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        **{name: raw[name] for name in names},
    }
    return found | {"architectures": ["DSparkDraftModel"]}


@pytest.mark.parametrize("kind", PACKAGED)
def test_what_is_saved_is_loaded(kind: str, tmp_path: Path) -> None:
    head = make_head(2, torch.float32, **KINDS[kind])
    save_dflash_head(head, tmp_path, torch.float32)
    again = load_dflash_head(tmp_path)
    assert head_kind(tmp_path) == DFLASH and again.config == head.config and again.dtype == torch.float32
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(head.named_parameters())[name])
    assert torch.equal(again.to_target_U, head.to_target_U)


def test_a_window_that_the_format_cannot_describe_is_not_saved(tmp_path: Path) -> None:
    head = make_head(2, torch.float32, **KINDS["sliding from each place"])
    with pytest.raises(ValueError, match="windows that count from each place have no form"):
        save_dflash_head(head, tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("fill-in", zlab), ("sliding", zlab), ("anchor-first", deepspec), ("vanilla", deepspec), ("confident", deepspec),
     ("rnn", deepspec), ("confident", specforge), ("rnn", specforge)],
)  # fmt: skip
def test_the_formats_say_the_same(kind: str, form: Any, tmp_path: Path) -> None:
    """Layers' numbers among them: z-lab and DeepSpec count from 0 on, speculators from 1 on. But windows count from the
    anchor in speculators alone."""
    head = make_head(2, torch.float32, **KINDS[kind])
    save_dflash_head(head, tmp_path, torch.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    expected = head.config.model_copy(update={"target_layers": 4, "anchored": kind != "sliding"})
    (tmp_path / "config.json").write_text(json.dumps(form(raw)))
    assert load_dflash_head(tmp_path).config == expected and head_kind(tmp_path) == DFLASH
    assert expected.states == (1, 2, 4) and form(raw).get("target_layer_ids", [0, 1, 3]) == [0, 1, 3]


def test_published_configurations(tmp_path: Path) -> None:
    """z-lab/Qwen3-8B-DFlash-b16, with its ids and without; the sizes that ``speculators`` leaves out."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5,
        "vocab_size": 151936, "rope_theta": 1000000, "num_target_layers": 36, "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        # What transformers writes beside it.
        "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16", "hidden_act": "silu", "use_cache": True,
        "initializer_range": 0.02, "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960,
        "max_window_layers": 5, "rms_norm_eps": 1e-6, "rope_scaling": None, "sliding_window": None,
        "tie_word_embeddings": False, "transformers_version": "4.57.1", "use_sliding_window": False,
    }  # fmt: skip
    config = DFlashConfig.from_hf(raw)
    assert (config.states, config.block_size, config.drafts) == ((2, 10, 18, 26, 34), 16, 15)
    assert config.layer.rope_theta == 1e6 and config.causal == (False,) * 5 and not config.anchor_first
    del raw["dflash_config"]["target_layer_ids"]
    config = DFlashConfig.from_hf(raw)
    assert config.states is None and config.inputs == 5 and config.states_of(36) == (2, 10, 18, 26, 34)
    assert DFlashConfig.from_hf({**raw, "num_target_layers": None}).states_of(32) == (2, 9, 16, 23, 30)
    one = DFlashConfig.from_hf({**raw, "num_hidden_layers": 1, "layer_types": None})
    assert one.states_of(36) == (19,)
    with pytest.raises(ValueError, match=r"for a target of 36 layers \(num_target_layers\), not 32"):
        config.states_of(32)
    few = DFlashConfig.from_hf({**raw, "num_target_layers": None})
    with pytest.raises(ValueError, match="do not fit a target of 4 layers"):
        few.states_of(4)
    packaged = {"speculators_model_type": "dspark", "mask_token_id": 5, "transformer_layer_config": {"head_dim": 128}}
    config = DFlashConfig.from_hf(packaged)
    assert (config.markov, config.markov_rank, config.confidence, config.anchor_first) == ("vanilla", 256, True, True)
    assert (config.block_size, config.layer.hidden_size, config.confidence_with_markov) == (8, 4096, True)


def test_a_head_of_specforge_has_what_it_says() -> None:
    """The defaults of SpecForge's ``DSparkDraftModel`` are none of those of ``speculators``: no Markov head, and a
    confidence head if its loss had a weight."""
    raw = specforge(make_config(**KINDS["confident"]).to_hf("float32"))
    alone: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 3], "markov_rank": 6}
    for options, expected in (
        ({}, (None, False, False)),
        ({"confidence_head_alpha": 1.0}, (None, True, False)),
        ({"confidence_head_alpha": 0.0}, (None, False, False)),
        ({"confidence_head_alpha": 1.0, "enable_confidence_head": False}, (None, False, False)),
        ({"markov_rank": 6, "markov_head_type": "rnn", "enable_confidence_head": True}, ("rnn", True, False)),
        (
            {"markov_rank": 6, "confidence_head_alpha": 1.0, "confidence_head_with_markov": True},
            ("vanilla", True, True),
        ),
    ):
        config = DFlashConfig.from_hf(raw | {"dflash_config": {**alone, "markov_rank": 0, **options}})
        assert (config.markov, config.confidence, config.confidence_with_markov) == expected and config.anchor_first


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({}, (True, False, True)), ({"is_causal": False}, (False,) * 3), ({"is_causal": True}, (True,) * 3),
        ({"dflash_config": {"causal": False}}, (False,) * 3), ({"sliding_window_non_causal": True}, (False,) * 3),
        ({"is_causal": True, "dflash_config": {"causal": False}, "sliding_window_non_causal": True}, (True,) * 3),
        ({"dflash_config": {"causal": True}, "sliding_window_non_causal": True}, (True,) * 3),
    ],
)  # fmt: skip
def test_what_decides_whether_a_block_is_causal(options: dict[str, Any], causal: tuple[bool, ...]) -> None:
    raw = make_config(**KINDS["sliding"]).to_hf("float32")
    assert DFlashConfig.from_hf({**raw, "sliding_window_non_causal": False, **options}).causal == causal


@pytest.mark.parametrize(
    "names",
    [
        {"": "model."}, {"layers.0.": "midlayer."}, {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."},
        {"markov_head.": "logit_head.markov_head.", "confidence_head.": "logit_head.confidence_head."}, "fused",
    ],
    ids=str,
)  # fmt: skip
def test_other_names_of_tensors(names: Any, tmp_path: Path) -> None:
    head = make_head(2, torch.float32, layers={"attention_bias": True}, markov="gated", markov_rank=6, confidence=True)
    save_dflash_head(head, tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    if names == "fused":
        for key in [key for key in tensors if "q_proj" in key]:
            parts = [tensors.pop(key.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
            tensors[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        for key in [key for key in tensors if "mlp.gate_proj" in key]:
            parts = [tensors.pop(key.replace("gate_proj", part)) for part in ("gate_proj", "up_proj")]
            tensors[key.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
    else:
        for old, new in names.items():
            tensors = {new + key.removeprefix(old) if key.startswith(old) else key: x for key, x in tensors.items()}
    tensors |= {"verifier_norm.weight": torch.ones(32)}
    save_file(tensors, tmp_path / "model.safetensors")
    again = load_dflash_head(tmp_path)
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])


def test_the_targets_last_layer_is_left_out_of_the_list(tmp_path: Path) -> None:
    head = make_head(2, torch.float32)
    save_dflash_head(head, tmp_path, torch.float32)
    assert load_dflash_head(changed(tmp_path, {}, aux_hidden_state_layer_ids=[1, 2, 4, 36])).config == head.config


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({"fc.weight": None}, {}, "tensors are missing: fc.weight"),
        ({"layers.3.odd": torch.zeros(2)}, {}, "unexpected tensors for this configuration: layers.3.odd"),
        ({"fc.weight": torch.zeros(32, 32)}, {}, r"fc.weight has shape \[32, 32\], the configuration asks \[32, 96\]"),
        ({"mask_embedding": torch.zeros(32)}, {}, "unexpected tensors for this configuration: mask_embedding"),
        ({}, {"speculators_model_type": "dflash2"}, "of type 'dflash2' is not supported: its convolutions and its sel"),
        ({}, {"speculators_model_type": "mtp"}, "of type 'mtp' is not supported"),
        ({}, {"speculators_model_type": None, "architectures": ["DFlash2DraftModel"]}, "of type 'dflash2' is not supp"),
        ({}, {"dflash_config": {"use_swa": True}}, "use_swa True is not supported; it must be absent"),
        ({}, {"dflash_config": {"swa_window_size": 128}}, "swa_window_size 128 is not supported"),
        ({}, {"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias True is not supported"),
        ({}, {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias True is not supported"),
        ({}, {"attention_value_scale": 0.5}, "attention_value_scale 0.5 is not supported"),
        ({}, {"input_embedding_scale": 2.0}, "input_embedding_scale 2.0 is not supported"),
        ({}, {"output_multiplier": 0.5}, "output_multiplier 0.5 is not supported"),
        ({}, {"dflash_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping 30.0 is not supported"),
        ({}, {"is_neox_style": False}, "is_neox_style False is not supported"),
        ({}, {"use_aux_hidden_state": False}, "use_aux_hidden_state False is not supported"),
        ({}, {"selector_rank": 256}, "selector_rank 256 is not supported"),
        ({}, {"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino' is not supported"),
        ({}, {"dflash_config": {"attention_mode": "mla"}}, "attention_mode 'mla' is not supported"),
        ({}, {"enable_qwen35_gated_q_proj": True}, "enable_qwen35_gated_q_proj True is not supported"),
        ({}, {"speculators_model_type": "hass"}, r"of type 'hass' is not supported: choices: \['eagle3', 'peagle'"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "weights quantised by 'fp8' are not supported"),
        ({}, {"mask_token_id": None}, "mask_token_id is missing"),
        ({}, {"mask_token_id": 40}, "mask_token_id 40 is outside 40 tokens"),
        ({}, {"block_size": 1}, "block_size 1 drafts no token"),
        ({}, {"block_size": 0}, "block_size"),
        ({}, {"draft_vocab_size": 0}, "draft_vocab_size"),
        ({}, {"target_hidden_size": 0}, "target_hidden_size"),
        ({}, {"markov_rank": 4, "markov_head_type": "lstm"}, "markov"),
        ({}, {"aux_hidden_state_layer_ids": [1, "2"]}, "must list numbers of layers, got"),
        ({}, {"draft_vocab_size": 41}, "draft_vocab_size 41 exceeds vocab_size 40"),
        ({}, {"num_target_layers": -1}, "target_layers"),
        ({}, {"dflash_config": {"num_target_layers": "many"}}, "target_layers"),
        ({}, {"is_causal": "false"}, "is_causal 'false' must be true or false"),
        ({}, {"sliding_window_non_causal": "false"}, "sliding_window_non_causal 'false' must be true or false"),
        ({}, {"sample_from_anchor": 0}, "sample_from_anchor 0 must be true or false"),
        ({}, {"enable_confidence_head": "no"}, "enable_confidence_head 'no' must be true or false"),
        ({}, {"target_layer_ids": [1, 2, 4]}, r"\[1, 2, 4\] and target_layer_ids \[1, 2, 4\] disagree"),
    ],
)  # fmt: skip
def test_what_is_not_built_or_does_not_fit_is_named(tensors: Any, config: Any, said: str, tmp_path: Path) -> None:
    save_dflash_head(make_head(2, torch.float32), tmp_path, torch.float32)
    with pytest.raises(CheckpointError, match=said):
        load_dflash_head(changed(tmp_path, tensors, **config))


# Fields that no published format has at this place, with values that may change what a head computes: names of other
# models and engines, and any.
UNKNOWN = st.one_of(
    st.sampled_from(
        ["attention_sinks", "sinks", "mlp_bias", "add_full_attention_sink_bias", "attn_softcap", "final_logit_soft_cap",
         "residual_multiplier", "logits_scaling", "query_pre_attn_scalar", "embedding_multiplier",
         "scale_emb", "use_qk_norm", "norm_type", "num_nextn_predict_layers", "mtp_num_hidden_layers",
         "rope_interleave", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label",
         "attn_output_gate", "mlp_conv", "attention_chunk_size", "zero_centered_gamma"]
    ),
    st.text("abcdefghijklmnopqrstuvwxyz", min_size=12, max_size=14),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    UNKNOWN, st.sampled_from([True, 1, 0.5, "rms", [1], {"rank": 2}]),
    st.sampled_from([zlab, specforge, deepspec, None]),
    st.sampled_from(["", "dflash_config", "transformer_layer_config", "eagle_config"]),
)  # fmt: skip
def test_a_field_of_which_nothing_is_known_is_named(name: str, value: object, form: Any, where: str) -> None:
    """At any place and in any format. What asks for nothing is no error."""
    raw = make_config(**KINDS["confident"]).to_hf("float32")
    if form is not None:
        raw = form(raw)
        where = where.replace("transformer_layer_config", "")
    for asked in (value, None, False, 0, [], {}):
        changed_raw = raw | ({where: {**raw.get(where, {}), name: asked}} if where else {name: asked})
        if asked:
            with pytest.raises(CheckpointError, match=f"{name} .* is not supported: nothing is known of it"):
                DFlashConfig.from_hf(changed_raw)
        else:
            assert DFlashConfig.from_hf(changed_raw) == DFlashConfig.from_hf(raw)


def test_layers_of_another_type_are_refused() -> None:
    """Flat or nested: the layers are Qwen3's, with the sizes of a Llama or a Qwen3."""
    raw = make_config().to_hf("float32")
    for flat in (False, True):
        for kind, known in (("qwen3", True), ("llama", True), ("gemma4", False)):
            layer = raw["transformer_layer_config"] | {"model_type": kind}
            both = (
                zlab(raw | {"transformer_layer_config": layer}) if flat else raw | {"transformer_layer_config": layer}
            )
            if known:
                assert DFlashConfig.from_hf(both).layer == make_config().layer
            else:
                with pytest.raises(CheckpointError, match="layer of type 'gemma4' is not supported; choices"):
                    DFlashConfig.from_hf(both)


def test_places_of_settings_that_are_refused(tmp_path: Path) -> None:
    save_dflash_head(make_head(2, torch.float32, **KINDS["sliding"]), tmp_path, torch.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, said in (
        ({"use_sliding_window": False}, "layer_types has sliding layers, but use_sliding_window is not true"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights quantised by 'awq' are not supported"),
        ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters for each kind of layer are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_scaling": {"rope_type": "odd"}}, "rope type 'odd' is not supported"),
    ):
        layer = raw["transformer_layer_config"] | change
        with pytest.raises(CheckpointError, match=said):
            DFlashConfig.from_hf(raw | {"transformer_layer_config": layer})
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding.pt is not supported"):
        load_dflash_head(tmp_path)
