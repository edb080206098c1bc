"""Values of the Triton kernels by Triton's interpreter, against plain PyTorch, by hypothesis.

``tests/test_triton.py`` runs this in a process of its own, since the interpreter has to be chosen before Triton is
imported: ``TRITON_INTERPRET=1 pytest tests/triton_values.py``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fly.backends.cuda import ops
from fly.backends.cuda.kernels import attention, layer, product, steps
from fly.ops import depths, tree_mask
from fly.runner import sampling

DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
fast = settings(deadline=None, suppress_health_check=list(HealthCheck))


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """The interpreter of Triton 3.7 multiplies the bits of bfloat16."""
    left, right = (
        (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b)
    )
    return TensorHandle(np.matmul(left, right, dtype=np.float32) + d.data, d.dtype.scalar)


InterpreterBuilder.create_dot = _dot


def run(
    counts: Sequence[int], lengths: Sequence[int], trees: Sequence[list[int] | None], group: int, kv_heads: int,
    width: int, page: int, dtype: torch.dtype, window: int, seed: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:  # fmt: skip
    """What the kernels and the reference say, and what they were given. Row b has ``lengths[b]`` tokens, of which the
    last ``counts[b]`` are new; slots that no row uses hold NaN."""
    draw = torch.Generator().manual_seed(seed)
    need = [-(-length // page) for length in lengths]
    pages = sum(need) + 2
    order = torch.randperm(pages, generator=draw).tolist()
    table_BW = torch.zeros(len(counts), max(need), dtype=torch.int32)
    shape = pages * page, kv_heads, width
    k, v = (torch.full(shape, float("nan")) for _ in range(2))
    for b, length in enumerate(lengths):
        own = [order.pop() for _ in range(need[b])]
        table_BW[b, : need[b]] = torch.tensor(own)
        slots = torch.tensor([own[at // page] * page + at % page for at in range(length)], dtype=torch.int64)
        for x in (k, v):
            x[slots] = torch.randn(length, *shape[1:], generator=draw)
    whole = torch.randn(sum(counts), kv_heads * group + 2, width, generator=draw)
    q_THD = whole.to(dtype)[:, : kv_heads * group]  # as it is cut from the projection
    ends_B1 = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    own = [torch.arange(length - count, length) for count, length in zip(counts, lengths)]
    slot_T = torch.cat(own).to(torch.int32)
    given: dict[str, Any] = {"place_T": slot_T, "start_B": None, "seen_TN": None}
    if any(tree is not None for tree in trees):
        seen_TN, places = torch.zeros(sum(counts), max(counts), dtype=torch.uint8), []
        for b, (count, tree) in enumerate(zip(counts, trees)):
            begin, start = int(ends_B1[b]), lengths[b] - count
            mask = torch.ones(count, count).tril().bool() if tree is None else tree_mask(start, start, tree)[:, start:]
            depth = list(range(count)) if tree is None else depths(tree)
            near = torch.tensor(depth).unsqueeze(1) - torch.tensor(depth) < (window or 10**6) if count else mask
            seen_TN[begin : begin + count, :count] = mask & near
            places += [start + each for each in depth]
        given = {
            "place_T": torch.tensor(places, dtype=torch.int32), "seen_TN": seen_TN,
            "start_B": torch.tensor([length - count for count, length in zip(counts, lengths)], dtype=torch.int32),
        }  # fmt: skip
    given |= {
        "q_THD": q_THD, "k_SGD": k.to(dtype), "v_SGD": v.to(dtype), "ends_B1": ends_B1, "last_T": slot_T + 1,
        "table_BW": table_BW, "longest": max(counts), "page": page, "window": window, "scale": width**-0.5,
    }  # fmt: skip
    return attention.attend(**given), ops.attend_plainly(**given), given


@st.composite
def batches(draw: Any) -> dict[str, Any]:
    page = draw(st.sampled_from([4, 16, 64, 256]))
    counts, lengths, trees, some = [], [], [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 6))
        cached = draw(st.sampled_from([0, 1, 15, 250, 255, 256, 257, 520]))
        tree = [draw(st.integers(-1, node - 1)) for node in range(count)] if some and draw(st.booleans()) else None
        counts.append(count), lengths.append(count + cached), trees.append(tree)
    counts[0], lengths[0] = max(counts[0], 1), max(lengths[0], 1)
    if trees[0] == []:
        trees[0] = [-1]
    return {
        "counts": counts, "lengths": lengths, "trees": trees, "page": page,
        "group": draw(st.sampled_from([1, 2, 3, 4, 7, 8])), "kv_heads": draw(st.sampled_from([1, 2])),
        "width": draw(st.sampled_from([64, 80, 96, 128, 256])), "dtype": draw(st.sampled_from([*DTYPES])),
        "window": draw(st.sampled_from([0, 0, 1, 7, 100, 300])), "seed": draw(st.integers(0, 99)),
    }  # fmt: skip


@settings(fast, max_examples=10)
@given(batches())
def test_attention_over_pages_is_that_over_copies(batch: dict[str, Any]) -> None:
    ours, theirs, _ = run(**batch)
    tolerance = DTYPES[batch["dtype"]]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@settings(fast, max_examples=5)
@given(batches(), st.data())
def test_a_row_has_the_same_bits_in_any_batch(batch: dict[str, Any], data: st.DataObject) -> None:
    """Alone, through a longer table, with the other rows gone."""
    both, _, given = run(**batch)
    b = data.draw(st.integers(0, len(batch["counts"]) - 1))
    rows = slice(int(given["ends_B1"][b]), int(given["ends_B1"][b + 1]))
    alone = dict(given)
    alone["q_THD"], alone["last_T"], alone["place_T"] = (given[name][rows] for name in ("q_THD", "last_T", "place_T"))
    alone["ends_B1"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
    alone["table_BW"] = torch.nn.functional.pad(given["table_BW"][b : b + 1], (0, 2 * 256 // batch["page"]))
    if given["seen_TN"] is not None:
        alone["seen_TN"], alone["start_B"] = given["seen_TN"][rows], given["start_B"][b : b + 1]
    if both[rows].numel() and (given["table_BW"].shape[1] * batch["page"] > attention.SPLIT):
        assert torch.equal(attention.attend(**alone), both[rows])


@pytest.mark.parametrize("length", [8193, 9217])
def test_splits_of_all_sizes_are_joined(length: int) -> None:
    """A text that ends one key after a border: of the 32 splits of 256 keys, of the first one of 1,024."""
    ours, theirs, _ = run([1], [length], [None], 1, 1, 64, 64, torch.float32, 0, 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_prompt_is_one_split() -> None:
    ours, theirs, _ = run([130, 3], [200, 300], [None, None], 2, 1, 64, 64, torch.float32, 50, 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


sizes = st.sampled_from([1, 8, 80, 128, 1000])


@settings(fast, max_examples=10)
@given(st.sampled_from([*DTYPES]), st.integers(1, 3), sizes, st.integers(0, 99))
def test_add_and_norm_are_one(dtype: torch.dtype, tokens: int, width: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x_TC = torch.randn(tokens, 2 * width, generator=draw).to(dtype)[:, width:]  # a part of something wider
    out_TC, weight_C = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((tokens, width), (width,)))
    ours, theirs = (run(x_TC, out_TC, weight_C, 1e-5) for run in (layer.add_norm, ops.add_norm))
    for own, other in zip(ours, theirs):
        torch.testing.assert_close(own.float(), other.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@settings(fast, max_examples=10)
@given(st.sampled_from([*DTYPES]), st.integers(1, 3), st.sampled_from([1, 80, 1024, 1500]), st.integers(0, 99))
def test_the_gate_is_one(dtype: torch.dtype, tokens: int, width: int, seed: int) -> None:
    both_TX = (8 * torch.randn(tokens, 2 * width, generator=torch.Generator().manual_seed(seed))).to(dtype)
    ours, theirs = layer.gate(both_TX), ops.gate(both_TX)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@settings(fast, max_examples=10)
@given(
    st.sampled_from([*DTYPES]), st.integers(1, 4), st.integers(1, 8), st.integers(1, 2),
    st.sampled_from([8, 64, 80, 128, 256]), st.integers(0, 99),
)  # fmt: skip
def test_rotation_stores_keys_and_values(
    dtype: torch.dtype, tokens: int, group: int, kv_heads: int, width: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    qkv_TX = random(tokens, kv_heads * (group + 2) * width)
    tables = random(tokens, 1, width), random(tokens, 1, width)
    slots_T = torch.randperm(9, generator=draw)[:tokens]
    found = []
    for run in (layer.rotate_store, ops.rotate_store):
        cache = [torch.full((9, kv_heads, width), 7.0, dtype=dtype) for _ in range(2)]
        found.append([run(qkv_TX, *tables, slots_T, *cache), *cache])
    for own, other in zip(*found):
        torch.testing.assert_close(own.float(), other.float(), rtol=DTYPES[dtype], atol=2 * DTYPES[dtype])


@settings(fast, max_examples=10)
@given(
    st.sampled_from([*DTYPES]), st.integers(1, 16), st.sampled_from([1, 31, 32, 100]),
    st.sampled_from([1, 64, 255, 256, 700]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_products_with_int8_weights(
    dtype: torch.dtype, tokens: int, outputs: int, inputs: int, bias: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(tokens, inputs, generator=draw).to(dtype)
    weight_NK = torch.randint(-127, 128, (outputs, inputs), generator=draw).to(torch.int8)
    scale_N1 = torch.rand(outputs, 1, generator=draw) / 127 / inputs**0.5
    given = x_TK, weight_NK, scale_N1, torch.randn(outputs, generator=draw).to(dtype) if bias else None
    ours, theirs = product.multiply_int8(*given), ops.multiply_int8(*given)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@settings(fast, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(-9, 40), st.integers(0, 3)), min_size=1, max_size=4), st.integers(1, 6),
    st.sampled_from([4, 16]), st.integers(0, 99),
)  # fmt: skip
def test_new_tokens_stand_where_the_reference_puts_them(
    rows: list[tuple[int, int]], count: int, page: int, seed: int
) -> None:
    """Rows that begin before their text or end beyond their table, which is padding, and any tokens that are not
    stored."""
    draw = torch.Generator().manual_seed(seed)
    state_BC = torch.tensor(rows)
    table_BW = torch.randint(0, 9, (len(rows), 3 * (16 // page)), generator=draw, dtype=torch.int32)
    stored_BN = torch.rand(len(rows), count, generator=draw) < 0.7
    at_BN = state_BC[:, :1] + torch.arange(count)
    stored_BN &= (at_BN >= 0) & (at_BN < table_BW.shape[1] * page)
    given = table_BW, state_BC[:, 0], stored_BN, page, 9, 45
    for ours, theirs in zip(steps.place(*given), ops.place(*given)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@given(st.lists(st.tuples(*2 * [st.integers(-(2**63), 2**63 - 1)]), min_size=1, max_size=3), st.integers(0, 200))
@settings(fast, max_examples=20)
def test_uniforms_are_the_same_hash(seeds: list[tuple[int, int]], n: int) -> None:
    seed_B, round_B = torch.tensor(seeds).unbind(1)
    for stream in (0, 1):
        assert torch.equal(steps.uniforms(seed_B, round_B, stream, n), ops.uniforms(seed_B, round_B, stream, n))


@settings(fast, max_examples=25)
@given(st.data())
def test_what_is_kept_is_what_sorting_keeps(data: st.DataObject) -> None:
    """Flat and peaked distributions with ties and bans, and least logits that are known already. Where a token's
    likelier ones have ``top_p`` of the mass but for rounding, either may keep it."""
    rows, width = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 7, 300, 2500]))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits_NV = data.draw(st.sampled_from([0.0, 0.1, 1.0, 8.0])) * torch.randn(rows, width, generator=draw)
    if data.draw(st.booleans()):
        logits_NV = (2 * logits_NV).round() / 2  # zeros of both signs among the ties
    logits_NV[:, 1:][torch.rand(rows, width - 1, generator=draw) < data.draw(st.sampled_from([0, 0.5]))] = -torch.inf

    def column(least: float, most: float, asked: bool = True) -> torch.Tensor | None:
        column_N = torch.rand(rows, generator=draw) * (most - least) + least
        return column_N if asked else None

    heat_N = column(0.3, 3.0)
    assert heat_N is not None
    top_p_N, min_p_N, least_N = (
        column(*limits, data.draw(st.booleans())) for limits in ((0.01, 1.2), (0, 0.2), (-9, 0))
    )
    least_N = None if least_N is None else least_N.minimum(logits_NV.amax(1))
    given = logits_NV, heat_N, least_N, top_p_N, min_p_N
    ours, theirs = steps.find_kept(*given), sampling.find_kept(*given)
    assert torch.equal(ours[0], theirs[0])
    for n in range(rows):
        kept = [logits_NV[n] >= found[1, n] for found in (ours, theirs)]
        if top_p_N is not None and not torch.equal(*kept):
            x_V = logits_NV[n].double()
            mass_V = ((x_V - x_V.max()) / heat_N[n].double()).exp() * (
                x_V >= (-torch.inf if least_N is None else least_N[n])
            )
            for x in x_V[kept[0] != kept[1]].unique():
                assert abs(float(mass_V[x_V > x].sum() / mass_V.sum() - top_p_N[n].double())) < 1e-5
        else:
            assert torch.equal(*kept)
            torch.testing.assert_close(ours[2, n], theirs[2, n], rtol=1e-5, atol=1e-5)
    shares = steps.share_mass(logits_NV, theirs, heat_N), ops.share_mass(logits_NV, theirs, heat_N)
    torch.testing.assert_close(*shares, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(shares[0].sum(1), torch.ones(rows))


def test_nothing_is_cut_of_what_is_no_number() -> None:
    logits_NV = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    logits_NV[0, 30] = torch.nan
    one_N = torch.ones(1)
    for run in (steps.find_kept, sampling.find_kept):
        found = run(logits_NV, one_N, None, 0.5 * one_N, None)
        assert steps.share_mass(logits_NV, found, one_N).isnan().all()


@settings(fast, max_examples=15)
@given(st.sampled_from([1, 5, 512, 2048, 5000]), st.sampled_from([0.0, 0.5, 0.999]), st.integers(0, 999))
def test_tokens_are_drawn_alike(width: int, sparse: float, seed: int) -> None:
    """At any coin, the largest and those between equal masses included; a distribution without any mass."""
    draw = torch.Generator().manual_seed(seed)
    probs_BV = torch.rand(6, width, generator=draw) * (torch.rand(6, width, generator=draw) >= sparse)
    probs_BV[1], probs_BV[2] = 1 / width, 0.0
    uniform_B = torch.rand(6, generator=draw)
    uniform_B[0], uniform_B[1], uniform_B[3] = 1 - 2.0**-24, 0.5, 0.0
    assert torch.equal(steps.draw(probs_BV, uniform_B), ops.draw(probs_BV, uniform_B))


@settings(fast, max_examples=10)
@given(
    st.sampled_from([*DTYPES]), st.integers(1, 16), st.sampled_from([1, 31, 32, 100]), st.sampled_from([32, 64, 128]),
    st.sampled_from([1, 3, 8]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_products_with_int4_weights(
    dtype: torch.dtype, tokens: int, outputs: int, size: int, groups: int, bias: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    inputs = size * groups
    x_TK = torch.randn(tokens, 2 * inputs, generator=draw).to(dtype)[:, inputs:]
    pairs_NP = torch.randint(0, 256, (outputs, inputs // 2), generator=draw, dtype=torch.uint8)
    scale_NG = (torch.rand(outputs, groups, generator=draw) / 8 / inputs**0.5).to(dtype)
    zero_NG = torch.randint(0, 17, (outputs, groups), generator=draw, dtype=torch.uint8)
    given = x_TK, pairs_NP, scale_NG, zero_NG, torch.randn(outputs, generator=draw).to(dtype) if bias else None
    ours, theirs = product.multiply_int4(*given), ops.multiply_int4(*given)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=DTYPES[dtype], atol=DTYPES[dtype])
