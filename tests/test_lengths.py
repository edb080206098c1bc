"""How few tokens a text can have is never overstated, whatever the tokenizer does to it."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Regex as RawRegex
from tokenizers import Tokenizer as RawTokenizer

from fly.models.bundled import resolve_checkpoint
from fly.models.lengths import Lengths, byte_alphabet
from fly.models.tokenizer import Tokenizer, TooLong

LONG = ["ab" * 8, " " * 8, "日本"]


def byte_level(missing: str = "", normalizer: object = None, **added: bool) -> RawTokenizer:
    """Of single bytes and a few long tokens, which are merged from both ends."""
    characters = [c for c in byte_alphabet() if c not in missing]
    vocabulary = {c: n for n, c in enumerate(characters)}
    merges: list[tuple[str, str]] = []
    for pair in ("ab", "Ġ"):
        piece = pair[0] if len(pair) == 1 else pair
        if len(pair) == 2:
            merges.append((pair[0], pair[1]))
            vocabulary.setdefault(pair, len(vocabulary))
        for _ in range(3):
            merges.append((piece, piece))
            piece += piece
            vocabulary.setdefault(piece, len(vocabulary))
    raw = RawTokenizer(models.BPE(vocabulary, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        raw.normalizer = normalizer  # type: ignore[assignment]
    raw.add_special_tokens([AddedToken("<end>", special=True, normalized=False, **added)])
    return raw


def byte_fallback(whole: bool = True) -> RawTokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256 if whole else 255)}
    vocabulary |= {text: 256 + n for n, text in enumerate(["▁", "a", "b", "ab", "abab", "日"])}
    raw = RawTokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")], byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return raw


KNOWN = {
    "bundled": lambda: Tokenizer(resolve_checkpoint("fly-tiny")).raw,
    "byte level": byte_level,
    "some bytes missing": lambda: byte_level(missing="Āćñ"),
    "canonical": lambda: byte_level(normalizer=normalizers.NFC()),
    "takes blanks": lambda: byte_level(lstrip=True, rstrip=True),
    "shortens": lambda: byte_level(normalizer=normalizers.Replace("ababab", "a")),
    "byte fallback": byte_fallback,
}
UNKNOWN = {
    "drops": lambda: byte_level(normalizer=normalizers.Replace("a", "")),
    "drops by pattern": lambda: byte_level(normalizer=normalizers.Replace(RawRegex("a+"), "b")),
    "strips": lambda: byte_level(normalizer=normalizers.Strip()),
    "canonical, bytes missing": lambda: byte_level(missing="Ã", normalizer=normalizers.NFC()),
    "not all bytes to fall back to": lambda: byte_fallback(whole=False),
    "words": lambda: RawTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
}
PIECES = st.sampled_from(
    [
        "a",
        "ab",
        "ab" * 40,
        " ",
        " " * 70,
        "\t",
        "\x00",
        "\x07",
        "ñ",
        "日本",
        "😀",
        "e\u0301\u0323",
        "\u212a",
        "\u2126",
        "<end>",
    ]
    + ["\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345", "\U00040000", "\x85\u2028", "<|end|>"]
)
lengths = functools.cache(lambda name: (raw := KNOWN[name](), Lengths(raw)))


@given(st.sampled_from(sorted(KNOWN)), st.lists(PIECES | st.text(max_size=5), max_size=12))
def test_no_text_has_fewer_tokens(name: str, parts: list[str]) -> None:
    raw, known = lengths(name)
    text = "".join(part.encode("utf-8", "replace").decode() for part in parts)
    assert known.min_tokens(text) <= len(raw.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_of_long_texts_something_is_known(name: str) -> None:
    assert lengths(name)[1].min_tokens("日" * 10_000) > 300


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_where_texts_may_shrink_nothing_is_said(name: str) -> None:
    assert Lengths(UNKNOWN[name]()).min_tokens("x" * 10**6) == 0


def test_the_bound_is_met() -> None:
    raw, known = lengths("byte level")
    text = "ab" * 8 * 100
    assert known.min_tokens(text) == 100 == len(raw.encode(text).ids)


def test_prompts_are_neither_filled_up_nor_cut() -> None:
    raw = byte_level()
    raw.enable_padding(length=8)
    raw.enable_truncation(4)
    with TemporaryDirectory() as directory:
        raw.save(str(Path(directory) / "tokenizer.json"))
        tokenizer = Tokenizer(directory)
    assert len(tokenizer.encode("xyz")) == 3 and len(tokenizer.encode("x" * 50_000)) == 50_000
    tokenizer.check_length("x" * 50_000, 50_000)
    with pytest.raises(TooLong, match="50000 characters are 3125 tokens or more; at most 3124 fit"):
        tokenizer.check_length("x" * 50_000, 3124)


def test_the_byte_alphabet_is_the_librarys() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    for character, byte in alphabet.items():
        assert decoders.ByteLevel().decode([character]) == bytes([byte]).decode("utf-8", "replace")
