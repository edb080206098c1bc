"""Tool calls: how model families write them, how to find them in an answer while it streams, and a grammar that
restricts an answer to the functions it may call. Knows nothing of HTTP or engines."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fly.models.chat import Thinking
from fly.models.tokenizer import Tokenizer
from fly.runtime.structured import BLANKS
from fly.serve.jsons import loads

__all__ = ["FORMATS", "CallDelta", "CallFormat", "CallReader", "format_of", "grammar", "wrong_with_tools"]

_FENCE = "```json"
_NAME = '{"name":"'  # the beginning of a call's JSON, without blanks
_SPACE = r"[ \n]{0,16}"
_MOST = 16  # most calls in one answer, because small models that must call would never stop
_HEAD = 1024  # the name and the start of the arguments must come within this many characters


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
    if "<tool_call>" in template:  # some families write XML inside the tags
        return None if "<function=" in template or "<arg_key>" in template else FORMATS["hermes"]
    if re.search(r'\\?"parameters\\?": ', template) and ("<|python_tag|>" in template or "ipython" in template):
        return FORMATS["llama"]
    return None


class CallDelta(NamedTuple):
    """A piece of the call with number ``at`` in an answer: first ``id`` and ``name``, then pieces of the arguments."""

    at: int
    id: str | None
    name: str | None
    arguments: str


class _Call:
    """The JSON of one call as it comes in."""

    def __init__(self, key: str) -> None:
        self._head = re.compile(rf'\s*\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{key}"\s*:\s*(?=\{{)')
        self._key = key
        self.text = ""
        self.name: str | None = None
        self.complete = False
        self._start = self._end = -1  # where the arguments start and end, in characters
        self._given = 0  # number of the arguments' characters that ``arguments`` has returned
        self._depth, self._quoted, self._escaped = 0, False, False

    def push(self, text: str) -> str:
        """Add the text that belongs to the call; return the rest."""
        at = len(self.text)
        self.text += text
        if self.name is None and at < _HEAD and (head := self._head.match(self.text)):
            self.name, self._start = _load(head[1]), head.end()
        while at < len(self.text) and not self.complete:
            self._step(at)
            at += 1
        rest, self.text = self.text[at:], self.text[:at]
        return rest

    def _step(self, at: int) -> None:
        character = self.text[at]
        if self._quoted:
            self._quoted = character != '"' or self._escaped
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1 and self._end < 0 <= self._start < at:
                self._end = at + 1
            self.complete = self._depth == 0

    def arguments(self) -> str:
        """Return the part of the arguments that ``push`` added since this was last called."""
        arguments = self.text[self._start : None if self._end < 0 else self._end] if self._start >= 0 else ""
        new, self._given = arguments[self._given :], len(arguments)
        return new

    def may_name(self, names: frozenset[str]) -> bool:
        """Whether the text so far may still become a call of one of these functions."""
        begins = "".join(self.text[:_HEAD].split())
        if not begins.startswith(_NAME):
            return _NAME.startswith(begins)
        name, whole, _ = begins.removeprefix(_NAME).partition('"')
        return name in names if whole else any(each.startswith(name) for each in names)

    def parse(self) -> tuple[str, str] | None:
        """Return the name and the arguments, which may stand in either order; None if this is not a call."""
        call = _load(self.text)
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
            return None
        given = call.get(self._key, call.get("arguments", {}))
        return name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


class CallReader:
    """Splits a streamed answer into text and calls. Pieces may have any size.

    Markers and the blanks beside them are never returned as text. If something begins like a call but is not one, it is
    returned unchanged as text, markers included. Arguments are passed on as the model writes them.

    Models often leave the markers out, or write a code fence instead. So JSON that calls a known function counts as a
    call at the beginning of an answer, with or without a fence.

    Args:
        form: how the model writes calls.
        names: the known functions. After a marker any name is accepted: whoever runs the functions can tell the model
            that a function does not exist.
    """

    def __init__(self, form: CallFormat, names: Iterable[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._held = ""  # text received but not decided yet
        self._raw = ""  # text before a call (markers and blanks), returned if it turns out not to be a call
        self._call = _Call(form.arguments)
        # "start": a call may begin unmarked; "text"; "opened": before a call; "call": within it; "closing": after it
        self._state = "text" if form.listed else "start"
        self._marked = self._announced = self._behind = False  # the last call: had a marker; was returned; just ended
        self.calls = 0  # number of calls returned so far

    def push(self, text: str) -> list[str | CallDelta]:
        """Add text. Return what is decided by now, in order: text and pieces of calls, none of them empty."""
        self._held += text
        return [piece for piece in self._settle(last=False) if piece]

    def finish(self, cut: bool = False) -> list[str | CallDelta]:
        """Return what is still held back at the end of the answer. If a marked call has no arguments yet, it is dropped
        if the answer was ``cut`` by its length; otherwise it is text, because the model chose to stop there."""
        begun = self._state in ("opened", "call") and self._marked and not self._announced
        return [] if cut and begun else [piece for piece in self._settle(last=True) if piece]

    def _settle(self, last: bool) -> Iterator[str | CallDelta]:
        steps = {
            "start": self._start, "text": self._text, "opened": self._opened, "call": self._inside,
            "closing": self._closing,
        }  # fmt: skip
        before = None
        while before != (before := (self._state, self._held)):
            yield from steps[self._state](last)

    def _start(self, last: bool) -> Iterator[str | CallDelta]:
        begins = self._held.lstrip()
        inside = begins.removeprefix(_FENCE).lstrip()
        if inside.startswith("{"):
            self._state, self._marked = "opened", False
            self._raw, self._held = self._held[: -len(inside)], inside
        elif last or (inside and not _FENCE.startswith(begins)):
            self._state = "text"  # that state looks for the marker
        yield from ()

    def _text(self, last: bool) -> Iterator[str | CallDelta]:
        if self._behind:
            self._held = self._held.lstrip()
        before, found, after = self._held.partition(opener := self._form.opener)
        part = 0 if found or last else next(n for n in range(len(opener), -1, -1) if before.endswith(opener[:n]))
        text = before[: len(before) - part]
        text = text.rstrip() if found or not last else text
        self._behind = self._behind and not text
        if found:
            self._raw, self._held = before[len(text) :] + found, after
            self._state, self._marked = "opened", True
        else:
            self._held = before[len(text) :]
        yield text

    def _opened(self, last: bool) -> Iterator[str | CallDelta]:
        listed = r"\[?\s*" if self._form.listed else ""
        begins = re.match(rf"\s*{listed}", self._held)
        assert begins is not None
        if (at := begins.end()) < len(self._held) or last:
            if self._held[at : at + 1] == "{":
                self._raw, self._held = self._raw + self._held[:at], self._held[at:]
                self._call, self._announced, self._state = _Call(self._form.arguments), False, "call"
            else:
                yield self._no_call()

    def _inside(self, last: bool) -> Iterator[str | CallDelta]:
        call = self._call
        self._held = call.push(self._held)
        name, whole = call.name, call.parse() if call.complete and call.name is None else None
        if whole is not None:
            name = whole[0]
        if not self._announced:
            known = self._marked or (call.may_name(self._names) if name is None else name in self._names)
            if not known or (name is None and (call.complete or last)):
                self._held = call.text + self._held  # another call may begin in this text
                yield self._no_call()
                return
            if name is None:
                return
            self._announced = True
            self.calls += 1
            yield CallDelta(self.calls - 1, self._form.new_id(), name, "")
        if arguments := call.arguments() if whole is None else whole[1]:
            yield CallDelta(self.calls - 1, None, None, arguments)
        if call.complete:
            self._state, self._behind = "closing", True

    def _no_call(self) -> str:
        """Return as text what stood before something that is not a call after all."""
        text, self._raw, self._state, self._behind = self._raw, "", "text", False
        return text

    def _closing(self, last: bool) -> Iterator[str | CallDelta]:
        form, begins = self._form, self._held.lstrip()
        ends, between = form.closer if self._marked else "```", form.separator.strip()
        ends, then = ("]", "text") if form.listed else (ends, "text" if self._marked else "start")
        if between and begins.startswith(between):
            opener = "" if form.listed else f"({re.escape(form.opener)})?"
            found = re.match(rf"{re.escape(between)}\s*{opener}\s*(?=\{{)", begins)
            if found is not None:
                self._raw, self._held, self._state = found[0], begins[found.end() :], "opened"
            elif last or begins[len(between) :].strip():
                self._state = "text"
        elif ends and begins.startswith(ends):
            self._held, self._state = begins[len(ends) :], then
        elif last or (begins and not ends.startswith(begins)):
            self._state = then
        yield from ()


def _load(text: str) -> Any:
    """Parse JSON; return None if it is invalid."""
    try:
        return loads(text, once=False)
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
    more, several = f"{{0,{_MOST - 1}}}", parallel and bool(form.closer)
    if form.listed:
        others = f"({_quoted(form.separator)} function){more}" if parallel else ""
        rules.append(f'call: / ?/ "[" function {others} "]"')
    else:
        rules.append(f'call: "\\n" function "\\n" {closer}' if form.closer else "call: function")
    calls = f"{opener} call" if form.closer or form.listed else "call"
    calls += f" ({_quoted(form.separator)} {opener} call){more}" if several else ""
    # What an answer may be: calls only; calls or an answer with a schema; or text with calls in it.
    if required:
        rules.append(f"said: {calls}")
    elif answer is not None:
        rules += [f"answer: {_json_rule(answer)}", f"said: {calls} | answer"]
    else:
        rules += _text_rules(form, list(functions), schemas, opener, several)
    rules += _thinking_rules(tokenizer, thinking)
    return "\n".join(rules)


def _text_rules(
    form: CallFormat, functions: Sequence[str], schemas: Sequence[str], opener: str, several: bool
) -> list[str]:
    """Return the grammar's rules of an answer that is text with calls in it. The text itself has no opener."""
    anything, rules = f"/(.|\\n)*{re.escape(form.opener)}", []
    no_call, choices = "", f"(begun call){{0,{_MOST}}} TEXT" if several else "begun call | TEXT"
    # An answer may begin with a call that has no markers, so text must not begin like one.
    if not form.listed:
        bare, known = rf"{_SPACE}(```json{_SPACE})?\{{{_SPACE}\"name\"", "|".join(map(re.escape, functions))
        no_call = f' & ~/{bare}{_SPACE}:{_SPACE}"({known})"(.|\\n)*/'
        for number, name in enumerate(functions):
            head = rf'{bare}:{_SPACE}"{re.escape(name)}",{_SPACE}"{form.arguments}":{_SPACE}'
            rules.append(f"B{number}: /{head}/\nb{number}: B{number} {schemas[number]} BARE_END")
        rules.append(rf"BARE_END: /{_SPACE}\}}({_SPACE}```)?/")
        choices += "".join(f" | b{number}" for number in range(len(functions)))
    rules.append(f"TEXT: /(.|\\n)*/ & ~{anything}(.|\\n)*/{no_call}")
    begun = f"begun: TEXT {opener}" if opener.startswith("<") else f"begun[lazy]: BEGUN\nBEGUN: {anything}/{no_call}"
    return [*rules, begun, f"said: {choices}"]


