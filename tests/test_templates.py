"""Conversations through templates: control tokens are the template's alone, and no message is lost."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from fly.models.chat import ChatTemplate
from fly.models.tokenizer import Tokenizer
from tests.test_traced import ONE, STATEMENTS, TWO, plainly, templates

OWN = ("<|user|>", "<|end|>", "<|endless|>", "</s>")  # the template's
THEIRS = ("<|tool|>", "<s>", "[X]")  # only messages spell these
CORPUS = ["the user said system, assistant and tool", " <| |> [ ] < >", "a b c"] * 4


def byte_level(normalizer: Any = None) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    return raw


def metaspace(scheme: str) -> RawTokenizer:
    """Llama 2's kind: a mark for the space, before each text, or before the first one alone."""
    raw = RawTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=tokens, show_progress=False))
    stored = json.loads(raw.to_str())
    stored["added_tokens"] = stored["added_tokens"][:1]  # bytes are no special tokens
    return RawTokenizer.from_str(json.dumps(stored))


def unigram() -> RawTokenizer:
    """A model to which its control tokens are likely words."""
    likely = [(token, -0.1) for token in OWN + THEIRS]
    letters = [(letter, -9.0) for letter in "abcdefghijklmnopqrstuvwxyz|<>[]/ ▁X"]
    raw = RawTokenizer(models.Unigram([("<unk>", 0.0), *likely, *letters], 0, False))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return raw


def whole_words() -> RawTokenizer:
    raw = RawTokenizer(models.WordLevel({"<unk>": 0, "a": 1, "the": 2, "[X]": 3}, "<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return raw


def special(texts: tuple[str, ...], **options: Any) -> list[AddedToken]:
    return [AddedToken(text, **{"special": True, "normalized": False, **options}) for text in texts]


def load(directory: Path, raw: RawTokenizer, template: str) -> Tokenizer:
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Tokenizer(directory)


def user(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


# --- what messages spell -----------------------------------------------------------------------------------

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "byte level": (byte_level, {}),
    "strips": (byte_level, {"rstrip": True, "lstrip": True}),
    "single words": (byte_level, {"single_word": True}),
    "lower case": (lambda: byte_level(normalizers.Lowercase()), {"normalized": True}),
    "composed": (lambda: byte_level(normalizers.NFKC()), {}),
    "prepended": (lambda: byte_level(normalizers.Prepend("▁")), {}),
    "first": (lambda: metaspace("first"), {}),
    "always": (lambda: metaspace("always"), {}),
}
TURNS = "{% for m in messages %}<|user|> {{ m.content }} <|end|>{% endfor %}{{ messages[0].content }}<|endless|>x"
SPELLED = st.lists(st.sampled_from([*THEIRS, "<|tool", "|>", "the", " ", "\n", "a", "T", "é"]), max_size=6).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, RawTokenizer]:
    """A tokenizer, and the same one to which what messages spell is plain text."""
    make, options = KINDS[request.param]
    raw, knows_less = make(), make()
    for each in (raw, knows_less):
        each.add_special_tokens(special(OWN, **options))
    raw.add_special_tokens(special(THEIRS, **options))
    return load(tmp_path_factory.mktemp("kind"), raw, TURNS), knows_less


@given(first=SPELLED, second=SPELLED)
@example(first="[X]", second="[X]the<s>")
def test_what_messages_spell_is_encoded_as_if_there_were_no_such_token(
    pair: tuple[Tokenizer, RawTokenizer], first: str, second: str
) -> None:
    """The ids are those of the tokenizers library, which reads the whole text at once."""
    tokenizer, knows_less = pair
    messages = user(first, second)
    text = plainly(TURNS, messages=messages)
    assert text is not None
    assert tokenizer.apply_chat_template(messages) == knows_less.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=[unigram, whole_words])
def knowing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    raw = request.param()
    raw.add_special_tokens(special(OWN + THEIRS))
    return load(tmp_path_factory.mktemp("knowing"), raw, TURNS)


