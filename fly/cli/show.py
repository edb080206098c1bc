"""How commands print: the console, tables, notes, progress, JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from fly.cli.terminal import Table, Terminal
from fly.llm import one_bar


class _Errors(Terminal):
    """A console for errors. If it cannot write, as on a full disk, the command goes on."""

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)


console = Terminal()
errors = _Errors(stderr=True)

_Row = TypeVar("_Row")
_Key = TypeVar("_Key")


def note(text: str) -> None:
    """Print text that explains the output above it."""
    console.print(f"[dim]{text}[/]", highlight=False)


def tell(text: str) -> None:
    """Print one line on standard error, as it is."""
    errors.print(text, markup=False, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print text about something that is missing above."""
    console.print(f"[yellow]{escape(text)}[/]", highlight=False)


def fail(text: str) -> None:
    """Print an error on standard error."""
    errors.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)


def grouped(rows: Iterable[_Row], key: Callable[[_Row], _Key]) -> dict[_Key, list[_Row]]:
    """Return the rows by key. Keys are in the order of their first rows."""
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
    ends: Callable[[_Row], bool] = lambda row: False,
    **look: Any,
) -> Table:
    """Return a table with a line for each of ``rows``; ``columns`` makes the cells, by heading.

    Columns are aligned right and stay on one line, as numbers do. Those in ``text`` (by default the first) are aligned
    left and may take several lines. A section ends after a row if ``ends(row)``. ``look`` goes to rich's ``Table``.
    """
    text, rows = text or [next(iter(columns))], [*rows]
    headings = [
        Column(heading) if heading in text else Column(heading, justify="right", no_wrap=True) for heading in columns
    ]
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    new_table = Table(headings, cells, title, **{"box": box.SIMPLE_HEAD, "padding": 0, **look})
    new_table.sections |= {number for number, row in enumerate(rows) if ends(row)}
    return new_table


def narrow(columns: Mapping[str, Callable[[_Row], str]]) -> dict[str, Callable[[_Row], str]]:
    """Make each column of a ``table`` two lines high: a word a line in the heading, and an estimate above its interval.
    The first column is a text."""

    def two_lines(cell: Callable[[_Row], str]) -> Callable[[_Row], str]:
        return lambda row: cell(row).replace(" (", "\n").removesuffix(")")

    (first, name), *other_columns = columns.items()
    return {
        first: lambda row: escape(name(row)),
        **{heading.replace(" ", "\n"): two_lines(cell) for heading, cell in other_columns},
    }


def print_list(rows: Iterable[Iterable[str]], *columns: str | Column, **look: Any) -> None:
    """Print a framed table of texts. ``look`` goes to ``Table``."""
    console.print(Table(columns, rows, **look))


def ratio(value: float | None, over: float = 1.0) -> str:
    """Write ``value`` as a multiple of ``over``; a dash for None."""
    return "–" if value is None else f"{value / over:.2f}×"


@contextmanager
def progress(total: int, what: str, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show progress while this context lasts: a bar on a terminal; elsewhere a line on standard error after a few
    seconds, and then one a minute at most. Call the function that it yields after each step, or after ``n`` steps, with
    a text about the last one."""
    if not console.is_terminal:
        yield _Lines(total, what, done)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with one_bar(), Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(escape(what), total=total, completed=done)
        yield lambda text="", n=1: bars.update(task, advance=n, description=escape(f"{what} {text}".strip()))


class _Lines:
    """``progress`` where there is no terminal."""

    def __init__(self, total: int, what: str, done: int) -> None:
        self.total = total
        self.what = what
        self.done = done
        self.before = done
        self.start = time.monotonic()
        self.due = self.start + 5  # seconds; shorter work prints nothing

    def __call__(self, text: str = "", n: int = 1) -> None:
        self.done, now = self.done + n, time.monotonic()
        if (seconds_spent := now - self.start) < 1:
            self.before = self.done  # not counted in the speed: done before, or done in no time
        if now < self.due:
            return
        self.due = now + 60
        seconds_left = seconds_spent / max(self.done - self.before, 1) * (self.total - self.done)
        took, rest = (timedelta(seconds=round(seconds)) for seconds in (seconds_spent, seconds_left))
        suffix = f" · {text}" if text else ""
        tell(f"{self.what}: {self.done} of {self.total} after {took}, about {rest} left{suffix}")


def write_json(path: Path | None, record: Any, ranks: Any = None) -> None:
    """Write figures to the file of ``--json``, if there is one. Of several ranks the first writes."""
    if path is not None and (ranks is None or ranks.leads):
        path.write_text(json.dumps(record, indent=2), encoding="utf-8")
