"""From logits to the processed law, and drawing from it. Knows nothing of caches, models or policies.

Shape legend: B rows, J positions of a row, V vocabulary, N uniforms.

Every random number is a hash of (seed of the request, where its round began, stream, index): a row's output
depends on its own seed and text alone, never on the batch, and a round that is computed again draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from fly.types import SamplingParams, Sequence

__all__ = ["Law", "Stream", "ban_early_stops", "derive", "draw", "uniforms"]


class Stream(IntEnum):
    """Independent sources of randomness within a round."""

    ACCEPT = 0
    SAMPLE = 1


_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64, as signed 64-bit


def _scramble(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64 with wrap-around."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX[2]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seed_B: Tensor, round_B: Tensor, stream: int, n: int) -> Tensor:
    """Uniform float32 in [0, 1) of shape [B, n] for each row's ``seed_B`` and ``round_B`` (int64 [B])."""
    key_B = _scramble(_scramble(seed_B + _MIX[0]) + round_B * _MIX[0] + stream)
    index_N = torch.arange(1, n + 1, device=seed_B.device)
    bits_BN = _scramble(key_B.unsqueeze(1) + index_N * _MIX[0])
    return ((bits_BN >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def derive(seed: int, position: int) -> int:
    """The seed of a strategy that speculates from ``position`` on: independent of the row's own randomness, and
    of what the same strategy drew in another round."""
    base = torch.tensor([seed]), torch.tensor([position])
    return int(_scramble(_scramble(base[0] ^ _MIX[2]) + base[1] * _MIX[0]))


@dataclass(frozen=True)
class Law:
    """The sampling parameters of a batch as columns, and what they make of logits."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    greedy_B: Tensor
    some_greedy: bool
    sorts: bool  # some row asks for top-k or top-p
    min_p: bool

    @staticmethod
    def of(params: Rows[SamplingParams], device: torch.device | str = "cpu") -> Law:
        """Columns of ``params``, one row each."""

        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        limits = torch.finfo(torch.float32)  # beyond them a temperature would round to 0 or infinity: no law at all
        return Law(
            temperature_B=column([min(max(p.temperature, limits.tiny), limits.max) for p in params]),
            top_k_B=column([p.top_k for p in params], torch.int64),
            top_p_B=column([p.top_p for p in params]),
            min_p_B=column([p.min_p for p in params]),
            greedy_B=column([p.temperature == 0 for p in params], torch.bool),
            some_greedy=any(p.temperature == 0 for p in params),
            sorts=any(p.top_k or p.top_p < 1 for p in params),
            min_p=any(p.min_p > 0 for p in params),
        )

    def probs(self, logits_BJV: Tensor) -> Tensor:
        """The processed law [B, J, V], float32, rows summing to 1; one-hot on the argmax at temperature 0.

        Temperature first, then top-k (exactly k: ties by lower id), then top-p on what is left (the smallest
        set of likeliest tokens whose mass reaches p), then min-p (at least that share of the likeliest's mass).
        """

        def per_row(column_B: Tensor) -> Tensor:
            return column_B.view(-1, 1, 1)

        peak_BJ1 = logits_BJV.amax(-1, keepdim=True)
        temperature = per_row(torch.where(self.greedy_B, 1.0, self.temperature_B))
        probs = ((logits_BJV - peak_BJ1) / temperature).softmax(-1)
        if self.sorts:
            # Ranked by logits: softmax may round two different ones to the same probability.
            order = logits_BJV.sort(dim=-1, descending=True, stable=True).indices
            ordered = probs.gather(-1, order)
            top_k = per_row(torch.where(self.top_k_B == 0, logits_BJV.shape[-1], self.top_k_B))
            rank_V = torch.arange(logits_BJV.shape[-1], device=logits_BJV.device)
            ordered = ordered.masked_fill(rank_V >= top_k, 0.0)
            before = ordered.cumsum(-1) - ordered
            reached = before >= per_row(self.top_p_B) * ordered.sum(-1, keepdim=True)
            ordered = ordered.masked_fill(reached & (per_row(self.top_p_B) < 1) & (rank_V > 0), 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
        if self.min_p:
            probs = probs.masked_fill(probs < per_row(self.min_p_B) * probs.amax(-1, keepdim=True), 0.0)
        if self.sorts or self.min_p:
            # Rows that filter nothing keep their bits, whatever shares the batch with them.
            filters_B = (self.top_k_B > 0) | (self.top_p_B < 1) | (self.min_p_B > 0)
            probs = probs / torch.where(per_row(filters_B), probs.sum(-1, keepdim=True), 1.0)
        if self.some_greedy:
            one_hot = torch.zeros_like(probs).scatter_(-1, logits_BJV.argmax(-1, keepdim=True), 1.0)
            probs = torch.where(per_row(self.greedy_B), one_hot, probs)
        return probs


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One token a row, int64 [B], by inverting the cumulative law at ``uniform_B`` in [0, 1).

    ``probs_BV`` need not be normalised; a token of mass zero is never drawn. A row without any mass gives token 0.
    """
    cumulative = probs_BV.double().cumsum(-1)
    total_B = cumulative[:, -1]
    at = torch.searchsorted(cumulative, (uniform_B.double() * total_B).unsqueeze(1), right=True).squeeze(1)
    return torch.where(total_B > 0, at, 0)


def ban_early_stops(logits_BJV: Tensor, rows: Rows[Sequence]) -> Tensor:
    """Logits with -inf for stop tokens at positions that come before a row's ``min_tokens`` (a copy if any are).

    Position j of a row is the token after ``generated + j`` emitted ones, drafted ones counted in.
    """
    banned = logits_BJV
    for b, row in enumerate(rows):
        early = min(row.params.min_tokens - row.generated, logits_BJV.shape[1])
        if early > 0 and row.stop_ids:
            banned = logits_BJV.clone() if banned is logits_BJV else banned
            banned[b, :early, sorted(row.stop_ids)] = -torch.inf
    return banned
