"""The results of a run: each way beside autoregressive decoding and the best exact speculation, on the same problems.

Everything is computed from a run's folder; no model is loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fly.eval.plan import AUTOREGRESSIVE, Plan
from fly.eval.records import Key, Records, read_records
from fly.eval.statistics import Estimate, bootstrap_ratio, sign_test, wilson

__all__ = ["Case", "Costs", "Report", "Row", "Table", "neutral_speed", "report"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Costs:
    """What speculation costs with one draft at one length, measured in the run by exact speculation: ``c``, the seconds
    of a drafted token, and ``v``, those of a verification, both over a target's forward of one token."""

    c: float
    v: float


def neutral_speed(tau: float, drafted: float, costs: Costs) -> float:
    """The speed over autoregression that a rule would have if deciding took no time, in Python or anywhere:

        S = τ / (K̄·c + v)

    τ tokens a round, K̄ drafted tokens a round (``drafted``), c and v as exact speculation measured them in the same
    run, with the same draft and length. It separates the rule from its implementation: the difference between S and the
    measured speed is the decision's cost, the prompts, and other work of a round besides the models. (Leviathan et al.
    2023, with a v for the verification, which costs more than one token's forward.)
    """
    return tau / (drafted * costs.c + costs.v)


@dataclass
class Row:
    """One way on one task. Estimates have intervals of 95 %; None is unknown."""

    way: str
    policy: str
    guarantee: str
    k: int
    problems: int
    completions: int
    tokens: int
    seconds: float
    tau: float
    kept: float | None  # share of drafted tokens that were emitted
    relaxed: float  # share of tokens
    python: float | None  # share of rounds that Python decided
    recorded: bool  # whether its blocks were kept, for which rounds are taken one by one
    layers: float | None  # of the target, that a round went through, where it leaves early
    cut: int  # completions that ended at the limit of tokens
    reach: float | None  # where its draft stops by itself (``fly.drafts.stops``), where that is known
    accuracy: Estimate | None = None
    recovery: Estimate | None = None  # accuracy over autoregression's
    lost: int = 0  # problems that autoregression answers right more often
    won: int = 0
    p: float | None = None
    still: Estimate | None = None  # of the problems that autoregression answers right, those this does too
    over_ar: Estimate | None = None  # tokens a second
    over_exact: Estimate | None = None
    neutral: float | None = None  # over autoregression, deciding free
    costs: Costs | None = None
    same: float | None = None  # share of completions that are autoregression's, at temperature 0
    diverges: float | None = None  # median place of the first other token, among those that are not
    length: Estimate | None = None  # tokens over autoregression's
    curve: list[float] = field(default_factory=list)  # by place in the draft: how often it was reached and stood
    gates: dict[str, list[int]] = field(default_factory=dict)  # by clause, mismatches it was asked of and held at

    @property
    def gate(self) -> float | None:
        """How often the target was undecided, of the mismatches at which an entropy gate asked."""
        counts = [held for name, held in self.gates.items() if name.startswith("entropy")]
        asked = sum(asked for asked, _ in counts)
        return sum(passed for _, passed in counts) / asked if asked else None

    @property
    def speed(self) -> float:
        """Tokens a second, prompts included."""
        return self.tokens / self.seconds


@dataclass
class Case:
    """Answers to one problem by several ways, as texts with the places of relaxed tokens."""

    problem: str
    asked: str
    answers: list[tuple[str, bool | None, list[tuple[str, str]]]]  # way, right, pieces of text and why each was relaxed


@dataclass
class Table:
    """One task of one run at one temperature. ``unfinished``: problems left out since some way lacks them."""

    run: str
    task: str
    group: str  # of problems; empty is all of them
    temperature: float
    rows: list[Row]
    unfinished: int
    unscored: int
    refusals: bool  # whether right means refused
    best_exact: str | None
    cases: list[Case]
    together: int  # problems decoded at a time

    @property
    def other_stops(self) -> list[Row]:
        """Ways whose drafts stop by themselves elsewhere than those of the exact speculation they are compared with."""
        exact = next((row.reach for row in self.rows if row.way == self.best_exact), None)
        return [row for row in self.rows if None not in (exact, row.reach) and row.reach != exact]

    @property
    def title(self) -> str:
        group = f" · {self.group}" if self.group else ""
        few = f", {self.together} at a time" if self.together > 1 else ""
        count = self.rows[0].problems
        return f"{self.task}{group} · temperature {self.temperature:g} · {count} problem{'s' * (count != 1)}{few}"


@dataclass
class Report:
    """Tables of one or several runs, what made them, and notes for the reader."""

    tables: list[Table]
    environments: list[dict[str, Any]]
    notes: list[str]


