"""A lower bound of a text's number of tokens, computed from its length alone. Knows nothing of tensors."""

from __future__ import annotations

import json
import math
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

__all__ = ["Lengths", "byte_alphabet", "byte_level"]

# NFC shrinks a text at most by a factor of 3: nine bytes to three (Hangul, Greek with its marks), or three to one (the
# kelvin sign).
_NFC = 3
_HARMLESS = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that drop nothing
_PIECEWISE = ("Split", "Punctuation")  # pre-tokenizers that drop nothing unless their behaviour is "Removed"


class Lengths:
    """Computes the least number of tokens that a text may have.

    In BPE that is byte-level or falls back to bytes, no token covers more bytes of a text than the longest token has.
    For other tokenizers, and for those that may drop parts of a text, the result is 0.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        added = raw.get_added_tokens_decoder().values()
        self._strips = any(token.lstrip or token.rstrip for token in added)
        self._dropped = b""  # bytes without a token in the vocabulary
        self._widest = 0  # the most bytes of a text that one token covers; 0: unknown
        shrink, steps = math.prod(map(_shrink_factor, _steps(raw.normalizer))), _steps(raw.pre_tokenizer)
        if not shrink or not all(map(_keeps_all, steps)) or type(raw.model).__name__ != "BPE":
            return
        vocabulary = raw.get_vocab(with_added_tokens=False)
        if any(step["type"] == "ByteLevel" for step in steps):
            self._dropped = bytes(byte for character, byte in _ALPHABET.items() if character not in vocabulary)
            longest = max(map(len, vocabulary), default=0)
        elif raw.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            longest = max((len(token.encode()) for token in vocabulary), default=0)
        else:
            return
        if not (self._dropped and shrink > 1):  # otherwise normalising may produce characters that are dropped
            self._widest = shrink * max([longest, *(len(token.content.encode()) for token in added), 1])

    def min_tokens(self, text: str) -> int:
        """Return the least number of tokens of ``text``; 0 if unknown."""
        if not self._widest:
            return 0
        if self._strips:  # a special token may take the whitespace around it
            text = "".join(text.split())
        return -(-len(text.encode("utf-8", "surrogatepass").translate(None, self._dropped)) // self._widest)


def byte_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte (GPT-2's ``bytes_to_unicode``). A printable byte has
    its own character; the other bytes have the characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


_ALPHABET = byte_alphabet()


def byte_level(piece: str) -> bytes:
    """Convert a token's text in a byte-level vocabulary to bytes, as the library's decoder does."""
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode("utf-8")


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in the library's JSON form. A sequence is flattened."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        parts = state.get("normalizers", state.get("pretokenizers"))
        return [state] if parts is None else [step for each in parts for step in flat(each)]

    return [] if part is None else flat(json.loads(part.__getstate__()))


def _shrink_factor(step: dict[str, Any]) -> int:
    """Return the factor by which a normalizer may shrink a text in bytes; 0 if there is no bound."""
    if step["type"] == "Replace" and (pattern := step["pattern"].get("String")) and step["content"]:
        return -(-len(pattern.encode()) // len(step["content"].encode()))
    return {"NFC": _NFC, "Prepend": 1}.get(step["type"], 0)


def _keeps_all(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all parts of a text."""
    return step["type"] in _HARMLESS or (step["type"] in _PIECEWISE and step["behavior"] != "Removed")
