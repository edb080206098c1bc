"""The compiled kernels against the PyTorch model, and against themselves: one text, one result, however it is fed.

Skipped as a whole if the library was not built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly import LLM
from fly.backends import executor_of, load_executor
from fly.backends.cpu import CpuExecutor, PackedLlama, int8_weights, refusal
from fly.backends.cpu.library import load
from fly.backends.torch import TorchExecutor
from fly.cache import PagedBatch, PagedKVCache
from fly.drafts import NGramDraft
from fly.models import DenseCausal, LlamaConfig, save_model
from fly.models.families import FAMILIES, OPTIONS, Family
from fly.ops import argmax, tree_mask
from fly.runner.executor import Batch, DraftSpec, TokenByToken
from tests.kernels import DTYPES, GROUPED, NARROW, VARIANTS, W8A8, WIDE, built, cut, make_row, paged, same_bits, text
from tests.toys import PLAIN, build_llama, llama_configs, random_llama
from tests.twins import Twin, assert_within


@built
@settings(max_examples=4)
@given(data=st.data(), seed=st.integers(0, 5))
@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_function_of_the_pytorch_model(
    variant: str, dtype: torch.dtype, family: Family, data: st.DataObject, seed: int
) -> None:
    """Over widths, grouping, biases, ties, rope types, vocabularies, page sizes, page layouts and cuts."""
    config = data.draw(llama_configs(families=[family]))
    reference = build_llama(config, seed, scale=0.3 if dtype == torch.float32 else 0.1).to(dtype)
    rows = [text(data.draw(st.integers(1, 40)), b, config.vocab_size) for b in range(data.draw(st.integers(1, 3)))]
    cuts = [data.draw(cut(len(row))) for row in rows]
    pages = {"block_size": data.draw(st.sampled_from([1, 3, 4, 16])), "scatter": data.draw(st.sampled_from([0, 9]))}
    twin = Twin(reference, variant)
    for row, logits in zip(rows, paged(PackedLlama(reference, variant), rows, cuts, **pages)):
        assert_within(logits, partial(twin.logits, row))


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
    assert_within(logits, partial(Twin(reference, variant).logits, row))
    torch.testing.assert_close(
        model.embedding(), reference.embed_tokens.weight, rtol=0.02, atol=1e-4 if variant in VARIANTS else 2e-3
    )
    executor = CpuExecutor(model)
    with pytest.raises(ValueError, match="gives no hidden states"):
        executor.check_states([1])
    assert CpuExecutor(PackedLlama(random_llama(), variant)).gives_states


def in_granite_sizes(family: str) -> LlamaConfig:
    plain = {name: LlamaConfig.model_fields[name].default for name in OPTIONS}
    return LlamaConfig.model_validate({**GRANITE.model_dump(), **plain, "family": family})


@built
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family not in PLAIN])
def test_other_norms_are_refused_and_run_on_pytorch(family: str, tmp_path: Path) -> None:
    save_model(build_llama(in_granite_sizes(family)), tmp_path, torch.float32)
    with pytest.raises(ValueError, match=r"kernels 'w8a8': compiled kernels normalise .*; this model "):
        load_executor(tmp_path, kernels="w8a8")
    assert load_executor(tmp_path).kernels == "torch"
    assert LLM(tmp_path, NGramDraft()).generate([[1, 2]], max_tokens=3)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"query_norm": "whole"}, "normalise queries and keys head by head"),
        ({"input_norms": False, "output_norms": True}, "normalise the inputs of attention and feed-forward"),
        ({"query_norm": "heads", "output_norms": True, "qkv_bias": True}, None),
    ],
)
def test_a_family_is_refused_for_what_it_needs(
    needs: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name: this family is one that the package does not know. The PyTorch decoder (fly/models/llama.py)
    says where each norm stands."""
    family = Family("newcomer", "NewcomerForCausalLM", frozenset({"attention_bias"}), **needs)
    monkeypatch.setattr("fly.models.config.FAMILIES", {**FAMILIES, family.name: family})
    reason = refusal(build_llama(in_granite_sizes(family.name)))
    assert reason is None if said is None else reason is not None and said in reason


@built
@settings(max_examples=4)
@given(data=st.data(), seed=st.integers(0, 5))
@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", NARROW)
def test_on_narrow_weights_it_is_the_function_of_the_rounded_pytorch_model(
    variant: str, dtype: torch.dtype, family: Family, data: st.DataObject, seed: int
) -> None:
    config = data.draw(llama_configs(families=[family]))
    reference = build_llama(config, seed, scale=0.1).to(dtype)
    rows = [text(data.draw(st.integers(1, 40)), b, config.vocab_size) for b in range(data.draw(st.integers(1, 3)))]
    cuts = [data.draw(cut(len(row))) for row in rows]
    model = PackedLlama(reference, variant)
    assert model.kernels == variant and (model.weight_bytes == 1 or variant in GROUPED)
    twin = Twin(reference, variant)
    for row, logits in zip(rows, paged(model, rows, cuts)):
        assert_within(logits, partial(twin.logits, row))