@given(first=SPELLED, second=SPELLED)
def test_models_that_know_control_tokens_as_words_do_not_read_them(knowing: Tokenizer, first: str, second: str) -> None:
    ids = knowing.apply_chat_template(user(first, second))
    wanted = ["<|user|>", "<|end|>", "<|user|>", "<|end|>", "<|endless|>"]
    assert [knowing.raw.id_to_token(i) for i in ids if i in knowing.control_ids] == wanted


# --- what templates do with it -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    raw = byte_level()
    raw.add_special_tokens(special(OWN + THEIRS))
    return load(tmp_path_factory.mktemp("small"), raw, "")


def apply(tokenizer: Tokenizer, source: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    tokenizer.templates = {"default": ChatTemplate(source, "strange")}
    return tokenizer.apply_chat_template(messages, **options)


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.raw.id_to_token(i) for i in ids if i in tokenizer.control_ids]


# Operations whose result depends on which characters messages have are left out here.
COMPARES = ("'<", ">')", "sort", "unique", "max", " == ", " in ", " > ", ".split({})", "urlize", "striptags", "random")
MASK = str.maketrans("abcdefghijklmnopqrstuvwxyz<|>", "абвгдежзийклмнопрстуфхцчшщ«¦»")
PIECES = st.lists(st.sampled_from(["<|end|>", "<|", "|>", "end", "<|us", "er|>", "e", " ", "\n"]), max_size=5)
MESSAGES = PIECES.map("".join)


def blind(forms: list[str]) -> list[str]:
    return [form for form in forms if not any(word in form for word in COMPARES)]


LINES = templates(["a", "b", "'<|end|>'", "'<|'", "'|>'", "'user'"], blind(ONE), blind(TWO), blind(STATEMENTS))


@settings(max_examples=80)
@given(line=LINES, first=MESSAGES, second=MESSAGES)
@example("{{ a|upper }}{{ '<|end|>' ~ a }}{{ '<|' ~ a }}end|>", "<|end|>", "end|>")
@example("{{ ('<|end|>' ~ a)|wordwrap(3) }}", "<|end|>", "")
@example("{{ a|e + ('x<'|e)|indent(2, false, true) + [('<'|e)|indent(2, false, true)][0] }}", "", "")
@example("{{ ((b|first)|tojson) }}", "<|end|>", "")
@example("{{ a[::-1] }}{{ a.split('x')|join }}<|end|>{{ a|capitalize }}", "<|end|>", ">|dne|<")
def test_control_tokens_are_those_that_the_template_writes(
    small: Tokenizer, line: str, first: str, second: str
) -> None:
    """They are those that stay if messages are spelled in another alphabet; and always the same ones."""
    note(repr((line, first, second)))
    source = "{% set a = messages[0].content %}{% set b = messages[1].content %}" + line + "{{ a }}<|user|>{{ b }}"
    text = plainly(source, messages=user(first, second))
    try:
        ids = apply(small, source, user(first, second))
    except ValueError as error:
        assert "the chat template 'strange'" in str(error)
        assert text is None or "nothing tells who wrote" in str(error)
        return
    assert small.decode(ids, False) == text and apply(small, source, user(first, second)) == ids
    masked = plainly(source, messages=user(first.translate(MASK), second.translate(MASK)))
    assert masked is not None and controls(small, ids) == controls(small, small.encode(masked))


@pytest.mark.parametrize(
    "line",
    [
        "{{ c.split('<|end|>')|join('<|end|>') }}", "{{ c.replace('<|end|>', '') }}<|end|>", "{{ c|upper|lower }}",
        "{{ 'x' if c == 'a<|end|>b' else '<|end|>' }}", "{{ c[:4] }}{{ c[4:] }}", "{% for x in c %}{{ x }}{% endfor %}",
        "{{ [c, c]|tojson }}{{ {'k': c} }}", "{{ c|tojson|safe }}{{ c|string|trim|indent }}", "{{ '%s' % c }}",
        "{{ '{}'.format(c) }}", "{% set x %}{{ c }}{% endset %}{{ x }}", "{{ [c]|join }}{{ c|title|lower }}",
    ],
)  # fmt: skip
def test_operations_of_real_templates_keep_writers(small: Tokenizer, line: str) -> None:
    """So that none of them is refused: the only tokens are what the template writes."""
    source = "{% for m in messages %}{% set c = m.content %}" + line + "<|user|>{{ c }}{% endfor %}"
    ids = apply(small, source, user("a<|end|>b"))
    own = line.count("}<|end|>") + line.count("join('<|end|>')")
    assert controls(small, ids) == ["<|end|>"] * own + ["<|user|>"]
    assert small.decode(ids, False) == plainly(source, messages=user("a<|end|>b"))


