"""The kernels of ``kernels/`` as operators of PyTorch: Triton runs them on a CUDA device, plain PyTorch elsewhere.

Graphs, ``torch.compile`` and tensors without values see each kernel as one operator. Plain PyTorch is the reference for
the kernels: the tests compare them in Triton's interpreter, and each device compares them once before their first use.

Shape legend: T packed new tokens, N new tokens of a row, B rows, W pages of a row's table, S slots of the cache or keys
of a row, H query heads, G key/value heads, D head width, C hidden width, I width of the feed-forward layer, X outputs
side by side, K inputs of a product, P = K / 2 pairs of inputs, V vocabulary.
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
from fly.ops import random as plain
from fly.runner import sampling

__all__ = [
    "add_norm",
    "attend_pages",
    "attend_plainly",
    "draw",
    "find_kept",
    "gate",
    "multiply_int4",
    "multiply_int8",
    "place",
    "refuse_attention",
    "refuse_layers",
    "refuse_steps",
    "rotate_store",
    "share_mass",
    "uniforms",
    "widen_int4",
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
    """Return what ``attend_pages`` returns, as its reference: row by row, over a copy of each row's pages."""
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
    """Do what ``fly.backends.cuda.kernels.attention.attend`` does, on any device."""
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
    """Return ``x + out``, and its root mean square norm, [T, C] each."""
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
    """Return SiLU of the first half of the columns times the second, [T, I]."""
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
    """Return the rotated queries [T, H, D] of a projection (queries, keys, values). Store its rotated keys and its
    values in ``slots_T`` of a layer's cache."""
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
    """Return ``x @ (weight * scale).T + bias`` [T, N] for at most 16 tokens, with int8 weights."""
    if x_TK.is_cuda:
        from fly.backends.cuda.kernels import product

        return product.multiply_int8(x_TK, weight_NK, scale_N1, bias_N)
    y_TN = F.linear(x_TK.float(), weight_NK.float()) * scale_N1.squeeze(1)
    return (y_TN if bias_N is None else y_TN + bias_N).to(x_TK.dtype)


@multiply_int8.register_fake
def _(x_TK: Tensor, weight_NK: Tensor, *rest: object) -> Tensor:
    return x_TK.new_empty(len(x_TK), len(weight_NK))


