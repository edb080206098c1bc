"""The least number of tokens that a text can have, from its length alone. No tensors here."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

__all__ = ["Lengths", "byte_alphabet", "byte_level"]

# NFC makes three bytes of nine at most (Hangul, Greek with its marks), and one of three (the sign for kelvin).
_NFC = 3
_HARMLESS = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that drop nothing
_PIECEWISE = ("Split", "Punctuation")  # that drop nothing unless they are asked to


class Lengths:
    """Tells the least number of tokens that texts have under a tokenizer.

    With byte-level BPE, or BPE that falls back to bytes, a token covers at most as many bytes of a text as the longest
    token has. For a tokenizer that may drop or join parts of a text the answer is 0.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        added = raw.get_added_tokens_decoder().values()
        self._strips = any(token.lstrip or token.rstrip for token in added)
        self._dropped = b""  # bytes that the vocabulary has no token for
        self._widest = 0  # bytes of a text that a token stands for at most; 0: unknown
        shrinks, kinds = _shrinks(_state(raw.normalizer)), _kinds(_state(raw.pre_tokenizer))
        if shrinks is None or kinds is None or type(raw.model).__name__ != "BPE":
            return
        vocabulary = raw.get_vocab(with_added_tokens=False)
        if "ByteLevel" in kinds:
            self._dropped = bytes(byte for character, byte in _ALPHABET.items() if character not in vocabulary)
            longest = max(map(len, vocabulary), default=0)
        elif raw.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            longest = max((len(token.encode()) for token in vocabulary), default=0)
        else:
            return
        if not (self._dropped and shrinks > 1):  # normalising may produce characters that are dropped
            self._widest = shrinks * max([longest, *(len(token.content.encode()) for token in added), 1])

    def least(self, text: str) -> int:
        """The least number of tokens of ``text``; 0 if unknown."""
        if not self._widest:
            return 0
        if self._strips:  # a special token may take the whitespace around it
            text = "".join(text.split())
        return -(-len(text.encode("utf-8", "surrogatepass").translate(None, self._dropped)) // self._widest)


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable bytes stand for themselves, the
    others, in order, for the characters from 256 on (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def byte_level(piece: str) -> bytes:
    """Bytes of a token by its text in a byte-level vocabulary, just as the library's decoder reads it."""
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode("utf-8")


def _state(part: Any) -> Any:
    """A normalizer or pre-tokenizer as ``tokenizer.json`` has it; None for none."""
    return None if part is None else json.loads(part.__getstate__())


def _shrinks(state: Any) -> int | None:
    """How many times fewer bytes a normalizer may make of a text; None if any number."""
    if state is None:
        return 1
    kind = state["type"]
    if kind == "Sequence":
        product = 1
        for part in state["normalizers"]:
            if (factor := _shrinks(part)) is None:
                return None
            product *= factor
        return product
    if kind == "Replace" and (pattern := state["pattern"].get("String")) and state["content"]:
        return -(-len(pattern.encode()) // len(state["content"].encode()))
    return {"NFC": _NFC, "Prepend": 1}.get(kind)


def _kinds(state: Any) -> set[str] | None:
    """The types of a pre-tokenizer and its parts; None if one may drop some of a text."""
    if state is None:
        return set()
    kind = state["type"]
    if kind == "Sequence":
        parts = [_kinds(part) for part in state["pretokenizers"]]
        return None if None in parts else set().union(*(part for part in parts if part is not None))
    kept = kind in _HARMLESS or (kind in _PIECEWISE and state["behavior"] != "Removed")
    return {kind} if kept else None
