"""The bench of drafts: its medians, and a drafter that is never right."""

from __future__ import annotations

import io
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fly import LLM, SamplingParams
from fly.drafts import SingleDraft, parse_draft
from fly.extras.bench.command import drafts_table, promise_table
from fly.extras.bench.drafts import STRATEGIES, Drafted, Misleading, Promise, Ratio
from fly.extras.eval import Result, Setting
from fly.extras.eval.timed import Times
from fly.models.bundled.tasks import KINDS
from fly.runner.request import Stats
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
    with pytest.raises(ValueError, match="nothing to take a median of"):
        Ratio.of([])


def test_a_misleading_strategy_is_never_right_and_drafts_as_much() -> None:
    """Its own model could not be better: the target's."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    fair = LLM(LARGE, draft=SingleDraft(LARGE), k=5).generate([[1, 2, 3]], params)[0]
    misled = LLM(LARGE, draft=Misleading(SingleDraft(LARGE), VOCAB), k=5).generate([[1, 2, 3]], params)[0]
    assert misled.token_ids == fair.token_ids
    assert fair.stats.acceptance_rate == 1 and misled.stats.accepted == 0
    assert misled.stats.drafted > 100


def test_the_strategies_measured_by_default_exist() -> None:
    assert all(parse_draft(text) is not None for text in STRATEGIES)


def printed(width: int, rows: list[Drafted] | list[Promise]) -> list[str]:
    """The table of ``rows`` on a console of ``width``."""
    build = drafts_table if isinstance(rows[0], Drafted) else promise_table
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(build(rows, "title"))  # type: ignore[operator]
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 90, 100, 200])
@pytest.mark.parametrize("names", [STRATEGIES, ("fly-draft", "ngram"), (f"adaptive({'ngram+' * 30}fly-draft)",)])
def test_every_strategy_has_its_whole_name_and_figures_at_any_width(width: int, names: tuple[str, ...]) -> None:
    stats = Stats(generated=3000, emitted=3000, rounds=250)
    result = Result(Setting("x", LLM(LARGE), 0), stats, Times(0.1, 0.4), ["x"] * 8, [True] * 8)
    drafted = [Drafted(name, dict.fromkeys(KINDS, result)) for name in ("none", *names)]
    over = Ratio(0.984, 0.959, 1.01, 12)
    promised = [Promise(name, text, over, over, over, 1.5) for name in names for text in ("random", "wrong")]
    for rows, end in ((drafted, " 24/24"), (promised, " 0.984 (0.959–1.010)")):
        lines = printed(width, rows)  # type: ignore[arg-type]
        table = lines[next(number for number, line in enumerate(lines) if "───" in line) + 1 :]
        assert all(len(line) <= width for line in lines)
        assert sum(line.rstrip().endswith(end) for line in table) == len(rows)
        figures = re.compile(r"( +(random|wrong))?( +[\d.,()–/]+)+ *$")
        shown = [figures.sub("", line) if line.rstrip().endswith(end) else line for line in table]
        assert "".join(shown).replace(" ", "") == "".join(row.name for row in rows).replace(" ", "")


@pytest.mark.parametrize("pairs", [1, 2, 3, 40])
def test_two_runs_have_no_interval(pairs: int) -> None:
    over = Ratio(0.984, 0.959, 1.01, pairs)
    text = "".join(printed(100, [Promise("ngram", "random", over, over, over, 1.5)]))
    assert "0.984" in text and ("(0.959–1.010)" in text) == (pairs >= 3)
