"""Sampling defaults from a checkpoint's ``generation_config.json``. A warning names settings without effect."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fly.errors import explain
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.opening import open_checkpoint
from fly.types import SamplingParams

__all__ = ["read_sampling_defaults", "sampling_defaults"]

# transformers' names -> ours. The settings in ``_DRAWING`` count only with ``do_sample``.
_DRAWING = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
_ALWAYS = {
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_IDS = ("suppress_tokens", "bad_words_ids")
# Settings that do not change the text: file formats, caches, other ways to draft, beams (unused without ``num_beams``),
# ids that the tokenizer and its template handle, and the ids that ``read_eos_ids`` reads.
_SILENT = {
    *("_from_model_config", "transformers_version", "generation_kwargs", "trust_remote_code"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "low_memory"),
    *("compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp"),
    *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
    *("renormalize_logits", "remove_invalid_values"),
}
# Further values without effect, besides None, zero and empty. Some are defaults of transformers.
_ONES = ("temperature", "top_p", "num_beams", "num_return_sequences", "typical_p", "guidance_scale", "top_h")
_NEUTRAL = {**dict.fromkeys((*_ONES, "encoder_repetition_penalty"), 1), "top_k": 50, "max_length": 20}
_WHY = {
    **dict.fromkeys(_DRAWING, "without effect, since do_sample is not true"),
    **dict.fromkeys(("max_length", "min_length"), "ignored: max_tokens and min_tokens count the answer alone"),
}


def read_sampling_defaults(checkpoint: str | Path | Checkpoint, vocab_size: int | None = None) -> SamplingParams:
    """Read the sampling defaults from ``generation_config.json``. Sampling is greedy unless ``do_sample`` is true.

    One warning names all settings that have no effect. Raises ``CheckpointError`` for values out of range, including
    token ids outside a vocabulary of ``vocab_size`` tokens.
    """
    checkpoint, name = open_checkpoint(checkpoint), "generation_config.json"
    params, ignored = sampling_defaults(checkpoint.settings(name), checkpoint.place_of(name), vocab_size)
    if ignored:
        warnings.warn(f"{checkpoint.place_of(name)}: {'; '.join(ignored)}", stacklevel=3)
    return params


def sampling_defaults(
    settings: Mapping[str, Any], source: str, vocab_size: int | None = None
) -> tuple[SamplingParams, list[str]]:
    """Convert settings to sampling parameters. Also return a phrase for each kind of setting without effect. Errors
    name ``source``."""
    requested = {name: value for name, value in settings.items() if value is not None and name not in _SILENT}
    draws = requested.pop("do_sample", False)
    options: dict[str, Any] = {} if draws else {"temperature": 0.0}
    if draws:
        options |= {name: requested.pop(name) for name in _DRAWING if name in requested}
    options |= {ours: requested.pop(theirs) for theirs, ours in _ALWAYS.items() if theirs in requested}
    try:
        listed = {name: requested.pop(name) for name in _IDS if name in requested}
        bad = [*([i] for i in listed.get("suppress_tokens", ())), *listed.get("bad_words_ids", ())]
        if odd := [number for ids in bad for number in ids if type(number) is not int]:
            raise TypeError(f"{odd[0]!r} is no whole number")
        if bad:
            options["bad_words_ids"] = tuple(map(tuple, bad))
        params = SamplingParams(**options)
    except ValidationError as error:
        raise CheckpointError(f"{source}: {explain(error)}") from error
    except TypeError as error:
        raise CheckpointError(f"{source}: {', '.join(listed)} must be lists of token ids ({error})") from error
    try:
        params.check_ids(sys.maxsize if vocab_size is None else vocab_size)
    except ValueError as error:
        raise CheckpointError(f"{source}: {', '.join(listed)}: {error}") from None
    return params, _unmet(requested)


def _unmet(options: dict[str, Any]) -> list[str]:
    """Describe the remaining settings that have an effect in transformers, but none here."""
    words: dict[str, list[str]] = {}
    for name, value in options.items():
        if value and value != _NEUTRAL.get(name):
            words.setdefault(_WHY.get(name, "not supported, and ignored"), []).append(f"{name} {value!r}")
    return [f"{', '.join(settings)} {why}" for why, settings in words.items()]
