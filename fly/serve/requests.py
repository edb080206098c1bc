"""Request bodies: OpenAI's fields with extensions, as pydantic models. Knows nothing of engines.

Unknown fields and unsupported values are errors that name the field. OpenAI's fields that mean nothing here are unknown
too, or allow only their neutral value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BeforeValidator, Field, model_validator

from fly.runner.structured import LONGEST
from fly.serve.messages import MOST, Body, Conversation, Function, Messages, NamedTool, known_fields
from fly.types import SamplingParams

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Generation",
    "SpeculationRequest",
    "TokenizeRequest",
]

# With a length limit, pydantic checks that the text is valid Unicode; half a surrogate pair is not.
Word = Annotated[str, Field(min_length=0)]
Stop = Annotated[str, Field(min_length=0, max_length=1024)]
_LONGEST = 64 << 10  # most characters of all bad words together
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# One error is enough: a list of a million wrong entries would yield a million errors.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST)]


def _limit_size(value: Any) -> Any:
    """Limit a mapping's size before its entries are checked, because each wrong entry is an error of its own."""
    if isinstance(value, dict) and len(value) > MOST:
        raise ValueError(f"{len(value)} entries; at most {MOST} are read")
    return value


Few = BeforeValidator(_limit_size)


def _shown(value: Any) -> str:
    """Write a value as a client would, or as dots if that is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else "..."


class SpeculationRequest(Body):
    """How to draft and verify tokens for this request, within what the operator enabled.

    ``policy`` is a text such as ``fly(theta=0.3) & after(2)``, or the same as a mapping. ``draft`` drafts at most ``k``
    tokens per round. ``off`` decodes without speculation. ``provenance`` lists for each token why it was kept, which
    token the target would have chosen, and the entropy there.
    """

    policy: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = None
    k: int | None = None
    draft: str | None = None
    off: bool = False
    provenance: bool = False

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, data: Any) -> Any:
        if isinstance(data, str):
            raise ValueError(f'a rule stands in an object: {{"policy": {_shown(data)}}}')
        return data


class StreamOptions(Body):
    """``include_usage``: send the usage in a last chunk without choices. ``continuous_usage_stats`` (from vLLM): also
    send the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JSONSchema(Body):
    """A JSON schema for the answer. ``strict`` changes nothing: the schema is always enforced."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer: plain text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError(f"type {self.type!r} {'needs' if self.json_schema is None else 'takes no'} json_schema")
        return self


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``: one constraint on the answer."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None


class Generation(Body):
    """Fields of both endpoints. None means the default; for sampling parameters, the checkpoint's default.

    ``user``, ``metadata``, ``safety_identifier`` and ``prompt_cache_key`` are for a service's own records; they are
    accepted and have no effect. These fields are vLLM's: requests share cached prefixes only if their ``cache_salt`` is
    the same; the smallest ``priority`` is served first; ``structured_outputs``, ``guided_json`` and the like constrain
    the answer; ``return_token_ids`` returns the token ids of prompt and answer.
    """

    path: ClassVar[str]  # of the endpoint
    model: str
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)  # 0 and -1: no limit
    min_p: Finite | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(None, gt=0)
    logit_bias: Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], Few] | None = None
    bad_words: Annotated[list[Word], Field(fail_fast=True, max_length=MOST)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=0, lt=2**31)  # clients may yield to others, but not jump the queue
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationRequest | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], Few] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @classmethod
    def _place(cls, unknown: dict[str, Any]) -> str:
        if unknown.keys() <= SpeculationRequest.model_fields.keys():
            return f' (write "speculation": {_shown(unknown)})'
        if unknown.keys() == {"extra_body"}:
            return " (an argument of OpenAI's client: in a body, what it holds stands beside the other fields)"
        paths = [kind.path for kind in Generation.__subclasses__() if unknown.keys() <= known_fields(kind).keys()]
        return f" (of {paths[0]})" if paths else ""

    @model_validator(mode="after")
    def _not_too_much_is_bad(self) -> Generation:
        if (size := sum(map(len, self.bad_words or ()))) > _LONGEST:
            raise ValueError(f"bad_words: {size} characters; at most {_LONGEST} are read")
        return self

    @model_validator(mode="after")
    def _stream_options_of_streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Generation:
        if len(forms := list(self._forms())) > 1:
            raise ValueError(f"{forms[1]}: the answer has one form; {forms[0]} is given too")
        return self

    def _forms(self) -> Iterator[str]:
        """Yield the names of the given fields that constrain the answer."""
        if self.response_format is not None and self.response_format.type != "text":
            yield "response_format"
        for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
            if getattr(self, name) is not None:
                yield name

    @property
    def form(self) -> str | None:
        """Name of the field that constrains the answer, or None."""
        return next(self._forms(), None)

    def structured(self) -> dict[str, Any] | None:
        """Return the constraint as in ``SamplingParams``. Raises ``ValueError``; its message starts with the field's
        name."""
        if (name := self.form) is None:
            return None
        if name == "response_format":
            assert self.response_format is not None
            schema = self.response_format.json_schema
            return {"json_object": True} if schema is None else {"json_schema": schema.schema_}
        if name == "structured_outputs":
            assert self.structured_outputs is not None
            form_fields = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            form_fields = {key: value for key, value in form_fields.items() if value is not False}
            if len(form_fields) != 1:
                form_names = list(known_fields(StructuredOutputs))
                raise ValueError(f"structured_outputs: give exactly one of {form_names}, not {list(form_fields)}")
            [(kind, value)] = form_fields.items()
        else:
            kind, value = name.removeprefix("guided_"), getattr(self, name)
        if kind == "choice":
            return {"grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)}
        if kind == "grammar":
            if len(value) > LONGEST:
                raise ValueError(f"{name}: {len(value)} characters; at most {LONGEST} are compiled")
            # Drop empty lines: to find the syntax, the library compares each of them with all lines after it.
            value = "\n".join(line for line in value.split("\n") if line.strip())
            try:
                return {"grammar": any_to_lark(value)}
            except Exception as error:  # whatever the library raises
                raise ValueError(f"{name}: cannot be read: {error}") from None
        return {"json_schema" if kind == "json" else kind: value}

    @property
    def wanted_tokens(self) -> int | None:
        """The request's own limit of tokens."""
        return self.max_tokens

    @property
    def usable(self) -> list[Function]:
        """The functions that the answer may call."""
        return []

    @property
    def calls_by_form(self) -> bool:
        """Whether a grammar restricts the calls."""
        return False

    @property
    def takes_time(self) -> bool:
        """Whether the request takes long to prepare: it has a grammar to compile or bad words to spell."""
        return bool(self.bad_words) or (
            self.form is not None and (self.response_format is None or self.response_format.type != "json_object")
        )

    @property
    def explains(self) -> bool:
        """Whether to explain every token."""
        return self.speculation is not None and self.speculation.provenance

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def with_running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.with_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def top(self) -> int | None:
        """Return the number of likely tokens to list at each position; None for no log-probabilities."""
        raise NotImplementedError

    def prompt_top(self) -> int | None:
        """Return the number of likely tokens to list at each position of the prompt; None for no log-probabilities."""
        return None

    def params(self, default: SamplingParams, seed: int, max_tokens: int, salt: str = "") -> SamplingParams:
        """Build the sampling parameters. Raises ``ValueError``; its message starts with the field's name."""
        fields = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            if bad_keys := [key for key in self.logit_bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
                raise ValueError(f"logit_bias: {bad_keys[0]!r} is not a token id")
            fields["logit_bias"] = {int(key): value for key, value in self.logit_bias.items()}
        if (form := self.structured()) is not None:
            fields["structured"] = form
        fields |= {"seed": seed, "max_tokens": max_tokens, "logprobs": self.top(), "explain": self.explains}
        return default.changed({**fields, "cache_salt": salt, "prompt_logprobs": self.prompt_top()})


_SAMPLED = Generation.model_fields.keys() & SamplingParams.model_fields.keys()


class CompletionRequest(Generation):
    """``/v1/completions``. Special tokens that a text prompt spells out are encoded as special tokens. ``echo`` with
    ``logprobs`` lists the prompt's tokens too; ``prompt_logprobs`` (from vLLM) lists them separately."""

    path = "/v1/completions"
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1)
    suffix: None = None

    @model_validator(mode="after")
    def _what_cannot_be_had(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of: {self.best_of} must equal n ({self.n or 1}): every completion is returned")
        if self.stream and self.prompt_top() is not None:
            name = "prompt_logprobs" if self.prompt_logprobs is not None else "echo: with logprobs it"
            raise ValueError(f"{name} needs a whole answer, not stream: true")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def top(self) -> int | None:
        return self.logprobs

    def prompt_top(self) -> int | None:
        counts = self.prompt_logprobs, self.logprobs if self.echo else None
        return max((most for most in counts if most is not None), default=None)


class ChatRequest(Conversation, Generation):
    """``/v1/chat/completions``. The chat template gets ``tools`` and ``chat_template_kwargs``."""

    path = "/v1/chat/completions"
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_completion_tokens: give this or max_tokens")
        if self.tools is None and self.must_call:
            raise ValueError("tool_choice: there are no tools to choose from")
        if isinstance(choice := self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            if choice.function.name not in names:
                raise ValueError(f"tool_choice: no function {choice.function.name!r}; choices: {names}")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def may_repeat(self) -> bool:
        """Whether an answer may have several calls. If the request names the function, there is one call."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @property
    def usable(self) -> list[Function]:
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(choice := self.tool_choice, NamedTool):
            return [function for function in functions if function.name == choice.function.name]
        return [] if choice == "none" else functions

    @property
    def calls_by_form(self) -> bool:
        loose = not self.must_call and self.parallel_tool_calls is not False and self.form is None
        return bool(self.usable) and not (loose and not any(function.strict for function in self.usable))

    @property
    def takes_time(self) -> bool:
        return self.calls_by_form or super().takes_time

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Conversation):
    """``/tokenize`` of a text, or of a conversation with the chat template. ``return_token_strs`` adds token texts."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is None and self.add_special_tokens:
            raise ValueError("add_special_tokens: the chat template puts what belongs before messages")
        return self

    def texts(self) -> Iterator[str]:
        """Yield the texts to encode."""
        if self.prompt is not None:
            yield self.prompt
        yield from (json.dumps(tool.for_template()) for tool in self.tools or ())
        yield from map(json.dumps, filter(None, [self.chat_template_kwargs]))
        yield from (message.text for message in self.messages or ())


class DetokenizeRequest(Body):
    """``/detokenize``: the text of token ids, special tokens included."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
