"""Runs that a kill does not harm, and reports of them."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fly.drafts.stops import REACH, REACH_EXCUSED
from fly.extras.eval import Plan, check_folder, decode_run, remaining, report, score_run
from fly.extras.eval.archive import Archive
from fly.extras.eval.costs import Costs, neutral_speed
from fly.extras.eval.plan import AUTOREGRESSIVE
from fly.extras.eval.plots import Point, front, save_lines
from fly.extras.eval.records import Appender, Records, read_lines, read_records
from fly.extras.eval.render import as_html, as_json, as_markdown, columns, legend, round_lengths, write_spec_bench
from fly.extras.eval.report import Report, _notes, first_difference, pieces_of
from fly.extras.statistics import Estimate, bootstrap_ratio, sign_test, wilson
from fly.policies import ExactCore
from tests.commands import plain, words
from tests.commands import run as command
from tests.test_eval_tasks import HUMANEVAL, ISOLATED, TURNS, saved

# --- statistics ------------------------------------------------------------------------------------------


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.floats(0, n), st.just(n))))
def test_wilson_holds_the_shares_that_a_score_test_would_not_reject(case: tuple[float, int]) -> None:
    right, n = case
    found = wilson(right, n)
    assert found.value == right / n and 0 <= found.low <= found.value <= found.high <= 1
    for bound, outside in ((found.low, -1), (found.high, 1)):
        for share, inside in ((bound - outside * 1e-6, True), (bound + outside * 1e-6, False)):
            if 0 < share < 1 and abs(found.value - share) > 1e-5:
                score = abs(found.value - share) / math.sqrt(share * (1 - share) / n)
                assert (score < 1.959963984540054) == inside


@given(st.integers(0, 6), st.integers(0, 6))
def test_the_sign_test_counts_what_is_as_unlikely(lost: int, won: int) -> None:
    n = lost + won
    outcomes = [sum(each) for each in itertools.product((0, 1), repeat=n)]
    as_far = sum(abs(2 * heads - n) >= abs(lost - won) for heads in outcomes) / 2**n
    assert sign_test(lost, won) == pytest.approx(as_far) == sign_test(won, lost)


def test_the_sign_test_of_large_numbers_is_finite() -> None:
    assert 0 < sign_test(900, 1100) < 1e-4 and sign_test(0, 0) == 1


numbers = st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=30)


@given(numbers)
def test_a_bootstrap_ratio_is_of_the_sums_and_between_the_extremes(pairs: list[tuple[float, float]]) -> None:
    above, below = zip(*pairs)
    found = bootstrap_ratio([above], [below])
    assert found.value == pytest.approx(sum(above) / sum(below))
    ratios = [a / b for a, b in pairs]
    assert min(ratios) - 1e-9 <= found.low <= found.high <= max(ratios) + 1e-9
    assert bootstrap_ratio([above], [above]) == pytest.approx((1, 1, 1))  # paired: what is the same does not vary
    twice = [2 * a for a in above]
    assert bootstrap_ratio([twice, below], [above, below]) == pytest.approx((2, 2, 2))


def test_a_bootstrap_interval_is_as_wide_as_the_ratio_varies() -> None:
    rng = np.random.default_rng(1)
    above, below = rng.gamma(3, size=(2, 300, 80))
    wide = np.std(above.sum(1) / below.sum(1))  # over 300 experiments of 80 problems
    spans = [(e.high - e.low) / 3.92 for e in (bootstrap_ratio([a], [b]) for a, b in zip(above[:20], below[:20]))]
    assert np.mean(spans) == pytest.approx(wide, rel=0.2)
    assert all(map(math.isnan, bootstrap_ratio([[1.0, 1.0]], [[0.0, 0.0]])))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_the_front_is_what_nothing_beats(places: list[tuple[int, int]]) -> None:
    points = [Point(str(n), "", Estimate(x, x, x), Estimate(y, y, y)) for n, (x, y) in enumerate(places)]
    best = {point.name for point in front(points)}
    for number, (x, y) in enumerate(places):
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in places)
        assert (str(number) in best) != beaten


def judge(completion: str, row: dict[str, Any]) -> bool:
    return completion == row["a"] * 2


def unsure(completion: str, row: dict[str, Any]) -> str:
    return "perhaps"


# --- runs ------------------------------------------------------------------------------------------------

RULE = "fly(window=1, hold=1)"
PLAN = {
    "model": "fly-tiny",
    "drafts": "ngram",
    "k": [3, 6],
    "policies": [RULE],
    "temperatures": [0, 0.8],
    "seeds": [1, 2],
    "limit": 3,
    "dtype": "float32",
    "tasks": [
        {"task": "bundled-middle", "max_tokens": 40},
        {"task": "spec-bench", "rows": TURNS, "max_tokens": 20},
        {"task": "safety", "max_tokens": 16, "limit": 1},
    ],
}


def finish(plan: Plan, folder: Path, die_after: int = 10**9) -> None:
    check_folder(plan, folder)
    records, done = read_records(folder), itertools.count(1)

    def advance(record: dict[str, Any]) -> None:
        if next(done) >= die_after:
            raise KeyboardInterrupt

    if todo := remaining(plan, records):
        decode_run(plan, folder, todo, records, advance)
    score_run(plan, folder)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.of(PLAN)


@pytest.fixture(scope="module")
def whole(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(plan, folder)
    return folder


def without_times(found: Report) -> Any:
    timed = {"seconds", "tokens_per_second", "over_ar", "over_exact", "neutral", "costs"}
    tables = as_json(found)["tables"]
    return [[{key: row[key] for key in row.keys() - timed} for row in table["rows"]] for table in tables]


def test_a_run_killed_twice_ends_with_the_same_report(plan: Plan, whole: Path, tmp_path: Path) -> None:
    for die_after, torn in ((7, b'{"kind": "completion", "task": "bund'), (30, b"\xc3")):
        with pytest.raises(KeyboardInterrupt):
            finish(plan, tmp_path, die_after)
        with (tmp_path / "records.jsonl").open("ab") as file:
            file.write(torn)
        assert report([tmp_path])
    finish(plan, tmp_path)
    assert without_times(report([tmp_path])) == without_times(report([whole]))
    one, two = (
        [list(read_lines(folder / name)) for name in ("records.jsonl", "scores.jsonl")] for folder in (tmp_path, whole)
    )
    assert list(map(len, one)) == list(map(len, two))


def test_problems_decoded_together_are_answered_as_alone(whole: Path, tmp_path: Path) -> None:
    plan = Plan.of({**PLAN, "together": 2})
    with pytest.raises(KeyboardInterrupt):
        finish(plan, tmp_path, 12)  # in the middle of two
    finish(plan, tmp_path)
    alone, together = (read_records(folder).completions for folder in (whole, tmp_path))
    assert alone.keys() == together.keys()
    for key, record in together.items():
        assert all(record[name] == alone[key][name] for name in ("token_ids", "why", "rounds", "drafts")), key
    times: dict[tuple[Any, ...], list[float]] = {}
    for key, record in together.items():
        seconds = record["seconds"]["prompt"] + record["seconds"]["decoding"]
        part = record["number"] // 2, key._replace(problem="")
        times.setdefault(part, []).append(seconds / record["generated"])
    assert any(len(each) == 2 for each in times.values())
    whole_parts = [each for each in times.values() if len(each) == 2]
    shared = [each for each in whole_parts if each[0] == pytest.approx(each[1])]
    assert len(shared) >= len(whole_parts) - 1  # the one that was interrupted
    assert "3 problems, 2 at a time" in report([tmp_path]).tables[0].title
    with pytest.raises(ValueError, match="one problem at a time, not 2 together"):
        Plan.of({**PLAN, "together": 2, "record": True})


def test_a_finished_run_decodes_nothing(plan: Plan, whole: Path) -> None:
    before = (whole / "records.jsonl").read_bytes()
    assert remaining(plan, read_records(whole)) == []
    finish(plan, whole)
    assert (whole / "records.jsonl").read_bytes() == before


def test_every_way_has_every_problem_and_the_same_luck(plan: Plan, whole: Path) -> None:
    records = read_records(whole).completions.values()
    labels = [way.label for way in plan.ways]
    assert labels == [AUTOREGRESSIVE, "exact k3", f"{RULE} k3", "exact k6", f"{RULE} k6"]
    # bundled: 3 problems at temperature 0 once and at 0.8 with 2 seeds; one conversation of 2 turns; one of safety
    assert len(records) == len(labels) * (3 * 3 + 3 * 2 + 3)
    luck: dict[tuple[Any, ...], set[int]] = {}
    for record in records:
        luck.setdefault((record["task"], record["problem"], record["turn"], record["seed"]), set()).add(
            record["row_seed"]
        )
    assert all(len(seeds) == 1 for seeds in luck.values()) and len(set.union(*luck.values())) == len(luck)
    order = [record["way"] for record in records]
    assert {order[n] for n in range(0, len(order), len(labels))} >= {*labels[:3]}  # who comes first goes round


def test_records_agree_with_themselves(whole: Path) -> None:
    found = read_records(whole)
    for record in found.completions.values():
        assert len(record["why"]) == len(record["token_ids"]) == len(record["ends"]) == record["generated"]
        assert record["why"].count("r") == record["relaxed"] == len(record["excused"])
        lengths = round_lengths(record["why"])
        assert (sum(lengths), len(lengths)) == (record["emitted"], record["rounds"])
        pieces = pieces_of(record)
        assert "".join(text for text, _ in pieces) == record["text"]
        assert sum(bool(why) for _, why in pieces) <= record["relaxed"]
        assert sum(length for length, _ in record["drafts"]) == record["drafted"]
        assert sum(stands for _, stands in record["drafts"]) == record["accepted"]
        assert record["environment"] in found.environments and record["seconds"]["decoding"] >= 0
    exact = [record for key, record in found.completions.items() if key.way.startswith("exact") and not key.temperature]
    for record in exact:  # in float32, to the token
        key = next(key for key, one in found.completions.items() if one is record)
        assert record["token_ids"] == found.completions[key._replace(way=AUTOREGRESSIVE)]["token_ids"]
    assert sum(record["relaxed"] for record in found.completions.values()) > 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "fly-draft"}, "model: 'fly-tiny' then, 'fly-draft' now"),
        ({"k": 3}, "k: [3, 6] then, [3] now"),
        ({"policies": "fly"}, "policies: ['fly(window=1, hold=1)'] then, ['fly'] now"),
        ({"tasks": [{"task": "bundled-middle", "max_tokens": 41}]}, "task bundled-middle: its file or its data"),
    ],
)
def test_a_changed_setting_is_named(whole: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_folder(Plan.of({**PLAN, **change}), whole)
    assert told in str(caught.value)


def test_a_rule_whose_code_has_changed_needs_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, run = tmp_path / "edited_rules.py", tmp_path / "run"
    file.write_text("from fly.policies import Exact\nclass Mine(Exact):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan = Plan.of({"model": "fly-tiny", "drafts": "ngram", "policies": "edited_rules:Mine", "limit": 1})
    for _ in range(2):
        check_folder(plan, run)
    file.write_text(file.read_text() + "    share = 0.5\n")
    with pytest.raises(ValueError, match=r"edited_rules: its code has changed\. Give a new folder"):
        check_folder(plan, run)


def test_a_colon_in_the_path_of_a_draft_names_no_code() -> None:
    assert Plan.of({"drafts": 'model("/data/nowhere_at_all:b/c")'}).code == {}


def test_a_label_has_the_parameters_of_its_rule() -> None:
    assert Plan.of({"policies": "fly(theta=0.9)"}).ways[-1].label == "fly(theta=0.9) k15"


def test_a_run_may_grow(plan: Plan, whole: Path) -> None:
    more = Plan.of({**PLAN, "limit": 4})
    before = (whole / "plan.yaml").read_bytes()
    check_folder(more, whole)
    assert {turn.key.problem for turn in remaining(more, read_records(whole))} == {"3"}
    (whole / "plan.yaml").write_bytes(before)


def test_as_many_bundled_problems_as_are_asked_for() -> None:
    few, many = (Plan.of({"tasks": "bundled-ood", "limit": n}).loaded_tasks()["bundled-ood"] for n in (3, 230))
    assert (few[1], many[1]) == (3, 230) and len({problem.id for problem in many[0].problems}) == 230
    assert [p.turns for p in few[0].problems] == [p.turns for p in many[0].problems[:3]]
    assert few[0].digest == many[0].digest
    assert Plan.of({"tasks": "bundled-ood"}).loaded_tasks()["bundled-ood"][1] == 1200


def test_a_folder_is_written_by_one_process(tmp_path: Path) -> None:
    with Appender(tmp_path / "x.jsonl") as file:
        file.write({"a": "\u2028"})
        with pytest.raises(ValueError, match="another process is writing it"):
            Appender(tmp_path / "x.jsonl")
    assert list(read_lines(tmp_path / "x.jsonl")) == [{"a": "\u2028"}]
    (tmp_path / "x.jsonl").write_text('{"a"\n{}\n')
    with pytest.raises(ValueError, match="line 1: no JSON"):
        list(read_lines(tmp_path / "x.jsonl"))


@ISOLATED
def test_code_that_was_not_run_is_run_later(tmp_path: Path) -> None:
    data = saved(tmp_path / "h.jsonl", HUMANEVAL)
    fields = {"model": "fly-tiny", "drafts": "ngram", "k": 3, "tasks": [{"task": f"humaneval={data}", "max_tokens": 8}]}
    finish(Plan.of(fields), tmp_path / "run")
    assert any("not scored" in note for note in report([tmp_path / "run"]).notes)
    finish(Plan.of({**fields, "run_code": True}), tmp_path / "run")
    assert not read_records(tmp_path / "run").scores.keys() ^ read_records(tmp_path / "run").completions.keys()


def test_answers_without_a_number_are_told(tmp_path: Path) -> None:
    words_ = "The list is voice grass tree bird bird cloud. Put water at the end. What is the result?"
    rows = [{"q": "Take the list 4 9 5 7. Reverse the list.", "a": 7}, {"q": words_, "a": 1}]
    mine = {"name": "mine", "rows": rows, "prompt": "{{ q }}", "answer": "{{ a }}", "scorer": "number"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    fields = {"model": "fly-tiny", "drafts": "ngram", "k": 3, "tasks": [str(tmp_path / "mine.yaml")], "max_tokens": 9}
    finish(Plan.of(fields), tmp_path / "run")
    texts = [record["text"] for record in read_records(tmp_path / "run").completions.values()]
    assert {bool(re.search(r"\d", text)) for text in texts} == {True, False}
    found = report([tmp_path / "run"])
    assert "mine: answers without a number count as wrong: autoregressive 1 of 2, exact k3 1 of 2" in found.notes
    assert [row.unread for row in found.tables[0].rows] == [1, 1]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**mine, "answer": "{{ q[-6:] }}"}))
    result = command("eval", "--task", str(tmp_path / "mine.yaml"), "--model", "absent")  # before a model is loaded
    assert result.exit_code == 2
    assert "task 'mine', problem 0: answer ' list.' has no number to compare with" in plain(result.output)


# --- reports ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(whole: Path) -> Report:
    return report([whole], by_group=True)


def test_a_report_counts_what_the_records_say(whole: Path, found: Report) -> None:
    records = read_records(whole)
    (table,) = [
        each for each in found.tables if (each.task, each.temperature, each.group) == ("bundled-middle", 0.8, "")
    ]
    assert table.best_exact in ("exact k3", "exact k6") and not table.unfinished
    speeds = {row.way: row.speed for row in table.rows}
    assert table.best_exact == max(("exact k3", "exact k6"), key=speeds.__getitem__)
    for row in table.rows:
        mine = [
            r for k, r in records.completions.items() if k.task == table.task and k.temperature and k.way == row.way
        ]
        rights = [
            s["right"] for k, s in records.scores.items() if k.task == table.task and k.temperature and k.way == row.way
        ]
        assert (row.problems, row.completions) == (3, 6) == (3, len(mine))
        assert row.tokens == sum(r["generated"] for r in mine) and row.accuracy is not None
        assert row.accuracy.value == pytest.approx(sum(rights) / len(rights))
        assert row.tau == pytest.approx(sum(r["emitted"] for r in mine) / sum(r["rounds"] for r in mine))
        assert row.over_ar is not None and row.over_ar.value == pytest.approx(row.speed / speeds[AUTOREGRESSIVE])
        drafts = [draft for r in mine for draft in r["drafts"]]
        for place, height in enumerate(row.curve):
            long = [stands for length, stands in drafts if length > place]
            assert height == sum(stands > place for stands in long) / len(long)
        if row.k:
            assert row.costs is not None and row.neutral is not None and row.neutral > 0
        assert row.same is None  # other draws, other tokens


def test_exact_speculation_changes_nothing(found: Report) -> None:
    for table in found.tables:
        for row in table.rows:
            if row.way.startswith("exact") and not table.temperature:
                assert (row.same, row.diverges, row.relaxed) == (1, None, 0)
                assert row.length == (1, 1, 1)
                if row.p is not None:
                    assert (row.lost, row.won, row.p) == (0, 0, 1)


def test_the_speed_at_no_cost_is_the_formula() -> None:
    assert neutral_speed(4.0, 5.0, Costs(0.2, 1.5)) == pytest.approx(4 / 2.5)


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_the_first_difference(a: list[int], b: list[int]) -> None:
    place = first_difference(a, b)
    assert (place is None) == (a == b)
    if place is not None:
        assert a[:place] == b[:place] and a[place : place + 1] != b[place : place + 1]


class Outside(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link"):
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href") and value != "data:,"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_holds_all_it_needs(found: Report) -> None:
    page = as_html(found, "<runs>")
    assert f"kernels {found.environments[0]['kernels']}; draft ngram; fly " in page
    parser = Outside()
    parser.feed(page)
    assert parser.fetched == [] and parser.open == [] and "&lt;runs&gt;" in page
    assert page.count("<svg") >= 2 and "<mark title=" in page and "exact k6 ★" in page + page.replace("k3 ★", "k6 ★")


def test_tables_in_words_and_numbers(found: Report) -> None:
    text = as_markdown(found)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in rows} and "## safety" in text and "refusals kept" in text
    json.dumps(as_json(found), allow_nan=False)
    assert any("refuses nothing here" in note for note in found.notes)


@dataclass(frozen=True)
class Mine(ExactCore):
    """A user's own rule: nobody else knows its defaults."""

    share: float = 0.5
    least: int = 3


