"""A checkpoint's tokenizer: texts to tokens and back, chat templates, and texts that stream."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

import fly.models.bundled
from fly.models import CheckpointError
from fly.models.tokenizer import TextStream, Tokenizer

SPECIAL = ("<|begin|>", "<|end|>", "<|user|>")
CORPUS = [
    "the cat sat on the mat.",
    "stop stopping the stop",
    "naïve café 😀😀 👩‍👩‍👧 日本語 こんにちは",
    "a  b\n\nc",
    "😀 😁 😂 🤣",
] * 4


def byte_level() -> RawTokenizer:
    """Llama 3's kind: byte-level BPE, small, with merges that end in the middle of a character."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def byte_fallback() -> RawTokenizer:
    """Llama 2's kind: pieces with a mark for the space, single bytes as tokens for all else."""
    words = ["▁", "▁the", "▁cat", "s", "t", "o", "p", "▁st", "op", "é", "a", "b", "."]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *words])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return raw


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["byte-level", "byte-fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp(request.param.__name__)
    request.param().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("level")
    byte_level().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with a byte-level tokenizer and no template."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings_file(directory: Path, **values: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def test_no_tokenizer_file_is_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    settings_file(tmp_path, chat_template="x")
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 3}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"chat_template": 5}',
        '{"chat_template": [{"name": "default"}]}',
        '{"chat_template": ["x"]}',
        '{"bos_token": {}}',
    ],
)
def test_a_broken_tokenizer_config_is_named(home: Path, text: str) -> None:
    (home / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(home)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@example("naïve 😀 日本語\n\t")
def test_byte_level_text_survives_the_round_trip(level: Tokenizer, text: str) -> None:
    assert level.decode(level.encode(text), skip_special_tokens=False) == text


def test_control_ids_are_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.control_ids == {tokenizer.raw.token_to_id(token) for token in SPECIAL}
    begin = tokenizer.raw.token_to_id("<|begin|>")
    text = [begin, *tokenizer.encode("the cat")]
    assert tokenizer.decode(text) == "the cat" and "<|begin|>" in tokenizer.decode(text, skip_special_tokens=False)


def test_a_tokenizer_larger_than_the_model_is_named(level: Tokenizer) -> None:
    size = level.raw.get_vocab_size()
    level.check_fits(size)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{size - 1}"):
        level.check_fits(size - 1)


def test_tokenizers_are_the_same_if_every_token_has_the_same_id(level: Tokenizer, home: Path) -> None:
    assert level.same_as(Tokenizer(home))
    other = byte_level()
    other.add_tokens(["more"])
    other.save(str(home / "tokenizer.json"))
    assert not level.same_as(Tokenizer(home))


# --- the tokens of several files -------------------------------------------------------------------------

TEXTS = ("<s>", "</s>", "<pad>", "[PAD]", "<x>", "new", "ab")
FLAGS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), st.booleans())
)
FLAGGED = st.builds(lambda text, flags: {"content": text, **flags}, st.sampled_from(TEXTS), FLAGS)
TYPED = FLAGGED.map(lambda token: {"__type": "AddedToken", **token})  # as transformers 4 saves a token with flags
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token")
EXTRA, OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"


def listed(*tokens: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(st.sampled_from(TEXTS), *tokens), max_size=3)


def named(*names: str) -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(names), st.sampled_from(TEXTS), max_size=2)


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, st.one_of(st.none(), st.sampled_from(TEXTS), TYPED)),
        OLDER_EXTRA: st.one_of(st.none(), listed(TYPED)),
        EXTRA: st.one_of(st.none(), listed(TYPED), named("image_token", "bos_token", "a")),
        "added_tokens_decoder": st.dictionaries(st.integers(-2, 30).map(str), FLAGGED, max_size=3),
        "model_specific_special_tokens": named("image_token", "a"),
        "split_special_tokens": st.booleans(),
        "add_bos_token": st.booleans(),
    },
)
OLDER_NAMES = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, st.one_of(st.none(), st.sampled_from(TEXTS), FLAGGED)),
        OLDER_EXTRA: listed(),
        EXTRA: st.one_of(listed(), named("image_token", "a")),
    },
)
OLDER_IDS = st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 30)), max_size=4).map(dict)


