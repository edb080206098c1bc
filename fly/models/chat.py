"""Chat templates (Jinja). Knows nothing of tokens."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import cached_property, partial
from itertools import accumulate, chain, count, islice, takewhile
from typing import Any, NamedTuple

import jinja2
import jinja2.meta

from fly.errors import shorten
from fly.models.sandbox import Content, Parts, PartsPrinted, PartsWanted, Refusal, Sandbox
from fly.models.thinking import TAGS, Tags
from fly.models.traced import (
    EMPTY,
    END,
    OTHER,
    ROLE,
    TEMPLATE,
    UNKNOWN,
    Traced,
    end_of,
    message_number,
    message_writer,
    trace,
    writers_of,
)

__all__ = ["ChatTemplate", "conversation", "pick"]

_SPEAKERS = ("system", "developer", "user")  # roles whose messages must have a content
# The keys under which callers and templates store a message's thinking.
_REASONING = ("reasoning_content", "thinking", "reasoning")


Message = Mapping[str, Any]


class _Form(Enum):
    """What a content is to a template."""

    TEXT = auto()  # a text; ``PartsWanted`` if its characters are read as parts
    PARTS = auto()  # a list of parts; ``PartsPrinted`` if it is printed as a list
    ANY_TEXT = auto()  # a text, however it is read
    ANY_PARTS = auto()  # a list of parts, however it is read
    ONE_PART = auto()  # such a list, whose only part has the whole text


_Forms = Mapping[str, _Form]  # by role; ``TEXT`` for all others


class ChatTemplate:
    """A chat template, which runs in a sandbox with transformers' extensions (``fly.models.sandbox``).

    Args:
        source: the Jinja source.
        name: the name by which the checkpoint and errors know it.
    """

    def __init__(self, source: str, name: str = "default") -> None:
        self.source, self.name = source, name

    def render(
        self,
        messages: Sequence[Message],
        trusted: Mapping[str, Any],
        untrusted: Mapping[str, Any],
        continued: bool = False,
    ) -> Traced:
        """Render a conversation. The result knows who wrote each character (``fly.models.traced``).

        A content is a text to the template. It is a list of parts if the template reads parts of contents, or if the
        caller gave parts and the template refuses their text. A call's
        arguments are an object or its JSON, a content that a message lacks is absent, None or empty, and calls of one
        message are one after another with their results, whichever the template takes and shows; what it takes as it
        is stays. A message that the template shows at other places of a conversation, but not here, is left out with a
        warning, and so are calls that it never shows.

        Args:
            messages: what ``conversation`` returns.
            trusted: variables that count as the template's own writing, such as the names of special tokens.
            untrusted: variables that count as messages' writing, such as ``tools``.
            continued: whether to end after the last message's content, so that the answer continues it.

        Raises ``ValueError`` that names the template if it refuses the messages (a template is a program, so it may
        raise any error), or if it shows nothing of a message that has a text.
        """
        if continued and not (messages and _text_of(messages[-1])):
            raise ValueError("continue_final_message: the last message has no text to continue")

        def attempt(messages: Sequence[Message], forms: _Forms, continued: bool = False) -> Traced:
            last = len(messages) - 1
            traced = [
                _trace_message(message, writers, forms.get(message["role"], _Form.TEXT), continued and number == last)
                for number, (message, writers) in enumerate(zip(messages, _list_writers(messages, forms)))
            ]
            variables = {**trace(trusted, TEMPLATE), **trace(untrusted, OTHER), "messages": traced}
            return EMPTY + self._compiled.render(variables)

        text, forms, messages, lost_calls = self._render_variant(partial(attempt, continued=continued), messages)
        lost = self._find_lost(attempt, messages, text, forms)
        for form in (_Form.ANY_PARTS, _Form.ONE_PART):
            with suppress(Exception):
                if lost:
                    other_forms = {**forms, **dict.fromkeys(lost, form)}
                    text = attempt(messages, other_forms, continued)
                    forms = other_forms
                    lost = self._find_lost(attempt, messages, text, forms)
        for role, number in lost.items():
            raise self.refusal(
                f"it shows nothing of message {number} (role {role!r}), {shorten(_text_of(messages[number]))}; "
                "leave the message out if that is what you want"
            )
        for kind, absent in (
            ("message", self._list_absent(messages, text, forms)),
            ("the calls of message", lost_calls),
        ):
            if absent:
                first = f"{kind} {absent[0]} (role {messages[absent[0]]['role']!r})"
                others = f" and {len(absent) - 1} others" if absent[1:] else ""
                warnings.warn(f"the chat template {self.name!r} leaves out {first}{others}", stacklevel=3)
        if not continued:
            return text
        end = writers_of(text).rfind(END) + 1 or end_of(text)
        if end is None:
            raise self.refusal("it does not show the end of the last message, which the answer would continue")
        return text[:end]

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads, such as ``messages`` and ``tools``. Raises ``ValueError``
        if the source is not a valid template."""
        try:
            return frozenset(jinja2.meta.find_undeclared_variables(_SANDBOX.parse(self.source)))
        except jinja2.TemplateError as error:
            raise self.refusal(error) from error

    @property
    def tags(self) -> Tags | None:
        """The thinking tags that the template mentions, or None."""
        return next((tags for tags in TAGS if any(tag in self.source for tag in tags)), None)

    def refusal(self, error: object) -> ValueError:
        """Return the error that the template refuses a conversation."""
        return ValueError(f"the chat template {self.name!r} refused the messages: {error}")

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """The compiled template. It is kept, because compiling takes a hundred times as long as rendering."""
        return _SANDBOX.from_string(self.source)

    def _render_variant(
        self, attempt: Callable[..., Traced], messages: Sequence[Message]
    ) -> tuple[Traced, _Forms, Sequence[Message], list[int]]:
        """Render the first variant of the messages that the template takes and whose calls it shows, or else the first
        that it takes. Return the rendered text, the forms of contents, the variant, and the numbers of the messages
        whose calls are not shown."""
        refusal: ValueError | None = None
        rendered: tuple[Traced, _Forms, Sequence[Message], list[int]] | None = None
        for variant in _list_variants(messages):
            try:
                text, forms = self._render_in_form(partial(attempt, variant), variant)
            except ValueError as error:
                # What the template says itself is clearer than how it fails on a form that it does not read.
                says = isinstance(error.__cause__, Refusal)
                if refusal is None or (says and not isinstance(refusal.__cause__, Refusal)):
                    refusal = error
                continue
            lost_calls = _list_lost_calls(variant, text, forms)
            if rendered is None or not lost_calls:
                rendered = text, forms, variant, lost_calls
            if not lost_calls:
                break
        if rendered is None:
            assert refusal is not None
            raise refusal
        return rendered

    def _render_in_form(
        self, attempt: Callable[[_Forms], Traced], messages: Sequence[Message]
    ) -> tuple[Traced, _Forms]:
        """Render with texts as contents, or with lists of parts for the roles of which the template reads parts. A
        template that also prints such a list, as Llama's print any result of a tool as JSON, gets a text if it takes
        one. Return the rendered text and the forms."""
        forms = dict[str, _Form]()
        refusal: Exception | None = None
        while True:
            try:
                return attempt(forms), forms
            except PartsWanted as error:
                number = len(messages) - 1 if error.writer == END else message_number(error.writer)
                forms[messages[number]["role"]] = _Form.PARTS
            except PartsPrinted as error:
                forms[error.role] = _Form.ANY_TEXT
            except Exception as error:
                refusal = refusal or error
                # The template may take parts. It gets them for each role of which the caller gave parts. It gets other
                # roles' texts as parts, unless it refused texts by ``raise_exception`` or printed parts as a list.
                next_forms = {}
                for message in messages:
                    form = forms.get(message["role"], _Form.TEXT)
                    reads_text = form is _Form.TEXT and not isinstance(error, Refusal)
                    if isinstance(message.get("content"), (list, str) if reads_text else list):
                        next_forms[message["role"]] = _PARTS_AFTER.get(form)
                if not any(next_forms.values()):
                    raise self.refusal(refusal) from (refusal if isinstance(refusal, Refusal) else error)
                forms |= {role: form for role, form in next_forms.items() if form is not None}

    def _find_lost(
        self, attempt: Callable[..., Traced], messages: Sequence[Message], text: Traced, forms: _Forms
    ) -> dict[str, int]:
        """Return the roles of whose texts the template cannot show all pieces, with the number of a message of which
        the rendered ``text`` lacks one.

        A template may leave out a message on purpose: Mistral's show the system's only before a question that comes
        last. So a role counts only if its message is also absent when the conversation ends with it, or with the next
        question.
        """
        lost = dict[str, int]()
        for number in self._list_absent(messages, text, forms):
            lost.setdefault(messages[number]["role"], number)
        for role, number in list(lost.items()):
            questions = (at for at in range(number + 1, len(messages)) if messages[at]["role"] == "user")
            for last in (number, next(questions, number)):
                begin = messages[: last + 1]
                with suppress(Exception):
                    if number not in self._list_absent(begin, attempt(begin, forms), forms):
                        lost.pop(role, None)
        return lost

    def _list_absent(self, messages: Sequence[Message], text: Traced, forms: _Forms) -> list[int]:
        """Return the numbers of the messages with a piece of text of which the rendered ``text`` shows nothing.
        Thinking may be absent, and so may a content beside calls of tools."""
        shown = set(writers_of(text))
        if UNKNOWN in shown:  # any message may be there
            return []
        absent = []
        for number, (message, writers) in enumerate(zip(messages, _list_writers(messages, forms))):
            missing = [piece for piece in writers.pieces if piece.writer not in shown]
            if not missing or message.get("tool_calls"):
                continue
            content = _text_of(message)
            answer = content if self.tags is None else content.rpartition(self.tags.close)[2]
            begin = len(content) - len(answer)
            # The last character of an open content has the writer ``END``.
            end = len(content.rstrip()) if END in shown and number == len(messages) - 1 else 0
            texts = (content[max(start, begin) : stop] for _, start, stop in missing if not start < end <= stop)
            if any(map(str.strip, texts)):
                absent.append(number)
        return absent


