"""Log lines about clients. Clients can neither forge lines nor fill the log."""

from __future__ import annotations

import logging
import time
from typing import Any

from uvicorn.logging import DefaultFormatter

__all__ = ["Lines", "Sparing", "escaped"]


def escaped(text: str) -> str:
    """Write everything that does not print (line ends, terminal codes) as Python escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Lines(DefaultFormatter):
    """uvicorn's log format, escaped. The lines of a traceback are indented, so that none looks like a log line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {escaped(line)}" for line in super().formatException(ei).split("\n"))


class Sparing(logging.Filter):
    """Lets only a few warnings of each kind through per period, and says how many were dropped."""

    def __init__(self, most: int = 5, seconds: float = 10.0) -> None:
        super().__init__()
        self.most, self.seconds = most, seconds
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # start of the period, and count

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, str(record.msg)), time.monotonic()
        since, count = self._counts.get(kind, (now, 0))
        if now - since > self.seconds:
            if count > self.most:
                record.msg = f"{record.msg} ({count - self.most} more like this in the last {now - since:.0f} s)"
            since, count = now, 0
        if len(self._counts) > 1000:  # drop kinds that do not recur
            self._counts.clear()
        self._counts[kind] = since, count + 1
        return count < self.most
