"""Timed completions: how long prompts and rounds take, and how long the models take within the rounds.

Shape legend: T packed tokens, C hidden width, F hidden states side by side, U draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fly.devices import kind_of
from fly.drafts.heads import HeadRunner
from fly.engine.job import Job, Request
from fly.llm import LLM
from fly.output import Output
from fly.policies import AcceptancePolicy, Exact
from fly.runner.executor import Batch, Drafted, DraftSpec, Executor, Head, RoundPlan, Rounds, Scores, Wrapped
from fly.runner.request import Row, Summed, Token
from fly.runner.runner import Runner
from fly.types import Decision, SamplingParams

Result = TypeVar("Result")

__all__ = ["Clock", "Completion", "Setting", "Times", "complete", "draft_runners", "timed"]


@dataclass(frozen=True)
class Setting:
    """One way to decode: a loaded target with its draft, a policy and a draft length (0 is autoregressive)."""

    name: str
    llm: LLM
    k: int
    policy: AcceptancePolicy = field(default_factory=Exact)


class Clock(Wrapped):
    """An executor around another one. It measures how long calls take, and counts the blocks that Python decides."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.batch_invariant = inner.batch_invariant
        self.seconds = 0.0
        self.judged = 0

    def decide_group(self, policy: AcceptancePolicy, *arguments: Any) -> list[Decision]:
        """Decide a block in Python, because it was not decided inside ``rounds``."""
        decisions = self.inner.decide_group(policy, *arguments)
        self.judged += len(decisions)
        return decisions

    def joins(self, drafter: Executor) -> bool:
        return self.inner.joins(drafter.inner if isinstance(drafter, Clock) else drafter)

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        return self._clocked(self.inner.score, batch, places, *([states] if states else []))

    def looks_up(self, rows: abc.Sequence[Row]) -> bool:
        return self.inner.looks_up(rows)

    def takes(self, rows: abc.Sequence[Row]) -> bool:
        return self.inner.takes(rows)

    def extend(self, *arguments: Any, **options: Any) -> Drafted:
        return self._clocked(self.inner.extend, *arguments, **options)

    def rounds(self, plan: RoundPlan) -> Rounds | None:
        """Take several rounds in one call. The result has the seconds of the target and of the drafter."""
        drafter = plan.drafter if isinstance(plan.drafter, Clock) else None
        rounds = self.inner.rounds(plan if drafter is None else replace(plan, drafter=drafter.inner))
        if rounds is not None:
            self.seconds += sum(spent.target for spent in rounds.spent)
            if drafter is not None:
                drafter.seconds += sum(spent.draft for spent in rounds.spent)
        return rounds

    def _clocked(self, call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        start = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            kind_of(self.device).synchronize(self.device)
            self.seconds += time.perf_counter() - start


class HeadClock(Clock, Head):
    """A clock around a draft head."""

    def __init__(self, inner: Head) -> None:
        super().__init__(inner)
        self.head = inner
        self.options = inner.options
        self.to_target_U = inner.to_target_U

    def share(self, target: Executor) -> None:
        self.head.share(target)

    def read(self, batch: Batch, states_TF: Tensor) -> None:
        self._clocked(self.head.read, batch, states_TF)

    def room(self, drafts: int, spec: DraftSpec) -> int:
        return self.head.room(drafts, spec)

    def draft(self, *arguments: Any, **options: Any) -> Drafted:
        return self._clocked(self.head.draft, *arguments, **options)


def draft_runners(llm: LLM) -> list[Runner]:
    """Return the runners of all draft models."""
    return [drafter for drafter in llm.engine.setup.drafters if isinstance(drafter, Runner)]


@contextmanager
def _clocks(llm: LLM, wanted: bool) -> Iterator[list[Clock]]:
    """If ``wanted``, put clocks around the target (the first clock) and the draft models while this context lasts."""
    if not wanted:
        yield []
        return
    heads = [drafter for drafter in llm.engine.setup.drafters if isinstance(drafter, HeadRunner)]
    # The object that holds each model, and the name of its attribute.
    places: list[tuple[Any, str]] = [(runner, "executor") for runner in (llm.engine.runner, *draft_runners(llm))]
    places += [(head, "head") for head in heads]
    models = [getattr(holder, name) for holder, name in places]
    clocks = [HeadClock(model) if name == "head" else Clock(model) for model, (_, name) in zip(models, places)]
    for (holder, name), clock in zip(places, clocks):
        setattr(holder, name, clock)
    try:
        yield clocks
    finally:
        for (holder, name), model in zip(places, models):
            setattr(holder, name, model)


@dataclass
class Times(Summed):
    """Seconds of completions. ``prompt`` is the time to the first token, and ``decoding`` the time of the rounds after
    it. With clocks around the models, ``target`` and ``draft`` are the parts of ``decoding`` that they take, and
    ``judged`` counts the rounds that Python decided. A draft model reads the prompt when it first drafts, so that time
    counts as decoding."""

    prompt: float = 0.0
    decoding: float = 0.0
    target: float = 0.0
    draft: float = 0.0
    judged: int = 0

    @property
    def rest(self) -> float | None:
        """Seconds of decoding outside the models; None without clocks."""
        return self.decoding - self.target - self.draft if self.target else None

    @property
    def overhead(self) -> float | None:
        """Share of decoding outside the models; None without clocks."""
        return None if self.rest is None else self.rest / self.decoding


class _Timed(Job):
    """A job that notes the time when all its requests have their first token, and then sets the clocks to 0."""

    def __init__(self, requests: list[Request], clocks: list[Clock]) -> None:
        super().__init__(requests)
        self._clocks, self.first = clocks, 0.0
        self._waiting = set(range(len(requests)))

    def note(self, index: int, tokens: list[Token]) -> None:
        super().note(index, tokens)
        self._waiting.discard(index)
        if not self.first and not self._waiting:
            self.first = time.perf_counter()
            for clock in self._clocks:
                clock.seconds, clock.judged = 0.0, 0


class Completion(NamedTuple):
    """One decoded prompt."""

    output: Output
    times: Times
    drafts: list[tuple[int, int]]  # for each round with a draft: drafted tokens, kept tokens


def complete(
    setting: Setting, prompts: abc.Sequence[list[int]], params: abc.Sequence[SamplingParams], clocked: bool = False
) -> list[Completion]:
    """Decode prompts together, as ``LLM.generate`` does, with clocks around the models if ``clocked``. The times are
    divided among the prompts in proportion to their tokens."""
    llm = setting.llm
    with _clocks(llm, clocked) as clocks:
        job = _Timed(llm.requests([*prompts], [*params], setting.policy, setting.k), clocks)
        begin = time.perf_counter()
        llm.worker.run(job)
        end = time.perf_counter()
    target, draft = (sum(clock.seconds for clock in group) for group in (clocks[:1], clocks[1:]))
    outputs = [request.output() for request in job.requests]
    tokens = max(1, sum(len(output.token_ids) for output in outputs))
    rounds = sum(output.stats.rounds for output in outputs)
    completions = []
    for request, output in zip(job.requests, outputs):
        share = len(output.token_ids) / tokens
        times = Times((job.first - begin) * share, (end - job.first) * share, target * share, draft * share)
        if clocks and rounds:
            times.judged = round(clocks[0].judged * output.stats.rounds / rounds)
        completions.append(Completion(output, times, list(request.row.drafts)))
    return completions


def timed(setting: Setting, prompt: list[int], params: SamplingParams, clocked: bool = False) -> tuple[Output, Times]:
    """Call ``complete`` with a single prompt, and return its output and its times."""
    ((output, times, _),) = complete(setting, [prompt], [params], clocked)
    return output, times
