"""Tool calls: how model families write them, how to find them in an answer while it streams, and a grammar that
restricts an answer to the functions it may call. Knows nothing of HTTP or engines."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from string import ascii_letters, digits, hexdigits
from typing import Any, NamedTuple, TypeVar

from fly.models.thinking import Thinking
from fly.models.tokenizer import Tokenizer
from fly.serve.jsons import DEEPEST, loads

__all__ = ["FORMATS", "Call", "CallFormat", "CallReader", "format_of", "grammar", "wrong_with_tools"]

# What a template with the format of Hermes shows the model: an object in the tags, with a name and arguments.
_HERMES = re.compile(r"""<tool_call>(?:\\n|[^\w<>])*\{\\?["'](?:name|arguments)\b""")
_FENCE = "```json"
_SPACE = r"[ \n]{0,16}"
_MOST = 16  # most calls in one answer, because small models that must call would never stop
_ARGUMENTS = "arguments", "parameters"  # the keys under which families write the arguments
_KEYS = {"name", *_ARGUMENTS, "type", "id"}  # the keys of a call
_BLANKS = " \t\n\r"
_SCALAR = frozenset(f"{ascii_letters}{digits}+-.")
_SCALARS = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
T = TypeVar("T")
_Rule = Generator[None, str, T]


@dataclass(frozen=True)
class CallFormat:
    """How a family's models write calls: JSON with a name and arguments, one call after another.

    ``opener`` stands before each call, or, with ``listed``, once before a JSON list of calls. ``closer`` stands after
    each call and ``separator`` between calls. Ids are ``prefix`` plus ``digits`` hexadecimal digits (some templates
    refuse ids of other lengths).
    """

    name: str
    opener: str
    closer: str
    arguments: str
    separator: str
    listed: bool = False
    prefix: str = "call_"
    digits: int = 24

    def new_id(self) -> str:
        return self.prefix + secrets.token_hex(self.digits)[: self.digits]


FORMATS = {
    each.name: each
    for each in (
        # Qwen 2.5 and 3 use the format of Hermes.
        CallFormat("hermes", "<tool_call>", "</tool_call>", "arguments", "\n"),
        # Mistral, except for the models that write [ARGS].
        CallFormat("mistral", "[TOOL_CALLS]", "", "arguments", ", ", listed=True, prefix="", digits=9),
        # Llama 3.1 and later; the models seldom write the marker.
        CallFormat("llama", "<|python_tag|>", "", "parameters", "; "),
    )
}


def format_of(template: str) -> CallFormat | None:
    """Find the format that a chat template shows the model; None if it shows none of these."""
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else FORMATS["mistral"]
    if _HERMES.search(template):  # some families write other things than JSON inside the tags
        return FORMATS["hermes"]
    if re.search(r'\\?"parameters\\?": ', template) and ("<|python_tag|>" in template or "ipython" in template):
        return FORMATS["llama"]
    return None


class Call(NamedTuple):
    """A call of a function. ``at`` is its number in the answer; ``arguments`` is the text of a JSON object."""

    at: int
    id: str
    name: str
    arguments: str


class _Frame(NamedTuple):
    """What may stand around calls: before the first, before each of the others (one of several), after the last."""

    first: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]
    after: str


class _Mismatch(Exception):
    """A character is not what a rule of the reader asks for."""


