"""From logits to the processed distribution. Knows nothing of caches, models or policies.

Shape legend: B rows, J positions of a row, K longest draft, N positions, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fly.devices import on_host
from fly.ops import argmax, log_mass, one_hot, pick, sent, top, vectors_at
from fly.types import SamplingParams

__all__ = ["BatchSampling", "ProcessedDistribution", "find_kept"]


@dataclass(frozen=True, eq=False)
class BatchSampling:
    """The sampling parameters of a batch as columns, and how they process logits.

    Temperature comes first. Then top-k keeps a token if fewer than k tokens are likelier. Of the tokens that are left,
    top-p keeps one if all likelier ones together have less than a share p of the mass. Min-p keeps a token if it has at
    least that share of the likeliest token's mass. Equally likely tokens are kept or cut together.
    """

    temperature_B: Tensor  # 1 where greedy
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    greedy_B: Tensor
    some_greedy: bool
    most_k: int  # the largest top-k of any row; 0 if none asks for it
    top_p: bool  # some row asks for it
    min_p: bool

    @staticmethod
    def of(params: abc.Sequence[SamplingParams], device: torch.device | str = "cpu") -> BatchSampling:
        """Make columns of ``params``, one entry for each row."""
        values = tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in params)
        return BatchSampling._columns(values, torch.device(device))

    @staticmethod
    @lru_cache(64)  # the same batch asks in every round
    def _columns(params: tuple[tuple[float, int, float, float], ...], device: torch.device) -> BatchSampling:
        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return sent(torch.tensor(values, dtype=dtype), device)

        limits = torch.finfo(torch.float32)  # outside these limits a temperature would round to 0 or infinity
        temperatures, top_ks, top_ps, min_ps = zip(*params) if params else ((), (), (), ())
        return BatchSampling(
            temperature_B=column([min(max(t or 1.0, limits.tiny), limits.max) for t in temperatures]),
            top_k_B=column(list(top_ks), torch.int64),
            top_p_B=column(list(top_ps)),
            min_p_B=column(list(min_ps)),
            greedy_B=column([t == 0 for t in temperatures], torch.bool),
            some_greedy=0 in temperatures,
            most_k=max(top_ks, default=0),
            top_p=any(p < 1 for p in top_ps),
            min_p=any(p > 0 for p in min_ps),
        )

    def rows(self, index_B: Tensor) -> BatchSampling:
        """Return the columns of some rows only, ``index_B`` int64."""
        columns = {f.name: getattr(self, f.name)[index_B] for f in fields(self) if f.name.endswith("_B")}
        return replace(self, **columns)

    def on(self, logits_BJV: Tensor) -> ProcessedDistribution:
        """Return the processed distribution of ``logits_BJV`` [B, J, V]."""
        return ProcessedDistribution(self, logits_BJV)

    def probs(self, logits_BJV: Tensor) -> Tensor:
        """Return the processed distribution [B, J, V], float32, each summing to 1; one-hot on the argmax at temperature
        0."""
        return self.on(logits_BJV).dense()


def find_kept(
    logits_NV: Tensor, temperature_N: Tensor, least_N: Tensor | None, top_p_N: Tensor | None, min_p_N: Tensor | None
) -> Tensor:
    """Return three numbers for each position [3, N]: the largest logit; the least logit that is kept (minus infinity if
    all are); ln of the mass that is kept.

    Args:
        least_N: the least logit that top-k keeps; None: no row asks for top-k.
        top_p_N, min_p_N: as in ``SamplingParams``; None: no row asks for it.
    """
    peak_N = logits_NV.amax(-1)
    if top_p_N is not None:
        total_N = log_mass(logits_NV, peak_N, temperature_N, least_N)
        nucleus_N = _nucleus(logits_NV, peak_N, temperature_N, total_N, top_p_N)
        nucleus_N = torch.where(top_p_N < 1, nucleus_N, -torch.inf)
        least_N = nucleus_N if least_N is None else least_N.maximum(nucleus_N)
    if min_p_N is not None:
        floor_N = peak_N + temperature_N * min_p_N.log()
        least_N = floor_N if least_N is None else least_N.maximum(floor_N)
    total_N = _kept_mass(logits_NV, peak_N, temperature_N, least_N)
    return torch.stack([peak_N, torch.full_like(peak_N, -torch.inf) if least_N is None else least_N, total_N])


class ProcessedDistribution:
    """The processed distribution of logits, computed only where it is read.

    Three numbers describe it at a position: the largest logit, the least logit that is kept, and the mass that is kept.
    """

    def __init__(self, sampling: BatchSampling, logits_BJV: Tensor) -> None:
        self.sampling = sampling
        self.logits_BJV = logits_BJV
        self._summary: tuple[Tensor, Tensor | None, Tensor] | None = None

    def dense(self) -> Tensor:
        """Return the whole distribution [B, J, V], float32, each summing to 1."""
        probs_BJV = self._share(self.logits_BJV)
        if self.sampling.some_greedy:
            one_hot_BJV = one_hot(self.logits_BJV, argmax(self.logits_BJV))
            probs_BJV = torch.where(self.sampling.greedy_B.view(-1, 1, 1), one_hot_BJV, probs_BJV)
        return probs_BJV

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return the distributions [N, V] at some positions of some rows."""
        logits_NV = vectors_at(self.logits_BJV, rows_N, positions_N)
        probs_NV = self._share(logits_NV, rows_N, positions_N)
        if self.sampling.some_greedy:
            one_hot_NV = one_hot(logits_NV, argmax(logits_NV))
            probs_NV = torch.where(self.sampling.greedy_B[rows_N].unsqueeze(1), one_hot_NV, probs_NV)
        return probs_NV

    def of(self, tokens_BK: Tensor) -> Tensor:
        """Return the probability [B, K] of token j at position j."""
        longest = tokens_BK.shape[1]
        logits_BKV = self.logits_BJV[:, :longest]
        probs_BK = self._share(pick(logits_BKV, tokens_BK).unsqueeze(-1)).squeeze(-1)
        if self.sampling.some_greedy:
            one_hot_BK = (argmax(logits_BKV) == tokens_BK).float()
            probs_BK = torch.where(self.sampling.greedy_B.unsqueeze(1), one_hot_BK, probs_BK)
        return probs_BK

    def top(self, n: int) -> Tensor:
        """Return the largest probabilities [B, J, min(n, V)] at each position, largest first."""
        probs_BJN = self._share(top(self.logits_BJV, n).values)
        if self.sampling.some_greedy:
            one_hot_BJN = torch.zeros_like(probs_BJN)
            one_hot_BJN[..., 0] = 1.0
            probs_BJN = torch.where(self.sampling.greedy_B.view(-1, 1, 1), one_hot_BJN, probs_BJN)
        return probs_BJN

    def rows(self, index_B: Tensor) -> ProcessedDistribution:
        """Return the distribution of some rows only, ``index_B`` int64."""
        return type(self)(self.sampling.rows(index_B), self.logits_BJV[index_B])

    def _share(self, logits: Tensor, rows_N: Tensor | None = None, positions_N: Tensor | None = None) -> Tensor:
        """Return the probability of each given logit: [N, ...] at the named positions, or [B, <= J, ...]."""
        if self._summary is None:
            self._summary = self._find()
        peak_BJ, least_BJ, total_BJ = self._summary

        def column(values_BJ: Tensor) -> Tensor:
            if rows_N is None:
                return values_BJ[:, : logits.shape[1], None]
            return values_BJ[rows_N, positions_N].unsqueeze(1)

        shares = (logits - column(peak_BJ)).div_(column(self.sampling.temperature_B.unsqueeze(1).expand_as(peak_BJ)))
        shares.sub_(column(total_BJ)).exp_()
        return shares if least_BJ is None else shares.masked_fill_(logits < column(least_BJ), 0.0)

    def _find(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return, [B, J] each, the largest logit, the least that is kept (None if all are), and ln of the mass kept."""
        sampling, (rows, positions, width) = self.sampling, self.logits_BJV.shape
        logits_NV = self.logits_BJV.flatten(0, 1)

        def per_position(column_B: Tensor) -> Tensor:
            return column_B.repeat_interleave(positions)

        temperature_N = per_position(sampling.temperature_B)
        least_N: Tensor | None = None
        if sampling.most_k:
            # Compared as logits: softmax may round two different ones to the same probability.
            top_k_N = per_position(sampling.top_k_B)
            likeliest = top(logits_NV, sampling.most_k).values
            last_N = likeliest.gather(1, (top_k_N.clamp(1, width) - 1).unsqueeze(1)).squeeze(1)
            least_N = torch.where(top_k_N > 0, last_N, -torch.inf)
        top_p_N = per_position(sampling.top_p_B) if sampling.top_p else None
        min_p_N = per_position(sampling.min_p_B) if sampling.min_p else None
        peak_N, kept_N, total_N = self._find_kept(logits_NV, temperature_N, least_N, top_p_N, min_p_N)
        shape, cuts = (rows, positions), sampling.most_k or sampling.top_p or sampling.min_p
        return peak_N.view(shape), kept_N.view(shape) if cuts else None, total_N.view(shape)

    def _find_kept(self, logits_NV: Tensor, *limits_N: Any) -> Tensor:
        return find_kept(logits_NV, *limits_N)


_FIRST = 16  # most nuclei are within this many tokens


def _kept_mass(logits_NV: Tensor, peak_N: Tensor, temperature_N: Tensor, least_N: Tensor | None) -> Tensor:
    """Return ``log_mass`` [N]. On the CPU, where only a few of the likeliest tokens are kept, only these are added
    up."""
    if least_N is None or not on_host(logits_NV):
        return log_mass(logits_NV, peak_N, temperature_N, least_N)
    likeliest = top(logits_NV, _FIRST).values
    mass = ((likeliest - peak_N.unsqueeze(1)) / temperature_N.unsqueeze(1)).exp()
    total_N = mass.masked_fill(likeliest < least_N.unsqueeze(1), 0.0).sum(-1).log()
    if likeliest.shape[1] < logits_NV.shape[1]:
        at = (likeliest[:, -1] >= least_N).nonzero().squeeze(1)
        if len(at):
            total_N[at] = log_mass(logits_NV, peak_N[at], temperature_N[at], least_N[at], at)
    return total_N


def _nucleus(logits_NV: Tensor, peak_N: Tensor, temperature_N: Tensor, total_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Return the least logit [N] that top-p keeps: likelier tokens have less than ``top_p`` of the mass (``total_N`` is
    the mass's ln).

    On the CPU a few of the likeliest tokens decide most positions; only the others look at more tokens. An accelerator
    sorts all tokens, because finding out which positions are decided would make it wait.
    """
    width = logits_NV.shape[-1]

    def among(n: int, at: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the answer among the n likeliest, and whether it is the right one."""
        likeliest = top(logits_NV[at], n).values if n < width else logits_NV[at].sort(-1, descending=True).values
        mass = ((likeliest - peak_N[at, None]) / temperature_N[at, None] - total_N[at, None]).exp()
        likelier = torch.nn.functional.pad(mass.cumsum(-1)[:, :-1], (1, 0))
        count = (likelier < top_p_N[at, None]).sum(-1, keepdim=True)
        return likeliest.gather(1, count - 1).squeeze(1), count.squeeze(1) < likeliest.shape[1]

    if not on_host(logits_NV):
        return among(width, slice(None))[0]
    n = _FIRST
    least_N, decided_N = among(n, slice(None))
    while n < width:
        at = (~decided_N & (top_p_N < 1)).nonzero().squeeze(1)
        if not len(at):
            break
        n *= 16
        least_N[at], decided_N[at] = among(n, at)
    return least_N
