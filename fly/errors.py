"""One way to say what was wrong with an input, or with a plug-in."""

from __future__ import annotations

import difflib
import math
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import ValidationError

__all__ = ["Checked", "Range", "explain", "meant", "origin"]


def explain(error: ValidationError) -> str:
    """Every field that is wrong in one line: its name, what is wrong, and the value that came in."""
    parts = []
    for problem in error.errors(include_url=False):
        name = ".".join(map(str, problem["loc"]))
        text = problem["msg"].removeprefix("Value error, ")
        # Errors of our own validators name the value themselves.
        got = "" if problem["type"] in ("value_error", "missing") else f", got {problem['input']!r}"
        named = not name or text.startswith(f"{name} ")
        parts.append(f"{text}{got}" if named else f"{name}: {text}{got}")
    return "; ".join(parts)


def meant(word: str, known: Iterable[str]) -> str:
    """Which of ``known`` somebody who wrote ``word`` may have meant, as a question; empty where nothing is like it."""
    like = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {like[0]!r}?)" if like else ""


class Range(NamedTuple):
    """Where a parameter lies, as part of its annotation: ``Annotated[float, Range(0, 1)]``; an end may be open."""

    low: float
    high: float = math.inf
    above: bool = False  # whether ``low`` itself is left out

    def check(self, name: str, value: object, kind: type) -> None:
        """``value`` must be a number of the ``kind`` (an integer may stand for a float) in this range."""
        low, high, above = self
        inside = False
        if isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool):
            inside = abs(value) < math.inf and (low < value if above else low <= value) and value <= high
        if not inside:
            what = "an integer" if kind is int else "a finite number"
            where = f"in {'(' if above else '['}{low:g}, {high:g}]" if high < math.inf else f"of at least {low:g}"
            raise ValueError(f"{name} {value!r} must be {what} {where}")


class Checked:
    """A dataclass that checks its parameters: numbers with a ``Range``, and choices (``Literal``).

    Raises ``ValueError`` naming the parameter, its value and what it may be.
    """

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            parts = get_args(hint)
            if get_origin(hint) is Literal and (value := vars(self)[name]) not in parts:
                raise ValueError(f"{name} {value!r} is unknown; choices: {list(parts)}")
            for limit in parts[1:]:
                if isinstance(limit, Range):
                    limit.check(name, vars(self)[name], parts[0])


def origin(error: BaseException) -> str:
    """Where an error comes from: the innermost line outside of torch and of this package, if there is one."""
    import torch

    frames = traceback.extract_tb(error.__traceback__)
    packages = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    theirs = [frame for frame in frames if not frame.filename.startswith((*packages, "<frozen"))]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"