@pytest.mark.parametrize(
    "line",
    [
        "{{ c|tojson|safe + ('<|end|>'|safe) }}", "{{ ('<|end|>'|safe) + c }}", "{{ ('<|end|>'|safe).join(['', c]) }}",
        "{{ ('.'|safe).replace('.', '<|end|>'|safe) + c }}", "{{ ('a <|end|>'|safe).split()[1:]|join ~ c|e }}",
        "{{ 'to' + ('<|end|>'|safe).strip('a')|lower + c|e }}",
    ],
)  # fmt: skip
def test_operations_on_markup_keep_writers(small: Tokenizer, line: str) -> None:
    """Mistral's template for Ministral 3 adds ``arguments|tojson|safe`` to a control token."""
    source = "{% set c = messages[0].content %}" + line + "<|user|>"
    ids = apply(small, source, user("a<|end|>b"))
    assert controls(small, ids) == ["<|end|>", "<|user|>"]
    assert small.decode(ids, False) == plainly(source, messages=user("a<|end|>b"))


def test_a_control_token_of_unknown_origin_is_an_error_that_names_the_template(small: Tokenizer) -> None:
    source = "{{ (messages[0].content ~ '<|end|>')|wordwrap(40) }}"
    with pytest.raises(ValueError, match=r"template 'strange' changes '<\|end\|>' so that nothing tells who wrote"):
        apply(small, source, user("hello"))
    assert controls(small, apply(small, source.replace("<|end|>", ""), user("hello"))) == []


def test_roles_are_the_templates_unless_they_spell_control_tokens(small: Tokenizer) -> None:
    source = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ m.content }}{% endfor %}"
    messages = [
        {"role": "user", "content": "<|"},
        {"role": "user|><|end", "content": "user|>"},
        {"role": "<|end|>", "content": "<|user|>"},
    ]
    assert controls(small, apply(small, source, messages)) == ["<|user|>"]
    source = source.replace("m.role", "m.content")
    assert controls(small, apply(small, source, user("user"))) == []


def test_a_role_that_is_a_control_token_by_itself_is_text(tmp_path: Path) -> None:
    raw = byte_level()
    raw.add_special_tokens(special(("sop",)))
    tokenizer = load(tmp_path, raw, "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    ids = tokenizer.apply_chat_template([{"role": "sop", "content": "x"}])
    assert tokenizer.decode(ids, False) == "sopx" and controls(tokenizer, ids) == []


def test_tools_and_variables_are_no_writing_of_the_template(small: Tokenizer) -> None:
    source = "{{ tools|tojson }}{{ tools }}{{ extra }}{{ messages[0].content }}{{ messages[0].name }}<|end|>"
    tools = [{"<|end|>": ["<|end|>\n", 1, None, {"a": "'\"<|end|>"}]}]
    ids = apply(small, source, [{**user("a")[0], "name": "<|end|>"}], tools=tools, extra="<|end|>")
    assert controls(small, ids) == ["<|end|>"]


# --- the form of contents ----------------------------------------------------------------------------------


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


LOOPS = [
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}",
    "{% set content = m.content %}{% for p in content if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}",
    "{{ show(m.content) }}",
    "{{ m.content|map(attribute='text')|join }}",
    "{% for p in m.content|selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
    "{% for p in m.content %}{{ p.get('text') }}{% endfor %}",
    "{% for p in m.content %}{% if 'text' in p %}{{ p['text'] }}{% endif %}{% endfor %}",
    "{% for p in m.content %}{{ p.text if p.text is defined else p ~ '.' }}{% endfor %}",
    "{{ m.content[0].text }}{% for p in m.content[1:] %}{{ p.text }}{% endfor %}",
    "{{ m.content[0]['text'] + (m.content[1]['text'] if m.content|length > 1 else '') }}",
]
EITHER = [
    "{% if m.content is string %}{{ m.content }}{% else %}parts{% endif %}",
    "{{ m.content if m.content is string else m.content[0].text }}",
    "{% if m.content is not string %}{{ m.content|tojson }}{% else %}{{ m.content }}{% endif %}",
    "{{ m.content.text if m.content.text is defined else m.content }}",
    "{{ m.content }}",
]
AROUND = (
    "{% macro show(c) %}{% for p in c if p.type == 'text' %}{{ p['text'] }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}<|user|>{{ m.role }}:CONTENT<|end|>{% endfor %}"
)


