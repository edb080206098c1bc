"""How commands print: the console, tables of figures, notes, progress, JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from fly.calls import one_bar


class _Errors(Console):
    """Says what it can: where nothing can be written, as on a full disk, the command goes on."""

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)


console = Console()
errors = _Errors(stderr=True)

_Row = TypeVar("_Row")
_Key = TypeVar("_Key")


def note(text: str) -> None:
    """Print text that explains the output above it."""
    console.print(f"[dim]{text}[/]", highlight=False)


def grouped(rows: Iterable[_Row], key: Callable[[_Row], _Key]) -> dict[_Key, list[_Row]]:
    """The rows of each key, in the order of their first ones."""
    groups: dict[_Key, list[_Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def table(
    title: str,
    rows: Iterable[_Row],
    columns: Mapping[str, Callable[[_Row], str]],
    *,
    text: Collection[str] = (),
    wrapped: Collection[str] = (),
    ends: Callable[[_Row], bool] = lambda row: False,
    **look: Any,
) -> Table:
    """A line for each of ``rows``, whose cells ``columns`` gives by heading.

    Columns are numbers, aligned right; the first (of the empty heading, if there is one), and those in ``text``, left.
    Those in ``wrapped`` may take several lines. ``ends(row)``: a section ends there. ``look`` is what ``Table`` takes.
    """
    made = Table(title=title, title_justify="left", **{"box": box.SIMPLE_HEAD, "padding": 0, **look})
    text = text or [next(iter(columns))]
    for heading in columns:
        folds = heading in wrapped
        made.add_column(
            heading,
            justify="left" if heading in text else "right",
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
        )
    for row in rows:
        made.add_row(*(cell(row) for cell in columns.values()), end_section=ends(row))
    return made


def narrow(columns: Mapping[str, Callable[[_Row], str]]) -> dict[str, Callable[[_Row], str]]:
    """The columns of a ``table`` on two lines: headings of several words, and below each estimate its interval. The
    first stays as it is, a text."""

    def two_lines(cell: Callable[[_Row], str]) -> Callable[[_Row], str]:
        return lambda row: cell(row).replace(" (", "\n").removesuffix(")")

    (first, name), *others = columns.items()
    return {
        first: lambda row: escape(name(row)),
        **{heading.replace(" ", "\n"): two_lines(cell) for heading, cell in others},
    }


def print_list(rows: Iterable[Iterable[str]], *columns: str | Column, **look: Any) -> None:
    """Print a framed table of texts. ``look`` is what ``Table`` takes."""
    made = Table(*columns, **{"title_justify": "left", **look})
    for row in rows:
        made.add_row(*row)
    console.print(made)


def sentences(heading: str) -> Column:
    """A column of sentences: a word too long for it goes on in the next line."""
    return Column(heading, overflow="fold")


def ratio(value: float | None, over: float = 1.0) -> str:
    """``value`` as a multiple of ``over``; a dash for None."""
    return "–" if value is None else f"{value / over:.2f}×"


@contextmanager
def progress(total: int, what: str, done: int = 0) -> Iterator[Callable[..., None]]:
    """While this lasts, show how far it is: a bar on a terminal; elsewhere a line on standard error after the first
    steps, and then at most one a minute. Gives what is called after each step (``said``: about it) or after ``n``."""
    if not console.is_terminal:
        yield _Lines(total, what, done)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with one_bar(), Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(escape(what), total=total, completed=done)
        yield lambda said="", n=1: bars.update(task, advance=n, description=escape(f"{what} {said}".strip()))


class _Lines:
    """``progress`` where there is no terminal."""

    def __init__(self, total: int, what: str, done: int) -> None:
        self.total, self.what, self.done, self.before = total, what, done, done
        self.start = time.monotonic()
        self.due = self.start + 5  # seconds: what is over sooner says nothing

    def __call__(self, said: str = "", n: int = 1) -> None:
        self.done, now = self.done + n, time.monotonic()
        if (spent := now - self.start) < 1:
            self.before = self.done  # these were there already, or took no time
        if now < self.due:
            return
        self.due = now + 60
        left = spent / max(self.done - self.before, 1) * (self.total - self.done)
        took, rest = (timedelta(seconds=round(seconds)) for seconds in (spent, left))
        about = f" · {said}" if said else ""
        line = f"{self.what}: {self.done} of {self.total} after {took}, about {rest} left{about}"
        errors.print(line, highlight=False, markup=False, soft_wrap=True)


def write_json(path: Path | None, record: Any, ranks: Any = None) -> None:
    """Write figures to the file that ``--json`` names, if it names one; of several ranks the first does."""
    if path is not None and (ranks is None or ranks.leads):
        path.write_text(json.dumps(record, indent=2), encoding="utf-8")


def print_named(names: Iterable[str], build: Callable[[Mapping[str, str]], Table]) -> None:
    """Print a table with ``names`` in a column. Those too long for the console's width are cut and numbered, and given
    in full below it. ``build`` makes the table; it gets what to call such names."""
    made, longest = build({}), max(map(len, names := list(dict.fromkeys(names))))
    cut: dict[str, str] = {}
    if (over := Measurement.get(console, console.options.update_width(9999), made).maximum - console.width) > 0:
        for name in names:
            if len(name) > (room := max(longest - over, 5)):
                mark = str(len(cut) + 1).translate(_RAISED)
                cut[name] = f"{name[: room - len(mark) - 1]}…{mark}"
        made = build(cut)
    console.print(made)
    for name, short in cut.items():
        mark = short[short.index("…") + 1 :]
        console.print(f"{mark} {name}", style="dim", markup=False, highlight=False, soft_wrap=True)


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
