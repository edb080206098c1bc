"""All statistics of the extras: intervals, tests, and the rule that decides over many p-values. The bets of an audit
stand in ``fly.extras.audit.evidence``. This module knows nothing of models.

Shape legend: N outcomes of both samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np

__all__ = [
    "Compared",
    "Estimate",
    "binomial_tail",
    "bootstrap_ratio",
    "compare_samples",
    "holm",
    "median_interval",
    "sign_test",
    "wilson",
]

_Z = NormalDist().inv_cdf(0.975)  # of a 95 % interval
_SAMPLES = 2000
_PERMUTATIONS = 50_000
_RARE = 5
_PLENTY = 50  # after this many permutations with a larger statistic, the result cannot become significant


class Estimate(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(right: float, n: int) -> Estimate:
    """Return the share ``right / n`` with Wilson's score interval (Wilson 1927).

    ``right`` may be a fraction: if each of n problems was answered several times, it is the sum of the problems' shares
    of right answers. The interval is then too wide rather than too narrow. Raises ``ValueError`` for n < 1 or a
    ``right`` outside [0, n].
    """
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"{right:g} of {n} is no share")
    share, z2 = right / n, _Z * _Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    reach = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Estimate(share, max(0.0, min(middle - reach, share)), min(1.0, max(middle + reach, share)))


def sign_test(lost: int, won: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: the probability that ``lost`` and ``won`` differ at least
    this much by chance.

    This is min(1, 2 · P(X >= max(lost, won))) for X binomial with n = lost + won and p = 1/2; 1 if both are 0.
    """
    return min(1.0, 2 * binomial_tail(max(lost, won), lost + won, 0.5))


def median_interval(values: Sequence[float]) -> Estimate:
    """Return the median of ``values``, with its interval from order statistics: the true median lies outside if too few
    of n fair coins fall on one side (the sign test). With fewer than 6 values, the interval is their extremes, and its
    confidence is lower. Raises ``ValueError`` without values."""
    if not values:
        raise ValueError("there is nothing to take a median of")
    ordered = sorted(values)
    beyond = _count_beyond(len(values))
    return Estimate(median(ordered), ordered[beyond], ordered[-1 - beyond])


@cache
def _count_beyond(n: int) -> int:
    """Return how many of n ordered values lie outside a median's interval on each side."""
    beyond = 0
    while beyond + 1 < n / 2 and sign_test(beyond + 1, n - beyond - 1) <= 0.05:
        beyond += 1
    return beyond


def bootstrap_ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Estimate:
    """Return a quotient of sums over the same problems, with an interval by the percentile bootstrap.

    Each series has one number per problem. The value is the product of the sums of the series in ``above``, divided by
    the product of the sums of those in ``below``. For the interval, problems are drawn with replacement, each with its
    numbers in all series, so that the effect of a hard or long problem on all series cancels out. Samples with a
    divisor of 0 are left out; the result is NaN if none remains.
    """
    top, bottom = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    n = top.shape[1]
    drawn_weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_SAMPLES)

    def quotient(weights: np.ndarray) -> np.ndarray:
        upper, lower = (weights @ top.T).prod(-1), (weights @ bottom.T).prod(-1)
        return np.divide(upper, lower, out=np.full(lower.shape, np.nan), where=lower != 0)

    (value,), samples = quotient(np.ones((1, n))), quotient(drawn_weights)
    samples = samples[~np.isnan(samples)]
    if math.isnan(value) or not len(samples):
        return Estimate(math.nan, math.nan, math.nan)
    low, high = np.quantile(samples, (0.025, 0.975))
    return Estimate(float(value), float(low), float(high))


def holm(p_values: Mapping[str, float], alpha: float) -> set[str]:
    """Return the claims that are refuted. With a probability of at least ``1 - alpha``, no true claim is among them,
    however the claims depend on each other (Holm 1979)."""
    refuted: set[str] = set()
    for at, (name, p) in enumerate(sorted(p_values.items(), key=lambda each: each[1])):
        if p > alpha / (len(p_values) - at):
            break
        refuted.add(name)
    return refuted


def binomial_tail(hits: int, n: int, rate: float) -> float:
    """Return the exact probability of ``hits`` or more among ``n``, if each has the probability ``rate``."""
    if hits <= 0:
        return 1.0
    logs = [
        math.lgamma(n + 1)
        - math.lgamma(i + 1)
        - math.lgamma(n - i + 1)
        + i * math.log(rate)
        + (n - i) * math.log1p(-rate)
        for i in range(hits, n + 1)
    ]
    return min(1.0, float(np.exp(np.logaddexp.reduce(logs)))) if logs else 0.0


class Compared(NamedTuple):
    """The p-value of a comparison, and the total variation that it finds with a probability of about 0.9."""

    p: float
    finds: float


def compare_samples(
    one: Sequence[Hashable], other: Sequence[Hashable], strata: Sequence[int], p: float = 1e-3
) -> Compared:
    """Test whether two samples of the same size have the same distribution in every stratum. This is a permutation
    test, exact for any number of kinds; its statistic is Pearson's chi-squared. ``finds`` holds for a p-value of ``p``.

    ``strata`` has the stratum of each outcome, for both samples; permutations stay within a stratum. Kinds with fewer
    than five outcomes are counted together in their stratum.
    """
    rng = np.random.default_rng(0)
    labels = [*zip(strata, one), *zip(strata, other)]
    times = Counter(labels)
    labels = [label if times[label] >= _RARE else (label[0], None) for label in labels]
    kinds = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    kind_N = np.array([kinds[label] for label in labels])
    stratum_N = np.array([*strata, *strata])
    first_N = np.arange(len(labels)) < len(one)
    total = np.bincount(kind_N, minlength=len(kinds))

    def statistic(first_N: np.ndarray) -> float:
        """Return Pearson's chi-squared, if ``first_N`` marks the outcomes of the first sample."""
        counts = np.bincount(kind_N[first_N], minlength=len(kinds))
        return float(((2 * counts - total) ** 2 / total).sum())

    observed = statistic(first_N)
    further = 0
    attempts = 0
    rows = [np.flatnonzero(stratum_N == each) for each in np.unique(stratum_N)]
    while attempts < _PERMUTATIONS and further < _PLENTY:
        attempts += 1
        mixed_N = first_N.copy()
        for at in rows:
            mixed_N[at] = rng.permutation(mixed_N[at])
        further += statistic(mixed_N) >= observed - 1e-9
    # A total variation d adds at least 2 n d^2 to the statistic, whose standard deviation is about sqrt(2 · kinds).
    normal = NormalDist()
    finds = math.sqrt((normal.inv_cdf(1 - p) + normal.inv_cdf(0.9)) * math.sqrt(2 * len(kinds)) / (2 * len(one)))
    return Compared((further + 1) / (attempts + 1), min(1.0, finds))
