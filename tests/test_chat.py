"""Chat templates beside transformers, thinking told from answers, ``generation_config.json``, and ``fly chat``."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner, Result

import fly
from fly import LLM, SamplingParams, cli
from fly.bundled import CHECKPOINTS
from fly.models import CheckpointError, chat, generation
from fly.models.chat import ChatPrompt, ChatTemplate, Splitter, Tags, Thinking
from fly.models.generation import read_sampling_defaults, sampling_defaults
from fly.models.tokenizer import TextStream, Tokenizer
from tests.serving import running

transformers = pytest.importorskip("transformers")

# Six ways to write a template, each with what its family is known for. None is a family's own text.
TEMPLATES = {
    # Qwen 2.5: tools as lines of JSON in the system's turn, calls and responses in tags
    "tagged": """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Be useful.') }}
    {{- '\\n\\nSignatures:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe useful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<response>\\n' + message.content + '\\n</response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    # Qwen 3: old thinking is left out, found from behind by a namespace; thinking may be turned off
    "thinking": """
{%- set ns = namespace(last=messages|length - 1, looking=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == 'user' and message.content is string %}
        {%- set ns.looking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    # Llama 3: a begin token, variables with defaults of its own, a date, tools as indented JSON in the user's turn
    "headed": """
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%Y') %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|head|>system<|end_head|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: tools\\n' }}{%- endif %}
{{- 'Today: ' + date_string + '\\n\\n' }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot|>' }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception('there is no first message to put the tools in') }}{%- endif %}
    {{- '<|head|>user<|end_head|>\\n\\nCall one of:\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {{- '<|head|>assistant<|end_head|>\\n\\n{"parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|head|>ipython<|end_head|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '<|end_head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|end_head|>\\n\\n' }}{%- endif %}
""",
    # Mistral: roles must alternate; the system prompt goes before the last question; an end token after answers
    "bracketed": """
{%- if messages[0]['role'] == 'system' %}
    {%- set system, loop_messages = messages[0]['content'], messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- ' [INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- else %}{{- raise_exception('only user, system and assistant roles are supported') }}{%- endif %}
{%- endfor %}
""",
    # Gemma: no system's turn of its own, the assistant is called model, contents are trimmed or lists of parts
    "turns": """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] -%}
    {%- set prefix = (first if first is string else first[0]['text']) + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|im_start|>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
    {{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\\n' }}{%- endif -%}
""",
    # SmolLM: one line; SmolLM 3 and those that are trained further mark what the model says; loops that end early
    "marked": """{% macro turn(role, text) %}{{ '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}{% endmacro %}
{% for message in messages %}
    {% if message.role == 'stop' %}
        {% break %}
    {% elif message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'assistant' %}
{% generation %}{% set said = message.content %}{{ turn('assistant', said) }}{% endgeneration %}
    {% else %}
{{ turn(message.role, message.content) }}
    {% endif %}
{% endfor %}
{% if documents %}{{ documents | tojson(sort_keys=true, separators=(',', ':')) }}{% endif %}
{% if said is defined %}leaked{% endif %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""",
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|head|>", "<|end_head|>", "<|eot|>", "<s>", "</s>")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'What it\'s like in a <place> & "when", naïve',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def trained() -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["the user said system, assistant and tool"] * 4, trainer)
    raw.add_tokens(["<think>", "</think>"])  # as families with thinking have them: added, not special
    return raw


RAW = trained()


def ours(directory: Path, template: object, **settings: object) -> Tokenizer:
    RAW.save(str(directory / "tokenizer.json"))
    told = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(told))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    """Of each template our tokenizer and that of transformers."""
    found = {}
    for name, template in TEMPLATES.items():
        mine = ours(tmp_path_factory.mktemp(name), template)
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=RAW, chat_template=template, bos_token="<s>", eos_token="</s>"
        )
        found[name] = mine, theirs
    return found


def both(pair: tuple[Tokenizer, Any], messages: list[dict[str, Any]], **options: Any) -> tuple[Any, Any]:
    """What each makes of a conversation: token ids, or None where it is refused."""
    mine, theirs = pair
    options = {"add_generation_prompt": True, **options}
    try:
        wanted = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    except Exception:
        wanted = None
    try:
        found: Any = mine.apply_chat_template(messages, **options)
    except ValueError:
        found = None
    return found, wanted


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [" a \n", "<think>\nhm\n</think>\n\nyes", "\n\n", "{{ x }}", "</think>", 'it\'s <b> & "c"']
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if draw(st.booleans()):
        found.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(draw(st.integers(1, 3))):
        found += [{"role": "user", "content": draw(TEXTS)}, {"role": "assistant", "content": draw(TEXTS)}]
        if draw(st.booleans()):
            name = draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"]))
            found[-1][name] = draw(TEXTS)
    if draw(st.integers(0, 3)) == 0:
        arguments = {"place": draw(TEXTS)}
        calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        found[-1] = {"role": "assistant", "content": "", "tool_calls": calls}
        found.append({"role": "tool", "content": draw(TEXTS)})
    if draw(st.booleans()):
        found.append({"role": draw(st.sampled_from(["user", "user", "user", "skip", "stop"])), "content": draw(TEXTS)})
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(), generation=st.booleans())
def test_templates_give_what_transformers_gives(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str, messages: list[dict[str, Any]], generation: bool
) -> None:
    found, wanted = both(pairs[name], messages, add_generation_prompt=generation)
    assert found == wanted


ASKED = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "How is it in Kraków?"}]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tagged", {"tools": [TOOL, TOOL]}),
        ("tagged", {"tools": []}),
        ("headed", {"tools": [TOOL]}),
        ("headed", {"tools": [TOOL], "tools_in_user_message": False}),
        ("headed", {"custom_tools": [TOOL], "date_string": "26 Jul 2024"}),
        ("thinking", {"enable_thinking": False}),
        ("thinking", {"enable_thinking": True}),
        ("marked", {"documents": [{"title": "t", "text": "<é>"}]}),
    ],
)
def test_what_templates_take_besides(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str, options: dict[str, Any]
) -> None:
    plain, _ = both(pairs[name], ASKED)
    found, wanted = both(pairs[name], ASKED, **options)
    assert found is not None and found == wanted
    changes = bool(options.get("tools", True)) and options.get("enable_thinking") is not True
    assert (found != plain) == changes


def test_what_a_template_does_not_look_at_is_refused(pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    bracketed, thinking = pairs["bracketed"][0], pairs["thinking"][0]
    with pytest.raises(ValueError, match=r"does not read \['tools'\]"):
        bracketed.apply_chat_template(ASKED, tools=[TOOL])
    with pytest.raises(ValueError, match=r"\['enable_thought'\]; it reads .*'enable_thinking'"):
        thinking.apply_chat_template(ASKED, enable_thought=False)
    with pytest.raises(ValueError, match="not a dictionary"):
        thinking.apply_chat_template(["hello"])  # type: ignore[list-item]


def test_templates_have_names(tmp_path: Path) -> None:
    listed = [{"name": name, "template": name} for name in ("default", "rag")]
    tools = {"name": "tool_use", "template": "tool_use {{ tools | length }}"}

    def said(tokenizer: Tokenizer, **options: Any) -> str:
        return tokenizer.decode(tokenizer.apply_chat_template(ASKED, **options))

    tokenizer = ours(tmp_path, [*listed, tools])
    assert said(tokenizer) == "default" == tokenizer.template
    assert said(tokenizer, tools=[TOOL]) == "tool_use 1"
    assert said(tokenizer, tools=[TOOL], chat_template="tool_use") == "tool_use 1"
    assert said(tokenizer, chat_template="rag") == "rag" and "tools" in tokenizer.template_variables
    with pytest.raises(ValueError, match=r"no chat template 'rga'; choices: \['default', 'rag', 'tool_use'\]"):
        said(tokenizer, chat_template="rga")
    # files of their own stand before all of these, as transformers writes them
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("short")
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = Tokenizer(tmp_path)
    assert (said(tokenizer), said(tokenizer, chat_template="short")) == ("file", "short")
    assert sorted(tokenizer.templates) == ["default", "short"]


def test_special_tokens_of_any_name_reach_the_template(tmp_path: Path) -> None:
    template = "{{ sep_token }}{{ mark }}{{ unk_token is defined }}"
    tokenizer = ours(tmp_path, template, sep_token="<|eot|>", extra_special_tokens={"mark": "<|head|>"})
    ids = tokenizer.apply_chat_template(ASKED)
    assert ids[:2] == [RAW.token_to_id("<|eot|>"), RAW.token_to_id("<|head|>")]
    assert tokenizer.decode(ids) == "False"


@pytest.mark.parametrize("name", TEMPLATES)
@given(at=st.integers(0, 3), token=st.sampled_from(SPECIAL))
def test_special_tokens_in_what_is_said_stay_text(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str, at: int, token: str
) -> None:
    """Whoever says them: the ids have as many special tokens as without."""
    tokenizer = pairs[name][0]

    def specials(said: str) -> list[int]:
        messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
        messages[at]["content"] = f"a {said} b"
        ids = tokenizer.apply_chat_template(messages)
        assert tokenizer.decode(ids, skip_special_tokens=False).count(f"a {said} b") == 1
        return [i for i in ids if i in tokenizer.control_ids]

    assert specials(token) == specials("c")


# --- thinking --------------------------------------------------------------------------------------------

PARTS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<", "</", "thi", "nk>", "\n", " ", "a", "é"]
TAGS = st.sampled_from(chat.TAGS)


def naive(thinking: Thinking, text: str) -> tuple[str, str]:
    """The twin, which has all of it."""
    begin, end = thinking.tags
    body = text if thinking.begun else text.lstrip().removeprefix(begin) if text.lstrip().startswith(begin) else None
    if body is None:
        return "", text
    thought, _, rest = body.partition(end)
    return thought.strip("\n"), rest.lstrip("\n")


@given(tags=TAGS, begun=st.booleans(), parts=st.lists(st.sampled_from(PARTS), max_size=14))
@example(tags=chat.TAGS[0], begun=False, parts=["<think>", "\n", "a", "\n", "</think>", "\n", "\n", "b"])
@example(tags=chat.TAGS[0], begun=True, parts=["\n", "\n", "</", "thi", "nk>"])
def test_thinking_is_separated_from_the_answer_in_pieces_of_any_size(tags: Tags, begun: bool, parts: list[str]) -> None:
    thinking = Thinking(tags, begun)
    wanted = dict(zip(("reasoning", "text"), naive(thinking, "".join(parts))))
    assert Splitter.whole(thinking, "".join(parts)) == (wanted["reasoning"], wanted["text"])
    splitter, said = Splitter(thinking), {"reasoning": "", "text": ""}
    for part in parts:
        for kind, piece in splitter.push(part):
            assert piece
            said[kind] += piece
            assert wanted[kind].startswith(said[kind])  # what was given out stands: never half a tag
    for kind, piece in splitter.finish():
        said[kind] += piece
    assert said == wanted
    if splitter.tokens:
        spent = "".join(parts[: splitter.tokens])
        assert tags.close in spent if tags.close in "".join(parts) else splitter.tokens == len(parts)
    assert bool(splitter.tokens) == ((begun and bool(parts)) or "".join(parts).lstrip().startswith(tags.open))


@given(parts=st.lists(st.sampled_from(PARTS), max_size=8))
def test_without_thinking_all_is_text_at_once(parts: list[str]) -> None:
    splitter = Splitter(None)
    assert [piece for part in parts for piece in splitter.push(part)] == [("text", part) for part in parts]
    assert splitter.finish() == [] and splitter.tokens == 0


def test_a_prompt_knows_how_its_answer_begins(pairs: dict[str, tuple[Tokenizer, Any]], tmp_path: Path) -> None:
    assert pairs["tagged"][0].apply_chat_template(ASKED).thinking is None
    thinking = pairs["thinking"][0]
    assert thinking.apply_chat_template(ASKED).thinking == Thinking(chat.TAGS[0])
    assert thinking.apply_chat_template(ASKED, enable_thinking=False).thinking == Thinking(chat.TAGS[0])
    # what the user says of tags opens nothing
    asked = [{"role": "user", "content": "<think>"}]
    assert thinking.apply_chat_template(asked, add_generation_prompt=False).thinking == Thinking(chat.TAGS[0])
    template = "{{ messages[-1].content }}<|im_end|>{% if add_generation_prompt %}<think>\n{% endif %}"
    opened = ours(tmp_path, template).apply_chat_template(asked)
    assert opened.thinking == Thinking(chat.TAGS[0], begun=True)


def test_tags_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    """Decoding leaves special tokens out."""
    raw = trained()
    raw.add_special_tokens(["[THINK]", "[/THINK]"])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "[THINK]né[/THINK]\nyes<|eot|>"
    ids, given_out = tokenizer.encode(text), ""
    assert tokenizer.decode(ids) == "né\nyes"
    stream = TextStream(tokenizer, shown=chat.TAGS[1])
    for token in ids:
        given_out += stream.push(token)
    assert given_out + stream.finish() == "[THINK]né[/THINK]\nyes"


@pytest.fixture(scope="module")
def free() -> Iterator[tuple[LLM, fly.Output]]:
    """A model that says something, here of a template that opens a tag in the prompt; and what it says in all."""
    with LLM("fly-tiny", "ngram", dtype="float32", k=4) as llm:
        assert llm.tokenizer is not None
        source = str(llm.tokenizer.template).replace(
            "'<|assistant|>'", "'<|assistant|>' ~ ('<think>' if think else '')"
        )
        llm.tokenizer.templates["default"] = ChatTemplate(source)
        prompt = list(llm.chat_prompt("Take the list 4 9. Reverse the list.", think=True))
        (output,) = llm.generate([prompt], PARAMS)
        assert len(output.text) > 30 and not output.reasoning  # plain ids are no conversation
        yield llm, output


PARAMS = SamplingParams(temperature=0, max_tokens=40)
MESSAGES = [{"role": "user", "content": "Take the list 4 9. Reverse the list."}]


@pytest.mark.parametrize("cut", [(12, 15), (0, 3), None], ids=["closed", "at once", "unfinished"])
def test_outputs_and_streams_tell_thinking_apart(
    free: tuple[LLM, fly.Output], cut: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, output = free
    close = "</think>" if cut is None else output.text[slice(*cut)]
    monkeypatch.setattr(chat, "TAGS", (Tags("<think>", close),))
    thought, _, answer = output.text.partition(close)
    thought, answer = thought.strip("\n"), answer.lstrip("\n")
    think = {"think": True}
    got = llm.chat(MESSAGES, PARAMS, chat_template_kwargs=think)
    assert (got.reasoning, got.text, got.token_ids) == (thought, answer, output.token_ids)
    assert asyncio.run(llm.achat(MESSAGES, PARAMS, chat_template_kwargs=think)).reasoning == thought
    pieces = list(llm.stream(llm.chat_prompt(MESSAGES, **think), PARAMS))
    for kind, wanted in (("reasoning", thought), ("text", answer)):
        assert "".join(piece for piece in pieces if piece.kind == kind) == wanted
    assert [token.id for piece in pieces for token in piece.tokens] == output.token_ids
    shown = got.pieces
    assert [(piece, piece.kind) for piece in shown if piece] == [(piece, piece.kind) for piece in pieces if piece]
    # several completions, and a form, of which nothing is thinking
    several = llm.chat(MESSAGES, PARAMS.model_copy(update={"n": 2}), chat_template_kwargs=think)
    assert [other.reasoning for other in several.others] == [thought]
    formed = PARAMS.model_copy(update={"structured": fly.params.StructuredOutput(regex="[a-z ]{5,9}")})
    formal = llm.chat(MESSAGES, formed, chat_template_kwargs=think)
    assert not formal.reasoning and 5 <= len(formal.text) <= 9


@pytest.mark.parametrize("cut", [(12, 15), None], ids=["closed", "unfinished"])
def test_the_server_tells_thinking_apart(
    free: tuple[LLM, fly.Output], cut: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    llm, output = free
    close = "</think>" if cut is None else output.text[slice(*cut)]
    monkeypatch.setattr(chat, "TAGS", (Tags("<think>", close),))
    wanted = llm.chat(MESSAGES, PARAMS, chat_template_kwargs={"think": True})
    assert llm.tokenizer is not None
    with running() as server:
        server.service.tokenizer.templates["default"] = llm.tokenizer.templates["default"]
        body = {"model": "fly-tiny", "messages": MESSAGES, "max_tokens": 40, "chat_template_kwargs": {"think": True}}

        def ask(**more: Any) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/chat/completions", json={**body, **more}, timeout=60)

        whole = ask().json()
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (wanted.reasoning, wanted.text)
        thought = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < thought <= whole["usage"]["completion_tokens"] == len(wanted.token_ids)
        assert (thought == len(wanted.token_ids)) == (cut is None)
        lines = ask(stream=True).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        for name, value in (("reasoning_content", wanted.reasoning), ("content", wanted.text)):
            assert "".join(delta.get(name, "") for delta in deltas) == value
        # what was answered can be sent back, and what the template does not know is refused
        assert ask(messages=[*MESSAGES, message, *MESSAGES]).status_code == 200
        refused = ask(chat_template_kwargs={"thinks": True})
        assert refused.status_code == 400 and "thinks" in refused.text and "['bos_token', 'think']" in refused.text
        assert "reasoning_content" not in ask(chat_template_kwargs={"think": False}).json()["choices"][0]["message"]


def test_the_server_answers_as_long_as_the_checkpoint_says() -> None:
    import httpx

    with running() as server:
        server.service.llm.default_params = sampling_defaults({"max_new_tokens": 3}, "x")[0]
        for more, wanted in (({}, 3), ({"max_tokens": 5}, 5)):
            body = {"model": "fly-tiny", "messages": MESSAGES, **more}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            assert answer["usage"]["completion_tokens"] == wanted


# --- generation_config.json ------------------------------------------------------------------------------


def test_every_field_of_a_generation_config_is_honoured_or_named() -> None:
    default = transformers.GenerationConfig()
    values = dict(default.to_dict())
    assert sampling_defaults(values, "x") == (SamplingParams(temperature=0), [])
    values |= transformers.GenerationConfig._get_default_generation_params()
    assert sampling_defaults(values, "x") == (SamplingParams(temperature=0), [])
    honoured = {*generation._DRAWING, *generation._ALWAYS, *generation._IDS, "do_sample"}
    for name in {*values, "unheard_of"} - honoured - generation._SILENT:
        params, words = sampling_defaults({name: 7}, "x")
        assert params == SamplingParams(temperature=0) and len(words) == 1 and words[0].startswith(f"{name} 7 "), name
    assert len(sampling_defaults({"num_beams": 4, "penalty_alpha": 0.6, "max_length": 99}, "x")[1]) == 2


def test_a_generation_config_in_full(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    settings = {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05,
        "max_new_tokens": 99, "min_new_tokens": 2, "stop_strings": "###", "suppress_tokens": [5, 6],
        "bad_words_ids": [[7, 8]], "eos_token_id": [1, 2], "transformers_version": "4.37.0", "typical_p": 1.0,
    }  # fmt: skip
    path.write_text(json.dumps(settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = read_sampling_defaults(tmp_path, 10)
    assert params == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.05, max_tokens=99, min_tokens=2,
        stop=("###",), bad_words_ids=((5,), (6,), (7, 8)),
    )  # fmt: skip
    path.write_text(json.dumps(settings | {"do_sample": False, "num_beams": 4, "typical_p": 0.9}))
    with pytest.warns(
        UserWarning, match=r"top_k 20.*do_sample is not true; typical_p 0.9, num_beams 4 not supp"
    ) as told:
        params = read_sampling_defaults(tmp_path, 10)
    assert len(told) == 1 and (params.temperature, params.top_k, params.repetition_penalty) == (0, 0, 1.05)
    for wrong, said in (
        ({"suppress_tokens": [10]}, "bad_words_ids .10."),
        ({"bad_words_ids": 3}, "lists of token ids"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{said}"):
            read_sampling_defaults(tmp_path, 10)


def test_banned_ids_never_come_up() -> None:
    """One by one, and in sequences, the end of the prompt included; drafted or not."""
    llm = LLM("fly-tiny", "ngram", dtype="float32", k=4)
    prompt = llm.chat_prompt(MESSAGES)
    plain = llm.generate([prompt], PARAMS)[0].token_ids
    bans = ((plain[4],), (prompt[-1], plain[0]), (plain[1], plain[2]))
    params = PARAMS.model_copy(update={"bad_words_ids": bans})
    (banned,), (alone,) = llm.generate([prompt], params), llm.generate([prompt], params, k=0)
    text = [prompt[-1], *banned.token_ids]
    assert banned.token_ids == alone.token_ids and plain[4] not in banned.token_ids
    assert not set(pairwise(text)) & set(bans)
    for wrong, said in ((((),), "empty bad word"), (((99999,),), r"bad_words_ids \[99999\] are outside")):
        with pytest.raises(ValueError, match=said):
            llm.generate([prompt], SamplingParams(bad_words_ids=wrong))


# --- fly chat --------------------------------------------------------------------------------------------

QUESTIONS = ["Take the list 4 9 5 7. Reverse the list.", "Take the list 3 8. Add 2 to each number."]


def talk(*lines: str, arguments: tuple[str, ...] = ("fly-target",), end: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["chat", *arguments], input="".join(f"{line}\n" for line in lines) + end)


def answers(llm: LLM, questions: list[str], system: str | None = None, **options: Any) -> list[fly.Output]:
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    outputs = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        outputs.append(llm.chat(messages, SamplingParams(temperature=0, max_tokens=1024), **options))
        messages.append({"role": "assistant", "content": outputs[-1].text})
    return outputs


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("fly-target", "fly-draft")


def test_a_conversation_says_what_chat_says_and_reuses_what_is_cached(target: LLM) -> None:
    wanted = answers(target, QUESTIONS)
    result = talk(*QUESTIONS)
    assert result.exit_code == 0 and result.stdout == "".join(f"{output.text}\n" for output in wanted)
    figures = re.findall(r"τ ([\d.]+) · [\d,.]+ tokens/s · (\d+)% relaxed · cached (\d+) of (\d+)", result.stderr)
    assert len(figures) == 2
    for (tau, relaxed, cached, prompt), output in zip(figures, wanted):
        assert tau == f"{output.stats.tau:.2f}" and int(prompt) == len(output.prompt_token_ids)
        assert int(relaxed) == round(100 * output.stats.relaxed / output.stats.generated)
        assert int(cached) <= int(prompt)
    before = len(wanted[0].prompt_token_ids) + len(wanted[0].token_ids)
    assert int(figures[0][2]) == 0 and before - 6 <= int(figures[1][2]) <= before  # but for the page under way


def test_commands_change_what_follows_and_lose_nothing(target: LLM, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    result = talk(
        QUESTIONS[0], "/polcy exact", "/policy fyl", "/k -1", "/temperature hot", "/draft nothing-there", "/drop 2",
        "/drop x", "/save", "/save /nowhere/at/all", "/reset please", "//", "", "/policy exact", "/k 3", "/draft ngram",
        QUESTIONS[1], f"/save {file}", f"/save {file}", "/temperature 0.5", "/system", "/quit", "never read",
    )  # fmt: skip
    outputs = answers(target, QUESTIONS[:1])
    asked = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": outputs[0].text}]
    said = asked + [{"role": "user", "content": "/"}]
    slash = target.chat(said, SamplingParams(temperature=0, max_tokens=1024))
    said += [{"role": "assistant", "content": slash.text}, {"role": "user", "content": QUESTIONS[1]}]
    last = target.chat(said, SamplingParams(temperature=0, max_tokens=1024), policy=fly.policies.Exact(), k=0)
    assert result.exit_code == 0
    assert result.stdout == f"{outputs[0].text}\n{slash.text}\n{last.text}\n"
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    for words, error in zip(
        [
            "/polcy is no command (did you mean '/policy'?); choices: /policy /k",
            "policy 'fyl'",
            "/k '-1'",
            "/temperature 'hot'",
            "nothing-there",
            "/drop 2 must be in 1..1",
            "/drop x",
            "/save needs",
            "No such file",
            "/reset takes nothing",
        ],
        errors,
        strict=True,
    ):
        assert words in error
    saved = json.loads(file.read_text())
    assert saved["messages"] == [*said, {"role": "assistant", "content": last.text}]
    assert (saved["policy"], saved["k"], saved["draft"]) == ("exact", 3, "ngram")
    assert "temperature 0.5" in result.stderr and "no system prompt but the template's own" in result.stderr
    other = talk(f"/save {file}")
    assert "exists already" in other.stderr and json.loads(file.read_text()) == saved


def test_options_of_a_conversation(target: LLM) -> None:
    options = ("--model", "fly-target", "--draft", "none", "--system", "Be brief.", "--max-tokens", "9")
    result = talk(QUESTIONS[0], "/reset", "/system Be long.", QUESTIONS[0], arguments=options)
    for system, said in zip(("Be brief.", "Be long."), result.stdout.splitlines()):
        assert answers(target, QUESTIONS[:1], system, policy=fly.policies.Exact(), k=0)[0].text.startswith(said)
    assert result.stderr.count("cut by --max-tokens 9") == 2 and "τ 1.00" in result.stderr
    for arguments, words in (
        (("fly-target", "--model", "fly-tiny"), "two models"),
        (("fly-target", "--temperature", "-1"), "temperature"),
        (("fly-target", "--chat-template-kwargs", "{"), "no JSON"),
        (("fly-target", "--chat-template-kwargs", "[1]"), "must be a JSON object"),
        (("fly-targte",), "did you mean 'fly-target'"),
    ):
        refused = talk("hi", arguments=arguments)
        assert refused.exit_code == 2 and words in refused.stderr and "Traceback" not in refused.stderr
    unread = talk(QUESTIONS[0], arguments=("fly-tiny", "--chat-template-kwargs", '{"think": 1}'))
    assert unread.exit_code == 0 and "does not read ['think']" in unread.stderr


def test_a_conversation_beyond_the_context_gets_a_message() -> None:
    long = "4 " * 1200
    result = talk(QUESTIONS[0], long, "/drop", long, QUESTIONS[0], arguments=("fly-tiny", "--draft", "none"))
    assert result.exit_code == 0 and len(re.findall(r"the context holds 1024: nothing was sent", result.stderr)) == 2
    assert "/drop N forgets its oldest N turns (of 1)" in result.stderr and "0 turns are left" in result.stderr
    first, last = (line for line in re.findall(r"cached \d+ of \d+", result.stderr))
    assert first.split()[-1] == last.split()[-1]  # nothing of what was refused is kept


def test_what_was_said_before_an_interrupt_is_kept(
    target: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, most = importlib.import_module("fly.cli.chat"), [5, 0]
    show = module.show

    def interrupted(pieces: Any) -> None:
        iterator = iter(pieces)

        def some() -> Iterator[Any]:
            for _ in range(most.pop(0) if most else 10**6):
                if (piece := next(iterator, None)) is None:
                    return
                yield piece
            raise KeyboardInterrupt

        show(some())

    monkeypatch.setattr(module, "show", interrupted)
    file = tmp_path / "said.json"
    result = talk(QUESTIONS[0], "gone", QUESTIONS[1], f"/save {file}")
    wanted = answers(target, QUESTIONS[:1])[0].text
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    said = messages[1]["content"]
    assert said and said != wanted and wanted.startswith(said) and messages[2]["content"] == QUESTIONS[1]
    assert "first after" in result.stderr and "· stopped\n" in result.stderr


def test_an_interrupt_of_anything_else_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fly.llm.LLM.chat_prompt", interrupted)
    result = talk(QUESTIONS[0], "/k 3", "/k")
    assert result.exit_code == 0 and "stopped" in result.stderr and result.stderr.count("k 3\n") == 2


def test_thinking_is_dimmed_on_a_terminal_and_left_out_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from fly.cli.completion import show
    from fly.runtime.request import Token
    from fly.types import Why

    token = Token(1, Why.MATCH)
    pieces = [fly.Piece("hm", (token,), "reasoning"), fly.Piece("yes", (token,))]
    for terminal in (True, False):
        console = Console(force_terminal=terminal, color_system="standard", width=80)
        monkeypatch.setattr("fly.cli.completion.console", console)
        with console.capture() as said:
            show(pieces)
        if terminal:
            assert said.get() == "\x1b[2;32mhm\x1b[0m\n\n\x1b[32myes\x1b[0m"


def test_a_warning_of_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    for path in (CHECKPOINTS / "fly-tiny").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1], "num_beams": 3}')
    result = talk("/quit", arguments=(str(tmp_path),))
    assert [line for line in result.stderr.splitlines() if "num_beams" in line] == [
        f"warning: {tmp_path}/generation_config.json: num_beams 3 not supported, and ignored"
    ]


def test_plain_ids_know_nothing_of_thinking() -> None:
    assert ChatPrompt([1, 2]) == [1, 2] and ChatPrompt([1]).thinking is None


@pytest.mark.parametrize("begun", [True, False])
def test_newlines_and_blanks_without_end_are_not_kept(begun: bool) -> None:
    """What is held back stays short, however long somebody makes a model say nothing."""
    splitter = Splitter(Thinking(chat.TAGS[0], begun))
    for _ in range(1000):
        splitter.push("\n")
        assert len(splitter._held) <= 65
    if begun:
        assert splitter.push("a") == [("reasoning", "a")]
        assert splitter.push("\n\n") == [] and splitter.push("b") == [("reasoning", "\n\nb")]
