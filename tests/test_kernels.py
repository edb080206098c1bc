"""The compiled kernels against the PyTorch model, and against themselves: one text, one result, however it is fed.

Skipped as a whole where the library was not built, save what must hold then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fly import LLM, SamplingParams
from fly.backends import choice, executor_of, load_executor
from fly.backends.cpu import CpuExecutor, PackedLlama, available, chosen, int8_weights, library, why_not
from fly.backends.cpu.blocks import eight_bits
from fly.backends.cpu.host import HostDistribution, top_at
from fly.backends.cpu.host import uniforms as host_uniforms
from fly.backends.cpu.packed import pool_threads
from fly.backends.torch import TorchExecutor
from fly.bench.shapes import random_model, shape_config
from fly.cache import PagedBatch, PagedKVCache
from fly.drafts import NGramDraft, SingleDraft, SuffixDraft
from fly.models import DenseCausal, Llama, LlamaConfig, save_model
from fly.models.families import OPTIONS
from fly.models.loading import Loading
from fly.ops import Stream, argmax, draw, tree_mask, uniforms
from fly.policies import Exact, FLy
from fly.runtime.executor import Batch, DraftSpec, Executor, Lookup, TokenByToken
from fly.runtime.request import Sequence
from fly.runtime.sampling import BatchSampling
from tests.blocked import decoded, in_groups, rounded_to_w4a8
from tests.test_ops import values
from tests.toys import PLAIN, build_llama, dense_logits, llama_configs, random_llama, ready

VARIANTS = [name for name in available() if name != "torch"]
INT8, W8A8, W4A8 = ([f"{name}-{kind}" for name in VARIANTS] for kind in ("int8", "w8a8", "w4a8"))
NARROW = [*INT8, *W8A8, *W4A8]
built = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")
DTYPES = [torch.float32, torch.bfloat16]

# Widths that are no multiple of a vector or a panel, and more of each than one block holds.
WIDE = LlamaConfig(
    vocab_size=101,
    hidden_size=72,
    intermediate_size=90,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=40,
    max_position_embeddings=640,
    attention_bias=True,
    mlp_bias=True,
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def paged(
    model: Llama | PackedLlama,
    rows: list[Tensor],
    cuts: list[list[int]],
    *,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 4,
    scatter: int = 0,
) -> list[Tensor]:
    """Logits of each row's every token, fed side by side: the n-th call takes ``cuts[b][n]`` tokens of row b, as far as
    it has as many cuts. ``scatter`` mixes up the pages."""
    total = sum(-(-len(row) // block_size) + 1 for row in rows)
    cache = PagedKVCache(model.config, 2 * total + scatter, block_size, cache_dtype or model.dtype)
    for hole in range(scatter):  # every other page is somebody else's
        cache.resize(f"hole {hole}", block_size)
    for hole in range(0, scatter, 2):
        cache.allocator.release(f"hole {hole}")
    at = [0] * len(rows)
    parts: list[list[Tensor]] = [[] for _ in rows]
    for n in range(max(map(len, cuts))):
        live = [b for b in range(len(rows)) if n < len(cuts[b])]
        counts = [cuts[b][n] for b in live]
        for b, count in zip(live, counts):
            cache.resize(b, at[b] + count)
        kv = cache.batch(live, [at[b] for b in live], counts)
        tokens_T = torch.cat([rows[b][at[b] : at[b] + count] for b, count in zip(live, counts)])
        positions_T = torch.cat([torch.arange(at[b], at[b] + count) for b, count in zip(live, counts)])
        logits_TV = model.logits(model(tokens_T, positions_T, kv))
        for b, part in zip(live, logits_TV.split(counts)):
            parts[b].append(part)
            at[b] += len(part)
    return [torch.cat(part) for part in parts]


def rounded_to_int8(model: Llama) -> Llama:
    """A copy whose matrices (and the embedding that one of them is) are what int8 weights stand for."""
    twin = deepcopy(model)
    with torch.no_grad():
        for linear in (module for module in twin.modules() if isinstance(module, nn.Linear)):
            whole_NK, scale_N = int8_weights(linear.weight)
            linear.weight.copy_(whole_NK * scale_N.unsqueeze(1))
    return twin


def whole_steps(values_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of activations in whole steps, and what its step is, as float32 [T, K] and [T, 1]."""
    values_TK = values_TK.float()
    peak_T1 = values_TK.abs().amax(-1, keepdim=True)
    inverse_T1 = torch.where(peak_T1 > 0, torch.full_like(peak_T1, 127) / peak_T1, 0)  # 127 / x rounds twice in PyTorch
    return (values_TK * inverse_T1).round(), peak_T1 / 127


def rounded_to_w8a8(model: Llama, stored: torch.dtype) -> Llama:
    """A copy whose weights are those, and in which what a matrix takes, ``stored`` as such, is rounded as well."""

    def narrowed(linear: nn.Module, taken: tuple[Tensor]) -> tuple[Tensor]:
        whole_TK, step_T1 = whole_steps(taken[0].to(stored))
        return ((whole_TK * step_T1).to(taken[0].dtype),)

    twin = rounded_to_int8(model)
    for linear in (module for module in twin.modules() if isinstance(module, nn.Linear)):
        linear.register_forward_pre_hook(narrowed)
    return twin


@st.composite
def cut(draw: st.DrawFn, length: int, most: int = 40) -> list[int]:
    """A length as a sum of parts."""
    parts = []
    while length:
        parts.append(draw(st.integers(1, min(length, most))))
        length -= parts[-1]
    return parts


def text(length: int, seed: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, dtype: torch.dtype, slack: float = 1.0, unrounded: Tensor | None = None) -> None:
    """``unrounded``: logits without rounding on the way, by which ill-conditioned models are told."""
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    else:  # both round to 8 bits at other places: what differs is small beside what varies
        error, spread = (got - want).square().mean().sqrt(), want.std(unbiased=False) + want.abs().mean()
        own = 0.0 if unrounded is None else float((want - unrounded).square().mean().sqrt())
        assert float(error) < slack * 0.1 * float(spread) + 4 * own + 1e-3