class CallReader:
    """Splits a streamed answer into text and calls.

    The answer is read one character at a time, so the result cannot depend on the pieces in which it comes. Text is
    held back only while it may still become a call, and a call is returned once its JSON is complete. Markers of calls,
    and the blanks beside them, are never returned. What is not a call is text, unchanged, markers included; so is a
    call that the end of the answer cuts.

    A call is a JSON object with a ``name`` and with ``arguments`` or ``parameters``, in any order. The arguments are an
    object, or a string that holds one; null and a blank string stand for no arguments. After a marker any name is
    accepted: whoever runs the functions can tell the model that a function does not exist. Other keys are ignored. But
    an object without arguments is a call without arguments only if it has no other keys than ``type`` and ``id``,
    because another key may be the model's own word for the arguments.

    Models often leave the markers out, or write a code fence instead. So an object at the beginning of an answer is a
    call, too, if it names a known function, has arguments, and has no other keys than ``type`` ("function") and ``id``.

    Args:
        form: how the model writes calls.
        names: the known functions.
    """

    def __init__(self, form: CallFormat, names: Iterable[str]) -> None:
        self._form, self._names = form, tuple(names)
        opener, between = form.opener, form.separator.strip()
        self._marked: tuple[_Frame, ...] = (_Frame((opener,), (), form.closer),)
        self._unmarked: tuple[_Frame, ...] = (_Frame((_FENCE,), ((),), "```"), _Frame((), ((),), ""))
        if form.listed:
            self._marked = _Frame((opener, "["), ((between,),), "]"), _Frame((opener,), ((between,),), "")
            self._unmarked = ()
        elif between:
            self._marked = (_Frame((opener,), ((between, opener), (between,)), form.closer),)
            self._unmarked = tuple(frame._replace(others=((between,), ())) for frame in self._unmarked)
        self._starts = {"".join(frame.first)[:1] or "{" for frame in (*self._marked, *self._unmarked)}
        self.calls = 0  # number of calls so far
        self._said: list[str | Call] = []  # decided, but not returned yet
        self._read: list[str] = []  # characters of what is being decided
        self._ahead: list[str] = []  # characters to be read again, the next one last
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[str | Call]:
        """Add text. Return what is decided by now, in order: texts, none of them empty, and calls."""
        for character in text:
            self._reading.send(character)
        return self._take()

    def finish(self) -> list[str | Call]:
        """Return what is still held back at the end of the answer."""
        with suppress(StopIteration):
            self._reading.send("")
        return self._take()

    def _take(self) -> list[str | Call]:
        items, self._said = self._said, []
        pieces: list[str | Call] = []
        for kind, run in groupby(items, type):
            together = list(run)
            pieces += ["".join(map(str, together))] if kind is str else together
        return pieces

    # The rules. Each is a generator that reads a part of the answer: it is sent one character after another, and "" at
    # the end of the answer. It raises ``_Mismatch`` at a character that it does not ask for.

    def _answer(self) -> _Rule[None]:
        begins, behind = True, False  # whether only unmarked calls came so far; whether a call came just before
        while True:
            self._read.clear()
            blanks = yield from self._run_of(_BLANKS)
            character = yield from self._character()
            if character in self._starts:
                self._again()
                if begins and (yield from self._calls(self._unmarked, marked=False)):
                    behind = True
                    continue
                if (yield from self._calls(self._marked, marked=True)):
                    begins, behind = False, True
                    continue
                character = yield from self._character()
            if text := character if behind else blanks + character:
                self._said.append(text)
            if not character:
                return
            begins = behind = False

    def _calls(self, frames: Iterable[_Frame], marked: bool) -> _Rule[bool]:
        """Read calls in one of these frames. Return whether there are any."""
        for frame in frames:
            if (yield from self._one_call([frame.first], marked)):
                while (yield from self._one_call(frame.others, marked)):
                    pass
                yield from self._attempt(self._literal(frame.after))
                return True
        return False

    def _one_call(self, ways: Iterable[tuple[str, ...]], marked: bool) -> _Rule[bool]:
        """Read a call, after what stands before it in one of these ways. Return whether there is one."""
        for before in ways:
            if (call := (yield from self._attempt(self._call(before, marked)))) is not None:
                self._said.append(Call(self.calls, self._form.new_id(), *call))
                self.calls += 1
                return True
        return False

    def _call(self, before: tuple[str, ...], marked: bool) -> _Rule[tuple[str, str]]:
        """Read what stands before a call, and the call. Return its name and arguments."""
        for text in before:
            yield from self._literal(text)
        yield from self._symbol("{")
        members = yield from self._object(1, None if marked else self._check_unmarked)
        if (call := _as_call(members, marked)) is None:
            raise _Mismatch
        return call

    def _check_unmarked(self, key: str, value: str) -> None:
        """Raise ``_Mismatch`` if no unmarked call has this key or, once its value is read, this value of it."""
        choices = {"name": self._names, "type": ("function",)}.get(key)
        if key not in _KEYS or (value and choices is not None and _load(value) not in choices):
            raise _Mismatch

    def _attempt(self, rule: _Rule[T]) -> _Rule[T | None]:
        """Read by a rule. If that fails, return None, and the characters will be read again."""
        start = len(self._read)
        try:
            return (yield from rule)
        except _Mismatch:
            self._ahead += reversed(self._read[start:])
            del self._read[start:]
            return None

    def _character(self) -> _Rule[str]:
        character: str = self._ahead.pop() if self._ahead else (yield)
        self._read.append(character)
        return character

    def _again(self) -> None:
        """Let the last character be read again."""
        self._ahead.append(self._read.pop())

    def _one_of(self, characters: Collection[str]) -> _Rule[str]:
        if not (character := (yield from self._character())) or character not in characters:
            raise _Mismatch
        return character

    def _run_of(self, characters: Collection[str]) -> _Rule[str]:
        """Read as many of these characters as there are."""
        start = len(self._read)
        while (character := (yield from self._character())) and character in characters:
            pass
        self._again()
        return "".join(self._read[start:])

    def _symbol(self, symbols: str) -> _Rule[str]:
        """Read blanks, and then one of these characters. Return the latter."""
        yield from self._run_of(_BLANKS)
        return (yield from self._one_of(symbols))

    def _literal(self, text: str) -> _Rule[str]:
        """Read blanks, and then this text. Without a text, read nothing."""
        if text:
            yield from self._run_of(_BLANKS)
        for character in text:
            yield from self._one_of(character)
        return text

    # JSON (RFC 8259).

    def _value(self, depth: int) -> _Rule[str]:
        """Read blanks, and then a value. Return its text."""
        yield from self._run_of(_BLANKS)
        start = len(self._read)
        first_character = yield from self._character()
        if first_character == '"':
            yield from self._string()
        elif first_character == "{" and depth <= DEEPEST:
            yield from self._object(depth)
        elif first_character == "[" and depth <= DEEPEST:
            yield from self._list(depth)
        elif first_character in _SCALAR:
            other_characters = yield from self._run_of(_SCALAR)
            if not _SCALARS.fullmatch(first_character + other_characters):
                raise _Mismatch
        else:  # also the end of the answer, after which no character comes
            raise _Mismatch
        return "".join(self._read[start:])

    def _object(self, depth: int, check: Callable[[str, str], None] | None = None) -> _Rule[list[tuple[str, str]]]:
        """Read an object after its brace. Return its keys and the texts of its values. ``check`` is called for each key
        once with an empty text, before its value is read, and once with its value."""
        members = []
        symbol = yield from self._symbol('"}')
        while symbol == '"':
            key = json.loads((yield from self._string()))
            if check is not None:
                check(key, "")
            yield from self._symbol(":")
            value = yield from self._value(depth + 1)
            if check is not None:
                check(key, value)
            members.append((key, value))
            if (symbol := (yield from self._symbol(",}"))) == ",":
                symbol = yield from self._symbol('"')
        return members

    def _list(self, depth: int) -> _Rule[None]:
        """Read a list after its bracket."""
        if (yield from self._attempt(self._symbol("]"))) is None:
            yield from self._value(depth + 1)
            while (yield from self._symbol(",]")) == ",":
                yield from self._value(depth + 1)

    def _string(self) -> _Rule[str]:
        """Read a string after its first quote. Return it with both quotes."""
        start = len(self._read) - 1
        while (character := (yield from self._character())) != '"':
            if character < " ":  # control characters, and the end of the answer
                raise _Mismatch
            if character == "\\" and (yield from self._one_of('"\\/bfnrtu')) == "u":
                for _ in range(4):
                    yield from self._one_of(hexdigits)
        return "".join(self._read[start:])


