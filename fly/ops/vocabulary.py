"""Reductions over the vocabulary that read it as few times as possible. Knows nothing of policies or models.

Shape legend: B rows, J places, R positions, N used positions, V vocabulary, U known tokens, "..." any other dimensions.

On a CPU, allocating memory of the size of the logits costs more than the arithmetic on them, and a top-k over the
vocabulary costs more than ten plain passes. So top-k works in chunks, and sums use a small buffer. Accelerators have
neither problem, and would make the host wait for intermediate results, so they use torch's own kernels.

A tensor-like object may divide the vocabulary among ranks. It overrides these functions by ``__torch_function__``, as
it does torch's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from fly.devices import on_host

__all__ = [
    "SMALL",
    "Top",
    "argmax",
    "log_mass",
    "nan_at",
    "nothing_left",
    "one_hot",
    "pick",
    "spread",
    "top",
    "vectors_at",
]

_CHUNK = 64
SMALL = 8192  # vocabularies up to this size are not divided
_FEW = 1 << 15  # below this number of values, chunks do not pay


def argmax(values: Tensor) -> Tensor:
    """Return the index of the largest value in the last dimension, int64 [...]; on a tie, the lowest index."""
    if has_torch_function_unary(values):
        return handle_torch_function(argmax, (values,), values)
    if not on_host(values) or values.dtype != torch.float32:
        return values.argmax(-1)
    return torch.from_numpy(np.asarray(values.numpy(force=True).argmax(-1)))  # NumPy's is vectorised, torch's is not


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Return the element at ``index`` [...] of each vector [..., V] of ``values``: [...]."""
    if has_torch_function_unary(values):
        return handle_torch_function(pick, (values,), values, index)
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def vectors_at(values_BJV: Tensor, rows_N: Tensor, places_N: Tensor) -> Tensor:
    """Return ``values_BJV[rows_N, places_N]``, int64 indices of any shape [...]: the vectors [..., V] at these places.

    On CPUs indexing copies number by number. This copies whole vectors.
    """
    if has_torch_function_unary(values_BJV) or not on_host(values_BJV) or not values_BJV.is_contiguous():
        return values_BJV[rows_N, places_N]
    if not bool(((rows_N >= 0) & (places_N >= 0) & (places_N < values_BJV.shape[1])).all()):
        return values_BJV[rows_N, places_N]  # which counts from the end, or raises an error
    at_N = rows_N * values_BJV.shape[1] + places_N
    return values_BJV.flatten(0, 1).index_select(0, at_N.flatten()).view(*at_N.shape, values_BJV.shape[-1])


def one_hot(like: Tensor, tokens: Tensor) -> Tensor:
    """Return one-hot distributions [..., V] on ``tokens`` [...], in the shape and dtype of ``like``."""
    if has_torch_function_unary(like):
        return handle_torch_function(one_hot, (like,), like, tokens)
    return torch.zeros_like(like).scatter_(-1, tokens.unsqueeze(-1), 1.0)


def nan_at(values: Tensor, index: Tensor) -> Tensor:
    """Return whether the element at ``index`` [...] of each vector [..., V] of ``values`` is NaN, bool [...]. If the
    vocabulary is divided among ranks, the result is always False, because the ranks would have to communicate."""
    if has_torch_function_unary(values):
        return handle_torch_function(nan_at, (values,), values, index)
    return pick(values, index).isnan()


def nothing_left(logits: Tensor) -> Tensor:
    """Return whether constraints leave no token of each vector [..., V] of ``logits``: bool [..., 1]."""
    return logits.amax(-1, keepdim=True) == -torch.inf


class Top(NamedTuple):
    """The largest values of the last dimension, largest first."""

    values: Tensor
    indices: Tensor


