"""How fast forwards and rounds are, compared with the limits of the machine.

A forward is timed alone, over draft length, context, rows and model; a round where it happens, with a clock around
every call of a model, so that the rest is the round's own overhead. Knows nothing of peers.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fly.bench.clock import Timing, between, clocked, take_turns
from fly.bench.limits import Limits, dtype_name, memory_reads
from fly.bench.loaded import Subject, drafts_alone, forward_of, number_types
from fly.bench.shapes import forward_bytes, forward_operations
from fly.cache import PagedKVCache
from fly.eval import Setting, decode
from fly.eval.timed import Times
from fly.models import LlamaConfig
from fly.runtime.executor import Executor
from fly.runtime.request import Stats
from fly.types import SamplingParams

__all__ = [
    "CONTEXT",
    "LONGEST",
    "PROMPTS",
    "Forward",
    "Forwards",
    "Rounds",
    "Shape",
    "context_slope",
    "measure_forwards",
    "measure_models",
    "measure_rounds",
    "one_token",
    "predict",
]

CONTEXT = 256
"""Stored tokens after which draft lengths and rows are compared."""
PROMPTS = 512, 2048
"""Tokens of prompts whose reading is timed."""
LONGEST = 4096
"""Tokens of the longest row that is timed, whatever context a model has."""


@dataclass(frozen=True)
class Forward:
    """A forward of ``tokens`` new tokens in each of ``rows`` rows, after ``context`` stored ones. Where ``drafting``,
    the step by step decoding of one row instead, ``tokens`` of them. ``reading`` is what memory gave in each of the
    same turns, as in ``Limits``."""

    model: str
    config: LlamaConfig
    dtype: torch.dtype
    rows: int
    context: int
    tokens: int
    timing: Timing
    drafting: bool = False
    weight_bytes: float | None = None  # of one; None is as many as the dtype's
    products: torch.dtype | None = None  # what is multiplied, where that is not the dtype
    reading: tuple[dict[int, float], ...] = ()

    @property
    def weights(self) -> int:
        """Bytes of weights that one forward has to read."""
        return self._bytes(0, 0)

    @property
    def context_bytes(self) -> int:
        """Bytes of stored keys and values that one forward has to read."""
        return self._bytes(self.rows, self.context) - self.weights

    @property
    def bytes(self) -> int:
        """Bytes it has to read."""
        return sum(self._bytes(self.rows, context) for context, _ in self._forwards)

    @property
    def operations(self) -> Counter[torch.dtype]:
        """Operations it has to do, by what they are done in."""
        done = (
            forward_operations(self.config, self.dtype, self.rows, *forward, self.products)
            for forward in self._forwards
        )
        return sum(done, Counter())

    @property
    def _forwards(self) -> list[tuple[int, int]]:
        """Stored and new tokens of every forward it is made of."""
        if self.drafting:
            return [(self.context + n, 1) for n in range(self.tokens)]
        return [(self.context, self.tokens)]

    def _bytes(self, rows: int, context: int) -> int:
        return forward_bytes(self.config, self.dtype, rows, context, self.weight_bytes)

    def of_limit(self, limits: Limits) -> float:
        """The least time the machine needs for it over what it took, 1 is the roofline: the median of all turns, each
        by what memory gave in that turn, as a shared machine's memory is faster in some minutes than in others."""
        each = [replace(limits, reading=reading) for reading in self.reading] or [limits] * len(self.timing.times)
        return statistics.median(
            machine.seconds(self.bytes, self.operations) / seconds
            for machine, seconds in zip(each, self.timing.times, strict=True)
        )

    def as_json(self, limits: Limits) -> dict[str, object]:
        return {
            "model": self.model,
            "dtype": dtype_name(self.dtype),
            "rows": self.rows,
            "context": self.context,
            "tokens": self.tokens,
            "drafting": self.drafting,
            "weight_bytes": self.weight_bytes or self.dtype.itemsize,
            "products": dtype_name(self.products or self.dtype),
            "seconds": self.timing.as_json(),
            "bytes": self.bytes,
            "operations": {dtype_name(dtype): count for dtype, count in self.operations.items()},
            "of_limit": self.of_limit(limits),
        }


