"""The HTTP application: endpoints, errors, streams. Coroutines only wait; slow work runs in threads."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from fly.engine.job import News
from fly.errors import shorten
from fly.serve.answering import Answering
from fly.serve.answers import Completion
from fly.serve.errors import ApiError, ClientLeft, Plain
from fly.serve.guard import Guard
from fly.serve.jsons import write_json
from fly.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest
from fly.serve.service import Service

__all__ = ["Service", "create_app"]

_HERE = Path(__file__).parent
_PART = 2**18  # bytes


class Parts(Response):
    """JSON that may be long. It is sent in parts, and the client has a time limit for taking each."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[bytes]) -> None:
        super().__init__()
        self._parts = parts
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for part in self._parts:
            for start in range(0, len(part), _PART):
                await send({"type": "http.response.body", "body": part[start : start + _PART], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Server-sent events. ``close`` is always called at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for events in self._events:
                    await write(events)
                await write(b"data: [DONE]\n\n")
            except ApiError as error:
                await write(b"data: " + json.dumps(error.body()).encode() + b"\n\n")
            await write(b"", False)
        finally:
            self._close()


async def answer(service: Service, body: Generation, request: Request) -> Response:
    """Answer a completion request, whole or streamed."""
    if service.draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
    answering: Answering | None = None

    def close() -> None:
        if answering is not None:
            answering.close()
            service.release(prepared)

    try:
        prepared = await service.prepare_aside(body, request)
        streamed = bool(body.stream)
        job = service.submit(prepared, streamed)
        timeout = service.settings.timeout
        answering = Answering(service.llm.worker, service.long, timeout, job, request, prepared.form)
        completion = Completion(prepared, service.vocabulary, f"fly-{service.version}")
        if streamed:
            if not await answering.begun():
                raise ClientLeft
            return EventStream(stream_events(completion, answering), close)  # it calls close at its end
        parts = Parts(await collect_answer(completion, answering))
    except BaseException:
        close()
        raise
    close()
    return parts


async def collect_answer(completion: Completion, answering: Answering) -> list[bytes]:
    """Wait for the whole answer and write it. Raises ``ClientLeft``."""
    news_list: list[News] = []
    while sum(news.over for news in news_list) < len(completion.choices):
        if (batch := await answering.next()) is None:
            raise ClientLeft
        news_list += batch

    def write_whole() -> Iterator[bytes]:
        for news in news_list:
            completion.add(news)
            yield b""
        yield from write_json(completion.build_whole())

    return await answering.write(write_whole(), completion.entries(news_list))


async def stream_events(completion: Completion, answering: Answering) -> AsyncIterator[bytes]:
    """Yield the events of a stream: one that opens each choice, then the news, then the statistics."""
    try:
        for part in await answering.write(completion.opening(), completion.entries([])):
            yield part
        while not completion.ended():
            if (news_list := await answering.next()) is None:
                return
            for part in await answering.write(completion.events(news_list), completion.entries(news_list)):
                yield part
    except ClientLeft:
        return


def create_app(service: Service) -> ASGIApp:
    """Build the ASGI application of a service. Its shutdown closes the engine."""

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.warm)
        app.openapi()  # FastAPI keeps it; otherwise the first request would build it on the event loop
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="fly",
        version=service.version,
        description="Speculative decoding behind OpenAI's interface; every request may choose how it is verified.",
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # a redirect would use the host name of the request
        lifespan=live,
    )
    app.router.route_class = _build_route(service)
    _add_errors(app)
    _add_completions(app, service)
    _add_texts(app, service)
    _add_states(app, service)

    settings = service.settings
    guarded: ASGIApp = Guard(app, settings, service.clients, service.requests, service.metrics.refused)
    if settings.trusted_proxies:
        guarded = ProxyHeadersMiddleware(guarded, [*settings.trusted_proxies])  # type: ignore[arg-type, assignment]
    if not settings.cors_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


