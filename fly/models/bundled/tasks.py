"""The problems that the bundled models solve, stored in ``problems/``: word problems (``arithmetic``), lists to
rearrange (``text``) and small Python functions (``code``).

``tools/problems.py``, in a checkout, generated them and can generate others. ``fly.extras.eval.scorers`` checks
answers.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["KINDS", "SPLITS", "Problem", "kinds_of", "problems"]

KINDS = ("arithmetic", "text", "code")
SPLITS = ("train", "heldout", "middle", "ood")
FROZEN = Path(__file__).parent / "problems"


@dataclass(frozen=True)
class Problem:
    """One problem: its prompt, a reference solution, and the means to recognise a right answer.

    ``answer`` is the text of the final ``####`` line (empty for code). ``tests`` are Python expressions that are true
    for a correct program (empty for the other kinds). Problems of the split ``train`` have only a prompt.
    """

    kind: str
    prompt: str
    solution: str = ""
    answer: str = ""
    tests: tuple[str, ...] = ()


def problems(kind: str | None, split: str, seed: int = 0, n: int | None = None) -> list[Problem]:
    """Return the first ``n`` problems (None: all) of one split and one kind. The kind None or "all" takes problems of
    each kind in turn.

    Raises ``ValueError`` for an unknown kind or split, a seed other than 0, and more problems than are stored.
    """
    kinds = kinds_of(kind, split)
    if n is not None and n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    chosen = [problem for turn in zip(*(_frozen(each, split) for each in kinds)) for problem in turn]
    if seed or (n is not None and n > len(chosen)):
        wanted = f"seed {seed} was asked for" if seed else f"{n} were asked for"
        each = f"{len(chosen) // len(kinds)} of each kind: " if len(kinds) > 1 else ""
        raise ValueError(
            f"split {split!r} holds {len(chosen)} problems of seed 0 ({each}{', '.join(kinds)}), and {wanted}; in a "
            "checkout, 'python -m tools.problems write' makes others"
        )
    return chosen[:n]


def kinds_of(kind: str | None, split: str) -> tuple[str, ...]:
    """Return the kinds that ``kind`` stands for; None or "all" means every kind. Raises ``ValueError`` for an unknown
    kind or split."""
    if kind not in (None, "all", *KINDS):
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)} or all")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    return KINDS if kind is None or kind == "all" else (kind,)


@cache
def _frozen(kind: str, split: str) -> tuple[Problem, ...]:
    lines = gzip.decompress((FROZEN / f"{kind}-{split}.jsonl.gz").read_bytes()).decode().splitlines()
    rows = map(json.loads, lines)
    return tuple(Problem(kind, **{**row, "tests": tuple(row.get("tests", ()))}) for row in rows)