def test_a_report_says_what_would_mislead(tmp_path: Path) -> None:
    """Answers that were cut, drafts that stop elsewhere than those they are compared with, all parameters of a rule."""
    mine = "tests.test_eval:Mine(share=0.2)"
    fields = {"drafts": ["fly-tiny", "model(fly-tiny)"], "k": 6, "policies": ["fly", "block", mine], "limit": 2}
    finish(Plan.of({**fields, "tasks": "bundled-heldout", "max_tokens": 12, "dtype": "float32"}), tmp_path)
    records = read_records(tmp_path).completions
    found = report([tmp_path])
    (table,) = found.tables
    rows = {row.way: row for row in table.rows}
    assert {"Mine(share=0.2, least=3) k6 fly-tiny", "fly k6 model(fly-tiny)"} <= set(rows)
    assert rows[AUTOREGRESSIVE].cut == 2 == sum(r["finish_reason"] == "length" for r in records.values()) / len(rows)
    assert any("up to 2 of 2 answers (autoregressive) were cut" in note for note in found.notes)
    stops = [rows[f"{name} k6 fly-tiny"].reach for name in ("exact", "block", "fly", "Mine(share=0.2, least=3)")]
    assert stops == [REACH, REACH, REACH_EXCUSED, REACH_EXCUSED] and rows["fly k6 model(fly-tiny)"].reach is None
    for best, others in (("exact k6 fly-tiny", {"fly k6 fly-tiny", "Mine(share=0.2, least=3) k6 fly-tiny"}),
                         ("exact k6 model(fly-tiny)", set())):  # fmt: skip
        table.best_exact = best
        assert {row.way for row in table.other_stops} == others
        marked = {row.way for row in table.rows if "†" in columns(table)["Speed"]["over exact"](row)}
        assert marked == others
        assert any(
            "†" in note and "'over exact' includes" in note for note in _notes(tmp_path, [table], Records({}, {}, {}))
        ) == bool(others)
    both = _notes(tmp_path, [table, replace(table, temperature=0.7)], Records({}, {}, {}))
    assert len(both) == 2 * len(_notes(tmp_path, [table], Records({}, {}, {})))  # each says of which temperature it is
    assert all(" at temperature 0:" in note or " at temperature 0.7:" in note for note in both)
    assert "cut" in columns(table)["Answers"] and "no entropy gate" in legend([table])
    (facts,) = found.environments
    drafts = "".join(f"; draft {name}, kernels {facts['kernels']} in float32" for name in fields["drafts"])
    assert f"kernels {facts['kernels']}{drafts}; fly " in as_html(found, "runs")


