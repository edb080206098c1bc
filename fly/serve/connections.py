"""Connections: how many there may be, and what one may take before its request has come in. Knows nothing of endpoints.

uvicorn waits for a request's headers as long as the client likes, reads any number of them, and accepts connections
until no file descriptor is left. Here a request has its time from its first byte on (a connection that says nothing:
from its start), and so many bytes besides its body; requests that take several reads take turns. Where too many
connections are open, the one that has waited longest for its request gives way to the newcomer.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fly.serve.errors import error_body

__all__ = ["HOLD", "Connection", "Crowd", "room_for"]

_SPARE = 16  # connections that are for health checks and metrics alone
# Bytes read at once: of headers and chunks, which may be many and small, and of a body in one piece.
_AT_ONCE, _IN_ONE = 2**10, 2**16
_READERS = 8  # connections, of those in the middle of a request, that are read from in one turn of the event loop
_HEAD, _HEADERS = 2**15, 128  # bytes of a request's headers, how many these are,
_BETWEEN = 2**12  # and besides as many as it has, of sizes and extensions of its body's chunks and of what follows them
# What still comes of a refused request is thrown away, with one read in so many seconds. The connection is kept for a
# while, so that no reset takes the answer with it.
_PAUSE, _AFTER = 0.05, 2.0
HOLD = 0.5  # seconds until a body in chunks hears that it is refused: to send it again and again must not pay


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
        self._resting: deque[Connection] = deque()

    def enter(self, connection: Connection) -> None:
        self.open.add(connection)
        self.waiting[connection] = None
        if len(self.open) > self.limit:
            next(iter(self.waiting)).give_up()

    def leave(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.waiting.pop(connection, None)

    def rest(self, connection: Connection) -> None:
        """Read no more from it until others in the middle of a request had their turn."""
        connection.flow.rest()
        if not self._resting:
            connection.loop.call_soon(self._wake)
        self._resting.append(connection)

    def _wake(self) -> None:
        for _ in range(min(_READERS, len(self._resting))):
            (connection := self._resting.popleft()).flow.wake()
        if self._resting:
            connection.loop.call_soon(self._wake)

    def full(self) -> bool:
        """Whether so many requests are being answered that no more can be taken."""
        return len(self.open) - len(self.waiting) > self.limit - min(_SPARE, self.limit // 2)


class _Flow(FlowControl):
    """Reads no further requests while some that have come in wait for their turn, nor while the connection rests."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline, self._resting = pipeline, False

    def resume_reading(self) -> None:
        if self._resting:
            self.read_paused = False
        elif not self._pipeline:
            super().resume_reading()

    def rest(self) -> None:
        self._resting = True
        self._transport.pause_reading()

    def wake(self) -> None:
        self._resting = False
        if not self.read_paused:
            self._transport.resume_reading()


class Connection(HttpToolsProtocol):
    """One connection, which its ``Crowd`` knows of.

    The parser refuses what another server may read differently: a length beside chunks or given twice, lines that end
    otherwise, blanks around names. Trailers are not headers, and no other protocol is spoken.
    """

    def __init__(self, crowd: Crowd, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "full": crowd.full}  # for the guard
        self._crowd = crowd
        self._begun = False  # whether anything of the awaited request has come in,
        self._headed = False  # all of its headers,
        self._whole = True  # all of it
        self._chunked = False  # whether its body has no length
        self._left = 0  # bytes that have to come of a body of known length
        self._wanted = False  # whether the application has been left to ask for that
        self._refused = False  # whether nothing more is read
        self._around, self._most = 0, _HEAD  # its bytes so far besides its body, and how many there may be
        self._parts: list[bytes] = []  # of a body, that one read brought: chunks may be many
        self._cycles: list[RequestResponseCycle] = []  # requests that are answered, or wait for it
        self._clock: asyncio.TimerHandle | None = None

    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        transport.max_size = _AT_ONCE  # type: ignore[attr-defined]  # of asyncio's own event loop
        self._crowd.enter(self)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._stop_clock()
        self._tell()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._refused or self._is_unwanted():
            self.transport.max_size = _IN_ONE  # type: ignore[attr-defined]
            self.flow.rest()
            self.loop.call_later(_PAUSE, self.flow.wake)
            return
        if not self._begun and self in self._crowd.waiting:
            self._begun = True
            if self._clock is None:  # that of a new connection goes on
                self._start_clock()
        self._around += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
            self._hand_over()
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("")
            return
        # No more than the rest of a body, behind which there may be a thousand requests.
        self.transport.max_size = min(_IN_ONE, max(_AT_ONCE, self._left))  # type: ignore[attr-defined]
        if self._around > self._most:
            self._refused = True
            self._stop_clock()
            self._tell()
            what = "Request Header Fields Too Large", "too many headers, or too small chunks"
            self.loop.call_later(HOLD, self._refuse, 431, *what, _AFTER)
        elif self._whole:
            self._crowd.waiting.pop(self, None)
            self._stop_clock()
        elif self._chunked and self._headed and not self._wanted:
            self._wanted = True
            self.flow.pause_reading()  # until the application asks for the body, and has found nothing wrong
        else:
            self._crowd.rest(self)

    def _is_unwanted(self) -> bool:
        """Whether more of a body in chunks comes after the answer has begun: the request was refused before."""
        return self._chunked and not self._whole and self.cycle is not None and self.cycle.response_started

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes the rest for another protocol. Read the request again, as if it had not asked for one.
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this is no proxy") from None
            version = self.parser.get_http_version().encode()
            head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
            head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join(head) + b"\r\n\r\n" + data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headed = self._whole = self._chunked = self._wanted = False
        self._most = _HEAD

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # else it is a trailer
            super().on_header(name, value)
            if len(self.headers) > _HEADERS:
                raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._headed, self._around, self._most = True, 0, _BETWEEN
            self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
            self._left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
            super().on_headers_complete()
            self._cycles = [*(each for each in self._cycles if not each.response_complete), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def _hand_over(self) -> None:
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            self._around -= 2 * len(body)
            self._left -= len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._hand_over()
        if self._headed:
            self._whole, self._around, self._left = True, 0, 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or (self._whole and not self.cycle.response_complete):
            return  # the next request is there already
        self._crowd.waiting[self] = None  # for the next request, or the rest of this one
        self._begun = not self._whole
        if self._begun:
            self._start_clock()

    def give_up(self) -> None:
        """Close it at once, in favour of others."""
        self._crowd.leave(self)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", "this is no HTTP request, or one that may be read in two ways")

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
        if self._begun and not self._headed:
            self._refuse(408, "Request Timeout", f"the request did not come in within {self._crowd.patience:g} s")
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        # else the guard waits for a body, and says so when it is late

    def _refuse(self, status: int, phrase: str, message: str, after: float = 0.0) -> None:
        """Answer with an error, unless another answer has begun, and close the connection ``after`` some seconds."""
        if self.transport.is_closing():
            return
        if not self.pipeline and not any(each.response_started for each in self._cycles if not each.response_complete):
            body = json.dumps(error_body(message, "invalid_request_error")).encode()
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        else:
            after = 0.0
        self._tell()
        if after:
            self.transport.write_eof()
            self.loop.call_later(after, self.transport.close)
        else:
            self.transport.close()

    def _tell(self) -> None:
        """The application hears that nobody waits any more."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
