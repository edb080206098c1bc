"""The HTTP application: endpoints, errors, streams. It waits for the engine in coroutines only, and leaves slow work
(tokenizers, templates, policies) to threads.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from fly.errors import short
from fly.serve.answers import Completion
from fly.serve.guard import Guard
from fly.serve.messages import Part
from fly.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest
from fly.serve.service import Answering, ApiError, Left, Plain, Service

__all__ = ["Service", "create_app"]

_HERE = Path(__file__).parent


class StrictBody(Request):
    """A request whose JSON has every name once: it would be unclear which of two values was meant."""

    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_once)


class StrictRoute(APIRoute):
    """An endpoint that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictBody(request.scope, request.receive))

        return strict


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ApiError(400, f"{twice!r} is given twice in one object of the body", twice, "invalid_value")
    return found


class EventStream(Response):
    """Server-sent events. ``close`` is called however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
                await write(b"data: [DONE]\n\n")
            except ApiError as error:
                await write(b"data: " + json.dumps(error.body()).encode() + b"\n\n")
            await write(b"", False)
        finally:
            self._close()


async def answer(service: Service, body: Generation, request: Request) -> Response:
    """A completion, whole or streamed."""
    if service.draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
    service.open += 1
    answering: Answering | None = None

    def close() -> None:
        service.open -= 1
        if answering is not None:
            answering.close()
            service.left(prepared)

    try:
        prepared = await service.prepared(body, service.client(request), request.receive)
        streamed = bool(body.stream)
        job = service.submit(prepared, streamed)
        answering = Answering(service, job, request.receive, prepared.form)
        completion = Completion(
            isinstance(body, ChatRequest), body.model, prepared.speculation, service.vocabulary,
            f"fly-{service.version}", [request.thinking for request in job.requests], body.explains, prepared.echoes,
            prepared.top, prepared.prompt_top, [prepared.reader() for _ in job.requests],
            [each.row.tokens[: each.row.prompt_length] for each in job.requests] if body.return_token_ids else None,
        )  # fmt: skip
        if streamed:
            if not await answering.begun():
                close()
                return Response(status_code=499)
            events = chunks(completion, answering, prepared.prompt_tokens, body.with_usage, body.with_running_usage)
            return EventStream(events, close)  # which closes when it has ended
        while not completion.ended():
            if (found := await answering.next()) is None:
                close()
                return Response(status_code=499)
            for news in found:
                completion.add(news)
        if body.prompt_top() is None:
            whole = Plain(completion.whole(prepared.prompt_tokens))
        else:  # there is much to write down
            loop = asyncio.get_running_loop()
            whole = await loop.run_in_executor(service.reading, lambda: Plain(completion.whole(prepared.prompt_tokens)))
    except Left:
        close()
        return Response(status_code=499)
    except BaseException:
        close()
        raise
    close()
    return whole


async def read(service: Service, work: Callable[[], Response], request: Request) -> Response:
    """What is done with a text aside from completing it."""
    service.open += 1
    try:
        return await service.aside(work, request.receive, service.reading)
    except Left:
        return Response(status_code=499)
    finally:
        service.open -= 1


async def chunks(
    completion: Completion, answering: Answering, prompt_tokens: int, with_usage: bool, running_usage: bool = False
) -> AsyncIterator[dict[str, Any]]:
    """What a stream says: it opens every choice, passes on what comes in, and ends with what can be said at the end."""

    def used(chunk: dict[str, Any]) -> dict[str, Any]:
        return chunk | {"usage": completion.usage(prompt_tokens)} if running_usage else chunk

    for choice in completion.choices:
        yield used(completion.first(choice))
    while not completion.ended():
        if (found := await answering.next()) is None:
            return
        touched = {news.index: completion.add(news) for news in found}
        for choice in touched.values():
            while (chunk := completion.chunk(choice)) is not None:
                last = completion.ended() and choice is list(touched.values())[-1] and not with_usage
                yield used(completion.last(chunk) if last and choice.told else chunk)
    if with_usage:
        yield completion.last(completion.usage_chunk(prompt_tokens))


def create_app(service: Service) -> ASGIApp:
    """The ASGI application of a service; at its shutdown the engine is closed."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    errors: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": ErrorAnswer, "description": "something about the request, which the message names"},
        "5XX": {"model": ErrorAnswer, "description": "shutting down (503), not finished in time (504), or our fault"},
    }
    app = FastAPI(
        title="fly",
        version=service.version,
        description="Speculative decoding behind OpenAI's interface; every request may choose how it is verified.",
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # to whatever the request calls this host
        lifespan=life,
    )
    app.router.route_class = StrictRoute
    _add_errors(app)

    @app.post("/v1/chat/completions", responses=errors, response_class=Plain)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await answer(service, body, request)

    @app.post("/v1/completions", responses=errors, response_class=Plain)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text."""
        return await answer(service, body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served, and what requests may ask of it."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{model:path}", responses=errors)
    async def model(model: str) -> dict[str, Any]:
        """The model that is served."""
        service.check_model(model)
        return _model(service)

    @app.post("/tokenize", responses=errors)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        service.check_model(body.model)
        name = "messages" if body.prompt is None else "prompt"
        size = sum(map(len, _texts(body)))
        if size > _READ:
            raise ApiError(
                400, f"{name}: {size} characters; at most {_READ} are encoded at once", name, "invalid_value"
            )

        def encode() -> list[int]:
            if body.prompt is None:
                return service.conversation(body)
            try:
                return service.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
            except (TypeError, ValueError) as error:
                raise ApiError(400, f"prompt: {error}", "prompt", "invalid_value") from None

        def told() -> Response:
            tokens = encode()
            texts = [service.tokenizer.raw.id_to_token(token) for token in tokens] if body.return_token_strs else None
            count = {"count": len(tokens), "max_model_len": service.context}
            return Plain({**count, "tokens": tokens, "token_strs": texts})

        return await read(service, told, request)

    @app.get("/tokenizer_info", responses=errors)
    async def tokenizer_info() -> dict[str, Any]:
        """The special tokens by their names, and the chat template, as in a checkpoint's tokenizer_config.json."""
        tokenizer = service.tokenizer
        named: dict[str, Any] = {"bos_token": None, "eos_token": None, "pad_token": None, **tokenizer.special_names}
        return {**named, "chat_template": tokenizer.template, "model_max_length": service.context}

    @app.post("/detokenize", responses=errors)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        service.check_model(body.model)
        size = service.llm.engine.runner.executor.config.vocab_size
        if bad := [token for token in body.tokens if token >= size]:
            raise ApiError(400, f"tokens: {bad[0]} is outside the vocabulary of {size}", "tokens", "invalid_value")
        return await read(service, lambda: Plain({"prompt": service.tokenizer.decode(body.tokens, False)}), request)

    @app.get("/health", responses=errors)
    async def health() -> Response:
        """Whether the engine runs."""
        if not (worker := service.llm.worker).alive:
            raise ApiError(503, f"the engine has stopped: {worker.failure!r}", code="engine_stopped")
        return Plain({"status": "ok"})

    @app.get("/ready", responses=errors)
    async def ready() -> Response:
        """Whether new requests are taken."""
        if not service.ready:
            raise ApiError(503, "not ready: shutting down" if service.draining else "not ready", code="not_ready")
        return Plain({"status": "ready"})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        service.metrics.load(service.llm.worker.load)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """The version of the server."""
        return {"version": service.version}

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def playground() -> Response:
        return HTMLResponse((_HERE / "playground.html").read_text("utf-8"), headers=_ONLY_OURS)

    settings = service.settings
    guarded = Guard(app, settings, service.metrics.refused)
    if not settings.cors_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after"),
    )


