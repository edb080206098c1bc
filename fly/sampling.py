"""From logits to the processed distribution. Knows nothing of caches, models or policies.

Shape legend: B rows, J positions of a row, V vocabulary, N uniforms.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import abc
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fly.ops import SMALL, argmax, compiled, log_mass, pick, top
from fly.types import Draft, SamplingParams

__all__ = ["BatchSampling", "ProcessedDistribution"]


@dataclass(frozen=True)
class BatchSampling:
    """The sampling parameters of a batch as columns, and what they make of logits.

    Temperature first, then top-k (tokens that fewer than k are likelier than), then top-p on what is left (tokens
    whose likelier ones have less than a share p of the mass), then min-p (at least that share of the likeliest's
    mass). Equally likely tokens are kept or cut together.
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
        """Columns of ``params``, one row each."""
        return _distribution(tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in params), torch.device(device))

    @cached_property
    def compiled(self) -> Any:
        """What ``fly.backends.cpu`` take, an array of a row each; only of columns on the CPU."""
        from fly.backends.cpu.library import Sampling  # which is of models, and so of what this is for

        columns = self.temperature_B, self.top_p_B, self.min_p_B, self.top_k_B, self.greedy_B
        rows = list(zip(*(column.tolist() for column in columns)))
        made = (Sampling * len(rows))()
        for row, (temperature, top_p, min_p, top_k, greedy) in zip(made, rows):
            row.temperature, row.top_p, row.top_k = 0.0 if greedy else temperature, top_p, min(top_k, 2**31 - 1)
            row.floor = temperature * math.log(min_p) if min_p else -math.inf
        return made

    @staticmethod
    def _of(params: tuple[tuple[float, int, float, float], ...], device: torch.device) -> BatchSampling:
        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        limits = torch.finfo(
            torch.float32
        )  # beyond them a temperature would round to 0 or infinity: no distribution at all
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
        """Some rows only, ``index_B`` int64."""
        columns = {f.name: getattr(self, f.name)[index_B] for f in fields(self) if f.name.endswith("_B")}
        return replace(self, **columns)

    def on(self, logits_BJV: Tensor) -> ProcessedDistribution:
        """The processed distribution of ``logits_BJV`` [B, J, V]."""
        return ProcessedDistribution(self, logits_BJV)

    def probs(self, logits_BJV: Tensor) -> Tensor:
        """The processed distribution [B, J, V], float32, rows summing to 1; one-hot on the argmax at temperature 0."""
        return self.on(logits_BJV).dense()


_distribution = lru_cache(64)(BatchSampling._of)  # a batch asks for the same round after round


