"""Log lines of what clients say and cause: no line of theirs looks like another, and they cannot fill the log."""

from __future__ import annotations

import logging
import time
from typing import Any

from uvicorn.logging import DefaultFormatter

__all__ = ["Lines", "Sparing", "escaped"]


def escaped(text: str) -> str:
    """The same with everything that does not print (ends of lines, codes for terminals) written as in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Lines(DefaultFormatter):
    """uvicorn's lines, escaped. Those of a traceback are indented, whatever the error says."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {escaped(line)}" for line in super().formatException(ei).split("\n"))


class Sparing(logging.Filter):
    """Lets a few warnings of each kind through in a while, and says how many there would have been."""

    def __init__(self, most: int = 5, seconds: float = 10.0) -> None:
        super().__init__()
        self.most, self.seconds = most, seconds
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, str(record.msg)), time.monotonic()
        since, count = self._counts.get(kind, (now, 0))
        if now - since > self.seconds:
            if count > self.most:
                record.msg = f"{record.msg} ({count - self.most} more like this in the last {now - since:.0f} s)"
            since, count = now, 0
        if len(self._counts) > 1000:  # kinds that never come again
            self._counts.clear()
        self._counts[kind] = since, count + 1
        return count < self.most