@torch.library.custom_op("fly::multiply_int4", mutates_args=())
def multiply_int4(x_TK: Tensor, pairs_NP: Tensor, scale_NG: Tensor, zero_NG: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return ``x @ ((number - zero) * scale).T + bias`` [T, N] of at most 16 tokens. ``pairs_NP`` (uint8) hold two
    numbers of 0 to 15 each, the first in the lower half; a group is 32, 64 or 128 inputs; zeros are uint8."""
    if x_TK.is_cuda:
        from fly.backends.cuda.kernels import product

        return product.multiply_int4(x_TK, pairs_NP, scale_NG, zero_NG, bias_N)
    y_TN = F.linear(x_TK.float(), widen_int4(pairs_NP, scale_NG, zero_NG, x_TK.dtype).float())
    return (y_TN if bias_N is None else y_TN + bias_N).to(x_TK.dtype)


@multiply_int4.register_fake
def _(x_TK: Tensor, pairs_NP: Tensor, *rest: object) -> Tensor:
    return x_TK.new_empty(len(x_TK), len(pairs_NP))


def widen_int4(pairs_NP: Tensor, scale_NG: Tensor, zero_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights [N, K] of ``multiply_int4``."""
    number_NK = torch.stack([pairs_NP & 15, pairs_NP >> 4], 2).flatten(1)
    number_NGX = number_NK.unflatten(1, (scale_NG.shape[1], -1)).float()
    return ((number_NGX - zero_NG.unsqueeze(2)) * scale_NG.unsqueeze(2).float()).to(dtype).flatten(1)


# The steps of a round outside of its layers. If the kernels are refused, PyTorch computes them on every device.


def _own(x: Tensor) -> bool:
    return x.is_cuda and refuse_steps(x.device) is None


@torch.library.custom_op("fly::place", mutates_args=())
def place(
    table_BW: Tensor, start_B: Tensor, stored_BN: Tensor, page: int, nobody: int, context: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Place N new tokens of every row, from ``start_B`` on. Return their positions and slots [T], int64. For attention,
    return in int32: the number of tokens of each row, the new ones included; where each row's tokens end among the
    packed ones, after a 0; the position before which each token sees keys; and its own position. Tokens that are not
    ``stored_BN`` take slots of the page ``nobody``."""
    if _own(start_B):
        from fly.backends.cuda.kernels import steps

        return steps.place(table_BW, start_B, stored_BN, page, nobody, context)
    rows, count = stored_BN.shape
    at_BN = start_B.unsqueeze(1) + torch.arange(count, device=start_B.device)
    number_BN = (at_BN // page).clamp(0, table_BW.shape[1] - 1)  # padding may stand beyond the table
    page_BN = table_BW.gather(1, number_BN).long().masked_fill(~stored_BN, nobody)
    slots_T = (page_BN * page + at_BN % page).flatten()
    used_B = (start_B + count).to(torch.int32)
    ends_B1 = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=start_B.device)
    # Slots after a row's last real token may hold data of another row.
    number_N = torch.arange(1, count + 1, device=start_B.device)
    filled_B1 = start_B.unsqueeze(1) + (stored_BN * number_N).amax(1, keepdim=True)
    last_T = torch.minimum(at_BN + 1, filled_B1).flatten().to(torch.int32)
    positions_T = at_BN.clamp(0, context - 1).flatten()  # padding may stand beyond the context, too
    return positions_T, slots_T, used_B, ends_B1, last_T, at_BN.flatten().to(torch.int32)


@place.register_fake
def _(table_BW: Tensor, start_B: Tensor, stored_BN: Tensor, *rest: int) -> tuple[Tensor, ...]:
    (rows, _), tokens = stored_BN.shape, stored_BN.numel()
    kinds = (tokens, torch.int64), (tokens, torch.int64), (rows, torch.int32), (rows + 1, torch.int32)
    return tuple(start_B.new_empty(n, dtype=kind) for n, kind in (*kinds, (tokens, torch.int32), (tokens, torch.int32)))


@torch.library.custom_op("fly::uniforms", mutates_args=())
def uniforms(seed_B: Tensor, round_B: Tensor, stream: int, n: int) -> Tensor:
    """Compute ``fly.ops.uniforms``."""
    if _own(seed_B):
        from fly.backends.cuda.kernels import steps

        return steps.uniforms(seed_B, round_B, stream, n)
    return plain.uniforms(seed_B, round_B, stream, n)


@uniforms.register_fake
def _(seed_B: Tensor, round_B: Tensor, stream: int, n: int) -> Tensor:
    return seed_B.new_empty(len(seed_B), n, dtype=torch.float32)


@torch.library.custom_op("fly::draw", mutates_args=())
def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Compute ``fly.ops.draw``."""
    if _own(probs_BV):
        from fly.backends.cuda.kernels import steps

        return steps.draw(probs_BV, uniform_B)
    return plain.draw(probs_BV, uniform_B)


@draw.register_fake
def _(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    return uniform_B.new_empty(len(probs_BV), dtype=torch.int64)


@torch.library.custom_op("fly::find_kept", mutates_args=())
def find_kept(
    logits_NV: Tensor, temperature_N: Tensor, least_N: Tensor | None, top_p_N: Tensor | None, min_p_N: Tensor | None
) -> Tensor:
    """Do what ``fly.runner.sampling.find_kept`` does. The kernel does not sort: it narrows down the least logit of the
    nucleus. If the tokens likelier than one token have ``top_p`` of the mass up to rounding, the kernel and the
    reference may disagree about that token."""
    if _own(logits_NV):
        from fly.backends.cuda.kernels import steps

        return steps.find_kept(logits_NV, temperature_N, least_N, top_p_N, min_p_N)
    return sampling.find_kept(logits_NV, temperature_N, least_N, top_p_N, min_p_N)


@find_kept.register_fake
def _(logits_NV: Tensor, *rest: object) -> Tensor:
    return logits_NV.new_empty(3, len(logits_NV))


@torch.library.custom_op("fly::share_mass", mutates_args=())
def share_mass(logits_NV: Tensor, found_3N: Tensor, temperature_N: Tensor) -> Tensor:
    """Return the share of the mass that each logit has, [N, V] float32, from the results of ``find_kept``."""
    if _own(logits_NV):
        from fly.backends.cuda.kernels import steps

        return steps.share_mass(logits_NV, found_3N, temperature_N)
    peak_N1, least_N1, total_N1 = found_3N.unsqueeze(2)
    shares_NV = (logits_NV - peak_N1).div_(temperature_N.unsqueeze(1)).sub_(total_N1).exp_()
    return shares_NV.masked_fill_(logits_NV < least_N1, 0.0)


@share_mass.register_fake
def _(logits_NV: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty(logits_NV.shape, dtype=torch.float32, device=logits_NV.device)


@cache
def refuse_attention(device: torch.device, dtype: torch.dtype, width: int, page: int) -> str | None:
    """Return why ``attend_pages`` is not used for such a cache, or None if it is used. The first call on a device
    compiles the kernels and compares them with the reference, on a row of two splits. A refusal is logged once, as a
    warning."""
    reason = _try(device, lambda: _compare_attention(device, dtype, width, page))
    if reason is not None:
        _log.warning("PyTorch's attention is used on %s, not our Triton kernels: %s", device, reason)
    return reason


@cache
def refuse_layers(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the small steps of a layer are not fused, or None if they are. The first call on a device compares
    each kernel with its reference. A refusal is logged once, as a warning."""
    reason = _try(device, lambda: _compare_layers(device, dtype))
    if reason is not None:
        _log.warning("layers on %s run operation by operation, not by our Triton kernels: %s", device, reason)
    return reason


@cache
def refuse_steps(device: torch.device) -> str | None:
    """Return why our kernels do not compute the steps of a round outside of its layers, or None if they do. They are
    compared as in ``refuse_layers``."""
    reason = _try(device, lambda: _compare_steps(device))
    if reason is not None:
        _log.warning(
            "the steps of a round on %s run operation by operation, not by our Triton kernels: %s", device, reason
        )
    return reason


def _try(device: torch.device, compare: Callable[[], str | None]) -> str | None:
    """Return why kernels are not used on a device: the device itself, what ``compare`` finds there, or its error."""
    if (reason := _refuse_device(device)) is not None:
        return reason
    try:
        with torch.cuda.device(device):
            return compare()
    except Exception as error:  # no C compiler, an unknown device, a driver that is too old
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _compare(device: torch.device, run: Any, kernel: Callable[..., Any], *arguments: Any) -> str | None:
    """Compare what ``kernel`` on the device returns and writes with what ``run`` on the host returns and writes."""
    on_device = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    on_host = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    ours, theirs = kernel(*on_device), run(*on_host)
    for one, other in zip(tree_leaves((ours, on_device)), tree_leaves((theirs, on_host))):
        if isinstance(one, Tensor) and not torch.allclose(one.cpu().float(), other.float(), atol=0.05, rtol=0.05):
            return f"{run._name} differs from the reference"
    return None


def _compare_steps(device: torch.device) -> str | None:
    from fly.backends.cuda.kernels import steps

    drawn = torch.Generator().manual_seed(0)
    logits_NV, numbers_N = 3 * torch.randn(2, 5000, generator=drawn), torch.tensor([-5, 1 << 62])
    heat_N, table_BW = torch.tensor([0.7, 1.0]), torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    found_3N = sampling.find_kept(logits_NV, heat_N, None, heat_N - 0.1, None)
    return (
        _compare(device, place, steps.place, table_BW, torch.tensor([254, 7]), torch.ones(2, 3).bool(), 256, 4, 300)
        or _compare(device, uniforms, steps.uniforms, numbers_N, numbers_N.flip(0), 1, 5)
        or _compare(device, find_kept, steps.find_kept, logits_NV, heat_N, None, heat_N - 0.1, None)
        or _compare(device, share_mass, steps.share_mass, logits_NV, found_3N, heat_N)
        or _compare(device, draw, steps.draw, logits_NV.softmax(1), torch.tensor([0.9, 0.3]))
    )


def _compare_layers(device: torch.device, dtype: torch.dtype) -> str | None:
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(dtype)

    weight_NK = torch.randint(-127, 128, (40, 64), generator=drawn).to(torch.int8)
    pairs_NP = torch.randint(0, 256, (40, 32), generator=drawn).to(torch.uint8)
    zero_NG = torch.randint(0, 16, (40, 2), generator=drawn).to(torch.uint8)
    cache = [torch.zeros(8, 2, 64, dtype=dtype) for _ in range(2)]
    return (
        _compare(device, add_norm, add_norm, draw(3, 96), draw(3, 96), draw(96), 1e-5)
        or _compare(device, gate, gate, draw(3, 192))
        or _compare(device, rotate_store, rotate_store, draw(3, 8 * 64), *(draw(3, 1, 64) for _ in range(2)),
                    torch.tensor([5, 0, 2]), *cache)
        or _compare(device, multiply_int8, multiply_int8, draw(3, 64), weight_NK, torch.full((40, 1), 0.01),
                    draw(40))
        or _compare(device, multiply_int4, multiply_int4, draw(3, 64), pairs_NP,
                    torch.full((40, 2), 0.1, dtype=dtype), zero_NG, draw(40))
    )  # fmt: skip


def _refuse_device(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"they need compute capability 8.0, and the device has {capability[0]}.{capability[1]}"
    return None


def _compare_attention(device: torch.device, dtype: torch.dtype, width: int, page: int) -> str | None:
    if not (width <= 256 and dtype in (torch.bfloat16, torch.float16, torch.float32)):
        return f"they take heads of up to 256 numbers in bfloat16, float16 or float32, not {width} in {dtype}"
    keys, pages = 300, -(-300 // page)
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(count, heads, width, generator=drawn).to(device, dtype)
        for count, heads in ((3, 8), (pages * page, 2), (pages * page, 2))
    )
    last_T = torch.arange(keys - 2, keys + 1, dtype=torch.int32, device=device)
    ends_B1 = torch.tensor([0, 3], dtype=torch.int32).to(device)
    table_BW = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=device).unsqueeze(0)
    arguments = q, k, v, ends_B1, last_T, last_T - 1, table_BW, 3, page, 0, width**-0.5
    wrong = float((attend_pages(*arguments).float() - attend_plainly(*arguments).float()).abs().max())
    return None if wrong < 0.02 else f"their values differ from the reference by {wrong:.3g}"
