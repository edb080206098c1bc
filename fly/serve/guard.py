"""What every request passes before the application sees it: a name, a key, and limits of size and time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fly.serve.answers import error_body
from fly.serve.origins import Origins
from fly.serve.settings import Settings

__all__ = ["Guard"]

log = logging.getLogger(__name__)
OPEN = ("/", "/health", "/ready", "/metrics", "/version", "/openapi.json")


_LINGER = 2.0  # seconds that a body which is too long is still read


# All bodies together may be as large as so many of the largest; those of a few bytes are taken even so.
_BODIES = 64
_SMALL = 2**14
_FULL = error_body(
    "too many requests are being answered; try again in 1 s", "service_unavailable_error", None, "too_many_requests"
)


class _Full(Exception):
    """There is no room for the body."""


class _Stalled(Exception):
    """A reader does not read."""


class Guard:
    """Middleware.

    Every request gets an id. It must use an allowed name and come from an allowed page (``Origins``), and bear one of
    the API keys, if there are any, except on the open paths (``Authorization: Bearer ...``; keys are compared in
    constant time). Its body must not be too long, or too slow. HEAD is answered as GET is, without the body.

    Args:
        app: what it guards.
        settings: those of the server.
        refused: is given the status of every error.
    """

    def __init__(self, app: ASGIApp, settings: Settings, refused: Callable[[int], None]) -> None:
        self.app, self.refused = app, refused
        self.max_body, self.access_log = settings.max_body, settings.access_log
        self.read_timeout, self.write_timeout = settings.read_timeout, settings.write_timeout
        self._held = 0  # bytes of bodies that came in, of requests that are not answered yet
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._origins = Origins(
            settings.host, settings.allowed_hosts, settings.cors_origins, keys=bool(settings.api_keys)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name, start, status = uuid.uuid4().hex, time.monotonic(), 499  # a client that left gets no answer
        head, whole = scope["method"] == "HEAD", False

        async def answer(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                more = ((b"x-request-id", name.encode()), (b"x-content-type-options", b"nosniff"))
                message = {**message, "headers": [*message.get("headers", ()), *more]}
                if (status := message["status"]) >= 400:
                    self.refused(status)
            elif head:
                message = {**message, "body": b""}
            try:
                async with asyncio.timeout(self.write_timeout):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None
            whole = message["type"] == "http.response.body" and not message.get("more_body")

        headers = dict(scope["headers"])
        key = self._key(headers.get(b"authorization", b""))
        held = [0]
        try:
            await self._serve({**scope, "method": "GET"} if head else scope, headers, key, held, receive, answer)
        except _Stalled:
            log.warning("a reader took nothing for %g s; its connection is closed", self.write_timeout)
        except Exception:
            if not whole:
                raise
            # It has its answer. uvicorn would close the connection, which the client keeps for its next request.
            log.exception("a request was answered with status %d", status)
        finally:
            self._held -= held[0]
            if self.access_log:
                client, whose = (scope.get("client") or ("-",))[0], "-" if key is None else key.hex()[:12]
                line = f'{scope["method"]} {quote(scope["path"])}" {status} {time.monotonic() - start:.3f} s'
                log.info(f'{client} key {whose} "{line} id {name}')

    async def _serve(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        key: bytes | None,
        held: list[int],
        receive: Receive,
        answer: Send,
    ) -> None:
        """Answers, with an error or by the application. ``held`` takes the bytes of the body."""
        if (reason := self._origins.refuse(scope["method"], headers)) is not None:
            body = error_body(reason, "invalid_request_error", None, "not_allowed")
            await _refuse(answer, 403, body)
            return
        if self._digests and key is None and scope["path"] not in OPEN:
            message = "no valid API key; give one as 'Authorization: Bearer ...'"
            body = error_body(message, "invalid_request_error", None, "invalid_api_key")
            await _refuse(answer, 401, body, (b"www-authenticate", b"Bearer"))
            return
        try:
            first = await self._body(headers, held, receive)
        except _Full:
            await _refuse(answer, 503, _FULL, (b"connection", b"close"), (b"retry-after", b"1"), coming=receive)
            return
        except TimeoutError:
            body = error_body(f"the body did not come in within {self.read_timeout:g} s", "timeout", None, "timeout")
            await _refuse(answer, 408, body, (b"connection", b"close"))
            return
        if first is None:
            body = error_body(
                f"the body has more than {self.max_body} bytes", "invalid_request_error", None, "too_large"
            )
            await _refuse(answer, 413, body, (b"connection", b"close"), coming=receive)
            return
        if scope["path"] not in OPEN and scope.get("state", {}).get("full", bool)():
            await _refuse(answer, 503, _FULL, (b"connection", b"close"), (b"retry-after", b"1"))
            return
        ahead = [first]

        async def replay() -> Message:
            return ahead.pop() if ahead else await receive()

        await self.app(scope, replay, answer)

    def _key(self, header: bytes) -> bytes | None:
        """The digest of the key that a request bears; None if it is none of ours."""
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever fits
        return digest if scheme.lower() == b"bearer" and any(found) else None

    async def _body(self, headers: dict[bytes, bytes], held: list[int], receive: Receive) -> Message | None:
        """The whole body as one message; None if it is too long. A client that left has none. Raises ``_Full``."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body:
            return None
        parts = []
        async with asyncio.timeout(self.read_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return message
                parts.append(message.get("body", b""))
                held[0] += len(parts[-1])
                self._held += len(parts[-1])
                if held[0] > self.max_body:
                    return None
                if held[0] > _SMALL and self._held > _BODIES * self.max_body:
                    raise _Full
                if not message.get("more_body"):
                    return {"type": "http.request", "body": b"".join(parts), "more_body": False}


async def _refuse(
    send: Send, status: int, body: dict[str, object], *more: tuple[bytes, bytes], coming: Receive | None = None
) -> None:
    """Answer with an error. What is still ``coming`` is read for a moment and thrown away: a connection that is closed
    before is reset, and with it the answer may be lost."""
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": coming is not None})
    if coming is None:
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while (await coming()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