def _build_route(service: Service) -> type[APIRoute]:
    """Build a route class. With it the service reads the bodies of requests, in a thread if they are large."""

    class Reading(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            endpoint = self.endpoint
            if (body_parameter := inspect.signature(endpoint, eval_str=True).parameters.get("body")) is None:
                return super().get_route_handler()

            async def read(request: Request) -> Response:
                try:
                    return await endpoint(await service.read(body_parameter.annotation, request), request)
                except ClientLeft:
                    return Response(status_code=499)

            return read

    return Reading


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS, response_class=Plain)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await answer(service, body, request)

    @app.post("/v1/completions", responses=_ERRORS, response_class=Plain)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        return await answer(service, body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model and what requests may ask of it."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(model: str) -> dict[str, Any]:
        """Describe the model."""
        service.check_model(model)
        return _model(service)


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Convert a text or a conversation to token ids."""
        service.check_model(body.model)

        def build() -> Response:
            tokens = service.encode_request(body)
            texts = (service.tokenizer.raw.id_to_token(token) for token in tokens) if body.return_token_strs else None
            count = {"count": len(tokens), "max_model_len": service.context}
            return Parts([b"".join(write_json({**count, "tokens": iter(tokens), "token_strs": texts}))])

        return await service.run_aside(build, request)

    @app.get("/tokenizer_info", responses=_ERRORS)
    async def tokenizer_info() -> dict[str, Any]:
        """Return the special tokens and the chat template, as in a checkpoint's tokenizer_config.json."""
        tokenizer = service.tokenizer
        tokens: dict[str, Any] = {"bos_token": None, "eos_token": None, "pad_token": None, **tokenizer.special_names}
        return {**tokens, "chat_template": tokenizer.template, "model_max_length": service.context}

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Convert token ids to text."""
        service.check_model(body.model)

        def build() -> Response:
            return Parts([b"".join(write_json({"prompt": service.decode(body.tokens)}))])

        return await service.run_aside(build, request)


def _add_states(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=_ERRORS)
    async def health() -> Response:
        """Say whether the engine runs."""
        if not (worker := service.llm.worker).alive:
            raise ApiError(503, f"the engine has stopped: {worker.failure!r}", code="engine_stopped")
        return Plain({"status": "ok"})

    @app.get("/ready", responses=_ERRORS)
    async def ready() -> Response:
        """Say whether new requests are accepted."""
        if not service.ready:
            raise ApiError(503, "not ready: shutting down" if service.draining else "not ready", code="not_ready")
        return Plain({"status": "ready"})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return Prometheus metrics."""
        text = service.metrics.text(service.llm.worker.load)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """Return the version of the server."""
        return {"version": service.version}

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def playground() -> Response:
        return HTMLResponse((_HERE / "playground.html").read_text("utf-8"), headers=_ONLY_OURS)


# Headers of the playground: it loads nothing from other hosts, and no other page may put it in a frame.
_ONLY_OURS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class ErrorDetail(BaseModel):
    """What was wrong. ``param`` is the field at fault, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error in OpenAI's form."""

    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "the request is wrong; the message says how"},
    "5XX": {"model": ErrorAnswer, "description": "shutting down (503), too late (504), or a fault of the server"},
}


def _model(service: Service) -> dict[str, Any]:
    rules = service.rules
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "fly",
        "max_model_len": service.context,
        "speculation": {
            **rules.choose().as_dict(),
            "policies": rules.choices,
            "drafts": rules.drafts,
            "max_k": rules.max_k if rules.draft != "none" else 0,
            "require_lossless": rules.require_lossless,
        },
    }


# OpenAI's endpoints that this server lacks, each with a hint for the error message.
_ABSENT = {
    "responses": " (this server has no Responses API; /v1/chat/completions answers conversations, tools included)",
    "embeddings": " (this server generates text, and gives no embeddings)",
}


def _suggest_path(path: str, paths: Sequence[str]) -> str:
    """Return a hint at the path that ends like this one, as for a path without ``/v1`` or with it twice."""
    path = path.rstrip("/")
    alike = [each for each in paths if each != "/" and path.endswith(each.removeprefix("/v1"))]
    return f" (did you mean {max(alike, key=len)!r}?)" if alike else ""


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(HTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            paths = sorted(str(route.path) for route in app.routes if isinstance(route, APIRoute))
            path = request.url.path
            hint = _ABSENT.get(path.removeprefix("/v1/").partition("/")[0], "") or _suggest_path(path, paths)
            message = f"there is nothing at {shorten(path)}{hint}; paths: {', '.join(paths)}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow")
            message = f"{shorten(request.url.path)} takes no {request.method}; methods: {allowed}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error; the server's log has it").response()
