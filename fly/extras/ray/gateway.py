"""The gateway: passes each HTTP request to a replica. If the replica is lost before anything was sent, another one gets
the request.

Of the endpoints, the gateway answers only ``/metrics`` itself. Replicas run the application of ``fly serve``, which
checks keys and limits and words errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fly.serve import Settings
from fly.serve.errors import ApiError

__all__ = ["Gateway", "conversation", "merged"]

_SCOPE = ("client", "headers", "http_version", "method", "path", "query_string", "raw_path", "root_path", "scheme")
_LOST = (RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError)  # a replica or its node is gone
_BEGINNING = 1024  # prompts with the same first characters (or tokens) go to the replica that may have them cached
_PROBE = 5.0  # seconds for which a probe waits for a replica
_BEYOND = 30.0  # seconds that the gateway waits after the replica's own time limit before it ends a request


def conversation(headers: dict[bytes, bytes], body: bytes) -> str:
    """Return a name for a request's conversation: requests with the same name should go to the same replica. It is the
    header ``x-session-id`` or, without one, a hash of how the request begins (a conversation up to the user's first
    message, or the first 1,024 characters of a prompt) and of its API key, since caches are shared among requests of
    one key. Empty for any other request."""
    if session := headers.get(b"x-session-id"):
        return session.decode("latin-1")
    try:
        request = json.loads(body)
        if isinstance(messages := request.get("messages"), list):
            # Later turns repeat the first ones, so these are the same in every request of a conversation.
            users = [place for place, each in enumerate(messages) if each.get("role") == "user"]
            beginning: object = messages[: users[0] + 1] if users else messages[:1]
        elif (beginning := request.get("prompt")) is not None:
            beginning = beginning[:_BEGINNING]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return ""  # the replica says what is wrong with the body
    if beginning is None:
        return ""
    identity = headers.get(b"authorization", b"") + json.dumps(beginning).encode()
    return hashlib.sha256(identity).hexdigest()


def merged(texts: dict[str, bytes]) -> bytes:
    """Merge the metrics of several replicas into one text. Each sample is labelled with its replica."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [each._replace(labels={"replica": replica, **each.labels}) for each in family.samples]
    registry = CollectorRegistry(auto_describe=False)

    class Found:
        def collect(self) -> list[Metric]:
            return list(families.values())

    registry.register(Found())
    return generate_latest(registry)


