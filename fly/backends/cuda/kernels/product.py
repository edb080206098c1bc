"""Products of a few tokens with int8 and int4 weights. The weights are read as they are and never dequantised in
memory.

Shape legend: T packed tokens, N outputs, K inputs, P = K / 2 pairs of inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fly.backends.cuda.kernels.launch import launch

__all__ = ["multiply_int4", "multiply_int8", "multiply_int8_kernel"]


@triton.jit
def multiply_int8_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, tokens, x_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``x @ (weight * scale).T + bias`` for at most 16 tokens.

    Grid: block of BLOCK_N outputs. A program reads the whole rows of its outputs, BLOCK_K numbers of each at a time, in
    their order: every weight is read once. In registers, weights become 16-bit numbers, which hold each int8 exactly.
    Sums are float32, and are multiplied by the output's scale at the end. K is not split, so an output depends on
    nothing but its own token.
    """
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t_T = tl.arange(0, 16)
    k_K = tl.arange(0, BLOCK_K)
    sum_TN = tl.zeros([16, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        at_K = start + k_K
        x_TK = tl.load(
            x_ptr + t_T[:, None] * x_stride + at_K[None, :],
            mask=(t_T < tokens)[:, None] & (at_K < K)[None, :],
            other=0.0,
        )
        weight_NK = tl.load(
            weight_ptr + n_N[:, None].to(tl.int64) * K + at_K[None, :],
            mask=(n_N < N)[:, None] & (at_K < K)[None, :],
            other=0,
        )
        sum_TN += tl.dot(x_TK, tl.trans(weight_NK.to(tl.float32).to(x_TK.dtype)), input_precision=PRECISION)
    y_TN = sum_TN * tl.load(scale_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y_TN += tl.load(bias_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)[None, :]
    stored_TN = (t_T < tokens)[:, None] & (n_N < N)[None, :]
    tl.store(y_ptr + t_T[:, None] * N + n_N[None, :], y_TN.to(y_ptr.dtype.element_ty), mask=stored_TN)


def multiply_int8(x_TK: Tensor, weight_NK: Tensor, scale_N1: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return the product [T, N], for T up to 16; ``weight_NK`` is int8, and ``scale_N1`` has a factor for each of its
    rows."""
    tokens, inputs = x_TK.shape
    outputs = len(weight_NK)
    exact = x_TK.dtype == torch.float32
    y_TN = torch.empty((tokens, outputs), dtype=x_TK.dtype, device=x_TK.device)
    launch(
        multiply_int8_kernel, (triton.cdiv(outputs, 32),) if tokens else (0,),
        x_TK, weight_NK, scale_N1, bias_N, y_TN, tokens, x_TK.stride(0),
        N=outputs, K=inputs, BLOCK_N=32, BLOCK_K=64 if exact else 256, PRECISION="ieee" if exact else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return y_TN


@triton.jit
def multiply_int4_kernel(
    x_ptr, pairs_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, tokens, x_stride,
    N: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute ``x @ ((number - zero) * scale).T + bias`` for at most 16 tokens, with a scale and a zero for each group.

    Grid: block of BLOCK_N outputs. A program reads the whole rows of its outputs, GROUPS groups of SIZE numbers at a
    time, in their order: every weight is read once. A byte holds two inputs side by side, the first in its lower half,
    so inputs with even numbers are multiplied with one half, odd ones with the other. In registers, weights become
    numbers of the dtype of ``x``. Sums are float32.
    """
    half: tl.constexpr = SIZE // 2
    n_N, t_T = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, 16)
    p_P, g_G = tl.arange(0, GROUPS * half), tl.arange(0, GROUPS)
    there_N1, there_T1 = (n_N < N)[:, None], (t_T < tokens)[:, None]
    sum_TN = tl.zeros([16, BLOCK_N], tl.float32)
    for start in range(0, K // SIZE, GROUPS):
        pair_P, group_G = start * half + p_P, start + g_G
        byte_NP = tl.load(
            pairs_ptr + n_N[:, None].to(tl.int64) * (K // 2) + pair_P[None, :],
            mask=there_N1 & (pair_P < K // 2)[None, :],
            other=0,
        )
        at_NG, read_NG = n_N[:, None] * (K // SIZE) + group_G[None, :], there_N1 & (group_G < K // SIZE)[None, :]
        scale_NG = tl.load(scale_ptr + at_NG, mask=read_NG, other=0.0).to(tl.float32)
        zero_NG = tl.load(zero_ptr + at_NG, mask=read_NG, other=0).to(tl.float32)
        scale_NP = tl.reshape(tl.broadcast_to(scale_NG[:, :, None], (BLOCK_N, GROUPS, half)), (BLOCK_N, GROUPS * half))
        zero_NP = tl.reshape(tl.broadcast_to(zero_NG[:, :, None], (BLOCK_N, GROUPS, half)), (BLOCK_N, GROUPS * half))
        x_TP = x_ptr + t_T[:, None] * x_stride + 2 * pair_P[None, :]
        read_TP = there_T1 & (pair_P < K // 2)[None, :]
        even_TP, odd_TP = tl.load(x_TP, mask=read_TP, other=0.0), tl.load(x_TP + 1, mask=read_TP, other=0.0)
        low_NP = ((byte_NP & 15).to(tl.float32) - zero_NP) * scale_NP
        high_NP = ((byte_NP >> 4).to(tl.float32) - zero_NP) * scale_NP
        sum_TN += tl.dot(even_TP, tl.trans(low_NP.to(even_TP.dtype)), input_precision=PRECISION)
        sum_TN += tl.dot(odd_TP, tl.trans(high_NP.to(odd_TP.dtype)), input_precision=PRECISION)
    if bias_ptr is not None:
        sum_TN += tl.load(bias_ptr + n_N, mask=n_N < N, other=0.0).to(tl.float32)[None, :]
    stored_TN = there_T1 & (n_N < N)[None, :]
    tl.store(y_ptr + t_T[:, None] * N + n_N[None, :], sum_TN.to(y_ptr.dtype.element_ty), mask=stored_TN)


def multiply_int4(x_TK: Tensor, pairs_NP: Tensor, scale_NG: Tensor, zero_NG: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return the product [T, N], as ``fly.backends.cuda.ops.multiply_int4``."""
    tokens, inputs = x_TK.shape
    outputs = len(pairs_NP)
    exact = x_TK.dtype == torch.float32
    size = inputs // scale_NG.shape[1]
    y_TN = torch.empty((tokens, outputs), dtype=x_TK.dtype, device=x_TK.device)
    launch(
        multiply_int4_kernel, (triton.cdiv(outputs, 32),) if tokens else (0,),
        x_TK, pairs_NP, scale_NG, zero_NG, bias_N, y_TN, tokens, x_TK.stride(0),
        N=outputs, K=inputs, SIZE=size, BLOCK_N=32, GROUPS=max(1, (64 if exact else 256) // size),
        PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return y_TN
