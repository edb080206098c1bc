"""Slow work of many clients in a few threads, by turns. Knows nothing of HTTP or engines.

What takes more than a moment (reading a large body, encoding a text, compiling a form, writing a large answer) would
hold the event loop, and with it every other client. Here it waits for its turn, client by client.
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
_SLICE = 0.03  # seconds of one turn, for work that comes in pieces


class Busy(Exception):
    """A client has too much work waiting."""


class Turns:
    """Threads that work for clients. The next piece of work belongs to the client with the fewest pieces at work; among
    equals, to the client that has used the least time so far. No client takes the last thread.

    All of it is called on one event loop.

    Args:
        name: of the threads.
        threads: how many, 2 or more.
        most: pieces of work that one client may have waiting.
    """

    def __init__(self, name: str, threads: int, most: int) -> None:
        self.pool = ThreadPoolExecutor(threads, name)
        self.most = most
        self._free, self._each = threads, threads - 1
        self._waiting: dict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        self._working: Counter[str] = Counter()
        self._used: dict[str, float] = {}  # seconds; of clients that wait or have something at work

    async def run(self, client: str, work: Callable[[], T], limited: bool = True) -> T:
        """What ``work`` gives, in a thread, when its turn has come. Cancelled before that, it never begins. Raises
        ``Busy`` if the client has too much waiting (and this is ``limited``)."""
        queue = self._waiting.setdefault(client, deque())
        if limited and len(queue) >= self.most:
            raise Busy
        self._used.setdefault(client, min(self._used.values(), default=0.0))  # who was not here has nothing saved up
        entry = work, asyncio.get_running_loop().create_future()
        queue.append(entry)
        self._begin()
        try:
            return await entry[1]
        finally:
            with suppress(ValueError):
                queue.remove(entry)
            self._forget(client)

    async def pieces(self, client: str, made: Iterator[bytes], left: Callable[[], bool]) -> list[bytes]:
        """All that an iterator makes, a slice of time a turn; until the client has ``left``."""
        parts: list[bytes] = []

        def some() -> bool:
            end, found, goes_on = time.perf_counter() + _SLICE, [], False
            for part in made:
                found.append(part)
                if goes_on := time.perf_counter() > end:
                    break
            parts.append(b"".join(found))
            return goes_on

        while not left() and await self.run(client, some, limited=False):
            pass
        return parts

    def close(self) -> None:
        """Begin nothing more."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        while self._free:
            ready = [client for client, queue in self._waiting.items() if queue and self._working[client] < self._each]
            if not ready:
                return
            client = min(ready, key=lambda each: (self._working[each], self._used[each]))
            work, future = self._waiting[client].popleft()
            self._waiting[client] = self._waiting.pop(client)  # it is the last now, of several that are alike
            self._free -= 1
            self._working[client] += 1
            loop = asyncio.get_running_loop()
            self.pool.submit(self._work, work, partial(self._over, client, future), loop)

    def _work(self, work: Callable[[], Any], over: Callable[..., None], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread."""
        start, result, error = time.perf_counter(), None, None
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
        """A client that has nothing here."""
        if not self._waiting.get(client):
            self._waiting.pop(client, None)
            if not self._working[client]:
                self._used.pop(client, None)