def test_a_run_with_an_unused_setting_that_is_gone_can_be_read(tmp_path: Path) -> None:
    """Runs of version 0.2 have ``exits: null``. One that was used is an error: its ways cannot be made again."""
    plan = Plan(limit=2, tasks=("bundled-ood",))
    for value in (None, "exits/mine"):
        fields = {**plan.model_dump(mode="json"), "exits": value, "cache_bytes": 4 << 30}
        del fields["cache"]
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"plan": fields, "tasks": {}, "code": {}}))
        if value is None:
            assert Archive.read(tmp_path).plan.model_dump() == {**plan.model_dump(), "cache": f"{4 << 30}B"}
        else:
            with pytest.raises(ValueError, match=r"plan.yaml, line \d+: .*exits"):
                Archive.read(tmp_path)


def test_a_report_at_other_costs_shows_the_speed_at_these(whole: Path) -> None:
    """70B:8B, whose step costs 0.114 forwards of the target: τ / (K̄·c + v)."""
    records = read_records(whole).completions
    compared = report([whole], costs=Costs(0.114, 1.1))
    assert any("0.114" in note and "another pair" in note for note in compared.notes)
    for table in compared.tables:
        for row in table.rows:
            own = [
                r
                for k, r in records.items()
                if (k.way, k.task, k.temperature) == (row.way, table.task, table.temperature)
            ]
            drafted = sum(record["drafted"] for record in own) / max(sum(record["rounds"] for record in own), 1)
            at_these = None if row.way == AUTOREGRESSIVE else pytest.approx(row.tau / (drafted * 0.114 + 1.1))
            assert row.neutral == at_these
    result = command("report", str(whole), "--draft-cost", "0.114")
    assert result.exit_code == 2 and "belong together" in words(result.output)


