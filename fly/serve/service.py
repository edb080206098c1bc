"""One model being served: how its requests are prepared for the engine, and how their answers come back. It waits for
the engine in coroutines only, and leaves slow work (tokenizers, templates, policies) to threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from pydantic import ValidationError
from starlette.requests import HTTPConnection
from starlette.types import Receive

from fly import __version__
from fly.errors import explain
from fly.job import News, Request
from fly.llm import LLM
from fly.models.chat import ChatPrompt, Thinking, pick
from fly.models.tokenizer import TooLong
from fly.serve.answers import Echo, Vocabulary
from fly.serve.errors import ApiError, Left, Plain
from fly.serve.metrics import Measured, Metrics
from fly.serve.requests import ChatRequest, CompletionRequest, Generation, TokenizeRequest
from fly.serve.rules import Rules, Speculation
from fly.serve.settings import Settings
from fly.serve.tools import FORMATS, CallFormat, CallReader, format_of, grammar
from fly.structured import LIMITS, StructuredError
from fly.trial import Trial
from fly.types import StructuredOutput
from fly.worker import Stopped

__all__ = ["Answering", "ApiError", "Left", "Plain", "Prepared", "Service"]

_SCORES = 2**18  # log-probabilities of prompt tokens that one answer lists: some ten megabytes
_COMPILE = 2  # threads that compile grammars
T = TypeVar("T")


@dataclass
class Prepared:
    """A request, ready for the engine."""

    requests: list[Request]
    prompt_tokens: int
    echoes: list[Echo] | None
    prompt_top: int | None
    speculation: Speculation
    top: int | None
    client: str = ""
    form: str = "response_format"  # the field that gives the answer its form, if it has one
    calls: CallFormat | None = None  # how the answer calls functions, if it may
    functions: tuple[str, ...] = ()  # which

    def reader(self) -> CallReader | None:
        """Of the calls of one answer."""
        return None if self.calls is None else CallReader(self.calls, self.functions)


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
        if settings.require_lossless and llm.engine.runner.executor.leaves_early:
            raise ValueError("require_lossless: this target leaves early (exits), so no policy is lossless here")
        self.llm, self.settings, self.tokenizer = llm, settings, llm.tokenizer
        self.name = settings.name or name
        self._named = llm.draft_names
        self.rules = Rules(
            llm.policy, llm.k if draft != "none" else 0, draft, settings.policies, settings.max_k,
            settings.require_lossless, self._named,
        )  # fmt: skip
        self.metrics = Metrics(self.name)
        self.vocabulary = Vocabulary(self.tokenizer)
        # Endpoints that any text may be sent to have a thread of their own, so that completions need not wait for it.
        self._preparing = ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 2)), "fly-prepare")
        self.reading = ThreadPoolExecutor(1, "fly-tokenize")
        self.draining = False
        self.open = 0  # requests that were let in and have not got all of their answer
        self.held: Counter[str] = Counter()  # completions that each client has, waiting ones too
        # So have grammars and long lists of words, of one client one at a time, so that others get their turn.
        self._compiling = ThreadPoolExecutor(_COMPILE, "fly-compile")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._trial = Trial(llm.grammars.spelling, LIMITS)
        llm.grammars.vet = self._trial
        llm.worker.interval = settings.stream_interval
        self.context: int = llm.engine.context
        self.created = int(time.time())
        self.version = __version__

    @property
    def ready(self) -> bool:
        return self.llm.worker.alive and not self.draining

    def check_model(self, model: str | None) -> None:
        """Raises ``ApiError`` if this is another model."""
        if model is not None and model != self.name:
            raise ApiError(404, f"model {model!r} is not served here; choose {self.name!r}", "model", "model_not_found")

    async def aside(
        self,
        work: Callable[[], T],
        receive: Receive,
        pool: Executor | None = None,
        turn: asyncio.Lock | None = None,
    ) -> T:
        """What ``work`` gives, which takes time and so runs in a thread of ``pool`` (None: those that prepare
        completions), when its ``turn`` has come.

        Raises ``Left`` when the client leaves: then work that still waits is never begun.
        """
        working = asyncio.create_task(_in_turn(work, pool or self._preparing, turn))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Left
            return working.result()
        finally:
            leaving.cancel()
            working.cancel()

    def client(self, request: HTTPConnection) -> str:
        """Whose a request is: its key's (hashed); without keys its address's (of IPv6 the network, of which anybody has
        a whole one)."""
        if self.settings.api_keys:
            key = request.headers.get("authorization", "").partition(" ")[2].strip()
            return hashlib.sha256(key.encode()).hexdigest()
        host = request.client.host if request.client else ""
        try:
            address = ip_address(host)
        except ValueError:
            return host
        if isinstance(address, IPv6Address):
            mapped = address.ipv4_mapped
            return str(ip_network((address, 64), strict=False) if mapped is None else mapped)
        return host

    def close(self) -> None:
        """End the engine, and what prepares for it."""
        for pool in (self._preparing, self.reading, self._compiling):
            pool.shutdown(wait=False, cancel_futures=True)
        self.llm.close()
        self._trial.close()

    async def prepared(self, body: Generation, client: str, receive: Receive) -> Prepared:
        """``prepare`` in a thread. Raises ``Left`` when the client leaves."""
        work = partial(self.prepare, body, client)
        if not body.takes_time:
            return await self.aside(work, receive)
        if (turn := self._turns.get(client)) is None:
            turn = self._turns[client] = asyncio.Lock()
        return await self.aside(work, receive, self._compiling, turn)

    def prepare(self, body: Generation, client: str = "") -> Prepared:
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
        several = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        at_once = min(self.settings.max_n, self.settings.max_open or self.settings.max_n)
        if (count := several * (body.n or 1)) > at_once:  # however often it is tried
            name = "prompt" if (body.n or 1) == 1 else "n"
            message = f"{name}: {count} completions; at most {at_once} at once"
            raise ApiError(400, message, name, "invalid_value")
        calls, prompts = None, list[list[int]]()
        if isinstance(body, ChatRequest):
            prompt = self.conversation(body)
            if body.usable:
                calls = self.call_format()
                prompt.shown = (calls.opener, *filter(None, [calls.closer]))
            name, prompts = "messages", [prompt]
        else:
            assert isinstance(body, CompletionRequest)
            name, prompts = "prompt", [self.encode(prompt) for prompt in body.prompts]
        for tokens in prompts:
            self.check_prompt(tokens, name)
        if (top := body.prompt_top()) is not None:
            entries = sum(map(len, prompts)) * (top + 1) * (body.n or 1)
            if entries > _SCORES:
                message = f"{name}: log-probabilities of its tokens are {entries} entries; at most {_SCORES} are listed"
                raise ApiError(400, message, name, "invalid_value")
        if isinstance(body, CompletionRequest) and body.echo:
            found = [self.echo(prompt, body.logprobs is not None) for prompt in body.prompts]
            echoes = [echo for echo in found for _ in range(body.n or 1)]
        by_calls = isinstance(body, ChatRequest) and body.calls_by_form
        form = "tools" if by_calls else body.form or "response_format"
        try:
            most = self.max_tokens(body, prompts)
            params = body.params(self.llm.default_params, self.seed(body), most, self.salt(body, client))
            if isinstance(body, ChatRequest) and calls is not None and body.calls_by_form:
                params = params.model_copy(
                    update={"structured": self.form_of_calls(body, calls, params.structured, prompt.thinking)}
                )
        except ValidationError as error:
            message = explain(error)
            param = ".".join(map(str, error.errors()[0]["loc"])) or _param_of(message)
            raise ApiError(400, message, param, "invalid_value") from None
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0], "invalid_value") from None
        try:
            draft = chosen.draft if chosen.draft in self._named else None
            requests = self.llm.requests(
                prompts, params, chosen.policy, chosen.k, body.priority or 0, draft, client, streamed=True
            )
        except ValueError as error:
            param = _param_of(str(error))
            raise ApiError(400, str(error), form if param == "structured" else param, "invalid_value") from None
        functions = tuple(function.name for function in body.usable) if isinstance(body, ChatRequest) else ()
        prompt_top = body.prompt_logprobs if isinstance(body, CompletionRequest) else None
        return Prepared(
            requests, sum(map(len, prompts)), echoes, prompt_top, chosen, body.top(), client, form, calls, functions
        )

    def call_format(self) -> CallFormat:
        """How the model writes calls. Raises ``ApiError`` if its chat template shows none that is known."""
        if (found := format_of(pick(self.tokenizer.templates, None, tools=True).source)) is None:
            message = (
                f"tools: this model's chat template writes calls in a way that is not known here (known: "
                f"{', '.join(FORMATS)}); with tool_choice 'none' it answers without any"
            )
            raise ApiError(400, message, "tools", "unsupported_parameter")
        return found

    def form_of_calls(
        self, body: ChatRequest, calls: CallFormat, answer: StructuredOutput | None, thinking: Thinking | None
    ) -> StructuredOutput:
        """What holds an answer to the functions that it may or must call. Raises ``ValueError``."""
        schema = None
        if answer is not None and not body.must_call:
            if answer.kind not in ("json_schema", "json_object"):
                raise ValueError(f"{body.form}: beside tools the answer can have a JSON schema, no {answer.kind}")
            schema = json.loads(answer.source or '{"type": "object"}')
        functions = {function.name: function.schema_ for function in body.usable}
        text = grammar(
            calls, functions, self.tokenizer, required=body.must_call, parallel=body.may_repeat,
            answer=schema, thinking=thinking,
        )  # fmt: skip
        return StructuredOutput(grammar=text)

    @staticmethod
    def seed(body: Generation) -> int:
        """Drawn here where the request leaves it open, so that the engine has nothing to draw."""
        return secrets.randbits(63) if body.seed is None else body.seed

    def salt(self, body: Generation, client: str) -> str:
        """What requests must have in common to share what is cached of their prompts."""
        own = body.cache_salt or ""
        return f"{client} {own}" if self.settings.api_keys and self.settings.share_prefixes == "key" else own

    def encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            self.tokenizer.check_length(prompt, self.context - 1)
            return self.tokenizer.encode(prompt)
        except TooLong as error:
            raise self._no_room(error, "prompt") from None
        except (TypeError, ValueError) as error:  # half a surrogate pair
            raise ApiError(400, f"prompt: {error}", "prompt", "invalid_value") from None

    def echo(self, prompt: str | list[int], scored: bool) -> Echo:
        """A prompt, to be repeated before its completion: where it is ``scored``, token by token."""
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, False)
        return Echo(text, self.tokenizer.offsets(prompt) if scored else None)

    def conversation(self, body: ChatRequest | TokenizeRequest) -> ChatPrompt:
        """Token ids of its messages by the chat template. Those of a chat must leave room for an answer."""
        try:
            variables = self.template_variables(body)
            messages = [message.for_template() for message in body.messages or ()]
            at_most = self.context - 1 if isinstance(body, ChatRequest) else None
            return self.tokenizer.apply_chat_template(
                messages, body.opens_turn, at_most=at_most, continue_final_message=body.continue_final_message,
                **variables,
            )  # fmt: skip
        except TooLong as error:
            raise self._no_room(error, "messages") from None
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"messages: {error}", "messages", "invalid_value") from None

    def _no_room(self, error: TooLong, name: str) -> ApiError:
        message = f"{name}: too long for the model's context of {self.context} tokens: {error}"
        return ApiError(400, message, name, "context_length_exceeded")

    def template_variables(self, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """What a request gives the chat template besides its messages: no tools where none may be called. Raises
        ``ApiError`` for what that does not look at."""
        given, name = body.chat_template_kwargs or {}, "chat_template_kwargs"
        tools = None if isinstance(body, ChatRequest) and not body.usable else body.tools
        if body.tools is None and not given:
            return {}
        looks_at = self.tokenizer.template_variables
        if body.tools is not None and "tools" not in looks_at:
            raise ApiError(400, "tools: this model's chat template takes none", "tools", "unsupported_parameter")
        if unread := sorted(given.keys() - (looks_at - _OWN)):
            known = sorted(looks_at - _OWN)
            message = f"{name}: this model's chat template does not look at {unread}; it knows {known}"
            raise ApiError(400, message, name, "invalid_value")
        return given | ({} if tools is None else {"tools": [tool.for_template() for tool in tools]})

    def check_prompt(self, tokens: list[int], name: str) -> None:
        """Raises ``ApiError`` for one, of the field ``name``, that cannot be completed."""
        if not tokens:
            raise ApiError(400, f"{name}: empty; it has no token to go on from", name, "invalid_value")
        if len(tokens) >= self.context:
            message = f"{len(tokens)} tokens of prompt leave no room in the model's context of {self.context}"
            raise ApiError(400, message, name, "context_length_exceeded")

    def max_tokens(self, body: Generation, prompts: Sequence[list[int]]) -> int:
        """As the request says, or the checkpoint, or (as OpenAI has it) 16 for completions, and what the context holds
        for chats."""
        most, wanted = self.settings.max_tokens, body.wanted_tokens
        if wanted is not None and most is not None and wanted > most:
            name = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) is not None else "max_tokens"
            raise ApiError(400, f"{name}: {wanted} exceeds this server's limit of {most}", name, "invalid_value")
        room = self.context - max(map(len, prompts))
        if wanted is None:
            default = self.llm.default_params
            if "max_tokens" in default.model_fields_set:
                wanted = max(default.max_tokens, body.min_tokens or 0)
            else:
                wanted = room if isinstance(body, ChatRequest) else max(16, body.min_tokens or 0)
            wanted = wanted if most is None else min(wanted, most)
        return min(wanted, room)

    def submit(self, prepared: Prepared, streamed: bool) -> Measured:
        """Hand it to the engine. Raises ``ApiError`` where there is no room, or no engine."""
        worker, load, count = self.llm.worker, self.llm.worker.load, len(prepared.requests)
        own = self.held[prepared.client] + count
        if (most := self.settings.max_open) is not None and own > most:
            message = f"{own} completions of one client; at most {most} at once"
            raise ApiError(429, message, code="client_limit", retry_after=max(1, min(60, round(self.metrics.seconds))))
        free = max(0, self.llm.scheduler.max_rows - load.running)
        coming = worker.submitted - load.taken + count  # that the engine has not seen
        waiting = load.waiting + max(0, coming - free)
        # a client within its part of the queue finds room, however many others wait
        part = self.settings.max_waiting // len({*self.held, prepared.client})
        if waiting > self.settings.max_waiting and own > part:
            retry_after = max(1, min(60, round(self.metrics.seconds * waiting / max(1, load.running))))
            message = f"the server is at its limit of waiting requests; try again in {retry_after} s"
            raise ApiError(429, message, code="queue_full", retry_after=retry_after)
        job = Measured(prepared.requests, streamed, asyncio.get_running_loop(), self.metrics)
        try:
            worker.submit(job)
        except Stopped as error:
            raise ApiError(503, str(error), code="engine_stopped") from None
        self.held[prepared.client] += count
        return job

    def left(self, prepared: Prepared) -> None:
        """The client has its answer, or has left."""
        self.held.subtract({prepared.client: len(prepared.requests)})
        self.held += Counter()  # drops those that have nothing


async def _in_turn(work: Callable[[], T], pool: Executor, turn: asyncio.Lock | None) -> T:
    """``work`` in a thread of ``pool``. ``turn`` is over when the work is, or will not begin."""
    loop = asyncio.get_running_loop()
    if turn is not None:
        await turn.acquire()

    def over(_: Future[T]) -> None:
        if turn is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turn.release)

    future = pool.submit(work)
    future.add_done_callback(over)
    return await asyncio.wrap_future(future)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answering:
    """The news of one job while its client listens and its time lasts."""

    def __init__(self, service: Service, job: Measured, receive: Receive, form: str = "response_format") -> None:
        self.worker, self.job, self.form = service.llm.worker, job, form
        self.timeout = service.settings.timeout
        self._ahead: deque[News | BaseException | None] = deque()  # taken off the queue; None: the client has left
        self._deadline = asyncio.get_running_loop().time() + self.timeout
        self._watch = asyncio.create_task(self._until_gone(receive))

    async def _until_gone(self, receive: Receive) -> None:
        await _until_left(receive)
        self.worker.cancel(self.job)
        self.job.queue.put_nowait([None])

    async def begun(self) -> bool:
        """Wait until the engine has it, or for the first news; whether the client still listens. Raises ``ApiError`` as
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
        """The news since the last call, in one piece for a slow reader; None if the client has left. Raises
        ``ApiError`` for a job that failed, after the news before it were fetched."""
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
            raise ApiError(400, str(error), self.form, "invalid_value")
        if error is not None:
            raise ApiError(500, f"the request failed: {type(error).__name__}: {error}", code="generation_failed")
        return None

    def _add(self, entry: Any) -> None:
        self._ahead.extend(entry if isinstance(entry, list) else [entry])

    def close(self) -> None:
        """Whatever has become of it, nothing is left of the job."""
        self._watch.cancel()
        self.worker.cancel(self.job)


_OWN = {"messages", "tools", "add_generation_prompt"}  # of a template's variables, those that are asked for otherwise
_OF_ENGINE = {name: name for name in Generation.model_fields} | {"prompt": "prompt", "structured": "structured"}


def _param_of(message: str) -> str | None:
    """The field that an error of the engine or of ``SamplingParams`` starts with; None where it is about several."""
    found = re.match(r"(\w+)\b(?! \d+:)", message)  # "prompt 0: ..." is of the prompt with all that is asked for it
    return _OF_ENGINE.get(found[1]) if found else None
