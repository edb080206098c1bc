"""Evidence against a claim that tokens were drawn from given distributions, as the gain of a bettor.

A bettor starts with a capital of 1 and stakes it on each token before seeing it, at the odds of the claimed
distribution. If the claim is true, no way of betting gains on average, and the capital ever exceeds x with a
probability of at most 1/x (Ville 1939). Hence 1 / gain is a p-value. It is exact for any number of tokens, needs no
simulation, and allows each distribution to depend on all earlier tokens. The gain is the mean over several bettors,
each of whom expects one fault.

Source: G. Shafer, *Testing by betting*, JRSS A 184 (2021); for counts the bet is the Bayes factor of I. J. Good (1967).

Shape legend: T draws, H tokens of the longest head, P stakes, R simulated runs, G groups of draws, L likenesses,
D directions, n draws of a group. The last column of [T, H + 1] stands for the rest: all tokens outside the head.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fly.extras.audit.distributions import Draw

__all__ = ["IGNORED", "Evidence", "evidence", "power", "shares_power", "smallest"]

IGNORED = "the field is ignored"
_SHARES = "other shares after the same text than reported"
_TEMPERATURE = "tokens too likely or too unlikely, as at another temperature"
_EARLIER = "tokens drawn from the distribution of the place before"
_BEST = "the likeliest token too often"
_COPIED, _AVOIDED = "what followed earlier in the text too often", "what followed earlier in the text too rarely"
_FAR = "tokens that are none of the likeliest"

_TILTS = (
    -0.6,
    -0.4,
    -0.2,
    -0.08,
    0.08,
    0.2,
    0.4,
    1.0,
)  # the fault draws from probs^(1 + tilt): temperature 1 / (1 + tilt)
_MIXES = (0.01, 0.05, 0.2, 0.7, 1.0)  # the share of tokens that have the fault
_STAKES = (0.001, 0.005, 0.02, 0.1)
_LIKENESS = (5.0, 20.0, 100.0, 500.0)  # weight of the claimed shares, as a number of draws added to those seen
_TELLING = 4.0  # an example is given if the logarithm of the gain is larger
_RUNS = 100  # runs that are simulated to estimate a power


@dataclass(frozen=True)
class Evidence:
    """The evidence against the claimed distributions: the logarithm of the gain, the fault that gained most (in words),
    the number of bettors, and an example."""

    log_gain: float
    worst: str = ""
    bettors: int = 1
    example: str = ""

    @property
    def p(self) -> float:
        return min(1.0, math.exp(-self.log_gain))


class _Table:
    """The draws as arrays."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        width = max(len(draw.probs_H) for draw in draws)
        self.draws = draws
        self.probs_TH = np.zeros((len(draws), width))
        for row, draw in enumerate(draws):
            self.probs_TH[row, : len(draw.probs_H)] = draw.probs_H
        self.drawn_T = np.array([width if draw.drawn is None else draw.drawn for draw in draws])

    def wide(self, alternative: Callable[[Draw], np.ndarray | None]) -> np.ndarray:
        """Return each draw's alternative distribution, or the claimed one where ``alternative`` returns None."""
        wide_TH = self.probs_TH.copy()
        for row, draw in enumerate(self.draws):
            if (other_H := alternative(draw)) is not None:
                wide_TH[row, : len(other_H)] = other_H
        return wide_TH

    def bets(self, only: str | None = None) -> dict[str, np.ndarray]:
        """Return, for each bettor (or the one of the name ``only``), the logarithms [P, T, H + 1] of the factors that
        multiply a stake, one for each token that may be drawn."""
        # Every bettor always takes part: none may be chosen after the draws are known.
        bettors: dict[str, Callable[[], np.ndarray]] = {
            _TEMPERATURE: lambda: _tilted(self.probs_TH),
            IGNORED: lambda: self._mixed(self.wide(lambda draw: draw.ignored_H)),
            _EARLIER: lambda: self._mixed(self.wide(lambda draw: draw.earlier_H)),
            _BEST: lambda: self._mixed(np.eye(self.probs_TH.shape[1])[self.probs_TH.argmax(-1)]),
            _COPIED: lambda: self._mixed(self._copied(1.0)),
            _AVOIDED: lambda: self._mixed(self._copied(0.0)),
            _FAR: self._far,
        }
        return {name: bettor() for name, bettor in bettors.items() if only in (None, name)}

    def _copied(self, share: float) -> np.ndarray:
        """Return distributions that give a token proposed by prompt lookup always (``share`` 1) or never (0)."""
        copied_TH = self.probs_TH.copy()
        for row, draw in enumerate(self.draws):
            if draw.lookup is not None and (share or draw.probs_H[draw.lookup] < 0.99):
                copied_TH[row] = copied_TH[row] * (1 - share)
                copied_TH[row, draw.lookup] = share
                copied_TH[row] /= copied_TH[row].sum()
        return copied_TH

    def _mixed(self, other_TH: np.ndarray) -> np.ndarray:
        """Return bets that some tokens are drawn from ``other_TH``."""
        probs_TH = self.probs_TH
        logs = np.zeros((len(_MIXES), probs_TH.shape[0], probs_TH.shape[1] + 1))
        ratio_TH = np.divide(other_TH, probs_TH, out=np.ones_like(probs_TH), where=probs_TH > 0)
        for at, share in enumerate(_MIXES):
            with np.errstate(divide="ignore"):
                logs[at, :, :-1] = np.log(1 - share + share * ratio_TH)
        return logs

    def _far(self) -> np.ndarray:
        """Return bets on the rest (the tokens that are not listed), at the odds of its largest possible probability."""
        logs = np.zeros((len(_STAKES), len(self.draws), self.probs_TH.shape[1] + 1))
        for row, draw in enumerate(self.draws):
            if draw.rest == 0:
                logs[:, row, -1] = np.inf
            elif draw.rest is not None:
                for at, share in enumerate(_STAKES):
                    logs[at, row, :-1] = math.log1p(-share)
                    logs[at, row, -1] = math.log(1 - share + share / draw.rest)
        return logs


