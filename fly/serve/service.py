"""Serves one model: prepares requests for the engine, and brings answers back. Coroutines only wait for the engine;
slow work (tokenizers, templates, policies) runs in threads.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest

from fly import __version__
from fly.engine.job import Request
from fly.engine.worker import Stopped
from fly.errors import explain, short
from fly.llm import LLM
from fly.models.chat import ChatPrompt, Thinking, pick
from fly.models.tokenizer import TooLong
from fly.runtime.structured import LIMITS
from fly.runtime.trial import Trial
from fly.serve import bodies
from fly.serve.answering import until_left
from fly.serve.answers import Echo, Vocabulary
from fly.serve.clients import Client, Clients, Shares
from fly.serve.errors import ApiError, ClientLeft, Plain
from fly.serve.jsons import loads
from fly.serve.metrics import Measured, Metrics
from fly.serve.requests import ChatRequest, CompletionRequest, Generation, TokenizeRequest
from fly.serve.rules import Rules, Speculation
from fly.serve.settings import Settings
from fly.serve.tools import FORMATS, CallFormat, CallReader, format_of, grammar, wrong_with_tools
from fly.serve.turns import Busy, Turns
from fly.types import StructuredOutput

__all__ = ["ApiError", "ClientLeft", "Plain", "Prepared", "Service"]

_SCORES = 2**18  # log-probabilities of prompt tokens in one answer: about ten megabytes
_MOMENT = 2**12  # bytes of a body that is parsed at once, without a thread
_SHORT = 2**15  # bytes of a body whose request takes little time: about 30 ms
_READ = 2**20  # characters that /tokenize accepts: a few seconds and 200 MB
_WAITING = 64  # pieces of long work that one client may have in the queue
T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


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
    form: str = "response_format"  # the field that constrains the answer, for errors
    calls: CallFormat | None = None  # how the answer writes tool calls, if it may have any
    functions: tuple[str, ...] = ()  # names of the functions that it may call

    def reader(self) -> CallReader | None:
        """Build the reader that finds calls in one answer."""
        return None if self.calls is None else CallReader(self.calls, self.functions)


class Service:
    """The model being served; all endpoints share it.

    Args:
        llm: a model with a tokenizer; the service owns it from now on.
        settings: the operator's settings.
        draft: the name of its draft; "none" if it has none.
        name: the model's name for clients, unless the settings have one.

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
        self.clients = Clients(settings)
        # Short work need not wait for long work. A client may have as much short work as completions.
        processors = os.cpu_count() or 2
        self.short = Turns("fly-short", max(2, min(8, processors)), settings.max_connections)
        self.long = Turns("fly-long", max(2, min(4, processors)), _WAITING)
        self.draining = False
        self.requests = Shares(settings.max_connections)  # admitted requests whose answers are not sent yet
        self.held: Counter[str] = Counter()  # completions of each client, those in the queue included
        self._trial = Trial(llm.grammars.spelling, LIMITS)
        llm.grammars.vet = self._trial
        llm.worker.interval = settings.stream_interval
        self.context: int = llm.engine.context
        self.created = int(time.time())
        self.version = __version__

    @property
    def open(self) -> int:
        """Number of admitted requests whose answers are not sent yet."""
        return self.requests.sum

    @property
    def ready(self) -> bool:
        return self.llm.worker.alive and not self.draining

    def warm(self) -> None:
        """Build all tables that the first requests would wait for."""
        self.tokenizer.warm()
        self.llm.grammars.warm()
        _ = self.llm.vocabulary.texts

    def check_model(self, model: str | None) -> None:
        """Raise ``ApiError`` if a request asks for another model."""
        if model is not None and model != self.name:
            message = f"model {short(model)} is not served here; choose {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def read(self, kind: type[Model], request: HttpRequest) -> Model:
        """Read the body of a request. Raises ``ApiError``, and ``ClientLeft`` if the client leaves."""
        data = await request.body()
        work = partial(bodies.read, kind, data, request.headers.get("content-type", ""))
        return work() if len(data) <= _MOMENT else await self.aside(work, request)

    async def aside(self, work: Callable[[], T], request: HttpRequest, long: bool = False) -> T:
        """Run ``work`` in a thread when it is the client's turn, and return its result. Raises ``ApiError`` if the
        client has too much in the queue, and ``ClientLeft`` if it leaves; work still in the queue then never begins."""
        client: Client = request.state.client
        turns = self.long if long or len(await request.body()) > _SHORT else self.short
        working = asyncio.create_task(turns.run(client.name, work))
        leaving = asyncio.create_task(until_left(request.receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientLeft
            return working.result()
        except Busy:
            message = f"{turns.most} requests of one client wait to be read or prepared; try again in 1 s"
            raise ApiError(429, message, code="client_limit", retry_after=1) from None
        finally:
            leaving.cancel()
            working.cancel()

    def close(self) -> None:
        """Stop the engine and the threads."""
        self.short.close()
        self.long.close()
        self.llm.close()
        self._trial.close()

    async def prepared(self, body: Generation, request: HttpRequest) -> Prepared:
        """Call ``prepare`` in a thread. Raises ``ClientLeft`` if the client leaves."""
        work = partial(self.prepare, body, request.state.client.name)
        return await self.aside(work, request, body.takes_time)

    def prepare(self, body: Generation, client: str = "") -> Prepared:
        """Convert a request to what the engine needs. Slow: call it in a thread. Raises ``ApiError``."""
        self.check_model(body.model)
        chosen = self.speculation(body)
        echoes = None
        # Refuse more completions than may run at once.
        several = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        at_once = min(self.settings.max_n, self.settings.max_open or self.settings.max_n)
        if (count := several * (body.n or 1)) > at_once:  # trying again would not help
            name = "prompt" if (body.n or 1) == 1 else "n"
            message = f"{name}: {count} completions; at most {at_once} at once"
            raise ApiError(400, message, name, "invalid_value")
        # Encode the prompts.
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
        # Refuse lists of log-probabilities that would be too long.
        if (top := body.prompt_top()) is not None:
            entries = sum(map(len, prompts)) * (top + 1) * (body.n or 1)
            if entries > _SCORES:
                message = f"{name}: log-probabilities of its tokens are {entries} entries; at most {_SCORES} are listed"
                raise ApiError(400, message, name, "invalid_value")
        if isinstance(body, CompletionRequest) and body.echo:
            found = [self.echo(prompt, body.logprobs is not None) for prompt in body.prompts]
            echoes = [echo for echo in found for _ in range(body.n or 1)]
        # Build the sampling parameters, with a grammar for tool calls if they need one.
        functions = tuple(function.name for function in body.usable) if isinstance(body, ChatRequest) else ()
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
        # Build the engine's requests; their errors name the field of the request that is at fault.
        try:
            draft = chosen.draft if chosen.draft in self._named else None
            requests = self.llm.requests(
                prompts, params, chosen.policy, chosen.k, body.priority or 0, draft, client, streamed=True
            )
        except ValueError as error:
            message, param = str(error), _param_of(str(error))
            message = wrong_with_tools(message, functions) if by_calls and param == "structured" else message
            raise ApiError(400, message, form if param == "structured" else param, "invalid_value") from None
        prompt_top = body.prompt_logprobs if isinstance(body, CompletionRequest) else None
        return Prepared(
            requests, sum(map(len, prompts)), echoes, prompt_top, chosen, body.top(), client, form, calls, functions
        )

    def speculation(self, body: Generation) -> Speculation:
        """Return the speculation of a request. Raises ``ApiError``."""
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
        return chosen

    def call_format(self) -> CallFormat:
        """How the model writes calls. Raises ``ApiError`` if its chat template has no known format of calls."""
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
        """Build the grammar that restricts calls to the functions of the request. Raises ``ValueError``."""
        schema = None
        if answer is not None and not body.must_call:
            if answer.kind not in ("json_schema", "json_object"):
                raise ValueError(f"{body.form}: beside tools the answer can have a JSON schema, no {answer.kind}")
            schema = loads(answer.source or '{"type": "object"}')
        functions = {function.name: function.schema_ for function in body.usable}
        text = grammar(
            calls, functions, self.tokenizer, required=body.must_call, parallel=body.may_repeat,
            answer=schema, thinking=thinking,
        )  # fmt: skip
        return StructuredOutput(grammar=text)

    @staticmethod
    def seed(body: Generation) -> int:
        """Return the request's seed, or draw one, so that the engine need not."""
        return secrets.randbits(63) if body.seed is None else body.seed

    def salt(self, body: Generation, client: str) -> str:
        """Return the salt: requests share cached prefixes only if their salts are equal."""
        own = body.cache_salt or ""
        return f"{client} {own}" if self.clients.keyed and self.settings.share_prefixes == "key" else own

    def encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            self.tokenizer.check_length(prompt, self.context - 1)
            return self.tokenizer.encode(prompt)
        except TooLong as error:
            raise self._no_room(error, "prompt") from None
        except (TypeError, ValueError) as error:  # such as half a surrogate pair
            raise ApiError(400, f"prompt: {error}", "prompt", "invalid_value") from None

    def echo(self, prompt: str | list[int], scored: bool) -> Echo:
        """Return the text of a prompt for repetition, with offsets of its tokens if they are ``scored``."""
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, False)
        return Echo(text, self.tokenizer.offsets(prompt) if scored else None)

    def tokens(self, body: TokenizeRequest) -> list[int]:
        """Encode a text or a conversation. Raises ``ApiError``."""
        name = "messages" if body.prompt is None else "prompt"
        if (size := sum(map(len, body.texts()))) > _READ:
            message = f"{name}: {size} characters; at most {_READ} are encoded at once"
            raise ApiError(400, message, name, "invalid_value")
        if body.prompt is None:
            return self.conversation(body)
        try:
            return self.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"prompt: {error}", "prompt", "invalid_value") from None

    def text(self, tokens: list[int]) -> str:
        """Decode token ids to text, special tokens included. Raises ``ApiError``."""
        size = self.llm.engine.runner.executor.config.vocab_size
        if (bad := next((token for token in tokens if token >= size), None)) is not None:
            raise ApiError(400, f"tokens: {bad} is outside the vocabulary of {size}", "tokens", "invalid_value")
        return self.tokenizer.decode(tokens, False)

    def conversation(self, body: ChatRequest | TokenizeRequest) -> ChatPrompt:
        """Encode messages with the chat template. A chat must leave room for an answer."""
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
        """Variables for the chat template besides the messages; no tools if none may be called. Raises ``ApiError`` for
        variables that the template does not read."""
        given, name = body.chat_template_kwargs or {}, "chat_template_kwargs"
        tools = None if isinstance(body, ChatRequest) and not body.usable else body.tools
        if body.tools is None and not given:
            return {}
        looks_at = self.tokenizer.template_variables
        if body.tools is not None and "tools" not in looks_at:
            raise ApiError(400, "tools: the chat template of this model has none", "tools", "unsupported_parameter")
        if unread := sorted(given.keys() - (looks_at - _OWN)):
            known = sorted(looks_at - _OWN)
            message = f"{name}: this model's chat template does not read {unread}; it reads {known}"
            raise ApiError(400, message, name, "invalid_value")
        return given | ({} if tools is None else {"tools": [tool.for_template() for tool in tools]})

    def check_prompt(self, tokens: list[int], name: str) -> None:
        """Raise ``ApiError`` if a prompt, from the field ``name``, cannot be completed."""
        if not tokens:
            raise ApiError(400, f"{name}: empty; there is nothing to continue", name, "invalid_value")
        if len(tokens) >= self.context:
            message = f"{len(tokens)} tokens of prompt leave no room in the model's context of {self.context}"
            raise ApiError(400, message, name, "context_length_exceeded")

    def max_tokens(self, body: Generation, prompts: Sequence[list[int]]) -> int:
        """Limit of new tokens: the request's, else the checkpoint's, else (like OpenAI) 16 for completions and the rest
        of the context for chats."""
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
        """Submit a prepared request to the engine. Raises ``ApiError`` if the queue is full or the engine stopped."""
        worker, load, count = self.llm.worker, self.llm.worker.load, len(prepared.requests)
        own = self.held[prepared.client] + count
        if (most := self.settings.max_open) is not None and own > most:
            message = f"{own} completions of one client; at most {most} at once"
            raise ApiError(429, message, code="client_limit", retry_after=max(1, min(60, round(self.metrics.seconds))))
        free = max(0, self.llm.scheduler.max_rows - load.running)
        coming = worker.submitted - load.taken + count  # submitted, but not yet seen by the engine
        waiting = load.waiting + max(0, coming - free)
        # A client within its part of the queue finds room, however many others wait.
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
        """Release what the request held: its client has the answer, or has left."""
        self.held.subtract({prepared.client: len(prepared.requests)})
        self.held += Counter()  # drops clients without completions


_OWN = {"messages", "tools", "add_generation_prompt"}  # template variables that have fields of their own
_OF_ENGINE = {name: name for name in Generation.model_fields} | {"prompt": "prompt", "structured": "structured"}


def _param_of(message: str) -> str | None:
    """The field that an error of the engine or of ``SamplingParams`` starts with; None if it is about several."""
    found = re.match(r"(\w+)\b(?! \d+:)", message)  # "prompt 0: ..." is about a prompt with its parameters
    return _OF_ENGINE.get(found[1]) if found else None
