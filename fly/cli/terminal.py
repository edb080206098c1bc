"""What a terminal can show: its letters, and its width. Whatever a command prints goes through here.

No text is lost: a letter that the terminal's encoding lacks is written by others, and what is too wide goes on in the
next line.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from fly.errors import shorten

__all__ = ["WIDEST", "Table", "Terminal", "prepare_streams", "read_bytes"]

WIDEST = 120  # columns of text, on wider terminals too: longer lines are hard to read
_ERRORS = "fly.plain"  # the name of the handler of letters that an encoding lacks
_PLAIN = {
    "×": "x", "·": "*", "–": "-", "—": "-", "…": "...", "τ": "tau", "★": "#", "†": "+", "»": ">", "«": "<", "⏎": "\\n",
    "µ": "u", "≥": ">=", "≤": "<=", "≠": "!=", "→": "->", "←": "<-", "‘": "'", "’": "'", "“": '"', "”": '"', "•": "*",
    "●": "*", "━": "-", "─": "-", "│": "|", "┃": "|",
}  # fmt: skip
_SENTENCE = 18  # columns that a cell of several words needs at least
_LONG_WORD = 24  # columns; a table may break longer words
_BESIDE_FIGURES = 12  # the same in a table of figures, which readers compare from row to row


def _write_plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle a letter that an encoding lacks: write plain ones that look like it, or its escape. A byte of an argument
    or of a file's name that is no letter is written as it came."""
    assert isinstance(error, UnicodeEncodeError)
    letter, following = error.object[error.start], error.start + 1
    if "\udc80" <= letter <= "\udcff":
        return bytes([ord(letter) - 0xDC00]), following
    # The letter without its accent or its width. A bracket would be markup.
    base = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode().strip()
    plain = _PLAIN.get(letter) or ("" if set(base) & set("[]\\") else base)
    return plain or letter.encode("ascii", "backslashreplace").decode(), following


codecs.register_error(_ERRORS, _write_plainly)


def prepare_streams() -> None:
    """Make standard output and standard error take every letter, and standard input every byte, whatever their encoding
    is. ``read_bytes`` reads what is no letter in the input's encoding."""
    for stream, errors in ((sys.stdout, _ERRORS), (sys.stderr, _ERRORS), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def read_bytes(text: str, source: str) -> str:
    """Read bytes in a text that Python could not read, as in the C locale all but ASCII, as UTF-8. The text comes from
    ``source``, such as an option. The name of a file that exists is left: Python opens it by its bytes.

    Raises ``ValueError`` if they are no UTF-8.
    """
    if not any("\udc80" <= letter <= "\udcff" for letter in text) or os.path.exists(text):
        return text
    encoded = text.encode("utf-8", "surrogateescape")
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is no text in UTF-8: {shorten(encoded)} ({error.reason})") from None


class Terminal(Console):
    """A console that fills at most ``WIDEST`` columns. Colons in a text name no emoji.

    Without a ``width``, the terminal's width, or the variable COLUMNS, is read each time that something is printed.
    """

    def __init__(self, width: int | None = None, **options: Any) -> None:
        super().__init__(emoji=False, width=width, **options)
        if width is None:
            self._width = None  # rich sets it to what COLUMNS was at this moment

    @property
    def options(self) -> ConsoleOptions:
        options = super().options
        return options.update(max_width=min(options.max_width, WIDEST))

    def render_str(self, text: str, **options: Any) -> Text:
        if not self.encoding.startswith("utf"):  # now, since plain letters may be wider
            text = text.encode(self.encoding, _ERRORS).decode(self.encoding, "surrogateescape")
        return super().render_str(text, **options)


class Table:
    """A table of texts whose lines fit the console. A console that is too narrow for its columns gets a few lines for
    each row instead: the first cell, and below it the others, each with its heading.

    Args:
        columns: headings, or columns of rich. Cells of a column with ``no_wrap`` stay on one line.
        rows: the cells of each row, in rich's markup.
        title: a text above it, as it is.
        look: options of rich's ``Table``.
    """

    def __init__(
        self, columns: Iterable[str | Column], rows: Iterable[Iterable[str]], title: str = "", **look: Any
    ) -> None:
        self.columns = [Column(each) if isinstance(each, str) else each for each in columns]
        self.rows = [[*row] for row in rows]
        self.title = title
        self._look = look
        self.sections: set[int] = set()  # numbers of rows after which a section ends

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield console.render_str(self.title, style="table.title", markup=False, highlight=False)
        # Measure what each column needs, and what stands between them.
        wide_options = options.update_width(sys.maxsize)
        figures = sum(column.no_wrap for column in self.columns)
        longest = _BESIDE_FIGURES if 2 * figures > len(self.columns) else _LONG_WORD
        least, most = [], []
        for number, column in enumerate(self.columns):
            spans = [
                Measurement.get(console, wide_options, cell)
                for cell in (column.header, *(row[number] for row in self.rows))
            ]
            most.append(max(span.maximum for span in spans))
            words = max(max(span.minimum for span in spans), min(most[-1], _SENTENCE))
            least.append(most[-1] if column.no_wrap else min(words, longest))
        frame = Measurement.get(console, wide_options, self._lay_out([1] * len(most))).maximum - len(most)
        if sum(least) + frame <= options.size.width:
            table = self._lay_out(_divide(options.max_width - frame, least, most))
            yield from console.render(table, options.update(max_width=options.size.width))
        else:
            yield from self._list(console, options.max_width)

    def _lay_out(self, widths: list[int]) -> RichTable:
        table = RichTable(**self._look)
        for column, width in zip(self.columns, widths):
            table.add_column(
                column.header, justify=column.justify, no_wrap=column.no_wrap, overflow="fold", width=width
            )
        for number, row in enumerate(self.rows):
            table.add_row(*row, end_section=number in self.sections)
        return table

    def _list(self, console: Console, width: int) -> Iterator[Text]:
        """Yield the rows as lines of text."""
        headings = [" ".join(str(column.header).split()) for column in self.columns]
        rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        if len(headings) == 2:
            heading_rows = [headings] if all(headings) else []
            for first, second in (*heading_rows, *rows):
                yield from _indented(console, f"[bold]{first}:[/] {second}", width, 0)
            return
        for first, *other_cells in rows:
            yield from _indented(console, f"[bold]{first}[/]", width, 0)
            for heading, cell in zip(headings[1:], other_cells):
                if cell:
                    yield from _indented(console, f"{heading}: {cell}" if heading else cell, width, 2)


def _divide(room: int, least: list[int], most: list[int]) -> list[int]:
    """Divide ``room`` among columns. Each gets its ``least``, then the narrowest grow first, up to their ``most``."""
    widths = [*least]
    while sum(widths) < room and (growing := [n for n, width in enumerate(widths) if width < most[n]]):
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def _indented(console: Console, markup: str, width: int, indent: int) -> Iterator[Text]:
    """Yield the lines of a text, with ``indent`` blanks before the first one and two more before the others."""
    text = console.render_str(markup, highlight=False)
    for number, line in enumerate(text.wrap(console, width - indent - 2, overflow="fold")):
        line.rstrip()
        yield Text(" " * (indent + 2 * (number > 0)), no_wrap=True).append_text(line)