def top(values: Tensor, n: int) -> Top:
    """Return the min(n, V) largest values of each vector [..., V] and their indices (int64).

    The n largest values lie in the n chunks with the largest maxima. So only these chunks are searched, and the
    incomplete chunk at the end.
    """
    if has_torch_function_unary(values):
        return handle_torch_function(top, (values,), values, n)
    width = values.shape[-1]
    if not on_host(values) or width < 4 * n * _CHUNK or values.numel() <= _FEW:
        return Top(*values.topk(min(n, width), dim=-1))
    chunked = width - width % _CHUNK
    chunks = values[..., :chunked].unflatten(-1, (-1, _CHUNK))
    best = chunks.amax(-1).topk(n, dim=-1, sorted=False).indices.unsqueeze(-1)
    picked = chunks.gather(-2, best.expand(*best.shape[:-1], _CHUNK)).flatten(-2)
    largest, at = torch.cat([picked, values[..., chunked:]], dim=-1).topk(n, dim=-1)
    inside = (best.squeeze(-1).gather(-1, (at // _CHUNK).clamp_max(n - 1))) * _CHUNK + at % _CHUNK
    return Top(largest, torch.where(at < n * _CHUNK, inside, chunked + at - n * _CHUNK))


def log_mass(
    logits_RV: Tensor,
    peak_N: Tensor,
    temperature_N: Tensor | None = None,
    least_N: Tensor | None = None,
    at_N: Tensor | None = None,
) -> Tensor:
    """Return ln of the sum of exp((logits - peak) / temperature) over logits of at least ``least``, [N].

    ``at_N`` (int64) selects N of the R positions; None selects all. ``peak_N`` is the largest logit at each of them. If
    ``temperature_N`` is None, it is 1. If ``least_N`` is None, all logits count.
    """
    if has_torch_function_unary(logits_RV):
        return handle_torch_function(log_mass, (logits_RV,), logits_RV, peak_N, temperature_N, least_N, at_N)

    def scale(logits_NV: Tensor, rows: slice) -> Tensor:
        cut_NV = None if least_N is None else logits_NV < least_N[rows, None]
        logits_NV -= peak_N[rows, None]
        if temperature_N is not None:
            logits_NV /= temperature_N[rows, None]
        return logits_NV if cut_NV is None else logits_NV.masked_fill_(cut_NV, -torch.inf)

    width = logits_RV.shape[1]
    if not on_host(logits_RV):
        return scale(logits_RV.clone() if at_N is None else logits_RV[at_N], slice(None)).logsumexp(-1)
    if width <= SMALL:
        logits_NV = (logits_RV if at_N is None else logits_RV[at_N]).detach().numpy()
        scaled_NV = logits_NV - peak_N.detach().numpy()[:, None]
        if temperature_N is not None:
            with np.errstate(over="ignore"):  # a temperature near 0 may overflow
                scaled_NV /= temperature_N.numpy()[:, None]
        mass_NV = np.exp(scaled_NV, out=scaled_NV)
        if least_N is not None:
            mass_NV[logits_NV < least_N.detach().numpy()[:, None]] = 0.0
        return torch.from_numpy(np.log(mass_NV.sum(-1)))
    positions = len(peak_N)
    at_N = torch.arange(positions) if at_N is None else at_N
    step = torch.get_num_threads()
    buffers = torch.empty(2, step, width)
    totals = [logits_RV.new_empty(0)]
    for start in range(0, positions, step):
        rows = slice(start, min(start + step, positions))
        scaled_NV, probs_NV = buffers[:, : rows.stop - start]
        scale(torch.index_select(logits_RV, 0, at_N[rows], out=scaled_NV), rows)
        # softmax is torch's fastest fused sum. The probability of the peak is exp(0) / sum.
        totals.append(-torch.softmax(scaled_NV, -1, out=probs_NV).amax(-1).log())
    return torch.cat(totals)


def spread(logits_NU: Tensor, ids_U: Tensor, size: int) -> Tensor:
    """Spread the logits [..., U] of the tokens ``ids_U`` over a vocabulary of ``size`` tokens, [..., V]. All other
    tokens get -inf."""
    spread_NV = logits_NU.new_full((*logits_NU.shape[:-1], size), -torch.inf)
    return spread_NV.index_copy_(-1, ids_U, logits_NU)