def test_a_column_without_a_value_is_left_out_and_one_with_a_value_is_explained(found: Report) -> None:
    (table, *_) = (table for table in found.tables if table.task == "bundled-middle" and not table.temperature)
    speed = columns(table)["Speed"]
    assert "gate" in speed
    exact = replace(table, rows=[row for row in table.rows if not row.policy.startswith("fly")])
    assert "gate" not in columns(exact)["Speed"] and "gate:" not in legend([exact])
    assert "first" not in columns(exact)["Answers"]
    (speeds, *_) = (table for table in found.tables if table.task == "spec-bench")
    assert not {"right", "recovery", "p"} & set(columns(speeds)["Answers"])


def test_a_report_says_that_nothing_could_be_lost(tmp_path: Path) -> None:
    fields = {"model": "fly-tiny", "drafts": "ngram", "k": 3, "limit": 1, "max_tokens": 2}
    finish(Plan.of({**fields, "tasks": "bundled-middle"}), tmp_path)
    found = report([tmp_path])
    assert all(row.accuracy and not row.accuracy.value for row in found.tables[0].rows)
    assert any("answers nothing right here, so no rule can lose anything" in note for note in found.notes)
    answers = columns(found.tables[0])["Answers"]
    assert all(answers["recovery"](row) == "–" for row in found.tables[0].rows)


