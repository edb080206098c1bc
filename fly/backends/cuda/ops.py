"""What the kernels of ``kernels/`` compute, as operators of PyTorch: Triton on a CUDA device, plain PyTorch elsewhere.

Graphs, ``torch.compile`` and tensors without values see one operator each. The plain way is the reference that the
kernels are checked against: in the tests by Triton's interpreter, and once on each device before they are used.

Shape legend: T packed new tokens, N new tokens of a row, B rows, W pages of a row's table, S slots of the cache or keys
of a row, H query heads, G key/value heads, D head width, C hidden width, I width of the feed-forward layer,
X outputs side by side, K inputs of a product.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fly.models.llama import rotate

__all__ = [
    "add_norm",
    "attend_pages",
    "attend_plainly",
    "gate",
    "multiply_int8",
    "refuse_attention",
    "refuse_layers",
    "rotate_store",
]

_log = logging.getLogger("fly")


def attend_plainly(
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
    """The reference of ``attend_pages``: one row after the other, over a copy of its pages."""
    out_THD, ends = torch.zeros_like(q_THD, memory_format=torch.contiguous_format), ends_B1.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(ends)):
        last_N1, place_N1 = (x[begin:end].unsqueeze(1) for x in (last_T, place_T))
        count = int(last_N1.max()) if end > begin else 0
        if count <= 0:
            continue
        k_GSD, v_GSD = (
            x.unflatten(0, (-1, page))[table_BW[b].long()].flatten(0, 1)[:count].transpose(0, 1).float()
            for x in (k_SGD, v_SGD)
        )
        key_S = torch.arange(count, device=q_THD.device)
        seen_NS = key_S < last_N1
        if window:
            seen_NS = seen_NS & (place_N1 - key_S < window)
        if start_B is not None and seen_TN is not None:
            start = int(start_B[b])
            seen_NS = (key_S < last_N1) & torch.cat(
                [seen_NS[:, :start], seen_TN[begin:end, : max(count - start, 0)] != 0], 1
            )
        q_HND = q_THD[begin:end].transpose(0, 1).float()
        out_HND = F.scaled_dot_product_attention(
            q_HND[None], k_GSD[None], v_GSD[None], seen_NS, scale=scale, enable_gqa=len(q_HND) != len(k_GSD)
        )[0]
        out_NHD = out_HND.transpose(0, 1).masked_fill(~seen_NS.any(1)[:, None, None], 0.0)
        out_THD[begin:end] = out_NHD.to(q_THD.dtype)
    return out_THD


@torch.library.custom_op("fly::attend_pages", mutates_args=())
def attend_pages(
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
    """``fly.backends.cuda.kernels.attention.attend``, on any device."""
    if not q_THD.is_cuda:
        return attend_plainly(
            q_THD, k_SGD, v_SGD, ends_B1, last_T, place_T, table_BW, longest, page, window, scale, start_B, seen_TN
        )
    from fly.backends.cuda.kernels.attention import attend

    return attend(
        q_THD, k_SGD, v_SGD, ends_B1, last_T, place_T, table_BW, longest, page, window, scale, start_B, seen_TN
    )


@attend_pages.register_fake
def _(q_THD: Tensor, *rest: object, **more: object) -> Tensor:
    return torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)


@torch.library.custom_op("fly::add_norm", mutates_args=())
def add_norm(x_TC: Tensor, out_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + out``, and its root mean square norm, [T, C] each."""
    if x_TC.is_cuda:
        from fly.backends.cuda.kernels import layer

        return layer.add_norm(x_TC, out_TC, weight_C, eps)
    x_TC = x_TC + out_TC
    return x_TC, F.rms_norm(x_TC, weight_C.shape, weight_C, eps)


@add_norm.register_fake
def _(x_TC: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device), torch.empty_like(x_TC)


@torch.library.custom_op("fly::gate", mutates_args=())
def gate(both_TX: Tensor) -> Tensor:
    """SiLU of the first half of the columns times the second, [T, I]."""
    if both_TX.is_cuda:
        from fly.backends.cuda.kernels import layer

        return layer.gate(both_TX)
    gate_TI, up_TI = both_TX.chunk(2, -1)
    return F.silu(gate_TI) * up_TI