@serve.ingress()
class Gateway:
    """An ASGI application in an actor.

    Args:
        settings: the server's settings; its limits of size and time hold here too.
        retries: how many more replicas may get a request whose replica is lost.
        replicas: Ray's handle to the replicas.
    """

    def __init__(self, settings: Settings, retries: int, replicas: DeploymentHandle[Any]) -> None:
        self.settings = settings
        self.retries = retries
        self.replicas = replicas
        self.draining, self._open = False, 0
        self._heard = -_BEYOND  # when a replica last sent anything
        self._known: dict[str, bytes] = {}  # the metrics of each replica when all of them last answered
        self._asking: asyncio.Task[None] | None = None  # asks the replicas for their metrics
        self._registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"fly:gateway_{name}", text, registry=self._registry)

        self.taken = counter("requests", "Requests that were passed on.")
        self.answered = counter("answered", "Requests whose answer was sent to its end.")
        self.retried = counter("retried", "Times a request was given to another replica, since one was lost.")
        self.failed = counter("failed", "Requests that ended with an error because replicas were lost or full.")
        self.left = counter("left", "Requests whose client left.")

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                for moment in ("startup", "shutdown"):
                    await receive()
                    await send({"type": f"lifespan.{moment}.complete"})
            elif scope["type"] == "http":
                await self.run(scope, receive, send)

        return application

    def drain(self) -> int:
        """Refuse new requests from now on. Return the number of open ones."""
        self.draining = True
        return self._open

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, even if replicas are lost. This is the ASGI application."""
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if scope["path"] == "/metrics":
                await _write(sent, 200, await self._metrics(), b"text/plain; version=0.0.4; charset=utf-8")
            elif self.draining and scope["path"] not in ("/health", "/version", "/"):
                raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
            else:
                self._open += 1
                try:
                    await self._pass_on(scope, receive, sent)
                finally:
                    self._open -= 1
        except ApiError as error:
            if begun:
                raise  # an answer that has begun can only be ended by closing its connection
            response = error.response()
            await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request and give it to a replica."""
        if (body := await self._body(receive)) is None:
            return
        probe = scope["path"] in ("/health", "/ready")
        limit = _PROBE if probe else self.settings.timeout + _BEYOND
        self.taken.inc()
        try:
            async with asyncio.timeout(limit):
                complete = await self._relay(scope, body, send)
            (self.answered if complete else self.failed).inc()
        except TimeoutError:
            if scope["path"] == "/health" and time.monotonic() < self._heard + _BEYOND:
                # All replicas are full. That is no reason to restart them: one has just sent something.
                await _write(send, 200, b'{"status":"ok"}', b"application/json")
                self.answered.inc()
                return
            self.failed.inc()
            message = "no replica is ready" if probe else f"no replica answered within {limit:g} s"
            raise ApiError(503 if probe else 504, message, code="not_ready" if probe else "timeout") from None
        except ApiError:
            self.failed.inc()
            raise
        except asyncio.CancelledError:
            self.left.inc()
            raise

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the body; None if the client left. Reading stops once the body is too long; the replica refuses it."""
        parts = list[bytes]()
        size = 0
        more_body = True
        try:
            async with asyncio.timeout(self.settings.read_timeout):
                while more_body and size <= self.settings.max_body:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size, more_body = size + len(parts[-1]), message.get("more_body", False)
        except TimeoutError:
            reason = f"the body did not come in within {self.settings.read_timeout:g} s"
            raise ApiError(408, reason, code="timeout") from None
        return b"".join(parts)

    async def _relay(self, scope: Scope, body: bytes, send: Send) -> bool:
        """Send the client what a replica answers. If the replica is lost before anything was sent, another one answers.
        After that, a second answer would contradict the first, so the stream ends with an error. Return whether the
        answer is whole."""
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        headers = dict(scope["headers"])
        if b"transfer-encoding" in headers:  # the body has been read, and its length is known
            other_headers = [each for each in scope["headers"] if each[0] != b"transfer-encoding"]
            plain["headers"] = [*other_headers, (b"content-length", str(len(body)).encode())]
        replicas = self.replicas.options(
            method_name="answer", stream=True, session_id=conversation(headers, body) if body else ""
        )
        for attempt in range(1 + self.retries):
            start: Message | None = None  # the answer's head, held back until the body begins
            begun = False
            stream = replicas.remote(plain, body)
            try:
                async for messages in stream:
                    self._heard = time.monotonic()
                    for message in messages:
                        if message["type"] == "http.response.start":
                            start = message
                            continue
                        if not begun and start is not None:
                            begun = True
                            await send(start)
                        await send(message)
                return True
            except _LOST:
                if begun:
                    assert start is not None
                    await self._break_off(start, send)
                    return False
                if attempt < self.retries:
                    self.retried.inc()
            except BackPressureError:
                message = "all replicas are full; try again in 1 s"
                raise ApiError(429, message, code="too_many_requests", retry_after=1) from None
            except RayServeException as error:
                raise ApiError(503, f"no replica can answer: {error}", code="not_ready", retry_after=1) from None
            finally:
                stream.cancel()  # stops the replica if the client has left; does nothing after a whole answer
        message = f"{1 + self.retries} replicas were lost while they worked on this request; try again"
        raise ApiError(503, message, code="replica_lost", retry_after=1)

    async def _break_off(self, start: Message, send: Send) -> None:
        """End an answer whose replica was lost after it had begun. A stream gets an event with the error; for any other
        answer the connection is closed early."""
        error = ApiError(503, "the replica that wrote this answer was lost; ask again", code="replica_lost")
        if not any(value.startswith(b"text/event-stream") for _, value in start["headers"]):
            raise error
        event = b"data: " + json.dumps(error.body()).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": False})

    async def _metrics(self) -> bytes:
        """Return the metrics of all replicas and of this gateway. A full replica answers when it has room, so its last
        known metrics are shown until then."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait([self._asking], timeout=_PROBE)
        return merged(self._known) + generate_latest(self._registry)

    async def _ask(self) -> None:
        """Ask all replicas for their metrics, once."""
        with contextlib.suppress(RayServeException, TimeoutError, *_LOST):
            answers = self.replicas.broadcast("metrics")
            metrics = await answers.results_async(timeout_s=self.settings.timeout + _BEYOND, return_exceptions=True)
            self._known = dict(each for each in metrics if not isinstance(each, BaseException))


async def _write(send: Send, status: int, body: bytes, kind: bytes) -> None:
    head = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
