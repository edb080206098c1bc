"""What every request passes before the application sees it: a name, a key, and limits of size and time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fly.serve.answers import error_body

__all__ = ["Guard"]

log = logging.getLogger(__name__)
OPEN = ("/", "/health", "/ready", "/metrics", "/version", "/openapi.json")


_LINGER = 2.0  # seconds that a body which is too long is still read


class _Stalled(Exception):
    """A reader does not read."""


class Guard:
    """Middleware.

    Args:
        app: what it guards.
        keys: API keys, one of which must be borne (``Authorization: Bearer ...``) on all but the open paths; none for
            no such rule. They are compared in constant time.
        max_body, read_timeout: bytes of a body, and seconds for all of it to come in.
        write_timeout: seconds for a reader to take what was written; then the connection is given up.
        refused: is given the status of every error.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        max_body: int,
        read_timeout: float,
        write_timeout: float,
        refused: Callable[[int], None],
    ) -> None:
        self.app, self.max_body, self.refused = app, max_body, refused
        self.read_timeout, self.write_timeout = read_timeout, write_timeout
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = uuid.uuid4().hex.encode()
        headers = dict(scope["headers"])

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name)]}
                if message["status"] >= 400:
                    self.refused(message["status"])
            try:
                async with asyncio.timeout(self.write_timeout):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None

        if self._digests and scope["path"] not in OPEN and not self._known(headers.get(b"authorization", b"")):
            message = "no valid API key; give one as 'Authorization: Bearer ...'"
            body = error_body(message, "invalid_request_error", None, "invalid_api_key")
            await _refuse(answer, 401, body, (b"www-authenticate", b"Bearer"))
            return
        try:
            first = await self._body(headers, receive)
        except TimeoutError:
            body = error_body(f"the body did not come in within {self.read_timeout:g} s", "timeout", None, "timeout")
            await _refuse(answer, 408, body, (b"connection", b"close"))
            return
        if first is None:
            body = error_body(
                f"the body has more than {self.max_body} bytes", "invalid_request_error", None, "too_large"
            )
            await _refuse(answer, 413, body, (b"connection", b"close"), receive)
            return
        ahead = [first]

        async def replay() -> Message:
            return ahead.pop() if ahead else await receive()

        try:
            await self.app(scope, replay, answer)
        except _Stalled:
            log.warning("a reader took nothing for %g s; its connection is closed", self.write_timeout)

    def _known(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever fits
        return scheme.lower() == b"bearer" and any(found)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> Message | None:
        """The whole body as one message; None if it is too long. A client that left has none."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body:
            return None
        parts, size = [], 0
        async with asyncio.timeout(self.read_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return message
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > self.max_body:
                    return None
                if not message.get("more_body"):
                    return {"type": "http.request", "body": b"".join(parts), "more_body": False}


async def _refuse(
    send: Send, status: int, body: dict[str, object], header: tuple[bytes, bytes], coming: Receive | None = None
) -> None:
    """Answer with an error. What is still ``coming`` is read for a moment and thrown away: a connection that is closed
    before is reset, and with it the answer may be lost."""
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()), header]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": coming is not None})
    if coming is None:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while (await coming()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
