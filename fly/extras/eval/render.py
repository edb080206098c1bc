"""Write reports: the cells of their tables, Markdown, JSON, an HTML page, and answer files for Spec-Bench."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from fly.extras.eval.archive import Archive
from fly.extras.eval.plan import AUTOREGRESSIVE
from fly.extras.eval.plots import COLOURS, Curve, Point, curves, has_plots, pareto
from fly.extras.eval.report import Report, Row, Table
from fly.extras.statistics import Estimate

__all__ = ["as_html", "as_json", "as_markdown", "columns", "legend", "write_spec_bench"]

Cells = Mapping[str, Callable[[Row], str]]
_NONE = "–"

# What the headings mean that do not say it themselves. ``{reference}`` is what the ways are compared with.
_MEANINGS = {
    "request": "request: mean seconds from a request to its answer",
    "over AR": "AR: the target alone · over AR: speed beside it",
    "over exact": "over exact: speed beside the fastest exact speculation ★",
    "at no cost": "at no cost: over AR if decisions took no time",
    "τ": "τ: tokens for each forward of the target",
    "kept": "kept: share of drafted tokens that are emitted",
    "gate": "gate: share of mismatches at which the target was undecided (–: no entropy gate, or it was not asked)",
    "Python": "Python: share of rounds decided in Python",
    "recovery": "recovery: share right beside {reference}'s",
    "lost, won": "lost, won: problems that {reference}, or this way, answers right more often",
    "p": "p: the chance of that by luck alone",
    "relaxed": "relaxed: share of tokens kept though the exact rule rejects them",
    "same": "same: answers equal to {reference}'s",
    "cut": "cut: answers that ended at the limit of tokens",
    "first": "first: median place of the first other token",
    "length": "length: tokens beside {reference}'s",
    "place in the draft": "place in the draft: how often it is kept, in drafts that long",
}


def legend(tables: Sequence[Table]) -> str:
    """Explain the columns of these tables."""
    headings = {heading for table in tables for cells in columns(table).values() for heading in cells}
    names = {"AR" if table.reference == AUTOREGRESSIVE else table.reference for table in tables}
    reference = " or ".join(sorted(names))
    meanings = (
        meaning.replace("{reference}", reference) for heading, meaning in _MEANINGS.items() if heading in headings
    )
    return f"{' · '.join(meanings)} · after or below values: intervals of 95 %"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}" if value < 0.0995 else f"{value:.0%}"


def _times(value: float | None) -> str:
    return _NONE if value is None or math.isnan(value) else f"{value:.2f}×"


def _with_interval(estimate: Estimate | None, percent: bool = False) -> str:
    """Write an estimate with its interval."""
    if estimate is None or math.isnan(estimate.value):
        return _NONE
    if percent:
        return f"{estimate.value:.1%} ({100 * estimate.low:.0f}–{100 * estimate.high:.0f})"
    return f"{estimate.value:.2f}× ({estimate.low:.2f}–{estimate.high:.2f})"


def columns(table: Table) -> dict[str, Cells]:
    """Return the cells of a table's three parts: speed, answers, and how often each place of a draft was kept. Columns
    without a value are left out, but for those of which a note of the report says why."""

    def name(row: Row) -> str:
        return f"{row.way} ★" if row.way == table.best_exact else row.way

    def unless_reference(cell: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: _NONE if row.way == table.reference else cell(row)

    def marked(row: Row) -> str:
        return _with_interval(row.over_exact).replace("×", "×†", int(row in table.other_stops))

    speed: Cells = {
        "decoding": name,
        "tok/s": lambda row: _NONE if row.recorded else f"{row.speed:,.{int(row.speed < 100)}f}",
        "request": lambda row: _NONE if row.latency is None else f"{row.latency:.3g} s",
        "over AR": unless_reference(lambda row: _with_interval(row.over_ar)),
        "over exact": lambda row: "1" if row.way == table.best_exact else marked(row),
        "at no cost": lambda row: _times(row.neutral),
        "τ": lambda row: _NONE if row.tau is None else f"{row.tau:.2f}",
        "kept": lambda row: _share(row.kept),
        "gate": lambda row: _share(row.gate),
        "Python": lambda row: _share(row.python),
    }
    right, over = ("refused", "refusals kept") if table.refusals else ("right", "recovery")
    answers: Cells = {
        "decoding": name,
        right: lambda row: _with_interval(row.accuracy, percent=True),
        over: unless_reference(lambda row: _with_interval(row.still if table.refusals else row.recovery, percent=True)),
        "lost, won": unless_reference(lambda row: _NONE if row.p is None else f"{row.lost}, {row.won}"),
        "p": lambda row: _NONE if row.p is None else f"{row.p:.2g}",
        "relaxed": lambda row: _NONE if row.way == AUTOREGRESSIVE else _share(row.relaxed),
        "same": lambda row: _share(row.same),
        "cut": lambda row: _share(row.cut / row.completions),
        "first": lambda row: _NONE if row.diverges is None else f"{row.diverges:g}",
        "length": unless_reference(lambda row: _with_interval(row.length)),
    }
    longest = max(len(row.curve) for row in table.rows)
    places: Cells = {
        "place in the draft": name,
        **{str(at): _kept_at(at) for at in sorted({*(1, 2, 3, 4, 5, 7, 10, 15, 20, 25, 40), longest}) if at <= longest},
    }
    parts = {"Speed": speed, "Answers": answers, "How often a drafted token was kept": places if longest else {}}
    noted_headings = {"over exact", *([over] if table.rows[0].accuracy else [])}
    if table.reference == AUTOREGRESSIVE:
        noted_headings.add("over AR")
    part_cells = {
        part: {
            heading: cell
            for heading, cell in cells.items()
            if heading in noted_headings or any(cell(row) != _NONE for row in table.rows)
        }
        for part, cells in parts.items()
    }
    return {part: cells for part, cells in part_cells.items() if cells}


def _kept_at(place: int) -> Callable[[Row], str]:
    return lambda row: _share(row.curve[place - 1]) if len(row.curve) >= place else _NONE


def as_markdown(report: Report) -> str:
    """Return headings and tables that any Markdown viewer shows."""
    lines = []
    for table in report.tables:
        lines += [f"## {_plain(table.title)}", "", f"{table.run}", ""]
        for cells in columns(table).values():
            lines.append("| " + " | ".join(cells) + " |")
            lines.append("|" + " --- |" + " ---: |" * (len(cells) - 1))
            lines += ["| " + " | ".join(_plain(cell(row)) for cell in cells.values()) + " |" for row in table.rows]
            lines.append("")
    lines += [legend(report.tables), ""]
    lines += [f"- {_plain(note)}" for note in report.notes]
    lines += [f"- {_plain(_described(facts))}" for facts in report.environments]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _described(facts: Mapping[str, Any]) -> str:
    """Describe in one line the software and hardware that made records."""
    if "server" in facts:
        return (
            f"{facts['model']} at {facts['server']} ({facts['software']}), rules in {facts['rule_field']}; asked by "
            f"fly {facts['fly']}, Python {facts['python']}"
        )
    drafts = [f"; draft {name}, kernels {k}" if k else f"; draft {name}" for name, k in facts["drafts"].items()]
    return (
        f"{facts['model']} on {facts['machine']} ({facts['threads']} threads, {facts['device']}), {facts['dtype']}, "
        f"kernels {facts['kernels']}{''.join(drafts)}; fly {facts['fly']}, torch {facts['torch']}, "
        f"Python {facts['python']}"
    )


def as_json(report: Report) -> dict[str, Any]:
    """Return all figures as JSON. An estimate is an object with value, low and high; an unknown figure is null."""
    return {
        "tables": [
            {
                **{key: _clean(value) for key, value in vars(table).items() if key not in ("rows", "cases")},
                "rows": [
                    {**_clean(asdict(row)), "tokens_per_second": row.speed, "gate": row.gate} for row in table.rows
                ],
            }
            for table in report.tables
        ],
        "environments": report.environments,
        "notes": report.notes,
    }


def _clean(value: Any) -> Any:
    """Convert a value for JSON: NaN becomes None, and an estimate becomes an object."""
    if isinstance(value, Estimate):
        return None if math.isnan(value.value) else value._asdict()
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def as_html(report: Report, title: str) -> str:
    """Return one HTML page without links. It has tables, plots (where matplotlib is installed; else the page says so),
    and texts side by side, with every relaxed token marked."""
    sections: list[dict[str, Any]] = []
    with_plots = has_plots()
    for table in report.tables:
        coloured_rows = [(row, COLOURS[number % len(COLOURS)]) for number, row in enumerate(table.rows)]
        beside = "autoregression" if table.reference == AUTOREGRESSIVE else "exact speculation"
        speeds = [row.over_ar if table.reference == AUTOREGRESSIVE else row.over_exact for row in table.rows]
        points = [
            Point(row.way, colour, speed, row.recovery or Estimate(1.0, 1.0, 1.0))
            for (row, colour), speed in zip(coloured_rows, speeds)
            if speed is not None and (row.recovery is not None or row.way == table.reference)
        ]
        accepted_curves = [
            Curve(row.way, colour, list(enumerate(row.curve, 1))) for row, colour in coloured_rows if row.curve
        ]
        sections.append(
            {
                "table": table,
                "parts": columns(table),
                "pareto": pareto(points, f"speed over {beside}", "recovery") if with_plots and len(points) > 1 else "",
                "curves": curves(accepted_curves, "place in the draft", "accepted", (0.0, 1.0))
                if with_plots and accepted_curves
                else "",
            }
        )
    source = (files("fly.extras.eval") / "report.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    return template.render(
        title=title,
        shown=sections,
        plotted=with_plots,
        notes=report.notes,
        environments=[_described(facts) for facts in report.environments],
        legend=legend(report.tables),
    )


def write_spec_bench(folder: Path, into: Path) -> list[Path]:
    """Write the answers of a run in the form that Spec-Bench's own scripts read: a file of JSON lines for each way,
    task and temperature. Returns the files. Raises ``ValueError`` if the folder is no run, or one of a server."""
    run = Archive.read(folder)
    if run.plan.server is not None:
        raise ValueError(f"{str(folder)!r} was asked of a server, which does not tell the steps that Spec-Bench counts")
    files_: dict[tuple[str, str, float], dict[str, dict[int, list[dict[str, Any]]]]] = {}
    for key, record in sorted(run.records.completions.items()):
        questions = files_.setdefault((key.way, key.task, key.temperature), {})
        questions.setdefault(key.problem, {}).setdefault(key.seed, []).append(record)
    into.mkdir(parents=True, exist_ok=True)
    paths = []
    for (way, task, temperature), questions in files_.items():
        name = f"{Path(run.plan.model).name}-{task}-{way}-temperature-{temperature:g}"
        target = into / (re.sub(r"[^\w.-]+", "-", name).strip("-") + ".jsonl")
        ordered = sorted(questions.items(), key=lambda item: next(iter(item[1].values()))[0]["number"])
        lines = [json.dumps(_answered(problem, seeds, name), ensure_ascii=False) for problem, seeds in ordered]
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths.append(target)
    return paths


def _answered(problem: str, seeds: Mapping[int, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    first = next(iter(seeds.values()))[0]
    return {
        "question_id": int(problem) if problem.isdigit() else problem,
        "category": first["group"],
        "answer_id": f"{problem}-{first['row_seed']:x}",
        "model_id": name,
        "choices": [
            {
                "index": index,
                "turns": [record["text"] for record in turns],
                "decoding_steps": [record["rounds"] for record in turns],
                "new_tokens": [record["generated"] for record in turns],
                "wall_time": [record["seconds"]["prompt"] + record["seconds"]["decoding"] for record in turns],
                "accept_lengths": [length for record in turns for length in round_lengths(record["why"])],
            }
            for index, turns in enumerate(seeds.values())
        ],
        "tstamp": datetime.fromisoformat(first["at"]).timestamp(),
    }


def round_lengths(why: str) -> list[int]:
    """Return how many tokens each round emitted. The first token came with the prompt; a round ends with a correction
    or a bonus, or where the answer ends."""
    return [len(emitted) for emitted in re.findall(r"[mr]*[cb]|[mr]+$", why[1:])]
