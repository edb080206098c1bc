"""Attention of a few new tokens, in chains or trees, over pages in place. Two Triton kernels compute it.

Shape legend: T packed new tokens, N new tokens of a row, B rows, W pages of a row's table, Z tokens a page, S slots of
the cache or keys of a row, H query heads, G key/value heads, D head width, M queries of a program, X splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fly.backends.cuda.kernels.launch import launch

__all__ = ["attend", "attend_split", "combine_splits", "count_splits"]

SPLIT, EQUAL = 256, 32  # keys of the first splits; how many splits have each size
MOST = 128  # rows with more new tokens are attended without splits
_PARTIAL = 1 << 30  # the most bytes for results of splits; more tokens than that fill the device without splits
_LOG2E = 1.4426950408889634


def count_splits(keys: int) -> int:
    """Return how many splits a row of so many keys takes: 32 splits of 256 keys, then 32 of 1,024, and so on, each size
    four times the last. Where a split ends depends on its number alone."""
    splits, size = 0, SPLIT
    while keys > EQUAL * size:
        keys -= EQUAL * size
        splits += EQUAL
        size *= 4
    return splits + -(-keys // size)


@triton.jit
def attend_split(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr,
    ends_ptr, last_ptr, place_ptr, table_ptr, start_ptr, seen_ptr,
    scale, q_stride, table_stride, seen_stride, blocks, splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, EQUAL: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute attention of a block of queries over one split of their row's keys.

    Grid: split × KV head × (row × block of queries). A program takes BLOCK_M queries of one row and one KV head: the
    GROUP query heads of each token stand side by side, so that keys and values are read once for all of them. It reads
    its queries, then BLOCK_N keys and their values at a time, in the order of the text, through the row's table; the D
    numbers of a key lie together. Lengths are read here, so that a captured graph serves texts of any length; a
    program without keys to read ends at once.

    A split begins and ends at keys that depend on its number alone. So a row's sums are the same whatever else is in
    the batch, and one row of a long text occupies the whole device. WHOLE: one split of all keys (prompts).

    A token sees the keys before its ``last``. Keys beyond the largest ``last`` are never read. Other hidden keys are
    masked by selection, so that a NaN left in a reused page cannot spread.
    """
    split, head = tl.program_id(0), tl.program_id(1)
    row, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks

    # The row, and the queries of this program: token n of the row, head after head.
    begin, end = tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1)
    at_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n_M, head_M = at_M // GROUP, head * GROUP + at_M % GROUP
    real_M, token_M = n_M < end - begin, (begin + n_M).to(tl.int64)
    last_M = tl.load(last_ptr + token_M, mask=real_M, other=0)
    place_M = tl.load(place_ptr + token_M, mask=real_M, other=2147483647)

    # The keys of this split that some query sees.
    if WHOLE:
        first, high = begin * 0, tl.max(last_M, 0)
    else:
        level = split // EQUAL
        size = SPLIT << (2 * level)
        first = (size - SPLIT) // 3 * EQUAL + split % EQUAL * size
        high = first + size
    low = first
    if WINDOW > 0:
        lowest = tl.maximum(tl.min(place_M, 0) - WINDOW + 1, 0)
        low = tl.maximum(first, lowest // BLOCK_N * BLOCK_N)
    high = tl.minimum(high, tl.max(last_M, 0))
    if (low < high) | (WHOLE & (block * BLOCK_M < (end - begin) * GROUP)):
        d_D = tl.arange(0, BLOCK_D)
        query_MD = token_M[:, None] * q_stride + head_M[:, None] * D + d_D[None, :]
        q_MD = tl.load(q_ptr + query_MD, mask=real_M[:, None] & (d_D < D)[None, :], other=0.0)
        peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass_M = tl.zeros([BLOCK_M], tl.float32)
        out_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(low, high, BLOCK_N):
            key_N = start + tl.arange(0, BLOCK_N)
            there_N = key_N < high
            page_N = tl.load(table_ptr + row * table_stride + key_N // PAGE, mask=there_N, other=0)
            at_N = (page_N.to(tl.int64) * PAGE + key_N % PAGE) * KV_HEADS + head
            at_ND, there_ND = at_N[:, None] * D + d_D[None, :], there_N[:, None] & (d_D < D)[None, :]
            k_ND = tl.load(k_ptr + at_ND, mask=there_ND, other=0.0)
            v_ND = tl.load(v_ptr + at_ND, mask=there_ND, other=0.0)

            # Which query sees which key. For keys of the tree's own tokens, ``seen`` says so, the window included.
            seen_MN = key_N[None, :] < last_M[:, None]
            near_MN = seen_MN
            if WINDOW > 0:
                near_MN = seen_MN & (place_M[:, None] - key_N[None, :] < WINDOW)
            if TREE:
                new_N = key_N - tl.load(start_ptr + row)
                own_MN = seen_MN & (new_N >= 0)[None, :]
                tree_MN = token_M[:, None] * seen_stride + new_N[None, :]
                near_MN = tl.where(own_MN, tl.load(seen_ptr + tree_MN, mask=own_MN, other=0) != 0, near_MN)

            # Online softmax (Milakov and Gimelshein, arXiv 1805.02867), in powers of two.
            x_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
            x_MN = tl.where(near_MN, x_MN, float("-inf"))
            higher_M = tl.maximum(peak_M, tl.max(x_MN, 1))
            base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # nothing seen so far
            p_MN = tl.where(near_MN, tl.exp2(x_MN - base_M[:, None]), 0.0)
            keep_M = tl.exp2(peak_M - base_M)
            mass_M = mass_M * keep_M + tl.sum(p_MN, 1)
            out_MD = out_MD * keep_M[:, None]
            out_MD += tl.dot(p_MN.to(v_ND.dtype), v_ND, input_precision=PRECISION)
            peak_M = higher_M

        head_TM = token_M * (KV_HEADS * GROUP) + head_M  # number of each query among all [T, H]
        stored_MD = real_M[:, None] & (d_D < D)[None, :]
        if WHOLE:
            share_MD = out_MD / tl.where(mass_M == 0, 1.0, mass_M)[:, None]
            tl.store(out_ptr + head_TM[:, None] * D + d_D[None, :], share_MD, mask=stored_MD)
        else:
            part_M = head_TM * splits + split
            tl.store(partial_ptr + part_M[:, None] * D + d_D[None, :], out_MD, mask=stored_MD)
            tl.store(stats_ptr + part_M * 2, peak_M, mask=real_M)
            tl.store(stats_ptr + part_M * 2 + 1, mass_M, mask=real_M)


@triton.jit
def combine_splits(
    out_ptr, partial_ptr, stats_ptr, last_ptr, place_ptr, splits,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr,
    SPLIT: tl.constexpr, EQUAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Combine the results of ``attend_split`` for all splits.

    Grid: token × query head. A program reads BLOCK_X splits at a time, in their order, each with its peak, its mass and
    D sums. Only splits with a key that the token may see are read, since no others were written.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    high = tl.load(last_ptr + token)
    low = high * 0
    if WINDOW > 0:
        low = tl.load(place_ptr + token) - WINDOW + 1
    d_D = tl.arange(0, BLOCK_D)
    peak, mass = high.to(tl.float32) * 0 - float("inf"), high.to(tl.float32) * 0
    out_D = tl.zeros([BLOCK_D], tl.float32)
    at = (token * HEADS + head) * splits
    for start in range(0, splits, BLOCK_X):
        x_X = start + tl.arange(0, BLOCK_X)
        level_X = x_X // EQUAL
        size_X = SPLIT << (2 * level_X)
        first_X = (size_X - SPLIT) // 3 * EQUAL + x_X % EQUAL * size_X
        read_X = (x_X < splits) & (first_X < high) & (first_X + size_X > low)
        peak_X = tl.load(stats_ptr + (at + x_X) * 2, mask=read_X, other=float("-inf"))
        mass_X = tl.load(stats_ptr + (at + x_X) * 2 + 1, mask=read_X, other=0.0)
        read_XD = read_X[:, None] & (d_D < D)[None, :]
        part_XD = tl.load(partial_ptr + (at + x_X)[:, None] * D + d_D[None, :], mask=read_XD, other=0.0)
        higher = tl.maximum(peak, tl.max(peak_X, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        keep, factor_X = tl.exp2(peak - base), tl.exp2(peak_X - base)
        mass = mass * keep + tl.sum(mass_X * factor_X, 0)
        out_D = out_D * keep + tl.sum(part_XD * factor_X[:, None], 0)
        peak = higher
    out_D = out_D / tl.where(mass == 0, 1.0, mass)
    tl.store(out_ptr + (token * HEADS + head) * D + d_D, out_D, mask=d_D < D)


def attend(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    ends_B1: Tensor,
    last_T: Tensor,
    place_T: Tensor,
    table_BW: Tensor,
    longest: int,
    page: int,
    window: int,
    scale: float,
    start_B: Tensor | None = None,
    seen_TN: Tensor | None = None,
) -> Tensor:
    """Return the attention output [T, H, D] of new tokens over the pages of their rows; a token that sees nothing gets
    zeros.

    Args:
        q_THD: queries, of the dtype of the cache; the numbers of a token lie together.
        k_SGD, v_SGD: a layer's keys and values by slot, new ones included.
        ends_B1: int32, where each row's tokens end among the packed ones, after a 0.
        last_T: int32, each token sees only keys before this one.
        place_T: int32, the token's position in its row's text.
        table_BW: int32, the pages of each row.
        longest: new tokens of a row, at most.
        page: tokens a page.
        window: positions that a token sees, counted from itself; 0 is all.
        scale: factor of the products of queries and keys.
        start_B: int32, the place of the first token of each row's tree.
        seen_TN: uint8, which new tokens of its row each token sees, the window included; None: all before ``last``.
    """
    tokens, heads, width = q_THD.shape
    kv_heads, rows = k_SGD.shape[1], len(table_BW)
    group, splits = heads // kv_heads, count_splits(table_BW.shape[1] * page)
    partial_bytes = 4 * tokens * heads * splits * width
    whole = longest > MOST or splits == 1 or partial_bytes > _PARTIAL
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    sizes = {"D": width, "BLOCK_D": max(16, triton.next_power_of_2(width)), "SPLIT": SPLIT, "EQUAL": EQUAL}
    shape = [0] if whole else [tokens, heads, splits]
    partial = torch.empty([*shape, width], dtype=torch.float32, device=q_THD.device)
    stats = torch.empty([*shape, 2], dtype=torch.float32, device=q_THD.device)
    seen_stride = 0 if seen_TN is None else seen_TN.stride(0)
    block, blocks, options = choose_blocks(longest * group, sizes["BLOCK_D"], q_THD.dtype)
    launch(
        attend_split, (1 if whole else splits, kv_heads, rows * blocks),
        q_THD, k_SGD, v_SGD, out_THD, partial, stats, ends_B1, last_T, place_T, table_BW, start_B, seen_TN,
        scale * _LOG2E, q_THD.stride(0), table_BW.stride(0), seen_stride, blocks, splits,
        GROUP=group, KV_HEADS=kv_heads, PAGE=page, BLOCK_M=block, WINDOW=window, TREE=seen_TN is not None, WHOLE=whole,
        **sizes, **options,
    )  # fmt: skip
    if not whole:
        launch(
            combine_splits, (tokens, heads), out_THD, partial, stats, last_T, place_T, splits,
            HEADS=heads, BLOCK_X=16, WINDOW=window, **sizes,
        )  # fmt: skip
    return out_THD


def choose_blocks(queries: int, width: int, dtype: torch.dtype) -> tuple[int, int, dict[str, Any]]:
    """Return how many of a row's queries a program takes, how many programs there are, and the sizes of its loop. The
    sizes fit into registers and shared memory, as compilation shows (``tests/test_triton.py``)."""
    exact = dtype == torch.float32
    most, keys = (16, 16) if exact else (32, 64) if width <= 128 else (32, 32)
    block = max(16, min(most, triton.next_power_of_2(queries)))
    options: dict[str, Any] = {
        "BLOCK_N": keys,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }
    return block, -(-queries // block), options
