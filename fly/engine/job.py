"""A job: the requests of one call, and the news about them that the engine's thread sends. Knows nothing of models or
HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from fly.models.thinking import Splitter, Thinking
from fly.models.tokenizer import TextStream, Tokenizer
from fly.output import Output, Reader
from fly.policies import Promise
from fly.runner.request import Row, Token

__all__ = ["Entry", "Job", "News", "Request", "outputs_of", "read_along"]


@dataclass(frozen=True)
class News:
    """The result of a step for request number ``index`` of a job.

    ``pieces`` are the new tokens, each with the text that became final with it; ``rest`` is text that became final only
    at the end. Both include the tags around the model's thinking. ``drafts`` has, for each round with a draft, how many
    tokens were drafted and kept. Once the request is over, ``output`` is its result, or ``error`` is what ended it.
    """

    index: int
    pieces: list[tuple[Token, str]]
    logprobs: list[dict[int, float]]
    drafts: list[tuple[int, int]]
    rest: str = ""
    output: Output | None = None
    error: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        return self.output is not None or self.error is not None


@dataclass(eq=False)
class Request:
    """A row with its text, and what its policy promises. If the request is ``streamed`` or has a stop string, ``text``
    decodes tokens as they come. ``thinking`` describes the reasoning that may begin the text. ``prompt`` is the plain
    text that it continues; None if the prompt was given as token ids."""

    row: Row
    promise: Promise
    tokenizer: Tokenizer | None = None
    text: TextStream | None = None
    streamed: bool = False
    thinking: Thinking | None = None
    prompt: str | None = None
    _texts: list[str] = field(default_factory=list)
    _logprobs: int = 0  # number of tokens whose log-probabilities were reported

    def decode(self, token: int) -> bool:
        """Decode a token, and return whether a stop string now ends the text (``Row.on_token``)."""
        assert self.text is not None
        row = self.row
        piece = self.text.push(token, stoppable=row.generated >= row.params.min_tokens)
        if self.streamed:
            self._texts.append(piece)
        return self.text.stopped

    def news(self, index: int, tokens: list[Token]) -> News:
        """Return what a stream is told of these ``tokens`` and, if the request is over, of its end."""
        texts, self._texts = self._texts, []
        row = self.row
        over = bool(row.finish_reason)
        drafts, row.drafts = row.drafts, []
        logprobs = row.logprobs[self._logprobs :]
        self._logprobs += len(logprobs)
        rest = self.text.finish() if over and self.text is not None else ""
        output = self.output() if over and row.error is None else None
        return News(index, list(zip(tokens, texts)), logprobs, drafts, rest, output, row.error)

    def output(self, others: tuple[Output, ...] = ()) -> Output:
        """Return the request's output, with the outputs of further completions of its prompt (``others``)."""
        row = self.row
        ids = row.tokens[row.prompt_length :]
        begin: Callable[[], TextStream] | None = None
        if self.text is not None:
            self.text.finish()
            text = self.text.text
            begin = self.text.fresh
        elif self.tokenizer is not None:
            text = self.tokenizer.decode(ids)
            begin = partial(TextStream, self.tokenizer)
        else:
            text = ""
        reasoning = ""
        if self.thinking is not None:
            reasoning, text = Splitter.split(self.thinking, text)
        unscored = [None] * (row.prompt_length - len(row.prompt_logprobs))
        return Output(
            prompt_token_ids=row.tokens[: row.prompt_length],
            text=text,
            token_ids=ids,
            finish_reason=row.finish_reason or "length",
            logprobs=row.logprobs if row.params.logprobs is not None else None,
            prompt_logprobs=None if row.params.prompt_logprobs is None else [*unscored, *row.prompt_logprobs],
            provenance=row.provenance,
            stats=row.stats,
            policy=row.policy,
            guarantee=self.promise.guarantee,
            bound=self.promise.bound,
            reasoning=reasoning,
            others=others,
            _reader=Reader(begin, self.thinking, row.params.min_tokens),
        )


def read_along(
    row: Row,
    tokenizer: Tokenizer | None,
    streamed: bool = False,
    thinking: Thinking | None = None,
    shown: abc.Iterable[str] = (),
) -> TextStream | None:
    """Return a stream that decodes a new row's text as it grows; None if decoding at the end is enough. ``shown`` are
    control tokens that belong to the text."""
    params = row.params
    if tokenizer is None or not (streamed or thinking or params.stop or shown or not params.skip_special_tokens):
        return None
    tags = [*shown, *(thinking.tags if thinking else ())]
    if not params.skip_special_tokens:
        ends = frozenset() if params.include_stop_str_in_output else row.stop_ids
        tags += [tokenizer.raw.id_to_token(token) for token in tokenizer.control_ids - ends]
    return TextStream(tokenizer, params.stop, tags, params.include_stop_str_in_output)


def outputs_of(requests: abc.Sequence[Request]) -> list[Output]:
    """Return the outputs of requests. Further completions of a prompt are the ``others`` of its first one."""
    outputs = []
    samples = iter(requests)
    for request in samples:
        others = [next(samples).output() for _ in range(request.row.params.n - 1)]
        outputs.append(request.output(tuple(others)))
    return outputs


Entry = list[News] | BaseException


class Job:
    """The requests of one call. One thread or one coroutine waits for them (``Worker.submit``).

    ``queue`` gets the news of ``streamed`` requests. If the job is ``stepwise``, steps add entries; else there is one
    entry, when all requests are over or one has failed. An error of the engine itself is an entry too.
    ``admitted``, ``note`` and ``cancelled`` run on the engine's thread; a subclass may measure times there.

    Args:
        requests: new requests, which no worker has got before.
        stepwise: whether an entry comes after the job's first step, and after each step that gives tokens or ends a
            request.
        loop: the event loop that awaits ``queue`` (an ``asyncio.Queue``); None if a thread waits for it.
        interval: while the job is open and ``stepwise``, a step begins no further round after this many seconds.
    """

    def __init__(
        self,
        requests: abc.Sequence[Request],
        stepwise: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
        interval: float = 0.01,
    ) -> None:
        self.requests = list(requests)
        self.stepwise = stepwise
        self.interval = interval
        self.loop = loop
        self.queue: Any = SimpleQueue() if loop is None else asyncio.Queue()
        self.key = -1  # the worker's number for it
        self.arrived = time.monotonic()
        self.left = len(self.requests)  # number of requests that are not over
        self.error: Exception | None = None  # the error that ended a request, and with it the job
        self.entries = 0  # number of entries so far
        self.gone: SimpleQueue[None] = SimpleQueue()  # gets an item once the engine holds nothing of the job
        self._news: list[News] = []

    def admitted(self) -> None:
        """Note that the engine has taken the job in."""

    def note(self, index: int, tokens: list[Token]) -> None:
        """Take the tokens that a step gave to request number ``index``, or note its end."""
        request = self.requests[index]
        if request.streamed:
            self._news.append(request.news(index, tokens))
        if request.row.finish_reason:
            self.left -= 1
            self.error = self.error or request.row.error

    def cancelled(self) -> None:
        """Note that the job is cancelled while ``left`` requests are still running."""

    def entry(self) -> list[News]:
        """Return the news since the last entry."""
        self.entries += 1
        news, self._news = self._news, []
        return news

    def check(self, entry: Entry) -> None:
        """Raise the error that ended the job, if there is one."""
        if isinstance(entry, BaseException):
            raise entry
        if self.error is not None:
            raise self.error