@settings(max_examples=200)
@given(data=st.data())
def test_tokens_and_their_ids_are_those_of_transformers(data: st.DataObject) -> None:
    """However many files state them, in older and newer ways, and even if they contradict each other."""
    transformers = pytest.importorskip("transformers")
    vocab = {piece: i for i, piece in enumerate([*sorted(set("".join(TEXTS) + " im")), "<s>", "ab"])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.Fuse()
    if data.draw(st.booleans(), "lowercase"):
        raw.normalizer = normalizers.Lowercase()
    saved = data.draw(st.lists(FLAGGED, max_size=2), "tokenizer.json")
    raw.add_tokens([AddedToken(**token) for token in saved])
    if (padding := data.draw(st.sampled_from([None, "[PAD]"]), "padding")) is not None:
        raw.enable_padding(pad_token=padding)
    with tempfile.TemporaryDirectory() as folder:
        raw.save(f"{folder}/tokenizer.json")
        files = {"tokenizer_config": SETTINGS, "special_tokens_map": OLDER_NAMES, "added_tokens": OLDER_IDS}
        for name, contents in files.items():
            if (drawn := data.draw(st.one_of(st.none(), contents), name)) is not None:
                Path(folder, f"{name}.json").write_text(json.dumps(drawn), encoding="utf-8")
        theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    assert ours.special_names == theirs.special_tokens_map
    tokens = theirs.added_tokens_decoder
    assert list(map(repr, ours.raw.get_added_tokens_decoder().items())) == list(map(repr, tokens.items()))
    assert ours.control_ids == {i for i, token in tokens.items() if token.special}
    text = "".join(data.draw(st.lists(st.sampled_from([*TEXTS, " ", "a", "m", "<S>"]), max_size=12), "text"))
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids, False) == theirs.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    ours.check_length(text, len(ids))


def test_added_tokens_without_an_embedding_stay_text(home: Path) -> None:
    """As transformers numbers them, such a token would be beyond the model's vocabulary."""
    size = byte_level().get_vocab_size()
    (home / "config.json").write_text(json.dumps({"vocab_size": size + 1}))
    settings_file(home, bos_token="<|begin|>", extra_special_tokens=["<|fits|>"], pad_token="[PAD]", eos_token="[EOS]")
    with pytest.warns(
        UserWarning, match=rf"the model has {size + 1} tokens, .*added tokens \['\[PAD\]', '<\|fits\|>'\]"
    ):
        tokenizer = Tokenizer(home)
    tokenizer.check_fits(size + 1)
    assert tokenizer.encode("[EOS]") == [size] and size in tokenizer.control_ids
    assert tokenizer.decode(tokenizer.encode("[PAD]<|fits|>")) == "[PAD]<|fits|>"
    assert tokenizer.special_names["pad_token"] == "[PAD]"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config", '{"extra_special_tokens": 5}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"3": {"content": "a", "lstrip": 3}}}'),
        ("tokenizer_config", '{"added_tokens_decoder": {"3": 7}}'),
        ("special_tokens_map", '{"bos_token": 5}'),
        ("special_tokens_map", "[]"),
        ("added_tokens", '{"a": "x"}'),
        ("added_tokens", '{"a": null}'),
        ("added_tokens", "{"),
    ],
)
def test_broken_files_of_tokens_are_named(home: Path, name: str, text: str) -> None:
    (home / f"{name}.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name}\.json"):
        Tokenizer.load(home)


# --- chat templates --------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def rendered(directory: Path, messages: Iterable[dict[str, Any]] = tuple(HELLO), **variables: Any) -> str:
    tokenizer = Tokenizer(directory)
    ids = tokenizer.apply_chat_template(messages, **variables)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("bos", ["<|begin|>", {"content": "<|begin|>", "special": True}])
@pytest.mark.parametrize("named", [False, True])
def test_the_template_of_the_tokenizer_config_is_rendered(home: Path, bos: object, named: bool) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    settings_file(home, chat_template=templates if named else TEMPLATE, bos_token=bos, eos_token=None)
    assert rendered(home) == "<|begin|>[user]hello[assistant]"
    assert rendered(home, add_generation_prompt=False) == "<|begin|>[user]hello"
    # special tokens of the template are one id each, and the tokenizer adds none of its own
    assert Tokenizer(home).apply_chat_template(HELLO)[0] == Tokenizer(home).raw.token_to_id("<|begin|>")


