"""Passes one job's results from the engine to the client that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from fly.engine.job import News
from fly.engine.worker import Worker
from fly.runner.structured import StructuredError
from fly.serve.errors import ApiError, ClientLeft, invalid_form
from fly.serve.metrics import Measured
from fly.serve.turns import Turns

__all__ = ["Answering", "until_left"]

_FEW = 256  # up to this many entries are written at once, without a thread


async def until_left(receive: Receive) -> None:
    """Wait for the client to close its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Answering:
    """Receives the news of one job until the job ends, its client leaves, or its time is up.

    Args:
        worker: runs the job.
        turns: the threads that write large answers.
        timeout: seconds from now on.
        job: the job.
        request: the HTTP request; it shows when the client leaves.
        form: the field of the request that asks for structured output, for error messages.
    """

    def __init__(
        self, worker: Worker, turns: Turns, timeout: float, job: Measured, request: Request, form: str
    ) -> None:
        self.worker = worker
        self.timeout = timeout
        self.job = job
        self.form = form
        self._turns, self._client = turns, request.state.client.name
        self.left = False  # whether the client has left
        self._pending: deque[News | BaseException | None] = deque()  # taken from the queue; None: the client left
        self._deadline = asyncio.get_running_loop().time() + self.timeout
        self._watch = asyncio.create_task(self._watch_client(request.receive))

    async def _watch_client(self, receive: Receive) -> None:
        await until_left(receive)
        self.left = True
        self.worker.cancel(self.job)
        self.job.queue.put_nowait([None])

    async def begun(self) -> bool:
        """Wait for the first news, or until the engine has admitted the job. Return whether the client still listens.
        Raises ``ApiError`` as ``next`` does."""
        try:
            async with asyncio.timeout_at(self._deadline):
                self._add(await self.job.queue.get())
        except TimeoutError:
            raise ApiError(504, f"not finished within {self.timeout:g} s", code="timeout") from None
        if self._pending and isinstance(self._pending[0], BaseException):
            await self.next()
        return not (self._pending and self._pending[0] is None)

    async def next(self) -> list[News] | None:
        """Wait for news and return all that came since the last call; None if the client has left. A job that failed
        raises ``ApiError``, once all news before the failure have been returned."""
        while not self._pending:
            await self.begun()
        while not self.job.queue.empty():
            self._add(self.job.queue.get_nowait())
        news_list: list[News] = []
        while self._pending and isinstance(news := self._pending[0], News) and news.error is None:
            news_list.append(news)
            self._pending.popleft()
        if news_list:
            return news_list
        last = self._pending.popleft()
        error = last.error if isinstance(last, News) else last
        if isinstance(error, StructuredError):
            raise invalid_form(self.form, str(error))
        if error is not None:
            raise ApiError(500, f"the request failed: {type(error).__name__}: {error}", code="generation_failed")
        return None

    async def write(self, pieces: Iterator[bytes], entries: int) -> list[bytes]:
        """Collect ``pieces``, which have about ``entries`` JSON entries in all. If these are many, a thread collects
        them, in turns with other clients' work. Raises ``ClientLeft``."""
        if entries <= _FEW:
            return list(pieces)
        parts = await self._turns.collect(self._client, pieces, lambda: self.left)
        if self.left:
            raise ClientLeft
        return parts

    def _add(self, entry: Any) -> None:
        self._pending.extend(entry if isinstance(entry, list) else [entry])

    def close(self) -> None:
        """Stop waiting, and cancel the job if it still runs."""
        self._watch.cancel()
        self.worker.cancel(self.job)
