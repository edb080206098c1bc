"""One turn of the engine: take in what came, take a step, tell what became of it. Knows nothing of HTTP, threads or
clocks.

What a turn does follows from the messages alone, which are plain values. So where a model lives on several ranks, every
rank can take the same turns: ``fly.parallel.lead(ranks, Turns(llm))`` is called in the place of ``Turns(llm)``, and the
other ranks are in ``fly.parallel.follow(ranks, Turns(llm))``.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from fly.llm import LLM, Output, Request
from fly.policies import AcceptancePolicy
from fly.request import Token
from fly.types import SamplingParams

__all__ = ["Answer", "Cancel", "Event", "Load", "Message", "News", "Submit", "Turns"]


@dataclass(frozen=True)
class Submit:
    """Complete every prompt, ``params.n`` times each. ``key`` names the job; ``params.seed`` is set."""

    key: int
    prompts: list[list[int]]
    params: SamplingParams
    policy: AcceptancePolicy
    k: int


@dataclass(frozen=True)
class Cancel:
    """End a job; what it holds is free at once."""

    key: int


@dataclass(frozen=True)
class Answer:
    """A job was taken in, or not: ``error`` says why."""

    key: int
    error: Exception | None = None


@dataclass(frozen=True)
class News:
    """What a step did for one completion of a job.

    Completions are numbered by prompt, then by sample. ``pieces`` are the new tokens with the text that each settled,
    ``rest`` is the text that only the end settled. ``drafts`` are the step's rounds with a draft: how many tokens that
    had, and how many of them stand. Once it is over, ``output`` is what became of it, or ``error`` why it failed.
    """

    key: int
    index: int
    pieces: list[tuple[Token, str]]
    logprobs: list[dict[int, float]]
    drafts: list[tuple[int, int]]
    rest: str = ""
    output: Output | None = None
    error: Exception | None = None

    @property
    def over(self) -> bool:
        return self.output is not None or self.error is not None


Message = Submit | Cancel
Event = Answer | News


@dataclass
class _Completion:
    request: Request
    logprobs: int = 0
    over: bool = False


@dataclass(frozen=True)
class Load:
    """How full the engine is: rows that run and wait, and of each cache (the target's first) the share of its pages
    that is held."""

    running: int = 0
    waiting: int = 0
    caches: tuple[float, ...] = ()


@dataclass
class Turns:
    """Takes turns on ``llm``, which has a tokenizer and belongs to it alone."""

    llm: LLM
    _open: dict[int, list[_Completion]] = field(default_factory=dict)

    def __call__(self, messages: abc.Sequence[Message]) -> list[Event]:
        """One turn. Whatever is wrong with one job is an event of that job."""
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Submit):
                events.append(self._submit(message))
            else:
                self._close(message.key)
        if self.llm.scheduler:
            self.llm.step()
        for key, completions in list(self._open.items()):
            events += self._news(key, completions)
        return events

    @property
    def load(self) -> Load:
        """What the last turn left."""
        scheduler = self.llm.scheduler
        shares = tuple(1 - each.num_free / each.num_blocks for each in scheduler.allocators())
        return Load(len(scheduler.running), len(scheduler.waiting), shares)

    def _submit(self, message: Submit) -> Answer:
        try:
            requests = self.llm.requests(message.prompts, message.params, message.policy, message.k, streamed=True)
            self._open[message.key] = [_Completion(request) for request in requests]
            for request in requests:
                self.llm.submit(request)
        except Exception as error:
            self._close(message.key)
            return Answer(message.key, error)
        return Answer(message.key)

    def _close(self, key: int) -> None:
        for completion in self._open.pop(key, ()):
            self.llm.close(completion.request)

    def _news(self, key: int, completions: list[_Completion]) -> list[News]:
        news = []
        for index, completion in enumerate(completions):
            request = completion.request
            row, over = request.row, bool(request.row.finish_reason)
            if completion.over or not (request.pieces or over):
                continue
            pieces = list(request.pieces)
            request.pieces.clear()
            rest = request.text.finish() if over and request.text is not None else ""
            told = News(
                key,
                index,
                pieces,
                row.logprobs[completion.logprobs :],
                row.drafts[:],
                rest,
                self.llm.output(request) if over and row.error is None else None,
                row.error,
            )
            row.drafts.clear()
            completion.logprobs, completion.over = len(row.logprobs), over
            news.append(told)
            if over:
                self.llm.close(request)
        if any(told.error for told in news) or all(completion.over for completion in completions):
            self._close(key)
        return news
