"""Reports compare each way to decode with autoregressive decoding and with the fastest exact speculation, on the same
problems. A server that cannot be asked for autoregressive decoding has exact speculation in its place.

A report is computed from the folder of a run; no model is loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fly.extras.eval.archive import Archive
from fly.extras.eval.costs import Costs, measured_costs, neutral_speed
from fly.extras.eval.plan import AUTOREGRESSIVE
from fly.extras.eval.records import Key, Records
from fly.extras.eval.scorers import UNREAD
from fly.extras.statistics import Estimate, bootstrap_ratio, sign_test, wilson

__all__ = ["Case", "Report", "Row", "Table", "report"]

Record = dict[str, Any]


@dataclass
class Row:
    """One way on one task, beside the table's ``reference``: autoregressive decoding (AR) where a run has it, otherwise
    exact speculation. Estimates have intervals of 95 %; None stands for unknown."""

    way: str
    policy: str
    guarantee: str
    k: int | None
    problems: int
    completions: int
    tokens: int
    seconds: float
    latency: float | None  # mean seconds from a request to its answer; None if no server was asked
    tau: float | None
    drafted: float | None  # tokens drafted in a round
    kept: float | None  # share of drafted tokens that were emitted
    relaxed: float | None  # share of emitted tokens that were relaxed
    python: float | None  # share of rounds that were decided in Python
    recorded: bool  # whether its blocks were recorded; rounds are then taken one by one
    cut: int  # completions that ended at the limit of tokens
    reach: float | None  # drafts stop below this chance of being kept (``fly.drafts.stops``)
    accuracy: Estimate | None = None
    recovery: Estimate | None = None  # accuracy relative to the reference
    lost: int = 0  # problems that the reference answers right more often
    won: int = 0  # problems that this way answers right more often
    unread: int = 0  # scored answers in which the scorer found nothing to compare, such as a number
    p: float | None = None
    still: Estimate | None = None  # of the problems that the reference answers right, the share that it does
    over_ar: Estimate | None = None  # tokens per second, relative to AR
    over_exact: Estimate | None = None
    neutral: float | None = None  # speed relative to AR if decisions took no time
    costs: Costs | None = None
    same: float | None = None  # share of completions equal to the reference's, at temperature 0
    diverges: float | None = None  # median index of the first different token, among the other completions
    length: Estimate | None = None  # number of tokens, relative to the reference
    curve: list[float] = field(default_factory=list)  # for each token of a draft, the share of drafts kept up to it
    gates: dict[str, list[int]] = field(default_factory=dict)  # by clause: mismatches it judged, and for which it held

    @property
    def gate(self) -> float | None:
        """The share of mismatches at which an entropy gate held, because the target was uncertain."""
        counts = [gate_counts for name, gate_counts in self.gates.items() if name.startswith("entropy")]
        mismatches = sum(mismatches for mismatches, _ in counts)
        return sum(passed for _, passed in counts) / mismatches if mismatches else None

    @property
    def speed(self) -> float:
        """Tokens per second, the time of prompts included."""
        return self.tokens / self.seconds


@dataclass
class Case:
    """The answers to one problem in several ways. An answer has the label of its way, whether it is right, and its text
    in pieces, each with the reason why it was relaxed (or "")."""

    problem: str
    asked: str
    answers: list[tuple[str, bool | None, list[tuple[str, str]]]]


@dataclass
class Table:
    """One task of one run at one temperature."""

    run: str
    task: str
    group: str  # the group of problems; "" for all problems
    temperature: float
    rows: list[Row]
    unfinished: int  # problems left out because some way has not answered them yet
    unscored: int
    scorer: str  # its kind
    refusals: bool  # whether a right answer is a refusal
    reference: str  # the label of the way that the others are compared with
    best_exact: str | None  # the label of the fastest exact speculation; None if all were recorded
    cases: list[Case]
    together: int  # problems decoded at a time
    makers: int  # how many actors, or machines, decoded these problems
    timed: int  # problems that one of them decoded in every way, in turns; speeds are compared on these only

    @property
    def other_stops(self) -> list[Row]:
        """The rows whose drafts stop at a different reach than those of the fastest exact speculation."""
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
    """The tables of one or several runs, the machines and software that made them, and notes for the reader."""

    tables: list[Table]
    environments: list[dict[str, Any]]
    notes: list[str]


def report(folders: Sequence[Path], by_group: bool = False, cases: int = 6, costs: Costs | None = None) -> Report:
    """Read runs and compare their ways. ``by_group`` adds a table for each group of problems; ``cases`` is the number
    of problems of each task whose texts are shown side by side. ``costs`` replaces those that the runs measured in the
    speed without decisions (``Row.neutral``).

    Raises ``ValueError`` for a folder that is no run, or has no completions.
    """
    tables: list[Table] = []
    environments: list[dict[str, Any]] = []
    notes: list[str] = []
    for folder in folders:
        run = Archive.read(folder)
        if not run.records.completions:
            raise ValueError(f"{str(folder)!r} has no completions yet")
        run_tables = _tables(run, by_group, cases, costs)
        tables += run_tables
        environments += [{**each, "drafts": _drafts(run, name)} for name, each in run.records.environments.items()]
        notes += _notes(folder, run_tables, run.records)
    if costs is not None:
        notes.append(
            f"The column 'at no cost' is for another pair, not of this run: every draft costs {costs.c:g} forwards of "
            f"the target a token, and a verification {costs.v:g}."
        )
    return Report(tables, environments, notes)


def _drafts(run: Archive, environment: str) -> dict[str, str]:
    """Return the drafts of an environment, each with the kernels of its models. They are "" for a draft without a
    model, and for records that do not name them."""
    drafts = {way.label: way.draft for way in run.ways if way.drafts}
    return {
        drafts[key.way]: " + ".join(f"{kernels} in {dtype}" for kernels, dtype in record.get("drafting", ()))
        for key, record in run.records.completions.items()
        if key.way in drafts and record["environment"] == environment
    }


def _tables(run: Archive, by_group: bool, cases: int, costs: Costs | None) -> list[Table]:
    """Make a table for each task and temperature, over the problems that every way has answered completely."""
    records, tasks = run.records, run.tasks
    ways, tables = [way.label for way in run.ways], []
    keys = [key for key in records.completions if key.way in ways]
    for name, temperature in dict.fromkeys((key.task, key.temperature) for key in keys):
        # Collect the turns of each problem and seed by way, and keep the problems that are complete.
        units: dict[tuple[str, int], Unit] = {}
        for key in sorted(key for key in keys if (key.task, key.temperature) == (name, temperature)):
            units.setdefault((key.problem, key.seed), {}).setdefault(key.way, []).append(key)
        complete_problems: dict[str, list[Unit]] = {}
        for (problem, _), unit in units.items():
            turns = records.completions[next(iter(unit.values()))[0]]["turns"]
            if all(len(unit.get(way, ())) == turns for way in ways):
                complete_problems.setdefault(problem, []).append(unit)
        if not complete_problems:
            continue
        # All problems make one table, and each group of problems another.
        problems = sorted(
            complete_problems.values(), key=lambda each: records.completions[each[0][ways[0]][0]]["number"]
        )
        groups: dict[str, list[list[Unit]]] = {"": problems}
        for each in problems if by_group else ():
            if group := records.completions[each[0][ways[0]][0]]["group"]:
                groups.setdefault(group, []).append(each)
        for group, part in groups.items():
            comparison = _Comparison(run, part, costs)
            rows, best = comparison.table()
            scored = [_last(unit, way) in records.scores for each in part for unit in each for way in ways]
            tables.append(
                Table(
                    run=str(run.folder),
                    task=name,
                    group=group,
                    temperature=temperature,
                    rows=rows,
                    unfinished=0 if group else len({problem for problem, _ in units} - complete_problems.keys()),
                    unscored=scored.count(False) if tasks[name]["scores"] else 0,
                    scorer=tasks[name]["scorer"],
                    refusals=tasks[name]["scorer"] == "refusal",
                    reference=comparison.reference,
                    best_exact=best,
                    cases=[] if group else _cases(run, part, cases),
                    together=run.plan.together,
                    makers=len(comparison.makers),
                    timed=len(comparison.timed),
                )
            )
    return tables


Unit = dict[str, list[Key]]  # the turns of one problem with one seed, by way


def _last(unit: Unit, way: str) -> Key:
    return unit[way][-1]


class _Comparison:
    """All ways of a run on the same problems. A problem has one ``Unit`` for each seed."""

    def __init__(self, run: Archive, problems: list[list[Unit]], costs: Costs | None) -> None:
        self.records = records = run.records
        self.costs = costs
        self.problems = problems
        self.ways = {way.label: way for way in run.ways}
        self.reference = run.ways[0].label
        # Times can be compared only on problems where a single maker made all completions, in turns.
        makers = [
            {_maker(records.completions[key]) for unit in problem for keys in unit.values() for key in keys}
            for problem in problems
        ]
        self.makers: set[str] = set().union(*makers)
        self.timed = [problem for problem, problem_makers in zip(problems, makers) if len(problem_makers) == 1]

    def of(self, way: str, problems: list[list[Unit]] | None = None) -> list[list[Record]]:
        """Return the completions of each of ``problems``; None means all problems."""
        chosen_problems = self.problems if problems is None else problems
        return [[self.records.completions[key] for unit in problem for key in unit[way]] for problem in chosen_problems]

    def sums(self, way: str, value: Callable[[Record], float], problems: list[list[Unit]] | None = None) -> list[float]:
        """Return, for each problem, the sum of ``value`` over its completions."""
        return [sum(map(value, each)) for each in self.of(way, problems)]

    def shares(self, way: str) -> list[float] | None:
        """Return, for each problem, the share of seeds whose answer is right; None if some answer has no score."""
        scores = self.records.scores
        scores_by_problem = [[scores.get(_last(unit, way)) for unit in problem] for problem in self.problems]
        if any(score is None for each in scores_by_problem for score in each):
            return None
        return [sum(score["right"] for score in each if score) / len(each) for each in scores_by_problem]

    def table(self) -> tuple[list[Row], str | None]:
        """Return a row for each way, and the label of the fastest exact speculation, if one was not recorded."""
        rows = {label: self._row(label) for label in self.ways}
        # The speed of a recorded way is that of recording, so it is compared with nothing.
        exact = [row for row in rows.values() if self.ways[row.way].exact and not row.recorded]
        for label, row in rows.items():
            if self.reference == AUTOREGRESSIVE and not row.recorded:
                row.over_ar = self._speed_over(label, AUTOREGRESSIVE)
        # The fastest has the highest speed relative to AR or, without comparable times, the most tokens per second.
        best = max(exact, key=lambda row: row.over_ar.value if row.over_ar else row.speed).way if exact else None
        for label, row in rows.items():
            row.over_exact = self._speed_over(label, best) if best else None
            row.length = bootstrap_ratio([self.sums(label, _tokens)], [self.sums(self.reference, _tokens)])
            self._compare_answers(label, row)
            self._compare_tokens(label, row)
            self._compare_costs(label, row)
        return list(rows.values()), best

    def _row(self, label: str) -> Row:
        way, way_records = self.ways[label], self._records(label)
        total = {
            name: _total(way_records, name)
            for name in ("rounds", "emitted", "drafted", "accepted", "relaxed", "generated", "judged")
        }
        gates: dict[str, list[int]] = {}
        for record in way_records:
            for name, counts in record.get("gates", {}).items():
                gates[name] = [a + b for a, b in zip(gates.get(name, [0, 0]), counts)]
        requests = [record["seconds"]["request"] for record in way_records if "request" in record["seconds"]]
        return Row(
            way=label,
            policy=way.policy,
            guarantee=way.guarantee,
            k=way.k,
            problems=len(self.problems),
            completions=len(way_records),
            tokens=sum(record["generated"] for record in way_records),
            seconds=sum(map(_seconds, way_records)),
            latency=statistics.fmean(requests) if requests else None,
            tau=_share(total["emitted"], total["rounds"]),
            drafted=_share(total["drafted"], total["rounds"]),
            kept=_share(total["accepted"], total["drafted"]),
            relaxed=_share(total["relaxed"], total["generated"]),
            python=_share(total["judged"], total["rounds"]) if way.drafts else None,
            recorded=any("blocks" in record for record in way_records),
            cut=sum(record["finish_reason"] == "length" for record in way_records),
            reach=way_records[0].get("reach"),
            curve=_curve([tuple(draft) for record in way_records for draft in record.get("drafts", ())]),
            gates=gates,
        )

    def _speed_over(self, label: str, other: str) -> Estimate | None:
        if not self.timed:
            return None
        sums, other_sums = (
            [self.sums(way, value, self.timed) for value in (_tokens, _seconds)] for way in (label, other)
        )
        return bootstrap_ratio([sums[0], other_sums[1]], [sums[1], other_sums[0]])

    def _compare_answers(self, label: str, row: Row) -> None:
        shares, plain = self.shares(label), self.shares(self.reference)
        if shares is None or plain is None:
            return
        row.accuracy = wilson(sum(shares), len(shares))
        scores = [self.records.scores[_last(unit, label)] for problem in self.problems for unit in problem]
        row.unread = sum(not (score["right"] or score["found"]) for score in scores)
        row.lost = sum(a < b for a, b in zip(shares, plain))
        row.won = sum(a > b for a, b in zip(shares, plain))
        if label != self.reference:
            row.recovery = bootstrap_ratio([shares], [plain]) if sum(plain) else None
            row.p = sign_test(row.lost, row.won)
            if sum(plain):
                shared = sum(min(a, b) for a, b in zip(shares, plain))
                solved = sum(share > 0 for share in plain)
                row.still = wilson(min(shared / sum(plain), 1.0) * solved, solved)

    def _compare_tokens(self, label: str, row: Row) -> None:
        """Compare token ids or, without them, texts, which do not say where they differ."""
        if label == self.reference:
            return
        firsts: list[int] = []
        n_other = count = 0
        for problem in self.problems:
            for unit in problem:
                completion, reference = (self.records.completions[unit[way][0]] for way in (label, self.reference))
                if completion["temperature"]:
                    return  # sampled answers differ by chance
                count += 1
                if "token_ids" not in completion or "token_ids" not in reference:
                    n_other += completion["text"] != reference["text"]
                elif (first := first_difference(completion["token_ids"], reference["token_ids"])) is not None:
                    n_other += 1
                    firsts.append(first)
        row.same = 1 - n_other / count
        row.diverges = statistics.median(firsts) if firsts else None

    def _compare_costs(self, label: str, row: Row) -> None:
        """Compute the speed without the time of decisions, from the costs that exact speculation with the same draft
        and length measured, or from other costs."""
        way = self.ways[label]
        twins = [twin for twin in self.ways.values() if twin.exact and (twin.draft, twin.k) == (way.draft, way.k)]
        if not twins or self.reference != AUTOREGRESSIVE:
            return
        exact, plain = (self._records(name, self.timed) for name in (twins[0].label, AUTOREGRESSIVE))
        way_records = self._records(label)
        row.costs = self.costs or measured_costs(exact, plain)
        drafted = _share(_total(way_records, "drafted"), _total(way_records, "rounds"))
        if row.costs is not None and row.tau is not None and drafted is not None:
            row.neutral = neutral_speed(row.tau, drafted, row.costs)

    def _records(self, label: str, problems: list[list[Unit]] | None = None) -> list[Record]:
        return [record for each in self.of(label, problems) for record in each]


def _maker(record: Record) -> str:
    """Return the actor that made a record or, if the record names none, the id of the machine and software."""
    return str(record.get("actor", record["environment"]))


def _tokens(record: Record) -> float:
    return float(record["generated"])


def _seconds(record: Record) -> float:
    seconds = record["seconds"]
    return float(seconds["share"] if "share" in seconds else seconds["prompt"] + seconds["decoding"])


def _total(records: Sequence[Record], name: str) -> int | None:
    """Return the sum of a count over records; None if one does not have it."""
    return None if any(name not in record for record in records) else sum(record[name] for record in records)


def _share(part: int | None, whole: int | None) -> float | None:
    """Return a ratio of counts; None if one is unknown, or there is nothing to divide by."""
    return part / whole if part is not None and whole else None


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Return the index of the first token that differs, or that only one of the lists has; None if they are equal."""
    return next((at for at, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def _curve(drafts: list[tuple[int, ...]]) -> list[float]:
    """Return, for each token of a draft, the share of drafts that were kept up to it, among the drafts that are long
    enough."""
    longest = max((length for length, _ in drafts), default=0)
    reached = [[stands for length, stands in drafts if length > place] for place in range(longest)]
    return [sum(stands > place for stands in each) / len(each) for place, each in enumerate(reached)]


def _cases(run: Archive, problems: list[list[Unit]], count: int) -> list[Case]:
    """Return the problems whose texts are most worth reading: first those whose score a rule changed, then those with
    the most relaxed tokens."""
    units, records = [problem[0] for problem in problems], run.records
    reference = run.ways[0].label

    def interest(unit: Unit) -> tuple[int, int]:
        scores = {records.scores.get(keys[-1], {}).get("right") for keys in unit.values()}
        relaxed = sum(records.completions[key].get("relaxed", 0) for keys in unit.values() for key in keys)
        return len(scores), relaxed

    worth_reading = sorted(units, key=interest, reverse=True)[:count]
    cases = []
    for unit in worth_reading:
        answers = []
        for way in run.ways:
            key = unit[way.label][-1]
            right = records.scores.get(key, {}).get("right")
            answers.append((way.label, right, pieces_of(records.completions[key])))
        key = _last(unit, reference)
        cases.append(Case(key.problem, records.completions[key]["asked"], answers))
    return cases


def pieces_of(record: Record) -> list[tuple[str, str]]:
    """Split the text of a completion into pieces. Each relaxed token comes with the clause that excused it, and the
    text between them with ""."""
    text, ends = record["text"], record.get("ends")
    pieces, at = [], 0
    for place, clause, _, choice in record.get("excused", ()):
        if not ends:
            break
        start = ends[place - 1] if place else 0
        pieces += [(text[at:start], ""), (text[start : ends[place]], f"{clause}; the target's own was {choice!r}")]
        at = ends[place]
    return [piece for piece in [*pieces, (text[at:], "")] if piece[0]]


def _notes(folder: Path, tables: list[Table], records: Records) -> list[str]:
    """Return notes for the reader of the tables."""
    notes = []
    if len(records.environments) > 1:
        kinds = [
            f"{e['server']}, {e['software']}, fly {e['fly']}"
            if "server" in e
            else f"{e['machine']}, {e['kernels']}, torch {e['torch']}, fly {e['fly']}"
            for e in records.environments.values()
        ]
        notes.append(f"{folder}: made by {len(kinds)} different setups: {'; '.join(kinds)}")
    notes += _notes_of_server(tables, records)
    several_temperatures = len({table.temperature for table in tables}) > 1
    for table in tables:
        if table.group:
            continue
        task = f"{table.task} at temperature {table.temperature:g}" if several_temperatures else table.task
        if table.makers > 1:
            notes.append(
                f"{task}: decoded by {table.makers} actors or setups; speeds over AR and over exact compare the "
                f"{table.timed} of {table.rows[0].problems} problems that one of them decoded in every way, in turns; "
                "tok/s is of all"
            )
        if table.unfinished:
            notes.append(f"{task}: {table.unfinished} problems lack some way and are left out; the run is not over")
        if most := max(row.cut for row in table.rows):
            way = next(row for row in table.rows if row.cut == most)
            notes.append(
                f"{task}: up to {most} of {way.completions} answers ({way.way}) were cut at their limit of "
                "tokens, and are scored as they are: --max-tokens raises it"
            )
        if unlike_rows := table.other_stops:
            stops = ", ".join(f"{row.way} ({row.reach:g})" for row in unlike_rows)
            exact = next(row for row in table.rows if row.way == table.best_exact)
            notes.append(
                f"{task}: † drafts stop by themselves at another chance of being kept (reach) under {stops} than "
                f"under {exact.way} ({exact.reach:g}), which 'over exact' includes; a draft such as 'ngram+model(NAME, "
                f"reach={exact.reach:g})' stops alike under all rules"
            )
        if (lacking := UNREAD.get(table.scorer)) and any(row.unread for row in table.rows):
            counts = ", ".join(f"{row.way} {row.unread} of {row.completions}" for row in table.rows if row.unread)
            notes.append(f"{task}: answers without a {lacking} count as wrong: {counts}")
        if table.unscored:
            notes.append(
                f"{task}: {table.unscored} answers are not scored: a run scores them when all are decoded, and "
                "runs programs only with --run-code"
            )
        if in_python := ", ".join(
            f"{row.way} {row.python:.0%}" for row in table.rows if row.python and not row.recorded
        ):
            notes.append(
                f"{task}: rounds decided in Python, which takes longer than compiled code: {in_python}; 'at no cost' "
                "is the speed without that"
            )
        for row in table.rows:
            if row.recorded:
                stop = "; its drafts stop by themselves; 'model(NAME)' or 'block(NAME)' records longer ones for replays"
                notes.append(
                    f"{task}, {row.way}: its blocks were recorded, so its rounds were taken one by one and "
                    "decided in Python: that speed is not shown, and no way is compared with it (over exact); 'at no "
                    f"cost' is its speed without decisions{stop if row.reach else ''}"
                )
            for gate, (mismatches, passed) in row.gates.items():
                if mismatches >= 20 and not passed:
                    notes.append(f"{task}, {row.way}: {gate} never held ({mismatches} mismatches): nothing is relaxed")
        if (target_accuracy := table.rows[0].accuracy) and not target_accuracy.value:
            alone = "the target alone" if table.reference == AUTOREGRESSIVE else "exact speculation"
            no_refusals = "refuses nothing here, so there is no refusal to keep"
            nothing_right = "answers nothing right here, so no rule can lose anything, and recovery has no value"
            notes.append(f"{task}: {alone} {no_refusals if table.refusals else nothing_right}")
    return list(dict.fromkeys(notes))


def _notes_of_server(tables: Sequence[Table], records: Records) -> list[str]:
    """Return notes on what a server does not tell; none for a run that loaded its models."""
    if not any("server" in environment for environment in records.environments.values()):
        return []
    notes = [
        "asked of a server: HTTP does not show which tokens a rule relaxed, what its gates did, and what drafts and "
        "verifications cost, so these columns are absent"
    ]
    rows = [row for table in tables for row in table.rows if row.way != AUTOREGRESSIVE]
    if all(row.tau is None for row in rows):
        notes.append(
            "the server does not say how many drafted tokens it accepts, so τ and kept are absent; vLLM says it if "
            "started with --per-request-spec-decode-metrics summary"
        )
    else:
        notes.append("τ and kept are the server's own counts, over rounds with a draft")
    if any(table.reference != AUTOREGRESSIVE for table in tables):
        notes.append(
            "a rule cannot switch drafts off, so there is no autoregressive decoding: accuracy, speed and texts are "
            "beside those of exact speculation"
        )
    if late := sum(record.get("tries", 1) > 1 for record in records.completions.values()):
        notes.append(f"{late} answers took several tries; their times are those of the last")
    return notes
