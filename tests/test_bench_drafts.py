"""The bench of drafts: its medians, and a drafter that is never right."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.bench.drafts import Misleading, Promise, Ratio
from fly.drafts import SingleDraft
from tests.test_drafts import LARGE, VOCAB


@pytest.mark.parametrize("n", [6, 9, 24, 61])
def test_the_interval_of_a_median_holds_it_as_often_as_it_says(n: int) -> None:
    rng = random.Random(n)
    drawn = [Ratio.of([rng.random() ** 2 for _ in range(n)]) for _ in range(4000)]
    assert all(one.low <= one.median <= one.high and one.pairs == n for one in drawn)
    held = sum(one.low <= 0.25 <= one.high for one in drawn) / len(drawn)
    assert 0.94 < held < 0.985  # it goes in steps, widely for few


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5))
def test_few_pairs_give_their_extremes(ratios: list[float]) -> None:
    found = Ratio.of(ratios)
    assert (found.low, found.high) == (min(ratios), max(ratios))


def test_what_is_promised_is_kept_broken_or_not_decided() -> None:
    def kept(low: float, high: float, pairs: int = 30) -> bool | None:
        over = Ratio((low + high) / 2, low, high, pairs)
        return Promise("ngram", "text", over, over, over, 1.0).kept

    assert kept(0.985, 1.01) is True
    assert kept(0.9, 0.97) is False
    assert kept(0.9, 1.1) is None
    assert kept(0.5, 0.5, pairs=1) is None
    with pytest.raises(ValueError, match="no pair"):
        Ratio.of([])


def test_a_misleading_strategy_is_never_right_and_drafts_as_much() -> None:
    """Its own model could not be better: the target's."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    fair = LLM(LARGE, draft=SingleDraft(LARGE), k=5).generate([[1, 2, 3]], params)[0]
    misled = LLM(LARGE, draft=Misleading(SingleDraft(LARGE), VOCAB), k=5).generate([[1, 2, 3]], params)[0]
    assert misled.token_ids == fair.token_ids
    assert fair.stats.acceptance_rate == 1 and misled.stats.accepted == 0
    assert misled.stats.drafted > 100
