"""Statistical tests other than the bets of ``fly.extras.audit.evidence``, and the rule that decides over all p-values.

Shape legend: N outcomes of both samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

__all__ = ["binomial_tail", "compare_samples", "holm"]

_PERMUTATIONS = 50_000
_RARE = 5
_PLENTY = 50  # after this many permutations with a larger statistic, the result cannot become significant


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
    tried = 0
    rows = [np.flatnonzero(stratum_N == each) for each in np.unique(stratum_N)]
    while tried < _PERMUTATIONS and further < _PLENTY:
        tried += 1
        mixed_N = first_N.copy()
        for at in rows:
            mixed_N[at] = rng.permutation(mixed_N[at])
        further += statistic(mixed_N) >= observed - 1e-9
    # A total variation d adds at least 2 n d^2 to the statistic, whose standard deviation is about sqrt(2 · kinds).
    normal = NormalDist()
    finds = math.sqrt((normal.inv_cdf(1 - p) + normal.inv_cdf(0.9)) * math.sqrt(2 * len(kinds)) / (2 * len(one)))
    return Compared((further + 1) / (tried + 1), min(1.0, finds))
