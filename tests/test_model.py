"""Llama against transformers: the same logits, densely and through the paged cache, over every option."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly.cache import PagedKVCache
from fly.models import DenseCausal, Llama, LlamaConfig, RopeScaling, save_model
from fly.models.families import FAMILIES, FULL, SLIDING
from fly.models.llama import rotary_frequencies, rotate
from tests.toys import build_llama, dense_logits, llama_configs, random_llama
from tests.twins import Twin, assert_within

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MAX_POSITIONS = 64
seeds = st.integers(0, 2**32 - 1)

# One of each kind that random draws combine, in one configuration each.
GROUPED_LLAMA3 = LlamaConfig(
    vocab_size=29,
    hidden_size=18,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=MAX_POSITIONS,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    tie_word_embeddings=True,
    attention_bias=True,
    mlp_bias=True,
)


def transformers_config(config: LlamaConfig, layout: str) -> dict[str, Any]:
    """Our ``config.json``, with the rotary settings as transformers 4 or 5 (``rope_parameters``) lays them out."""
    raw = config.to_hf("float32", pad_token_id=None)  # that of Phi-3 is beyond a small vocabulary
    if layout == "rope_parameters":
        scaling = raw.pop("rope_scaling") or {"rope_type": "default"}
        raw["rope_parameters"] = {**scaling, "rope_theta": raw.pop("rope_theta")}
        if (local := raw.pop("rope_local_base_freq", None)) is not None:
            sliding = {"rope_type": "default", "rope_theta": local}
            raw["rope_parameters"] = {"full_attention": raw["rope_parameters"], "sliding_attention": sliding}
    return raw


def hf_config(raw: dict[str, Any]) -> Any:
    """What transformers makes of a ``config.json``."""
    return transformers.AutoConfig.for_model(**raw)


def transformers_twin(model: Llama, layout: str = "rope_scaling") -> Any:
    """The checkpoint ``save_model`` writes, loaded by transformers with its own plain attention."""
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, directory, torch.float32)
        twin, report = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            config=hf_config(transformers_config(model.config, layout)),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    assert not any(report.values()), report  # no tensor missing, surplus or misshapen
    return twin.eval()


@torch.no_grad()
def twin_logits(twin: Any, tokens: Sequence[int]) -> Tensor:
    return twin(torch.tensor([tokens])).logits[0]


def assert_same(ours: Tensor, theirs: Tensor, model: Llama, tokens: Sequence[int]) -> None:
    """Both are the model in float64, as far as rounding allows; transformers has rotary angles of its own."""
    draw = partial(Twin(model, angles=True).logits, tokens)
    draws_DTV = draw()
    assert_within(ours, draw, draws_DTV)
    assert_within(theirs, draw, draws_DTV)


@st.composite
def prompts(draw: st.DrawFn, vocab_size: int, most: int = MAX_POSITIONS) -> list[int]:
    return draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=most))


@settings(max_examples=12)
@given(layout=st.sampled_from(["rope_scaling", "rope_parameters"]), seed=seeds, data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_gives_the_logits_of_transformers(family: str, layout: str, seed: int, data: st.DataObject) -> None:
    config = data.draw(llama_configs(MAX_POSITIONS, [FAMILIES[family]]))
    model = build_llama(config, seed)
    tokens = data.draw(prompts(config.vocab_size))
    ours = dense_logits(model, tokens)
    assert ours.dtype == torch.float32 and ours.shape == (len(tokens), config.vocab_size)
    assert_same(ours, twin_logits(transformers_twin(model, layout), tokens), model, tokens)


@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    "scaling", [RopeScaling(), RopeScaling(rope_type="linear", factor=4.0), GROUPED_LLAMA3.rope_scaling]
)
def test_both_config_layouts_say_the_same(scaling: RopeScaling, theta: float, layout: str) -> None:
    config = GROUPED_LLAMA3.model_copy(update={"rope_scaling": scaling, "rope_theta": theta})
    raw = transformers_config(config, layout)
    read = LlamaConfig.from_hf(raw)
    assert read.model_dump(exclude={"rope_scaling"}) == config.model_dump(exclude={"rope_scaling"})
    assert torch.equal(rotary_frequencies(read), rotary_frequencies(config))
    # what transformers makes of the same dictionary, written in whichever layout it prefers
    assert LlamaConfig.from_hf(hf_config(raw).to_dict() | {"architectures": raw["architectures"]}) == (read)


def test_the_older_name_of_the_rope_type_is_read() -> None:
    raw = GROUPED_LLAMA3.to_hf() | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert LlamaConfig.from_hf(raw).rope_scaling == RopeScaling(rope_type="linear", factor=2.0)


def crowd(cache: PagedKVCache, keep: Collection[int]) -> None:
    """Others own the pages ``keep`` of the empty ``cache``, so that what is free lies scattered between them."""
    for page in range(cache.allocator.num_blocks):  # each page its own owner ...
        cache.resize(("crowd", page), cache.allocator.block_size)
    owners = {owner: cache.allocator.table(owner)[0] for owner in cache.allocator.sequences()}
    for owner, page in owners.items():  # ... and all but the crowd go
        if page not in keep:
            cache.allocator.release(owner)
    cache.keys.fill_(1e4)  # whatever is read without having been written shows
    cache.values.fill_(-1e4)


@st.composite
def crowded_caches(draw: st.DrawFn, config: LlamaConfig, tokens: int, rows: int) -> PagedKVCache:
    """A cache with just the room for ``rows`` sequences of ``tokens`` tokens between other owners' pages."""
    size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 100]))
    others = draw(st.integers(0, 12))
    cache = PagedKVCache(config, rows * -(-tokens // size) + others, size)
    pages = st.integers(0, cache.allocator.num_blocks - 1)
    crowd(cache, draw(st.sets(pages, min_size=others, max_size=others)))
    return cache


@settings(max_examples=60)
@example(config=GROUPED_LLAMA3, seed=1, data=None)
@given(llama_configs(MAX_POSITIONS), seeds, st.data())
def test_cached_chunks_give_the_logits_of_transformers(
    config: LlamaConfig, seed: int, data: st.DataObject | None
) -> None:
    """Any prompts, chunked anyhow, packed anyhow, with drafts fed and rolled back in between."""
    if data is None:  # the one example that is always run: no two free pages are neighbours
        model, cache = build_llama(config, seed), PagedKVCache(config, 14, 3)
        crowd(cache, range(0, 14, 2))
        sequences = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8]]
        steps = [[(0, 4, 0), (1, 2, 3)], [(1, 3, 0)], [(0, 5, 0), (1, 3, 0)]]
    else:
        model = build_llama(config, seed)
        sequences = data.draw(st.lists(prompts(config.vocab_size, 20), min_size=1, max_size=3))
        steps = None
        cache = data.draw(crowded_caches(config, 24, len(sequences)))
    twin = transformers_twin(model)
    names = ["x", "y", "z"][: len(sequences)]
    done = [0] * len(sequences)
    ours: list[list[Tensor]] = [[] for _ in sequences]
    while any(n < len(tokens) for n, tokens in zip(done, sequences)):
        if steps is not None:
            step = steps.pop(0)
        else:
            assert data is not None
            waiting = [b for b, tokens in enumerate(sequences) if done[b] < len(tokens)]
            picked = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
            step = [
                (b, data.draw(st.integers(1, len(sequences[b]) - done[b])), data.draw(st.integers(0, 4)))
                for b in picked
            ]
        packed, positions, counts = [], [], []
        for b, count, junk in step:
            new = sequences[b][done[b] : done[b] + count] + [config.vocab_size - 1] * junk
            packed += new
            positions += range(done[b], done[b] + len(new))
            counts.append(len(new))
            cache.resize(names[b], done[b] + len(new))
        kv = cache.batch([names[b] for b, _, _ in step], [done[b] for b, _, _ in step], counts)
        logits = model.logits(model(torch.tensor(packed), torch.tensor(positions), kv))
        for (b, count, _), part in zip(step, logits.split(counts)):
            ours[b].append(part[:count])
            done[b] += count
            cache.resize(names[b], done[b])  # rejected: the junk goes
    for tokens, parts in zip(sequences, ours):
        assert_same(torch.cat(parts), twin_logits(twin, tokens), model, tokens)


