"""The small steps of a layer between its products and its attention, as one Triton kernel each.

Shape legend: T packed tokens, C hidden width, I width of the feed-forward layer, H query heads, G key/value heads, D
head width, S slots of the cache, X outputs side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fly.backends.cuda.kernels.launch import launch

__all__ = ["add_norm", "add_norm_kernel", "gate", "gate_kernel", "rotate_store", "rotate_store_kernel"]


@triton.jit
def add_norm_kernel(
    x_ptr, out_ptr, weight_ptr, sum_ptr, normed_ptr, eps, x_stride, out_stride, C: tl.constexpr, BLOCK: tl.constexpr
):
    """Add a layer's output to the residual stream, and normalise the sum (arXiv 1910.07467).

    Grid: token. A program reads the C numbers of its token once, in their order, and writes the sum and its norm. The
    sum is rounded to the dtype of the stream before it is normed, as without this kernel.
    """
    token = tl.program_id(0).to(tl.int64)
    at_C = tl.arange(0, BLOCK)
    there_C = at_C < C
    x_C = tl.load(x_ptr + token * x_stride + at_C, mask=there_C, other=0.0)
    out_C = tl.load(out_ptr + token * out_stride + at_C, mask=there_C, other=0.0)
    sum_C = (x_C.to(tl.float32) + out_C.to(tl.float32)).to(x_C.dtype)
    tl.store(sum_ptr + token * C + at_C, sum_C, mask=there_C)
    exact_C = sum_C.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(exact_C * exact_C, 0) / C + eps)
    weight_C = tl.load(weight_ptr + at_C, mask=there_C, other=0.0).to(tl.float32)
    tl.store(normed_ptr + token * C + at_C, (exact_C * scale * weight_C).to(x_C.dtype), mask=there_C)


def add_norm(x_TC: Tensor, out_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + out`` and its norm, [T, C] each."""
    tokens, width = x_TC.shape
    sum_TC, normed_TC = (torch.empty((tokens, width), dtype=x_TC.dtype, device=x_TC.device) for _ in range(2))
    launch(
        add_norm_kernel, (tokens,), x_TC, out_TC, weight_C, sum_TC, normed_TC, eps, x_TC.stride(0), out_TC.stride(0),
        C=width, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return sum_TC, normed_TC


@triton.jit
def gate_kernel(both_ptr, out_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply SiLU of the gate by the up projection.

    Grid: token × block of BLOCK outputs. A program reads its part of the gate, then the same part of up.
    """
    token, at_I = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there_I = at_I < WIDTH
    gate_I = tl.load(both_ptr + token * stride + at_I, mask=there_I, other=0.0)
    up_I = tl.load(both_ptr + token * stride + WIDTH + at_I, mask=there_I, other=0.0)
    exact_I = gate_I.to(tl.float32)
    active_I = (exact_I / (1.0 + tl.exp(-exact_I))).to(gate_I.dtype)
    tl.store(
        out_ptr + token * WIDTH + at_I, (active_I.to(tl.float32) * up_I.to(tl.float32)).to(gate_I.dtype), mask=there_I
    )


def gate(both_TX: Tensor) -> Tensor:
    """Return SiLU(gate) * up, [T, I]. ``both_TX`` [T, 2 * I] holds gate and up side by side."""
    tokens, width = both_TX.shape[0], both_TX.shape[1] // 2
    out_TI = torch.empty((tokens, width), dtype=both_TX.dtype, device=both_TX.device)
    grid = tokens, triton.cdiv(width, 1024)
    launch(gate_kernel, grid, both_TX, out_TI, both_TX.stride(0), WIDTH=width, BLOCK=1024, num_warps=4)
    return out_TI


@triton.jit
def rotate_store_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, k_ptr, v_ptr, q_ptr, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys (RoFormer, arXiv 2104.09864), and store keys and values in their slots.

    Grid: token × head of the projection (queries, then keys, then values). A program reads the two halves of its head,
    and those of the tables, whose sine has its sign in it, and writes both halves to the queries or into the cache.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = D // 2
    d_D = tl.arange(0, BLOCK)
    there_D = d_D < half
    at = qkv_ptr + token * qkv_stride + head * D
    low_D = tl.load(at + d_D, mask=there_D, other=0.0)
    high_D = tl.load(at + half + d_D, mask=there_D, other=0.0)
    if head < HEADS + KV_HEADS:
        dtype = low_D.dtype
        cos, sin = cos_ptr + token * D + d_D, sin_ptr + token * D + d_D
        low, high = low_D.to(tl.float32), high_D.to(tl.float32)
        low_cos = tl.load(cos, mask=there_D, other=0.0).to(tl.float32)
        high_cos = tl.load(cos + half, mask=there_D, other=0.0).to(tl.float32)
        low_sin = tl.load(sin, mask=there_D, other=0.0).to(tl.float32)
        high_sin = tl.load(sin + half, mask=there_D, other=0.0).to(tl.float32)
        low_D = (low * low_cos + high * low_sin).to(dtype)
        high_D = (high * high_cos + low * high_sin).to(dtype)
    if head < HEADS:
        to = q_ptr + (token * HEADS + head) * D
    else:
        slot = tl.load(slots_ptr + token)
        if head < HEADS + KV_HEADS:
            to = k_ptr + (slot * KV_HEADS + head - HEADS) * D
        else:
            to = v_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * D
    tl.store(to + d_D, low_D, mask=there_D)
    tl.store(to + half + d_D, high_D, mask=there_D)


def rotate_store(
    qkv_TX: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, slots_T: Tensor, k_SGD: Tensor, v_SGD: Tensor
) -> Tensor:
    """Return rotated queries [T, H, D] of a projection [T, (H + 2 * G) * D]; keys and values go to ``slots_T``
    (int64)."""
    (_, kv_heads, width), tokens = k_SGD.shape, len(qkv_TX)
    heads = qkv_TX.shape[1] // width - 2 * kv_heads
    q_THD = torch.empty((tokens, heads, width), dtype=qkv_TX.dtype, device=qkv_TX.device)
    launch(
        rotate_store_kernel, (tokens, heads + 2 * kv_heads),
        qkv_TX, cos_T1D, sin_T1D, slots_T, k_SGD, v_SGD, q_THD, qkv_TX.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, D=width, BLOCK=triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip
    return q_THD