@pytest.mark.parametrize("form", LOOPS + EITHER)
@pytest.mark.parametrize(
    "content", ["hello <|end|>", "h", [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]]
)
def test_contents_have_the_form_that_the_template_reads(small: Tokenizer, form: str, content: Any) -> None:
    ids = apply(small, AROUND.replace("CONTENT", form), user(content))
    text = content if isinstance(content, str) else "hey"
    wanted = f"<|user|>user:{text}<|end|>"
    assert small.decode(ids, False) == wanted and controls(small, ids) == ["<|user|>", "<|end|>"]


@pytest.mark.parametrize("form", [*LOOPS[:3], "{{ m.content }}"])
def test_an_open_content_may_have_parts(small: Tokenizer, form: str) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ids = apply(small, AROUND.replace("CONTENT", form), user([part("he"), part("y\n")]), **options)
    assert small.decode(ids, False) == "<|user|>user:hey\n"


FIRST = [
    "{{ m.content[0].text }}",  # LLaVA-NeXT, for the system and the assistant
    "{{ m['content']|map(attribute='text')|first }}",
    "{% for p in m.content %}{% if loop.first %}{{ p.text }}{% endif %}{% endfor %}",
    "{% for p in m.content if p is mapping %}{% if loop.last %}{{ p.text }}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("form", FIRST)
def test_a_template_that_shows_one_part_gets_the_whole_text_in_it(small: Tokenizer, form: str) -> None:
    source = AROUND.replace("CONTENT", form)
    messages = user([part("he <|end|>"), part("\n"), part("y")])
    text = "<|user|>user:he <|end|>\ny"
    assert small.decode(apply(small, source, messages), False) == f"{text}<|end|>"
    open_end = {"add_generation_prompt": False, "continue_final_message": True}
    assert small.decode(apply(small, source, messages, **open_end), False) == text


@pytest.mark.parametrize(
    "form", ["{% for p in m.content %}[{{ p.text|trim }}]{% endfor %}", "{{ m.content|join('+', 'text') }}"]
)
def test_parts_that_are_all_shown_stay_parts(small: Tokenizer, form: str) -> None:
    source = AROUND.replace("CONTENT", form)
    messages = user([part(" a "), part(" "), part("</think>"), part("b")])
    assert small.decode(apply(small, source, messages), False) == plainly(source, messages=messages)


INSISTS = [
    "{% if m.content is string %}{{ raise_exception('wants parts') }}{% endif %}{{ m.content[0].text }}",
    "{% if m.content|length > 1 %}{{ raise_exception('one part') }}{% endif %}{{ m.content[0]['text'] }}",
    "{% for p in m.content %}{% if p is not mapping %}{{ raise_exception('no part') }}{% endif %}{{ p.text }}"
    "{% endfor %}",
]


@pytest.mark.parametrize("form", INSISTS)
def test_a_template_that_refuses_texts_gets_the_parts_of_the_caller(small: Tokenizer, form: str) -> None:
    """As with transformers. A text is refused in the template's own words; so is what it refuses in both forms."""
    source = AROUND.replace("CONTENT", form)
    messages = user([part("hello")])
    assert small.decode(apply(small, source, messages), False) == plainly(source, messages=messages)
    for form, content in ((source, "hello"), ("{{ raise_exception('no part') }}", [part("hello")])):
        with pytest.raises(ValueError, match=r"refused the messages: (wants parts|one part|no part)"):
            apply(small, form, user(content))


def test_data_without_end_is_refused(small: Tokenizer) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="'strange' refused the messages: maximum recursion"):
        apply(small, "{{ tools }}{{ messages[0].content }}", user("a"), tools=endless)
    looped: dict[str, Any] = {"name": "f"}
    looped |= {"arguments": looped, "function": looped}
    for calls in (endless, [looped], [{"function": looped}]):
        with pytest.raises(ValueError, match="'strange' refused the messages: maximum recursion"):
            apply(small, "{{ messages[0].content }}", [{"role": "assistant", "content": "a", "tool_calls": calls}])


