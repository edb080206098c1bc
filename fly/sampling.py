"""From logits to the processed law, and drawing from it. Knows nothing of caches, models or policies.

Shape legend: B rows, J positions of a row, V vocabulary, N uniforms.

Every random number is a hash of (seed of the request, where its round began, stream, index): a row's output
depends on its own seed and text alone, never on the batch, and a round that is computed again draws the same.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fly.types import Draft, SamplingParams, Sequence
from fly.vocabulary import SMALL, argmax, compiled, log_mass, pick, top

__all__ = ["Law", "ProcessedLaw", "Stream", "constrain", "constrains", "derive", "draw", "uniforms"]


class Stream(IntEnum):
    """Independent sources of randomness within a round."""

    ACCEPT = 0
    SAMPLE = 1


_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64, as signed 64-bit
_UNSIGNED = tuple(mix % 2**64 for mix in _MIX)


def _scramble(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64 with wrap-around."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX[2]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seed_B: Tensor, round_B: Tensor, stream: int, n: int) -> Tensor:
    """Uniform float32 in [0, 1) of shape [B, n] for each row's ``seed_B`` and ``round_B`` (int64 [B])."""
    if not (seed_B.dtype == round_B.dtype == torch.int64 and seed_B.shape == round_B.shape and seed_B.ndim == 1):
        given = [(column.dtype, tuple(column.shape)) for column in (seed_B, round_B)]
        raise ValueError(f"seeds and rounds must be int64 of one shape [B], got {given}")
    if seed_B.device.type == round_B.device.type == "cpu" and (fill := compiled("fly_uniforms")) is not None:
        seed_B, round_B = seed_B.contiguous(), round_B.contiguous()
        uniform_BN = torch.empty(len(seed_B), n)
        fill(seed_B.data_ptr(), round_B.data_ptr(), len(seed_B), stream, n, uniform_BN.data_ptr())
        return uniform_BN
    return _uniforms_by_tensors(seed_B, round_B, stream, n)