def _as_call(members: Sequence[tuple[str, str]], marked: bool) -> tuple[str, str] | None:
    """Return the name and the arguments of the call that an object is; None if it is not a call. ``members`` are its
    keys and the texts of its values."""
    fields = dict(members)
    name = _load(fields.get("name", "null"))
    if not isinstance(name, str) or not name or len(fields) < len(members):
        return None
    match [fields[key] for key in _ARGUMENTS if key in fields]:
        case [] if marked and fields.keys() <= _KEYS:
            return name, "{}"
        case [text]:
            arguments = _as_arguments(text)
            return None if arguments is None else (name, arguments)
    return None


def _as_arguments(text: str) -> str | None:
    """Return the arguments that a value stands for, as the text of an object; None if it stands for none."""
    value = _load(text)
    if isinstance(value, str):
        text = value.strip() or "null"
        value = _load(text)
    if text == "null":
        return "{}"
    return text if isinstance(value, dict) else None


def _load(text: str) -> Any:
    """Parse JSON; return None if it is invalid."""
    try:
        return loads(text, once=False, strict=True)
    except ValueError:
        return None


def grammar(
    form: CallFormat,
    functions: Mapping[str, Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    required: bool,
    parallel: bool,
    answer: Mapping[str, Any] | None = None,
    thinking: Thinking | None = None,
) -> str:
    """Build a grammar of answers that call these functions, in llguidance's variant of Lark's syntax.

    Args:
        form: how calls are written.
        functions: the schema of each function's arguments, by name.
        tokenizer: shows which markers are single tokens.
        required: whether the answer must consist of calls; otherwise it may be text with calls in it.
        parallel: whether there may be several calls, if the family can write them.
        answer: a schema for an answer without calls; None allows any text.
        thinking: the form of the thinking that may begin the answer; None for none.
    """
    opener, closer = (_marker(tokenizer, text) for text in (form.opener, form.closer))
    # The JSON of each function's call. These lines come first, and in order: see ``wrong_with_tools``.
    schemas = [_json_rule(schema) for schema in functions.values()]
    rules = []
    for number, name in enumerate(functions):
        head = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
        rules.append(f'f{number}: {_quoted(head)} {schemas[number]} "}}"')
    rules.append("function: " + " | ".join(f"f{number}" for number in range(len(functions))))
    # A call between its markers, and several of them.
    repetition, allows_several = f"{{0,{_MOST - 1}}}", parallel and bool(form.closer)
    if form.listed:
        further_calls = f"({_quoted(form.separator)} function){repetition}" if parallel else ""
        rules.append(f'call: / ?/ "[" function {further_calls} "]"')
    else:
        rules.append(f'call: "\\n" function "\\n" {closer}' if form.closer else "call: function")
    calls = f"{opener} call" if form.closer or form.listed else "call"
    calls += f" ({_quoted(form.separator)} {opener} call){repetition}" if allows_several else ""
    # What an answer may be: calls only; calls or an answer with a schema; or text with calls in it.
    if required:
        rules.append(f"said: {calls}")
    elif answer is not None:
        rules += [f"answer: {_json_rule(answer)}", f"said: {calls} | answer"]
    else:
        rules += _text_rules(form, list(functions), schemas, opener, allows_several)
    rules += _thinking_rules(tokenizer, thinking)
    return "\n".join(rules)


def _text_rules(
    form: CallFormat, functions: Sequence[str], schemas: Sequence[str], opener: str, several: bool
) -> list[str]:
    """Return the grammar's rules of an answer that is text with calls in it. The text itself has no opener."""
    anything, rules = f"/(.|\\n)*{re.escape(form.opener)}", []
    no_call, choices = "", f"(begun call){{0,{_MOST}}} TEXT" if several else "begun call | TEXT"
    # An answer may begin with a call that has no marker, so text must not begin as ``CallReader`` lets these begin.
    if not form.listed:
        blanks, known_names = "[ \\t\\n\\r]*", "|".join(map(re.escape, functions))
        keys, escaped = "|".join(sorted(_KEYS - {"name"})), r'[^"\\]*\\'
        name_member = rf'name"{blanks}:{blanks}"(({known_names})"|{escaped})'
        no_call = rf' & ~/{blanks}(```json{blanks})?\{{{blanks}"(({keys})"|{escaped}|{name_member})(.|\n)*/'
        bare = rf'{_SPACE}(```json{_SPACE})?\{{{_SPACE}"name"'
        for number, name in enumerate(functions):
            head = rf'{bare}:{_SPACE}"{re.escape(name)}",{_SPACE}"{form.arguments}":{_SPACE}'
            rules.append(f"B{number}: /{head}/\nb{number}: B{number} {schemas[number]} BARE_END")
        rules.append(rf"BARE_END: /{_SPACE}\}}({_SPACE}```)?/")
        choices += "".join(f" | b{number}" for number in range(len(functions)))
    rules.append(f"TEXT: /(.|\\n)*/ & ~{anything}(.|\\n)*/{no_call}")
    begun_rule = (
        f"begun: TEXT {opener}" if opener.startswith("<") else f"begun[lazy]: BEGUN\nBEGUN: {anything}/{no_call}"
    )
    return [*rules, begun_rule, f"said: {choices}"]


def _thinking_rules(tokenizer: Tokenizer, thinking: Thinking | None) -> list[str]:
    """Return the grammar's rules of an answer that may begin with thinking, between its tags."""
    if thinking is None:
        return ["start: said"]
    opener, closer = (_marker(tokenizer, tag) for tag in thinking.tags)
    closing_pattern = re.escape(thinking.tags.close).replace("/", r"\/")
    thought_rule = f"thought: close BLANKS\nclose[lazy]: /(.|\\n)*{closing_pattern}/"
    if closer.startswith("<"):  # a single token
        thought_rule = f"thought: THOUGHT {closer} BLANKS\nTHOUGHT: /(.|\\n)*/ & ~/(.|\\n)*{closing_pattern}(.|\\n)*/"
    start = "start: thought said" if thinking.begun else f"start: ({opener} thought)? said"
    return [thought_rule, "BLANKS: /[ \\n]*/", start]


def wrong_with_tools(message: str, names: Sequence[str]) -> str:
    """Rewrite the library's error about the grammar of calls, because clients do not know this grammar. It has one line
    per function, in order, so the line number in the error shows which function is meant."""
    reason = message.partition(" cannot be used: ")[2]
    match = re.match(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| |$)", reason)
    if match is None:
        return f"tools: calls cannot be held to these functions: {reason or message}"
    subject = f"parameters of {names[int(match[1]) - 1]!r}: " if int(match[1]) <= len(names) else ""
    return f"tools: {subject}{match[2]}"


def _marker(tokenizer: Tokenizer, text: str) -> str:
    """Write a marker for a grammar. A marker that is one token must be written as a token, because the library does not
    treat special tokens as text."""
    token = tokenizer.raw.token_to_id(text)
    if token is not None and token in tokenizer.raw.get_added_tokens_decoder():
        return f"<[{token}]>"
    return _quoted(text)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