@built
@given(data=st.data(), config=llama_configs(families=PLAIN), seed=st.integers(0, 5))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_function_of_the_pytorch_model(
    variant: str, dtype: torch.dtype, data: st.DataObject, config: LlamaConfig, seed: int
) -> None:
    """Over widths, grouping, biases, ties, rope types, vocabularies, page sizes, page layouts and cuts."""
    reference = build_llama(config, seed, scale=0.3 if dtype == torch.float32 else 0.1).to(dtype)
    rows = [text(data.draw(st.integers(1, 40)), b, config.vocab_size) for b in range(data.draw(st.integers(1, 3)))]
    cuts = [data.draw(cut(len(row))) for row in rows]
    got = paged(
        PackedLlama(reference, variant),
        rows,
        cuts,
        block_size=data.draw(st.sampled_from([1, 3, 4, 16])),
        scatter=data.draw(st.sampled_from([0, 9])),
    )
    unrounded = deepcopy(reference).float()
    for row, logits in zip(rows, got):
        close(logits, dense_logits(reference, row), dtype, unrounded=dense_logits(unrounded, row))


GRANITE = LlamaConfig(
    family="granite",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-3,
    embedding_multiplier=12.0,
    attention_multiplier=0.2,
    residual_multiplier=0.22,
    logits_scaling=6.0,
)


@built
@pytest.mark.parametrize("variant", [*VARIANTS, *NARROW])
def test_multipliers_are_those_of_the_pytorch_model(variant: str) -> None:
    """The kernels hold the residual stream divided, which its hidden states would show: it gives none."""
    reference = build_llama(GRANITE, 3, scale=0.1)
    model, row = PackedLlama(reference, variant), text(30, 0, 40)
    (logits,) = paged(model, [row], [[30]], block_size=4, scatter=0)
    close(logits, dense_logits(reference, row), torch.float32 if variant in VARIANTS else torch.bfloat16)
    torch.testing.assert_close(
        model.embedding(), reference.embed_tokens.weight, rtol=0.02, atol=1e-4 if variant in VARIANTS else 2e-3
    )
    executor = CpuExecutor(model)
    with pytest.raises(ValueError, match="gives no hidden states"):
        executor.check_states([1])
    assert CpuExecutor(PackedLlama(random_llama(), variant)).gives_states


@built
def test_other_norms_are_refused_by_name_and_run_on_pytorch(tmp_path: Path) -> None:
    config = (
        GRANITE.model_dump() | {name: LlamaConfig.model_fields[name].default for name in OPTIONS} | {"family": "olmo2"}
    )
    save_model(build_llama(LlamaConfig.model_validate(config)), tmp_path, torch.float32)
    with pytest.raises(ValueError, match=r"kernels 'w8a8'.*know nothing of the norms of the family 'olmo2'"):
        load_executor(tmp_path, kernels="w8a8")
    assert load_executor(tmp_path).kernels == "torch"
    assert LLM(tmp_path, NGramDraft()).generate([[1, 2]], max_tokens=3)


@built
@given(data=st.data(), config=llama_configs(families=PLAIN), seed=st.integers(0, 5))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", NARROW)
def test_on_narrow_weights_it_is_the_function_of_the_rounded_pytorch_model(
    variant: str, dtype: torch.dtype, data: st.DataObject, config: LlamaConfig, seed: int
) -> None:
    reference = build_llama(config, seed, scale=0.1).to(dtype)
    rows = [text(data.draw(st.integers(1, 40)), b, config.vocab_size) for b in range(data.draw(st.integers(1, 3)))]
    cuts = [data.draw(cut(len(row))) for row in rows]
    model = PackedLlama(reference, variant)
    assert model.kernels == variant and (model.weight_bytes == 1 or variant in W4A8)
    # activations are bfloat16 on AVX-512, whatever the model's dtype, save on avx512 with int8, multiplied as float32
    exact = dtype == torch.float32 and variant in ("avx512-int8", "avx2-int8")
    tolerance = torch.float32 if exact else torch.bfloat16
    stored = torch.float32 if variant.startswith("avx2") else torch.bfloat16
    if variant in INT8:
        twin = rounded_to_int8(reference)
    else:
        twin = (rounded_to_w8a8 if variant in W8A8 else rounded_to_w4a8)(reference, stored)
    for row, logits in zip(rows, paged(model, rows, cuts)):
        # a norm of what was computed makes its rounding larger too
        close(logits, dense_logits(twin, row), tolerance, slack=3.0 if config.traits.query_norm else 2.0)


@given(n=st.integers(1, 140), k=st.integers(1, 9), seed=st.integers(0, 99), scale=st.floats(1e-6, 1e6))
def test_int8_weights_are_the_nearest_of_their_scale(n: int, k: int, seed: int, scale: float) -> None:
    weight_NK = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale
    weight_NK[0] = 0.0
    whole_NK, scale_N = int8_weights(weight_NK)
    assert whole_NK.dtype == torch.int8 and not whole_NK[0].any()
    assert (whole_NK[1:].int().abs().amax(1) == 127).all()
    error_NK = (whole_NK * scale_N.unsqueeze(1) - weight_NK).abs()
    assert (error_NK <= 0.501 * scale_N.unsqueeze(1)).all()


@dataclass(frozen=True)
class Case:
    """A model of one variant and dtype, and the logits of each text fed token by token, alone, on one thread."""

    model: PackedLlama
    rows: list[Tensor]
    alone: list[Tensor]


# Half of the layers see the last 21 tokens only, and whatever a family may have is there.
WINDOWED = LlamaConfig.model_validate(
    WIDE.model_dump()
    | {
        "family": "gemma3_text",
        "mlp_bias": False,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 21,
        "query_pre_attn_scalar": 30,
        "rope_local_base_freq": 100.0,
    }
)

CASES = [(v, d, WIDE) for v in VARIANTS for d in DTYPES] + [(v, torch.bfloat16, WIDE) for v in NARROW]
CASES += [(v, torch.bfloat16, WINDOWED) for v in [*VARIANTS, *NARROW]]


