"""Conversations as clients send them: messages, and functions that the model may call. Knows nothing of engines.

Unknown fields are errors that name the field.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Annotated, Any, Literal, NotRequired, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from fly.errors import did_you_mean, shorten

__all__ = [
    "MOST",
    "Body",
    "Conversation",
    "Function",
    "Message",
    "Messages",
    "NamedTool",
    "Part",
    "Tool",
    "Tools",
    "known_fields",
]

MOST = 1024  # most entries of a small list or mapping


class Body(BaseModel):
    """A body, or an object within one. Values are not converted: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, data: Any) -> Any:
        """Refuse unknown fields, all in one error, before anything else is checked."""
        fields = known_fields(cls)
        if isinstance(data, dict) and not data.keys() <= fields.keys():  # must be quick: there may be 100,000 messages
            if "type" in fields and isinstance(data.get("type"), str) and data["type"] not in _known_types(cls):
                return {name: data[name] for name in fields if name in data}  # its type, which says more, is the error
            unknown = [name for name in data if name not in fields]
            place = cls._place({name: data[name] for name in unknown}) if len(unknown) < 6 else ""
            shown = [
                shorten(name) + (did_you_mean(name, fields) if not place and len(name) < 100 else "")
                for name in unknown[:5]
            ]
            raise PydanticCustomError(
                "unknown_parameter",
                "unknown or unsupported: {shown}; known: {known}",
                {
                    "shown": ", ".join(shown) + (", ..." if len(unknown) > 5 else "") + place,
                    "known": ", ".join(fields),
                    "name": str(unknown[0])[:100],
                },
            )
        return data

    @classmethod
    def _place(cls, unknown: dict[str, Any]) -> str:
        """Return a hint at the object that takes these fields, or nothing if none does."""
        return ""


@functools.cache
def known_fields(model: type[BaseModel]) -> dict[str, None]:
    """Return the names of a model's fields as clients know them, in order."""
    return {field.alias or name: None for name, field in model.model_fields.items()}


def _known_types(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the values that the field ``type`` of a model may have."""
    return get_args(model.model_fields["type"].annotation)


class Part(TypedDict):
    """A part of a message. Images, sounds and files are not supported. This is not a ``Body``, because a request may
    have 100,000 parts and they are read in the event loop."""

    __pydantic_config__ = Body.model_config  # type: ignore[misc]  # pydantic's way to configure a TypedDict

    type: Literal["text"]
    text: str


class CalledFunction(TypedDict):
    """The function that a call names. Further fields are allowed, and go to the chat template."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    name: str


class MessageCall(TypedDict):
    """A call that a message repeats. Further fields are allowed, and go to the chat template."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    id: NotRequired[str | None]
    function: CalledFunction


class Message(Body):
    """A message. The message of an answer can be sent back unchanged. ``parsed`` is what OpenAI's client adds to
    it, the object that it has read from the content; the template does not get it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MOST)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(fail_fast=True, max_length=MOST)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of the role {self.role!r} needs a content")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part["text"] for part in parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that chat templates read, absent ones left out."""
        names = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4 * MOST)]


class Function(Body):
    """A function that the model may call, with a JSON schema of its arguments. If the request requires a call, the call
    always matches the schema. Other calls match it only with ``strict``."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    return_: dict[str, Any] | None = Field(None, alias="return")

    @property
    def schema_(self) -> dict[str, Any]:
        """The schema of the arguments. A function without ``parameters`` has no arguments."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(Body):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        return self.model_dump(by_alias=True, exclude_unset=True, exclude={"function": {"strict"}})


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def _each_once(tools: list[Tool]) -> list[Tool]:
    names = Counter(tool.function.name for tool in tools)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two functions are called {twice[0]!r}")
    return tools


Tools = Annotated[list[Tool], Field(fail_fast=True, min_length=1, max_length=MOST), AfterValidator(_each_once)]


class Conversation(Body):
    """What the chat template renders. With ``continue_final_message``, the last message's turn stays open and the
    answer continues it; without ``add_generation_prompt`` no turn is opened for the answer."""

    tools: Tools | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MOST)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _goes_on_or_opens(self) -> Conversation:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not with add_generation_prompt: true")
        return self

    @property
    def opens_turn(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