@given(parts=st.lists(st.sampled_from(["<|begin|>", "<|", "begin|>", "<", "|>", "a", " ", "é"]), max_size=8))
def test_control_tokens_are_the_templates_alone(home: Path, parts: list[str]) -> None:
    """Whatever spells one in a message, in a key or in a tool is plain text, to the letter."""
    settings_file(home, chat_template="{{ bos_token }}[" + TEMPLATE + "{{ tools | tojson }}", bos_token="<|begin|>")
    tokenizer, text = Tokenizer(home), "".join(parts)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}] * 2, tools=[{text: text}])
    begin = tokenizer.raw.token_to_id("<|begin|>")
    assert [at for at, token in enumerate(ids) if token == begin] == [0, 2]
    told = json.dumps([{text: text}], ensure_ascii=False)
    assert tokenizer.decode(ids, False) == f"<|begin|>[<|begin|>[user]{text}[user]{text}[assistant]{told}"


def test_other_spellings_of_a_control_token_are_plain_text_too(tmp_path: Path) -> None:
    """Where a tokenizer looks for special tokens in a text that it has changed."""
    raw = RawTokenizer(models.BPE())
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = AddedToken("<|end|>", special=True, normalized=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[special], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_special_tokens([special])
    raw.save(str(tmp_path / "tokenizer.json"))
    settings_file(tmp_path, chat_template="{% for message in messages %}{{ message.content }}<|end|>{% endfor %}")
    tokenizer = Tokenizer(tmp_path)
    end = tokenizer.raw.token_to_id("<|end|>")
    assert end in tokenizer.encode("<|END|>")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a <|END|> b"}])
    assert [at for at, token in enumerate(ids) if token == end] == [len(ids) - 1]


def test_a_template_file_comes_before_the_tokenizer_config(home: Path) -> None:
    settings_file(home, chat_template="old")
    (home / "chat_template.jinja").write_text("new 日本 {{ tools }} {{ messages }}", encoding="utf-8")
    assert rendered(home, tools="hammer") == f"new 日本 hammer {HELLO}"


def test_templates_may_break_out_of_loops_and_write_json(home: Path) -> None:
    template = (
        "{% for m in messages %}\n    {% if loop.index == 2 %}\n{% break %}\n    {% endif %}\n"
        "{{ m | tojson }}\n{% endfor %}{{ {'b': '<é>'} | tojson(indent=1) }}"
    )
    settings_file(home, chat_template=template)
    silent = {"role": "user", "content": ""}  # a text that is not shown would be an error
    assert rendered(home, [*HELLO, silent, silent]) == '{"role": "user", "content": "hello"}\n{\n "b": "<é>"\n}'


def test_a_checkpoint_without_a_template_says_so(home: Path) -> None:
    for values in ({}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "x"}]}):
        settings_file(home, **values)
        with pytest.raises(ValueError, match="no chat template"):
            Tokenizer(home).apply_chat_template(HELLO)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected"),
        ("{{ messages[7].content }}", "messages|element|undefined"),
        ("{{ 'text: ' + messages[0].parts }}", "parts"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].content / 0 }}", ""),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"),
        ("{{ unknown_function() }}", "unknown_function"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(home: Path, template: str, named: str) -> None:
    settings_file(home, chat_template=template)
    with pytest.raises(ValueError, match=f"refused the messages.*({named})"):
        Tokenizer(home).apply_chat_template(HELLO)


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "''.__class__.__mro__[1].__subclasses__()",
        "raise_exception.__globals__",
        "messages.append({'role': 'x', 'content': 'y'})",
        "messages[0].update(content='changed')",
        "messages[0]['__class__'].__name__.x",
        "'{0.__class__}'.format(messages)",
        "cycler.__init__.__globals__.os",
    ],
)
def test_templates_are_sandboxed(home: Path, expression: str) -> None:
    settings_file(home, chat_template="{{ " + expression + " }}")
    messages = [dict(HELLO[0])]
    try:
        text = rendered(home, messages)
    except ValueError as error:
        assert "refused the messages" in str(error)
    else:
        assert text == ""  # an attribute that is withheld is undefined
    assert messages == HELLO


# --- streamed text ---------------------------------------------------------------------------------------


