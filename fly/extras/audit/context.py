"""The state that the checks of an audit share: servers, prompts, and answers that several checks use."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fly.extras.audit.client import Answer, Refused, Reply, Server
from fly.extras.audit.distributions import Draw, Fields, expected, min_variation, read_draws, reported
from fly.extras.audit.report import Finding

__all__ = ["CHECKS", "Check", "Context", "check"]

# Values that change nothing. A server may have others by default, so they are sent with every request.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
_GREEDY_PROMPTS, _GREEDY_TOKENS = 24, 48


@dataclass(frozen=True)
class Check:
    """One check: a sentence about what it tests, and the function that runs it."""

    name: str
    tests: str
    run: Callable[[Context], Finding]


CHECKS: dict[str, Check] = {}


def check(name: str, tests: str) -> Callable[[Callable[[Context], Finding]], Callable[[Context], Finding]]:
    """Return a decorator that adds a check. Checks run in the order in which they are added."""

    def add(run: Callable[[Context], Finding]) -> Callable[[Context], Finding]:
        CHECKS[name] = Check(name, tests, run)
        return run

    return add


@dataclass
class Context:
    """One audit.

    ``samples`` is the number of answers drawn for the first tokens; other checks draw in proportion. A single check
    fails if its p-value is at most ``p``; powers are stated for this ``p``. ``step`` is called with a text about
    progress.
    """

    server: Server
    reference: Server | None
    prompts: Sequence[str]
    samples: int
    p: float
    step: Callable[[str], None] = field(default=lambda text: None)
    gone: bool = False  # whether the server has stopped answering
    # The ids of texts that are single tokens; None for other texts.
    ids: dict[str, int | None] = field(default_factory=dict)

    @functools.cached_property
    def neutral(self) -> dict[str, float]:
        """The fields that the server accepts, each with a neutral value that it accepts."""
        accepted: dict[str, float] = {}
        for name, values in _NEUTRAL.items():
            for value in values:
                try:
                    self.server.ask("Hello", {"max_tokens": 1, "temperature": 0, name: value}, top=False)
                except Refused:
                    continue
                accepted[name] = value
                break
        return accepted

    def fields(self, changes: Fields) -> dict[str, Any]:
        """Return the fields of a request: the ``changes``, and neutral values for the others."""
        return {"temperature": 1.0, **self.neutral, **changes}

    @functools.cached_property
    def greedy(self) -> list[Reply]:
        """Greedy answers to the first prompts, one request at a time."""
        return self.greedy_of(self.server)

    @functools.cached_property
    def greedy_beside(self) -> list[Reply]:
        """The reference's greedy answers to the same prompts."""
        assert self.reference is not None
        return self.greedy_of(self.reference)

    def greedy_of(self, server: Server, parallel: int = 1) -> list[Reply]:
        fields = self.fields({"temperature": 0.0, "max_tokens": _GREEDY_TOKENS})
        return server.ask_all([(prompt, fields) for prompt in self.prompts[:_GREEDY_PROMPTS]], parallel)

    @functools.cached_property
    def choices(self) -> int:
        """How many choices a request of the sampling checks asks for; 1 if a server does not give several."""
        fields = self.fields({"n": 8, "max_tokens": 1})
        try:
            for server in filter(None, (self.server, self.reference)):
                if len(server.ask(self.prompts[0], fields, top=False).answers) != 8:
                    return 1
        except Refused:
            return 1
        return 8

    @functools.cached_property
    def lively(self) -> list[int]:
        """The numbers of the prompts, best ones first. The best have an entropy near 1 nat: their next tokens vary, and
        each still occurs often enough to be counted. No check uses the answers that this is measured on."""
        length = 8
        requests = [(prompt, self.fields({"max_tokens": length})) for prompt in self.prompts]
        score = []
        for number, reply in enumerate(self.server.ask_all(requests)):
            entropies = [_entropy(reported(place, self.server.top)) for place in reply.answer.places]
            gain = [entropy * math.exp(-entropy) for entropy in entropies]
            # First tokens count twice. A place after the end of an answer counts as 0.
            score.append((-(sum(gain) + sum(gain[:3])) / length, number))
        return [number for _, number in sorted(score)]

    @functools.cached_property
    def as_is(self) -> bool:
        """Whether reported log-probabilities are those after sampling parameters: then a temperature changes them."""
        fields = self.fields({"max_tokens": 1})
        numbers = self.lively[:4]
        plain = self.server.ask_all([(self.prompts[number], fields) for number in numbers])
        cold = self.server.ask_all([(self.prompts[number], fields | {"temperature": 0.5}) for number in numbers])
        same = sharper = 0.0
        for number, plain_reply, cold_reply in zip(numbers, plain, cold):
            first, second = plain_reply.answer.places[0], cold_reply.answer.places[0]
            head = reported(second, self.server.top)
            same += min_variation(reported(first, self.server.top), head)
            predicted = expected(first, {"temperature": 0.5}, (), self.prompts[number], self.server.top)
            if predicted is not None:
                sharper += min_variation(dict(zip(predicted.tokens, predicted.probs_H)), head)
        return bool(sharper < same)

    def sample(self, changes: Fields, count: int, length: int, prompts: int, rounds: int = 4) -> Iterator[list[Draw]]:
        """Draw ``count`` answers of ``length`` tokens to the best ``prompts`` (see ``lively``). Yields the draws so far
        after each round of requests, so that the caller can stop early."""
        fields = self.fields({**changes, "max_tokens": length})
        numbers = self.lively[:prompts]
        repeats = max(1, math.ceil(count / (rounds * len(numbers))))
        if (choices := min(repeats, self.choices)) > 1:
            fields |= {"n": choices}
            repeats = math.ceil(repeats / choices)
        draws: list[Draw] = []
        for _ in range(rounds):
            requested = [number for number in numbers for _ in range(repeats)]
            replies = self.server.ask_all([(self.prompts[number], fields) for number in requested])
            for number, reply in zip(requested, replies):
                for answer in reply.answers:
                    draws += read_draws(answer, self.prompts[number], number, changes, self.server.top, self.as_is)
            yield draws

    def firsts(self, changes: Mapping[str, Any], count: int) -> list[tuple[int, Answer]]:
        """Ask each of the best prompts once with these fields. Return its number and the answer."""
        numbers = self.lively[:count]
        replies = self.server.ask_all([(self.prompts[number], self.fields(changes)) for number in numbers])
        return [(number, reply.answer) for number, reply in zip(numbers, replies)]


def _entropy(head: Mapping[str, float]) -> float:
    probs = np.array(list(head.values()))
    return float(-(probs * np.log(np.maximum(probs, 1e-30))).sum() + max(0.0, 1 - probs.sum()) * 3)
