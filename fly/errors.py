"""One way to say what was wrong with an input."""

from __future__ import annotations

import traceback
from pathlib import Path

from pydantic import ValidationError

__all__ = ["explain", "origin"]


def explain(error: ValidationError) -> str:
    """Every field that is wrong in one line: its name, what is wrong, and the value that came in."""
    parts = []
    for problem in error.errors(include_url=False):
        name = ".".join(map(str, problem["loc"]))
        text = problem["msg"].removeprefix("Value error, ")
        # Errors of our own validators name the value themselves.
        got = "" if problem["type"] in ("value_error", "missing") else f", got {problem['input']!r}"
        parts.append(f"{name}: {text}{got}" if name else f"{text}{got}")
    return "; ".join(parts)


def origin(error: BaseException) -> tuple[str, bool]:
    """Where an error comes from, and whether that is somebody else's code: the innermost line outside of torch and of
    this package, if there is one."""
    import torch

    frames = traceback.extract_tb(error.__traceback__)
    packages = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    theirs = [frame for frame in frames if not frame.filename.startswith((*packages, "<frozen"))]
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}", bool(theirs)
