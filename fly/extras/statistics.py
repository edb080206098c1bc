"""The statistics of a paired comparison. This module knows nothing of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Estimate", "bootstrap_ratio", "sign_test", "wilson"]

_Z = 1.959963984540054  # the normal quantile of a 95 % interval
_SAMPLES = 2000


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

    This is min(1, 2 · P(X <= min(lost, won))) for X binomial with n = lost + won and p = 1/2; 1 if both are 0.
    """
    n = lost + won
    tail = sum(math.comb(n, i) for i in range(min(lost, won) + 1))
    return min(1.0, float(2 * tail / 2**n))


def bootstrap_ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Estimate:
    """Return a quotient of sums over the same problems, with an interval by the percentile bootstrap.

    Each series has one number per problem. The value is the product of the sums of the series in ``above``, divided by
    the product of the sums of those in ``below``. For the interval, problems are drawn with replacement, each with its
    numbers in all series, so that the effect of a hard or long problem on all series cancels out. Samples with a
    divisor of 0 are left out; the result is NaN if none remains.
    """
    top, bottom = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    n = top.shape[1]
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=_SAMPLES)

    def quotient(weights: np.ndarray) -> np.ndarray:
        upper, lower = (weights @ top.T).prod(-1), (weights @ bottom.T).prod(-1)
        return np.divide(upper, lower, out=np.full(lower.shape, np.nan), where=lower != 0)

    (value,), samples = quotient(np.ones((1, n))), quotient(drawn)
    samples = samples[~np.isnan(samples)]
    if math.isnan(value) or not len(samples):
        return Estimate(math.nan, math.nan, math.nan)
    low, high = np.quantile(samples, (0.025, 0.975))
    return Estimate(float(value), float(low), float(high))
