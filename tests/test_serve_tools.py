"""Tool calls: read out of what a model says, held to their schemas, and as OpenAI's own client sees them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from pydantic import BaseModel
from tokenizers import AddedToken

from fly import SamplingParams
from fly.engine.job import News
from fly.models.chat import ChatTemplate
from fly.models.messages import for_template
from fly.models.thinking import TAGS, Thinking
from fly.models.tokenizer import Tokenizer
from fly.runner.request import Token, Why
from fly.runner.structured import Grammars
from fly.serve.answers import Completion, Prepared, Vocabulary
from fly.serve.jsons import loads
from fly.serve.messages import Message
from fly.serve.requests import ChatRequest
from fly.serve.rules import Rules
from fly.serve.tools import FORMATS, CallReader, format_of, grammar
from tests.serving import MODEL, Running, running

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "stop": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
CHAT: list[Any] = [{"role": "user", "content": "Take the list 4 9 5 7. Reverse the list."}]
TEMPLATE = """{{ bos_token }}{% if tools %}
{{- '<|system|>Write <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}{% for message in messages %}
{{- '<|user|>' if message.role == 'tool' else '<|' + message.role + '|>' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running() as server:
        server.service.tokenizer.templates = {"default": ChatTemplate(TEMPLATE)}
        yield server
        assert server.all_free


@pytest.fixture(scope="module")
def client(here: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prompt(here: Running, **body: Any) -> str:
    """The text of a conversation by the template."""
    ids = httpx.post(f"{here.url}/tokenize", json={"messages": CHAT, **body}).json()["tokens"]
    return here.service.tokenizer.decode(ids, skip_special_tokens=False)


# Reading.


def read(form: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and the name and arguments of each call, which are always an object."""
    reader, text, calls = CallReader(FORMATS[form], ["weather", "stop"]), "", []
    for said in [*(said for piece in pieces for said in reader.push(piece)), *reader.finish()]:
        if isinstance(said, str):
            assert said
            text += said
        else:
            assert said.at == len(calls) and said.id and isinstance(loads(said.arguments), dict)
            calls.append((said.name, said.arguments))
    assert reader.calls == len(calls)
    return text, calls


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in pairwise(places)]


def around(form: str, calls: list[str]) -> str:
    """Calls between their markers."""
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return f"[TOOL_CALLS] [{', '.join(calls)}]" if form == "mistral" else f"<|python_tag|>{'; '.join(calls)}"


SAID = st.text(st.sampled_from("ab<[|{\"' \n}`tool_call>"), max_size=30)
VALUE = st.recursive(st.none() | st.integers() | SAID, lambda v: st.lists(v, max_size=3) | st.dictionaries(SAID, v))
ARGUMENTS = st.dictionaries(SAID, VALUE, max_size=3)
CUTS = st.lists(st.integers(0, 400), max_size=40)


@given(
    form=st.sampled_from(sorted(FORMATS)),
    before=st.text("ab <[{}\n", max_size=12),
    calls=st.lists(st.tuples(st.sampled_from(["weather", "stop"]), ARGUMENTS), min_size=1, max_size=3),
    at=CUTS,
    indent=st.sampled_from([None, 2]),
)
def test_calls_are_read_however_the_text_is_cut(
    form: str, before: str, calls: list[tuple[str, dict[str, Any]]], at: list[int], indent: int | None
) -> None:
    key = FORMATS[form].arguments
    written = [json.dumps({"name": name, key: given}, indent=indent) for name, given in calls]
    text, found = read(form, cut(before + around(form, written), at))
    assert text == before.rstrip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


# Calls, what is nearly a call, what is no JSON, markers and text, one after another.
VALUES = [
    "{}",
    '{"a": "}{", "b": [1, {"c": "\\"\\\\"}]}',
    r'{"u": "\ud83d\ude00é"}',
    '""',
    "null",
    "[1]",
    r'"{\"a\": 1}"',
]
WRONG = ['"Oslo"', '"NaN"', "NaN", '{"a": -01}', "{'a': 1}", '{"a": "\n"}', r'{"a": "\x"}', '{"a": tru']
MEMBER = st.sampled_from(
    ['"name": "weather"', '"name": "stop"', '"name": "bob"', r'"n\u0061me": "st\u006fp"', '"name": [3]', '"id": "c1"']
    + ['"type": "function"', '"type": {}', '"why": {"name": "stop"}']
    + [f'"{key}": {value}' for key in ("arguments", "parameters", "args") for value in [*VALUES, *WRONG]]
)
OBJECT = st.builds(
    lambda members, between: f"{{{between.join(members)}}}", st.lists(MEMBER), st.sampled_from([",", ",\n "])
)
MARKS = [mark for form in FORMATS.values() for mark in (form.opener, form.closer, form.separator) if mark]
PART = OBJECT | st.sampled_from([*MARKS, "[", "]", "```json\n", "\n```", "\n", "Look: "]) | SAID
ANSWER = st.builds(lambda parts, end: "".join(parts)[:end], st.lists(PART), st.integers(0, 400))


@settings(max_examples=200)
@given(form=st.sampled_from(sorted(FORMATS)), answer=ANSWER, at=CUTS)
def test_no_reading_depends_on_the_pieces(form: str, answer: str, at: list[int]) -> None:
    whole = read(form, [answer])
    event(f"{len(whole[1])} calls, text: {bool(whole[0])}")
    assert read(form, cut(answer, at)) == read(form, list(answer)) == whole


@given(form=st.sampled_from(sorted(FORMATS)), answer=ANSWER)
def test_an_answer_without_calls_is_unchanged_wherever_it_ends(form: str, answer: str) -> None:
    text, calls = read(form, [answer])
    assert calls or text == answer


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    "written", [around, lambda form, calls: f"```json\n{calls[-1]}\n```", lambda form, calls: calls[-1]]
)
def test_a_call_that_the_end_of_the_answer_cuts_is_text(form: str, before: int, written: Any) -> None:
    """Of every beginning of a call, after another call or alone, nothing is held back for good."""
    arguments = '{"a": [1, {"b": true}, "c"], "d": -1.5e3, "e": null}'
    call = f'{{"name": "weather", "{FORMATS[form].arguments}": {arguments}}}'
    whole = written(form, [call] * (1 + before))
    last = whole.rindex(call)
    for end in range(last + 1, last + len(call)):
        text, calls = read(form, [whole[:end]])
        assert text.endswith(whole[last:end])
        assert len(calls) == (before if written is around else 0)


@given(
    form=st.sampled_from(["hermes", "llama"]),
    members=st.permutations(['"name": "weather"', '"type": "function"', '"id": "c1"', '"parameters": {"a": 1}']),
    fenced=st.booleans(),
    at=CUTS,
)
def test_keys_of_a_call_may_stand_in_any_order(form: str, members: list[str], fenced: bool, at: list[int]) -> None:
    """As in the parsers of vLLM, SGLang and llama.cpp, which parse the JSON; also without a marker."""
    call = f"{{{', '.join(members)}}}"
    said = f"```json\n{call}\n```" if fenced else call
    assert read(form, cut(said, at)) == read(form, cut(around(form, [call]), at)) == ("", [("weather", '{"a": 1}')])


@given(form=st.sampled_from(sorted(FORMATS)), text=SAID, at=CUTS)
@example("hermes", "<tool_call>\nweather(Oslo)\n</tool_call> it is", [])
@example("hermes", '<tool_call>{"name": "weather", "arguments": {"a', [3])
@example("hermes", '```json\n{"name": "bob", "arguments": {}}\n```', [9, 20])
@example("llama", '{"name": "Bob", "parameters": {}} is he', [])
@example("mistral", "[TOOL_CALLS] none", [14])
def test_text_that_is_not_a_call_is_unchanged(form: str, text: str, at: list[int]) -> None:
    assert read(form, cut(text, at)) == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '{"city"'),
        ("hermes", '{"name": "bob"'),
        ("llama", '{"type": "object"'),
        ("hermes", '```json\n{"name": "weather", "why"'),
        ("hermes", "<tool_call>w"),
        ("hermes", '<tool_call>{"name": w}'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": "\t'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {}]'),
        ("mistral", "[TOOL_CALLS] [3"),
        ("llama", "<|python_tag|>p"),
    ],
)
def test_text_is_held_back_only_while_it_may_become_a_call(form: str, text: str) -> None:
    reader = CallReader(FORMATS[form], ["weather"])
    assert reader.push(text[:-1]) == []
    assert "".join(map(str, reader.push(text[-1] + "."))) == f"{text}."


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ('{"a": [1.50, 1e400]}', '{"a": [1.50, 1e400]}'),  # as it is written
        (r'"{\"a\": \"\u00e9\"}"', '{"a": "é"}'),  # llama.cpp: a string is the arguments' text
        ('""', "{}"),  # no arguments, as where messages of clients are read
        ('" "', "{}"),
        ("null", "{}"),
        ('"null"', "{}"),
        ('"Oslo"', None),
        ("[1]", None),
        ("3", None),
        ("NaN", None),
        ('{"a": NaN}', None),
        (r'"{\"a\": NaN}"', None),
        ('{"a": 1}, "arguments": {}', None),  # which of the two is meant?
        ('{"a": 1}, "parameters": {}', None),
    ],
)
def test_arguments_are_an_object_or_the_call_is_text(form: str, key: str, value: str, arguments: str | None) -> None:
    """The same in every form, with markers and without. vLLM's parser of Hermes takes ``arguments`` alone, its parser
    of Llama and SGLang's of all forms take both keys."""
    call = f'{{"name": "weather", "{key}": {value}}}'
    for said in [around(form, [call])] + ([] if form == "mistral" else [call, f"```json\n{call}\n```"]):
        assert read(form, [said]) == ((said, []) if arguments is None else ("", [("weather", arguments)]))


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_an_unknown_key_is_not_left_out_of_a_call(form: str) -> None:
    for members, marked, unmarked in (
        ('"args": {"a": 1}', None, None),  # no key of arguments that vLLM, SGLang or llama.cpp know
        ('"arguments": {"a": 1}, "why": "so"', '{"a": 1}', None),  # vLLM and SGLang ignore further keys
        ('"type": "function"', "{}", None),  # SGLang: no arguments
    ):
        call = f'{{"name": "stop", {members}}}'
        for said, arguments in ((around(form, [call]), marked), (call, unmarked)):
            assert read(form, [said]) == ((said, []) if arguments is None else ("", [("stop", arguments)]))


@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}), (' {"a": 1}\n', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (" \n", {}),
        ("null", {}), (None, {}), (..., {}), ("[1]", "[1]"), ("Oslo", "Oslo"), ('"{}"', '"{}"'), ([1], [1]),
    ],
)  # fmt: skip
def test_arguments_that_clients_send_are_an_object_to_templates(sent: Any, arguments: Any) -> None:
    """An empty one for nothing, as vLLM has it; what is no object stays."""
    function = {"name": "f"} | ({} if sent is ... else {"arguments": sent})
    message = Message(role="assistant", tool_calls=[{"id": "1", "type": "function", "function": function}])
    [converted] = for_template([message.to_dict()])
    assert converted["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["f", "g"])), max_size=6), st.data())
def test_a_result_has_the_name_of_the_call_whose_id_it_bears(calls: list[tuple[str, str]], data: st.DataObject) -> None:
    """That of the last such call before it. A name that a client sends stays, as transformers' documentation has it."""
    messages, expected = [], []
    names: dict[str, str] = {}
    for id_, name in calls:
        call = {"id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}
        messages.append(Message(role="assistant", tool_calls=[call]))
        names[id_] = name
        answered, sent = data.draw(st.sampled_from(["a", "b", None])), data.draw(st.sampled_from([None, "h"]))
        messages.append(Message(role="tool", tool_call_id=answered, name=sent, content="1"))
        expected.append(sent or names.get(answered or ""))
    converted = for_template([message.to_dict() for message in messages])
    assert [message.get("name") for message in converted if message["role"] == "tool"] == expected


ARGUMENTS_SENT = ['{"city": "Oslo"}', {"city": "Oslo"}, "", None, "Oslo", '{"city": NaN}', '"{}"']


@pytest.mark.parametrize("arguments", ARGUMENTS_SENT)
def test_a_conversation_has_the_same_prompt_in_python_as_on_the_server(here: Running, arguments: Any) -> None:
    """In both, the role ``developer`` becomes ``system``, arguments become an object, and the result of a tool gets the
    name of its call."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"},
    ]
    kept = copy.deepcopy(messages)
    llm = here.service.llm
    ids = llm.chat_prompt(messages, tools=TOOLS)
    assert llm.tokenizer is not None and messages == kept
    assert llm.tokenizer.decode(ids, False) == prompt(here, messages=messages, tools=TOOLS)


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("form", "said", "text", "calls"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>\nDone.", "Done.", 1),
        ("hermes", f"<tool_call>{CALL}", "", 1),  # the end left out
        ("hermes", f"```json\n{CALL}\n{CALL}\n```", "", 2),  # a fence for the markers
        ("hermes", f"{CALL}\n{CALL}", "", 2),
        ("hermes", f"{CALL}\n```py\nx\n```", "```py\nx\n```", 1),
        ("hermes", f"I do:\n```json\n{CALL}\n```", f"I do:\n```json\n{CALL}\n```", 0),
        ("hermes", f'<tool_call>{{"a": "<tool_call>{{"}}\n<tool_call>{CALL}', '<tool_call>{"a": "<tool_call>{"}', 1),
        ("hermes", '<tool_call>{"name": "other", "arguments": {"city": "Oslo"}}</tool_call>', "", 1),
        ("mistral", f"[TOOL_CALLS]{CALL}", "", 1),
        ("mistral", f"[TOOL_CALLS] [{CALL}, 3]", ", 3]", 1),
        ("llama", f"{CALL}; {CALL}; x", "; x", 2),
        ("llama", f"<|python_tag|>{CALL}; <|python_tag|>{CALL}", "", 2),
    ],
)
def test_how_else_models_write_them(form: str, said: str, text: str, calls: int) -> None:
    got_text, got = read(form, list(said))
    assert (got_text, len(got)) == (text, calls)
    assert all(json.loads(arguments) == {"city": "Oslo"} for _, arguments in got)


def test_formats_are_recognised_from_templates() -> None:
    for said, name in (
        (TEMPLATE, "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("""{{ 'Environment: ipython' }}{{ '"parameters": ' }}""", "llama"),
        ("<tool_call><function=f>", None),
        ("{{ '<tool_call>' + tool_call.name + '\\n<arg_key>' }}", None),  # GLM, Ling
        ("{%- set begin = mark ~ '<tool_call>' -%} \"name\" ", None),  # MiniMax M3: XML behind a mark of its own
        ('in <tool_call></tool_call> tags: <tool_calls>[{"name": ...}]</tool_calls>', None),  # Apriel 1.5
        ('{{ "within <tool_call></tool_call>:\\n<tool_call>\\n{\\"name\\": <name>, " }}', "hermes"),  # Qwen 3
        ("<tool_call>\n{'arguments': <args-dict>, 'name': <name>}\n</tool_call>", "hermes"),  # Falcon H1, Hermes 2
        ('{{- "<tool_call>" }}{"name": "{{- call.name }}", ', "hermes"),  # EXAONE 4
        ('~ "<tool_call>\\n"\n  ~ "{\\"name\\": \\"" ~ call.name', "hermes"),  # Reka
        ("[TOOL_CALLS]f[ARGS]{}", None),
        ("{{ messages }}", None),
    ):
        assert format_of(said) == (None if name is None else FORMATS[name])


# Grammars.


@pytest.fixture(scope="module", params=[False, True], ids=["markers are text", "markers are tokens"])
def tokenizer(request: Any) -> Tokenizer:
    made = Tokenizer(Path(__file__).parent.parent / "fly" / "models" / "bundled" / "checkpoints" / MODEL)
    if request.param:
        markers = [*("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")]
        made.raw.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return made


@cache
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 1040, [2])


def allowed(tokenizer: Tokenizer, source: str, text: str) -> bool:
    """Whether the whole text, token by token, is what the grammar wants."""
    matcher = grammars(tokenizer).matcher(SamplingParams(structured={"grammar": source}))  # type: ignore[arg-type]
    ids = tokenizer.encode(text, add_special_tokens=False)
    for place, token in enumerate([*ids, 2]):
        bits, _ = matcher._mask(place)
        if not bits[token // 8] >> token % 8 & 1:
            return False
        assert token == 2 or matcher._step(place, token)
    return True


FINE = '{"city": "Oslo", "days": 3}'


def written(form: str, arguments: str = FINE, name: str = "weather", times: int = 1) -> str:
    call = f'{{"name": "{name}", "{FORMATS[form].arguments}": {arguments}}}'
    if form == "hermes":
        return "\n".join([f"<tool_call>\n{call}\n</tool_call>"] * times)
    return f"[TOOL_CALLS] [{', '.join([call] * times)}]" if form == "mistral" else call


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_only_known_functions_can_be_called(tokenizer: Tokenizer, form: str) -> None:
    def fits(text: str, required: bool, parallel: bool = True, **more: Any) -> bool:
        made = grammar(FORMATS[form], SCHEMAS, tokenizer, required=required, parallel=parallel, **more)
        return allowed(tokenizer, made, text)

    for required in (True, False):
        assert fits(written(form), required) and fits(written(form, "{}", "stop"), required)
        assert not fits(written(form, '{"city": "Bonn", "days": 3}'), required)
        assert not fits(written(form, '{"city": "Oslo"}'), required)
        assert fits("It is 3 < 4.", required) is not required
        if form != "llama":
            assert not fits(written(form, name="other"), required)
            assert fits(written(form, times=2), required) and not fits(written(form, times=2), required, parallel=False)
    assert not fits("Look." + written("mistral", "{}", times=1), True)
    if form == "hermes":  # what leaves the markers out is a call too
        bare = written("llama").replace("parameters", "arguments")
        assert fits(f"```json\n{bare}\n```", False) and fits(f"Look.\n{written(form)}", False)
        assert not fits(bare.replace("Oslo", "Bonn"), False) and fits('```json\n{"a": 1}\n```', False)
        answer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        assert fits('{"a": 1}', False, answer=answer) and fits(written(form), False, answer=answer)
        assert not fits("Hello", False, answer=answer)


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_no_unmarked_call_gets_past_the_grammar(tokenizer: Tokenizer, form: str) -> None:
    """What may begin as a call that the reader would find may have no wrong arguments."""
    source = grammar(FORMATS[form], SCHEMAS, tokenizer, required=False, parallel=True)
    name, rest = '"name": "weather"', '"parameters": {"city": "Bonn"}'
    calls = [f"{{{first}, {second}}}" for first, second in ((name, rest), (rest, name))]
    calls += [f"{{{more}, {call[1:]}" for call in calls for more in ('"type": "function"', '"id": "c1"')]
    calls += [calls[0].replace("name", r"n\u0061me"), calls[0].replace("weather", r"weathe\u0072")]
    for call in calls:
        for said in (f"```json\n{call}\n```", "\t\r\n" + " " * 20 + call):
            assert read(form, [said])[1] and not allowed(tokenizer, source, said)
    for said in ('{"name": "Bob"}', '{"city": "Bonn"}', '```json\n{"a": 1}\n```', f"See: {calls[0]}"):
        assert not read(form, [said])[1] and allowed(tokenizer, source, said)


@pytest.mark.parametrize("begun", [True, False])
def test_who_thinks_may_think_before_a_call(tokenizer: Tokenizer, begun: bool) -> None:
    made = grammar(
        FORMATS["hermes"], SCHEMAS, tokenizer, required=True, parallel=True, thinking=Thinking(TAGS[0], begun)
    )
    thought = "hm {\n</think>\n\n" + written("hermes")
    assert allowed(tokenizer, made, ("" if begun else "<think>\n") + thought)
    assert allowed(tokenizer, made, written("hermes")) is not begun


# The server.


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_are_required(client: OpenAI, parallel: bool) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300,
        "temperature": 0, "parallel_tool_calls": parallel,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.tool_calls
    # So small a model goes on for ever. The call that the end of the answer cuts is text.
    assert whole.finish_reason == ("length" if parallel else "tool_calls")
    assert (whole.message.content or "").startswith("<tool_call>" if parallel else "")
    assert (len(whole.message.tool_calls) > 1) == bool(whole.message.content) == parallel
    for call in whole.message.tool_calls:
        assert call.type == "function" and re.fullmatch("call_[0-9a-f]{24}", call.id)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in whole.message.tool_calls}) == len(whole.message.tool_calls)
    calls, text = list[list[str | None]](), ""
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        assert len(delta.tool_calls or []) <= 1
        for piece in delta.tool_calls or []:
            assert (piece.index, piece.type) == (len(calls), "function") and piece.function is not None
            calls.append([piece.function.name, piece.function.arguments])
    assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
    assert text == (whole.message.content or "")
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_named_function_is_called_once_and_its_result_read(here: Running, client: OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    got = client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=choice, temperature=0)
    assert got.choices[0].finish_reason == "tool_calls" and got.choices[0].message.tool_calls
    [call] = got.choices[0].message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    messages = [*CHAT, got.choices[0].message.model_dump(exclude_none=True), result]
    told = prompt(here, messages=messages, tools=TOOLS)
    said = json.dumps({"name": "weather", "arguments": json.loads(call.function.arguments)})
    assert f"<tool_call>{said}</tool_call><|end|><|user|>18 degrees<|end|><|assistant|>" in told
    after = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=8)
    assert after.usage is not None and after.usage.prompt_tokens == len(here.service.tokenizer.encode(told, False))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own, of its message
def test_a_message_that_openais_client_has_parsed_can_be_sent_back(client: OpenAI) -> None:
    """``parse`` of OpenAI's client adds ``parsed`` to a message and ``parsed_arguments`` to a call."""

    class Answer(BaseModel):
        city: Literal["Oslo", "Rome"]

    function = openai.pydantic_function_tool(Answer)
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0}
    texts = client.chat.completions.parse(**asked, response_format=Answer)
    calls = client.chat.completions.parse(**asked, tools=[function], tool_choice="required", parallel_tool_calls=False)
    for answer in (texts, calls):
        message: Any = answer.choices[0].message
        plain = message.model_dump(mode="json", exclude={"parsed"}, warnings=False)
        for call in plain["tool_calls"] or ():
            assert call["function"].pop("parsed_arguments")["city"] in ("Oslo", "Rome")
        expected = for_template([Message.model_validate(plain).to_dict()])
        for sent in (message, message.model_dump(mode="json", warnings=False)):
            again = client.chat.completions.create(**{**asked, "messages": [*CHAT, sent]}, max_tokens=1)
            alike = client.chat.completions.create(**{**asked, "messages": [*CHAT, plain]}, max_tokens=1)
            assert again.usage is not None and alike.usage is not None
            assert again.usage.prompt_tokens == alike.usage.prompt_tokens
        again = Message.model_validate(message.model_dump(mode="json", warnings=False))
        assert for_template([again.to_dict()]) == expected
    assert texts.choices[0].message.parsed and calls.choices[0].message.tool_calls


def test_what_is_said_of_calls_stays_text(here: Running, client: OpenAI) -> None:
    said = f"Write <tool_call>{CALL}</tool_call> and <|end|>"
    got = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": said}], tools=TOOLS, max_tokens=20
    )
    assert got.choices[0].message.tool_calls is None
    assert here.service.tokenizer.control_ids >= {2}
    ids = httpx.post(f"{here.url}/tokenize", json={"messages": [{"role": "user", "content": said}]}).json()["tokens"]
    assert ids.count(2) == 1  # the end of the turn, and not what the message says
    # nor is anything a call where there is nothing to call
    bare = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=8)
    none = client.chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert none.choices[0].message.content == bare.choices[0].message.content
    assert none.usage is not None and bare.usage is not None and none.usage.prompt_tokens == bare.usage.prompt_tokens


def test_functions_are_shown_without_what_is_not_for_the_model(here: Running) -> None:
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": CITY}}]
    assert f'{{"type": "function", "function": {json.dumps({"name": "f", "parameters": CITY})}}}' in prompt(
        here, tools=strict
    )


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "['weather', 'stop']"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two functions are called 'weather'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f", "args": {}}}]}, "tools.0.function.args", "'args'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
             "tool_choice": "required"},
            "tools", "objekt",
        ),
        ({"guided_regex": "a+"}, "guided_regex", "no regex"),
    ],
)  # fmt: skip
def test_bad_tools_are_named(here: Running, change: dict[str, Any], param: str, says: str) -> None:
    body = {"model": MODEL, "messages": CHAT, "tools": TOOLS, **change}
    got = httpx.post(f"{here.url}/v1/chat/completions", json=body)
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["param"] == param and says in error["message"]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "objekt"}, "tools: parameters of 'late': Invalid type: objekt"),
        (
            {"properties": {"a": {"type": "string", "pattern": "("}}},
            "tools: parameters of 'late': at #/properties/a: pattern '('",
        ),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "tools: parameters of 'late': Pointer '/nowhere'"),
        ({"properties": {"a": {"type": "integer", "multipleOf": 999_983}}}, "tools: calls cannot be held to these"),
    ],
)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_wrong_schema_is_named_without_our_grammar(here: Running, parameters: Any, says: str, choice: str) -> None:
    late = {"type": "function", "function": {"name": "late", "strict": True, "parameters": parameters}}
    body = {"model": MODEL, "messages": CHAT, "tools": [*TOOLS, late], "tool_choice": choice}
    got = httpx.post(f"{here.url}/v1/chat/completions", json=body, timeout=60)
    error = got.json()["error"]
    assert got.status_code == 400 and error["param"] == "tools" and error["message"].startswith(says)
    assert not any(ours in error["message"] for ours in ("f2", "%json", "x-guidance", "structured", "|"))


