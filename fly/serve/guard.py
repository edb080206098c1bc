"""The checks that every request passes before the application sees it: host, key, limits of size and time."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fly.serve.clients import Client, Clients, Shares, wrong_with_headers
from fly.serve.connections import HOLD
from fly.serve.errors import ApiError
from fly.serve.logs import escaped
from fly.serve.origins import Origins
from fly.serve.settings import Settings

__all__ = ["Guard"]

log = logging.getLogger(__name__)
OPEN = ("/", "/health", "/ready", "/metrics", "/version", "/openapi.json")


_LINGER, _UNWANTED = 2.0, 2**24  # how long, and how many bytes, the body of a refused request is still read
# All bodies together may take the memory of this many bodies of the largest size. Small ones are accepted beyond that.
_BODIES = 64
_SMALL = 2**14


class _Stalled(Exception):
    """The client does not read the data that it is sent."""


class Guard:
    """Middleware that checks requests.

    Every request gets an id. Its headers must be unambiguous. It must use an allowed host name and come from an allowed
    page (``Origins``). If there are API keys, it must have one (``Authorization: Bearer ...``), except on open paths.
    Only then is the body read, which must be neither too long nor too slow. The application finds the client
    (``Client``) as ``client`` in the request's state. HEAD is answered like GET, without the body.

    Args:
        app: the application.
        settings: the settings of the server.
        clients: identifies the client of a request.
        requests: counts admitted requests by client until their answers are sent (except open paths).
        refused: called with the status of every error.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, clients: Clients, requests: Shares, refused: Callable[[int], None]
    ) -> None:
        self.app = app
        self.clients = clients
        self.requests = requests
        self.refused = refused
        self.max_body, self.access_log = settings.max_body, settings.access_log
        self.read_timeout, self.write_timeout = settings.read_timeout, settings.write_timeout
        self.bodies = Shares(_BODIES * settings.max_body)  # bytes in memory
        self._origins = Origins(settings.host, settings.allowed_hosts, settings.cors_origins, keys=clients.keyed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = uuid.uuid4().hex
        start = time.monotonic()
        status = 499  # a client that left gets no answer
        head, complete = scope["method"] == "HEAD", False
        address = (scope.get("client") or ("",))[0]
        client = Client(address, escaped(address[:100]))

        async def answer(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                extra_headers = ((b"x-request-id", name.encode()), (b"x-content-type-options", b"nosniff"))
                message = {**message, "headers": [*message.get("headers", ()), *extra_headers]}
                if (status := message["status"]) >= 400:
                    self.refused(status)
            elif head:
                message = {**message, "body": b""}
            try:
                async with asyncio.timeout(self.write_timeout):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None
            complete = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            client = self._client(scope, address)
            await self._serve({**scope, "method": "GET"} if head else scope, client, receive, answer)
        except ApiError as error:
            await self._refuse(error, scope, receive, answer)
        except _Stalled:
            log.warning("a reader took nothing for %g s; its connection is closed", self.write_timeout)
        except Exception:
            if not complete:
                raise
            # The answer has been sent. If this raised, uvicorn would close a connection that the client still uses.
            log.exception("a request was answered with status %d", status)
        finally:
            if self.access_log:
                line = f'{scope["method"]} {quote(scope["path"])}" {status} {time.monotonic() - start:.3f} s'
                log.info('%s key %s "%s id %s', client.address or "-", (client.key or "-")[:12], line, name)

    def _client(self, scope: Scope, address: str) -> Client:
        """Check the headers and return the client. Raises ``ApiError``."""
        if problem := wrong_with_headers(scope["method"], scope["http_version"], scope["headers"]):
            raise ApiError(400, problem, code="invalid_headers")
        headers = dict(scope["headers"])
        if (reason := self._origins.refuse(scope["method"], headers)) is not None:
            raise ApiError(403, reason, code="not_allowed")
        try:
            client = self.clients.identify(address, headers)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_headers") from None
        if self.clients.keyed and client.key is None and scope["path"] not in OPEN:
            raise ApiError(401, "no valid API key; give one as 'Authorization: Bearer ...'", code="invalid_api_key")
        return client

    async def _serve(self, scope: Scope, client: Client, receive: Receive, answer: Send) -> None:
        """Read the body and call the application. Raises ``ApiError`` only before the application is called."""
        state = scope.setdefault("state", {})
        state["client"] = client
        counted, held_bytes = int(scope["path"] not in OPEN), [0]
        if counted:
            if state.get("full", bool)():
                raise _full()
            if not self.requests.has_room(client.name, 1):
                message = "too many requests of one client are being answered; try again in 1 s"
                raise ApiError(429, message, code="client_limit", retry_after=1)
        self.requests.take(client.name, counted)
        try:
            messages = [await self._body(scope, client, held_bytes, receive)]
            if messages[0]["type"] == "http.disconnect":
                return

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, replay, answer)
        finally:
            self.requests.take(client.name, -counted)
            self.bodies.take(client.name, -held_bytes[0])

    async def _body(self, scope: Scope, client: Client, held: list[int], receive: Receive) -> Message:
        """Return the whole body as one message, or a disconnect. ``held`` counts its bytes. Raises ``ApiError``."""
        too_long = ApiError(413, f"the body has more than {self.max_body} bytes", code="too_large")
        if _length(scope) > self.max_body:
            raise too_long
        parts = []
        try:
            async with asyncio.timeout(self.read_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return message
                    parts.append(part := message.get("body", b""))
                    if held[0] + len(part) > self.max_body:
                        raise too_long
                    if held[0] + len(part) > _SMALL and not self.bodies.has_room(client.name, len(part)):
                        raise _full()
                    held[0] += len(part)
                    self.bodies.take(client.name, len(part))
                    if not message.get("more_body"):
                        return {"type": "http.request", "body": b"".join(parts), "more_body": False}
        except TimeoutError:
            timeout_message = f"the body did not come in within {self.read_timeout:g} s"
            raise ApiError(408, timeout_message, code="timeout") from None

    async def _refuse(self, error: ApiError, scope: Scope, coming: Receive, send: Send) -> None:
        """Answer with an error. Then read the rest of the body for a moment and drop it: to close a connection with
        unread data resets it, and the client might lose the answer."""
        response = error.response()
        has_unread = error.status != 408 and (_length(scope) > 0 or _chunked(scope))
        if has_unread and _chunked(scope):
            await asyncio.sleep(HOLD)
        if has_unread or error.status in (400, 408):  # it may be unclear where the next request begins
            response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": has_unread})
        if not has_unread:
            return
        bytes_left = _UNWANTED
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while (message := await coming()).get("more_body") and bytes_left > 0:
                    bytes_left -= len(message.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _full() -> ApiError:
    message = "too many requests are being answered; try again in 1 s"
    return ApiError(503, message, code="too_many_requests", retry_after=1)


def _length(scope: Scope) -> int:
    """Return the length of the body, from the headers."""
    length = next((value.strip() for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length[:20]) if length.isdigit() else 0


def _chunked(scope: Scope) -> bool:
    return any(name == b"transfer-encoding" for name, _ in scope["headers"])
