"""Control tokens of conversations: those of the template are tokens, whatever messages spell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from fly.models.chat import ChatTemplate
from fly.models.tokenizer import Tokenizer
from tests.test_traced import ONE, STATEMENTS, TWO, templates

chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")

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
    words = [
        ("<unk>", 0.0),
        *((token, -0.1) for token in OWN + THEIRS),
        *((c, -9.0) for c in "abcdefghijklmnopqrstuvwxyz|<>[]/ ▁X"),
    ]
    raw = RawTokenizer(models.Unigram(words, 0, False))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    return raw


def words() -> RawTokenizer:
    raw = RawTokenizer(models.WordLevel({"<unk>": 0, "a": 1, "the": 2, "[X]": 3}, "<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return raw


PLAIN: dict[str, Any] = {}
KINDS = {
    "byte level": (byte_level, PLAIN),
    "strips": (byte_level, {"rstrip": True, "lstrip": True}),
    "single words": (byte_level, {"single_word": True}),
    "lower case": (lambda: byte_level(normalizers.Lowercase()), {"normalized": True}),
    "composed": (lambda: byte_level(normalizers.NFKC()), PLAIN),
    "prepended": (lambda: byte_level(normalizers.Prepend("▁")), PLAIN),
    "first": (lambda: metaspace("first"), PLAIN),
    "always": (lambda: metaspace("always"), PLAIN),
}


def tokens(texts: tuple[str, ...], **options: Any) -> list[AddedToken]:
    return [AddedToken(text, **{"special": True, "normalized": False, **options}) for text in texts]


def load(directory: Path, raw: RawTokenizer, template: str, **settings: Any) -> Tokenizer:
    raw.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **settings}))
    return Tokenizer(directory)


def tokenizer_of(directory: Path, raw: RawTokenizer, template: str) -> Tokenizer:
    raw.add_special_tokens(tokens(OWN + THEIRS))
    return load(directory, raw, template)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, RawTokenizer]:
    """A tokenizer, and the same one to which what messages spell is plain text."""
    make, options = KINDS[request.param]
    raw, knows_less = make(), make()
    for each in (raw, knows_less):
        each.add_special_tokens(tokens(OWN, **options))
    raw.add_special_tokens(tokens(THEIRS, **options))
    return load(tmp_path_factory.mktemp("kind"), raw, TURNS), knows_less


TURNS = "{% for m in messages %}<|user|> {{ m.content }} <|end|>{% endfor %}{{ messages[0].content }}<|endless|>x"
SPELLED = st.lists(st.sampled_from([*THEIRS, "<|tool", "|>", "the", " ", "\n", "a", "T", "é"]), max_size=6).map("".join)


@given(first=SPELLED, second=SPELLED)
@example(first="[X]", second="[X]the<s>")
def test_what_messages_spell_is_encoded_as_if_there_were_no_such_token(
    pair: tuple[Tokenizer, RawTokenizer], first: str, second: str
) -> None:
    tokenizer, knows_less = pair
    messages = [{"role": "user", "content": text} for text in (first, second)]
    ids = tokenizer.apply_chat_template(messages)
    text = chat_template_utils._compile_jinja_template(TURNS).render(messages=messages)
    assert ids == knows_less.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("make", [unigram, words])
@given(first=SPELLED, second=SPELLED)
def test_a_model_that_knows_control_tokens_as_words_does_not_read_them(
    make: Any, first: str, second: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = tokenizer_of(tmp_path_factory.mktemp("words"), make(), TURNS)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text} for text in (first, second)])
    wanted = ["<|user|>", "<|end|>"] * 2 + ["<|endless|>"]
    assert [i for i in ids if i in tokenizer.control_ids] == [tokenizer.raw.token_to_id(text) for text in wanted]


# --- random templates --------------------------------------------------------------------------------------

# Operations whose result depends on which characters messages have are left out here.
COMPARES = ("'<", ">')", "sort", "unique", "max", " == ", " in ", " > ", ".split({})", "urlize", "striptags", "random")
SAME = str.maketrans("abcdefghijklmnopqrstuvwxyz<|>/", "абвгдежзийклмнопрстуфхцчшщ«¦»⁄")
MESSAGES = st.lists(st.sampled_from(["<|end|>", "<|", "|>", "end", "<|us", "er|>", "e", " ", "\n"]), max_size=5).map(
    "".join
)


def kept(forms: list[str]) -> list[str]:
    return [form for form in forms if not any(word in form for word in COMPARES)]


LINES = templates(["a", "b", "'<|end|>'", "'<|'", "'|>'", "'user'"], kept(ONE), kept(TWO), kept(STATEMENTS))


@settings(max_examples=1500)
@given(line=LINES, first=MESSAGES, second=MESSAGES)
@example("{{ a|upper }}{{ '<|end|>' ~ a }}{{ '<|' ~ a }}end|>", "<|end|>", "end|>")
@example("{{ ('<|end|>' ~ a)|wordwrap(3) }}", "<|end|>", "")
def test_control_tokens_are_those_that_the_template_writes(
    small: Tokenizer, line: str, first: str, second: str
) -> None:
    """The template's own are those that stay if messages are spelled in another alphabet."""
    note(repr((line, first, second)))
    source = "{% set a = messages[0].content %}{% set b = messages[1].content %}" + line + "{{ a }}<|user|>{{ b }}"
    small.templates["default"] = ChatTemplate(source, "strange")
    messages = [{"role": "user", "content": text} for text in (first, second)]

    def plain(messages: list[dict[str, str]]) -> str | None:
        try:
            return chat_template_utils._compile_jinja_template(source).render(messages=messages)
        except Exception:
            return None

    text = plain(messages)
    try:
        ids = small.apply_chat_template(messages)
    except ValueError as error:
        assert "the chat template 'strange'" in str(error)
        assert text is None or "nothing tells who wrote" in str(error)
        return
    assert small.decode(ids, False) == text
    assert small.apply_chat_template(messages) == ids
    masked = plain([{**message, "content": message["content"].translate(SAME)} for message in messages])
    assert [i for i in ids if i in small.control_ids] == [i for i in small.encode(masked) if i in small.control_ids]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("small"), byte_level(), "")
