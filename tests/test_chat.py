"""Chat templates beside transformers, and thinking told from answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

import fly
from fly import LLM, SamplingParams
from fly.models import chat
from fly.models.chat import ChatTemplate
from fly.models.generation import sampling_defaults
from fly.models.thinking import TAGS as ALL_TAGS
from fly.models.thinking import ChatPrompt, Splitter, Tags, Thinking
from fly.models.tokenizer import TextStream, Tokenizer
from tests.serving import running

transformers = pytest.importorskip("transformers")

# Ways to write a template, each with what its family is known for. None is a family's own text.
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
    # Phi 3 and Zephyr: control tokens built from roles
    "roles": """
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|eot|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
""",
    # DeepSeek R1: a system prompt gathered first, answers cut at the end of their thinking, nothing between turns
    "cut": """
{%- set ns = namespace(system='', called=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system = message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<|user|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- for call in message.tool_calls %}
            {%- set ns.called = true %}
            {{- '<|call|>' + call['function']['name'] ~ '\n' ~ call['function']['arguments'] ~ '<|eot|>' }}
        {%- endfor %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|assistant|>' + content + eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '<|call|>' ~ message['content'] ~ '<|eot|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.called %}{{- '<|assistant|><think>\n' }}{%- endif %}
""",
    # Command R: roles in any case, results of tools as JSON in a macro, a system prompt set by a block
    "macros": """
{{- bos_token }}
{%- macro result(message) %}{"result": {{ message.content | tojson }}}{% endmacro %}
{%- if messages[0]['role'] | lower == 'system' %}{% set preamble %}
# Preamble
{{ messages[0]['content'] }}
{% endset %}{{ '<|head|><|system|>' ~ preamble ~ '<|eot|>' }}{% endif %}
{%- for message in messages %}
    {%- set role = message.role | lower %}
    {%- if role == 'user' %}{{- '<|head|><|user|>' ~ message.content ~ '<|eot|>' }}
    {%- elif role == 'assistant' %}
        {{- '<|head|><|assistant|>' ~ message.content }}
        {%- for call in message.tool_calls %}{{ '\n' ~ call }}{% endfor %}{{ '<|eot|>' }}
    {%- elif role == 'tool' %}{{- '<|head|><|system|>' ~ result(message) ~ '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|><|assistant|>' }}{%- endif %}
""",
    # Llama Guard 3: contents are lists of parts
    "parts": """
{{- '<|head|>user<|end_head|>\n\nIs this conversation safe?\n' }}
{%- for message in messages %}
    {%- set content = message['content'] %}
    {{- '\n' ~ message['role'] | capitalize ~ ': ' }}
    {%- for part in content %}
        {%- if part['type'] == 'text' %}{{- part['text'] | trim }}{%- endif %}
    {%- endfor %}
{%- endfor %}
{{- '<|eot|>' }}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|end_head|>\n\n' }}{%- endif %}
""",
}
SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|head|>", "<|end_head|>", "<|eot|>", "<s>", "</s>", "<|user|>", "<|assistant|>",
    "<|system|>", "<|call|>",
)  # fmt: skip
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
    listed = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message.get("content") else message
        for message in messages
    ]
    listed = listed if theirs.chat_template == TEMPLATES["parts"] else messages
    try:
        wanted = theirs.apply_chat_template(listed, tokenize=True, return_dict=False, **options)
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
        role = draw(st.sampled_from(["user", "user", "user", "skip", "stop"]))
        found.append({"role": role, "content": draw(TEXTS) if role == "user" else ""})  # a text must be shown
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations(), generation=st.booleans())
def test_templates_give_what_transformers_gives(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str, messages: list[dict[str, Any]], generation: bool
) -> None:
    found, wanted = both(pairs[name], messages, add_generation_prompt=generation)
    assert found == wanted


SILENT = [{"role": "user", "content": ""}]  # templates that show no message refuse all others
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
        return tokenizer.decode(tokenizer.apply_chat_template(SILENT, **options))

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
    ids = tokenizer.apply_chat_template(SILENT)
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


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    messages=conversations(),
    last=st.sampled_from(["Sure, ", " so\n", "<think>\nhm\n</think>\n\n", "</think>", 'it\'s "x"']),
)
def test_an_open_conversation_ends_as_that_of_transformers(
    pairs: dict[str, tuple[Tokenizer, Any]], name: str, messages: list[dict[str, Any]], last: str
) -> None:
    """It puts a mark into the content; templates see none of ours, so that they refuse less."""
    messages = [*messages[:-1], {"role": messages[-1]["role"], "content": last}]
    found, wanted = both(pairs[name], messages, add_generation_prompt=False, continue_final_message=True)
    assert wanted is None or found == wanted


# --- thinking --------------------------------------------------------------------------------------------

PARTS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<", "</", "thi", "nk>", "\n", " ", "a", "é"]
TAGS = st.sampled_from(ALL_TAGS)


def naive(thinking: Thinking, text: str) -> tuple[str, str]:
    """The twin, which has all of it."""
    begin, end = thinking.tags
    body = text if thinking.begun else text.lstrip().removeprefix(begin) if text.lstrip().startswith(begin) else None
    if body is None:
        return "", text
    thought, _, rest = body.partition(end)
    return thought.strip("\n"), rest.lstrip("\n")


@given(tags=TAGS, begun=st.booleans(), parts=st.lists(st.sampled_from(PARTS), max_size=14))
@example(tags=ALL_TAGS[0], begun=False, parts=["<think>", "\n", "a", "\n", "</think>", "\n", "\n", "b"])
@example(tags=ALL_TAGS[0], begun=True, parts=["\n", "\n", "</", "thi", "nk>"])
def test_thinking_is_separated_from_the_answer_in_pieces_of_any_size(tags: Tags, begun: bool, parts: list[str]) -> None:
    thinking = Thinking(tags, begun)
    wanted = dict(zip(("reasoning", "text"), naive(thinking, "".join(parts))))
    assert Splitter.split(thinking, "".join(parts)) == (wanted["reasoning"], wanted["text"])
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
    assert thinking.apply_chat_template(ASKED).thinking == Thinking(ALL_TAGS[0])
    assert thinking.apply_chat_template(ASKED, enable_thinking=False).thinking == Thinking(ALL_TAGS[0])
    # what the user says of tags opens nothing
    asked = [{"role": "user", "content": "<think>"}]
    assert thinking.apply_chat_template(asked, add_generation_prompt=False).thinking == Thinking(ALL_TAGS[0])
    template = "{{ messages[-1].content }}<|im_end|>{% if add_generation_prompt %}<think>\n{% endif %}"
    opened = ours(tmp_path, template).apply_chat_template(asked)
    assert opened.thinking == Thinking(ALL_TAGS[0], begun=True)


def test_tags_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    """Decoding leaves special tokens out."""
    raw = trained()
    raw.add_special_tokens(["[THINK]", "[/THINK]"])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "[THINK]né[/THINK]\nyes<|eot|>"
    ids, given_out = tokenizer.encode(text), ""
    assert tokenizer.decode(ids) == "né\nyes"
    stream = TextStream(tokenizer, shown=ALL_TAGS[1])
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


def test_plain_ids_know_nothing_of_thinking() -> None:
    assert ChatPrompt([1, 2]) == [1, 2] and ChatPrompt([1]).thinking is None


@pytest.mark.parametrize("begun", [True, False])
def test_newlines_and_blanks_without_end_are_not_kept(begun: bool) -> None:
    """What is held back stays short, however long somebody makes a model say nothing."""
    splitter = Splitter(Thinking(ALL_TAGS[0], begun))
    for _ in range(1000):
        splitter.push("\n")
        assert len(splitter._held) <= 65
    if begun:
        assert splitter.push("a") == [("reasoning", "a")]
        assert splitter.push("\n\n") == [] and splitter.push("b") == [("reasoning", "\n\nb")]
