"""Chat templates (Jinja), and the splitting of answers into thinking and text. Knows nothing of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fly.errors import short

__all__ = ["ChatPrompt", "ChatTemplate", "Kind", "Splitter", "Tags", "Thinking", "conversation", "pick"]

Kind = Literal["text", "reasoning"]
_SPEAKERS = ("system", "developer", "user")  # roles whose messages must have a content
# The keys under which callers and templates store a message's thinking.
_REASONING = ("reasoning_content", "thinking", "reasoning")


_BLANKS = 64  # the most whitespace characters that may precede the opening tag


class Tags(NamedTuple):
    """The tags that models write before and after their thinking."""

    open: str
    close: str


# Model families use different tags. If a template mentions one of them, its model thinks.
TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Thinking:
    """The tags of a model that may begin an answer with thinking. ``begun`` means that the prompt ends with the opening
    tag."""

    tags: Tags
    begun: bool = False


class ChatPrompt(list[int]):
    """Token ids of a conversation.

    Attributes:
        thinking: the tags with which the answer may begin; None if the model does not think. Thinking comes before
            structured output.
        shown: special tokens that stay in the text of the answer, such as the tags around tool calls.
    """

    def __init__(self, ids: Iterable[int], thinking: Thinking | None = None, shown: Iterable[str] = ()) -> None:
        super().__init__(ids)
        self.thinking, self.shown = thinking, tuple(shown)


class Splitter:
    """Splits a streamed answer into thinking and text. The answer may arrive in pieces of any size.

    There is thinking if the answer begins with the opening tag, or the prompt ends with it. It ends at the closing tag.
    Newlines around it belong to neither part. An answer that ends before the closing tag is all thinking. No part of a
    tag is ever returned. If ``thinking`` is None, everything is text.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = thinking
        self._held = ""  # received, but not returned, because it may be the beginning of a tag
        self._newlines = 0  # newlines held back before ``_held``; they are dropped if no more thinking follows
        # "start": thinking may begin; "think": inside it; "answer": after it, before any text; "text": in the text
        self._state = "text" if thinking is None else "think" if thinking.begun else "start"
        self._fresh = True  # no thinking has been returned yet
        self._pushed = 0
        self.tokens = 0  # tokens received up to the closing tag, tags included

    def push(self, text: str, tokens: int = 1) -> list[tuple[Kind, str]]:
        """Add ``text``, which has ``tokens`` tokens. Return the thinking and text that are now final, in order, without
        empty pieces."""
        self._pushed += tokens
        self._held += text
        found = [piece for piece in self._settle() if piece[1]]
        if self._state == "think":
            self.tokens = self._pushed
        return found

    def finish(self, rest: str = "") -> list[tuple[Kind, str]]:
        """Add the last piece. Return everything that is left, including text that was held back."""
        found = self.push(rest, 0)
        kind: Kind = "reasoning" if self._state == "think" else "text"
        left, self._held = self._held, ""
        if kind == "reasoning":
            left = self._thought(left.rstrip("\n"))
        return [*found, (kind, left)] if left else found

    def _thought(self, text: str) -> str:
        """Return ``text`` with the newlines that were held back before it. They are dropped if the thinking begins
        here."""
        if not text:
            return ""
        text = text.lstrip("\n") if self._fresh else "\n" * self._newlines + text
        self._fresh, self._newlines = False, 0
        return text

    def _settle(self) -> Iterator[tuple[Kind, str]]:
        # A piece of text can pass through several states, so do not stop after one.
        if self._state == "start":
            assert self._thinking is not None
            begins, tag = self._held.lstrip(), self._thinking.tags.open
            if len(self._held) - len(begins) > _BLANKS:
                self._state = "text"
            elif begins.startswith(tag):
                self._state, self._held = "think", begins[len(tag) :]
                self.tokens = self._pushed
            elif not tag.startswith(begins):  # the text cannot become the tag any more
                self._state = "text"
        if self._state == "think":
            assert self._thinking is not None
            thought, close, after = self._held.partition(tag := self._thinking.tags.close)
            if close:
                self._state, self._held, self.tokens = "answer", after, self._pushed
                yield "reasoning", self._thought(thought.rstrip("\n"))
                self._fresh, self._newlines = False, 0
            else:
                # Hold back the end of the text if it may be the beginning of the closing tag.
                keep = len(thought) - next(n for n in range(len(tag), -1, -1) if thought.endswith(tag[:n]))
                self._held, settled = thought[keep:], thought[:keep].rstrip("\n")
                yield "reasoning", self._thought(settled)
                self._newlines += keep - len(settled)
        if self._state == "answer":
            self._held = self._held.lstrip("\n")
            self._state = "text" if self._held else "answer"
        if self._state == "text":
            settled, self._held = self._held, ""
            yield "text", settled

    @staticmethod
    def split(thinking: Thinking | None, answer: str) -> tuple[str, str]:
        """Return the thinking and the text of a whole answer."""
        pieces = Splitter(thinking).finish(answer)
        reasoning, text = ("".join(piece for kind, piece in pieces if kind == k) for k in ("reasoning", "text"))
        return reasoning, text


