"""What the kernels of ``kernels/`` compute, as operators of PyTorch: Triton on a CUDA device, plain PyTorch elsewhere.

Graphs, ``torch.compile`` and tensors without values see one operator each. The plain way is the reference that the
kernels are checked against: in the tests by Triton's interpreter, and once on each device before they are used.

Shape legend: T packed new tokens, N new tokens of a row, B rows, W pages of a row's table, S slots of the cache or keys
of a row, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend_pages", "attend_plainly", "refuse_attention"]

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


@cache
def refuse_attention(device: torch.device, dtype: torch.dtype, width: int, page: int) -> str | None:
    """Why ``attend_pages`` is not used for such a cache; None if it is. The first call on a device compiles the kernels
    and compares them with the reference, on a row of two splits; a refusal is logged once, as a warning."""
    reason = _probe(device, dtype, width, page)
    if reason is not None:
        _log.warning("PyTorch's attention is used on %s, not our Triton kernels: %s", device, reason)
    return reason


def _probe(device: torch.device, dtype: torch.dtype, width: int, page: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"they need compute capability 8.0, and the device has {capability[0]}.{capability[1]}"
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