@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0]}-{p[1]}-{p[2].family}")
def case(request: pytest.FixtureRequest) -> Case:
    variant, dtype, config = request.param
    model = PackedLlama(build_llama(config).to(dtype), variant)
    rows = [text(length, seed, WIDE.vocab_size) for seed, length in enumerate((1, 30, 75, 333))]
    return Case(model, rows, [paged(model, [row], [[1] * len(row)])[0] for row in rows])


@built
@settings(max_examples=25)
@given(data=st.data())
def test_a_rows_bits_depend_on_nothing_but_its_tokens(case: Case, data: st.DataObject) -> None:
    """Alone or among others, all at once or in pieces of any length, wherever its pages lie, on any threads."""
    chosen_rows = data.draw(st.lists(st.integers(0, len(case.rows) - 1), min_size=1, max_size=4, unique=True))
    rows = [case.rows[b] for b in chosen_rows]
    cuts = [data.draw(cut(len(row), most=400)) for row in rows]
    threads = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    try:
        got = paged(case.model, rows, cuts, block_size=data.draw(st.sampled_from([1, 4, 16])), scatter=7)
    finally:
        torch.set_num_threads(threads)
    for b, logits in zip(chosen_rows, got):
        assert same_bits(logits, case.alone[b])


@built
@pytest.mark.parametrize("count", [*range(1, 34), 64, 257])
def test_no_number_of_rows_changes_a_product(case: Case, count: int) -> None:
    config = case.model.config
    hidden_TC = torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(case.model.dtype)
    together = case.model.logits(hidden_TC)
    assert same_bits(together, torch.cat([case.model.logits(row.unsqueeze(0)) for row in hidden_TC]))
    weight_VC = build_llama(config).to(case.model.dtype).lm_head.weight
    if case.model.kernels in W4A8:
        weight_VC, hidden_TC = decoded(eight_bits(weight_VC), "Q8_0", config.hidden_size), in_groups(hidden_TC)
    elif case.model.kernels in NARROW:
        whole_VC, scale_V = int8_weights(weight_VC)
        weight_VC = whole_VC * scale_V.unsqueeze(1)
    if case.model.kernels in W8A8:
        whole_TC, step_T1 = whole_steps(hidden_TC)
        hidden_TC = whole_TC * step_T1
    torch.testing.assert_close(together, hidden_TC.double().mm(weight_VC.T.double()).float(), rtol=1e-4, atol=1e-4)


BROAD = LlamaConfig(  # its matrices take long enough to be shared out as threads go
    vocab_size=2100,
    hidden_size=512,
    intermediate_size=1100,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=64,
)


@built
@pytest.mark.parametrize("variant", [*VARIANTS, *NARROW])
def test_threads_that_share_out_a_product_as_they_go_change_no_bit(variant: str) -> None:
    model, row = PackedLlama(build_llama(BROAD).to(torch.bfloat16), variant), text(40, 0, BROAD.vocab_size)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = paged(model, [row], [[1] * len(row)])
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            for cuts in ([1] * 40, [2, 3, 4, 5, 8, 16, 2], [40]):
                (together,) = paged(model, [row], [cuts])
                assert same_bits(together, alone), (count, cuts)
    finally:
        torch.set_num_threads(threads)


@built
@settings(max_examples=25)
@given(data=st.data())
def test_a_token_of_a_tree_has_the_bits_of_its_path_alone(case: Case, data: st.DataObject) -> None:
    model, before = case.model, data.draw(st.integers(1, 40))
    row = case.rows[3][:before]
    size = data.draw(st.integers(1, 20))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = [data.draw(st.integers(0, WIDE.vocab_size - 1)) for _ in range(size)]
    depth = {-1: -1}
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    start = data.draw(st.integers(0, before - 1))  # tokens that are stored before
    cache = PagedKVCache(model.config, 40, 4, model.dtype)
    cache.resize(0, before + size)
    if start:
        model(row[:start], torch.arange(start), cache.batch([0], [0], [start]))
    fed_T = torch.cat([row[start:], torch.tensor(tokens)])
    at_T = torch.tensor([*range(start, before), *(before + depth[node] for node in range(size))])
    mask = tree_mask(start, before, parents)
    kv = cache.batch([0], [start], [len(fed_T)], [mask])
    hidden_TC = model(fed_T, at_T, kv)
    logits_TV = model.logits(hidden_TC)
    batch = Batch(fed_T.tolist(), at_T.tolist(), kv)
    assert same_bits(TokenByToken(CpuExecutor(model)).score(batch).logits_NV, logits_TV)  # masks of their own each
    for node in range(size):
        path, at = [], node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        whole = torch.cat([row, torch.tensor(path)])
        assert same_bits(logits_TV[before - start + node], paged(model, [whole], [[len(whole)]])[0][-1])


@built
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_the_cache_may_be_of_another_dtype(variant: str, model_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    reference = build_llama(WIDE, scale=0.1).to(model_dtype)
    row = text(50, 3, WIDE.vocab_size)
    (got,) = paged(PackedLlama(reference, variant), [row], [[20, 1, 29]], cache_dtype=cache_dtype)
    close(got, dense_logits(reference, row), torch.bfloat16)


@built
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 96, 104, 128])
@pytest.mark.parametrize("heads, groups", [(3, 1), (8, 4), (7, 1), (33, 1)])
def test_no_number_of_queries_changes_an_attention(
    variant: str, cache_dtype: torch.dtype, head_dim: int, heads: int, groups: int
) -> None:
    """Those of a head may share what they read; heads of all widths, in either type of cache."""
    config = WIDE.model_copy(update={"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": groups})
    model = PackedLlama(build_llama(config), variant)
    row = text(90, 5, config.vocab_size)
    (alone,) = paged(model, [row], [[1] * 90], cache_dtype=cache_dtype)
    for cuts in ([90], [40, 2, 16, 5, 27], [1, 3, 86]):
        (together,) = paged(model, [row], [cuts], cache_dtype=cache_dtype)
        assert same_bits(together, alone)