def pieces(tokenizer: Tokenizer, ids: Iterable[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """What a stream gives for each token until it stops, and at last what ``finish`` gives."""
    stream, given_out = TextStream(tokenizer, stop), []
    for token in ids:
        given_out.append(stream.push(token))
        if stream.stopped:
            break
    given_out.append(stream.finish())
    assert stream.text == "".join(given_out)
    assert stream.finish() == ""
    return given_out, stream


def all_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of any kind, special ones and some the tokenizer has no token for included."""
    return st.lists(st.integers(0, tokenizer.raw.get_vocab_size() + 3), max_size=24)


def valid_texts() -> st.SearchStrategy[str]:
    common = st.sampled_from(["the", " cat", "stop", "😀", "👩‍👩‍👧", "日本", "é", " ", "\n", "s", "to"])
    anything = st.characters(exclude_categories=["Cs"], exclude_characters="�")
    return st.lists(st.one_of(common, anything), max_size=12).map("".join)


@settings(max_examples=300)
@given(st.data())
def test_byte_level_pieces_join_to_the_decoded_text(level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(all_ids(level))
    given_out, stream = pieces(level, ids)
    assert "".join(given_out) == level.decode(ids) and not stream.stopped


@settings(max_examples=200)
@given(valid_texts())
@example("👩‍👩‍👧 日本語")
def test_valid_text_streams_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    given_out, _ = pieces(tokenizer, ids)
    assert "".join(given_out) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(given_out)
    assert not given_out[-1]  # nothing is left for the end


@settings(max_examples=300)
@given(st.data())
def test_broken_bytes_never_break_a_stream(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Single bytes as tokens may take settled characters back; the stream goes on, and keeps what it gave."""
    broken = data.draw(all_ids(tokenizer))
    check_broken_stream(tokenizer, broken)


def check_broken_stream(tokenizer: Tokenizer, broken: list[int]) -> None:
    whole = tokenizer.encode("the cat", add_special_tokens=False)
    given_out, _ = pieces(tokenizer, [*broken, *whole])
    assert "".join(given_out).endswith("cat") and not given_out[-1]


def test_a_bad_byte_after_settled_characters_repeats_none(tokenizer: Tokenizer) -> None:
    """In a vocabulary with byte tokens, E1 80 80 is a character; with 20 80 behind it, five replacement marks."""
    bytes_ = [tokenizer.raw.token_to_id(f"<0x{byte:02X}>") for byte in (0xE1, 0x80, 0x80, 0x20, 0x80)]
    check_broken_stream(tokenizer, [token for token in bytes_ if token is not None])


@pytest.mark.parametrize("text", ["😀", "日本", "👩‍👩‍👧"])
def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("t" + text, add_special_tokens=False)
    for n, token in enumerate(ids, 1):
        stream.push(token)
        assert ("t" + text).startswith(stream.text)
        if "\ufffd" not in (whole := tokenizer.decode(ids[:n])):
            assert stream.text == whole


def visible(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The naive twin of the decoder: after each token, the text up to the last whole character's token; then all."""
    texts = [""]
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n])
        texts.append(texts[-1] if text.endswith("\ufffd") else text)
    return [*texts, tokenizer.decode(ids)]


@settings(max_examples=400)
@given(st.data())
def test_text_is_cut_exactly_before_the_first_stop_string(level: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.one_of(st.text("ab ", max_size=20), valid_texts()))
    ids = data.draw(st.one_of(st.just(level.encode(text)), all_ids(level)))
    letters = st.sampled_from(sorted(set(level.decode(ids)) | set("ab")))
    stop = tuple(data.draw(st.lists(st.lists(letters, min_size=1, max_size=4).map("".join), min_size=1, max_size=3)))
    expected, stopped = level.decode(ids), False
    for seen in visible(level, ids):
        if at := [seen.index(s) for s in stop if s in seen]:
            expected, stopped = seen[: min(at)], True
            break
    given_out, stream = pieces(level, ids, stop)
    assert "".join(given_out) == expected and stream.stopped == stopped
    assert not any(s in expected for s in stop)


def test_the_beginning_of_a_stop_string_is_held_back_no_longer_than_needed(level: Tokenizer) -> None:
    letter = {c: level.raw.token_to_id(c) for c in "abcx"}
    stream = TextStream(level, ("abc",))
    assert [stream.push(letter[c]) for c in "xabab"] == ["x", "", "", "ab", ""]
    assert [stream.push(letter[c]) for c in "xa"] == ["abx", ""]
    assert stream.finish() == "a" and stream.text == "xababxa"


def test_before_the_least_length_stop_strings_are_plain_text(level: Tokenizer) -> None:
    a, b = level.raw.token_to_id("a"), level.raw.token_to_id("b")
    stream = TextStream(level, ("ab",))
    assert [stream.push(token, stoppable=False) for token in (a, b)] == ["a", "b"]
    assert not stream.stopped
    assert stream.push(a) == "" and stream.push(b) == "" and stream.stopped
    assert stream.text == "ab" and stream.finish() == ""


def test_a_stop_string_before_an_unfinished_character_still_stops(tmp_path: Path) -> None:
    vocab = {"a": 0, ".ð": 1}  # a full stop and the first byte of an emoji in one token
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    given_out, stream = pieces(Tokenizer(tmp_path), [0, 1], (".",))
    assert given_out == ["a", "", ""] and stream.stopped


def test_the_bundled_tokenizer_streams_like_any_other() -> None:
    directory = Path(fly.models.bundled.__file__).parent / "checkpoints" / "fly-draft"
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None and tokenizer.template is not None
    ids = tokenizer.apply_chat_template(HELLO)
    assert set(ids) & tokenizer.control_ids and "hello" in tokenizer.decode(ids)
    assert "".join(pieces(tokenizer, ids)[0]) == tokenizer.decode(ids)


# --- stop strings with control tokens ----------------------------------------------------------------------

SPELLINGS = ["a", "b", "<|user|>", "<|begin|>", "|>", "<", "<|"]


def cut(units: list[tuple[str, bool]], stops: list[str], keep: bool) -> tuple[str, bool]:
    """The naive twin: the text of ``units`` (a text each, and whether it is silent) up to the first stop string."""
    shown = [(text, silent) for text, silent in units if not silent]
    for count in range(1, len(units) + 1):
        found = []
        for stop in stops:
            for view in (list(enumerate(units[:count])), [(n, u) for n, u in enumerate(units[:count]) if not u[1]]):
                pieces = [(n, c) for n, (text, silent) in view for c in ([text] if silent else text)]
                ends = [(i, j) for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1)]
                starts = [i for i, j in ends if "".join(c for _, c in pieces[i:j]) == stop]
                if starts:
                    before = [(n, c) for n, c in pieces[: starts[0]] if not units[n][1]]
                    found.append((pieces[starts[0]][0], len(before), len(stop), "".join(c for _, c in before), stop))
        if found:
            *_, before_stop, stop = min(found)
            return before_stop + (stop if keep else ""), True
    return "".join(text for text, _ in shown), False