class _Piece(NamedTuple):
    """A piece of a message's text that has a ``writer`` of its own."""

    writer: str
    start: int
    end: int


# If a template fails with texts, it may take parts.
_PARTS_AFTER = {_Form.TEXT: _Form.PARTS, _Form.ANY_TEXT: _Form.ANY_PARTS}
_NAME = re.compile(r"[\w -]+")  # a role that spells no part of a control token but a word
_SANDBOX = Sandbox()


class _Writers(NamedTuple):
    """The pieces of a message's text, and the writer of its calls."""

    pieces: list[_Piece]
    calls: str


def _list_writers(messages: Sequence[Message], forms: _Forms) -> list[_Writers]:
    """Return the writers of each message. Its text is in pieces if the template gets its parts. The first piece has the
    writer of the message."""
    further_numbers = count(len(messages))
    writers = []
    for number, message in enumerate(messages):
        lengths = [len(_text_of(message))]
        if forms.get(message["role"]) in (_Form.PARTS, _Form.ANY_PARTS) and isinstance(message.get("content"), list):
            lengths = [len(part["text"]) for part in message["content"]]
        numbers = [number, *islice(further_numbers, max(len(lengths) - 1, 0))]
        spans = zip(numbers, accumulate(lengths), lengths)
        pieces = [_Piece(message_writer(each), end - length, end) for each, end, length in spans]
        writers.append(_Writers(pieces, message_writer(next(further_numbers))))
    return writers