@given(
    lines=st.dictionaries(
        st.text("ab_ $<>&\"'é|", max_size=20),
        st.lists(st.tuples(st.integers(1, 9999), st.integers(0, 9999)), min_size=1),
        min_size=1,
    ),
    log_x=st.booleans(),
    from_zero=st.booleans(),
)
@settings(max_examples=10)
def test_a_plot_is_a_picture_of_its_own(
    lines: dict[str, list[tuple[int, int]]], log_x: bool, from_zero: bool, tmp_path: Path
) -> None:
    """Well-formed whatever names hold, points within the frame, left to right and up as their numbers are."""
    points = [point for each in lines.values() for point in each]
    assume(not from_zero or max(height for _, height in points) > 0)
    save_lines(tmp_path / "plot.svg", "<title> & more", "x", "y", lines, log_x, from_zero)
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [each.text or "" for each in root.iter(f"{space}text")]
    assert {"<title> & more", "x", "y"} <= {*texts}
    assert all(any(name.strip() in text for text in texts) for name in lines)  # each in the key
    # One marker for each point, left to right and up as their numbers are.
    drawn = [each for each in root.iter(f"{space}g") if each.get("id", "").startswith("curve_")]
    marks = [mark.attrib for line in drawn for mark in line.iter(f"{space}use")]
    at = [(float(mark["x"]), float(mark["y"])) for mark in marks]
    assert len(at) == len(points)
    for (x1, y1), (p1, q1) in zip(at, points):
        for (x2, y2), (p2, q2) in zip(at[:3], points[:3]):
            assert (x1 <= x2 or p1 >= p2) and (y1 >= y2 or q1 >= q2)
    once = (tmp_path / "plot.svg").read_text("utf-8")
    save_lines(tmp_path / "plot.svg", "<title> & more", "x", "y", lines, log_x, from_zero)
    assert once == (tmp_path / "plot.svg").read_text("utf-8")