def test_each_role_has_the_form_that_is_read_of_it(small: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, *user("hello")]
    for form in LOOPS[:9]:
        source = "{{ messages[0].content + '.' }}{% for m in messages[1:] %}CONTENT{% endfor %}"
        ids = apply(small, AROUND[: AROUND.index("{% for m")] + source.replace("CONTENT", form), messages)
        assert small.decode(ids) == "be brief.hello"


@pytest.mark.parametrize("look", ["p.type == 'image'", "p['type'] == 'image'"])
@pytest.mark.parametrize("shown", ["m.content|tojson", "m.content", "m|tojson", "m"])
def test_a_content_that_is_looked_into_and_printed_is_a_text(small: Tokenizer, look: str, shown: str) -> None:
    """Llama 3.2's template looks for images in all contents, and prints those of tools as JSON. A text is what
    transformers hands to it."""
    loop = f"{{% for p in m.content if {look} %}}!{{% endfor %}}{{{{ {shown} }}}}"
    source = f"{{% for m in messages %}}{loop}{{% endfor %}}"
    messages = [{"role": "tool", "content": "18 <|end|>"}, *user("why")]
    assert small.decode(apply(small, source, messages), False) == plainly(source, messages=messages)
    # only parts have a method ``get``
    source = source.replace("p['type']", "p.type").replace("p.type", "p.get('type')")
    parts = [{**message, "content": [part(message["content"])]} for message in messages]
    assert small.decode(apply(small, source, parts), False) == plainly(source, messages=parts)
    with pytest.raises(ValueError, match="has no attribute 'get'"):
        apply(small, source, messages)


def test_a_message_of_which_nothing_is_shown_is_an_error(small: Tokenizer) -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    messages = [{"role": "system", "content": "be brief"}, *user("hello")]
    with pytest.raises(ValueError, match=r"'strange' .* nothing of message 0 \(role 'system'\), 'be brief'"):
        apply(small, source, messages)
    assert small.decode(apply(small, source, [{"role": "system", "content": " "}, *messages[1:]])) == "hello"
    with pytest.raises(ValueError, match=r"nothing of message 0 \(role 'user'\)"):
        apply(small, "<|user|>", user("hello"))
    # thinking may be left out, and what stands beside calls; a template's own refusal stays
    cut = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert apply(small, cut, [{"role": "assistant", "content": "<think>hm</think>"}]) == []
    calls = "{% for m in messages %}{{ m.content if not m.tool_calls }}{% endfor %}"
    assert apply(small, calls, [{"role": "assistant", "content": "so", "tool_calls": [{}]}]) == []
    refusing = "{% if messages[0].content is string %}{{ raise_exception('too long') }}{% else %}x{% endif %}"
    with pytest.raises(ValueError, match="'strange' refused the messages: too long"):
        apply(small, refusing, user("hello"))


