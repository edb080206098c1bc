"""The tokenizer in a GGUF file's metadata. Knows nothing of tensors.

There are two kinds of vocabulary. ``gpt2`` is byte-level BPE with a list of merges. Texts are first split into words by
the rules that ``tokenizer.ggml.pre`` names. ``llama`` is a SentencePiece vocabulary with a score for each token. It is
converted to BPE on whole texts that merges better scores first, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from fly.models.config import CheckpointError

__all__ = ["PRE", "end_ids", "has_vocabulary", "make_tokenizer"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
# Tokens that end an answer in some families, in addition to the ids in the metadata.
_ENDS = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
_END_KEYS = ("eos", "eot", "eom")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_LLAMA3 = rf"{_SHORTENED}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_SHORTENED}|{_WORDS}|\p{{N}}|{_MARKS}[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True)
class Pre:
    """How a text is split into words before merging. Each expression splits the pieces that the ones before leave."""

    splits: tuple[str, ...]
    whole_words: bool = False  # a word that is a token stays one token, whatever the merges are
    composed: bool = False  # characters are composed first (Unicode's NFC)
    begins: bool = False  # texts begin with the begin token, unless the metadata say otherwise


_LLAMA3_PRE = Pre((_LLAMA3,), whole_words=True, begins=True)
_DIGITS = Pre((r"\p{N}", _GPT2))
PRE: Mapping[str, Pre] = {
    "gpt-2": Pre((_GPT2,)),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "smaug-bpe": Pre((_LLAMA3,)),
    "qwen2": Pre((_QWEN2,), composed=True),
    "deepseek-r1-qwen": Pre((_QWEN2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "deepseek-llm": Pre(
        (
            "[\r\n]",
            r"\s?[A-Za-z\p{Lu}\p{Ll}]+",
            "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}",
        )
    ),
    "deepseek-coder": Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "tekken": Pre(
        (rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_MARKS}[\r\n/]*|{_TAIL}",),
        whole_words=True,
        begins=True,
    ),
}


def has_vocabulary(fields: Mapping[str, Any]) -> bool:
    """Whether the metadata contain a vocabulary of any kind."""
    return fields.get("tokenizer.ggml.model", "no_vocab") not in ("no_vocab", "none")


def make_tokenizer(fields: Mapping[str, Any], source: str) -> RawTokenizer:
    """Build the tokenizer that the metadata describe.

    Raises ``CheckpointError`` for an unknown kind of vocabulary or unknown rules for splitting texts.
    """
    kind, tokens = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{source}: tokenizer.ggml.model {kind!r} is not supported; choices: ['gpt2', 'llama']")
    if not tokens:
        raise CheckpointError(f"{source}: tokenizer.ggml.tokens are missing")
    types = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{source}: {len(tokens)} tokenizer.ggml.tokens, but {len(types)} token_type")
    # Converters pad a byte-level vocabulary to the rows of the head with unused tokens. Without these it equals that of
    # the published tokenizer.json, so a draft from a directory needs no translation.
    used = [number for number in range(len(tokens)) if kind == "llama" or types[number] != _UNUSED]
    ids = {tokens[number]: number for number in reversed(used)}  # of tokens with the same text, the first counts
    # Build the BPE model. Then add the special tokens, and the tokens at both ends of a text.
    begins = kind == "llama"
    if kind == "gpt2":
        name = fields.get("tokenizer.ggml.pre")
        if (pre := PRE.get(str(name))) is None:
            found = "is missing; convert the model again" if name is None else f"{name!r} is not supported"
            raise CheckpointError(f"{source}: tokenizer.ggml.pre {found}; choices: {[*PRE]}")
        tokenizer, begins = _byte_level(fields, ids, pre, source), pre.begins
    else:
        tokenizer = _sentence_piece(fields, tokens, ids, types, source)
    special = (_CONTROL, _UNKNOWN) if kind == "llama" else (_CONTROL,)
    added = [
        AddedToken(text, special=types[number] in special, normalized=False)
        for number, text in enumerate(tokens)
        if types[number] in (*special, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    _add_ends(tokenizer, fields, tokens, begins)
    return tokenizer


def end_ids(fields: Mapping[str, Any]) -> set[int]:
    """Return the ids of the tokens that end an answer."""
    tokens = fields.get("tokenizer.ggml.tokens") or []
    types = fields.get("tokenizer.ggml.token_type") or []
    named = (fields.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS)
    known = {number for number, text in enumerate(tokens) if text in _ENDS and types[number : number + 1] == [_CONTROL]}
    return {number for number in named if number is not None} | known


def _byte_level(fields: Mapping[str, Any], ids: dict[str, int], pre: Pre, source: str) -> RawTokenizer:
    if (merges := fields.get("tokenizer.ggml.merges")) is None:
        raise CheckpointError(f"{source}: tokenizer.ggml.merges are missing")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab=ids, merges=pairs, fuse_unk=False, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{source}: not a usable vocabulary ({error})") from error
    tokenizer = RawTokenizer(model)
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    fields: Mapping[str, Any], tokens: list[str], ids: dict[str, int], types: list[int], source: str
) -> RawTokenizer:
    if (scores := fields.get("tokenizer.ggml.scores")) is None or len(scores) != len(tokens):
        raise CheckpointError(f"{source}: tokenizer.ggml.scores are missing, or not one for each token")
    mergeable = {text for text, number in ids.items() if types[number] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    # Every way to split a token into two tokens is a merge. Better scores merge first; the rest of the key breaks ties.
    merges = []
    for text in mergeable:
        score = scores[ids[text]]
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in mergeable and right in mergeable:
                merges.append((-score, -at, at - len(text), -ids[left], -ids[right], left, right))
    merges.sort()
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=ids,
        merges=[merge[-2:] for merge in merges],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = RawTokenizer(model)
    # Spaces are stored as ▁. A text may get a space before it.
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(steps), decoders.Sequence(undo)
    return tokenizer


def _add_ends(tokenizer: RawTokenizer, fields: Mapping[str, Any], tokens: list[str], begins: bool) -> None:
    """Make encoded texts begin and end with the tokens that the metadata require."""
    parts, used = ["$A"], []
    for key, first in (("bos", True), ("eos", False)):
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and fields.get(f"tokenizer.ggml.add_{key}_token", begins and first):
            parts.insert(0 if first else len(parts), tokens[number])
            used.append((tokens[number], number))
    if used:
        pair = [f"{part}:1" if part != "$A" else "$B:1" for part in parts]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, pair=[*parts, *pair], special_tokens=used
        )