GREEDY = SamplingParams(temperature=0.0)

sampled = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.5, 1e-30, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.87, 0.53, 0.01]),  # no sum of equal shares, which rounding would decide
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)


def make_row(
    tokens: list[int], stop_ids: frozenset[int] = frozenset(), params: SamplingParams = GREEDY, seed: int = 0
) -> Sequence:
    return Sequence(tokens, len(tokens), params, Exact(), seed=seed, k=8, stop_ids=stop_ids)


def stepwise(model: CpuExecutor) -> Executor:
    """The same model without the call that drafts at once."""
    return TorchExecutor(model.packed)


@built
@settings(max_examples=30)
@given(data=st.data(), config=llama_configs(families=PLAIN))
@pytest.mark.parametrize("variant", [*VARIANTS, *NARROW])
def test_a_forward_with_its_logits_is_the_two_calls(variant: str, data: st.DataObject, config: LlamaConfig) -> None:
    """Bit for bit, of all tokens or some of them, some of them more than once; and the lowest of the likeliest."""
    model = PackedLlama(build_llama(config, 1, scale=0.1).to(data.draw(st.sampled_from(DTYPES))), variant)
    counts = [data.draw(st.integers(1, 40)) for _ in range(data.draw(st.integers(1, 3)))]
    tokens = torch.cat([text(count, b, config.vocab_size) for b, count in enumerate(counts)])
    positions = torch.cat([torch.arange(count) for count in counts])
    kept = data.draw(st.none() | st.lists(st.integers(0, len(tokens) - 1), max_size=300))
    which = list(range(len(tokens))) if kept is None else kept

    def batch() -> PagedBatch:
        cache = PagedKVCache(config, sum(counts), 4, model.dtype)
        for b, count in enumerate(counts):
            cache.resize(b, count)
        return cache.batch(list(range(len(counts))), [0] * len(counts), counts)

    logits, choices, *_ = CpuExecutor(model).score(Batch(tokens.tolist(), positions.tolist(), batch()), kept)
    assert same_bits(logits, model.logits(model(tokens, positions, batch())[which]))
    assert choices == argmax(logits).tolist()


@built
@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafting_at_once_is_drafting_step_by_step(variant: str, data: st.DataObject) -> None:
    """Tokens, and all that is cached of every row, over rounds in which some of each draft stands."""
    vocab, rows_n = 11, data.draw(st.integers(1, 4))  # few tokens, so that stop ids come up
    dtype = data.draw(st.sampled_from(DTYPES))
    model = executor_of(random_llama(data.draw(st.integers(0, 9)), vocab_size=vocab).to(dtype), variant)
    stops = [frozenset(data.draw(st.sets(st.integers(0, vocab - 1), max_size=2))) for _ in range(rows_n)]
    prompts = [text(data.draw(st.integers(1, 40)), b, vocab).tolist() for b in range(rows_n)]
    drawn = st.lists(st.one_of(st.just(GREEDY), sampled), min_size=rows_n, max_size=rows_n)
    every_params = [GREEDY] * rows_n if data.draw(st.booleans()) else data.draw(drawn)
    seeds = [data.draw(st.integers(0, 2**62)) for _ in range(rows_n)]
    rows = [make_row(*row) for row in zip(prompts, stops, every_params, seeds)]
    tokens = data.draw(st.sampled_from([48, 96, 400]))
    stop = {
        "confidence": data.draw(st.sampled_from([0.0, 0.0, 0.313, 0.571, 0.99])),
        "reach": data.draw(st.sampled_from([0.0, 0.0, 0.117, 0.517])),
    }
    fast, slow = (
        ready(SingleDraft(some, cache_tokens=tokens, block_size=4, **stop))  # type: ignore[arg-type]
        for some in (model, stepwise(model))
    )
    if tokens == 400 and data.draw(st.booleans()):  # with room, a lookup changes nothing
        fast = ready(
            SingleDraft(model, NGramDraft(data.draw(st.integers(1, 5)), 1, data.draw(st.integers(1, 9))), **stop)
        )
    for _ in range(data.draw(st.integers(1, 4))):
        most = [data.draw(st.integers(0, 9)) for _ in rows]
        outcomes, distributions = [], []
        for strategy in (fast, slow):
            try:
                draft = strategy.propose(rows, most)
                outcomes.append((draft.tokens_BK.tolist(), draft.lengths_B.tolist()))
                distributions.append(None if draft.probs_BKV is None else draft.probs_BKV[draft.mask_BK()])
            except RuntimeError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
        if distributions and distributions[0] is None:
            assert distributions[1] is None
        elif distributions:
            torch.testing.assert_close(distributions[0], distributions[1], rtol=2e-5, atol=1e-7)
        if isinstance(outcomes[0], type):
            return
        caches = [{row.id: strategy.runner._cached.get(row.id) for row in rows} for strategy in (fast, slow)]
        assert caches[0] == caches[1]
        lengths = [[strategy.runner.cache.allocator.length(row.id) for row in rows] for strategy in (fast, slow)]
        assert lengths[0] == lengths[1]
        drafted, counts = outcomes[0]
        for row, new, n in zip(rows, drafted, counts):
            row.tokens += new[: data.draw(st.integers(0, n))] + [data.draw(st.integers(0, vocab - 1))]
        for strategy in (fast, slow):
            strategy.commit(rows)