def _thinking_rules(tokenizer: Tokenizer, thinking: Thinking | None) -> list[str]:
    """Return the grammar's rules of an answer that may begin with thinking, between its tags."""
    if thinking is None:
        return ["start: said"]
    before, after = (_marker(tokenizer, tag) for tag in thinking.tags)
    close = re.escape(thinking.tags.close).replace("/", r"\/")
    thought = f"thought: close BLANKS\nclose[lazy]: /(.|\\n)*{close}/"
    if after.startswith("<"):  # a single token
        thought = f"thought: THOUGHT {after} BLANKS\nTHOUGHT: /(.|\\n)*/ & ~/(.|\\n)*{close}(.|\\n)*/"
    start = "start: thought said" if thinking.begun else f"start: ({before} thought)? said"
    return [thought, "BLANKS: /[ \\n]*/", start]


def wrong_with_tools(message: str, names: Sequence[str]) -> str:
    """Rewrite the library's error about the grammar of calls, because clients do not know this grammar. It has one line
    per function, in order, so the line number in the error shows which function is meant."""
    reason = message.partition(" cannot be used: ")[2]
    found = re.match(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?) \d+ \| ", reason)
    if found is None:
        return f"tools: calls cannot be held to these functions: {reason or message}"
    whose = f"parameters of {names[int(found[1]) - 1]!r}: " if int(found[1]) <= len(names) else ""
    return f"tools: {whose}{found[2]}"


def _marker(tokenizer: Tokenizer, text: str) -> str:
    """Write a marker for a grammar. A marker that is one token must be written as a token, because the library does not
    treat special tokens as text."""
    token = tokenizer.raw.token_to_id(text)
    if token is not None and token in tokenizer.raw.get_added_tokens_decoder():
        return f"<[{token}]>"
    return _quoted(text)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': BLANKS}, **schema})}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
