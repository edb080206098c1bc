"""The small steps of a round outside of its layers, as one Triton kernel each.

Shape legend: B rows, N new tokens of each row, T = B·N, W pages of a row's table, V vocabulary, X numbers of a block, S
steps of a search.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fly.backends.cuda.kernels.launch import launch

__all__ = ["draw", "find_kept", "place", "share_mass", "uniforms"]


@triton.jit
def place_kernel(
    table_ptr, start_ptr, stored_ptr, positions_ptr, slots_ptr, used_ptr, ends_ptr, last_ptr, place_ptr,
    table_stride, start_stride, pages, nobody, context,
    N: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the positions and slots of a row's new tokens, and what each of them sees. Grid: row."""
    row = tl.program_id(0)
    n_N = tl.arange(0, BLOCK)
    there_N = n_N < N
    start = tl.load(start_ptr + row * start_stride)
    stored_N = tl.load(stored_ptr + row * N + n_N, mask=there_N, other=0) != 0
    at_N = start + n_N
    # A token that is not stored takes a slot of the page that no row owns, whatever its position.
    number_N = tl.minimum(tl.maximum(at_N // PAGE, 0), pages - 1)
    page_N = tl.load(table_ptr + row * table_stride + number_N, mask=there_N & stored_N, other=0).to(tl.int64)
    slot_N = tl.where(stored_N, page_N, nobody) * PAGE + (at_N % PAGE + PAGE) % PAGE
    filled = start + tl.max(tl.where(stored_N, n_N + 1, 0), 0)
    out_N = row * N + n_N
    tl.store(slots_ptr + out_N, slot_N, mask=there_N)
    tl.store(positions_ptr + out_N, tl.minimum(tl.maximum(at_N, 0), context - 1), mask=there_N)
    tl.store(place_ptr + out_N, at_N.to(tl.int32), mask=there_N)
    tl.store(last_ptr + out_N, tl.minimum(at_N + 1, filled).to(tl.int32), mask=there_N)
    tl.store(used_ptr + row, (start + N).to(tl.int32))
    tl.store(ends_ptr + 1 + row, (row + 1) * N)
    tl.store(ends_ptr, 0, mask=row == 0)


def place(
    table_BW: Tensor, start_B: Tensor, stored_BN: Tensor, page: int, nobody: int, context: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do what ``fly.backends.cuda.ops.place`` does."""
    (rows, count), device = stored_BN.shape, start_B.device
    positions_T, slots_T = (torch.empty(rows * count, dtype=torch.int64, device=device) for _ in range(2))
    last_T, place_T, used_B, ends_B1 = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (rows * count, rows * count, rows, rows + 1)
    )
    launch(
        place_kernel, (rows,), table_BW, start_B, stored_BN.contiguous().view(torch.uint8), positions_T, slots_T,
        used_B, ends_B1, last_T, place_T, table_BW.stride(0), start_B.stride(0), table_BW.shape[1], nobody, context,
        N=count, PAGE=page, BLOCK=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return positions_T, slots_T, used_B, ends_B1, last_T, place_T


@triton.jit
def _scramble(x):
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniforms_kernel(
    seed_ptr, round_ptr, out_ptr, seed_stride, round_stride, STREAM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the hash of ``fly.ops.uniforms``. Grid: row × block of BLOCK numbers."""
    row, n_X = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(seed_ptr + row * seed_stride).to(tl.uint64, bitcast=True)
    begin = tl.load(round_ptr + row * round_stride).to(tl.uint64, bitcast=True)
    key = _scramble(_scramble(seed + step) + begin * step + STREAM)
    bits_X = _scramble(key + (n_X + 1).to(tl.uint64) * step)
    tl.store(out_ptr + row * N + n_X, (bits_X >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0), mask=n_X < N)


def uniforms(seed_B: Tensor, round_B: Tensor, stream: int, n: int) -> Tensor:
    """Return the uniforms [B, n], float32, as ``fly.ops.uniforms``."""
    uniform_BN = torch.empty((len(seed_B), n), dtype=torch.float32, device=seed_B.device)
    launch(
        uniforms_kernel, (len(seed_B), triton.cdiv(n, 128)), seed_B, round_B, uniform_BN, seed_B.stride(0),
        round_B.stride(0), STREAM=stream, N=n, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return uniform_BN


@triton.jit
def _key(x):
    """Return whole numbers that sort like the floats ``x``."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def find_kept_kernel(
    logits_ptr, temperature_ptr, least_ptr, top_p_ptr, min_p_ptr, out_ptr, rows, row_stride,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of a position, the least that is kept, and ln of the mass that is kept.

    Grid: position. A program reads the logits again and again, in their order: for the peak, for the mass, eight times
    for a nucleus, for the mass that is kept. The nucleus ends at the least logit above which the logits have less than
    ``top_p`` of the mass. It is searched among the 32-bit keys of all floats, four bits at a time: 15 thresholds divide
    the remaining range into 16 parts, and the mass above each threshold says in which part to go on.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    at_X, zero = tl.arange(0, BLOCK), tl.load(temperature_ptr + row) * 0
    temperature, infinity = tl.load(temperature_ptr + row), float("inf")
    peak_X = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        x_X = tl.load(logits_ptr + start + at_X, mask=start + at_X < V, other=float("-inf"))
        peak_X = tl.where((x_X > peak_X) | (x_X != x_X), x_X, peak_X)  # a NaN stays
    peak = tl.where(tl.max((peak_X != peak_X).to(tl.int32), 0) > 0, float("nan"), tl.max(peak_X, 0)) + zero
    least = zero - infinity
    if least_ptr is not None:
        least = tl.load(least_ptr + row)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            total = zero
            for start in range(0, V, BLOCK):
                x_X = tl.load(logits_ptr + start + at_X, mask=start + at_X < V, other=float("-inf"))
                total += tl.sum(tl.where(x_X >= least, tl.exp((x_X - peak) / temperature), 0.0), 0)
            # The least key above which there is less than ``top_p`` of the mass lies in one of 16 parts from ``low``
            # on.
            low = zero.to(tl.int32) + -2147483648
            part = zero.to(tl.int32) + 268435456
            step_S = tl.arange(0, 16)
            for _ in range(8):
                border_S = low + step_S * part + (part - 1)  # the last key of each part
                above_S = tl.zeros([16], tl.float32)
                for start in range(0, V, BLOCK):
                    x_X = tl.load(logits_ptr + start + at_X, mask=start + at_X < V, other=float("-inf"))
                    mass_X = tl.exp((x_X - peak) / temperature)
                    above_S += tl.sum(tl.where(_key(x_X)[None, :] > border_S[:, None], mass_X[None, :], 0.0), 1)
                low += tl.sum((above_S >= top_p * total).to(tl.int32), 0) * part
                part = part >> 4
            candidate = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            # Keep all logits if rounding leaves too little mass, and cut nothing if there is a NaN.
            candidate = tl.where(candidate == candidate, candidate, -infinity)
            least = tl.maximum(least, tl.minimum(candidate, peak))
    if min_p_ptr is not None:
        least = tl.maximum(least, peak + temperature * tl.log(tl.load(min_p_ptr + row)))
    total = zero
    for start in range(0, V, BLOCK):
        x_X = tl.load(logits_ptr + start + at_X, mask=start + at_X < V, other=float("-inf"))
        total += tl.sum(tl.where(x_X >= least, tl.exp((x_X - peak) / temperature), 0.0), 0)
    tl.store(out_ptr + row, peak)
    tl.store(out_ptr + rows + row, least)
    tl.store(out_ptr + 2 * rows + row, tl.log(total) + peak * 0)


def find_kept(
    logits_NV: Tensor, temperature_N: Tensor, least_N: Tensor | None, top_p_N: Tensor | None, min_p_N: Tensor | None
) -> Tensor:
    """Return what is kept [3, N], as ``fly.runner.sampling.find_kept``."""
    rows, width = logits_NV.shape
    found_3N = torch.empty((3, rows), dtype=torch.float32, device=logits_NV.device)
    launch(
        find_kept_kernel, (rows,), logits_NV, temperature_N, least_N, top_p_N, min_p_N, found_3N, rows,
        logits_NV.stride(0), V=width, BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
    return found_3N


@triton.jit
def share_kernel(
    logits_ptr, found_ptr, temperature_ptr, out_ptr, rows, row_stride, V: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the share of the mass that each logit has, 0 below the least that is kept. Grid: position × block of
    BLOCK."""
    row, at_X = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there_X = at_X < V
    x_X = tl.load(logits_ptr + row * row_stride + at_X, mask=there_X, other=0.0)
    peak, least = tl.load(found_ptr + row), tl.load(found_ptr + rows + row)
    total, temperature = tl.load(found_ptr + 2 * rows + row), tl.load(temperature_ptr + row)
    share_X = tl.exp((x_X - peak) / temperature - total)
    tl.store(out_ptr + row * V + at_X, tl.where(x_X < least, 0.0, share_X), mask=there_X)


def share_mass(logits_NV: Tensor, found_3N: Tensor, temperature_N: Tensor) -> Tensor:
    """Return the shares [N, V], as ``fly.backends.cuda.ops.share_mass``."""
    rows, width = logits_NV.shape
    share_NV = torch.empty((rows, width), dtype=torch.float32, device=logits_NV.device)
    launch(
        share_kernel, (rows, triton.cdiv(width, 2048)), logits_NV, found_3N, temperature_N, share_NV, rows,
        logits_NV.stride(0), V=width, BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return share_NV


@triton.jit
def draw_kernel(probs_ptr, uniform_ptr, token_ptr, row_stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """Draw the token at which the cumulative mass exceeds ``uniform`` times the total. Grid: row.

    A program reads its distribution twice, in order: first for the total mass, then for the block that holds the token.
    Sums are float64.
    """
    row, at_X = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    probs_ptr += row * row_stride
    uniform = tl.load(uniform_ptr + row).to(tl.float64)
    total = uniform * 0
    for start in range(0, V, BLOCK):
        total += tl.sum(tl.load(probs_ptr + start + at_X, mask=start + at_X < V, other=0.0).to(tl.float64), 0)
    sought, before = uniform * total, uniform * 0
    token, last = row * 0 + V, row * 0  # V: not found yet; the last token with any mass
    for start in range(0, V, BLOCK):
        mass_X = tl.load(probs_ptr + start + at_X, mask=start + at_X < V, other=0.0).to(tl.float64)
        mass = tl.sum(mass_X, 0)
        last = tl.maximum(last, tl.max(tl.where(mass_X > 0, start + at_X, 0), 0).to(tl.int64))
        if (token == V) & (before + mass > sought):
            above_X = (before + tl.cumsum(mass_X, 0) > sought) & (mass_X > 0)
            crossing = tl.min(tl.where(above_X, start + at_X, V), 0).to(tl.int64)
            token = tl.where(crossing < V, crossing, last)  # rounding may leave none
        before += mass
    tl.store(token_ptr + row, tl.where(token < V, token, last))


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the drawn tokens [B], int64, as ``fly.ops.draw``."""
    (rows, width), token_B = probs_BV.shape, torch.empty(len(probs_BV), dtype=torch.int64, device=probs_BV.device)
    launch(
        draw_kernel, (rows,), probs_BV, uniform_B, token_B, probs_BV.stride(0),
        V=width, BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
    return token_B