@built
@given(data=st.data())
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_distribution_drawn_from_is_the_processed_distribution(variant: str, data: st.DataObject) -> None:
    """Of any vocabulary, with ties and far logits; and the token is what that distribution and the uniform number
    give."""
    vocab = data.draw(st.sampled_from([2, 11, 32, 33, 100]))
    reference = random_llama(data.draw(st.integers(0, 9)), vocab_size=vocab)
    with torch.no_grad():
        weight = reference.lm_head.weight
        weight.copy_(
            weight[torch.arange(vocab) % data.draw(st.integers(1, vocab))] * data.draw(st.sampled_from([1, 40]))
        )
    model, params = PackedLlama(reference, variant), data.draw(sampled)
    cache = PagedKVCache.for_model(model, 16)
    cache.resize(0, 1)
    tokens_T, positions_T, kv = torch.tensor([1]), torch.tensor([0]), cache.batch([0], [0], [1])
    sampling, seed = BatchSampling.of([params]), data.draw(st.integers(-(2**63), 2**63 - 1))
    uniform_BK = uniforms(torch.tensor([seed]), torch.tensor([1]), Stream.SAMPLE, 1)
    row = make_row([1], params=params)
    drafted, probs_BKV, *_ = CpuExecutor(model).extend(Batch([1], [0], kv), DraftSpec(), [row], [1], sampling, [seed])
    wanted_BKV = sampling.probs(model.logits(model(tokens_T, positions_T, kv)).unsqueeze(0))
    assert probs_BKV is not None
    torch.testing.assert_close(probs_BKV, wanted_BKV, rtol=2e-5, atol=1e-7)
    assert drafted == draw(probs_BKV[:, 0], uniform_BK[:, 0]).unsqueeze(0).tolist()


def fresh_cache(model: PackedLlama, prompts: list[list[int]], starts: list[int], room: int) -> PagedKVCache:
    """With the first ``starts[b]`` tokens of each prompt stored, and room for so many more than the prompts."""
    cache = PagedKVCache(model.config, sum((len(p) + room) // 4 + 1 for p in prompts), 4, model.dtype)
    for b, (prompt, start) in enumerate(zip(prompts, starts)):
        cache.resize(b, start)
        if start:
            model(torch.tensor(prompt[:start]), torch.arange(start), cache.batch([b], [0], [start]))
        cache.resize(b, len(prompt) + room)
    return cache


def drafted_by(
    executor: CpuExecutor,
    prompts: list[list[int]],
    starts: list[int],
    most: list[int],
    lookup: Lookup | None,
    stops: list[frozenset[int]] | None = None,
    sampling: BatchSampling | None = None,
    seeds: list[int] | None = None,
) -> tuple[list[list[int]], Tensor | None, list[Tensor]]:
    """What ``extend`` says of prompts whose first tokens are cached, and all keys and values cached then."""
    ids, cache = list(range(len(prompts))), fresh_cache(executor.packed, prompts, starts, max(most))
    new = [prompt[start:] for prompt, start in zip(prompts, starts)]
    batch = Batch.of(new, cache.batch(ids, starts, list(map(len, new))))
    rows = [make_row(prompt, ends) for prompt, ends in zip(prompts, stops or [frozenset()] * len(prompts))]
    drafted, probs_BKV, *_ = executor.extend(batch, DraftSpec(lookup=lookup), rows, most, sampling, seeds or [])
    stored = []
    for b, (prompt, tokens) in enumerate(zip(prompts, drafted)):
        slots = cache.slots(b, 0, len(prompt) + len(tokens) - 1)
        stored += [cache.keys[:, slots], cache.values[:, slots]]
    return drafted, probs_BKV, stored


@built
@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("variant", [*VARIANTS, *INT8[:1], *W8A8[:1], *W4A8[:1]])
def test_a_lookup_changes_nothing_of_what_is_drafted(variant: str, data: st.DataObject) -> None:
    """Tokens, the distributions they were drawn from and all that is stored, bit for bit, however much is copied."""
    vocab, rows_n = data.draw(st.sampled_from([2, 3, 11])), data.draw(st.integers(1, 4))
    dtype = data.draw(st.sampled_from(DTYPES))
    model = executor_of(random_llama(data.draw(st.integers(0, 9)), vocab_size=vocab).to(dtype), variant)
    lengths = st.one_of(st.integers(1, 40), st.integers(1, 40), st.integers(250, 300))  # more than a tile
    prompts = [text(data.draw(lengths), b, vocab).tolist() for b in range(rows_n)]
    starts = [data.draw(st.integers(0, len(prompt) - 1)) for prompt in prompts]
    most = [data.draw(st.integers(1, 20)) for _ in prompts]
    stops = [frozenset(data.draw(st.sets(st.integers(0, vocab - 1), max_size=1))) for _ in prompts]
    sampling, seeds = None, [data.draw(st.integers(0, 2**62)) for _ in prompts]
    if data.draw(st.booleans()):
        sampling = BatchSampling.of([data.draw(st.one_of(st.just(GREEDY), sampled)) for _ in prompts])
    a, b = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    lookup = Lookup(max(a, b), min(a, b), data.draw(st.integers(1, 24)))
    learned = model._c_lookup(lookup)
    for number in range(len(learned.share)):
        learned.share[number] = data.draw(st.sampled_from([1.0, 1.0, 0.8, 0.3]))
    threads = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.integers(1, 2)))
    try:
        wanted = drafted_by(model, prompts, starts, most, None, stops, sampling, seeds)
        for _ in range(2):  # with what was learned of it as well
            got = drafted_by(model, prompts, starts, most, lookup, stops, sampling, seeds)
            assert got[0] == wanted[0]
            assert got[1] is wanted[1] is None or same_bits(got[1], wanted[1])  # type: ignore[arg-type]
            assert all(map(same_bits, got[2], wanted[2]))
    finally:
        torch.set_num_threads(threads)


