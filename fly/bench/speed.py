"""How fast forwards and rounds are, held against what the machine can do.

A forward is timed alone, over draft length, context, rows and model; a round where it happens, with a clock around
every call of a model, so that what is left is the round's own overhead. Knows nothing of peers.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fly.backends.cpu.library import split
from fly.bench.limits import Limits, Timing, between, take_turns
from fly.bench.shapes import forward_bytes, forward_operations
from fly.bundled.tasks import Problem
from fly.cache import PagedKVCache
from fly.drafts import DraftStrategy, SingleDraft
from fly.eval.timed import Setting, Times, draft_runners, synchronize, timed
from fly.executor import Batch, DraftSpec, Executor
from fly.models import LlamaConfig
from fly.policies import Exact
from fly.request import Sequence, Stats
from fly.types import SamplingParams

__all__ = [
    "Forward",
    "Forwards",
    "Rounds",
    "Wanted",
    "measure_forwards",
    "measure_rounds",
    "predict",
]


@dataclass(frozen=True)
class Forward:
    """A forward of ``tokens`` new tokens in each of ``rows`` rows, behind ``context`` stored ones. Where ``drafting``,
    the step by step decoding of one row instead, ``tokens`` of them."""

    model: str
    config: LlamaConfig
    dtype: torch.dtype
    rows: int
    context: int
    tokens: int
    timing: Timing
    drafting: bool = False
    weight_bytes: int | None = None  # of one; None is as many as the dtype's
    products: torch.dtype | None = None  # what is multiplied, where that is not the dtype

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
        if self.drafting:
            return sum(self._bytes(1, self.context + n) for n in range(self.tokens))
        return self._bytes(self.rows, self.context)

    def _bytes(self, rows: int, context: int) -> int:
        return forward_bytes(self.config, self.dtype, rows, context, self.weight_bytes)

    @property
    def operations(self) -> int:
        if self.drafting:
            return sum(forward_operations(self.config, 1, self.context + n) for n in range(self.tokens))
        return forward_operations(self.config, self.rows, self.context, self.tokens)

    def of_limit(self, limits: Limits) -> float:
        """The least time the machine needs for it, over the best it took: 1 is the roofline."""
        return limits.seconds(self.bytes, self.operations, self.products or self.dtype) / self.timing.low

    def as_json(self, limits: Limits) -> dict[str, object]:
        return {
            "model": self.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rows": self.rows,
            "context": self.context,
            "tokens": self.tokens,
            "drafting": self.drafting,
            "weight_bytes": self.weight_bytes or self.dtype.itemsize,
            "products": str(self.products or self.dtype).removeprefix("torch."),
            "seconds": self.timing.as_json(),
            "bytes": self.bytes,
            "operations": self.operations,
            "of_limit": self.of_limit(limits),
        }


class Forwards:
    """Times a model's forwards over a cache of random keys and values, which take as long as true ones.

    Args:
        name: of the model, for whoever reads the figures.
        model: a loaded model, compiled or not.
        tokens: most tokens in its cache, over all rows.
    """

    def __init__(self, name: str, model: Executor, tokens: int, block_size: int = 16) -> None:
        self.name, self.executor, self.dtype, self.weight_bytes = name, model, model.dtype, model.weight_bytes
        self.products = torch.int8 if split(model.kernels)[1] == "w8a8" else self.dtype
        self.cache = PagedKVCache.for_model(model, tokens, block_size)
        for stored in (self.cache.keys, self.cache.values):
            stored.normal_()

    def measure(
        self,
        shapes: abc.Sequence[tuple[int, int, int]],
        drafts: abc.Sequence[tuple[int, int]] = (),
        repeats: int = 15,
        advance: Callable[[], None] = lambda: None,
    ) -> list[Forward]:
        """A forward of every ``(rows, context, tokens)``, and step by step greedy decoding of every ``(context,
        tokens)``, all in turns. Rows of a forward must fit the model's context and the cache (``ValueError``)."""
        for rows, context, tokens in [*shapes, *((1, *draft) for draft in drafts)]:
            if context + tokens > self.executor.config.max_position_embeddings:
                raise ValueError(
                    f"{context} and {tokens} tokens exceed {self.name}'s context of "
                    f"{self.executor.config.max_position_embeddings}"
                )
            if rows * self.cache.allocator.blocks_for(context + tokens) > self.cache.allocator.num_blocks:
                raise ValueError(f"{rows} rows of {context} and {tokens} tokens do not fit a cache of this size")
        runs = [Wanted(self, *shape) for shape in shapes] + [Wanted(self, 1, *draft, drafting=True) for draft in drafts]
        return measure_forwards(runs, repeats, advance)

    def seconds(self, rows: int, context: int, tokens: int, drafting: bool = False) -> float:
        """Time one forward or, where ``drafting``, greedy decoding step by step: in one call of the model where it has
        one. Logits are part of it."""
        batch = self._batch(rows, context, 1 if drafting else tokens, tokens)
        if not drafting:
            return self._timed(lambda: self.executor.score(batch), rows) or 0.0
        text = [0] * context + batch.tokens
        row = Sequence(text, len(text), SamplingParams(temperature=0.0), Exact(), seed=0, k=tokens, id=0)
        seconds = self._timed(lambda: self.executor.extend(batch, DraftSpec(), [row], [tokens]), 1)
        if seconds is None:
            return sum(self.seconds(1, context + n, 1) for n in range(tokens))
        return seconds

    def _batch(self, rows: int, context: int, tokens: int, room: int) -> Batch:
        ids = list(range(rows))
        for row in ids:
            self.cache.resize(row, context + room)
        new = torch.randint(0, self.executor.config.vocab_size, (rows, tokens)).tolist()
        return Batch.of(new, self.cache.batch(ids, [context] * rows, [tokens] * rows))

    def _timed(self, run: Callable[[], object], rows: int) -> float | None:
        """Seconds of a call; None where it did nothing."""
        synchronize(self.executor.device)
        start = time.perf_counter()
        done = run()
        synchronize(self.executor.device)
        seconds = time.perf_counter() - start
        for row in range(rows):
            self.cache.allocator.release(row)
        return None if done is None else seconds