@settings(max_examples=40)
@given(llama_configs(MAX_POSITIONS), seeds, st.data())
def test_a_row_alone_is_the_row_in_a_packed_batch(config: LlamaConfig, seed: int, data: st.DataObject) -> None:
    model = build_llama(config, seed)
    rows = data.draw(st.lists(prompts(config.vocab_size, 12), min_size=2, max_size=4))
    cache = PagedKVCache(config, 40, 4)
    for b, tokens in enumerate(rows):
        cache.resize(b, len(tokens))
    counts = [len(tokens) for tokens in rows]
    kv = cache.batch(range(len(rows)), [0] * len(rows), counts)
    hidden = model(
        torch.tensor([token for tokens in rows for token in tokens]), torch.cat([torch.arange(n) for n in counts]), kv
    )
    for tokens, part in zip(rows, model.logits(hidden).split(counts)):
        assert_within(part, partial(Twin(model).logits, tokens))


def test_dense_causal_keeps_its_sequences_apart() -> None:
    model = random_llama(3)
    first, second = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([9, 8, 7, 6, 5])
    hidden = model(torch.cat([first, second]), torch.arange(5).repeat(2), DenseCausal(2, 5))
    both = model.logits(hidden).split(5)
    for tokens, part in zip((first, second), both):
        torch.testing.assert_close(part, dense_logits(model, tokens), atol=2e-5, rtol=0)