class ProcessedDistribution:
    """The distribution that sampling parameters make of logits, worked out only where somebody looks.

    A position's distribution is its least logit that is kept, its largest logit, and the mass above the least: three
    numbers.
    """

    def __init__(self, distribution: BatchSampling, logits_BJV: Tensor) -> None:
        self.distribution, self.logits_BJV = distribution, logits_BJV
        self._found: tuple[Tensor, Tensor | None, Tensor] | None = None

    def dense(self) -> Tensor:
        """[B, J, V] float32, rows summing to 1."""
        rows, positions, _ = self.logits_BJV.shape
        device = self.logits_BJV.device
        rows_N = torch.arange(rows, device=device).repeat_interleave(positions)
        return self.at(rows_N, torch.arange(positions, device=device).repeat(rows)).unflatten(0, (rows, positions))

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """[N, V], the distribution at some positions of some rows."""
        logits_NV = self.logits_BJV[rows_N, positions_N]
        probs_NV = self._share(logits_NV, rows_N, positions_N)
        if self.distribution.some_greedy:
            one_hot_NV = torch.zeros_like(logits_NV).scatter_(1, argmax(logits_NV).unsqueeze(1), 1.0)
            probs_NV = torch.where(self.distribution.greedy_B[rows_N].unsqueeze(1), one_hot_NV, probs_NV)
        return probs_NV

    def of(self, tokens_BK: Tensor) -> Tensor:
        """[B, K], the probability of token j at position j."""
        longest = tokens_BK.shape[1]
        logits_BKV = self.logits_BJV[:, :longest]
        probs_BK = self._share(pick(logits_BKV, tokens_BK).unsqueeze(-1)).squeeze(-1)
        if self.distribution.some_greedy:
            one_hot_BK = (argmax(logits_BKV) == tokens_BK).float()
            probs_BK = torch.where(self.distribution.greedy_B.unsqueeze(1), one_hot_BK, probs_BK)
        return probs_BK

    def top(self, n: int) -> Tensor:
        """[B, J, min(n, V)], the largest probabilities at each position, largest first."""
        probs_BJN = self._share(top(self.logits_BJV, n).values)
        if self.distribution.some_greedy:
            one_hot_BJN = torch.zeros_like(probs_BJN)
            one_hot_BJN[..., 0] = 1.0
            probs_BJN = torch.where(self.distribution.greedy_B.view(-1, 1, 1), one_hot_BJN, probs_BJN)
        return probs_BJN

    def keeps(self, draft: Draft, coins_BK: Tensor, all_: bool) -> list[list[bool]] | None:
        """Which drafted tokens of each row the exact rule keeps (``coin < target / draft``), those of a chain up to the
        first that it does not keep, or ``all_`` of them; by compiled code. None where there is none for it."""
        rows, places, width = self.logits_BJV.shape
        distributions, floats = draft.probs_BKV, torch.float32
        fits = distributions is None or (
            distributions.dtype == floats and distributions.shape == (rows, places - 1, width)
        )
        flips = (coins_BK.dtype, coins_BK.device.type) == (floats, "cpu")
        if not (self._on_host() and fits and flips and coins_BK.shape == draft.shape == (rows, places - 1)):
            return None
        if not all(0 <= token < width for chain in draft.chains for token in chain):
            return None
        if (accepts := compiled("fly_accepts", self.logits_BJV.numel() > _SOON)) is None:
            return None
        logits_BJV, coins_BK = self.logits_BJV.contiguous(), coins_BK.contiguous()
        probs_BKV = None if draft.probs_BKV is None else draft.probs_BKV.contiguous()
        how = self.distribution.compiled
        found = []
        for b, chain in enumerate(draft.chains):
            drafted, kept = array("q", chain), array("b", bytes(len(chain)))
            first = accepts(
                logits_BJV.data_ptr() + 4 * b * places * width,
                width,
                ctypes.addressof(how[b]),
                drafted.buffer_info()[0],
                len(chain),
                None if probs_BKV is None else probs_BKV[b].data_ptr(),
                coins_BK[b].data_ptr(),
                all_,
                kept.buffer_info()[0],
            )
            if first < 0:
                raise MemoryError(f"no memory for a distribution over {width} tokens")
            found.append([keep != 0 for keep in kept])
        return found

    def follow(self, b: int, j: int, rejected: int | None, draft: Draft, uniform: float) -> int:
        """The token drawn at position ``j`` of row ``b``: from its distribution or, where the exact rule ``rejected`` a
        drafted token, from what the draft's leaves of it (``max(target - draft, 0)``). Where ``keeps`` finds compiled
        code."""
        logits_V, probs_V = self.logits_BJV[b, j].contiguous(), None
        if rejected is not None and draft.probs_BKV is not None:
            probs_V = draft.probs_BKV[b, j].contiguous()
        token: int = compiled("fly_follow")(
            logits_V.data_ptr(),
            len(logits_V),
            ctypes.addressof(self.distribution.compiled[b]),
            -1 if rejected is None else rejected,
            None if probs_V is None else probs_V.data_ptr(),
            uniform,
        )
        if token < 0:
            raise MemoryError(f"no memory for a distribution over {len(logits_V)} tokens")
        return token

    def _on_host(self) -> bool:
        logits_BJV = self.logits_BJV
        return type(logits_BJV) is Tensor and logits_BJV.device.type == "cpu" and logits_BJV.dtype == torch.float32

    def rows(self, index_B: Tensor) -> ProcessedDistribution:
        """The distribution of some rows only, ``index_B`` int64."""
        return ProcessedDistribution(self.distribution.rows(index_B), self.logits_BJV[index_B])

    def _share(self, logits: Tensor, rows_N: Tensor | None = None, positions_N: Tensor | None = None) -> Tensor:
        """What each of the given logits has of the mass at its position: [N, ...] of those named, or [B, <= J, ...]."""
        if self._found is None:
            self._found = self._find()
        peak_BJ, least_BJ, total_BJ = self._found

        def column(values_BJ: Tensor) -> Tensor:
            if rows_N is None:
                return values_BJ[:, : logits.shape[1], None]
            return values_BJ[rows_N, positions_N].unsqueeze(1)

        shares = (logits - column(peak_BJ)).div_(
            column(self.distribution.temperature_B.unsqueeze(1).expand_as(peak_BJ))
        )
        shares.sub_(column(total_BJ)).exp_()
        return shares if least_BJ is None else shares.masked_fill_(logits < column(least_BJ), 0.0)

    def _find(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """[B, J] each: the largest logit, the least that is kept (None if all are), ln of the mass kept."""
        distribution, (rows, positions, width) = self.distribution, self.logits_BJV.shape
        if (found := self._find_at_once()) is not None:
            return found
        logits_NV = self.logits_BJV.flatten(0, 1)
        peak_N = logits_NV.amax(-1)

        def per_position(column_B: Tensor) -> Tensor:
            return column_B.repeat_interleave(positions)

        temperature_N = per_position(distribution.temperature_B)
        least_N: Tensor | None = None
        if distribution.most_k:
            # Compared as logits: softmax may round two different ones to the same probability.
            top_k_N = per_position(distribution.top_k_B)
            likeliest = top(logits_NV, distribution.most_k).values
            last_N = likeliest.gather(1, (top_k_N.clamp(1, width) - 1).unsqueeze(1)).squeeze(1)
            least_N = torch.where(top_k_N > 0, last_N, -torch.inf)
        if distribution.top_p:
            top_p_N = per_position(distribution.top_p_B)
            total_N = log_mass(logits_NV, peak_N, temperature_N, least_N)
            nucleus_N = _nucleus(logits_NV, peak_N, temperature_N, total_N, top_p_N)
            nucleus_N = torch.where(top_p_N < 1, nucleus_N, -torch.inf)
            least_N = nucleus_N if least_N is None else least_N.maximum(nucleus_N)
        if distribution.min_p:
            floor_N = peak_N + temperature_N * per_position(distribution.min_p_B).log()
            least_N = floor_N if least_N is None else least_N.maximum(floor_N)
        total_N = _kept_mass(logits_NV, peak_N, temperature_N, least_N)
        shape = (rows, positions)
        return peak_N.view(shape), None if least_N is None else least_N.view(shape), total_N.view(shape)

    def _find_at_once(self) -> tuple[Tensor, Tensor | None, Tensor] | None:
        """``_find`` by compiled code, for small vocabularies: it goes over all of one many times."""
        distribution, logits_BJV = self.distribution, self.logits_BJV
        rows, positions, width = logits_BJV.shape
        lets_go = logits_BJV.numel() > _SOON
        if not self._on_host() or width > SMALL or (find := compiled("fly_kept", lets_go)) is None:
            return None
        logits_BJV, found_3BJ = logits_BJV.contiguous(), torch.empty(3, rows, positions)
        at, each = found_3BJ.data_ptr(), 4 * rows * positions
        how = ctypes.addressof(distribution.compiled)
        if find(logits_BJV.data_ptr(), rows, positions, width, how, at, at + each, at + 2 * each):
            raise MemoryError(f"no memory for a distribution over {width} tokens")
        peak_BJ, least_BJ, total_BJ = found_3BJ
        return peak_BJ, least_BJ if distribution.most_k or distribution.top_p or distribution.min_p else None, total_BJ


_SOON = 1 << 18  # logits that are gone through sooner than another thread would give the interpreter back
_FIRST = 16  # most nuclei are within this many tokens


def _kept_mass(logits_NV: Tensor, peak_N: Tensor, temperature_N: Tensor, least_N: Tensor | None) -> Tensor:
    """[N] ``log_mass``, on the CPU of the likeliest tokens alone where no others are kept."""
    if least_N is None or logits_NV.device.type != "cpu":
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
    """[N] the least logit whose likelier tokens have less than ``top_p`` of the mass (``total`` is its ln).

    On the CPU most positions are decided by a few of the likeliest tokens, and only the others look at more; an
    accelerator sorts them all, since asking which are decided would make it wait.
    """
    width = logits_NV.shape[-1]

    def among(n: int, at: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The answer if it is among the n likeliest, and whether it is."""
        likeliest = top(logits_NV[at], n).values if n < width else logits_NV[at].sort(-1, descending=True).values
        mass = ((likeliest - peak_N[at, None]) / temperature_N[at, None] - total_N[at, None]).exp()
        likelier = torch.nn.functional.pad(mass.cumsum(-1)[:, :-1], (1, 0))
        count = (likelier < top_p_N[at, None]).sum(-1, keepdim=True)
        return likeliest.gather(1, count - 1).squeeze(1), count.squeeze(1) < likeliest.shape[1]

    if logits_NV.device.type != "cpu":
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
