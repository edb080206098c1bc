"""The tokenizer in a GGUF file's metadata. Knows nothing of tensors.

There are two kinds of vocabulary. ``gpt2`` is byte-level BPE with a list of merges. Texts are first split into words by
the rules that ``tokenizer.ggml.pre`` names. ``llama`` is a SentencePiece vocabulary with a score for each token. It is
converted to BPE on whole texts that merges better scores first, as in transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from fly.models.config import CheckpointError

__all__ = ["PRE", "end_ids", "has_vocabulary", "make_tokenizer", "special_ids", "special_names"]

T = TypeVar("T")

_TYPES = ("UNDEFINED", "NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")  # tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# Names of special tokens in chat templates, by the first part of the keys of their ids.
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # so spelled by gguf-py
    "separator": "sep_token",  # so spelled in the format's description
    "mask": "mask_token",
    "cls": "cls_token",
}
# The ids that llama.cpp gives these tokens in SentencePiece vocabularies, if the file states none. Here they count only
# for tokens of these texts, or of a fitting type: in Gemma's vocabulary other tokens have these ids.
_DEFAULTS = {"unknown": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}
# llama.cpp also finds tokens by their texts (src/llama-vocab.cpp, llama_vocab::impl::load). These end an answer,
_ENDS = {
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>"),
    *("<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<turn|>", "[e~["),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
}
# but the first text of a pair does not, if the vocabulary has all of the second.
_EXCEPTIONS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|return|>", "<|calls|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
_TAG = "</s>"  # HTML's tag too: ordinary text in many vocabularies, such as Qwen's and Gemma's, unless typed as control
# Texts of tokens in prompts with code to fill in, by the first part of the keys of their ids. They count if the file
# does not state the id.
_CODE = {
    "fim_pre": {
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    },
    "fim_suf": {
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    },
    "fim_mid": {
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    },
    "fim_pad": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep": {"<|file_sep|>"},
}
_CODE_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # padding and what begins another repository or file end an answer too
_OLDER = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # older names of these keys
_ID_KEYS = (*_NAMES, "eot", "eom", *_CODE)
# What comes after "tokenizer.ggml." in the keys that are read, and in those that change no ids of texts.
_FLAGS = {"add_bos_token", "add_eos_token", "add_space_prefix"}
_READ = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "eos_token_ids", "suppress_tokens", *_FLAGS),
    *(f"{key}_token_id" for key in (*_ID_KEYS, *_OLDER.values())),
}
_WITHOUT_EFFECT = {"token_type_count"}

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
    if not _is_list_of(tokens, str):
        raise CheckpointError(f"{source}: tokenizer.ggml.tokens are missing, or no texts")
    stated = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not _is_list_of(stated, int) or len(stated) != len(tokens):
        raise CheckpointError(f"{source}: tokenizer.ggml.token_type is not a number for each of {len(tokens)} tokens")
    _check_keys(fields, source)
    _warn_of_ids(fields, source)
    types = _corrected_types(fields, source, stated)
    # Converters pad a byte-level vocabulary to the rows of the head with unused tokens. Without these it equals that of
    # the published tokenizer.json, so a draft from a directory needs no translation.
    used_ids = [number for number in range(len(tokens)) if kind == "llama" or types[number] != _UNUSED]
    ids = {tokens[number]: number for number in reversed(used_ids)}  # of tokens with the same text, the first counts
    # Build the BPE model. Then add the special tokens, and the tokens at both ends of a text.
    begins = kind == "llama"
    if kind == "gpt2":
        name = fields.get("tokenizer.ggml.pre")
        if (pre := PRE.get(str(name))) is None:
            problem = "is missing; convert the model again" if name is None else f"{name!r} is not supported"
            raise CheckpointError(f"{source}: tokenizer.ggml.pre {problem}; choices: {[*PRE]}")
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


def special_names(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens, by the names that chat templates use."""
    tokens = _tokens(fields)
    ids = special_ids(fields)
    return {name: tokens[ids[key]] for key, name in _NAMES.items() if key in ids and tokens}


def end_ids(fields: Mapping[str, Any]) -> set[int]:
    """Return the ids of the tokens that end an answer. As in llama.cpp, they are found by their keys and by their
    texts. Without a vocabulary they are those in the metadata."""
    tokens = _tokens(fields)
    ids = special_ids(fields)
    stated = {ids[key] for key in ("eos", "eot", "eom", *_CODE_ENDS) if key in ids}
    listed = fields.get("tokenizer.ggml.eos_token_ids")
    stated |= {number for number in (listed if _is_list_of(listed, int) else ()) if _is_id(number, tokens)}
    if not tokens:
        return stated
    texts = _ENDS.union(*(_CODE[key] for key in _CODE_ENDS if key not in ids)).intersection(tokens)
    excepted = {text for text, needed in _EXCEPTIONS if needed <= texts}
    candidates = stated | {number for number, text in enumerate(tokens) if text in texts}
    types = _types(fields)
    tags = {n for n in candidates - stated if tokens[n] == _TAG and types[n : n + 1] != [_CONTROL]}
    return {number for number in candidates - tags if tokens[number] not in excepted}


def _tokens(fields: Mapping[str, Any]) -> list[str]:
    tokens = fields.get("tokenizer.ggml.tokens")
    return tokens if _is_list_of(tokens, str) else []


def _types(fields: Mapping[str, Any]) -> list[int]:
    types = fields.get("tokenizer.ggml.token_type")
    return types if _is_list_of(types, int) else []


def _is_list_of(value: Any, kind: type[T]) -> TypeGuard[list[T]]:
    """Whether ``value`` is a list with entries of ``kind``. All entries of a list in a file have one type."""
    return isinstance(value, list) and bool(value) and type(value[0]) is kind


