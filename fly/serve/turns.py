"""Runs slow work of many clients in a few threads, by turns. Knows nothing of HTTP or engines.

Work that takes more than a moment (reading a large body, encoding a text, compiling a grammar, writing a large answer)
would block the event loop and with it every client. Here such work waits for its client's turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

__all__ = ["Busy", "Turns"]

T = TypeVar("T")
_SLICE = 0.03  # seconds per turn of work that can be divided


class Busy(Exception):
    """A client has too much work waiting."""


class Turns:
    """Threads that work for clients. The next piece of work is taken from the client with the fewest running pieces
    and, among equals, from the client that has used the least time. No client may use all threads.

    Call all methods on the same event loop.

    Args:
        name: prefix of the threads' names.
        threads: number of threads, at least 2.
        most: pieces of work that one client may have in the queue.
    """

    def __init__(self, name: str, threads: int, most: int) -> None:
        self.pool = ThreadPoolExecutor(threads, name)
        self.most = most
        self._free, self._each = threads, threads - 1
        self._waiting: dict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        self._working: Counter[str] = Counter()
        self._used: dict[str, float] = {}  # seconds used by clients with work in the queue or running

    async def run(self, client: str, work: Callable[[], T], limited: bool = True) -> T:
        """Run ``work`` in a thread when it is the client's turn, and return its result. If the caller is cancelled
        before that, the work never begins. Raises ``Busy`` if ``limited`` and the client has too much in the queue."""
        queue = self._waiting.setdefault(client, deque())
        if limited and len(queue) >= self.most:
            raise Busy
        self._used.setdefault(client, min(self._used.values(), default=0.0))  # as much as the client that used least
        entry = work, asyncio.get_running_loop().create_future()
        queue.append(entry)
        self._begin()
        try:
            return await entry[1]
        finally:
            with suppress(ValueError):
                queue.remove(entry)
            self._forget(client)

    async def collect(self, client: str, pieces: Iterator[bytes], left: Callable[[], bool]) -> list[bytes]:
        """Collect all ``pieces``, for one slice of time in each turn. Stop early once ``left()`` is true."""
        parts: list[bytes] = []

        def collect_slice() -> bool:
            end = time.perf_counter() + _SLICE
            batch = []
            goes_on = False
            for part in pieces:
                batch.append(part)
                if goes_on := time.perf_counter() > end:
                    break
            parts.append(b"".join(batch))
            return goes_on

        while not left() and await self.run(client, collect_slice, limited=False):
            pass
        return parts

    def close(self) -> None:
        """Begin no more work."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._free:
            clients = [
                client for client, queue in self._waiting.items() if queue and self._working[client] < self._each
            ]
            if not clients:
                return
            client = min(clients, key=lambda each: (self._working[each], self._used[each]))
            work, future = self._waiting[client].popleft()
            self._waiting[client] = self._waiting.pop(client)  # this client is the last among equals next time
            self._free -= 1
            self._working[client] += 1
            loop = asyncio.get_running_loop()
            self.pool.submit(self._work, work, partial(self._over, client, future), loop)

    def _work(self, work: Callable[[], Any], over: Callable[..., None], loop: asyncio.AbstractEventLoop) -> None:
        """Run one piece of work; called in a thread."""
        start = time.perf_counter()
        result = None
        error = None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(over, time.perf_counter() - start, result, error)

    def _over(
        self, client: str, future: asyncio.Future[Any], seconds: float, result: Any, error: BaseException | None
    ) -> None:
        self._free += 1
        self._working -= Counter([client])
        self._used[client] = self._used.get(client, 0.0) + seconds
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._forget(client)
        self._begin()

    def _forget(self, client: str) -> None:
        """Drop the record of a client that has no work left."""
        if not self._waiting.get(client):
            self._waiting.pop(client, None)
            if not self._working[client]:
                self._used.pop(client, None)