@given(n=st.integers(1, 140), k=st.integers(1, 9), seed=st.integers(0, 99), scale=st.floats(1e-6, 1e6))
def test_int8_weights_are_the_nearest_of_their_scale(n: int, k: int, seed: int, scale: float) -> None:
    weight_NK = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale
    weight_NK[0] = 0.0
    whole_NK, scale_N = int8_weights(weight_NK)
    assert whole_NK.dtype == torch.int8 and not whole_NK[0].any()
    assert (whole_NK[1:].int().abs().amax(1) == 127).all()
    error_NK = (whole_NK * scale_N.unsqueeze(1) - weight_NK).abs()
    assert (error_NK <= 0.501 * scale_N.unsqueeze(1)).all()


@pytest.fixture(params=[0, 1], ids=["", "for-intel"], scope="module")
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """The loops of products for Intel's processors, and those for others (src/fly.h: intel)."""
    before = load().fly_loops(request.param)
    yield
    load().fly_loops(before)


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
def test_no_number_of_rows_changes_a_product(case: Case, count: int, loops: None) -> None:
    config = case.model.config
    hidden_TC = torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(case.model.dtype)
    together = case.model.logits(hidden_TC)
    assert same_bits(together, torch.cat([case.model.logits(row.unsqueeze(0)) for row in hidden_TC]))
    reference = build_llama(config).to(case.model.dtype)
    assert_within(together, partial(Twin(reference, case.model.kernels).project, hidden_TC))


@built
@settings(max_examples=15)
@given(count=st.integers(1, 40), width=st.integers(4, 150), seed=st.integers(0, 99))
@pytest.mark.parametrize("variant", W8A8)
def test_products_in_8_bits_are_sums_of_whole_numbers(
    variant: str, loops: None, count: int, width: int, seed: int
) -> None:
    """Bit for bit those of whole numbers in PyTorch, with weights and inputs at both ends of their range."""
    config = WIDE.model_copy(update={"hidden_size": 2 * width})
    reference, generator = build_llama(config), torch.Generator().manual_seed(seed)
    hidden_TC = torch.randn(count, 2 * width, generator=generator).bfloat16().float()
    hidden_TC[::3] = hidden_TC[::3].sign()
    with torch.no_grad():
        reference.lm_head.weight[::2] = reference.lm_head.weight[::2].sign()
    whole_VC, scale_V = int8_weights(reference.lm_head.weight)
    peak_T1 = hidden_TC.abs().amax(1, keepdim=True)
    inverse_T1 = torch.full_like(peak_T1, 127) / peak_T1  # 127 / peak_T1 would be the product with a rounded 1 / peak
    number_TC = (hidden_TC * inverse_T1).round()
    sums_TV = number_TC.long() @ whole_VC.long().T
    expected_TV = sums_TV.float() * (peak_T1 / 127) * scale_V
    assert same_bits(PackedLlama(reference, variant).logits(hidden_TC), expected_TV)


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
def test_threads_that_share_out_a_product_as_they_go_change_no_bit(variant: str, loops: None) -> None:
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
    cache_dtype = data.draw(st.sampled_from([model.dtype, torch.bfloat16]))  # of float32 models, bits of sums show
    cache = PagedKVCache(model.config, 40, 4, cache_dtype)
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
        (alone_TV,) = paged(model, [whole], [[len(whole)]], cache_dtype=cache_dtype)
        assert same_bits(logits_TV[before - start + node], alone_TV[-1])


@built
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model_dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_the_cache_may_be_of_another_dtype(variant: str, model_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    reference = build_llama(WIDE, scale=0.1).to(model_dtype)
    row = text(50, 3, WIDE.vocab_size)
    (got,) = paged(PackedLlama(reference, variant), [row], [[20, 1, 29]], cache_dtype=cache_dtype)
    assert_within(got, partial(Twin(reference, variant).logits, row, cache_dtype))


@built
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 96, 104, 128])
@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 1), (8, 4), (7, 1), (33, 1)])
def test_no_number_of_queries_changes_an_attention(
    variant: str, cache_dtype: torch.dtype, head_dim: int, heads: int, groups: int
) -> None:
    """Those of a head may share what they read, in groups of any size; heads of all widths, in either type of cache."""
    config = WIDE.model_copy(update={"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": groups})
    model = PackedLlama(build_llama(config), variant)
    row = text(90, 5, config.vocab_size)
    (alone,) = paged(model, [row], [[1] * 90], cache_dtype=cache_dtype)
    for cuts in ([90], [40, 2, 16, 5, 27], [1, 3, 86], [*range(1, 13), 12]):
        (together,) = paged(model, [row], [cuts], cache_dtype=cache_dtype)
        assert same_bits(together, alone)


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
