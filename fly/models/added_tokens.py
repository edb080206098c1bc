"""The tokens that other files of a directory add to ``tokenizer.json``, and special tokens by name.

The rules are those of transformers 5 (``PreTrainedTokenizerFast.from_pretrained``). ``tokenizer_config.json`` states
all tokens if it has ``added_tokens_decoder``. Otherwise the older files ``special_tokens_map.json`` and
``added_tokens.json`` count too, and the former overrides ``tokenizer_config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

__all__ = ["added_tokens"]

# The names that every tokenizer may have, in the order in which their tokens are added.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Further special tokens: a list, or an object of tokens by name. The second key is the older one.
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

Json = Mapping[str, Any]  # the object in a JSON file


def added_tokens(
    raw: RawTokenizer, settings: Json, older_names: Json, older_ids: Json
) -> tuple[dict[str, str], list[AddedToken]]:
    """Return the texts of the special tokens by name, and the tokens to add to ``raw``, in this order.

    Args:
        raw: the tokenizer in ``tokenizer.json``.
        settings: the contents of ``tokenizer_config.json``.
        older_names: the contents of ``special_tokens_map.json``.
        older_ids: the contents of ``added_tokens.json``.

    Raises ``AttributeError``, ``KeyError``, ``TypeError`` or ``ValueError`` if a file does not have its form.
    """
    stated = dict(settings)
    saved = raw.get_added_tokens_decoder()
    if _OLDER_EXTRA in stated and not stated.get(_EXTRA):
        stated[_EXTRA] = stated.pop(_OLDER_EXTRA)
    # Collect the special tokens with names of the model's own, such as image_token.
    model_names = {
        name: stated.pop(name) for name, value in settings.items() if _is_own(name) and isinstance(value, str)
    }
    model_names |= _pop_named(stated)
    model_names = model_names or dict(settings.get("model_specific_special_tokens") or {})
    # List the added tokens with their ids. These give only the order: the tokenizer numbers new tokens itself.
    if (decoder := stated.get("added_tokens_decoder")) is not None:
        listed = [(int(number), _token(value)) for number, value in decoder.items()]
    else:
        stated |= {name: _older(name, value, stated) for name, value in older_names.items()}
        model_names |= _pop_named(stated)
        special = {str(value) for value in (*map(stated.get, _NAMES), *(stated.get(_EXTRA) or ()))}
        listed = [
            (int(number), AddedToken(text, special=text in special, normalized=text not in special))
            for text, number in older_ids.items()
        ]
        listed += saved.items()
    by_id, by_text = dict(listed), {str(token): token for _, token in listed}
    tokens = [by_id[number] for number in sorted(by_id)]
    # Add the special tokens that no list has. The padding of tokenizer.json has a token too.
    by_name = {name: stated.get(name) for name in _NAMES}
    by_name |= {name: by_text.get(str(_token(value)), value) for name, value in by_name.items() if value is not None}
    if raw.padding and "pad_token" not in stated:
        by_name["pad_token"] = raw.padding["pad_token"]
    by_name |= {name: value for name, value in stated.items() if _is_own(name) and _is_token(value)} | model_names
    named_tokens = {name: _token(value) for name, value in by_name.items() if value is not None}
    extra = stated[_EXTRA] if _EXTRA in stated else stated.get(_OLDER_EXTRA)
    texts = {str(token) for token in (*saved.values(), *by_id.values())}
    for token in (*named_tokens.values(), *map(_token, extra or ())):
        if str(token) not in texts and token not in tokens:
            tokens.append(token)
    names = {name: str(token) for name, token in named_tokens.items()}
    return names, [_as_added(token, str(token) in names.values()) for token in tokens]


def _is_own(name: str) -> bool:
    return name.endswith("_token") and name not in _NAMES


def _is_token(value: Any) -> bool:
    return isinstance(value, (str, AddedToken)) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _pop_named(stated: dict[str, Any]) -> dict[str, Any]:
    """Remove the further special tokens from ``stated`` and return them, if they have names."""
    return stated.pop(_EXTRA) if isinstance(stated.get(_EXTRA), dict) else {}


def _older(name: str, value: Any, stated: Json) -> Any:
    """Return what an entry of ``special_tokens_map.json`` makes of an entry of ``tokenizer_config.json``."""
    if isinstance(value, dict) and name != _EXTRA:
        return _token({**value, "special": True})
    if name != _EXTRA or not isinstance(value, list):
        return value
    merged = list(stated.get(_EXTRA) or ())
    for item in value:
        token = _token({**item, "special": True}) if isinstance(item, dict) else item
        if token not in merged:
            merged.append(token)
    return merged


def _token(value: Any) -> str | AddedToken:
    """Read a token, which is a text or an object with its text and flags."""
    if isinstance(value, dict):
        return AddedToken(value["content"], **{flag: value[flag] for flag in _FLAGS if flag in value})
    if not isinstance(value, (str, AddedToken)):
        raise TypeError(f"a token must be text or an object with its content, got {value!r}")
    return value


def _as_added(token: str | AddedToken, named: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if named:
        token.special = True
    return token