def naive_lookup(tokens: list[int], longest: int, shortest: int) -> tuple[int, int] | None:
    """The token that followed the latest place of the longest n-gram that ends the text, and how many tokens before
    both are the same."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                while n < end and tokens[end - n - 1] == tokens[-n - 1]:
                    n += 1
                return tokens[end], n
    return None


@built
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_looked_up_is_the_latest_place_of_the_longest_match(data: st.DataObject) -> None:
    """A lookup that copies nothing still sees, by the length of the match, whether the copy would have stood."""
    vocab, seed = data.draw(st.integers(2, 12)), data.draw(st.integers(0, 9))
    model = executor_of(random_llama(seed, vocab_size=vocab), VARIANTS[0])
    prompt = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=200))
    start = data.draw(st.integers(0, len(prompt) - 1))
    a, b = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    lookup = Lookup(max(a, b), min(a, b), 0)
    share = list(model._c_lookup(lookup).share)
    ((drafted,), _, _) = drafted_by(model, [prompt], [start], [9], lookup)
    for number, token in enumerate(drafted):
        if (found := naive_lookup(prompt + drafted[:number], max(a, b), min(a, b))) is not None:
            at = min(found[1], len(share)) - 1
            share[at] += 0.05 * ((found[0] == token) - share[at])
    assert list(model._c_lookup(lookup).share) == pytest.approx(share, abs=1e-6)


@built
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_repetition_is_drafted_in_one_forward(variant: str) -> None:
    """By copies of copies, where as many are thought to stand as are asked for."""
    model = executor_of(random_llama(4, vocab_size=11, layers=1), variant)
    ((rolled,), _, _) = drafted_by(model, [[1, 2, 3]], [0], [60], None)
    one, other = rolled[-2:]
    assert rolled[-20:] == [one, other] * 10 and one != other
    lookup = Lookup(4, 1, 7)
    ((drafted,), _, _) = drafted_by(model, [[1, 2, 3, *rolled[:-8]]], [50], [8], lookup)
    assert drafted == [one, other] * 4
    assert [number + 1 for number, time in enumerate(model._c_lookup(lookup).time) if time] == [5 + 7]


@built
def test_a_level_looks_up_by_itself_where_its_call_cannot() -> None:
    """A constrained row takes the n-gram index, which never heard of the rounds before."""
    model = executor_of(random_llama(4, vocab_size=11, layers=1), VARIANTS[0])
    level, twin = ready(SingleDraft(model, NGramDraft())), ready(SingleDraft(stepwise(model)))
    rows = [make_row([1, 2, 3]), make_row([1, 2, 3])]
    rows[1].params = SamplingParams(temperature=0.0, logit_bias={5: -1.0})
    for number in range(6):
        going = rows[: 1 + number // 2 % 2]
        mine, plain = (strategy.propose(going, [8] * len(going)).chains for strategy in (level, twin))
        assert mine == plain
        for row, tokens in zip(going, mine):
            row.tokens += [*tokens[: 3 + number], number]
        for strategy in (level, twin):
            strategy.commit(going)


@built
def test_what_a_row_draws_does_not_hang_on_the_rows_beside_it() -> None:
    """One of which keeps the level from drafting in one call."""
    model = executor_of(random_llama(4, vocab_size=11, layers=1), VARIANTS[0])
    drawn = SamplingParams(temperature=1.0)
    for seed in range(8):
        alone, beside = (make_row([1, 2, 3, 1, 2, 3], frozenset(), drawn, seed) for _ in range(2))
        other = make_row([4, 5], frozenset(), SamplingParams(temperature=0.0, logit_bias={5: -1.0}), 0)
        one, two = (ready(SingleDraft(model, NGramDraft())) for _ in range(2))
        mine, theirs = one.propose([alone], [8]), two.propose([beside, other], [8, 8])
        assert mine.chains[0] == theirs.chains[0]
        assert mine.probs_BKV is not None and theirs.probs_BKV is not None
        torch.testing.assert_close(theirs.probs_BKV[0], mine.probs_BKV[0], rtol=2e-5, atol=1e-7)


@built
@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.7, 2.0]), st.sampled_from([0, 3]), st.sampled_from([0.6, 1.0])), max_size=4
    ),
)
def test_what_sampling_keeps_does_not_hang_on_the_rows_beside_it(
    seed: int, beside: list[tuple[float, int, float]]
) -> None:
    """To the last bit, greedy rows among them."""
    every = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=0.01) for t, k, p in [(0.9, 0, 0.8), *beside]]
    logits_BJV = 3 * torch.randn(len(every), 2, 301, generator=torch.Generator().manual_seed(seed))
    together, alone = (
        HostDistribution(BatchSampling.of(every), logits_BJV)._find(),
        HostDistribution(BatchSampling.of(every[:1]), logits_BJV[:1])._find(),
    )
    for all_rows, one in zip(together, alone):
        assert all_rows is not None and one is not None and same_bits(all_rows[:1], one)


@built
def test_drafting_at_once_is_used_and_only_where_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    model = executor_of(random_llama(1), VARIANTS[0])
    honest = model.extend
    monkeypatch.setattr(model, "extend", lambda *args, **named: calls.append(1) or honest(*args, **named))
    row = make_row([1, 2, 3])

    def proposes(strategy: SingleDraft, row: Sequence) -> bool:
        calls.clear()
        strategy = ready(strategy)
        strategy.propose([row], [5])
        strategy.release(row)
        return bool(calls)

    assert proposes(SingleDraft(model), row)
    assert proposes(SingleDraft(model, confidence=0.1), row) and proposes(SingleDraft(model, reach=0.1), row)
    other = Sequence([1, 2, 3], 3, SamplingParams(), Exact(), seed=0, k=8, stop_ids=frozenset({4}))
    assert proposes(SingleDraft(model), other)
    assert proposes(SingleDraft(model, draft=NGramDraft()), other)
    assert not proposes(SingleDraft(model, draft=SuffixDraft()), other)
    assert not proposes(SingleDraft(model, draft=type("Own", (NGramDraft,), {})()), other)
    assert not proposes(SingleDraft(model, draft=NGramDraft(), policy=FLy()), row)
    for changed in ({"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"min_tokens": 9}):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **changed})  # type: ignore[arg-type]
        other = Sequence([1, 2, 3], 3, params, Exact(), seed=0, k=8, stop_ids=frozenset({4}))
        assert not model.looks_up([other]) and model.looks_up([row])
        assert not proposes(SingleDraft(model, draft=NGramDraft()), other)


@built
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_drafts_argmax_is_the_lowest_id_among_equals(variant: str) -> None:
    model = random_llama(2, vocab_size=70)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[torch.arange(70) % 35])  # every logit twice
    packed = executor_of(model, variant)
    (draft,) = ready(SingleDraft(packed)).propose([make_row([1, 2, 3])], [8]).tokens_BK.tolist()
    assert len(draft) == 8 and max(draft) < 35


@built
@pytest.mark.parametrize("draft", ["fly-draft", "ngram+fly-draft", "tree(fly-draft)"])
@pytest.mark.parametrize("k", [1, 7])
def test_exact_speculation_is_autoregression_bit_for_bit_in_bfloat16(draft: str, k: int) -> None:
    """Token for token with its log-probability, whatever proposes and in whatever batch."""
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    prompts = ["def add(a, b):", "Tom has 3 apples and", "x"]
    plain, fast = LLM("fly-target", device="cpu"), LLM("fly-target", draft, k=k, device="cpu")
    assert isinstance(plain.engine.runner.executor, CpuExecutor)
    assert plain.engine.runner.executor.dtype == torch.bfloat16
    alone = [plain.generate([prompt], params)[0] for prompt in prompts]
    for wanted, got in zip(alone, fast.generate(prompts, params)):
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == wanted.logprobs


@built
def test_what_is_out_of_range_is_an_index_error_and_writes_nothing() -> None:
    model = PackedLlama(random_llama(0, max_positions=16), VARIANTS[0])
    cache = PagedKVCache(model.config, 2, 16)
    cache.resize(0, 17)
    for token, position in ((37, 0), (-1, 0), (0, 16), (0, -1)):
        with pytest.raises(IndexError, match=r"a token id is .*, not 0 to 36|a position is .*, not 0 to 15"):
            model(torch.tensor([token]), torch.tensor([position]), cache.batch([0], [0], [1]))
    with pytest.raises(IndexError, match="tokens to draft within the context is 3, not 1 to 1"):
        batch = Batch([1], [15], cache.batch([0], [15], [1]))
        CpuExecutor(model).extend(batch, DraftSpec(), [make_row([0] * 16)], [3])
    assert not cache.keys.any() and not cache.values.any()


@built
def test_other_caches_and_models_are_refused() -> None:
    reference = random_llama(0)
    model = PackedLlama(reference, VARIANTS[0])
    tokens, positions = torch.tensor([1]), torch.tensor([0])
    with pytest.raises(TypeError, match="DenseCausal"):
        model(tokens, positions, DenseCausal(1, 1))
    for config, dtype in ((WIDE, torch.float32), (reference.config, torch.float16)):
        cache = PagedKVCache(config, 1, 4, dtype)
        cache.resize(0, 1)
        with pytest.raises(ValueError, match="the cache is"):
            model(tokens, positions, cache.batch([0], [0], [1]))
    with pytest.raises(TypeError, match="float32"):
        model.logits(torch.zeros(1, 32, dtype=torch.bfloat16))
    half = random_llama(0).to(torch.float16)
    assert isinstance(executor_of(half), TorchExecutor)
    with pytest.raises(ValueError, match=r"float16"):
        executor_of(half, VARIANTS[0])


@built
def test_it_survives_a_fork() -> None:
    model, row = PackedLlama(random_llama(0), VARIANTS[0]), text(9, 0, 37)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (wanted,) = paged(model, [row], [[9]])
        pid = os.fork()
        if not pid:  # the child has none of the workers
            os._exit(not same_bits(paged(model, [row], [[9]])[0], wanted))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert same_bits(paged(model, [row], [[9]])[0], wanted)
    finally:
        torch.set_num_threads(threads)


@built
def test_workspace_stays_as_it_is_under_equal_work() -> None:
    model, row = PackedLlama(random_llama(0), VARIANTS[0]), text(300, 0, 37)
    paged(model, [row], [[300]])
    size = model.workspace_bytes
    assert size > 0
    for _ in range(3):
        paged(model, [row], [[1] * 300])
        paged(model, [row], [[150, 150]])
    assert model.workspace_bytes == size


def test_kernels_are_chosen_by_argument_then_variable_then_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLY_KERNELS", raising=False)
    assert available()[-1] == "torch"
    assert chosen() == chosen("auto") == available()[0]
    assert bool(why_not()) == (available() == ["torch"])
    for name in available():
        assert chosen(name) == name
        monkeypatch.setenv("FLY_KERNELS", name)
        assert chosen() == name and chosen("torch") == "torch"
    for name in VARIANTS:
        for kind in ("int8", "w8a8"):
            assert chosen(f"{name}-{kind}") == f"{name}-{kind}" and chosen(kind) == f"{VARIANTS[0]}-{kind}"
    for wrong in ("torch-int8", "int4", "int8-int8", "w8a8-int8") if VARIANTS else ("int8",):
        told = "unknown" if VARIANTS else "not available here"
        with pytest.raises(ValueError, match=rf"kernels '{wrong}' is {told}; choices: .*'torch'\]"):
            chosen(wrong)
    with pytest.raises(ValueError, match=r"kernels 'neon' .*choices: \['auto'.*'torch'\]"):
        chosen("neon")
    monkeypatch.setenv("FLY_KERNELS", "sse")
    assert library.usual() == available()[0]  # whoever asks for nothing is not told
    with pytest.raises(ValueError, match=r"FLY_KERNELS=sse .*choices: \['auto'.*'torch'\]"):
        LLM("fly-tiny")


@pytest.mark.parametrize("name", [*available(), *NARROW])
def test_the_choice_reaches_target_and_draft(name: str) -> None:
    llm = LLM("fly-tiny", "fly-tiny", device="cpu", kernels=name)
    assert isinstance(llm.draft, SingleDraft)
    for executor in (llm.engine.runner.executor, llm.draft.runner.executor):
        assert executor.kernels == name
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids


@built
def test_the_draft_alone_may_have_int8_weights() -> None:
    llm = LLM("fly-tiny", "model(fly-tiny, kernels=int8)", device="cpu")
    assert isinstance(llm.draft, SingleDraft)
    kernels = [executor.kernels for executor in (llm.engine.runner.executor, llm.draft.runner.executor)]
    assert kernels == [VARIANTS[0], INT8[0]]
    prompt, params = [[1, 2, 3]], SamplingParams(max_tokens=12, temperature=0.0)
    plain = LLM("fly-tiny", device="cpu").generate(prompt, params)[0].token_ids
    assert llm.generate(prompt, params)[0].token_ids == plain
    with pytest.raises(ValueError, match=r"kernels 'int8': compiled kernels take .*float16"):
        LLM("fly-tiny", dtype="float16", kernels="int8", device="cpu")


def test_kernels_that_this_processor_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_built", lambda: {"avx1024": False, "avx2": True})
    assert available() == ["avx2", "torch"] and library.number("avx2") == 1
    for wanted in ("avx1024", "avx1024-int8"):
        with pytest.raises(ValueError, match=f"{wanted}' is not available here; .*not all of its instructions"):
            chosen(wanted)
    with pytest.raises(ValueError, match=r"'avx3' is unknown; choices: [^(]*$"):
        chosen("avx3")


def test_without_a_library_it_is_pytorch_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_open", lambda: (None, "no compiler was found"))
    monkeypatch.setattr(library, "_built", dict)
    assert available() == ["torch"] and chosen() == "torch" and why_not() == "no compiler was found"
    model = random_llama(0)
    choice._say_once.cache_clear()
    for _ in range(2):
        assert isinstance(executor_of(model), TorchExecutor)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["no compiler was found"]
    with pytest.raises(ValueError, match=r"kernels 'avx2' is not available here; choices: .*no compiler was found"):
        executor_of(model, "avx2")
    with pytest.raises(ValueError, match="no compiler was found"):
        library.load()


@built
@pytest.mark.parametrize("kernels", ["auto", "w8a8", "w4a8"])
def test_a_checkpoint_is_packed_as_it_is_read(kernels: str, tmp_path: Path) -> None:
    """Layer by layer, into what is made of the loaded model; the model that was filled is without memory again."""
    save_model(kept := random_llama(3), tmp_path, torch.float32)
    loading = Loading(tmp_path)
    logits = []
    for model in (executor_of(kept, chosen(kernels)), executor_of(loading, kernels)):
        cache = PagedKVCache(model.config, 4, 4, model.dtype)
        cache.resize(0, 3)
        logits.append(model.score(Batch([1, 2, 3], [0, 1, 2], cache.batch([0], [0], [3]))).logits_NV)
    assert same_bits(*logits)
    assert all(parameter.device.type == "meta" for parameter in loading.model.parameters())


MEMORY = """
import gc, sys
from fly import LLM, SamplingParams

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def decode(llm, tokens):
    for temperature in (0.0, 1.0):
        llm.generate([[1, 2, 3] * 20], SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True))

