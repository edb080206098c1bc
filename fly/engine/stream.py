"""Streams: a completion piece by piece, for threads and for coroutines. Knows nothing of models or HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator

from fly.engine.job import Entry, Job
from fly.engine.worker import Worker
from fly.models.thinking import Kind, Splitter
from fly.output import Piece
from fly.runner.request import Stats, Token

__all__ = ["AsyncStream", "Stream"]


class _Pieces:
    """A completion being streamed, to a thread or a coroutine."""

    def __init__(self, worker: Worker, job: Job) -> None:
        self._worker = worker
        self._job = job
        self._row = job.requests[0].row
        self._splitter = Splitter(job.requests[0].thinking)
        self._ready: deque[Piece] = deque()
        self._held: tuple[Token, ...] = ()  # tokens whose text is not final yet
        self._begun = self._ended = False
        self._error: BaseException | None = None
        self._taken = 0

    @property
    def stats(self) -> Stats:
        """The counts of all tokens generated so far, read or not."""
        return self._row.stats

    @property
    def finish_reason(self) -> str | None:
        """Why the completion ended; None while it goes on."""
        return self._row.finish_reason

    def _ask(self) -> bool:
        """Ask for the next entry. Return False if there is none. Raises the error that ended the request."""
        if self._ended:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return False
        if self._begun:
            self._worker.want(self._job, self._taken)
        else:
            self._worker.submit(self._job)
            self._begun = True
        return True

    def _take(self, entry: Entry) -> None:
        """Make pieces of an entry's news."""
        self._taken += 1
        if isinstance(entry, BaseException):
            self._ended = True
            self._error = entry
            return
        for news in entry:
            for token, text in news.pieces:
                self._held += (token,)
                self._give(self._splitter.push(text))
            if news.over:
                self._ended = True
                self._error = news.error
                if news.error is None:
                    pieces = self._splitter.finish(news.rest)
                    self._give(pieces or [("text", "")] if self._held else pieces)

    def _give(self, pieces: list[tuple[Kind, str]]) -> None:
        """Make final text ready to be read. Its first piece gets the tokens that were held back."""
        for kind, text in pieces:
            self._ready.append(Piece(text, self._held, kind))
            self._held = ()

    def _leave(self, wait: bool = False) -> None:
        """End the request if it is running, and forget what was not read."""
        going = self._begun and not self._ended
        self._ended = True
        self._error = None
        self._ready.clear()
        if going:
            self._worker.cancel(self._job, wait)

    def __del__(self) -> None:
        self._leave()


class Stream(_Pieces, Iterator[Piece]):
    """A completion being streamed to a thread. ``close`` ends the request and frees its cache; so does dropping the
    stream."""

    def __next__(self) -> Piece:
        while not self._ready:
            if not self._ask():
                raise StopIteration
            try:
                entry = self._job.queue.get()
            except BaseException:
                self._leave()
                raise
            self._take(entry)
            if self._ended:
                self._job.queue.put([])  # wakes other threads that read the same stream
        return self._ready.popleft()

    def close(self) -> None:
        """End the request early; its cache is free when this returns."""
        self._leave(wait=True)


class AsyncStream(_Pieces, AsyncIterator[Piece]):
    """A completion being streamed to a coroutine (``async for``). Cancelling a task that waits for a piece ends the
    request too."""

    async def __anext__(self) -> Piece:
        if not self._begun:
            self._job.loop = asyncio.get_running_loop()  # the reader's loop, which may not be the one that opened it
        while not self._ready:
            if not self._ask():
                raise StopAsyncIteration
            try:
                entry = await self._job.queue.get()
            except BaseException:
                self._leave()
                raise
            self._take(entry)
            if self._ended:
                self._job.queue.put_nowait([])
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End the request early; its cache is free after the current round."""
        self._leave()