def report(folders: Sequence[Path], by_group: bool = False, cases: int = 6) -> Report:
    """Read runs and compare. ``by_group``: tables for each group of problems too; ``cases``: problems of each task
    whose texts are shown side by side.

    Raises ``ValueError`` for a folder that is no run, or has no completions.
    """
    tables: list[Table] = []
    environments: list[dict[str, Any]] = []
    notes: list[str] = []
    for folder in folders:
        path = folder / "plan.yaml"
        if not path.exists():
            raise ValueError(f"{str(folder)!r} is no run: there is no plan.yaml in it")
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        plan = Plan.of(saved["plan"], f"{path}: ")
        records = read_records(folder)
        if not records.completions:
            raise ValueError(f"{str(folder)!r} has no completions yet")
        made = _tables(str(folder), plan, saved["tasks"], records, by_group, cases)
        tables += made
        environments += records.environments.values()
        notes += _notes(folder, made, records)
    return Report(tables, environments, notes)


def _tables(run: str, plan: Plan, tasks: dict[str, Any], records: Records, by_group: bool, cases: int) -> list[Table]:
    """A table for each task and temperature, over the problems of which every way has all completions."""
    ways, found = [way.label for way in plan.ways], []
    keys = [key for key in records.completions if key.way in ways]
    for name, temperature in dict.fromkeys((key.task, key.temperature) for key in keys):
        units: dict[tuple[str, int], Unit] = {}
        for key in sorted(key for key in keys if (key.task, key.temperature) == (name, temperature)):
            units.setdefault((key.problem, key.seed), {}).setdefault(key.way, []).append(key)
        whole: dict[str, list[Unit]] = {}
        for (problem, _), unit in units.items():
            turns = records.completions[next(iter(unit.values()))[0]]["turns"]
            if all(len(unit.get(way, ())) == turns for way in ways):
                whole.setdefault(problem, []).append(unit)
        if not whole:
            continue
        problems = sorted(whole.values(), key=lambda each: records.completions[each[0][ways[0]][0]]["number"])
        groups: dict[str, list[list[Unit]]] = {"": problems}
        for each in problems if by_group else ():
            if group := records.completions[each[0][ways[0]][0]]["group"]:
                groups.setdefault(group, []).append(each)
        for group, part in groups.items():
            rows, best = _Comparison(plan, records, part).table()
            scored = [_last(unit, way) in records.scores for each in part for unit in each for way in ways]
            found.append(
                Table(
                    run=run,
                    task=name,
                    group=group,
                    temperature=temperature,
                    rows=rows,
                    unfinished=0 if group else len({problem for problem, _ in units} - whole.keys()),
                    unscored=scored.count(False) if tasks[name]["scores"] else 0,
                    refusals=tasks[name]["scorer"] == "refusal",
                    best_exact=best,
                    cases=[] if group else _cases(plan, records, part, cases),
                    together=plan.together,
                )
            )
    return found


Unit = dict[str, list[Key]]  # a problem with one seed: by way, its turns in order


def _last(unit: Unit, way: str) -> Key:
    return unit[way][-1]


