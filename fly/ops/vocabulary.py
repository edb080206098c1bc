"""Passes over the vocabulary, as few and as cheap as they can be. Knows nothing of policies or models.

Shape legend: R positions, N of them, V vocabulary, "..." any leading dimensions.

On the CPU, fresh memory of the size of the logits costs more than the arithmetic done in it, and a selection over
the vocabulary more than ten plain passes. So the largest are looked for by chunks, and sums taken in a small buffer.
Accelerators have neither trouble, and must not be asked for intermediate results: there it is torch's own kernels.

A tensor with ways of its own (a vocabulary that is not all in one place) overrides these functions as it would torch's
own, by ``__torch_function__``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

__all__ = ["SMALL", "Top", "argmax", "log_mass", "nan_at", "one_hot", "pick", "top"]

_CHUNK = 64
SMALL = 8192  # vocabularies up to this are done in one go
_FEW = 1 << 15  # values that are looked through sooner than they are cut into chunks


def argmax(values: Tensor) -> Tensor:
    """[...] int64: the index of the largest of the last dimension, the lowest among equals."""
    if has_torch_function_unary(values):
        return handle_torch_function(argmax, (values,), values)
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return values.argmax(-1)
    return torch.from_numpy(np.asarray(values.numpy(force=True).argmax(-1)))  # vectorised, which torch's is not


def pick(values: Tensor, index: Tensor) -> Tensor:
    """The element at ``index`` [...] of each vector [..., V] of ``values``: [...]."""
    if has_torch_function_unary(values):
        return handle_torch_function(pick, (values,), values, index)
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def one_hot(like: Tensor, tokens: Tensor) -> Tensor:
    """[..., V] the distributions of ``tokens`` [...] that are certain, in the shape and dtype of ``like``."""
    if has_torch_function_unary(like):
        return handle_torch_function(one_hot, (like,), like, tokens)
    return torch.zeros_like(like).scatter_(-1, tokens.unsqueeze(-1), 1.0)


def nan_at(values: Tensor, index: Tensor) -> Tensor:
    """[...] bool: whether the element at ``index`` [...] of each vector [..., V] of ``values`` is NaN. Of a vocabulary
    that ranks share it says no, since they would have to exchange that."""
    if has_torch_function_unary(values):
        return handle_torch_function(nan_at, (values,), values, index)
    return pick(values, index).isnan()


class Top(NamedTuple):
    """The largest of the last dimension, largest first."""

    values: Tensor
    indices: Tensor


def top(values: Tensor, n: int) -> Top:
    """The min(n, V) largest of each vector [..., V], and where they are (int64).

    A large one lies in a chunk whose maximum is large: only the n best chunks, and what is left over at the end, are
    looked at twice.
    """
    if has_torch_function_unary(values):
        return handle_torch_function(top, (values,), values, n)
    width = values.shape[-1]
    if values.device.type != "cpu" or width < 4 * n * _CHUNK or values.numel() <= _FEW:
        return Top(*values.topk(min(n, width), dim=-1))
    whole = width - width % _CHUNK
    chunks = values[..., :whole].unflatten(-1, (-1, _CHUNK))
    best = chunks.amax(-1).topk(n, dim=-1, sorted=False).indices.unsqueeze(-1)
    picked = chunks.gather(-2, best.expand(*best.shape[:-1], _CHUNK)).flatten(-2)
    found, at = torch.cat([picked, values[..., whole:]], dim=-1).topk(n, dim=-1)
    inside = (best.squeeze(-1).gather(-1, (at // _CHUNK).clamp_max(n - 1))) * _CHUNK + at % _CHUNK
    return Top(found, torch.where(at < n * _CHUNK, inside, whole + at - n * _CHUNK))


def log_mass(
    logits_RV: Tensor,
    peak_N: Tensor,
    temperature_N: Tensor | None = None,
    least_N: Tensor | None = None,
    at_N: Tensor | None = None,
) -> Tensor:
    """[N] ln of the sum of exp((logits - peak) / temperature) over logits of at least ``least``.

    ``at_N`` (int64) says which of the R positions; None is all of them. ``peak_N`` is the largest logit there;
    ``temperature_N`` None is 1, ``least_N`` None leaves nothing out.
    """
    if has_torch_function_unary(logits_RV):
        return handle_torch_function(log_mass, (logits_RV,), logits_RV, peak_N, temperature_N, least_N, at_N)

    def scale(logits_NV: Tensor, rows: slice) -> Tensor:
        """In place."""
        cut_NV = None if least_N is None else logits_NV < least_N[rows, None]
        logits_NV -= peak_N[rows, None]
        if temperature_N is not None:
            logits_NV /= temperature_N[rows, None]
        return logits_NV if cut_NV is None else logits_NV.masked_fill_(cut_NV, -torch.inf)

    width = logits_RV.shape[1]
    if logits_RV.device.type != "cpu":
        return scale(logits_RV.clone() if at_N is None else logits_RV[at_N], slice(None)).logsumexp(-1)
    if width <= SMALL:
        logits_NV = (logits_RV if at_N is None else logits_RV[at_N]).detach().numpy()
        scaled_NV = logits_NV - peak_N.detach().numpy()[:, None]
        if temperature_N is not None:
            with np.errstate(over="ignore"):  # of one next to 0
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
        # The fused softmax is the fastest sum there is; the peak's share of it, exp(0) / sum, gives it away.
        totals.append(-torch.softmax(scaled_NV, -1, out=probs_NV).amax(-1).log())
    return torch.cat(totals)
