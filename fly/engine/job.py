"""What one call waits for: its requests, and what the engine's thread reports about them. Knows nothing of models or
HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import abc
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from fly.models.chat import Splitter, Thinking
from fly.models.tokenizer import TextStream, Tokenizer
from fly.output import Output, Reader
from fly.runtime.request import Sequence, Token
from fly.types import Guarantee

__all__ = ["Entry", "Job", "News", "Request", "outputs_of", "read_along"]


@dataclass(frozen=True)
class News:
    """What a step did for one request of a job: request number ``index``.

    ``pieces`` are the new tokens with the text that each settled, ``rest`` is the text that only the end settled; both
    include the tags of thinking. ``drafts`` are the step's rounds with a draft: how many tokens were drafted, and how
    many of them were kept. Once the request is over, ``output`` is its result, or ``error`` says why it failed.
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
        return self.output is not None or self.error is not None


@dataclass(eq=False)
class Request:
    """A row with its text: ``text`` follows its tokens if the request is ``streamed``, or to find a stop string.
    ``thinking``: how it may begin with thinking."""

    row: Sequence
    tokenizer: Tokenizer | None = None
    text: TextStream | None = None
    streamed: bool = False
    thinking: Thinking | None = None
    _texts: list[str] = field(default_factory=list)
    _logprobs: int = 0  # tokens that were reported already

    def stopped(self, row: Sequence, token: int) -> bool:
        """Read a token; whether a stop string ended the text with it."""
        assert self.text is not None
        self._texts.append(self.text.push(token, stoppable=row.generated >= row.params.min_tokens))
        return self.text.stopped

    def news(self, index: int, tokens: list[Token]) -> News | None:
        """The news that these tokens were emitted, or that the request is over. None if it is not ``streamed``."""
        texts, self._texts = self._texts, []
        if not self.streamed:
            return None
        row, over = self.row, bool(self.row.finish_reason)
        drafts, row.drafts = row.drafts, []
        logprobs = row.logprobs[self._logprobs :]
        self._logprobs += len(logprobs)
        rest = self.text.finish() if over and self.text is not None else ""
        output = None
        if over and row.error is None:
            try:
                output = self.output()
            except Exception as error:  # its policy's, of which an output tells
                row.error = error
        return News(index, list(zip(tokens, texts)), logprobs, drafts, rest, output, row.error)

    def output(self) -> Output:
        """Its output, without the ``others`` of the same prompt."""
        row = self.row
        ids = row.tokens[row.prompt_length :]
        if self.text is not None:
            self.text.finish()
            text = self.text.text
        else:
            text = self.tokenizer.decode(ids) if self.tokenizer else ""
        reasoning, text = Splitter.whole(self.thinking, text)
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
            guarantee=Guarantee.HEURISTIC if row.stats.layers else row.policy.guarantee,
            bound=None if row.stats.layers else row.policy.bound,
            reasoning=reasoning,
            _reader=Reader(self.tokenizer, self.thinking),
        )


def read_along(
    row: Sequence,
    tokenizer: Tokenizer | None,
    streamed: bool = False,
    thinking: Thinking | None = None,
    shown: abc.Iterable[str] = (),
) -> TextStream | None:
    """A reader of a new row's text, if the text is needed while it grows; None if it is enough to decode it at the end.
    ``shown``: which control tokens belong to the text."""
    params = row.params
    if tokenizer is None or not (streamed or thinking or params.stop or shown or not params.skip_special_tokens):
        return None
    tags = [*shown, *(thinking.tags if thinking else ())]
    if not params.skip_special_tokens:
        ends = frozenset() if params.include_stop_str_in_output else row.stop_ids
        tags += [tokenizer.raw.id_to_token(token) for token in tokenizer.control_ids - ends]
    return TextStream(tokenizer, params.stop, tags, params.include_stop_str_in_output)


def outputs_of(requests: abc.Sequence[Request]) -> list[Output]:
    """The outputs of requests, further completions of a prompt with its first."""
    outputs, samples = [], iter(requests)
    for request in samples:
        others = [next(samples).output() for _ in range(request.row.params.n - 1)]
        outputs.append(replace(request.output(), others=tuple(others)))
    return outputs


Entry = list[News] | BaseException


class Job:
    """Requests of one call, for which one thread or one coroutine waits (``Worker.submit``).

    ``queue`` gets the news of ``streamed`` requests: an entry for each step if the job is ``stepwise``, else one when
        all are over or one has failed. An error of the engine itself is an entry too. ``admitted``, ``note`` and
    ``cancelled`` run on the engine's thread; a subclass may take times there.

    Args:
        requests: not submitted before.
        stepwise: whether there is an entry for each step that did something, and for the first step in any case.
        loop: the event loop that awaits ``queue`` (an ``asyncio.Queue``); None if a thread waits for it.
    """

    def __init__(
        self, requests: abc.Sequence[Request], stepwise: bool = False, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.requests, self.stepwise, self.loop = list(requests), stepwise, loop
        self.queue: Any = SimpleQueue() if loop is None else asyncio.Queue()
        self.key = -1  # its number among the jobs of a worker
        self.arrived = time.monotonic()
        self.left = len(self.requests)  # that go on
        self.error: Exception | None = None  # that ended one of them, and with it the job
        self.entries = 0  # that came so far
        self.gone: SimpleQueue[None] = SimpleQueue()  # gets something once the engine has nothing of it any more
        self._news: list[News] = []

    def admitted(self) -> None:
        """The engine has it."""

    def note(self, index: int, tokens: list[Token]) -> None:
        """A step gave a request these tokens, or ended it."""
        request = self.requests[index]
        if (news := request.news(index, tokens)) is not None:
            self._news.append(news)
        if request.row.finish_reason:
            self.left -= 1
            self.error = self.error or request.row.error

    def cancelled(self) -> None:
        """The job was cancelled while ``left`` requests were still running."""

    def entry(self) -> list[News]:
        """The news since the last entry."""
        self.entries += 1
        news, self._news = self._news, []
        return news

    def check(self, entry: Entry) -> None:
        """Raise what ended the job, if that is an error."""
        if isinstance(entry, BaseException):
            raise entry
        if self.error is not None:
            raise self.error
