"""The files of a run's folder. JSON lines are appended and synced one by one, so that a killed run loses nothing.

``plan.yaml`` has the settings of the run. ``records.jsonl`` has a line for each completion, and one for each machine
and software that made completions. ``scores.jsonl`` says which completions are right.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Appender", "Key", "Records", "read_lines", "read_records"]


class Key(NamedTuple):
    """What identifies a completion."""

    task: str
    problem: str
    turn: int
    seed: int
    temperature: float
    way: str

    @classmethod
    def of(cls, record: dict[str, Any]) -> Key:
        return cls(*(record[name] for name in cls._fields))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none if there is no file. A last line without a line break was cut off
    when the run was killed, and is ignored. Raises ``ValueError`` with the number of any other line that is no JSON."""
    if not path.exists():
        return
    *complete, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(complete, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON: {error}") from None


class Appender:
    """A file of JSON lines that one process writes; a context manager. An incomplete last line is removed first.

    Raises ``ValueError`` if another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(f"{path}: another process is writing it") from None
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line. The line is on the disk when this returns."""
        self._file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass
class Records:
    """The contents of a folder: completions by key, their scores, and the environments that they name."""

    completions: dict[Key, dict[str, Any]]
    scores: dict[Key, dict[str, Any]]
    environments: dict[str, dict[str, Any]]

    @property
    def texts(self) -> dict[Key, str]:
        """The texts of the completions."""
        return {key: record["text"] for key, record in self.completions.items()}


def read_records(folder: Path) -> Records:
    """Read a folder. If a key was written twice, the last line counts."""
    completions, environments = {}, {}
    for line in read_lines(folder / "records.jsonl"):
        if line["kind"] == "environment":
            environments[line["id"]] = line
        else:
            completions[Key.of(line)] = line
    scores = {Key.of(line): line for line in read_lines(folder / "scores.jsonl")}
    return Records(completions, scores, environments)