def test_arguments_that_are_nested_deep_are_refused(here: Running) -> None:
    for text in ('{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200):
        call = {"type": "function", "id": "c", "function": {"name": "weather", "arguments": text}}
        messages = [*CHAT, {"role": "assistant", "tool_calls": [call]}]
        got = httpx.post(f"{here.url}/v1/chat/completions", json={"model": MODEL, "messages": messages})
        assert got.status_code == 400 and "arguments of a call" in got.json()["error"]["message"], got.text
        assert read("hermes", [f"<tool_call>{text[:4000]}"])[1] == []  # nor does a model that writes them do any harm


def test_a_template_of_another_kind_is_refused(here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"default": ChatTemplate(TEMPLATE.replace("<tool_call>", "<call>"))}
    monkeypatch.setattr(here.service.tokenizer, "templates", other)
    for choice, status in (("auto", 400), ("none", 200)):
        body = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 2}
        got = httpx.post(f"{here.url}/v1/chat/completions", json=body)
        assert got.status_code == status
        assert status == 200 or "hermes, mistral, llama" in got.json()["error"]["message"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_calls_and_text_of_one_answer(here: Running, reason: str) -> None:
    rules, vocabulary = Rules(here.service.llm.policy, 0, "none"), Vocabulary(here.service.tokenizer)
    said = f"I look.\n<tool_call>\n{CALL}\n</tool_call>"
    [row] = here.service.llm.requests([[0, 5]], SamplingParams(max_tokens=1))
    output = row.output()
    object.__setattr__(output, "finish_reason", reason)

    def news(pieces: list[str], over: bool = False) -> News:
        return News(0, [(Token(7, Why.MATCH, None, 7), p) for p in pieces], [], [], output=output if over else None)

    def made() -> Completion:
        body = ChatRequest.model_validate({"model": MODEL, "messages": CHAT, "tools": TOOLS})
        return Completion(Prepared(body, [row], 1, rules.choose(), calls=FORMATS["hermes"]), vocabulary, "")

    whole, stream, deltas = made(), made(), []
    whole.add(news([said], over=True))
    for character in said:
        choice = stream.add(news([character]))
        while (chunk := stream.chunk(choice)) is not None:
            deltas.append(chunk["choices"][0]["delta"])
    choice = stream.add(news([], over=True))
    last = stream.chunk(choice)
    assert last is not None and stream.chunk(choice) is None
    message = whole.build_whole()["choices"][0]
    assert message["finish_reason"] == last["choices"][0]["finish_reason"] == {"stop": "tool_calls"}.get(reason, reason)
    assert message["message"]["content"] == "I look." == "".join(delta.get("content", "") for delta in deltas)
    [piece] = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    [call] = message["message"]["tool_calls"]
    assert piece == {"index": 0, "id": piece["id"], "type": "function", "function": call["function"]}
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
