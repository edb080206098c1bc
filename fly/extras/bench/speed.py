"""How fast forwards and rounds are, compared with the limits of the machine.

A forward is timed alone, for several draft lengths, contexts, batch sizes and models. A round is timed while
decoding, with a clock around every call of a model; the remaining time is the round's own overhead.
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

from fly.cache import PagedKVCache
from fly.extras.bench.clock import Timing, between, clocked, take_turns
from fly.extras.bench.limits import Limits, dtype_name, memory_reads
from fly.extras.bench.loaded import Subject, drafts_alone, forward_of, number_types
from fly.extras.bench.shapes import forward_bytes, forward_operations
from fly.extras.eval import Setting, decode
from fly.extras.eval.timed import Times
from fly.models import LlamaConfig
from fly.runner.executor import Executor
from fly.runner.request import Stats
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
    """A timed forward of ``tokens`` new tokens in each of ``rows`` rows, after ``context`` cached tokens. With
    ``drafting``, it is instead the decoding of ``tokens`` tokens of one row, one by one. ``reading`` has the memory
    rates that were measured in each of the same turns, as in ``Limits``."""

    model: str
    config: LlamaConfig
    dtype: torch.dtype
    rows: int
    context: int
    tokens: int
    timing: Timing
    drafting: bool = False
    weight_bytes: float | None = None  # bytes of one weight; None takes the size of the dtype
    products: torch.dtype | None = None  # the dtype of products; None takes ``dtype``
    reading: tuple[dict[int, float], ...] = ()

    @property
    def weights(self) -> int:
        """Bytes of weights that one forward has to read."""
        return self._bytes(0, 0)

    @property
    def context_bytes(self) -> int:
        """Bytes of cached keys and values that one forward has to read."""
        return self._bytes(self.rows, self.context) - self.weights

    @property
    def bytes(self) -> int:
        """All bytes that have to be read."""
        return sum(self._bytes(self.rows, context) for context, _ in self._forwards)

    @property
    def operations(self) -> Counter[torch.dtype]:
        """All operations that have to be done, by the dtype in which they are done."""
        by_forward = (
            forward_operations(self.config, self.dtype, self.rows, *forward, self.products)
            for forward in self._forwards
        )
        return sum(by_forward, Counter())

    @property
    def _forwards(self) -> list[tuple[int, int]]:
        """The numbers of cached and of new tokens of each forward. Decoding consists of several."""
        if self.drafting:
            return [(self.context + n, 1) for n in range(self.tokens)]
        return [(self.context, self.tokens)]

    def _bytes(self, rows: int, context: int) -> int:
        return forward_bytes(self.config, self.dtype, rows, context, self.weight_bytes)

    def of_limit(self, limits: Limits) -> float:
        """Return the least time that the machine needs, divided by the measured time; 1 is the roofline. This is the
        median over all turns. Each turn is compared with the memory rates measured in the same turn, because a shared
        machine's memory is faster in some minutes than in others."""
        machines = [replace(limits, reading=reading) for reading in self.reading] or [limits] * len(self.timing.times)
        return statistics.median(
            machine.seconds(self.bytes, self.operations) / seconds
            for machine, seconds in zip(machines, self.timing.times, strict=True)
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
    """A forward to be timed. The fields are those of ``Forward``."""

    rows: int
    context: int
    tokens: int
    drafting: bool = False


class Forwards:
    """Times a model's forwards over a cache of random keys and values, which take as long as real ones.

    Args:
        name: the model's name, for the reader of the figures.
        model: a loaded model, compiled or not.
        tokens: the most tokens in its cache, over all rows.
    """

    def __init__(self, name: str, model: Executor, tokens: int) -> None:
        self.name, self.model = name, model
        self.cache = PagedKVCache.for_model(model, tokens, 16)
        for tensor in (self.cache.keys, self.cache.values):
            tensor.normal_()

    def measure(
        self,
        shapes: Sequence[Shape],
        repeats: int = 15,
        advance: Callable[[], None] = lambda: None,
        reads: Mapping[int, Callable[[], float]] = MappingProxyType({}),
    ) -> list[Forward]:
        """Time a forward of every shape, in turns, as ``measure_forwards`` does. Raises ``ValueError`` for a shape
        that exceeds the model's context or the cache."""
        most, allocator = self.model.config.max_position_embeddings, self.cache.allocator
        for rows, context, tokens, _ in shapes:
            if context + tokens > most:
                raise ValueError(f"{context} and {tokens} tokens exceed {self.name}'s context of {most}")
            if rows * allocator.blocks_for(context + tokens) > allocator.num_blocks:
                raise ValueError(f"{rows} rows of {context} and {tokens} tokens do not fit a cache of this size")
        return measure_forwards([(self, shape) for shape in shapes], repeats, advance, reads)

    def seconds(self, shape: Shape) -> float:
        """Time one forward, logits included. Decoding takes a single call, if the model has one for it."""
        output, seconds = clocked(forward_of(self.model, self.cache, *shape), self.model.device)
        for row in range(shape.rows):
            self.cache.allocator.release(row)
        if output is None:  # the model has no call that drafts several tokens
            return sum(self.seconds(Shape(1, shape.context + n, 1)) for n in range(shape.tokens))
        return seconds


@torch.inference_mode()
def measure_forwards(
    wanted: Sequence[tuple[Forwards, Shape]],
    repeats: int = 15,
    advance: Callable[[], None] = lambda: None,
    reads: Mapping[int, Callable[[], float]] = MappingProxyType({}),
) -> list[Forward]:
    """Time forwards in turns, of one model or several. Each turn also times ``reads``, which read memory (the
    keys are their numbers of bytes)."""
    runs: list[Callable[[], object]] = [partial(forwards.seconds, shape) for forwards, shape in wanted]
    timings = take_turns([*reads.values(), *runs], repeats, wanted[0][0].model.device, advance)
    turns = zip(*(timing.times for timing in timings[: len(reads)]))
    reading = tuple({size: size / seconds for size, seconds in zip(reads, turn)} for turn in turns)

    def made(each: Forwards, shape: Shape, timing: Timing) -> Forward:
        numbers = {**number_types(each.model), **shape._asdict()}
        return Forward(each.name, each.model.config, timing=timing, reading=reading, **numbers)

    return [made(*pair, timing) for pair, timing in zip(wanted, timings[len(reads) :])]


def measure_models(
    subjects: Sequence[Subject], k: int, turns: int, advance: Callable[[], None] = lambda: None
) -> tuple[list[Forward], dict[str, Forward]]:
    """Time the forwards of each model in turns, for several draft lengths, contexts and batch sizes. Also
    returns, by the name of each model, how long it takes to decode ``k`` tokens. ``advance`` is called ``turns + 1``
    times for each model."""
    measurements: list[Forward] = []
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
        room = 16 * (CONTEXT + k + 17) + positions  # the last page of a row may not be full
        forwards = Forwards(subject.name, subject.make(), room)
        reads = reads or memory_reads(forwards.model.device)
        *sweep, steps[subject.name] = forwards.measure(shapes, turns, advance, reads)
        prompts = [Shape(1, 0, length) for length in PROMPTS if length <= positions]
        measurements += sweep + (forwards.measure(prompts, min(turns, 5), reads=reads) if prompts else [])
    return measurements, steps


def one_token(forwards: Sequence[Forward], forward: Forward) -> Forward:
    """Return the forward of one token of one row, by the same model, with which ``forward`` is compared."""
    return next(f for f in forwards if (f.model, f.rows, f.context, f.tokens) == (forward.model, 1, CONTEXT, 1))


def context_slope(forwards: Sequence[Forward]) -> float | None:
    """Return the bytes of cached keys and values read per second: the inverse of the least-squares slope of time over
    bytes, as the median over all turns. None if a quarter of the turns shows no slope, because the time of the weights
    varies by more."""
    single = [f for f in forwards if f.rows == f.tokens == 1]
    sizes, turns = [f.context_bytes for f in single], zip(*(f.timing.times for f in single))
    slopes = sorted(statistics.linear_regression(sizes, times).slope for times in turns)
    return 1 / statistics.median(slopes) if slopes[len(slopes) // 4] > 0 else None


@dataclass
class Rounds:
    """The times and statistics of a setting's rounds, with one entry for each time that all problems were decoded."""

    setting: Setting
    stats: Stats = field(default_factory=Stats)
    times: list[Times] = field(default_factory=list)
    predicted: float | None = None  # the result of ``predict``

    @property
    def best(self) -> Times:
        """The times of the fastest turn, which was disturbed least."""
        return min(self.times, key=lambda times: times.decoding)

    def each(self) -> tuple[float, float, float]:
        """Return the seconds per round in the best turn: in the target, in draft models, and in the rest."""
        best, rounds = self.best, self.stats.rounds / len(self.times)
        return best.target / rounds, best.draft / rounds, (best.rest or 0.0) / rounds

    @property
    def drafted(self) -> float:
        """Mean number of tokens drafted per round."""
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
    """Predict tokens per second, if a round took only as long as its forwards take alone:

        E[emitted] / (K·t_draft + t(K+1))

    This is S = E[emitted] / (K·c + v(K)) (Leviathan et al., arXiv 2211.17192, theorem 3.8, with v(K) in place of 1)
    times the target's 1 / t(1). ``forwards`` are the target's forwards for several K, at one context; t(K+1) is
    interpolated between them. ``draft`` is the draft model's. Returns None if drafting has no fixed cost per token:
    with several levels, or without a draft model.
    """
    k, strategy = rounds.setting.k, rounds.setting.llm.draft
    if k and (draft is None or not drafts_alone(strategy)):
        return None
    seconds = between(sorted((forward.tokens, forward.timing.low) for forward in forwards), rounds.drafted + 1)
    if k and draft is not None:
        seconds += rounds.drafted * draft.timing.low / draft.tokens
    return rounds.stats.tau / seconds