def _tilted(probs_TH: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        log_TH = np.log(probs_TH)
    logs = np.zeros((len(_TILTS), probs_TH.shape[0], probs_TH.shape[1] + 1))
    for at, tilt in enumerate(_TILTS):
        raised_TH = np.where(probs_TH > 0, np.exp((1 + tilt) * np.where(probs_TH > 0, log_TH, 0.0)), 0.0)
        logs[at, :, :-1] = np.where(probs_TH > 0, tilt * log_TH, 0.0) - np.log(raised_TH.sum(-1, keepdims=True))
    return logs


def evidence(draws: Sequence[Draw], only: str | None = None) -> Evidence:
    """Return the evidence of these draws against the claimed distributions. With ``only``, just the bettor of that name
    bets."""
    if not draws:
        return Evidence(0.0)
    table, rows = _Table(draws), np.arange(len(draws))
    gains = {name: _mean(bets[:, rows, table.drawn_T].sum(-1)) for name, bets in table.bets(only).items()}
    if only in (None, _SHARES):
        gains[_SHARES] = _mean(_shares(draws))
    if not gains:
        return Evidence(0.0)
    total = _mean(np.array([*gains.values()]))
    worst = max(gains, key=lambda name: gains[name])
    return Evidence(total, worst, len(gains), _example(worst, table) if total > _TELLING else "")


def _example(worst: str, table: _Table) -> str:
    """Describe the fault in figures that a reader can check."""
    draws, probs_TH = table.draws, table.probs_TH
    width, n = probs_TH.shape[1], len(draws)
    if worst == _FAR:
        impossible = next((draw for draw in draws if draw.drawn is None and draw.rest == 0), None)
        if impossible is not None:
            return f"{impossible.text!r} was drawn {_place_of(impossible)}, where it cannot be"
        most = sum(draw.rest for draw in draws if draw.rest is not None)
        return f"{(table.drawn_T == width).sum():,} of {n:,} tokens, where {most:,.1f} are expected at most"
    inside_T = table.drawn_T < width
    if worst == _TEMPERATURE:
        log_TH = np.log(np.where(probs_TH > 0, probs_TH, 1.0))
        observed = log_TH[inside_T, table.drawn_T[inside_T]].mean()
        expected = (probs_TH * log_TH)[inside_T].sum(-1).mean()
        return f"the mean log-probability is {observed:.3f}, where {expected:.3f} is expected"
    if worst in (_BEST, _COPIED, _AVOIDED):
        at_T = probs_TH.argmax(-1)
        if worst != _BEST:
            at_T = np.array([-1 if draw.lookup is None else draw.lookup for draw in draws])
        rows = np.flatnonzero(inside_T & (at_T >= 0))
        expected = probs_TH[rows, at_T[rows]].sum()
        return f"{(table.drawn_T == at_T)[rows].sum():,} of {len(rows):,}, where {expected:,.1f} are expected"
    return _furthest(draws)


def _furthest(draws: Sequence[Draw]) -> str:
    """Describe the token whose count after the same text is furthest from its share."""
    counts: dict[tuple[object, ...], Counter[str]] = defaultdict(Counter)
    for draw in draws:
        counts[draw.group][draw.text] += 1
    furthest, example = 0.0, "spread over many places"
    for draw in draws:
        total = counts[draw.group].total()
        if draw.drawn is not None and total >= 5:
            share, count = float(draw.probs_H[draw.drawn]), counts[draw.group][draw.text]
            if (score := (count - total * share) ** 2 / (total * share * (1 - share) + 0.5)) > furthest:
                furthest = score
                example = (
                    f"{draw.text!r} came {count} of {total} times {_place_of(draw)}, where its share is {share:.3f}"
                )
    return example


def _place_of(draw: Draw) -> str:
    number, *before = draw.group
    return f"after prompt {int(str(number)) + 1}" + (f" and {''.join(map(str, before))[-30:]!r}" if before else "")


def _mean(logs: np.ndarray) -> float:
    """Return the logarithm of the mean of numbers, given their logarithms."""
    return float(np.logaddexp.reduce(logs) - math.log(len(logs))) if np.inf not in logs else math.inf


def _shares(draws: Sequence[Draw]) -> np.ndarray:
    """Return the log gains of bets that expect the shares seen so far after the same text. There are two for each
    likeness: one stakes its whole capital in each text, the other only half of it."""
    counts_of: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    logs: dict[tuple[object, ...], np.ndarray] = defaultdict(lambda: np.zeros(len(_LIKENESS)))
    likeness = np.array(_LIKENESS)
    for draw in draws:
        if draw.drawn is not None:  # bet only on draws from the head
            counts, text = counts_of[draw.group], draw.text
            total = sum(counts.values())
            p = float(draw.probs_H[draw.drawn])
            logs[draw.group] += np.log((counts.get(text, 0) + likeness * p) / (total + likeness)) - math.log(p)
            counts[text] = counts.get(text, 0) + 1
    if not logs:
        return np.zeros(1)
    all_G = np.stack([*logs.values()])
    return np.concatenate([all_G.sum(0), np.logaddexp(all_G, 0.0).sum(0) - len(all_G) * math.log(2)])


def power(
    draws: Sequence[Draw],
    fault: Callable[[Draw], np.ndarray | None],
    p: float,
    only: str | None = None,
    seed: int = 0,
) -> Callable[[float], float]:
    """Return a function that takes the share of tokens with a fault. It gives the probability that draws like these
    then have a p-value of at most ``p``. ``fault`` gives the probabilities of a draw's head under the fault, or None
    where the fault does not show."""
    table, rows = _Table(draws), np.arange(len(draws))
    faulty_TH, bets = table.wide(fault), table.bets(only)

    def found(share: float) -> float:
        rng = np.random.default_rng(seed)
        at_TH = ((1 - share) * table.probs_TH + share * faulty_TH).cumsum(-1)
        drawn_RT = np.stack([(rng.random((len(draws), 1)) * at_TH[:, -1:] > at_TH).sum(-1) for _ in range(_RUNS)])
        gains_NR = np.stack(
            [np.logaddexp.reduce(each[:, rows, drawn_RT].sum(-1)) - math.log(len(each)) for each in bets.values()]
        )
        total_R = np.logaddexp.reduce(gains_NR) - math.log(len(bets) + (only is None))
        return float((total_R >= -math.log(p)).mean())

    return found if bets else lambda share: 0.0


def shares_power(draws: Sequence[Draw], variation: float, p: float, kinds: int, seed: int = 0) -> float:
    """Return the power, as above, for a fault that moves a probability of ``variation`` between random tokens after
    each text. One of ``kinds`` bettors expects this fault. The first place has no fault, since speculation begins after
    it."""
    rng = np.random.default_rng(seed)
    groups: dict[tuple[object, ...], list[Draw]] = defaultdict(list)
    for draw in draws:
        if len(draw.group) > 1 and draw.drawn is not None:
            groups[draw.group].append(draw)
    likeness_L = np.array(_LIKENESS)
    sums_LR = np.zeros((2 * len(likeness_L), _RUNS))
    for group in groups.values():
        if (n := len(group)) < 2:
            continue
        probs_H = group[0].probs_H
        counts_RH = rng.multinomial(n, _moved(probs_H, variation, rng))
        # Each bet multiplies the capital by (seen so far + likeness · share) / (n + likeness) / share. The product of
        # these factors depends only on the counts.
        prior_LH = likeness_L[:, None] * np.maximum(probs_H, 1e-300)
        steps_LHn = np.log(prior_LH[..., None] + np.arange(n)) - np.log(probs_H)[:, None]
        logs_LHn = np.concatenate([np.zeros((*prior_LH.shape, 1)), steps_LHn.cumsum(-1)], -1)
        gain_LR = logs_LHn[:, np.arange(len(probs_H)), counts_RH].sum(-1)
        gain_LR -= np.log(likeness_L[:, None] + np.arange(n)).sum(-1)[:, None]
        sums_LR += np.concatenate([gain_LR, np.logaddexp(gain_LR, 0.0) - math.log(2)])
    total_R = np.logaddexp.reduce(sums_LR) - math.log(len(sums_LR) * kinds)
    return float((total_R >= -math.log(p)).mean())


def _moved(probs_H: np.ndarray, variation: float, rng: np.random.Generator) -> np.ndarray:
    """Return distributions [R, H] at this total variation from ``probs_H`` (or as far as possible), each in a random
    direction: one of eight (D) that allows it."""
    runs, up_RDH = np.arange(_RUNS), rng.random((_RUNS, 8, len(probs_H))) < 0.5
    up_RD, down_RD = up_RDH @ probs_H, ~up_RDH @ probs_H
    down_RD[up_RD <= 0] = 0
    able_RD = down_RD >= variation
    at_R = np.where(able_RD.any(-1), able_RD.argmax(-1), down_RD.argmax(-1))
    up_R1, down_R1 = up_RD[runs, at_R, None], down_RD[runs, at_R, None]
    moved_R1 = np.minimum(variation, down_R1)
    with np.errstate(divide="ignore", invalid="ignore"):  # where nothing can be moved, none of it is used
        factor_RH = np.where(up_RDH[runs, at_R], 1 + moved_R1 / up_R1, 1 - moved_R1 / down_R1)
    probs_RH = np.where(down_R1 > 0, probs_H * factor_RH, probs_H)
    return probs_RH / probs_RH.sum(-1, keepdims=True)


def smallest(sizes: Sequence[float], power: Callable[[float], float], enough: float = 0.9) -> float | None:
    """Return the smallest size of a fault that is found with probability ``enough``; None if none is. ``sizes`` ascend,
    and larger faults must be likelier to be found."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if power(sizes[middle]) >= enough:
            high = middle
        else:
            low = middle + 1
    return sizes[low] if low < len(sizes) else None
