"""Defaults of sampling from ``generation_config.json``: honoured, or named."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from pathlib import Path

import pytest

from fly import LLM, SamplingParams
from fly.models import CheckpointError, generation
from fly.models.generation import read_sampling_defaults, sampling_defaults

transformers = pytest.importorskip("transformers")

PARAMS = SamplingParams(temperature=0, max_tokens=40)
MESSAGES = [{"role": "user", "content": "Take the list 4 9. Reverse the list."}]


def test_every_field_of_a_generation_config_is_honoured_or_named() -> None:
    default = transformers.GenerationConfig()
    values = dict(default.to_dict())
    assert sampling_defaults(values, "x") == (SamplingParams(temperature=0), [])
    values |= transformers.GenerationConfig._get_default_generation_params()
    assert sampling_defaults(values, "x") == (SamplingParams(temperature=0), [])
    honoured = {*generation._DRAWING, *generation._ALWAYS, *generation._IDS, "do_sample"}
    for name in {*values, "unheard_of"} - honoured - generation._SILENT:
        params, words = sampling_defaults({name: 7}, "x")
        assert params == SamplingParams(temperature=0) and len(words) == 1 and words[0].startswith(f"{name} 7 "), name
    assert len(sampling_defaults({"num_beams": 4, "penalty_alpha": 0.6, "max_length": 99}, "x")[1]) == 2


def test_a_generation_config_in_full(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    settings = {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05,
        "max_new_tokens": 99, "min_new_tokens": 2, "stop_strings": "###", "suppress_tokens": [5, 6],
        "bad_words_ids": [[7, 8]], "eos_token_id": [1, 2], "transformers_version": "4.37.0", "typical_p": 1.0,
    }  # fmt: skip
    path.write_text(json.dumps(settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = read_sampling_defaults(tmp_path, 10)
    assert params == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.05, max_tokens=99, min_tokens=2,
        stop=("###",), bad_words_ids=((5,), (6,), (7, 8)),
    )  # fmt: skip
    path.write_text(json.dumps(settings | {"do_sample": False, "num_beams": 4, "typical_p": 0.9}))
    with pytest.warns(
        UserWarning, match=r"top_k 20.*do_sample is not true; typical_p 0.9, num_beams 4 not supp"
    ) as told:
        params = read_sampling_defaults(tmp_path, 10)
    assert len(told) == 1 and (params.temperature, params.top_k, params.repetition_penalty) == (0, 0, 1.05)
    for wrong, said in (
        ({"suppress_tokens": [10]}, "bad_words_ids .10."),
        ({"bad_words_ids": 3}, "lists of token ids"),
        ({"suppress_tokens": [True]}, "suppress_tokens must be lists of token ids .True is no whole number."),
        ({"suppress_tokens": [1.0]}, "1.0 is no whole number"),
        ({"bad_words_ids": ["1"]}, "'1' is no whole number"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{said}"):
            read_sampling_defaults(tmp_path, 10)


def test_banned_ids_never_come_up() -> None:
    """One by one, and in sequences, the end of the prompt included; drafted or not."""
    llm = LLM("fly-tiny", "ngram", dtype="float32", k=4)
    prompt = llm.chat_prompt(MESSAGES)
    plain = llm.generate([prompt], PARAMS)[0].token_ids
    bans = ((plain[4],), (prompt[-1], plain[0]), (plain[1], plain[2]))
    params = PARAMS.model_copy(update={"bad_words_ids": bans})
    (banned,), (alone,) = llm.generate([prompt], params), llm.generate([prompt], params, k=0)
    text = [prompt[-1], *banned.token_ids]
    assert banned.token_ids == alone.token_ids and plain[4] not in banned.token_ids
    assert not set(pairwise(text)) & set(bans)
    for wrong, said in ((((),), "empty bad word"), (((99999,),), r"bad_words_ids \[99999\] are outside")):
        with pytest.raises(ValueError, match=said):
            llm.generate([prompt], SamplingParams(bad_words_ids=wrong))