@dataclass(frozen=True)
class Wanted:
    """A forward to be timed, as in ``Forward``."""

    forwards: Forwards
    rows: int
    context: int
    tokens: int
    drafting: bool = False


@torch.inference_mode()
def measure_forwards(
    wanted: abc.Sequence[Wanted], repeats: int = 15, advance: Callable[[], None] = lambda: None
) -> list[Forward]:
    """Time forwards, also of several models, in turns."""
    each = [(one.rows, one.context, one.tokens, one.drafting) for one in wanted]
    runs = [lambda one=one, shape=shape: one.forwards.seconds(*shape) for one, shape in zip(wanted, each)]
    timings = take_turns(runs, repeats, wanted[0].forwards.executor.device, advance)
    return [
        Forward(
            one.forwards.name,
            one.forwards.executor.config,
            one.forwards.dtype,
            one.rows,
            one.context,
            one.tokens,
            timing,
            one.drafting,
            one.forwards.weight_bytes,
            one.forwards.products,
        )
        for one, timing in zip(wanted, timings)
    ]


@dataclass
class Rounds:
    """What the rounds of a setting took, each time that all problems were decoded."""

    setting: Setting
    stats: Stats = field(default_factory=Stats)
    times: list[Times] = field(default_factory=list)

    @property
    def best(self) -> Times:
        """Those of the turn that was disturbed least."""
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


def measure_rounds(
    settings: abc.Sequence[Setting],
    problems: abc.Sequence[Problem],
    params: SamplingParams,
    turns: int = 3,
    advance: Callable[[], None] = lambda: None,
) -> list[Rounds]:
    """Decode every problem with every setting, one request at a time, ``turns`` times over, with clocks around the
    models. Settings take turns, after a warm-up. ``advance`` is called after every completion."""
    for setting in settings:
        _decode(Rounds(setting), list(problems[:1]), params, lambda: None)
    measured = [Rounds(setting) for setting in settings]
    for _ in range(turns):
        for rounds in measured:
            _decode(rounds, list(problems), params, advance)
    return measured


def _decode(rounds: Rounds, problems: list[Problem], params: SamplingParams, advance: Callable[[], None]) -> None:
    times = Times()
    for problem in problems:
        prompt = rounds.setting.llm.chat_prompt(problem.prompt)
        output, own = timed(rounds.setting, prompt, params, clocked=True)
        times += own
        rounds.stats += output.stats
        advance()
    rounds.times.append(times)


def predict(rounds: Rounds, forwards: abc.Sequence[Forward], draft: Forward | None) -> float | None:
    """Tokens a second if a round took what its forwards take alone: E[emitted] / (K·t_draft + t(K+1)), which is
    S = E[emitted] / (K·c + v(K)) (Leviathan et al., arXiv 2211.17192, theorem 3.8, with v for 1) times the target's
    1 / t(1). ``forwards`` are the target's for several K, at one context, from which t(K+1) is read between; ``draft``
    is its draft's. None where drafting has no fixed cost a token: with several levels, or without a model.
    """
    levels = draft_runners(rounds.setting.llm.draft)
    if rounds.setting.k and (draft is None or len(levels) != 1 or not _alone(rounds.setting.llm.draft)):
        return None
    points = sorted((forward.tokens, forward.timing.low) for forward in forwards)
    seconds = between(points, rounds.drafted + 1)
    if draft is not None and rounds.setting.k:
        seconds += rounds.drafted * draft.timing.low / draft.tokens
    return rounds.stats.tau / seconds


def _alone(strategy: DraftStrategy | None) -> bool:
    return isinstance(strategy, SingleDraft) and strategy.draft is None
