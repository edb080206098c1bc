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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest

from fly import __version__
from fly.drafts import draft_types
from fly.engine.worker import Stopped
from fly.errors import explain, shorten
from fly.llm import LLM
from fly.models.chat import pick
from fly.models.messages import for_template
from fly.models.thinking import ChatPrompt, Thinking
from fly.models.tokenizer import TooLong
from fly.serve import bodies
from fly.serve.answering import until_left
from fly.serve.answers import Echo, Prepared, Vocabulary
from fly.serve.clients import Client, Clients, Shares
from fly.serve.errors import ApiError, ClientLeft, invalid, invalid_form
from fly.serve.jsons import TooMuch, loads
from fly.serve.metrics import Measured, Metrics
from fly.serve.requests import ChatRequest, CompletionRequest, Generation, SpeculationRequest, TokenizeRequest
from fly.serve.rules import Rules, Speculation
from fly.serve.settings import Settings
from fly.serve.tools import FORMATS, CallFormat, format_of, grammar, wrong_with_tools
from fly.serve.trial import Trial
from fly.serve.turns import Busy, Turns
from fly.types import SamplingParams, StructuredOutput

__all__ = ["Service"]

_SCORES = 2**18  # most log-probabilities of prompt tokens in one answer (about 10 MB)
_MOMENT = 2**12  # a body of at most this many bytes is parsed at once, without a thread
_SHORT = 2**15  # a body of at most this many bytes is short work (about 30 ms)
_READ = 2**20  # most characters that /tokenize accepts (they take a few seconds and 200 MB)
_WAITING = 64  # pieces of long work that one client may have in the queue
T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class Service:
    """The model being served; all endpoints share it.

    Args:
        llm: a model with a tokenizer; the service owns it from now on.
        settings: the operator's settings.
        draft: the text of the model's draft, or "none". If the settings give the model's name, clients see "draft" in
            its place, unless it is the name of a strategy.
        name: the name by which clients ask for the model, unless the settings give one.

    Raises:
        ValueError: if the model has no tokenizer, or its settings contradict one another.
    """

    def __init__(self, llm: LLM, settings: Settings, draft: str, name: str) -> None:
        if llm.tokenizer is None:
            raise ValueError("this model has no tokenizer.json; a server of texts needs one")
        self.llm = llm
        self.settings = settings
        self.tokenizer = llm.tokenizer
        self.name = settings.name or name
        if settings.name is not None and draft not in ("none", *draft_types()):
            draft = "draft"  # its text would say what the model's name hides, such as a path
        self._named = llm.draft_names
        self.rules = Rules(
            llm.policy, llm.k if draft != "none" else 0, draft, settings.policies, settings.max_k,
            settings.require_lossless, self._named, llm.engine.runner.executor.promise,
        )  # fmt: skip
        self.metrics = Metrics(self.name)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.clients = Clients(settings)
        # Two pools of threads, so that short work need not wait for long work. A client may have as much short work in
        # the queue as it may have requests.
        processors = os.cpu_count() or 2
        self.short = Turns("fly-short", max(2, min(8, processors)), settings.max_connections)
        self.long = Turns("fly-long", max(2, min(4, processors)), _WAITING)
        self.draining = False
        self.requests = Shares(settings.max_connections)  # admitted requests whose answers are not sent yet
        self.held: Counter[str] = Counter()  # completions per client, running or in the queue
        self._trial = Trial(llm.grammars.spelling)
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

    def drain(self) -> None:
        """Take no more requests, and go on with those that are open."""
        self.draining = True

    def warm(self) -> None:
        """Build all tables now, so that the first requests need not wait for them."""
        self.tokenizer.warm()
        self.llm.grammars.warm(self._trial)
        _ = self.llm.vocabulary.texts

    def check_model(self, model: str | None) -> None:
        """Raise ``ApiError`` if a request asks for another model."""
        if model is not None and model != self.name:
            message = f"model {shorten(model)} is not served here; choose {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def read(self, kind: type[Model], request: HttpRequest) -> Model:
        """Read the body of a request. Raises ``ApiError``, and ``ClientLeft`` if the client leaves."""
        data = await request.body()
        work = partial(bodies.read, kind, data, request.headers.get("content-type", ""))
        return work() if len(data) <= _MOMENT else await self.run_aside(work, request)

    async def run_aside(self, work: Callable[[], T], request: HttpRequest, long: bool = False) -> T:
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

    async def prepare_aside(self, body: Generation, request: HttpRequest) -> Prepared:
        """Call ``prepare`` in a thread. Raises ``ClientLeft`` if the client leaves."""
        work = partial(self.prepare, body, request.state.client.name)
        return await self.run_aside(work, request, body.takes_time)

    def prepare(self, body: Generation, client: str = "") -> Prepared:
        """Convert a request to what the engine needs. Slow: call it in a thread. Raises ``ApiError``."""
        self.check_model(body.model)
        chosen = self.choose_speculation(body)
        self._check_count(body)
        # Encode the prompts. For a chat, also find out how its answer may think and call functions.
        calls = None
        prompts = list[list[int]]()
        name = "messages" if isinstance(body, ChatRequest) else "prompt"
        thinking = None
        if isinstance(body, ChatRequest):
            prompt = self.encode_conversation(body)
            prompts, thinking = [prompt], prompt.thinking
            if body.usable:
                calls = self.find_call_format()
                prompt.shown = (calls.opener, *filter(None, [calls.closer]))
        elif isinstance(body, CompletionRequest):
            prompts = [self.encode(prompt) for prompt in body.prompts]
        self._check_prompts(prompts, name, body)
        # Build the engine's requests. An error names the field that is wrong.
        params = self._build_params(body, prompts, client, calls, thinking)
        form = "tools" if body.calls_by_form else body.form or "response_format"
        draft = chosen.draft if chosen.draft in self._named else None
        try:
            requests = self.llm.requests(
                prompts, params, chosen.policy, chosen.k, body.priority or 0, draft, client, streamed=True,
                vet=self._trial,
            )  # fmt: skip
        except ValueError as error:
            message, param = str(error), _param_of(str(error))
            if param == "structured":
                if not body.calls_by_form:
                    raise invalid_form(form, message) from None
                message, param = wrong_with_tools(message, [function.name for function in body.usable]), form
            raise ApiError(400, message, param, "invalid_value") from None
        echoes = None
        if isinstance(body, CompletionRequest) and body.echo:
            prompt_echoes = [self.build_echo(prompt, body.logprobs is not None) for prompt in body.prompts]
            echoes = [echo for echo in prompt_echoes for _ in range(body.n or 1)]
        return Prepared(body, requests, sum(map(len, prompts)), chosen, echoes, client, form, calls)

    def _check_count(self, body: Generation) -> None:
        """Refuse a request for more completions than may run at once. To try again would not help, so this is final."""
        per_prompt = body.n or 1
        count = per_prompt * (len(body.prompts) if isinstance(body, CompletionRequest) else 1)
        at_once = min(self.settings.max_n, self.settings.max_open or self.settings.max_n)
        if count > at_once:
            raise invalid("prompt" if per_prompt == 1 else "n", f"{count} completions; at most {at_once} at once")

    def _check_prompts(self, prompts: list[list[int]], name: str, body: Generation) -> None:
        """Raise ``ApiError`` if a prompt is empty or leaves no room for an answer, or if too many log-probabilities are
        asked for. The error names the field ``name``, where the prompts come from."""
        for tokens in prompts:
            if not tokens:
                raise invalid(name, "empty; there is nothing to continue")
            if len(tokens) >= self.context:
                message = f"{len(tokens)} tokens of prompt leave no room in the model's context of {self.context}"
                raise ApiError(400, message, name, "context_length_exceeded")
        if (top := body.prompt_top()) is not None:
            entries = sum(map(len, prompts)) * (top + 1) * (body.n or 1)
            if entries > _SCORES:
                raise invalid(
                    name, f"log-probabilities of its tokens are {entries} entries; at most {_SCORES} are listed"
                )

    def _build_params(
        self,
        body: Generation,
        prompts: list[list[int]],
        client: str,
        calls: CallFormat | None,
        thinking: Thinking | None,
    ) -> SamplingParams:
        """Build the sampling parameters, with a grammar for tool calls if they need one. If the request has no seed,
        draw one here, so that the engine need not."""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        try:
            max_tokens = self.limit_tokens(body, prompts)
            params = body.params(self.llm.default_params, seed, max_tokens, self._salt(body, client))
            if isinstance(body, ChatRequest) and calls is not None and body.calls_by_form:
                form = self._form_of_calls(body, calls, params.structured, thinking)
                params = params.model_copy(update={"structured": form})
            return params
        except ValidationError as error:
            message = explain(error)
            param = ".".join(map(str, error.errors()[0]["loc"])) or _param_of(message)
            raise ApiError(400, message, param, "invalid_value") from None
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0], "invalid_value") from None

    def choose_speculation(self, body: Generation) -> Speculation:
        """Return the speculation of a request. Raises ``ApiError``."""
        request = body.speculation or SpeculationRequest()
        try:
            chosen = self.rules.choose(request.policy, request.k, request.draft, request.off)
        except ValueError as error:
            field, _, problem = str(error).partition(": ")
            raise invalid(f"speculation.{field}", problem) from None
        try:
            chosen.policy.bind(self.llm.vocabulary)
        except ValueError as error:
            raise invalid("speculation.policy", f"{str(chosen.policy)!r}: {error}") from None
        return chosen

    def find_call_format(self) -> CallFormat:
        """Return the format in which the model writes calls. Raises ``ApiError`` if it is none of the known ones."""
        if (call_format := format_of(pick(self.tokenizer.templates, None, tools=True).source)) is None:
            known_text = (
                f"is not known here (known: {', '.join(FORMATS)}); with tool_choice 'none' it answers without any"
            )
            problem = f"the way in which this model's chat template writes calls {known_text}"
            raise invalid("tools", problem, "unsupported_parameter")
        return call_format

    def _form_of_calls(
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

    def _salt(self, body: Generation, client: str) -> str:
        """Return the salt: requests share cached prefixes only if their salts are equal."""
        body_salt = body.cache_salt or ""
        return f"{client} {body_salt}" if self.clients.keyed and self.settings.share_prefixes == "key" else body_salt

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Encode a prompt that leaves room for an answer. Raises ``ApiError``."""
        if isinstance(prompt, list):
            return prompt
        with self._errors_about("prompt"):
            self.tokenizer.check_length(prompt, self.context - 1)
            return self.tokenizer.encode(prompt)

    @contextmanager
    def _errors_about(self, name: str) -> Iterator[None]:
        """Turn errors of encoding (the text is too long, or has half a surrogate pair) into an ``ApiError`` that names
        the field ``name``."""
        try:
            yield
        except TooLong as error:
            problem = f"too long for the model's context of {self.context} tokens: {error}"
            raise invalid(name, problem, "context_length_exceeded") from None
        except (TypeError, ValueError) as error:
            raise invalid(name, str(error)) from None

    def build_echo(self, prompt: str | list[int], scored: bool) -> Echo:
        """Return the prompt's text, which the answer repeats. If ``scored``, add the offsets of its tokens."""
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, False)
        return Echo(text, self.tokenizer.offsets(prompt) if scored else None)

    def encode_request(self, body: TokenizeRequest) -> list[int]:
        """Encode a text or a conversation. Raises ``ApiError``."""
        name = "messages" if body.prompt is None else "prompt"
        if (size := sum(map(len, body.texts()))) > _READ:
            raise invalid(name, f"{size} characters; at most {_READ} are encoded at once")
        if body.prompt is None:
            return self.encode_conversation(body)
        with self._errors_about("prompt"):
            return self.tokenizer.encode(body.prompt, body.add_special_tokens is not False)

    def decode(self, tokens: list[int]) -> str:
        """Decode token ids to text, special tokens included. Raises ``ApiError``."""
        size = self.llm.engine.runner.executor.config.vocab_size
        if (bad_token := next((token for token in tokens if token >= size), None)) is not None:
            raise invalid("tokens", f"{bad_token} is outside the vocabulary of {size}")
        return self.tokenizer.decode(tokens, False)

    def encode_conversation(self, body: ChatRequest | TokenizeRequest) -> ChatPrompt:
        """Encode messages with the chat template. A chat must leave room for an answer."""
        with self._errors_about("messages"):
            return self.tokenizer.apply_chat_template(
                for_template([message.to_dict() for message in body.messages or ()], _parse_arguments),
                body.opens_turn,
                at_most=self.context - 1 if isinstance(body, ChatRequest) else None,
                continue_final_message=body.continue_final_message,
                **self.collect_variables(body),
            )

    def collect_variables(self, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
        """Collect the chat template's variables, except the messages. Tools are left out if none may be called. Raises
        ``ApiError`` for a variable that the template does not read."""
        variables = body.chat_template_kwargs or {}
        if body.tools is None and not variables:
            return {}
        template_variables = self.tokenizer.template_variables
        if body.tools is not None and "tools" not in template_variables:
            raise invalid("tools", "the chat template of this model has none", "unsupported_parameter")
        if unread := sorted(variables.keys() - (template_variables - _OWN)):
            problem = f"this model's chat template does not read {unread}; it reads {sorted(template_variables - _OWN)}"
            raise invalid("chat_template_kwargs", problem)
        if body.tools is None or (isinstance(body, ChatRequest) and not body.usable):
            return variables
        return variables | {"tools": [tool.for_template() for tool in body.tools]}

    def limit_tokens(self, body: Generation, prompts: Sequence[list[int]]) -> int:
        """Return the limit of new tokens: the request's, or else the checkpoint's. If neither has one, it is OpenAI's
        default: 16 for completions, the rest of the context for chats."""
        most, wanted_tokens = self.settings.max_tokens, body.wanted_tokens
        if wanted_tokens is not None and most is not None and wanted_tokens > most:
            name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
            raise invalid(name, f"{wanted_tokens} exceeds this server's limit of {most}")
        room, default = self.context - min(map(len, prompts)), self.llm.default_params  # longer ones have less
        if wanted_tokens is None:
            if "max_tokens" in default.model_fields_set:
                wanted_tokens = max(default.max_tokens, body.min_tokens or 0)
            else:
                wanted_tokens = room if isinstance(body, ChatRequest) else max(16, body.min_tokens or 0)
        limit = room if most is None else min(room, most)
        if (body.min_tokens or 0) > limit:
            raise invalid("min_tokens", f"{body.min_tokens} exceeds the {limit} tokens that an answer may have here")
        return min(wanted_tokens, limit)

    def submit(self, prepared: Prepared, streamed: bool) -> Measured:
        """Submit a prepared request to the engine. Raises ``ApiError`` if the queue is full or the engine stopped."""
        worker = self.llm.worker
        load = worker.load
        count = len(prepared.requests)
        client_count = self.held[prepared.client] + count
        if (limit := self.settings.max_open) is not None and client_count > limit:
            message = f"{client_count} completions of one client; at most {limit} at once"
            raise ApiError(429, message, code="client_limit", retry_after=max(1, min(60, round(self.metrics.seconds))))
        free = max(0, self.llm.scheduler.max_rows - load.running)
        coming = worker.submitted - load.taken + count  # submitted, but not yet seen by the engine
        waiting = load.waiting + max(0, coming - free)
        # The queue is divided equally among clients. A client within its part is admitted even if the queue is full.
        part = self.settings.max_waiting // len({*self.held, prepared.client})
        if waiting > self.settings.max_waiting and client_count > part:
            retry_after = max(1, min(60, round(self.metrics.seconds * waiting / max(1, load.running))))
            message = f"the server is at its limit of waiting requests; try again in {retry_after} s"
            raise ApiError(429, message, code="queue_full", retry_after=retry_after)
        loop = asyncio.get_running_loop()
        job = Measured(prepared.requests, streamed, loop, self.settings.stream_interval, self.metrics)
        try:
            worker.submit(job)
        except Stopped as error:
            raise ApiError(503, str(error), code="engine_stopped") from None
        self.held[prepared.client] += count
        return job

    def release(self, prepared: Prepared) -> None:
        """Stop counting the request's completions: its client has the answer, or has left."""
        self.held.subtract({prepared.client: len(prepared.requests)})
        self.held += Counter()  # drops clients without completions


_OWN = {"messages", "tools", "add_generation_prompt"}  # template variables that have fields of their own
_OF_ENGINE = {name: name for name in Generation.model_fields} | {"prompt": "prompt", "structured": "structured"}


def _parse_arguments(text: str) -> Any:
    """Parse the arguments of a call that a client sends. Raises ``ApiError`` if there are too many of them."""
    try:
        return loads(text, once=False)
    except TooMuch as error:
        raise invalid("messages", f"arguments of a call: {error}") from None


def _param_of(message: str) -> str | None:
    """Return the field that begins an error message of the engine or of ``SamplingParams``; None if no field does."""
    match = re.match(r"(\w+)\b(?! \d+:)", message)  # "prompt 0: ..." may be about its parameters
    return _OF_ENGINE.get(match[1]) if match else None