class _Comparison:
    """All ways of a plan on the same problems, each of which has one ``Unit`` a seed."""

    def __init__(self, plan: Plan, records: Records, problems: list[list[Unit]]) -> None:
        self.plan, self.records, self.problems = plan, records, problems
        self.ways = {way.label: way for way in plan.ways}

    def of(self, way: str) -> list[list[Record]]:
        """The completions of each problem."""
        return [[self.records.completions[key] for unit in problem for key in unit[way]] for problem in self.problems]

    def sums(self, way: str, value: Callable[[Record], float]) -> list[float]:
        """For each problem, the sum over its completions."""
        return [sum(map(value, each)) for each in self.of(way)]

    def shares(self, way: str) -> list[float] | None:
        """For each problem, the share of seeds with which it was answered right; None where that is not known."""
        scores = self.records.scores
        found = [[scores.get(_last(unit, way)) for unit in problem] for problem in self.problems]
        if any(score is None for each in found for score in each):
            return None
        return [sum(score["right"] for score in each if score) / len(each) for each in found]

    def table(self) -> tuple[list[Row], str | None]:
        """A row a way, and the label of the exact speculation that gives most tokens a second."""
        rows = {label: self._row(label) for label in self.ways}
        exact = [row for row in rows.values() if self.ways[row.way].exact]
        best = max(exact, key=lambda row: row.speed).way if exact else None
        base = self._target_seconds()
        for label, row in rows.items():
            row.over_ar = self._speed_over(label, AUTOREGRESSIVE)
            row.over_exact = self._speed_over(label, best) if best else None
            row.length = bootstrap_ratio([self.sums(label, _tokens)], [self.sums(AUTOREGRESSIVE, _tokens)])
            self._compare_answers(label, row)
            self._compare_tokens(label, row)
            self._compare_costs(label, row, base)
        return list(rows.values()), best

    def _row(self, label: str) -> Row:
        way, every = self.ways[label], [record for each in self.of(label) for record in each]
        total = {
            name: sum(record[name] for record in every)
            for name in ("rounds", "emitted", "drafted", "accepted", "relaxed", "generated", "judged")
        }
        gates: dict[str, list[int]] = {}
        for record in every:
            for name, counts in record["gates"].items():
                gates[name] = [a + b for a, b in zip(gates.get(name, [0, 0]), counts)]
        return Row(
            way=label,
            policy=str(way.policy),
            guarantee=way.guarantee.value,
            k=way.k,
            problems=len(self.problems),
            completions=len(every),
            tokens=total["generated"],
            seconds=sum(map(_seconds, every)),
            tau=total["emitted"] / max(total["rounds"], 1),
            kept=total["accepted"] / total["drafted"] if total["drafted"] else None,
            relaxed=total["relaxed"] / max(total["generated"], 1),
            python=total["judged"] / total["rounds"] if total["rounds"] and way.k else None,
            recorded=any("blocks" in record for record in every),
            layers=sum(record.get("layers", 0) for record in every) / total["rounds"] if way.exits else None,
            cut=sum(record["finish_reason"] == "length" for record in every),
            reach=every[0].get("reach"),
            curve=_curve([tuple(draft) for record in every for draft in record["drafts"]]),
            gates=gates,
        )

    def _speed_over(self, label: str, other: str) -> Estimate:
        return bootstrap_ratio(
            [self.sums(label, _tokens), self.sums(other, _seconds)],
            [self.sums(label, _seconds), self.sums(other, _tokens)],
        )

    def _compare_answers(self, label: str, row: Row) -> None:
        own, plain = self.shares(label), self.shares(AUTOREGRESSIVE)
        if own is None or plain is None:
            return
        row.accuracy = wilson(sum(own), len(own))
        row.lost = sum(a < b for a, b in zip(own, plain))
        row.won = sum(a > b for a, b in zip(own, plain))
        if label != AUTOREGRESSIVE:
            row.recovery = bootstrap_ratio([own], [plain]) if sum(plain) else None
            row.p = sign_test(row.lost, row.won)
            if sum(plain):
                both = sum(min(a, b) for a, b in zip(own, plain))
                whole = sum(share > 0 for share in plain)
                row.still = wilson(min(both / sum(plain), 1.0) * whole, whole)

    def _compare_tokens(self, label: str, row: Row) -> None:
        if label == AUTOREGRESSIVE:
            return
        firsts, count = [], 0
        for problem in self.problems:
            for unit in problem:
                ours, theirs = (
                    self.records.completions[unit[label][0]],
                    self.records.completions[unit[AUTOREGRESSIVE][0]],
                )
                if ours["temperature"]:
                    return  # other draws, so other tokens
                count += 1
                first = first_difference(ours["token_ids"], theirs["token_ids"])
                firsts += [] if first is None else [first]
        row.same = 1 - len(firsts) / count
        row.diverges = statistics.median(firsts) if firsts else None

    def _target_seconds(self) -> float:
        """Seconds of a target's forward over one token, in autoregressive decoding."""
        every = [record for each in self.of(AUTOREGRESSIVE) for record in each]
        return sum(r["seconds"]["target"] for r in every) / max(sum(r["rounds"] for r in every), 1)

    def _compare_costs(self, label: str, row: Row, base: float) -> None:
        way = self.ways[label]
        twins = [one for one in self.ways.values() if one.exact and (one.draft, one.k) == (way.draft, way.k)]
        if not twins or not base or way.exits:  # a verification costs another share there
            return
        every = [record for each in self.of(twins[0].label) for record in each]
        drafted, rounds = sum(r["drafted"] for r in every), sum(r["rounds"] for r in every)
        if not rounds or not drafted:
            return
        row.costs = Costs(
            sum(r["seconds"]["draft"] for r in every) / drafted / base,
            sum(r["seconds"]["target"] for r in every) / rounds / base,
        )
        own = [record for each in self.of(label) for record in each]
        if turns := sum(r["rounds"] for r in own):
            row.neutral = neutral_speed(row.tau, sum(r["drafted"] for r in own) / turns, row.costs)


