"""Tool calls: read out of what a model says, held to their schemas, and as OpenAI's own client sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai import OpenAI
from tokenizers import AddedToken

from fly import SamplingParams
from fly.engine.job import News
from fly.models.chat import TAGS, ChatTemplate, Thinking
from fly.models.tokenizer import Tokenizer
from fly.runtime.request import Token, Why
from fly.runtime.structured import Grammars
from fly.serve.answers import Completion, Prepared, Vocabulary
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


def read(
    form: str, pieces: list[str], names: tuple[str, ...] = ("weather", "stop")
) -> tuple[str, list[tuple[Any, ...]]]:
    """The text, and the name and arguments of each call; each call's id and name come first, and only once."""
    reader, text, calls = CallReader(FORMATS[form], names), "", []
    for said in [*(said for piece in pieces for said in reader.push(piece)), *reader.finish()]:
        if isinstance(said, str):
            assert said
            text += said
        elif said.name is not None:
            assert said.at == len(calls) and said.arguments == "" and said.id
            calls.append([said.name, ""])
        else:
            assert said.id is None and said.arguments and said.at == len(calls) - 1
            calls[said.at][1] += said.arguments
    assert reader.calls == len(calls)
    return text, [tuple(call) for call in calls]


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in pairwise(places)]


SAID = st.text(st.sampled_from("ab<[|{\"' \n}`tool_call>"), max_size=30)
VALUE = st.recursive(st.none() | st.integers() | SAID, lambda v: st.lists(v, max_size=3) | st.dictionaries(SAID, v))
ARGUMENTS = st.dictionaries(SAID, VALUE, max_size=3)


@given(
    form=st.sampled_from(sorted(FORMATS)),
    before=st.text("ab <[{}\n", max_size=12),
    calls=st.lists(st.tuples(st.sampled_from(["weather", "stop"]), ARGUMENTS), min_size=1, max_size=3),
    at=st.lists(st.integers(0, 400), max_size=40),
    indent=st.sampled_from([None, 2]),
)
def test_calls_are_read_however_the_text_is_cut(
    form: str, before: str, calls: list[tuple[str, dict[str, Any]]], at: list[int], indent: int | None
) -> None:
    how = FORMATS[form]
    written = [json.dumps({"name": name, how.arguments: given}, indent=indent) for name, given in calls]
    if form == "hermes":
        said = before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    elif form == "mistral":
        said = f"{before}[TOOL_CALLS] [{', '.join(written)}]"
    else:
        said = before + "<|python_tag|>" + "; ".join(written)
    text, found = read(form, cut(said, at))
    assert text == before.rstrip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(form=st.sampled_from(sorted(FORMATS)), text=SAID, at=st.lists(st.integers(0, 400), max_size=40))
@example("hermes", "<tool_call>\nweather(Oslo)\n</tool_call> it is", [])
@example("hermes", '<tool_call>{"name": "weather"', [3])
@example("hermes", '```json\n{"name": "bob", "arguments": {}}\n```', [9, 20])
@example("llama", '{"name": "Bob", "parameters": {}} is he', [])
@example("mistral", "[TOOL_CALLS] none", [14])
def test_text_that_is_not_a_call_is_unchanged(form: str, text: str, at: list[int]) -> None:
    assert read(form, cut(text, at)) == (text, [])


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("form", "said", "text", "calls"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>\nDone.", "Done.", 1),
        ("hermes", f"<tool_call>{CALL}", "", 1),  # the end left out
        ("hermes", f"```json\n{CALL}\n```", "", 1),  # a fence for the markers
        ("hermes", f"{CALL}\n{CALL}", "", 2),
        ("hermes", f"I do:\n```json\n{CALL}\n```", f"I do:\n```json\n{CALL}\n```", 0),
        ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', "", 1),
        ("hermes", '<tool_call>{"name": "other", "arguments": {"city": "Oslo"}}</tool_call>', "", 1),
        ("mistral", f"[TOOL_CALLS]{CALL}", "", 1),
        ("llama", CALL.replace("arguments", "parameters"), "", 1),
    ],
)
def test_how_else_models_write_them(form: str, said: str, text: str, calls: int) -> None:
    got_text, got = read(form, list(said))
    assert (got_text, len(got)) == (text, calls)
    assert all(json.loads(arguments) == {"city": "Oslo"} for _, arguments in got)


def test_arguments_come_as_they_are_written() -> None:
    reader, seen = CallReader(FORMATS["hermes"], ["weather"]), []
    for character in f"<tool_call>{CALL}</tool_call>":
        seen += [said.arguments for said in reader.push(character) if not isinstance(said, str)]
    assert seen == ["", *'{"city": "Oslo"}']


def test_formats_are_recognised_from_templates() -> None:
    for said, name in (
        (TEMPLATE, "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("""{{ 'Environment: ipython' }}{{ '"parameters": ' }}""", "llama"),
        ("<tool_call><function=f>", None),
        ("[TOOL_CALLS]f[ARGS]{}", None),
        ("{{ messages }}", None),
    ):
        assert format_of(said) == (None if name is None else FORMATS[name])


# Grammars.


@pytest.fixture(scope="module", params=[False, True], ids=["markers are text", "markers are tokens"])
def tokenizer(request: Any) -> Tokenizer:
    made = Tokenizer(Path(__file__).parent.parent / "fly" / "bundled" / "checkpoints" / MODEL)
    if request.param:
        markers = [*("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")]
        made.raw.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return made


def allowed(tokenizer: Tokenizer, source: str, text: str) -> bool:
    """Whether the whole text, token by token, is what the grammar wants."""
    matcher = Grammars(tokenizer, 1040, [2]).matcher(SamplingParams(structured={"grammar": source}))  # type: ignore[arg-type]
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
    assert whole.message.content is None and whole.message.tool_calls
    assert whole.finish_reason == ("length" if parallel else "tool_calls")  # so small a model goes on for ever
    assert (len(whole.message.tool_calls) > 1) == parallel
    for call in whole.message.tool_calls[: -1 if parallel else None]:
        assert call.type == "function" and re.fullmatch("call_[0-9a-f]{24}", call.id)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in whole.message.tool_calls}) == len(whole.message.tool_calls)
    calls: list[list[str]] = []
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        delta = chunk.choices[0].delta
        assert not delta.content and len(delta.tool_calls or []) <= 1
        for piece in delta.tool_calls or []:
            assert piece.function is not None
            if piece.id:
                assert (piece.index, piece.type, piece.function.arguments) == (len(calls), "function", "")
                calls.append([piece.function.name or "", ""])
            else:
                assert piece.function.name is None
                calls[piece.index][1] += piece.function.arguments or ""
    assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
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
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "tools: parameters of 'late': regex parse error"),
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
        assert read("hermes", [f"<tool_call>{text}"])[1] == []  # nor does a model that writes them do any harm


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
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", [])]
    [call] = message["message"]["tool_calls"]
    assert pieces[0] == {"name": "weather", "arguments": ""}
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"] == '{"city": "Oslo"}'