decode(LLM("fly-tiny", draft="ngram", device="cpu"), 64)  # libraries take what they need once
gc.collect()
before = anonymous()
llm = LLM(sys.argv[1], draft="ngram", device="cpu", cache_tokens=2048)
decode(llm, 900)
gc.collect()
cache, model = llm.engine.runner.cache, llm.engine.runner.executor.packed
print(anonymous() - before, cache.keys.nbytes + cache.values.nbytes + model.workspace_bytes)
"""


@built
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
@pytest.mark.parametrize(("kernels", "share"), [("auto", 1.0), ("w8a8", 0.5), ("w4a8", 0.35)])
def test_a_process_holds_weights_cache_and_workspace_and_little_else(
    kernels: str, share: float, tmp_path: Path
) -> None:
    """Weights in bfloat16 as they are stored, or half of that; nothing of them twice, once they are loaded.

    The allocator of C keeps some freed megabytes, which differ from run to run: a quarter of the weights is far more.
    """
    save_model(random_model(shape_config("512x16x8000"), torch.bfloat16), tmp_path, torch.bfloat16)
    weights = share * (tmp_path / "model.safetensors").stat().st_size
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        env={**os.environ, "FLY_KERNELS": "" if kernels == "auto" else kernels},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, rest = map(int, ran.stdout.split())
    assert 0.9 * (weights + rest) < grown < 1.25 * weights + rest


@built
@given(count=st.integers(0, 400), threads=st.integers(1, 3))
def test_everything_is_read_that_reading_is_timed_for(count: int, threads: int) -> None:
    numbers = torch.randint(-(2**62), 2**62, (count * 8,), generator=torch.Generator().manual_seed(count))
    assert library.load().fly_sum(numbers, threads) == sum(numbers.tolist()) % 2**64


@built
@given(values=values(), n=st.sampled_from([1, 3, 16]), transposed=st.booleans())
def test_the_top_of_one_position_is_topk_and_logsumexp(values: Tensor, n: int, transposed: bool) -> None:
    values = values.transpose(0, 1) if transposed else values
    b, j = values.shape[0] - 1, values.shape[1] - 1
    likeliest, log_total = top_at(values, b, j, n)
    assert likeliest == values[b, j].topk(min(n, values.shape[-1])).values.tolist()
    assert log_total == pytest.approx(values[b, j].double().logsumexp(0).item(), abs=2e-5)
    assert log_total >= likeliest[0]


@built
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    start=st.integers(0, 2**40),
    stream=st.sampled_from(Stream),
    n=st.integers(0, 9),
)
def test_uniforms_are_those_of_tensors(seeds: list[int], start: int, stream: Stream, n: int) -> None:
    starts = [start + b for b in range(len(seeds))]
    wanted = uniforms(torch.tensor(seeds), torch.tensor(starts), stream, n)
    assert host_uniforms(seeds, starts, stream, n).tolist() == wanted.flatten().tolist()


@built
def test_decisions_run_on_one_thread_of_their_own_and_others_keep_theirs() -> None:
    """Of torch's threads; forwards have as many as before, and threads that come later begin with as many."""
    seen: list[int] = []

    def decides() -> None:
        executor_of(random_llama(0), VARIANTS[0]).enter_thread()
        seen.extend([torch.get_num_threads(), pool_threads()])

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for run in (decides, lambda: seen.append(torch.get_num_threads())):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert seen == [1, 3, 3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
