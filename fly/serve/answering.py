"""The way of one answer from the engine to its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from fly.job import News
from fly.serve.errors import ApiError, Left
from fly.serve.metrics import Measured
from fly.serve.turns import Turns
from fly.structured import StructuredError
from fly.worker import Worker

__all__ = ["Answering", "until_left"]

_FEW = 256  # entries of an answer that are written at once


async def until_left(receive: Receive) -> None:
    """Wait for the client to close its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Answering:
    """The news of one job while its client listens and its time lasts.

    Args:
        worker: runs the job.
        turns: threads that write large answers.
        timeout: seconds from now on.
        job: what was asked for.
        request: tells when its client leaves.
        form: the field that gives the answer its form, for errors.
    """

    def __init__(
        self, worker: Worker, turns: Turns, timeout: float, job: Measured, request: Request, form: str
    ) -> None:
        self.worker, self.timeout, self.job, self.form = worker, timeout, job, form
        self._turns, self._client = turns, request.state.client.name
        self.left = False  # whether the client has
        self._ahead: deque[News | BaseException | None] = deque()  # taken off the queue; None: the client has left
        self._deadline = asyncio.get_running_loop().time() + self.timeout
        self._watch = asyncio.create_task(self._until_gone(request.receive))

    async def _until_gone(self, receive: Receive) -> None:
        await until_left(receive)
        self.left = True
        self.worker.cancel(self.job)
        self.job.queue.put_nowait([None])

    async def begun(self) -> bool:
        """Wait until the engine has it, or for the first news; whether the client still listens. Raises ``ApiError`` as
        ``next`` does."""
        try:
            async with asyncio.timeout_at(self._deadline):
                self._add(await self.job.queue.get())
        except TimeoutError:
            raise ApiError(504, f"not finished within {self.timeout:g} s", code="timeout") from None
        if self._ahead and isinstance(self._ahead[0], BaseException):
            await self.next()
        return not (self._ahead and self._ahead[0] is None)

    async def next(self) -> list[News] | None:
        """The news since the last call, in one piece for a slow reader; None if the client has left. Raises
        ``ApiError`` for a job that failed, after the news before it were fetched."""
        while not self._ahead:
            await self.begun()
        while not self.job.queue.empty():
            self._add(self.job.queue.get_nowait())
        found: list[News] = []
        while self._ahead and isinstance(news := self._ahead[0], News) and news.error is None:
            found.append(news)
            self._ahead.popleft()
        if found:
            return found
        last = self._ahead.popleft()
        error = last.error if isinstance(last, News) else last
        if isinstance(error, StructuredError):
            raise ApiError(400, str(error), self.form, "invalid_value")
        if error is not None:
            raise ApiError(500, f"the request failed: {type(error).__name__}: {error}", code="generation_failed")
        return None

    async def written(self, made: Iterator[bytes], entries: int) -> list[bytes]:
        """All that ``made`` makes of so many entries; by turns with other clients if that takes time. Raises
        ``Left``."""
        if entries <= _FEW:
            return list(made)
        parts = await self._turns.pieces(self._client, made, lambda: self.left)
        if self.left:
            raise Left
        return parts

    def _add(self, entry: Any) -> None:
        self._ahead.extend(entry if isinstance(entry, list) else [entry])

    def close(self) -> None:
        """Whatever has become of it, nothing is left of the job."""
        self._watch.cancel()
        self.worker.cancel(self.job)
