"""Connections on which no whole request has come in: how many there may be, and how long they may take. Knows nothing
of endpoints.

uvicorn waits for a request's headers as long as the client likes and accepts connections until no file descriptor is
left. Here a request has its time from its first byte on (a connection that says nothing: from its start), and where
too many are open, the one that has waited longest for its request gives way to the newcomer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fly.serve.answers import error_body

__all__ = ["Connection", "Crowd", "Sparing", "room_for"]

_SPARE = 16  # connections that are for health checks and metrics alone
_AT_ONCE = 2**13  # bytes read in one turn of the event loop: in chunks of one byte they take it some 30 ms
_WHOLE = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)  # states of a client whose request has come in


def room_for(wanted: int) -> tuple[int, int]:
    """How many connections to allow, at most ``wanted``, and how many to accept at a time, under the process's limit of
    file descriptors. Raises ``ValueError`` if that leaves no room."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return wanted, 2048
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return wanted, 2048
    taken = len(os.listdir("/dev/fd"))
    at_a_time = min(2048, max(4, most // 16))
    # Those that are given up are closed a few turns of the event loop later, in which more are accepted.
    room = most - taken - 4 * at_a_time - 16
    if room < 2 * _SPARE:
        raise ValueError(f"{most} file descriptors, {taken} of them taken, are too few for a server; raise 'ulimit -n'")
    return min(wanted, room), at_a_time


class Crowd:
    """All connections of one server.

    Args:
        limit: so many may be open; of which the last few are for the paths that need no key.
        patience: seconds for all of a request to come in.
    """

    def __init__(self, limit: int, patience: float) -> None:
        self.limit, self.patience = limit, patience
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}  # for a request, or the rest of one; the longest first

    def enter(self, connection: Connection) -> None:
        self.open.add(connection)
        self.waiting[connection] = None
        if len(self.open) > self.limit:
            next(iter(self.waiting)).give_up()

    def leave(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.waiting.pop(connection, None)

    def full(self) -> bool:
        """Whether so many requests are being answered that no more can be taken."""
        return len(self.open) - len(self.waiting) > self.limit - min(_SPARE, self.limit // 2)


class Connection(H11Protocol):
    """One connection, which its ``Crowd`` knows of."""

    def __init__(self, crowd: Crowd, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "full": crowd.full}  # for the guard
        self._crowd = crowd
        self._begun = False  # whether anything of a request has come in
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _AT_ONCE  # type: ignore[attr-defined]  # of asyncio's own event loop
        self._crowd.enter(self)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._begun and self in self._crowd.waiting:
            self._begun = True
            if self._clock is None:  # that of a new connection goes on
                self._start_clock()
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.conn.their_state not in _WHOLE:  # the next request is not there, or the rest of this one
            self._crowd.waiting[self] = None
            self._begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
            if self._begun:
                self._start_clock()

    def give_up(self) -> None:
        """Close it at once, in favour of others."""
        self._crowd.leave(self)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(400, "Bad Request", "this is no HTTP request, or its headers are too long")

    def _look(self) -> None:
        if self.conn.their_state in _WHOLE:
            self._crowd.waiting.pop(self, None)
            self._stop_clock()

    def _start_clock(self) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(self._crowd.patience, self._late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        self._clock = None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self._begun:
            self._refuse(408, "Request Timeout", f"the request did not come in within {self._crowd.patience:g} s")
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        # else the guard waits for a body, and says so when it is late

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        body = json.dumps(error_body(message, "invalid_request_error")).encode()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        if self.cycle is not None:  # the application hears that it is over
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class Sparing(logging.Filter):
    """Lets a few records of each kind through in a while, and says how many there would have been."""

    def __init__(self, most: int = 5, seconds: float = 10.0) -> None:
        super().__init__()
        self.most, self.seconds = most, seconds
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)), time.monotonic()
        since, count = self._counts.get(kind, (now, 0))
        if now - since > self.seconds:
            if count > self.most:
                record.msg = f"{record.msg} ({count - self.most} more like this in the last {now - since:.0f} s)"
            since, count = now, 0
        if len(self._counts) > 1000:  # kinds that never come again
            self._counts.clear()
        self._counts[kind] = since, count + 1
        return count < self.most