# Of the playground: nothing from elsewhere is loaded, and no page from elsewhere frames it.
_ONLY_OURS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


_READ = 2**20  # characters that /tokenize takes: some seconds and 200 MB
_UNKNOWN = ("unknown_parameter", "extra_forbidden")  # errors of a body, and of a part of a message


class ErrorDetail(BaseModel):
    """What was wrong; ``param`` names the field, if it was one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


def _texts(body: TokenizeRequest) -> list[str]:
    """What is to be encoded."""
    if body.prompt is not None:
        return [body.prompt]
    beside = [*(tool.for_template() for tool in body.tools or ()), body.chat_template_kwargs or {}]
    return [*map(json.dumps, beside), *(message.for_template()["content"] for message in body.messages or ())]


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


def _worst(error: RequestValidationError) -> tuple[Any, list[str]]:
    """What to say of all that is wrong with a body, and the path of the field it is about.

    Unknown fields come first. A value that may be of several types has an error for each: what counts is that of a type
    it has, or with which reading came furthest, since the client meant that one.
    """

    def path(problem: Any) -> list[str | int]:
        found, value = [], error.body
        for part in problem["loc"][1:]:
            if part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int):
                value = value[part]
            elif problem["type"] != "missing" or part != problem["loc"][-1]:  # the name of a type
                continue
            found.append(part)
        if problem["type"] == "unknown_parameter":
            found.append(problem["ctx"]["name"])
        return found

    def rank(problem: Any) -> tuple[Any, ...]:
        return not problem["type"].endswith("_type"), [(isinstance(part, int), part) for part in path(problem)]

    problems = error.errors()
    first = next((p for p in problems if p["type"] in _UNKNOWN), problems[0])
    if first["type"] not in _UNKNOWN:
        first = max((p for p in problems if path(p)[:1] == path(first)[:1]), key=rank)
    return first, list(map(str, path(first)))


# Of OpenAI's interface, with what there is instead.
_ABSENT = {
    "responses": " (this server has no Responses API; /v1/chat/completions answers conversations, tools included)",
    "embeddings": " (this server generates text, and gives no embeddings)",
}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problem, where = _worst(error)
        message = problem["msg"].removeprefix("Value error, ")
        kind = request.headers.get("content-type", "")
        if isinstance(error.body, bytes) and error.body:  # the body was not even read as JSON
            given = f"is {kind[:100]!r}" if kind else "is missing"
            message = f"the header content-type {given}; a body is read where that is 'application/json'"
            return ApiError(400, message, None, "invalid_content_type").response()
        if problem["type"] == "json_invalid":
            message = f"the body is no JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
        elif problem["type"] == "value_error" and not where:
            where = [name] if (name := message.partition(":")[0]).isidentifier() else []
        elif problem["type"] == "extra_forbidden":
            message = f"unknown or unsupported: {where[-1]!r}; known: {', '.join(Part.__annotations__)}"
        elif problem["type"] == "missing" and not where:
            message = "the body is missing"
        elif problem["type"] not in _UNKNOWN and where:
            value = problem["input"]
            got = isinstance(value, (int, float, str)) and problem["type"] not in ("value_error", "missing")
            message = f"{'.'.join(where)}: {message}" + (f", got {short(value)}" if got else "")
        code = "unknown_parameter" if problem["type"] in _UNKNOWN else "invalid_value"
        return ApiError(400, message, ".".join(where) or None, code).response()

    @app.exception_handler(StarletteHTTPException)
    @app.exception_handler(HTTPException)
    async def http(request: Request, error: StarletteHTTPException) -> Response:
        message, cause = str(error.detail), error.__cause__
        if isinstance(cause, ApiError):
            return cause.response()
        if error.status_code == 400 and cause is not None:  # FastAPI's, of a body
            message = f"the body cannot be read as JSON: {cause}"
        if error.status_code == 404:
            paths = ", ".join(sorted(str(route.path) for route in app.routes if isinstance(route, StrictRoute)))
            absent = _ABSENT.get(request.url.path.removeprefix("/v1/").partition("/")[0], "")
            message = f"there is nothing at {request.url.path!r}{absent}; paths: {paths}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(UnicodeEncodeError)
    async def half_a_pair(request: Request, error: UnicodeEncodeError) -> Response:
        """From pydantic, where a name that it is to tell us of is no Unicode."""
        return ApiError(400, "the body has half a surrogate pair in the name of a field").response()

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error; the server's log has it").response()