def test_answers_as_spec_bench_reads_them(whole: Path, tmp_path: Path) -> None:
    files = [path for path in write_spec_bench(whole, tmp_path) if "spec-bench" in path.name]
    assert len(files) == 5 * 2
    tau = {
        row.way: row.tau
        for table in report([whole]).tables
        if table.task == "spec-bench" and not table.temperature
        for row in table.rows
    }
    for path in files:
        (line,) = map(json.loads, path.read_text().splitlines())
        assert line["question_id"] == 81 and line["category"] == "writing"
        choice = line["choices"][0]
        assert len(choice["turns"]) == len(choice["new_tokens"]) == len(choice["wall_time"]) == 2
        if path.name.endswith("fly-window-1-hold-1-k6-temperature-0.jsonl"):
            assert np.mean(choice["accept_lengths"]) == pytest.approx(tau[f"{RULE} k6"])
    assert any(path.name.endswith("fly-window-1-hold-1-k6-temperature-0.jsonl") for path in files)


def test_an_unfinished_run_is_reported_on_what_all_have(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        finish(plan, tmp_path, 60)
    tables = report([tmp_path]).tables
    assert all(row.problems == tables[0].rows[0].problems for row in tables[0].rows)
    with pytest.raises(ValueError, match="is no run"):
        report([tmp_path / "elsewhere"])


def test_the_commands_go_together(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        yaml.safe_dump({**PLAN, "temperatures": 0, "tasks": ["bundled-heldout"], "limit": 1})
    )
    run = str(tmp_path / "run")
    first = command("eval", str(tmp_path / "plan.yaml"), "--out", run, "--k", "4")
    assert first.exit_code == 0 and "bundled-heldout · temperature 0 · 1 problem" in words(first.output), first.output
    again = command("eval", run, "--problems", "2")
    assert again.exit_code == 0 and "2 problems" in again.output, again.output
    assert f"{run} has 3 of 6 answers: decoding the rest" in words(again.stderr) and run not in first.stderr
    finished = command("eval", run, "--problems", "2")
    assert f"{run} has 6 of 6 answers: nothing to decode" in words(finished.stderr), finished.stderr
    assert "2 problems" in finished.output
    files = {name: tmp_path / f"r.{name}" for name in ("markdown", "html", "json")}
    shown = command("report", run, *itertools.chain(*((f"--{name}", str(path)) for name, path in files.items())))
    assert shown.exit_code == 0 and all(path.stat().st_size > 500 for path in files.values()), shown.output
    assert sorted(shown.output.splitlines()) == sorted(f"written: {path}" for path in files.values())
    wrong = command("eval", run, "--k", "9")
    assert wrong.exit_code == 2 and "k: [4] then, [9] now" in words(wrong.stderr)
    (tmp_path / "plan.yaml").write_text("polices: fly")
    assert "polices: there is no such field (did you mean 'policies'?)" in words(
        command("eval", str(tmp_path / "plan.yaml")).stderr
    )
