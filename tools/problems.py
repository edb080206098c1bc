"""Seeded generators of the bundled tasks: word problems, list transformations and small Python functions.

``python -m tools.problems freeze`` writes the problems in the package (``fly/models/bundled/problems``), ``write``
others.

Each solution mixes *facts* (numbers, names, list items, program semantics), which the prompt determines and the checks
compare, with *free wording* (connectives, verbs, variable names), which is drawn uniformly at random. A model trained
on these texts is therefore uncertain at the wording and certain at the facts, the situation that loosely speculative
decoding is about. Choice points are single words, mostly several tokens apart, and do not affect what follows.

A problem's *content key* (its numbers, operations and constants, without its wording) decides by hash whether it
belongs to ``train`` or to ``heldout``; the two splits never share a prompt. ``middle`` goes one step beyond training
(longer lists, or a question in other words); the bundled target solves about two in five of these. ``ood`` uses the
same words, but longer chains and lists than ``train`` ever has, larger constants, new combinations of operations, and
questions worded in other ways.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from fly.models.bundled.tasks import FROZEN, KINDS, SPLITS, Problem, kinds_of
from tools import lists, programs, stories

__all__ = ["FROZEN_COUNTS", "frozen", "generate"]

_MAKERS = {"arithmetic": stories.make, "text": lists.make, "code": programs.make}
_LEVELS = {"middle": 1, "ood": 2}  # level of difficulty; 0 for other splits

_HELDOUT_SHARE = 10  # one content key in this many is held out

FROZEN_COUNTS = {"train": 3000, "heldout": 400, "middle": 400, "ood": 400}
"""Number of problems of each kind in the package. Those of ``train`` are prompts only: heads and exits are trained on
the target's own answers."""

app = typer.Typer(add_completion=False, help="Problems of the bundled tasks, as JSON lines.")


def generate(kind: str | None, split: str, seed: int, n: int | None = None) -> Iterator[Problem]:
    """Yield ``n`` problems (None: without end) of one kind, or with None or "all" of each kind in turn.

    The sequence depends on the arguments alone.  Raises ValueError for an unknown kind or split.
    """
    if n is not None and n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    streams = [_stream(each, split, seed) for each in kinds_of(kind, split)]
    return islice(chain.from_iterable(zip(*streams)), n)


def _stream(kind: str, split: str, seed: int) -> Iterator[Problem]:
    rng = Random(f"{kind}/{split}/{seed}")
    while True:
        made = _MAKERS[kind](rng, _LEVELS.get(split, 0))
        if split == "ood" or _is_heldout(made.key) == (split != "train"):
            yield made.problem


def _is_heldout(key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELDOUT_SHARE == 0


def frozen(kind: str, split: str) -> str:
    """The package's problems of a kind and split, as JSON lines."""
    left_out = ("kind", "solution", "answer", "tests") if split == "train" else ("kind",)
    return _lines(generate(kind, split, 0, FROZEN_COUNTS[split]), left_out)


def _lines(some: Iterator[Problem], left_out: tuple[str, ...] = ()) -> str:
    rows = ({name: value for name, value in vars(p).items() if name not in left_out and value != ()} for p in some)
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows)


@app.command("freeze")
def freeze() -> None:
    """Write the package's problems."""
    FROZEN.mkdir(exist_ok=True)
    for split in SPLITS:
        for kind in KINDS:
            path = FROZEN / f"{kind}-{split}.jsonl.gz"
            path.write_bytes(gzip.compress(frozen(kind, split).encode(), 9, mtime=0))
            typer.echo(f"{path.name}: {FROZEN_COUNTS[split]} problems, {path.stat().st_size:,} bytes")


@app.command("write")
def write(
    out: Annotated[Path, typer.Argument(help="The file to write; a task's 'data' with 'scorer: bundled' reads it.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(KINDS)} or all.")] = "all",
    split: Annotated[str, typer.Option(help=f"{', '.join(SPLITS)}.")] = "heldout",
    seed: Annotated[int, typer.Option(help="Which problems are drawn.")] = 1,
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 400,
) -> None:
    """Write problems of another seed, or more problems."""
    out.write_text(_lines(generate(kind, split, seed, count)), encoding="utf-8")
    typer.echo(f"{out}: {count} problems")


if __name__ == "__main__":
    app()
