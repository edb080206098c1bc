"""The sandbox in which chat templates run: Jinja as transformers gives it to them, on text that knows its writers.

What a template writes, in its text and its constants, is ``Traced`` with the writer ``TEMPLATE``. Each operation either
keeps the writers, or makes a plain ``str``, whose writers are unknown. So nothing that a message wrote can pass for the
template's own.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, SupportsIndex

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import missing, pass_eval_context
from markupsafe import Markup

from fly.models.traced import (
    EMPTY,
    END,
    TEMPLATE,
    Traced,
    TracedMarkup,
    common_writer,
    dump_json,
    end_of,
    escape_text,
    rewritten_writers,
    text_of,
    trace,
    writers_of,
)

__all__ = ["Content", "Parts", "PartsPrinted", "PartsWanted", "Refusal", "Sandbox"]

_OF_PARTS = ("type", "text", "get")  # what templates read of a part of a content


class Refusal(jinja2.TemplateError):
    """A template has called ``raise_exception``."""


class Content(Traced):
    """A content that is a text, of which no character may be read as a part (``PartsWanted``)."""

    __slots__ = ()

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        text = super().__getitem__(key)
        kind = Content if isinstance(key, slice) else _Character
        return kind(text, writers_of(text), end_of(text))

    def __iter__(self) -> Iterator[str]:
        return map(_Character, str.__iter__(self), writers_of(self))


class _Character(Traced):
    """A character of a content."""

    __slots__ = ()


class Parts(list[Any]):
    """The parts of a content, which may not be printed as a list (``PartsPrinted``).

    Args:
        parts: the parts.
        role: the role of the message.
    """

    def __init__(self, parts: Iterable[Any], role: str) -> None:
        super().__init__(parts)
        self._role = role  # templates cannot read names that begin with "_"

    def __repr__(self) -> str:
        raise PartsPrinted(self._role)


class PartsWanted(Exception):
    """A template reads a character of a content, which has this ``writer``, as a part of the content."""

    def __init__(self, writer: str) -> None:
        super().__init__(writer)
        self.writer = writer


class PartsPrinted(Exception):
    """A template prints the parts of a content of this ``role`` as they are, instead of their texts."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.role = role


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with transformers' extensions: the functions ``raise_exception`` and ``strftime_now``, a
    ``tojson`` that writes plain JSON, ``break`` and ``continue``, and ``generation`` blocks. Templates render to
    ``Traced`` text."""

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, undefined=_Undefined)
        self.code_generator_class = _CodeGenerator
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: trace(datetime.now().strftime(form), TEMPLATE)
        self.filters = {**{name: _keep_writers(function) for name, function in FILTERS.items()}, **_FILTERS}

    # Code that ``_CodeGenerator`` writes calls these.
    concat = EMPTY.join
    text_of = staticmethod(text_of)

    @staticmethod
    def written(value: Any) -> Any:
        """Return a constant of the template."""
        return trace(value, TEMPLATE)

    @staticmethod
    def join_texts(values: Iterable[Any]) -> str:
        """Return the value of ``a ~ b``."""
        return EMPTY.join(map(text_of, values))

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_character(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_character(obj, argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        form = getattr(value, "__self__", None)
        if not isinstance(form, Traced) or getattr(value, "__name__", "") not in ("format", "format_map"):
            return super().wrap_str_format(value)

        def write(args: tuple[Any, ...], named: Any) -> str:
            formatter = _Formatter(self)
            formatter.vformat(form, args, named)
            return EMPTY.join(formatter.pieces or ())

        if value.__name__ == "format_map":
            return lambda named: write((), named)
        return lambda *args, **named: write(args, named)


class _Undefined(jinja2.Undefined):
    """What a value lacks. To errors, texts and parts are plain ones."""

    __slots__ = ()

    def __init__(self, hint: str | None = None, obj: Any = missing, *args: Any, **named: Any) -> None:
        plain = str.__str__(obj) if isinstance(obj, str) else list(obj) if isinstance(obj, Parts) else obj
        super().__init__(hint, plain, *args, **named)


class _CodeGenerator(CodeGenerator):
    """Writes code that marks the template's text and constants as its own, and prints values with their writers. Under
    ``autoescape`` values are printed as Jinja does it, without writers."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, (str, list, tuple, dict)):
            self.write(f"environment.written({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_TemplateData(node, frame)
        else:
            self.write(f"environment.written({node.data!r})")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.written({''.join(group)!r})"

    def _output_child_pre(self, node: jinja2.nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.text_of(")


class _Formatter(SandboxedFormatter):
    """Writes ``form.format(...)`` in pieces that keep their writers."""

    pieces: list[str] | None = None
    _writer = TEMPLATE  # who wrote the form's own text
    _specification: str = EMPTY  # of the value that comes next, such as ">8" in "{:>8}", with its writers

    def parse(self, form: Any) -> Iterable[Any]:
        if self.pieces is not None:
            return self._note_specification(form)
        self.pieces, self._writer = [], common_writer(form)
        return self._note_text(form)

    def _note_text(self, form: str) -> Iterator[Any]:
        assert self.pieces is not None
        for text, *field in string.Formatter.parse(self, form):
            self.pieces.append(trace(text, self._writer))
            yield text, *field

    def _note_specification(self, form: str) -> Iterator[Any]:
        """Read the specification of a value. Its own fields, such as "{w}" in "{:{w}}", are no pieces of the text."""
        assert self.pieces is not None
        before = len(self.pieces)
        yield from self._note_text(form)
        self._specification = EMPTY.join(self.pieces[before:])
        del self.pieces[before:]

    def format_field(self, value: Any, form: str) -> str:
        assert self.pieces is not None
        # If a message wrote the specification, it may have chosen the character that fills the width.
        by_template = set(writers_of(self._specification)) <= {TEMPLATE}
        writer = common_writer(value) if by_template else common_writer(value, self._specification)
        written = trace(format(value, form), writer) if form else text_of(value)
        self.pieces.append(written)
        return written


class _Generation(jinja2.ext.Extension):
    """Supports ``{% generation %}`` blocks. They mark the model's own text for training and render as their content."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _refuse(message: str) -> None:
    raise Refusal(message)


def _check_character(value: Any, name: Any) -> None:
    if isinstance(value, _Character) and name in _OF_PARTS and (writer := writers_of(value)) >= END:
        raise PartsWanted(writer)


def _check_printed(value: Any) -> None:
    """Raise ``PartsPrinted`` if there are parts of a content in data."""
    if isinstance(value, Parts):
        raise PartsPrinted(value._role)
    if isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_printed(each)


def _keep_writers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of Jinja's own that gives the text it makes the writer that all its inputs have."""

    @functools.wraps(function)
    def apply(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        if type(result) not in (str, Markup):
            return result
        inputs = args[1:] if hasattr(function, "jinja_pass_arg") else args
        writers = common_writer(*inputs, *named.values()) * len(result)
        return Traced(result, writers) if type(result) is str else TracedMarkup(result, writers)

    return apply


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_printed(value)
    return dump_json(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_eval_context
def _join(context: EvalContext, values: Iterable[Any], between: Any = EMPTY, attribute: str | int | None = None) -> str:
    return FILTERS["join"](context, values, between if isinstance(between, Markup) else text_of(between), attribute)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if isinstance(text, Markup):
        return FILTERS["indent"](text, width, first, blank)
    margin = width if isinstance(width, str) else trace(" " * width, TEMPLATE)
    begin, *lines = (text + _NEWLINE).splitlines()
    indented = (_NEWLINE + (margin + line if line or blank else line) for line in lines)
    return EMPTY.join([margin if first else EMPTY, begin, *indented])


def _mark_safe(value: Any) -> TracedMarkup:
    text = value if isinstance(value, str) else text_of(value)
    return TracedMarkup(text, writers_of(text))


def _title(value: Any) -> str:
    text = text_of(value)
    title = FILTERS["title"](text)
    return Traced(title, rewritten_writers(text, title, lambda part: 0))


def _string(value: Any) -> str:
    return value if isinstance(value, str) else text_of(value)


_NEWLINE = trace("\n", TEMPLATE)
# Jinja's filters that join texts, written so that they keep the writers.
_FILTERS = {
    "e": escape_text,
    "escape": escape_text,
    "forceescape": lambda value: escape_text(text_of(value)),
    "indent": _indent,
    "join": _join,
    "safe": _mark_safe,
    "string": _string,
    "title": _title,
    "tojson": _tojson,
}