class ChatTemplate:
    """A template that runs in a sandbox. It has transformers' extensions: the functions ``raise_exception`` and
    ``strftime_now``, a ``tojson`` that writes plain JSON, ``break`` and ``continue``, and ``generation`` blocks."""

    def __init__(self, source: str) -> None:
        self.source = source

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with ``variables``. A template is a program: it may raise any error."""
        return self._compiled.render(variables)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads, such as ``messages`` and ``tools``. Raises ``ValueError``
        if the source is not a valid template."""
        try:
            return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(self.source)))
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    @property
    def tags(self) -> Tags | None:
        """The thinking tags that the template mentions, or None."""
        return next((tags for tags in TAGS if any(tag in self.source for tag in tags)), None)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """The compiled template. It is kept, because compiling takes a hundred times as long as rendering."""
        return _environment().from_string(self.source)


class _Generation(jinja2.ext.Extension):
    """Supports ``{% generation %}`` blocks. They mark the model's own text for training and render as their content."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.filters["tojson"] = tojson
    return made


def pick(templates: Mapping[str, ChatTemplate], name: str | None, tools: bool) -> ChatTemplate:
    """Return the template called ``name``. If ``name`` is None, return ``tool_use`` if there are ``tools`` and such a
    template, otherwise ``default``. Raises ``ValueError`` that names the choices."""
    wanted = name or ("tool_use" if tools and "tool_use" in templates else "default")
    if (found := templates.get(wanted)) is not None:
        return found
    if not templates:
        raise ValueError("this checkpoint has no chat template; give the prompt as plain text")
    missing = "no chat template 'default'" if name is None else f"no chat template {name!r}"
    raise ValueError(f"this checkpoint has {missing}; choices: {sorted(templates)}")


def conversation(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages to the form that templates read.

    A message may have its thinking under ``reasoning_content``, ``thinking`` or ``reasoning``; the result has it under
    the first two. The parts of a content (``{"type": "text", ...}``) become one text. Raises ``ValueError`` for
    anything that is not a message.
    """
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {message!r} is not a dictionary with a role and a content")
        if "role" not in message or (message["role"] in _SPEAKERS and message.get("content") is None):
            lacks = "content" if "role" in message else "role"
            raise ValueError(f"message {number} has no {lacks}: {short(dict(message))}")
        made = {**message, "content": _text(number, message["content"])} if "content" in message else dict(message)
        thought = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        found.append(made if thought is None else {"thinking": thought, **made, "reasoning_content": thought})
    return found


def _text(number: int, content: object) -> object:
    """Join the text parts of a content; return any other content unchanged."""
    if not isinstance(content, (list, tuple)):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            form = "{'type': 'text', 'text': ...}"
            raise ValueError(f"message {number} has a part that is not text: {short(part)}; only {form} is supported")
    return "".join(part["text"] for part in content)