def _list_lost_calls(messages: Sequence[Message], text: Traced, forms: _Forms) -> list[int]:
    """Return the numbers of the messages with calls of functions of which the rendered ``text`` shows nothing."""
    calling = [number for number, message in enumerate(messages) if _has_calls(message)]
    if not calling or UNKNOWN in (shown := set(writers_of(text))):
        return []
    writers = _list_writers(messages, forms)
    return [number for number in calling if writers[number].calls not in shown]


def _has_calls(message: Message) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, (list, tuple)) and any(
        isinstance(call, Mapping) and ("function" in call or "name" in call) for call in calls
    )


def _trace_message(message: Message, writers: _Writers, form: _Form, continued: bool) -> dict[str, Any]:
    """Return ``message`` with the writers of its texts, and its content in this ``form``."""
    traced = {}
    for name, value in message.items():
        if name == "role":
            traced[name] = trace(value, ROLE if _NAME.fullmatch(value) else OTHER)
        elif name == "content" and isinstance(value, (str, list)):
            traced[name] = _trace_content(message, writers.pieces, form, continued)
        else:
            traced[name] = trace(value, writers.calls if name == "tool_calls" else OTHER)
    return {trace(name, OTHER): value for name, value in traced.items()}


def _trace_content(message: Message, pieces: Sequence[_Piece], form: _Form, continued: bool) -> Any:
    """Return the content of a message in this ``form``. Whitespace around a piece is not the piece's writer's, since
    templates may show it alone."""
    text, content = _text_of(message), message["content"]
    writers = "".join(_write_core(text[piece.start : piece.end], piece.writer) for piece in pieces)
    if continued:
        last = len(text.rstrip() or text) - 1
        writers = writers[:last] + END * (len(text) - last)
    end = len(text) if continued else None
    if form is _Form.TEXT:
        return Content(text, writers, end)
    traced = Traced(text, writers, end)
    if form is _Form.ANY_TEXT:
        return traced
    if form is _Form.ONE_PART or isinstance(content, str):
        parts = [trace({"type": "text"}, OTHER) | {trace("text", OTHER): traced}]
    else:
        parts = [
            {**trace(part, OTHER), trace("text", OTHER): traced[piece.start : piece.end]}
            for part, piece in zip(content, pieces)
        ]
    return Parts(parts, message["role"]) if form is _Form.PARTS else parts