class Shape(NamedTuple):
    """A forward to be timed, as in ``Forward``."""

    rows: int
    context: int
    tokens: int
    drafting: bool = False


class Forwards:
    """Times a model's forwards over a cache of random keys and values, which take as long as true ones.

    Args:
        name: of the model, for the reader of the figures.
        model: a loaded model, compiled or not.
        tokens: most tokens in its cache, over all rows.
    """

    def __init__(self, name: str, model: Executor, tokens: int) -> None:
        self.name, self.model = name, model
        self.cache = PagedKVCache.for_model(model, tokens, 16)
        for stored in (self.cache.keys, self.cache.values):
            stored.normal_()

    def measure(
        self,
        shapes: Sequence[Shape],
        repeats: int = 15,
        advance: Callable[[], None] = lambda: None,
        reads: Mapping[int, Callable[[], float]] = MappingProxyType({}),
    ) -> list[Forward]:
        """A forward of every shape, in turns, as ``measure_forwards`` does. Raises ``ValueError`` for one that exceeds
        the model's context or the cache."""
        most, allocator = self.model.config.max_position_embeddings, self.cache.allocator
        for rows, context, tokens, _ in shapes:
            if context + tokens > most:
                raise ValueError(f"{context} and {tokens} tokens exceed {self.name}'s context of {most}")
            if rows * allocator.blocks_for(context + tokens) > allocator.num_blocks:
                raise ValueError(f"{rows} rows of {context} and {tokens} tokens do not fit a cache of this size")
        return measure_forwards([(self, shape) for shape in shapes], repeats, advance, reads)

    def seconds(self, shape: Shape) -> float:
        """Time one forward, its logits included. Decoding is one call of the model where it has one."""
        done, seconds = clocked(forward_of(self.model, self.cache, *shape), self.model.device)
        for row in range(shape.rows):
            self.cache.allocator.release(row)
        if done is None:  # it has no call that drafts
            return sum(self.seconds(Shape(1, shape.context + n, 1)) for n in range(shape.tokens))
        return seconds


@torch.inference_mode()
def measure_forwards(
    wanted: Sequence[tuple[Forwards, Shape]],
    repeats: int = 15,
    advance: Callable[[], None] = lambda: None,
    reads: Mapping[int, Callable[[], float]] = MappingProxyType({}),
) -> list[Forward]:
    """Time forwards, also of several models, in turns, with ``reads`` of so many bytes of memory in each turn."""
    runs: list[Callable[[], object]] = [partial(forwards.seconds, shape) for forwards, shape in wanted]
    timings = take_turns([*reads.values(), *runs], repeats, wanted[0][0].model.device, advance)
    turns = zip(*(timing.times for timing in timings[: len(reads)]))
    reading = tuple({size: size / seconds for size, seconds in zip(reads, turn)} for turn in turns)

    def made(each: Forwards, shape: Shape, timing: Timing) -> Forward:
        known = {**number_types(each.model), **shape._asdict()}
        return Forward(each.name, each.model.config, timing=timing, reading=reading, **known)

    return [made(*one, timing) for one, timing in zip(wanted, timings[len(reads) :])]


def measure_models(
    subjects: Sequence[Subject], k: int, turns: int, advance: Callable[[], None] = lambda: None
) -> tuple[list[Forward], dict[str, Forward]]:
    """The forwards of each model in turns, over draft length, context and rows; and by its name, how long it takes to
    decode ``k`` tokens. ``advance`` is called ``turns + 1`` times for each model."""
    swept: list[Forward] = []
    steps: dict[str, Forward] = {}
    reads: dict[int, Callable[[], float]] = {}
    for subject in subjects:
        positions = min(subject.config.max_position_embeddings, LONGEST)
        shapes = [
            *(Shape(1, CONTEXT, n) for n in sorted({1, 2, 4, 8, 16, 32, k + 1}) if CONTEXT + n <= positions),
            *(Shape(1, context, 1) for context in (64, 512, 896, 2048, 3968) if context < positions),
            *(Shape(rows, CONTEXT, n) for rows in (4, 16) for n in (1, k + 1)),
            Shape(1, CONTEXT, k, drafting=True),
        ]
        room = 16 * (CONTEXT + k + 17) + positions  # its last page may not be full
        forwards = Forwards(subject.name, subject.make(), room)
        reads = reads or memory_reads(forwards.model.device)
        *found, steps[subject.name] = forwards.measure(shapes, turns, advance, reads)
        prompts = [Shape(1, 0, length) for length in PROMPTS if length <= positions]
        swept += found + (forwards.measure(prompts, min(turns, 5), reads=reads) if prompts else [])
    return swept, steps