def _is_id(number: Any, tokens: list[str]) -> TypeGuard[int]:
    return type(number) is int and number >= 0 and (number < len(tokens) or not tokens)


def special_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens, by the first part of their keys. As in llama.cpp, a default takes the place of
    an id that no token has."""
    tokens = _tokens(fields)
    types = _types(fields)
    ids: dict[str, int] = {}
    if fields.get("tokenizer.ggml.model") == "llama":
        ids = {
            key: n
            for key, (n, text) in _DEFAULTS.items()
            if types[n : n + 1] in ([_CONTROL], [_UNKNOWN]) or tokens[n : n + 1] == [text]
        }
    for key in _ID_KEYS:
        for name in (_OLDER.get(key, key), key):
            if _is_id(number := fields.get(f"tokenizer.ggml.{name}_token_id"), tokens):
                ids[key] = number
    return ids


def _check_keys(fields: Mapping[str, Any], source: str) -> None:
    """Raise ``CheckpointError`` for metadata that would change the ids of texts, but have no effect here."""
    for name, value in fields.items():
        key = name.removeprefix("tokenizer.ggml.")
        if key == name or key in _WITHOUT_EFFECT:
            continue
        if key in _FLAGS and not isinstance(value, bool):
            raise CheckpointError(f"{source}: {name} {value!r} must be true or false")
        if key not in _READ and value:
            text = f"of {len(value)} entries" if isinstance(value, list) else repr(value)
            raise CheckpointError(f"{source}: {name} {text} is not supported; it must be missing, false or empty")


def _warn_of_ids(fields: Mapping[str, Any], source: str) -> None:
    """Warn of ids that no token has, and of a token that texts must begin or end with, but whose id is missing."""
    tokens = _tokens(fields)
    ids = special_ids(fields)
    faults = []
    for key in (*_ID_KEYS, *_OLDER.values()):
        number = fields.get(name := f"tokenizer.ggml.{key}_token_id")
        if number is not None and not _is_id(number, tokens):
            substitute = f"{ids[key]} is taken" if key in ids else "no token is taken"
            faults.append(f"{name} {number!r} is no id of the {len(tokens)} tokens, so {substitute}")
    listed = fields.get(name := "tokenizer.ggml.eos_token_ids") or []
    if not isinstance(listed, list) or not all(_is_id(number, tokens) for number in listed):
        faults.append(f"{name} {listed!r} are not all ids of the {len(tokens)} tokens, so the others are taken")
    for key in ("bos", "eos"):
        if fields.get(name := f"tokenizer.ggml.add_{key}_token") and key not in ids:
            faults.append(f"{name} is true, but there is no such token, so none is added")
    if faults:
        warnings.warn(f"{source}: {'; '.join(faults)}", stacklevel=3)


def _corrected_types(fields: Mapping[str, Any], source: str, stated: list[int]) -> list[int]:
    """Return the tokens' types, but control tokens for all that end an answer or mark code, as in llama.cpp. Warn if
    the file states other types for these."""
    tokens = _tokens(fields)
    ids = special_ids(fields)
    marks = {"<|end|>"}.union(*(texts for key, texts in _CODE.items() if key not in ids))
    control = end_ids(fields) | {number for number, text in enumerate(tokens) if text in marks}
    if wrong := sorted(number for number in control if stated[number] != _CONTROL):
        type_names = dict(enumerate(_TYPES))
        listed = ", ".join(f"{tokens[n]!r} ({type_names.get(stated[n], stated[n])})" for n in wrong)
        message = "tokenizer.ggml.token_type does not say that these are control tokens; they are taken as such"
        warnings.warn(f"{source}: {message}: {listed}", stacklevel=3)
    return [_CONTROL if number in control else kind for number, kind in enumerate(stated)]


def _byte_level(fields: Mapping[str, Any], ids: dict[str, int], pre: Pre, source: str) -> RawTokenizer:
    merges = fields.get("tokenizer.ggml.merges")
    if merges != [] and not _is_list_of(merges, str):
        raise CheckpointError(f"{source}: tokenizer.ggml.merges are missing, or no texts")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = _merging(source, vocab=ids, merges=pairs, fuse_unk=False, ignore_merges=pre.whole_words)
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merging(source: str, **options: Any) -> RawTokenizer:
    """Make a tokenizer that only merges."""
    try:
        return RawTokenizer(models.BPE(**options))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{source}: not a usable vocabulary ({error})") from error


def _sentence_piece(
    fields: Mapping[str, Any], tokens: list[str], ids: dict[str, int], types: list[int], source: str
) -> RawTokenizer:
    scores = fields.get("tokenizer.ggml.scores")
    if not (_is_list_of(scores, float) or _is_list_of(scores, int)) or len(scores) != len(tokens):
        raise CheckpointError(f"{source}: tokenizer.ggml.scores are missing, or not one number for each token")
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
    unknown = special_ids(fields).get("unknown")
    tokenizer = _merging(
        source,
        vocab=ids,
        merges=[merge[-2:] for merge in merges],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
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
    parts, end_tokens = ["$A"], []
    for key, first in (("bos", True), ("eos", False)):
        number = special_ids(fields).get(key)
        if number is not None and fields.get(f"tokenizer.ggml.add_{key}_token", begins and first):
            parts.insert(0 if first else len(parts), tokens[number])
            end_tokens.append((tokens[number], number))
    if end_tokens:
        pair = [f"{part}:1" if part != "$A" else "$B:1" for part in parts]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, pair=[*parts, *pair], special_tokens=end_tokens
        )
