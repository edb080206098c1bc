"""Generated problems, and the words that their solutions choose freely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from fly.models.bundled.tasks import Problem

__all__ = ["FREE", "Made", "answered", "ending", "opening", "step"]


@dataclass(frozen=True)
class Made:
    """A generated problem together with the content key that decides its split."""

    key: str
    problem: Problem


_OPEN = ("First", "Initially", "Originally", "Today", "Here", "Clearly", "Well", "Okay")
_NEXT = ("Then", "Next", "Now", "So", "Afterwards", "Later", "Second", "Also", "Again", "Soon")
_GIVES = ("gives", "makes", "means", "is", "equals", "yields", "leaves", "shows", "becomes", "brings")
_LAST = ("Therefore", "Finally", "Hence", "Thus", "Overall", "Altogether", "Consequently", "Lastly")
# Words that introduce a function, describe how it goes through its argument, and begin its comment.
HERE = ("Sure", "Okay", "Well", "Yes", "Right", "Fine", "Good", "Certainly")
WALKS = ("goes", "loops", "walks", "runs", "moves", "steps", "passes", "iterates")
RETURN = ("Return", "Give", "Compute", "Find", "Get", "Calculate", "Produce", "Build")

FREE = (_OPEN, _NEXT, _GIVES, _LAST, HERE, WALKS, RETURN)
"""The words that solutions choose freely (program variables aside)."""


def opening(rng: Random, fact: str) -> str:
    """The first sentence of a solution."""
    return f"{rng.choice(_OPEN)}, {fact}."


def step(rng: Random, done: str, result: str, first: bool = False) -> str:
    """A sentence about an operation and its result."""
    return f"{rng.choice(_OPEN if first else _NEXT)}, {done}, which {rng.choice(_GIVES)} {result}."


def ending(rng: Random, fact: str) -> str:
    """The last sentence of a solution."""
    return f"{rng.choice(_LAST)}, {fact}."


def answered(kind: str, key: str, prompt: str, sentences: Sequence[str], answer: object) -> Made:
    """A problem whose solution ends with its answer."""
    return Made(key, Problem(kind, prompt, " ".join(sentences) + f"\n#### {answer}", str(answer)))