# --- rotary embedding ------------------------------------------------------------------------------------


@given(llama_configs(MAX_POSITIONS))
def test_rotary_tables_are_those_of_transformers(config: LlamaConfig) -> None:
    model = transformers.AutoModelForCausalLM.from_config(hf_config(transformers_config(config, "rope_scaling")))
    places, half = torch.arange(MAX_POSITIONS), config.head_dim // 2
    for (ours_cos, ours_sin), kind in zip(build_llama(config).rotary(), [FULL, SLIDING]):
        if len(config.ropes) > 1 and kind not in (config.layer_types or ()):
            continue  # transformers has tables of the layers that are there
        kinds = (kind,) if len(config.ropes) > 1 else ()
        cos, sin = model.model.rotary_emb(torch.zeros(1), places.unsqueeze(0), *kinds)
        torch.testing.assert_close(ours_cos[places, 0], cos[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(ours_sin[places, 0, half:], sin[0, :, half:], atol=2e-5, rtol=0)
        torch.testing.assert_close(ours_sin[places, 0, :half], -sin[0, :, :half], atol=2e-5, rtol=0)


@given(llama_configs(MAX_POSITIONS), seeds, st.integers(0, MAX_POSITIONS - 1))
def test_rotation_turns_pairs_of_halves_in_the_complex_plane(config: LlamaConfig, seed: int, position: int) -> None:
    x = torch.randn(3, config.head_dim, generator=torch.Generator().manual_seed(seed)).double()
    half = config.head_dim // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angle = position * rotary_frequencies(config).double()
    turned = pairs * torch.polar(torch.full_like(angle, config.rope_scaling.table_scale), angle)
    cos, sin = build_llama(config).rotary()[0]
    ours = rotate(x[None].float(), cos[[position]], sin[[position]])[0]
    torch.testing.assert_close(ours.double(), torch.cat([turned.real, turned.imag], -1), atol=5e-5, rtol=0)


@given(
    st.sampled_from([16, 8192]), st.sampled_from([2.0, 8.0]), st.sampled_from([1.0, 2.0]), st.sampled_from([1e4, 5e5])
)
def test_llama3_scaling_stretches_long_waves_only(original: int, factor: float, low: float, theta: float) -> None:
    scaling = RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=4 * low,
        original_max_position_embeddings=original,
    )
    sizes = GROUPED_LLAMA3.model_dump() | {"head_dim": 64, "rope_theta": theta, "rope_scaling": scaling}
    scaled = rotary_frequencies(LlamaConfig(**sizes))
    plain = rotary_frequencies(LlamaConfig(**sizes | {"rope_scaling": RopeScaling()}))
    wavelength = 2 * torch.pi / plain
    short, long = wavelength < original / (4 * low), wavelength > original / low
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / factor)
    between = ~short & ~long
    assert (scaled[between] <= plain[between]).all() and (scaled[between] >= plain[between] / factor * 0.9999).all()
    assert (scaled.diff() < 0).all()  # stretched, never reordered


def test_tables_follow_the_dtype_and_are_never_saved() -> None:
    model = random_llama(0)
    saved = set(model.state_dict())
    assert model.rotary()[0][0].dtype == torch.float32
    assert model.rotary() is model.rotary()  # built once
    model.to(torch.bfloat16)
    ((cos, sin),) = model.rotary()
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert set(model.state_dict()) == saved and not any("rotary" in key for key in saved)


def test_a_position_beyond_the_context_is_an_error() -> None:
    model = random_llama(0, max_positions=8)
    with pytest.raises(IndexError):
        model(torch.tensor([1]), torch.tensor([8]), DenseCausal(1, 1))


# --- the module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_whatever_the_weights(dtype: torch.dtype) -> None:
    model = random_llama(5)
    exact = dense_logits(model, [1, 2, 3])
    half = dense_logits(model.to(dtype), [1, 2, 3])
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, atol=0.3, rtol=0)
    assert not torch.equal(half, exact)


def test_tied_embeddings_are_one_tensor() -> None:
    tied, untied = random_llama(0, tied=True), random_llama(0)
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 37 * 32


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"head_dim": None, "hidden_size": 20}, "hidden_size 20"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LlamaConfig(**GROUPED_LLAMA3.model_dump() | change)


def test_head_width_and_key_heads_follow_when_not_stated() -> None:
    raw = GROUPED_LLAMA3.model_dump() | {"head_dim": None, "num_key_value_heads": None, "hidden_size": 48}
    config = LlamaConfig(**raw)
    assert (config.head_dim, config.num_key_value_heads) == (8, 6)