def _tokens(record: Record) -> float:
    return float(record["generated"])


def _seconds(record: Record) -> float:
    return float(record["seconds"]["prompt"] + record["seconds"]["decoding"])


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The place of the first token that is another, or that only one of them has; None if they are the same."""
    for place, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _curve(drafts: list[tuple[int, ...]]) -> list[float]:
    """For each place of a draft, the share of the drafts that were that long in which it stood."""
    longest = max((length for length, _ in drafts), default=0)
    reached = [[stands for length, stands in drafts if length > place] for place in range(longest)]
    return [sum(stands > place for stands in each) / len(each) for place, each in enumerate(reached)]


def _cases(plan: Plan, records: Records, problems: list[list[Unit]], count: int) -> list[Case]:
    """Problems to look at: first those whose score a rule changed, then those it relaxed most in."""
    units = [problem[0] for problem in problems]

    def interest(unit: Unit) -> tuple[int, int]:
        scores = {records.scores.get(keys[-1], {}).get("right") for keys in unit.values()}
        relaxed = sum(records.completions[key]["relaxed"] for keys in unit.values() for key in keys)
        return len(scores), relaxed

    chosen = sorted(units, key=interest, reverse=True)[:count]
    found = []
    for unit in chosen:
        answers = []
        for way in plan.ways:
            key = unit[way.label][-1]
            right = records.scores.get(key, {}).get("right")
            answers.append((way.label, right, pieces_of(records.completions[key])))
        plain = _last(unit, AUTOREGRESSIVE)
        found.append(Case(plain.problem, records.completions[plain]["asked"], answers))
    return found


def pieces_of(record: Record) -> list[tuple[str, str]]:
    """A completion's text in pieces: plain ones with "", and each relaxed token with what excused it."""
    text, ends = record["text"], record["ends"]
    pieces, at = [], 0
    for place, clause, _, choice in record["excused"]:
        if not ends:
            break
        start = ends[place - 1] if place else 0
        pieces += [(text[at:start], ""), (text[start : ends[place]], f"{clause}; the target's own was {choice!r}")]
        at = ends[place]
    return [piece for piece in [*pieces, (text[at:], "")] if piece[0]]


def _notes(folder: Path, tables: list[Table], records: Records) -> list[str]:
    """Notes for the reader of the tables."""
    notes = []
    if len(records.environments) > 1:
        kinds = [
            f"{e['machine']}, {e['kernels']}, torch {e['torch']}, fly {e['fly']}" for e in records.environments.values()
        ]
        notes.append(f"{folder}: made by {len(kinds)} different setups, whose times do not compare: {'; '.join(kinds)}")
    for table in tables:
        if table.group:
            continue
        if table.unfinished:
            notes.append(
                f"{table.task}: {table.unfinished} problems lack some way and are left out; the run is not over"
            )
        if most := max(row.cut for row in table.rows):
            way = next(row for row in table.rows if row.cut == most)
            notes.append(
                f"{table.task}: up to {most} of {way.completions} answers ({way.way}) were cut at their limit of "
                "tokens, and are scored as they are: --max-tokens raises it"
            )
        if others := table.other_stops:
            stops = ", ".join(f"{row.way} ({row.reach:g})" for row in others)
            exact = next(row for row in table.rows if row.way == table.best_exact)
            notes.append(
                f"{table.task}: † drafts stop by themselves at another chance of being kept (reach) under {stops} than "
                f"under {exact.way} ({exact.reach:g}), which 'over exact' includes; a draft such as 'ngram+model(NAME, "
                f"reach={exact.reach:g})' stops alike under all rules"
            )
        if table.unscored:
            notes.append(f"{table.task}: {table.unscored} answers are not scored (programs run only with --run-code)")
        for row in table.rows:
            if row.recorded:
                notes.append(
                    f"{table.task}, {row.way}: its blocks were recorded, so its rounds were taken one by one and "
                    "decided in Python; its speed is that of recording, and 'at no cost' its speed without decisions"
                )
            elif row.python:
                notes.append(
                    f"{table.task}, {row.way}: {row.python:.0%} of its rounds were decided in Python, which takes "
                    "longer than compiled code; 'at no cost' is its speed without that"
                )
            for gate, (asked, passed) in row.gates.items():
                if asked >= 20 and not passed:
                    notes.append(f"{table.task}, {row.way}: {gate} never held ({asked} mismatches): nothing is relaxed")
        if table.refusals and not any(row.accuracy and row.accuracy.value for row in table.rows[:1]):
            notes.append(f"{table.task}: the target alone refuses nothing here, so there is no refusal to keep")
    return list(dict.fromkeys(notes))
