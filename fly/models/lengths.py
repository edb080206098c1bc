"""A lower bound of a text's number of tokens, from its length alone. No tensors here."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

__all__ = ["Lengths", "byte_alphabet", "byte_level"]

# NFC shortens nine bytes to three at most (Hangul, Greek with its marks), and three to one (the kelvin sign).
_NFC = 3
_HARMLESS = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that drop nothing
_PIECEWISE = ("Split", "Punctuation")  # pre-tokenizers that drop nothing unless their behaviour is "Removed"


class Lengths:
    """Computes the least number of tokens that a text has under a tokenizer.

    In byte-level BPE, or BPE that falls back to bytes, a token covers at most as many bytes of a text as the longest
    token has. The result is 0 for a tokenizer that may drop or join parts of a text.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        added = raw.get_added_tokens_decoder().values()
        self._strips = any(token.lstrip or token.rstrip for token in added)
        self._dropped = b""  # bytes without a token in the vocabulary
        self._widest = 0  # the most bytes of a text that one token covers; 0: unknown
        shrink, kinds = _shrink_factor(_state(raw.normalizer)), _kinds(_state(raw.pre_tokenizer))
        if shrink is None or kinds is None or type(raw.model).__name__ != "BPE":
            return
        vocabulary = raw.get_vocab(with_added_tokens=False)
        if "ByteLevel" in kinds:
            self._dropped = bytes(byte for character, byte in _ALPHABET.items() if character not in vocabulary)
            longest = max(map(len, vocabulary), default=0)
        elif raw.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            longest = max((len(token.encode()) for token in vocabulary), default=0)
        else:
            return
        if not (self._dropped and shrink > 1):  # normalising may produce characters that are dropped
            self._widest = shrink * max([longest, *(len(token.content.encode()) for token in added), 1])

    def least(self, text: str) -> int:
        """Return the least number of tokens of ``text``; 0 if unknown."""
        if not self._widest:
            return 0
        if self._strips:  # a special token may take the whitespace around it
            text = "".join(text.split())
        return -(-len(text.encode("utf-8", "surrogatepass").translate(None, self._dropped)) // self._widest)


def byte_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte: printable bytes stand for themselves, the others are,
    in order, the characters from 256 on (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def byte_level(piece: str) -> bytes:
    """Convert a token's text in a byte-level vocabulary to bytes, as the library's decoder does."""
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode("utf-8")


def _state(part: Any) -> Any:
    """Return the JSON of a normalizer or pre-tokenizer; None for none."""
    return None if part is None else json.loads(part.__getstate__())


def _shrink_factor(state: Any) -> int | None:
    """Return by what factor a normalizer may shrink a text, in bytes; None if there is no bound."""
    if state is None:
        return 1
    kind = state["type"]
    if kind == "Sequence":
        product = 1
        for part in state["normalizers"]:
            if (factor := _shrink_factor(part)) is None:
                return None
            product *= factor
        return product
    if kind == "Replace" and (pattern := state["pattern"].get("String")) and state["content"]:
        return -(-len(pattern.encode()) // len(state["content"].encode()))
    return {"NFC": _NFC, "Prepend": 1}.get(kind)


def _kinds(state: Any) -> set[str] | None:
    """Return the types of a pre-tokenizer and its parts; None if one may drop parts of a text."""
    if state is None:
        return set()
    kind = state["type"]
    if kind == "Sequence":
        parts = [_kinds(part) for part in state["pretokenizers"]]
        return None if None in parts else set().union(*(part for part in parts if part is not None))
    kept = kind in _HARMLESS or (kind in _PIECEWISE and state["behavior"] != "Removed")
    return {kind} if kept else None
