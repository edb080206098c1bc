"""Connections: how many may be open, and what each may use before its request is complete. Knows nothing of endpoints.

uvicorn waits for headers without a time limit, reads any number of them, and accepts connections until no file
descriptor is left. Here a request has a time limit from its first byte (for a new connection: from its start), and a
limit of bytes besides its body. Requests that need several reads are read in turns. If too many connections are open,
the one that has waited longest for its request is closed in favour of the new one.
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

_SPARE = 16  # connections reserved for health checks and metrics
# Bytes per read: small for headers and chunks, which may be many and small; large for a body with a length.
_AT_ONCE, _IN_ONE = 2**10, 2**16
_READERS = 8  # connections in the middle of a request that are read in one turn of the event loop
_HEAD, _HEADERS = 2**15, 128  # limits of a request's headers: bytes and number
_BETWEEN = 2**12  # limit of bytes besides headers and body: sizes and extensions of chunks, and trailers
# After a refusal, the rest of the request is read and thrown away, once in _PAUSE seconds, which slows down senders of
# bad requests. The connection stays open for _AFTER seconds, so that no reset destroys the answer.
_PAUSE, _AFTER = 0.05, 2.0
HOLD = 0.5  # seconds to wait before refusing a body in chunks, so that sending it again and again does not pay


def room_for(wanted: int) -> tuple[int, int]:
    """Return how many connections to allow, at most ``wanted``, and how many to accept at a time, given the process's
    limit of file descriptors. Raises ``ValueError`` if there is no room."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return wanted, 2048
    file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if file_limit == resource.RLIM_INFINITY:
        return wanted, 2048
    open_files = len(os.listdir("/dev/fd"))
    at_a_time = min(2048, max(4, file_limit // 16))
    # Connections that give way are closed a few turns of the event loop later, and meanwhile others are accepted.
    room = file_limit - open_files - 4 * at_a_time - 16
    if room < 2 * _SPARE:
        raise ValueError(
            f"{file_limit} file descriptors, {open_files} of them taken, are too few for a server; raise 'ulimit -n'"
        )
    return min(wanted, room), at_a_time


class Crowd:
    """All connections of one server.

    Args:
        limit: number of connections that may be open. The last few are reserved for the paths that need no key.
        patience: seconds within which a request must be complete.
    """

    def __init__(self, limit: int, patience: float) -> None:
        self.limit, self.patience = limit, patience
        self.open: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}  # those without a complete request, oldest first
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
        """Stop reading from this connection until others in the middle of a request had their turn."""
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
        """Whether the server is answering as many requests as it can."""
        return len(self.open) - len(self.waiting) > self.limit - min(_SPARE, self.limit // 2)


class _Flow(FlowControl):
    """Pauses reading while earlier requests of the connection wait, and while the connection waits for its turn."""

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
    """One connection, which its ``Crowd`` counts.

    The parser refuses what another server might read differently: a length with chunks or given twice, unusual line
    ends, blanks around names. Trailers do not count as headers, and other protocols are not accepted.
    """

    def __init__(self, crowd: Crowd, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "full": crowd.full}  # for the guard
        self._crowd = crowd
        self._begun = False  # whether a byte of the awaited request has come in
        self._headed = False  # whether all headers of that request have come in
        self._complete = True  # whether the whole request has come in
        self._chunked = False  # whether its body comes in chunks
        self._left = 0  # bytes of a body of known length that have not come yet
        self._wanted = False  # whether reading a body in chunks waits until the application asks for it
        self._refused = False  # whether the request was refused, so that the rest is dropped
        self._overhead, self._most = 0, _HEAD  # bytes so far besides the body, and their limit
        self._parts: list[bytes] = []  # parts of a body from one read: there may be many chunks
        self._cycles: list[RequestResponseCycle] = []  # requests that are being answered or wait for their turn
        self._clock: asyncio.TimerHandle | None = None

    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        transport.max_size = _AT_ONCE  # type: ignore[attr-defined]  # an attribute of asyncio's event loop
        self._crowd.enter(self)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._stop_clock()
        self._notify_application()
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
            if self._clock is None:  # a new connection's clock runs already
                self._start_clock()
        self._overhead += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
            self._deliver_parts()
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("")
            return
        # Read no further than the end of the body: a thousand requests may follow it.
        self.transport.max_size = min(_IN_ONE, max(_AT_ONCE, self._left))  # type: ignore[attr-defined]
        if self._overhead > self._most:
            self._refused = True
            self._stop_clock()
            self._notify_application()
            refusal = "Request Header Fields Too Large", "too many headers, or too small chunks"
            self.loop.call_later(HOLD, self._refuse, 431, *refusal, _AFTER)
        elif self._complete:
            self._crowd.waiting.pop(self, None)
            self._stop_clock()
        elif self._chunked and self._headed and not self._wanted:
            self._wanted = True
            self.flow.pause_reading()  # until the application has found nothing wrong and asks for the body
        else:
            self._crowd.rest(self)

    def _is_unwanted(self) -> bool:
        """Whether a body in chunks goes on after its answer began, because the request was refused."""
        return self._chunked and not self._complete and self.cycle is not None and self.cycle.response_started

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser treats the rest as another protocol. Parse the request again without its upgrade.
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this server is not a proxy") from None
            version = self.parser.get_http_version().encode()
            head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
            head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join(head) + b"\r\n\r\n" + data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._headed = self._complete = self._chunked = self._wanted = False
        self._most = _HEAD

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # otherwise it is a trailer
            super().on_header(name, value)
            if len(self.headers) > _HEADERS:
                raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._headed = True
            self._overhead = 0
            self._most = _BETWEEN
            self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
            self._left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
            super().on_headers_complete()
            self._cycles = [*(each for each in self._cycles if not each.response_complete), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def _deliver_parts(self) -> None:
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            self._overhead -= 2 * len(body)
            self._left -= len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._deliver_parts()
        if self._headed:
            self._complete = True
            self._overhead = 0
            self._left = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or (self._complete and not self.cycle.response_complete):
            return  # the next request has come in already
        self._crowd.waiting[self] = None  # it waits for the next request, or the rest of this one
        self._begun = not self._complete
        if self._begun:
            self._start_clock()

    def give_up(self) -> None:
        """Close the connection at once, in favour of others."""
        self._crowd.leave(self)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "Bad Request", "this is not an HTTP request, or an ambiguous one")

    def _start_clock(self) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(self._crowd.patience, self._time_out)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _time_out(self) -> None:
        self._clock = None
        if self.transport.is_closing():
            return
        if self._begun and not self._headed:
            self._refuse(408, "Request Timeout", f"the request did not come in within {self._crowd.patience:g} s")
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        # Otherwise the guard waits for the body, and reports that it is late.

    def _refuse(self, status: int, phrase: str, message: str, after: float = 0.0) -> None:
        """Answer with an error, unless an answer has begun. Close the connection ``after`` this many seconds."""
        if self.transport.is_closing():
            return
        if not self.pipeline and not any(each.response_started for each in self._cycles if not each.response_complete):
            body = json.dumps(error_body(message, "invalid_request_error")).encode()
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        else:
            after = 0.0
        self._notify_application()
        if after:
            self.transport.write_eof()
            self.loop.call_later(after, self.transport.close)
        else:
            self.transport.close()

    def _notify_application(self) -> None:
        """Tell the application that its client is gone."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