@settings(max_examples=300)
@given(
    spelled=st.lists(st.sampled_from(SPELLINGS), max_size=8),
    stops=st.lists(st.lists(st.sampled_from(SPELLINGS), min_size=1, max_size=3).map("".join), min_size=1, max_size=3),
    keep=st.booleans(),
)
@example(spelled=["a", "<|user|>", "b"], stops=["<|user|>"], keep=False)
@example(spelled=["b", "a", "<|user|>", "b"], stops=["a<|user|>"], keep=True)
@example(spelled=["a", "<|user|>", "b"], stops=["ab", "b<|user|>"], keep=True)
@example(spelled=["a", "<|user|>"], stops=["|>", "b<|user|>"], keep=False)
@example(spelled=["<|user|>", "<|begin|>", "<|user|>"], stops=["<|user|><|user|>"], keep=False)
def test_stop_strings_are_found_where_control_tokens_spell_them(
    level: Tokenizer, spelled: list[str], stops: list[str], keep: bool
) -> None:
    units = [
        (text, True) if text in SPECIAL else (c, False)
        for text in spelled
        for c in ([text] if text in SPECIAL else text)
    ]
    stream, text = TextStream(level, stops, keep_stop=keep), ""
    for unit, _ in units:
        text += stream.push(level.token_id(unit))
        if stream.stopped:
            break
    text += stream.finish()
    assert (text, stream.stopped) == cut(units, stops, keep) and stream.text == text
