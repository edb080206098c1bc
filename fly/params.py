"""What a request may ask for. Knows nothing of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Self, TypedDict, Unpack

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fly.errors import shorten, suggest

__all__ = ["Sampling", "SamplingParams", "StructuredOutput"]


class Sampling(TypedDict, total=False):
    """The fields of ``SamplingParams``, as they may be given."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    explain: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    bad_words: Sequence[str]
    bad_words_ids: Sequence[Sequence[int]]
    n: int
    cache_salt: str
    structured: StructuredOutput | Mapping[str, Any] | None


class _Params(BaseModel):
    """Prints only what differs from the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        defaults = {
            name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()
        }
        return [(name, value) for name, value in super().__repr_args__() if name is None or value != defaults[name]]

    @model_validator(mode="before")
    @classmethod
    def _fields_exist(cls, values: object) -> object:
        fields = list(cls.model_fields)
        for name in values if isinstance(values, dict) else ():
            if name not in fields:
                raise ValueError(f"{str(name)!r} is no field of {cls.__name__}{suggest(str(name), fields)}")
        return values


class StructuredOutput(_Params):
    """The form that an output must have. Exactly one field is given.

    - ``json_schema``: JSON that is valid under a schema (a dictionary, or its JSON text), with properties in the
      schema's order.
    - ``json_object``: any JSON object.
    - ``regex``: a text that a regular expression matches as a whole (the syntax of Rust's regex, without look-around
      and backreferences).
    - ``grammar``: a text of a context-free grammar, in llguidance's variant of Lark's syntax.
    """

    json_schema: str | None = None  # JSON text
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        (kind,) = self._given()
        return kind

    @property
    def source(self) -> str:
        """The schema, expression or grammar; "" for any JSON object."""
        return self.json_schema or self.regex or self.grammar or ""

    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_is_an_object(cls, value: object) -> object:
        if value is None:
            return None
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            if isinstance(schema, dict):
                return value if isinstance(value, str) else json.dumps(schema, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{shorten(value)} is no JSON: {error}") from None
        raise ValueError(f"a schema is an object, or the JSON text of one, not {shorten(value)}")

    @model_validator(mode="after")
    def _one_form(self) -> StructuredOutput:
        if len(forms := self._given()) != 1:
            raise ValueError(f"give exactly one of {list(type(self).model_fields)}, not {forms}")
        return self


class SamplingParams(_Params):
    """How one request is sampled, and when it ends. Unknown fields and values out of range are errors.

    ``temperature`` 0 is greedy. ``top_k`` 0 (or -1), ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` None draws a random
    seed. The output ends at the first of these: one of ``stop_token_ids``, end-of-sequence (unless ``ignore_eos``), a
    ``stop`` string (it may spell control tokens), or ``max_tokens``. Before ``min_tokens`` no stop token can be drawn.
    ``logprobs`` n gives the target's log-probabilities of each token and of the n most likely ones (in the unprocessed
    distribution). ``explain`` records in the provenance how likely each token was, and how uncertain the target was
    (its entropy).

    ``prompt_logprobs`` n gives log-probabilities in the same way for the prompt's tokens, from
    ``prompt_logprobs_start`` on (token 0 has none, since nothing comes before it). Only the tokens before this start
    can come from the cache of other requests. With ``max_tokens`` 0 nothing is generated, and the prompt may be one
    token longer than the context.

    ``repetition_penalty`` (Keskar et al. 2019; 1 is off) divides the positive and multiplies the negative logits of
    tokens that occur in the prompt or the output. ``presence_penalty`` and ``frequency_penalty`` (OpenAI's, in [-2, 2])
    are subtracted from the logits of tokens that were generated before: the first once, the second once for each
    occurrence. ``logit_bias`` (in [-100, 100]) is added by token id. ``bad_words`` are texts that never appear (unless
    an unusual split over tokens spells one), and ``bad_words_ids`` are sequences of token ids that never appear. All
    these apply in this order, which is vLLM's, at every drafted position. No rule excuses a bad word.

    ``skip_special_tokens`` leaves control tokens out of the text. ``include_stop_str_in_output`` keeps the stop string
    that ended the text (and the stop token, if control tokens are shown).

    ``n`` is the number of completions. The seeds of the further ones are derived from the seed of the first.

    Requests that begin with the same tokens share their cache pages if they have the same ``cache_salt``. A salt that
    is hard to guess keeps others from finding out, by time or by ``stats.cached``, how this prompt begins.

    ``structured`` gives the output a form, such as ``{"regex": "yes|no"}`` (see ``StructuredOutput``). The form also
    applies at every drafted position, under any policy. End-of-sequence tokens, and stop tokens that are control
    tokens, are allowed exactly where the form may be complete. If nothing else may follow, the output ends with one of
    them, even under ``ignore_eos`` and before ``min_tokens``. So an output with the ``finish_reason`` ``"stop"`` has
    its form, unless a stop string or a stop token that is text has cut it. ``max_tokens`` (``"length"``) may cut it
    too. If bad words forbid everything that the form allows, the form wins.
    """

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, lt=2**63)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int = Field(default=256, ge=0)
    min_tokens: int = Field(default=0, ge=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs_start: int = Field(default=0, ge=0)
    explain: bool = False
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] = Field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    n: int = Field(default=1, ge=1)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: str = ""
    structured: StructuredOutput | None = None

    if TYPE_CHECKING:  # lists may stand for tuples, and a dictionary for a form

        def __init__(self, **fields: Unpack[Sampling]) -> None: ...

    def changed(self, fields: Mapping[str, Any]) -> Self:
        """Return a copy with these ``fields`` changed, and check all fields. Raises ``ValidationError``."""
        return self.model_validate(self.model_dump() | dict(fields))

    @property
    def penalises(self) -> bool:
        """Whether the request changes logits, by penalties, biases or bad words."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return any(penalties) or bool(self.logit_bias) or bool(self.bad_words or self.bad_words_ids)

    def check_ids(self, vocab_size: int) -> None:
        """Raise ``ValueError`` for token ids outside a vocabulary of ``vocab_size`` tokens."""
        bad_words_ids = [*chain(*self.bad_words_ids)]
        fields = {"stop_token_ids": self.stop_token_ids, "logit_bias": self.logit_bias, "bad_words_ids": bad_words_ids}
        for name, ids in fields.items():
            if outside := [token for token in ids if not 0 <= token < vocab_size]:
                raise ValueError(f"{name} {outside[:5]} are outside the vocabulary of {vocab_size}")

    @field_validator("bad_words", "bad_words_ids")
    @classmethod
    def _bad_words_say_something(cls, value: tuple[Sized, ...]) -> tuple[Sized, ...]:
        if not all(map(len, value)):
            raise ValueError("an empty bad word would forbid every output")
        return value

    @field_validator("top_k", mode="before")
    @classmethod
    def _minus_one_is_off(cls, value: object) -> object:
        return 0 if value == -1 else value  # as in vLLM

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _stops_say_something(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop string would end every output before it begins")
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ValueError(f"prompt_logprobs_start {self.prompt_logprobs_start}: only with prompt_logprobs")
        return self