def _uniforms_by_tensors(seed_B: Tensor, round_B: Tensor, stream: int, n: int) -> Tensor:
    key_B = _scramble(_scramble(seed_B + _MIX[0]) + round_B * _MIX[0] + stream)
    index_N = torch.arange(1, n + 1, device=seed_B.device)
    bits_BN = _scramble(key_B.unsqueeze(1) + index_N * _MIX[0])
    return ((bits_BN >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _scramble_one(x: int) -> int:
    x = ((x ^ (x >> 30)) * _UNSIGNED[1]) % 2**64
    x = ((x ^ (x >> 27)) * _UNSIGNED[2]) % 2**64
    return x ^ (x >> 31)


def derive(seed: int, position: int) -> int:
    """The seed of a strategy that speculates from ``position`` on: independent of the row's own randomness, and
    of what the same strategy drew in another round."""
    mixed = _scramble_one((seed % 2**64) ^ _UNSIGNED[2]) + position * _UNSIGNED[0]
    found = _scramble_one(mixed % 2**64)
    return found - 2**64 if found >= 2**63 else found


@dataclass(frozen=True)
class Law:
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
    def of(params: Rows[SamplingParams], device: torch.device | str = "cpu") -> Law:
        """Columns of ``params``, one row each."""
        return _law(tuple((p.temperature, p.top_k, p.top_p, p.min_p) for p in params), torch.device(device))

    @cached_property
    def compiled(self) -> Any:
        """What ``fly.kernels`` take, an array of a row each; only of columns on the CPU."""
        from fly.kernels.library import Sampling  # which is of models, and so of what this is for

        columns = self.temperature_B, self.top_p_B, self.min_p_B, self.top_k_B, self.greedy_B
        rows = list(zip(*(column.tolist() for column in columns)))
        made = (Sampling * len(rows))()
        for row, (temperature, top_p, min_p, top_k, greedy) in zip(made, rows):
            row.temperature, row.top_p, row.top_k = 0.0 if greedy else temperature, top_p, min(top_k, 2**31 - 1)
            row.floor = temperature * math.log(min_p) if min_p else -math.inf
        return made

    @staticmethod
    def _of(params: tuple[tuple[float, int, float, float], ...], device: torch.device) -> Law:
        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        limits = torch.finfo(torch.float32)  # beyond them a temperature would round to 0 or infinity: no law at all
        temperatures, top_ks, top_ps, min_ps = zip(*params) if params else ((), (), (), ())
        return Law(
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

    def rows(self, index_B: Tensor) -> Law:
        """Some rows only, ``index_B`` int64."""
        columns = {f.name: getattr(self, f.name)[index_B] for f in fields(self) if f.name.endswith("_B")}
        return replace(self, **columns)

    def on(self, logits_BJV: Tensor) -> ProcessedLaw:
        """The processed law of ``logits_BJV`` [B, J, V]."""
        return ProcessedLaw(self, logits_BJV)

    def probs(self, logits_BJV: Tensor) -> Tensor:
        """The processed law [B, J, V], float32, rows summing to 1; one-hot on the argmax at temperature 0."""
        return self.on(logits_BJV).dense()


_law = lru_cache(64)(Law._of)  # a batch asks for the same round after round


class ProcessedLaw:
    """The law that sampling parameters make of logits, worked out only where somebody looks.

    A position's law is its least logit that is kept, its largest logit, and the mass above the least: three numbers.
    """

    def __init__(self, law: Law, logits_BJV: Tensor) -> None:
        self.law, self.logits_BJV = law, logits_BJV
        self._found: tuple[Tensor, Tensor | None, Tensor] | None = None

    def dense(self) -> Tensor:
        """[B, J, V] float32, rows summing to 1."""
        rows, positions, _ = self.logits_BJV.shape
        device = self.logits_BJV.device
        rows_N = torch.arange(rows, device=device).repeat_interleave(positions)
        return self.at(rows_N, torch.arange(positions, device=device).repeat(rows)).unflatten(0, (rows, positions))

    def at(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """[N, V], the law at some positions of some rows."""
        logits_NV = self.logits_BJV[rows_N, positions_N]
        probs_NV = self._share(logits_NV, rows_N, positions_N)
        if self.law.some_greedy:
            one_hot_NV = torch.zeros_like(logits_NV).scatter_(1, argmax(logits_NV).unsqueeze(1), 1.0)
            probs_NV = torch.where(self.law.greedy_B[rows_N].unsqueeze(1), one_hot_NV, probs_NV)
        return probs_NV

    def of(self, tokens_BK: Tensor) -> Tensor:
        """[B, K], the probability of token j at position j."""
        longest = tokens_BK.shape[1]
        logits_BKV = self.logits_BJV[:, :longest]
        probs_BK = self._share(pick(logits_BKV, tokens_BK).unsqueeze(-1)).squeeze(-1)
        if self.law.some_greedy:
            one_hot_BK = (argmax(logits_BKV) == tokens_BK).float()
            probs_BK = torch.where(self.law.greedy_B.unsqueeze(1), one_hot_BK, probs_BK)
        return probs_BK

    def top(self, n: int) -> Tensor:
        """[B, J, min(n, V)], the largest probabilities at each position, largest first."""
        probs_BJN = self._share(top(self.logits_BJV, n).values)
        if self.law.some_greedy:
            one_hot_BJN = torch.zeros_like(probs_BJN)
            one_hot_BJN[..., 0] = 1.0
            probs_BJN = torch.where(self.law.greedy_B.view(-1, 1, 1), one_hot_BJN, probs_BJN)
        return probs_BJN

    def keeps(self, draft: Draft, coins_BK: Tensor, all_: bool) -> list[list[bool]] | None:
        """Which drafted tokens of each row the exact rule keeps (``coin < target / draft``), those of a chain up to the
        first that it does not keep, or ``all_`` of them; by compiled code. None where there is none for it."""
        rows, places, width = self.logits_BJV.shape
        laws, floats = draft.probs_BKV, torch.float32
        fits = laws is None or (laws.dtype == floats and laws.shape == (rows, places - 1, width))
        flips = (coins_BK.dtype, coins_BK.device.type) == (floats, "cpu")
        if not (self._on_host() and fits and flips and coins_BK.shape == draft.shape == (rows, places - 1)):
            return None
        if not all(0 <= token < width for chain in draft.chains for token in chain):
            return None
        if (accepts := compiled("fly_accepts", self.logits_BJV.numel() > _SOON)) is None:
            return None
        logits_BJV, coins_BK = self.logits_BJV.contiguous(), coins_BK.contiguous()
        laws_BKV = None if draft.probs_BKV is None else draft.probs_BKV.contiguous()
        how = self.law.compiled
        found = []
        for b, chain in enumerate(draft.chains):
            drafted, kept = array("q", chain), array("b", bytes(len(chain)))
            first = accepts(
                logits_BJV.data_ptr() + 4 * b * places * width,
                width,
                ctypes.addressof(how[b]),
                drafted.buffer_info()[0],
                len(chain),
                None if laws_BKV is None else laws_BKV[b].data_ptr(),
                coins_BK[b].data_ptr(),
                all_,
                kept.buffer_info()[0],
            )
            if first < 0:
                raise MemoryError(f"no memory for a law over {width} tokens")
            found.append([keep != 0 for keep in kept])
        return found

    def follow(self, b: int, j: int, rejected: int | None, draft: Draft, uniform: float) -> int:
        """The token drawn at position ``j`` of row ``b``: from its law or, where the exact rule ``rejected`` a drafted
        token, from what the draft's leaves of it (``max(target - draft, 0)``). Where ``keeps`` finds compiled code."""
        logits_V, law_V = self.logits_BJV[b, j].contiguous(), None
        if rejected is not None and draft.probs_BKV is not None:
            law_V = draft.probs_BKV[b, j].contiguous()
        token: int = compiled("fly_follow")(
            logits_V.data_ptr(),
            len(logits_V),
            ctypes.addressof(self.law.compiled[b]),
            -1 if rejected is None else rejected,
            None if law_V is None else law_V.data_ptr(),
            uniform,
        )
        if token < 0:
            raise MemoryError(f"no memory for a law over {len(logits_V)} tokens")
        return token

    def _on_host(self) -> bool:
        logits_BJV = self.logits_BJV
        return type(logits_BJV) is Tensor and logits_BJV.device.type == "cpu" and logits_BJV.dtype == torch.float32

    def rows(self, index_B: Tensor) -> ProcessedLaw:
        """The law of some rows only, ``index_B`` int64."""
        return ProcessedLaw(self.law.rows(index_B), self.logits_BJV[index_B])

    def _share(self, logits: Tensor, rows_N: Tensor | None = None, positions_N: Tensor | None = None) -> Tensor:
        """What each of the given logits has of the mass at its position: [N, ...] of those named, or [B, <= J, ...]."""
        if self._found is None:
            self._found = self._find()
        peak_BJ, least_BJ, total_BJ = self._found

        def column(values_BJ: Tensor) -> Tensor:
            if rows_N is None:
                return values_BJ[:, : logits.shape[1], None]
            return values_BJ[rows_N, positions_N].unsqueeze(1)

        shares = (logits - column(peak_BJ)).div_(column(self.law.temperature_B.unsqueeze(1).expand_as(peak_BJ)))
        shares.sub_(column(total_BJ)).exp_()
        return shares if least_BJ is None else shares.masked_fill_(logits < column(least_BJ), 0.0)

    def _find(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """[B, J] each: the largest logit, the least that is kept (None if all are), ln of the mass kept."""
        law, (rows, positions, width) = self.law, self.logits_BJV.shape
        if (found := self._find_at_once()) is not None:
            return found
        logits_NV = self.logits_BJV.flatten(0, 1)
        peak_N = logits_NV.amax(-1)

        def per_position(column_B: Tensor) -> Tensor:
            return column_B.repeat_interleave(positions)

        temperature_N = per_position(law.temperature_B)
        least_N: Tensor | None = None
        if law.most_k:
            # Compared as logits: softmax may round two different ones to the same probability.
            top_k_N = per_position(law.top_k_B)
            likeliest = top(logits_NV, law.most_k).values
            last_N = likeliest.gather(1, (top_k_N.clamp(1, width) - 1).unsqueeze(1)).squeeze(1)
            least_N = torch.where(top_k_N > 0, last_N, -torch.inf)
        if law.top_p:
            top_p_N = per_position(law.top_p_B)
            total_N = log_mass(logits_NV, peak_N, temperature_N, least_N)
            nucleus_N = _nucleus(logits_NV, peak_N, temperature_N, total_N, top_p_N)
            nucleus_N = torch.where(top_p_N < 1, nucleus_N, -torch.inf)
            least_N = nucleus_N if least_N is None else least_N.maximum(nucleus_N)
        if law.min_p:
            floor_N = peak_N + temperature_N * per_position(law.min_p_B).log()
            least_N = floor_N if least_N is None else least_N.maximum(floor_N)
        total_N = _kept_mass(logits_NV, peak_N, temperature_N, least_N)
        shape = (rows, positions)
        return peak_N.view(shape), None if least_N is None else least_N.view(shape), total_N.view(shape)

    def _find_at_once(self) -> tuple[Tensor, Tensor | None, Tensor] | None:
        """``_find`` by compiled code, for small vocabularies: it goes over all of one many times."""
        law, logits_BJV = self.law, self.logits_BJV
        rows, positions, width = logits_BJV.shape
        lets_go = logits_BJV.numel() > _SOON
        if not self._on_host() or width > SMALL or (find := compiled("fly_kept", lets_go)) is None:
            return None
        logits_BJV, found_3BJ = logits_BJV.contiguous(), torch.empty(3, rows, positions)
        at, each = found_3BJ.data_ptr(), 4 * rows * positions
        how = ctypes.addressof(law.compiled)
        if find(logits_BJV.data_ptr(), rows, positions, width, how, at, at + each, at + 2 * each):
            raise MemoryError(f"no memory for a law over {width} tokens")
        peak_BJ, least_BJ, total_BJ = found_3BJ
        return peak_BJ, least_BJ if law.most_k or law.top_p or law.min_p else None, total_BJ


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


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One token a row, int64 [B], by inverting the cumulative law at ``uniform_B`` in [0, 1).

    ``probs_BV`` need not be normalised; a token of mass zero is never drawn. A row without any mass gives token 0.
    """
    cumulative = probs_BV.double().cumsum(-1)
    total_B = cumulative[:, -1]
    at = torch.searchsorted(cumulative, (uniform_B.double() * total_B).unsqueeze(1), right=True).squeeze(1)
    return torch.where(total_B > 0, at, 0)


def constrains(row: Sequence) -> bool:
    """Whether ``constrain`` may change anything for a row, now or later in its draft."""
    early = bool(row.stop_ids) and row.generated < row.params.min_tokens
    return early or row.params.penalises or row.matcher is not None


def constrain(
    logits_BJV: Tensor, rows: Rows[Sequence], drafts: Rows[list[int]], parents: Rows[list[int]] | None = None
) -> Tensor:
    """Logits after penalties, biases and bans (-inf) of each row, in this order; a copy if there are any.

    Last come the bans of a row's grammar, which are right at every place (``fly.structured.Matcher``).

    Position 0 of a row is the token after its last, position j + 1 the one after the drafted token j, with all on the
    path to it counted in (``parents`` as in ``Draft``; None for chains). Banned are stop tokens before ``min_tokens``,
    and the last token of a bad sequence. Positions beyond a row's draft are padding, and stay as they are.
    """
    constrained = logits_BJV
    for b, (row, draft) in enumerate(zip(rows, drafts)):
        if not constrains(row):
            continue
        early = row.stop_ids and row.generated < row.params.min_tokens
        constrained = logits_BJV.clone() if constrained is logits_BJV else constrained
        tree = range(-1, len(draft) - 1) if parents is None else parents[b]
        texts = [row.tokens[row.prompt_length :]]
        if early or row.params.penalises:
            for token, parent in zip(draft, tree):
                texts.append([*texts[parent + 1], token])
            for logits_V, text in zip(constrained[b], texts):
                if row.params.penalises:
                    _penalise(logits_V, row, text)
                if early and len(text) < row.params.min_tokens:
                    logits_V[sorted(row.stop_ids)] = -torch.inf
        if row.matcher is not None:
            raw_JV = logits_BJV[b] if early or row.bad else None
            row.matcher.constrain(constrained[b], texts[0], draft, tree, raw_JV)
    return constrained


def _penalise(logits_V: Tensor, row: Sequence, text: list[int]) -> None:
    """Apply what a request says about single tokens to the logits after ``text``, in place."""
    params, device = row.params, logits_V.device
    counts = Counter(text)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.tokens[: row.prompt_length], *counts}), device=device)
        old = logits_V[seen]
        logits_V[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if counts and (params.frequency_penalty or params.presence_penalty):
        times = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=device)
        penalty = params.frequency_penalty * times + params.presence_penalty
        logits_V[torch.tensor(list(counts), device=device)] -= penalty
    if params.logit_bias:
        biases = torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype, device=device)
        logits_V[torch.tensor(list(params.logit_bias), device=device)] += biases
    if row.bad:
        whole = row.tokens[: row.prompt_length] + text if any(len(bad) > 1 for bad in row.bad) else text
        ends = [bad[-1] for bad in row.bad if len(bad) == 1 or tuple(whole[1 - len(bad) :]) == bad[:-1]]
        logits_V[ends] = -torch.inf