@gate.register_fake
def _(both_TX: Tensor) -> Tensor:
    return both_TX.new_empty(len(both_TX), both_TX.shape[1] // 2)


@torch.library.custom_op("fly::rotate_store", mutates_args=("k_SGD", "v_SGD"))
def rotate_store(
    qkv_TX: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, slots_T: Tensor, k_SGD: Tensor, v_SGD: Tensor
) -> Tensor:
    """Rotated queries [T, H, D] of a projection (queries, keys, values); its rotated keys and its values are stored in
    ``slots_T`` of a layer's cache."""
    if qkv_TX.is_cuda:
        from fly.backends.cuda.kernels import layer

        return layer.rotate_store(qkv_TX, cos_T1D, sin_T1D, slots_T, k_SGD, v_SGD)
    _, kv_heads, width = k_SGD.shape
    qkv_THD = qkv_TX.unflatten(1, (-1, width))
    q_THD, k_TGD, v_TGD = qkv_THD.split([qkv_THD.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    k_SGD.index_copy_(0, slots_T, rotate(k_TGD, cos_T1D, sin_T1D))
    v_SGD.index_copy_(0, slots_T, v_TGD)
    return rotate(q_THD, cos_T1D, sin_T1D)


@rotate_store.register_fake
def _(qkv_TX: Tensor, *rest: Tensor) -> Tensor:
    _, kv_heads, width = rest[-1].shape
    return qkv_TX.new_empty(len(qkv_TX), qkv_TX.shape[1] // width - 2 * kv_heads, width)


@torch.library.custom_op("fly::multiply_int8", mutates_args=())
def multiply_int8(x_TK: Tensor, weight_NK: Tensor, scale_N1: Tensor, bias_N: Tensor | None) -> Tensor:
    """``x @ (weight * scale).T + bias`` [T, N] of at most 16 tokens and int8 weights."""
    if x_TK.is_cuda:
        from fly.backends.cuda.kernels import product

        return product.multiply_int8(x_TK, weight_NK, scale_N1, bias_N)
    y_TN = F.linear(x_TK.float(), weight_NK.float()) * scale_N1.squeeze(1)
    return (y_TN if bias_N is None else y_TN + bias_N).to(x_TK.dtype)


@multiply_int8.register_fake
def _(x_TK: Tensor, weight_NK: Tensor, *rest: object) -> Tensor:
    return x_TK.new_empty(len(x_TK), len(weight_NK))


@cache
def refuse_attention(device: torch.device, dtype: torch.dtype, width: int, page: int) -> str | None:
    """Why ``attend_pages`` is not used for such a cache; None if it is. The first call on a device compiles the kernels
    and compares them with the reference, on a row of two splits; a refusal is logged once, as a warning."""
    reason = _probe(device, dtype, width, page)
    if reason is not None:
        _log.warning("PyTorch's attention is used on %s, not our Triton kernels: %s", device, reason)
    return reason


@cache
def refuse_layers(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the small steps of a layer are not fused; None if they are. The first call on a device compares each kernel
    with the reference; a refusal is logged once, as a warning."""
    reason = _refuse_device(device)
    if reason is None:
        try:
            with torch.cuda.device(device):
                reason = _compare_layers(device, dtype)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason is not None:
        _log.warning("layers on %s run operation by operation, not by our Triton kernels: %s", device, reason)
    return reason


def _compare_layers(device: torch.device, dtype: torch.dtype) -> str | None:
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(dtype)

    def both(name: str, run: Callable[..., Any], *given: Tensor | float | None) -> str | None:
        """On the device by a kernel, on the host by the reference."""
        there = [x.to(device) if isinstance(x, Tensor) else x for x in given]
        here = [x.clone() if isinstance(x, Tensor) else x for x in given]
        ours, theirs = ([run(*args), *(x for x in args if isinstance(x, Tensor))] for args in (there, here))
        for one, other in zip(tree_leaves(ours), tree_leaves(theirs)):
            if not torch.allclose(one.cpu().float(), other.float(), atol=0.05, rtol=0.05):
                return f"{name} differs from the reference"
        return None

    weight_NK = torch.randint(-127, 128, (40, 64), generator=drawn).to(torch.int8)
    cache = [torch.zeros(8, 2, 64, dtype=dtype) for _ in range(2)]
    return (
        both("add_norm", add_norm, draw(3, 96), draw(3, 96), draw(96), 1e-5)
        or both("gate", gate, draw(3, 192))
        or both("rotate_store", rotate_store, draw(3, 8 * 64), *(draw(3, 1, 64) for _ in range(2)),
                torch.tensor([5, 0, 2]), *cache)
        or both("multiply_int8", multiply_int8, draw(3, 64), weight_NK, torch.full((40, 1), 0.01), draw(40))
    )  # fmt: skip


def _refuse_device(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"they need compute capability 8.0, and the device has {capability[0]}.{capability[1]}"
    return None


def _probe(device: torch.device, dtype: torch.dtype, width: int, page: int) -> str | None:
    if (reason := _refuse_device(device)) is not None:
        return reason
    if not (width <= 256 and dtype in (torch.bfloat16, torch.float16, torch.float32)):
        return f"they take heads of up to 256 numbers in bfloat16, float16 or float32, not {width} in {dtype}"
    try:
        keys, pages = 300, -(-300 // page)
        drawn = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(count, heads, width, generator=drawn).to(device, dtype)
            for count, heads in ((3, 8), (pages * page, 2), (pages * page, 2))
        )
        last_T = torch.arange(keys - 2, keys + 1, dtype=torch.int32, device=device)
        ends_B1 = torch.tensor([0, 3], dtype=torch.int32).to(device)
        table_BW = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=device).unsqueeze(0)
        given = q, k, v, ends_B1, last_T, last_T - 1, table_BW, 3, page, 0, width**-0.5
        with torch.cuda.device(device):
            wrong = float((attend_pages(*given).float() - attend_plainly(*given).float()).abs().max())
    except Exception as error:  # no C compiler, an unknown device, a driver that is too old
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if wrong < 0.02 else f"their values differ from the reference by {wrong:.3g}"