def one_token(forwards: Sequence[Forward], forward: Forward) -> Forward:
    """The forward of one token of one row that ``forward`` is a multiple of."""
    return next(f for f in forwards if (f.model, f.rows, f.context, f.tokens) == (forward.model, 1, CONTEXT, 1))


def context_slope(forwards: Sequence[Forward]) -> float | None:
    """Bytes of stored keys and values read a second: the slope of least squares of time over context, inverted; the
    median of all turns. None where a quarter of the turns shows no slope, as what the weights take varies by more."""
    alone = [f for f in forwards if f.rows == f.tokens == 1]
    sizes, turns = [f.context_bytes for f in alone], zip(*(f.timing.times for f in alone))
    slopes = sorted(statistics.linear_regression(sizes, times).slope for times in turns)
    return 1 / statistics.median(slopes) if slopes[len(slopes) // 4] > 0 else None


@dataclass
class Rounds:
    """What the rounds of a setting took, each time that all problems were decoded."""

    setting: Setting
    stats: Stats = field(default_factory=Stats)
    times: list[Times] = field(default_factory=list)
    predicted: float | None = None  # what ``predict`` gives

    @property
    def best(self) -> Times:
        """The times of the turn that was disturbed least."""
        return min(self.times, key=lambda times: times.decoding)

    def each(self) -> tuple[float, float, float]:
        """Seconds a round: in the target, in draft models, and the rest; in that turn."""
        best, rounds = self.best, self.stats.rounds / len(self.times)
        return best.target / rounds, best.draft / rounds, (best.rest or 0.0) / rounds

    @property
    def drafted(self) -> float:
        """Mean tokens drafted a round."""
        return self.stats.drafted / self.stats.rounds

    def tokens_per_second(self) -> Timing:
        emitted = self.stats.emitted / len(self.times)
        return Timing(tuple(emitted / times.decoding for times in self.times))

    def as_json(self) -> dict[str, Any]:
        return {
            "decoding": self.setting.name,
            "policy": str(self.setting.policy),
            "k": self.setting.k,
            "tau": self.stats.tau,
            "drafted": self.drafted,
            "seconds": dict(zip(("target", "draft", "rest"), self.each())),
            "tokens_per_second": self.tokens_per_second().as_json(),
            "predicted": self.predicted,
        }


def measure_rounds(
    settings: Sequence[Setting],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    turns: int = 3,
    advance: Callable[[], None] = lambda: None,
) -> list[Rounds]:
    """Decode every prompt with every setting, one request at a time, ``turns`` times over, with clocks around the
    models. Settings take turns, each after a warm-up. ``advance`` is called after every completion."""
    measured = [Rounds(setting) for setting in settings]
    for _ in range(turns):
        results = decode(settings, prompts, params, lambda name: advance(), clocked=True, together=len(prompts))
        for rounds, result in zip(measured, results):
            rounds.stats += result.stats
            rounds.times.append(result.times)
    return measured


def predict(rounds: Rounds, forwards: Sequence[Forward], draft: Forward | None) -> float | None:
    """Tokens a second if a round took what its forwards take alone: E[emitted] / (K·t_draft + t(K+1)), which is
    S = E[emitted] / (K·c + v(K)) (Leviathan et al., arXiv 2211.17192, theorem 3.8, with v for 1) times the target's
    1 / t(1). ``forwards`` are the target's for several K, at one context, from which t(K+1) is read between; ``draft``
    is its draft's. None where drafting has no fixed cost a token: with several levels, or without a model.
    """
    k, strategy = rounds.setting.k, rounds.setting.llm.draft
    if k and (draft is None or not drafts_alone(strategy)):
        return None
    seconds = between(sorted((forward.tokens, forward.timing.low) for forward in forwards), rounds.drafted + 1)
    if k and draft is not None:
        seconds += rounds.drafted * draft.timing.low / draft.tokens
    return rounds.stats.tau / seconds
