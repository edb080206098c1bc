"""One way to say what was wrong with an input."""

from __future__ import annotations

from pydantic import ValidationError

__all__ = ["explain"]


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
