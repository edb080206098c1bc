"""Who takes part in a comparison of libraries, and what each did. Knows nothing of any library."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fly.bench.clock import Timing, clocked
from fly.eval.compare import in_turns

__all__ = ["Checkpoints", "Contender", "Match", "Skipped", "import_library", "measure_matches"]

Decode = Callable[[list[int], int], list[int]]


class Skipped(Exception):
    """A peer cannot take part; the message says why."""


def import_library(name: str, library: str) -> Any:
    """The module ``name``. Raises ``Skipped`` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"{library} is skipped: {error}; pip install 'flyspec[peers]'") from None


@dataclass(frozen=True)
class Checkpoints:
    """What every library gets: a target and perhaps a draft, the draft length, and ``ends``, the ids that end an output
    (none: it goes on to the most tokens). ``directory`` takes the files that a library needs the weights in; ``narrow``
    asks for 8 bits where it has them."""

    target: Path
    draft: Path | None
    k: int
    dtype: torch.dtype
    directory: Path
    ends: frozenset[int]
    narrow: bool = False


@dataclass(frozen=True)
class Contender:
    """Somebody who decodes: ``decode(prompt ids, most tokens)`` gives the new ids, with the end they end with."""

    name: str
    library: str
    speculative: bool
    decode: Decode
    lossy: bool = False


@dataclass
class Match:
    """What a contender did: new ids by prompt, the seconds of each time it decoded all prompts, and which answers are
    right (empty where they were not checked)."""

    contender: Contender
    outputs: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def tokens_per_second(self) -> Timing:
        generated = sum(map(len, self.outputs))
        return Timing(tuple(generated / seconds for seconds in self.seconds))

    def agreement(self, other: Match) -> tuple[int, float]:
        """Prompts with the same output as ``other``'s, and the share of ``other``'s tokens before the first that
        differs."""
        pairs = list(zip(self.outputs, other.outputs))
        common = sum(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b))) for a, b in pairs)
        return sum(a == b for a, b in pairs), common / max(1, sum(len(b) for _, b in pairs))

    def as_json(self, reference: Match) -> dict[str, Any]:
        """With its agreement with ``reference``."""
        same, share = self.agreement(reference)
        return {
            "library": self.contender.library,
            "decoding": self.contender.name,
            "speculative": self.contender.speculative,
            "tokens_per_second": self.tokens_per_second().as_json(),
            "prompts": len(self.outputs),
            "same_outputs": same,
            "agreement": share,
            "right": sum(self.right) if self.right else None,
        }


def measure_matches(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    max_tokens: int,
    turns: int = 3,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Match]:
    """Let every contender decode every prompt, ``turns`` times over, in turns of a few prompts after a warm-up.

    A few, since whoever comes next finds the caches of the processor full of another's weights, and for a moment its
    threads still looking out for work. Outputs are those of the first turn. ``advance(name)`` is called after every
    completion.
    """
    if not contenders or not prompts or turns < 1:
        raise ValueError(f"need contenders, prompts and turns, got {len(contenders)}, {len(prompts)} and {turns}")
    matches = [Match(contender) for contender in contenders]
    for match in matches:
        match.contender.decode(list(prompts[0]), 16)
    for turn in range(turns):
        for match in matches:
            match.seconds.append(0.0)
        for match, prompt in in_turns(matches, prompts):
            ids, seconds = clocked(partial(match.contender.decode, list(prompt), max_tokens))
            match.seconds[-1] += seconds
            if not turn:
                match.outputs.append(ids)
            advance(match.contender.name)
    return matches