def _write_core(text: str, writer: str) -> str:
    before, core = len(text) - len(text.lstrip()), len(text.strip())
    return OTHER * before + writer * core + OTHER * (len(text) - before - core)


def _list_variants(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages, and then in other forms, as some templates need them: with other forms of calls' arguments,
    with a content of None, and with an empty one, where there is none; and all these with one call in a message."""
    seen = list[Sequence[Message]]()
    for single in (False, True):
        called = _with_single_calls(messages) if single else messages
        for content in (..., None, ""):
            variant = called if content is ... else [_fill_content(message, content) for message in called]
            for each in (variant, _with_other_arguments(variant)):
                if each not in seen:
                    seen.append(each)
                    yield each


def _with_single_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with each call in a message of its own, before its results: Llama's templates take no others.
    Results that name no call stay after the last."""
    converted = list[Message]()
    number = 0
    while number < len(messages):
        message = messages[number]
        number += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, (list, tuple)) or len(calls) < 2:
            converted.append(message)
            continue
        results: dict[str, list[Message]] = {}  # by the id of their call
        for result in takewhile(lambda each: each["role"] == "tool", islice(messages, number, None)):
            results.setdefault(str(result.get("tool_call_id")), []).append(result)
            number += 1
        for call in calls:
            converted.append({**message, "tool_calls": [call]})
            message = {"role": message["role"]}
            if isinstance(call, Mapping) and call.get("id") is not None:
                converted += results.pop(str(call["id"]), ())
        converted += chain.from_iterable(results.values())
    return converted


def _fill_content(message: Message, content: str | None) -> Message:
    """Return the message with this ``content`` if it has none and may lack one."""
    return message if message.get("content") or message["role"] in _SPEAKERS else {**message, "content": content}


def _with_other_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the arguments of their calls in the other form: objects as JSON, JSON as objects."""
    converted = []
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), (list, tuple)):
            message = {**message, "tool_calls": [_convert_call(call) for call in calls]}
        converted.append(message)
    return converted


def _convert_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _convert_arguments(function)}
    return _convert_arguments(call)


def _convert_arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    with suppress(TypeError, ValueError, RecursionError):  # they have no other form
        if isinstance(arguments, Mapping):
            return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if isinstance(arguments, str) and isinstance(parsed := json.loads(arguments), dict):
            return {**function, "arguments": parsed}
    return function


def _text_of(message: Message) -> str:
    """Return the text of a message, or nothing if its content is of another kind."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def pick(templates: Mapping[str, ChatTemplate], name: str | None, tools: bool) -> ChatTemplate:
    """Return the template called ``name``. If ``name`` is None, return ``tool_use`` if there are ``tools`` and such a
    template, otherwise ``default``. Raises ``ValueError`` that names the choices."""
    template_name = name or ("tool_use" if tools and "tool_use" in templates else "default")
    if (template := templates.get(template_name)) is not None:
        return template
    if not templates:
        raise ValueError("this checkpoint has no chat template; give the prompt as plain text")
    missing = "no chat template 'default'" if name is None else f"no chat template {name!r}"
    raise ValueError(f"this checkpoint has {missing}; choices: {sorted(templates)}")


def conversation(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to the form that ``ChatTemplate.render`` takes.

    A message may have its thinking under ``reasoning_content``, ``thinking`` or ``reasoning``; the result has it under
    the first two. A field that is None is left out, as transformers does, and so is an empty list of calls: many
    templates take any list for calls, and look for the first. A content is a text, a list of parts of text
    (``{"type": "text", "text": ...}``), or data that only some templates read. Raises ``ValueError`` for anything that
    is not a message.
    """
    converted = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {message!r} is not a dictionary with a role and a content")
        if not isinstance(message.get("role"), str) or (
            message["role"] in _SPEAKERS and message.get("content") is None
        ):
            lacks = "content" if isinstance(message.get("role"), str) else "role"
            raise ValueError(f"message {number} has no {lacks}: {shorten(dict(message))}")
        fields = {name: value for name, value in message.items() if value is not None}
        if not fields.get("tool_calls", True):
            del fields["tool_calls"]
        if isinstance(content := fields.get("content"), (list, tuple)):
            fields["content"] = _check_parts(number, content)
        thought = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        converted.append(fields if thought is None else {"thinking": thought, **fields, "reasoning_content": thought})
    return converted


def _check_parts(number: int, parts: Sequence[Any]) -> list[Any]:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            form = "{'type': 'text', 'text': ...}"
            raise ValueError(f"message {number} has a part that is not text: {shorten(part)}; only {form} is supported")
    return list(parts)