def test_what_a_template_leaves_out_on_purpose_is_left_out_with_a_warning(small: Tokenizer) -> None:
    """Mistral's templates show the system's message before a question that comes last, and not beside results."""
    source = (
        "{% for m in messages[1:] %}{% if m.role == 'user' and loop.last %}{{ messages[0].content }} {% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "be brief"}, *user("hello")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert small.decode(apply(small, source, messages)) == "be brief hello"
    with pytest.warns(UserWarning, match=r"template 'strange' leaves out message 0 \(role 'system'\)"):
        assert small.decode(apply(small, source, [*messages, {"role": "tool", "content": "4"}])) == "hello4"


@pytest.mark.parametrize(
    ("form", "taken"),
    [
        ("{{ 'f' + c.arguments }}", "text"),  # DeepSeek V3 and R1
        ("{% for k, v in c.arguments.items() %}{{ k ~ v }}{% endfor %}", "object"),  # GLM, Qwen 3 Coder
        ("{% for k, v in c.arguments|items %}{{ k ~ v }}{% endfor %}", "object"),
        ("{{ c.arguments.city if c.arguments is mapping else raise_exception('no object') }}", "object"),
        ("{{ c.arguments|tojson }}", "either"),  # Qwen 2.5
    ],
)
def test_arguments_have_the_form_that_the_template_takes(small: Tokenizer, form: str, taken: str) -> None:
    """What transformers makes of that form; if a template takes both, of the one that is given."""
    source = "{% for m in messages %}{{ m.content }}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
    source += form + "<|end|>{% endfor %}{% endfor %}"
    arguments = {"city": "Zürich <|end|>"}
    texts = {"text": json.dumps(arguments, ensure_ascii=False), "object": arguments}

    def conversation(form: str) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": texts[form]}}
        return [*user("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    for sent in texts:
        ids = apply(small, source, conversation(sent))
        wanted = plainly(source, messages=conversation(sent if taken == "either" else taken))
        assert small.decode(ids, False) == wanted and controls(small, ids) == ["<|end|>"]


CALLS = "{% for t in m.tool_calls or [] %}{{ t.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("{% if '</think>' in m.content %}!{% endif %}{{ m.content }}" + CALLS, "weather"),  # Qwen 3
        ("{{ m.content.strip() + '.' }}" + CALLS, ".weather"),
        ("{% if m.content is none %}" + CALLS + "{% else %}{{ m.content.strip() }}.{% endif %}", "weather"),  # DeepSeek
        ("{% if m.content is string %}{{ m.content + CALLS }}{% else %}" + CALLS + "{% endif %}", "weather"),
        ("{{ m.content }}{{ m.content is defined and m.content is none }}" + CALLS, "Falseweather"),
    ],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_without_a_content_are_shown(small: Tokenizer, form: str, shown: str, content: dict[str, Any]) -> None:
    """However clients write that there is none, and however the template must be told: never with the word None."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {}}}
    source = "{% for m in messages if m.role == 'assistant' %}" + form + "{% endfor %}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids = apply(small, source, [{"role": "assistant", **content, "tool_calls": [call]}])
    assert small.decode(ids) == shown


def test_calls_that_a_template_does_not_show_are_left_out_with_a_warning(small: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {}}}
    messages = [*user("q"), {"role": "assistant", "content": "so", "tool_calls": [call]}, *user("r")]
    with pytest.warns(UserWarning, match=r"'strange' leaves out the calls of message 1 \(role 'assistant'\)"):
        assert small.decode(apply(small, "{% for m in messages %}{{ m.content }}{% endfor %}", messages)) == "qsor"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for calls in ([], [None, "x", 3, {}], "x", 3, {"a": 1}):  # no calls
            messages[1]["tool_calls"] = calls
            apply(small, "{% for m in messages %}{{ m.content }}{% endfor %}", messages)


@pytest.mark.parametrize("arguments", ["[" * 100_000, "{'a': 1}", {"a": {1, 2}}, {"a": b""}, None, 3, [1], "[1]"])
def test_arguments_of_no_form_that_a_template_takes_are_refused(small: Tokenizer, arguments: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": arguments}}, None, "x"]}
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city.upper() }}{% endfor %}"
    with pytest.raises(ValueError, match=r"'strange' refused the messages: '.* has no attribute '(city|upper)'"):
        apply(small, source, [message])


def test_errors_of_a_template_call_texts_what_they_are(small: Tokenizer) -> None:
    """In the words that transformers gives."""
    with pytest.raises(ValueError, match="refused the messages: 'str object' has no attribute 'items'"):
        apply(small, "{{ messages[0].content.items() }}", user("a"))
    with pytest.raises(ValueError, match="refused the messages: 'list object' has no attribute 'role'"):
        apply(small, "{{ messages[0].content[0].text }}{{ messages[0].content.role.x }}", user("a"))
    with pytest.raises(ValueError, match="refused the messages: list object has no element 1"):
        apply(small, "{{ messages[0].content[0].text }}{{ messages[0].content[1].text }}", user("a"))


NONE = (
    "{% for m in messages %}[{{ m.content }}{{ m.content is defined }}"
    "{% for c in m.tool_calls %}{{ c.a }}{% endfor %}]{% endfor %}"
)


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "tool_calls": [{"a": 1}]},
        {"tool_calls": [{"a": 1}]},
        {"content": None, "tool_calls": None},
        {"content": "", "tool_calls": [{"a": None}]},
    ],
)
def test_fields_that_are_none_are_left_out_as_transformers_does(small: Tokenizer, message: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=small.raw, chat_template=NONE)
    messages = [{"role": "assistant", **message}]
    assert small.decode(apply(small, NONE, messages)) == theirs.apply_chat_template(messages, tokenize=False)


def test_a_template_that_takes_no_form_of_calls_is_quoted(small: Tokenizer) -> None:
    """Not how it fails where a call has no content, which is a form that we tried."""
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content + '' }}{% endfor %}"
    )
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ValueError, match="refused the messages: no tools here"):
        apply(small, source, [*user("a"), call, {"role": "tool", "tool_call_id": "1", "content": "b"}])


SINGLE = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}{% endif %}"
    "({{ m.content }}{{ m.tool_calls[0].function.name }}){% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=4), st.booleans(), st.data())
def test_calls_of_one_message_come_one_by_one_where_a_template_takes_one(
    small: Tokenizer, names: list[str], known: bool, data: st.DataObject
) -> None:
    """As Llama 3.1's does ("This model only supports single tool-calls at once!"). Each result follows its call, in
    whatever order they come; a result of no known call comes last."""
    calls = [{"id": str(number), "function": {"name": name}} for number, name in enumerate(names)]
    results = [{"role": "tool", "tool_call_id": str(n), "content": f"the {name}"} for n, name in enumerate(names)]
    order = data.draw(st.permutations(results))
    further = [] if known else [{"role": "tool", "tool_call_id": "x", "content": "system"}]
    messages = [{"role": "assistant", "content": "user", "tool_calls": calls}, *further, *order]
    one_by_one = "".join(f"({'' if n else 'user'}{name})[the {name}]" for n, name in enumerate(names))
    text = small.decode(apply(small, SINGLE, [*messages, *user("a")]))
    assert text == small.decode(small.encode(one_by_one + ("" if known else "[system]") + "[a]", False))
    several = SINGLE.replace(" != 1", " > 9")  # a template that takes several gets them as they are
    assert small.decode(apply(small, several, messages)).count("(") == 1


@pytest.mark.parametrize("calls", [[], (), None])
@pytest.mark.parametrize(
    "condition",
    ["m.tool_calls is defined", "'tool_calls' in m", "m.tool_calls is defined and m.tool_calls is not none"],
)
def test_an_empty_list_of_calls_is_no_call(small: Tokenizer, condition: str, calls: Any) -> None:
    """Clients send an empty list for none, as OpenAI's interface allows. Templates of DeepSeek, Mistral and gpt-oss
    take any list for calls, and then fail or leave the content out."""
    choice = (
        f"{{% if {condition} %}}{{{{ m.tool_calls[0].function.name }}}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    )
    source = f"{{% for m in messages %}}{choice}{{% endfor %}}"
    message = {"role": "assistant", "content": "a"}
    assert apply(small, source, [{**message, "tool_calls": calls}]) == apply(small, source, [message])


# --- speed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["<|end|>", "\n\"'<é>"])
def test_long_messages_take_linear_time(small: Tokenizer, part: str) -> None:
    source = (
        "{% for m in messages %}<|user|>{{ m.content|trim }}{{ m.content.split('<')|join('<') }}<|end|>{% endfor %}"
    )
    template = ChatTemplate(source + "{{ messages|tojson }}")

    def seconds(size: int) -> float:
        start = time.process_time()
        assert len(template.render(user(part * (size // len(part))), {}, {})) > 3 * size - 100
        return time.process_time() - start

    seconds(100)
    one, four = (min(seconds(size) for _ in range(2)) for size in (50_000, 200_000))
    assert four < 0.5 and four < 8 * one + 0.05
