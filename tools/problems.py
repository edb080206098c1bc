"""Seeded task generators: word problems, list transformations and small Python functions.

Each solution mixes *facts* (numbers, names, list items, program semantics), which are determined by the
prompt and checked, with *free wording* (connectives, verbs, variable names), which is drawn uniformly at
random.  A model trained on these texts is therefore undecided at the wording and certain at the facts,
which is the situation loosely speculative decoding is about.  Choice points are a single word each and mostly
lie several tokens apart, with a continuation that does not depend on the choice.

A problem's *content key* (its numbers, operations and constants, but not its wording) decides by hash
whether it belongs to ``train`` or to ``heldout``; the two splits never share a prompt.  ``middle`` takes one step out
of what training has (longer lists, or a question in other words), which the bundled target solves two times in
five.  ``ood`` uses the same words, but longer chains and lists than ``train`` ever has, larger constants,
combinations of operations that never occur together, and questions worded in other ways.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import islice
from random import Random

from fly.bundled import lists, programs, stories
from fly.bundled.sandbox import run_many
from fly.bundled.wording import Problem

__all__ = ["KINDS", "SPLITS", "Problem", "check", "check_many", "extract_answer", "extract_code", "problems"]

_MAKERS = {"arithmetic": stories.make, "text": lists.make, "code": programs.make}
KINDS = tuple(_MAKERS)
SPLITS = ("train", "heldout", "middle", "ood")
_LEVELS = {"middle": 1, "ood": 2}  # of difficulty; others 0

_HELDOUT_SHARE = 10  # one content key in this many is held out


def problems(kind: str | None, split: str, seed: int, n: int | None = None) -> Iterator[Problem]:
    """Yield ``n`` problems (without end if None) of one kind, or round-robin of all for None or "all".

    The sequence depends on the arguments alone.  Raises ValueError for an unknown kind or split.
    """
    if kind is not None and kind != "all" and kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)} or all")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    if n is not None and n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    # A separate function so that bad arguments are refused by the call, not by the first next().
    stream = _round_robin(split, seed) if kind is None or kind == "all" else _stream(kind, split, seed)
    return islice(stream, n)


def _stream(kind: str, split: str, seed: int) -> Iterator[Problem]:
    rng = Random(f"{kind}/{split}/{seed}")
    while True:
        made = _MAKERS[kind](rng, _LEVELS.get(split, 0))
        if split == "ood" or _is_heldout(made.key) == (split != "train"):
            yield made.problem


def _round_robin(split: str, seed: int) -> Iterator[Problem]:
    streams = [_stream(kind, split, seed) for kind in KINDS]
    while True:
        for stream in streams:
            yield next(stream)


def _is_heldout(key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELDOUT_SHARE == 0


def extract_answer(completion: str) -> str | None:
    """The text of the last ``####`` line, or None if there is none."""
    found = re.findall(r"^####[ \t]*(.*?)[ \t]*$", completion, flags=re.MULTILINE)
    return found[-1] if found else None


def extract_code(completion: str) -> str:
    """The first ```` ```python ```` block (closed or not), or the whole text if there is no block."""
    found = re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", completion, flags=re.DOTALL)
    return found.group(1) if found else completion


def check(problem: Problem, completion: str) -> bool:
    """Whether ``completion`` solves ``problem``; code is run on the problem's tests in the sandbox."""
    return check_many([(problem, completion)])[0]


def check_many(pairs: list[tuple[Problem, str]]) -> list[bool]:
    """``check`` for many (problem, completion) pairs, with one sandbox process for all the code."""
    results = iter(run_many([(extract_code(text), problem.tests) for problem, text in pairs if problem.kind == "code"]))
    return [
        next(results).ok if problem.kind == "code" else extract_answer(text) == problem.answer
        for problem, text in pairs
    ]
