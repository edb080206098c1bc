"""What clients may send: OpenAI's requests with our extensions, as pydantic models. Knows nothing of engines.

A field that is not here is an error that names it, as is a value that cannot be had. Fields that OpenAI's service knows
and this one cannot give any meaning are not here, or allow their neutral value only.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from fly.types import SamplingParams

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Generation",
    "Message",
    "Part",
    "SpeculationRequest",
    "TokenizeRequest",
]

# A limit of length has pydantic read it as Unicode, which half a surrogate pair is not.
Word = Annotated[str, Field(min_length=0)]
_MOST = 1024  # entries of a small list or mapping
_LONGEST = 64 << 10  # characters of all bad words
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# One error is enough: a list of a million wrong entries would make a million.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=_MOST)]


class _Body(BaseModel):
    """Values are taken as they are: a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        """Named all at once, before anything else is looked at."""
        if (
            not isinstance(data, dict) or data.keys() <= (known := _known(cls)).keys()
        ):  # of which a body may have 100,000
            return data
        if unknown := [name for name in data if name not in known]:
            shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            raise PydanticCustomError(
                "unknown_parameter",
                "unknown or unsupported: {shown}; known: {known}",
                {"shown": shown, "known": ", ".join(known), "name": str(unknown[0])},
            )
        return data


@functools.cache
def _known(model: type[BaseModel]) -> dict[str, None]:
    """The names of its fields, as clients know them, in their order."""
    return {field.alias or name: None for name, field in model.model_fields.items()}


class SpeculationRequest(_Body):
    """How drafts are made and judged for this request, within what the operator enabled.

    ``policy`` is a text such as ``fly(theta=0.3) & after(2)``, or the same as a mapping. ``k`` tokens are drafted a
    round at most, by ``draft``. ``off`` decodes without speculation. ``provenance`` asks for the reason, the
    target's own choice and its entropy of every token.
    """

    policy: Annotated[str, Field(min_length=1)] | dict[str, Any] | None = None
    k: int | None = None
    draft: str | None = None
    off: bool = False
    provenance: bool = False


class StreamOptions(_Body):
    """``include_usage``: a last chunk without choices has the usage."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JSONSchema(_Body):
    """A form for the answer. ``strict`` changes nothing: the form always holds."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The form of the answer: plain text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError(f"type {self.type!r} {'needs' if self.json_schema is None else 'takes no'} json_schema")
        return self


class Generation(_Body):
    """What both endpoints share. None is the default: for sampling, that of the checkpoint.

    ``user``, ``metadata``, ``safety_identifier`` and ``prompt_cache_key`` are for a service's own records; they are
    taken and have no effect. ``cache_salt``, as in vLLM: nothing of the prompt is shared with requests of another one.
    """

    model: str
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: Finite | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop: Word | Annotated[list[Word], Field(fail_fast=True, max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=_MOST)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Finite | None = Field(None, ge=-2, le=2)
    frequency_penalty: Finite | None = Field(None, ge=-2, le=2)
    repetition_penalty: Finite | None = Field(None, gt=0)
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    bad_words: Annotated[list[Word], Field(fail_fast=True, max_length=_MOST)] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationRequest | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_biases(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(bias := data.get("logit_bias"), dict) and len(bias) > _MOST:
            raise ValueError(f"logit_bias: {len(bias)} entries; at most {_MOST} are read")
        return data

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

    @property
    def wanted_tokens(self) -> int | None:
        """The limit that the request sets itself."""
        return self.max_tokens

    @property
    def takes_time(self) -> bool:
        """Whether there is more to prepare than a text to read: a grammar to compile, words to spell."""
        return bool(self.bad_words) or (self.response_format is not None and self.response_format.type == "json_schema")

    @property
    def explains(self) -> bool:
        """Whether every token is to be accounted for."""
        return self.speculation is not None and self.speculation.provenance

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def top(self) -> int | None:
        """How many likely tokens to list at each place; None for no log-probabilities at all."""
        raise NotImplementedError

    def prompt_top(self) -> int | None:
        """The same of the prompt."""
        return None

    def params(self, default: SamplingParams, seed: int, max_tokens: int, salt: str = "") -> SamplingParams:
        """How it is sampled. Raises ``ValueError`` whose text starts with the name of the field."""
        names = (
            *("temperature", "top_p", "top_k", "min_p", "n", "min_tokens", "ignore_eos"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        )
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name in ("stop", "stop_token_ids", "bad_words"):
            if (value := getattr(self, name)) is not None:
                given[name] = value if isinstance(value, str) else tuple(value)
        if self.logit_bias is not None:
            if bad := [key for key in self.logit_bias if not (key.isascii() and key.isdigit() and len(key) < 10)]:
                raise ValueError(f"logit_bias: {bad[0]!r} is no token id")
            given["logit_bias"] = {int(key): value for key, value in self.logit_bias.items()}
        if (form := self.response_format) is not None and form.type != "text":
            schema = form.json_schema
            given["structured"] = {"json_object": True} if schema is None else {"json_schema": schema.schema_}
        return SamplingParams.model_validate(
            default.model_dump()
            | given
            | {"seed": seed, "max_tokens": max_tokens, "logprobs": self.top(), "explain": self.explains}
            | {"cache_salt": salt, "prompt_logprobs": self.prompt_top()}
        )


class CompletionRequest(Generation):
    """``/v1/completions``. Texts are read as they stand, special tokens included. ``echo`` with ``logprobs`` lists the
    prompt's tokens too; ``prompt_logprobs`` does so, as vLLM has it, in a list of its own."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=_MOST)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1)
    suffix: None = None

    @model_validator(mode="after")
    def _what_cannot_be_had(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of: {self.best_of} is not supported beyond n; every completion is returned")
        if self.stream and self.prompt_top() is not None:
            name = "prompt_logprobs" if self.prompt_logprobs is not None else "echo: with logprobs it"
            raise ValueError(f"{name} comes with a whole answer only, not with stream: true")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def top(self) -> int | None:
        return self.logprobs

    def prompt_top(self) -> int | None:
        asked = self.prompt_logprobs, self.logprobs if self.echo else None
        return max((most for most in asked if most is not None), default=None)


class Part(TypedDict):
    """A piece of a message. There are no images, sounds or files here. (No ``_Body``, since of these a request may have
    100,000, and they are read in the event loop.)"""

    __pydantic_config__ = _Body.model_config  # type: ignore[misc]  # as pydantic has it

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message. A message of an answer can be sent back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=_MOST)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=_MOST)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text in one piece, and nothing that was not said."""
        parts = self.content or ()
        content = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
        said = {
            "name": self.name,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | {name: value for name, value in said.items() if value is not None}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4 * _MOST)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=_MOST)]


class ChatRequest(Generation):
    """``/v1/chat/completions``. ``tools`` go to the chat template, as do ``chat_template_kwargs``; what the model says
    of tools is its text."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=_MOST)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_completion_tokens: give this or max_tokens")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(_Body):
    """``/tokenize``: of a text, or of a conversation by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """``/detokenize``: the text of tokens, special ones included."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
