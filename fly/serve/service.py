"""One model being served: what its requests need before the engine has them, and how their answers come back. It never
waits for the engine but in coroutines, and leaves what takes time (tokenizers, templates, policies) to threads.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import deque
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.types import Receive

from fly.errors import explain
from fly.job import News, Request
from fly.llm import LLM
from fly.serve.answers import Vocabulary, error_body
from fly.serve.metrics import Measured, Metrics
from fly.serve.requests import ChatRequest, CompletionRequest, Generation, TokenizeRequest
from fly.serve.rules import Rules, Speculation
from fly.serve.settings import Settings
from fly.structured import StructuredError
from fly.worker import Stopped

__all__ = ["Answering", "ApiError", "Plain", "Prepared", "Service"]


class ApiError(Exception):
    """Becomes an answer in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def kind(self) -> str:
        if self.status < 500:
            return {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        return {503: "service_unavailable_error", 504: "timeout_error"}.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        return error_body(str(self), self.kind, self.param, self.code)

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return Plain(self.body(), self.status, headers)


class Plain(JSONResponse):
    """JSON in ASCII: an error may quote half a surrogate pair, which UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


@dataclass
class Prepared:
    """A request, ready for the engine."""

    requests: list[Request]
    prompt_tokens: int
    echoes: list[str] | None
    speculation: Speculation
    top: int | None


class Service:
    """One model being served: what endpoints share.

    Args:
        llm: belongs to the service alone from now on; it has a tokenizer.
        settings: what the operator decided.
        draft: the name of its draft; "none" if it has none.
        name: what clients call the model, where the settings say nothing.

    Raises:
        ValueError: a model without a tokenizer, or settings that contradict one another.
    """

    def __init__(self, llm: LLM, settings: Settings, draft: str, name: str) -> None:
        if llm.tokenizer is None:
            raise ValueError("this model has no tokenizer.json; a server of texts needs one")
        self.llm, self.settings, self.tokenizer = llm, settings, llm.tokenizer
        self.name = settings.name or name
        self.rules = Rules(
            llm.policy, llm.k if draft != "none" else 0, draft, settings.policies, settings.max_k,
            settings.require_lossless,
        )  # fmt: skip
        self.metrics = Metrics(self.name)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.draining = False
        self.open = 0  # requests that were let in and have not got all of their answer
        self.context: int = llm.engine.context
        try:
            self.version = version("flyspec")
        except PackageNotFoundError:  # run from a source tree
            self.version = "0+unknown"

    @property
    def ready(self) -> bool:
        return self.llm.worker.alive and not self.draining

    def check_model(self, model: str | None) -> None:
        """Raises ``ApiError`` if this is another model."""
        if model is not None and model != self.name:
            raise ApiError(404, f"model {model!r} is not served here; choose {self.name!r}", "model", "model_not_found")

    def prepare(self, body: Generation) -> Prepared:
        """What the engine needs of a request. Takes time: call it in a thread. Raises ``ApiError``."""
        self.check_model(body.model)
        asked = body.speculation
        try:
            chosen = (
                self.rules.choose()
                if asked is None
                else self.rules.choose(asked.policy, asked.k, asked.draft, asked.off)
            )
        except ValueError as error:
            field = str(error).partition(":")[0]
            raise ApiError(400, f"speculation.{error}", f"speculation.{field}", "invalid_value") from None
        try:
            chosen.policy.bind(self.llm.vocabulary)
        except ValueError as error:
            message = f"speculation.policy: {str(chosen.policy)!r}: {error}"
            raise ApiError(400, message, "speculation.policy", "invalid_value") from None
        echoes = None
        if isinstance(body, ChatRequest):
            name, prompts = "messages", [self.conversation(body)]
        else:
            assert isinstance(body, CompletionRequest)
            name, prompts = "prompt", [self.encode(prompt) for prompt in body.prompts]
            if body.echo:
                texts = [p if isinstance(p, str) else self.tokenizer.decode(p, False) for p in body.prompts]
                echoes = [text for text in texts for _ in range(body.n or 1)]
        for tokens in prompts:
            self.check_prompt(tokens, name)
        if (count := len(prompts) * (body.n or 1)) > self.settings.max_n:
            name = "prompt" if (body.n or 1) == 1 else "n"
            message = f"{name}: {count} completions; at most {self.settings.max_n} at once"
            raise ApiError(400, message, name, "invalid_value")
        try:
            params = body.params(self.llm.default_params, self.seed(body), self.max_tokens(body, prompts))
        except ValidationError as error:
            message = explain(error)
            param = ".".join(map(str, error.errors()[0]["loc"])) or _param_of(message)
            raise ApiError(400, message, param, "invalid_value") from None
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0], "invalid_value") from None
        try:
            requests = self.llm.requests(prompts, params, chosen.policy, chosen.k, streamed=True)
        except ValueError as error:
            raise ApiError(400, str(error), _param_of(str(error)), "invalid_value") from None
        return Prepared(requests, sum(map(len, prompts)), echoes, chosen, body.top())

    @staticmethod
    def seed(body: Generation) -> int:
        """Drawn here where the request leaves it open, so that the engine has nothing to draw."""
        return secrets.randbits(63) if body.seed is None else body.seed

    def encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            return self.tokenizer.encode(prompt)
        except (TypeError, ValueError) as error:  # half a surrogate pair
            raise ApiError(400, f"prompt: {error}", "prompt", "invalid_value") from None

    def conversation(self, body: ChatRequest | TokenizeRequest) -> list[int]:
        """Token ids of its messages by the chat template."""
        variables: dict[str, Any] = {}
        if isinstance(body, ChatRequest) and body.tools is not None:
            if "tools" not in self.tokenizer.template_variables:
                raise ApiError(400, "tools: this model's chat template takes none", "tools", "unsupported_parameter")
            variables["tools"] = body.tools
        generation = body.add_generation_prompt if isinstance(body, TokenizeRequest) else True
        try:
            messages = [message.for_template() for message in body.messages or ()]
            return self.tokenizer.apply_chat_template(messages, generation, **variables)
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"messages: {error}", "messages", "invalid_value") from None

    def check_prompt(self, tokens: list[int], name: str) -> None:
        """Raises ``ApiError`` for one, of the field ``name``, that cannot be completed."""
        if not tokens:
            raise ApiError(400, f"{name}: empty; it has no token to go on from", name, "invalid_value")
        if len(tokens) >= self.context:
            message = f"{len(tokens)} tokens of prompt leave no room in the model's context of {self.context}"
            raise ApiError(400, message, name, "context_length_exceeded")

    def max_tokens(self, body: Generation, prompts: list[list[int]]) -> int:
        """As the request says, or (as OpenAI has it) 16 for completions, and what the context holds for chats."""
        most, wanted = self.settings.max_tokens, body.wanted_tokens
        if wanted is not None and most is not None and wanted > most:
            name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
            raise ApiError(400, f"{name}: {wanted} exceeds this server's limit of {most}", name, "invalid_value")
        room = self.context - max(map(len, prompts))
        if wanted is None:
            wanted = room if isinstance(body, ChatRequest) else max(16, body.min_tokens or 0)
            wanted = wanted if most is None else min(wanted, most)
        return min(wanted, room)

    def submit(self, prepared: Prepared, streamed: bool) -> Measured:
        """Hand it to the engine. Raises ``ApiError`` where there is no room, or no engine."""
        worker, load = self.llm.worker, self.llm.worker.load
        free = max(0, self.llm.scheduler.max_rows - load.running)
        coming = worker.submitted - load.taken + len(prepared.requests)  # that the engine has not seen
        waiting = load.waiting + max(0, coming - free)
        if waiting > self.settings.max_waiting:
            retry_after = max(1, min(60, round(self.metrics.seconds * waiting / max(1, load.running))))
            message = f"the server is at its limit of waiting requests; try again in {retry_after} s"
            raise ApiError(429, message, code="queue_full", retry_after=retry_after)
        job = Measured(prepared.requests, streamed, asyncio.get_running_loop(), self.metrics)
        try:
            worker.submit(job)
        except Stopped as error:
            raise ApiError(503, str(error), code="engine_stopped") from None
        return job


class Answering:
    """The news of one job while its client listens and its time lasts."""

    def __init__(self, service: Service, job: Measured, receive: Receive) -> None:
        self.worker, self.job = service.llm.worker, job
        self.timeout = service.settings.timeout
        self._ahead: deque[News | BaseException | None] = deque()  # taken off the queue; None: nobody listens any more
        self._deadline = asyncio.get_running_loop().time() + self.timeout
        self._watch = asyncio.create_task(self._until_gone(receive))

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.worker.cancel(self.job)
        self.job.queue.put_nowait([None])

    async def begun(self) -> bool:
        """Wait until the engine has it, or for whatever comes first; whether somebody listens. Raises ``ApiError`` as
        ``next`` does."""
        try:
            async with asyncio.timeout_at(self._deadline):
                self._add(await self.job.queue.get())
        except TimeoutError:
            raise ApiError(504, f"not finished within {self.timeout:g} s", code="timeout") from None
        if self._ahead and isinstance(self._ahead[0], BaseException):
            await self.next()
        return not (self._ahead and self._ahead[0] is None)

    async def next(self) -> list[News] | None:
        """What has come in since, in one piece for a reader that is slow; None if nobody listens any more. Raises
        ``ApiError`` for a job that failed, once what came before is fetched."""
        while not self._ahead:
            await self.begun()
        while not self.job.queue.empty():
            self._add(self.job.queue.get_nowait())
        found: list[News] = []
        while self._ahead and isinstance(news := self._ahead[0], News) and news.error is None:
            found.append(news)
            self._ahead.popleft()
        if found:
            return found
        last = self._ahead.popleft()
        error = last.error if isinstance(last, News) else last
        if isinstance(error, StructuredError):
            raise ApiError(400, str(error), "response_format", "invalid_value")
        if error is not None:
            raise ApiError(500, f"the request failed: {type(error).__name__}: {error}", code="generation_failed")
        return None

    def _add(self, entry: Any) -> None:
        self._ahead.extend(entry if isinstance(entry, list) else [entry])

    def close(self) -> None:
        """Whatever has become of it, nothing is left of the job."""
        self._watch.cancel()
        self.worker.cancel(self.job)


_OF_ENGINE = {name: name for name in Generation.model_fields} | {"prompt": "prompt", "structured": "response_format"}


def _param_of(message: str) -> str | None:
    """The field that an error of the engine or of ``SamplingParams`` starts with; None where it is about several."""
    found = re.match(r"(\w+)\b(?! \d+:)", message)  # "prompt 0: ..." is of the prompt with all that is asked for it
    return _OF_ENGINE.get(found[1]) if found else None
