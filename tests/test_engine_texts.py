"""Texts: they end at stop strings and ends of sequence, streams give what calls give, trained drafts pay."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import fly
from fly import LLM, Output, SamplingParams
from fly.drafts import CascadeDraft, NGramDraft, SingleDraft
from fly.models import Llama
from fly.models.bundled import CHECKPOINTS, tasks
from fly.models.loading import save_model
from fly.policies import (
    ControlToken,
    EntropyGate,
    Exact,
    FLy,
    Room,
)
from tests.test_drafts import perturbed
from tests.toy_engine import (
    check_counts,
    whole,
)
from tests.toys import random_llama

# --- text: a random model that speaks the bundled vocabulary ---------------------------------------------


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory: random weights, the bundled tokenizer, two ends of sequence."""
    directory = tmp_path_factory.mktemp("speaker")
    save_model(speaking(0.0), directory, dtype=torch.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "fly-target" / name, directory / name)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return directory


def speaking(noise: float) -> Llama:
    base = random_llama(2, 1024, hidden=32, heads=2, kv_heads=1, layers=1, max_positions=128)
    return perturbed(base, noise) if noise else base


def same_text(llm: LLM, prompt: str | list[int], params: SamplingParams, k: int = 6) -> Output:
    """The speculative output, once shown equal to the autoregressive one and to the stream's."""
    (plain,) = llm.generate([prompt], params, k=0)
    (out,) = llm.generate([prompt], params, k=k)
    assert (out.token_ids, out.text, out.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    check_counts(out, params, k)
    stream = llm.stream(prompt, params, k=k)
    pieces = list(stream)
    assert "".join(pieces) == out.text
    assert [token.id for piece in pieces for token in piece.tokens] == out.token_ids
    assert stream.finish_reason == out.finish_reason and stream.stats == out.stats
    return out


@settings(max_examples=25)
@given(at=st.integers(0, 40), length=st.integers(1, 6), least=st.sampled_from([0, 3, 12]), k=st.integers(1, 9))
def test_output_ends_before_a_stop_string(speaker: Path, at: int, length: int, least: int, k: int) -> None:
    llm = LLM(speaker, SingleDraft(speaking(0.01)), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=24, min_tokens=least, ignore_eos=True)
    free = same_text(llm, "The", params, k)
    at = min(at, len(free.text) - 1)
    stop = free.text[at : at + length]
    out = same_text(llm, "The", params.model_copy(update={"stop": (stop,)}), k)
    assert free.text.startswith(out.text) and free.token_ids[: len(out.token_ids)] == out.token_ids
    event(f"stopped: {out.finish_reason}")
    if out.finish_reason == "stop":
        assert free.text[len(out.text) :].startswith(stop) and len(out.token_ids) >= least
        assert least or stop not in out.text
        # One token fewer does not hold the stop string yet; the mark of an unfinished character is no text so far.
        assert least or "\ufffd" in stop or stop not in llm.tokenizer.decode(out.token_ids[:-1])  # type: ignore[union-attr]
    else:
        assert out.token_ids == free.token_ids and least
    assert whole(llm)


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_output_ends_with_any_of_the_ends_of_sequence(speaker: Path, tmp_path: Path, at: int) -> None:
    """Both ids of ``generation_config.json`` end it; the token is kept, its text is not shown if it is special."""
    free_params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    free = LLM(speaker, dtype="float32").generate(["Count"], free_params)[0].token_ids
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaker / name, tmp_path / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, free[at]]}))
    llm = LLM(tmp_path, SingleDraft(speaking(0.01)), dtype="float32")
    out = same_text(llm, "Count", free_params.model_copy(update={"ignore_eos": False}))
    first = free.index(free[at])
    assert out.token_ids == free[: first + 1] and out.finish_reason == "stop"
    assert same_text(llm, "Count", free_params).token_ids == free
    later = same_text(llm, "Count", SamplingParams(temperature=0, max_tokens=32, min_tokens=at + 1 + first))
    assert len(later.token_ids) >= at + 1 + first


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_a_stream_frees_everything(speaker: Path, taken: int) -> None:
    llm = LLM(speaker, CascadeDraft([NGramDraft(), SingleDraft(speaking(0.01))]), dtype="float32", k=4)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    step, llm.engine.stretch = llm.scheduler.step, 0

    def slow(seconds: float) -> object:  # it runs on by itself
        time.sleep(0.03)
        return step(seconds)

    llm.scheduler.step = slow  # type: ignore[method-assign]
    stream = llm.stream("Once", params)
    for _ in range(taken):
        next(stream)
    assert taken == 0 or not whole(llm)
    stream.close()
    assert whole(llm)
    assert list(stream) == []
    same_text(llm, "Once", params)


# --- the trained models that ship ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> LLM:
    return LLM("fly-target", SingleDraft("fly-draft", dtype="float32"), dtype="float32", k=15)


@pytest.fixture(scope="module")
def questions(trained: LLM) -> list[list[int]]:
    return [trained.chat_prompt(problem.prompt) for problem in tasks.problems(None, "heldout")[-6:]]


def test_trained_speculation_is_invisible_and_pays(trained: LLM, questions: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=80)
    plain = trained.generate(questions, params, k=0)
    strategy = CascadeDraft([NGramDraft(), SingleDraft("fly-draft", dtype="float32")])
    for llm in (trained, LLM("fly-target", strategy, dtype="float32")):
        outs = llm.generate(questions, params)
        assert [out.text for out in outs] == [out.text for out in plain]
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        for out in outs:
            check_counts(out, params, 15)
        assert sum((out.stats for out in outs), start=fly.Stats()).tau > 1.5


def test_trained_fly_relaxes_and_accepts_more(trained: LLM, questions: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=80)
    exact, relaxed = (
        sum((out.stats for out in trained.generate(questions, params, policy=policy)), start=fly.Stats())
        for policy in (Exact(), Exact() | (EntropyGate(0.3) & Room(2) & ~ControlToken()))
    )
    assert exact.relaxed == 0 and relaxed.relaxed > 0
    assert relaxed.tau > exact.tau
    outs = trained.generate(questions, params, policy=FLy())
    assert sum(out.stats.relaxed for out in outs) > 0
    for out in outs:
        check_counts(out, params, 15)


def test_trained_text_streams_and_stops(trained: LLM, questions: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    for prompt in questions[:3]:
        free = same_text(trained, prompt, params, 15)
        assert len(free.text) > 20
        stop = free.text[15:18]
        out = same_text(trained, prompt, params.model_copy(update={"stop": (stop,)}), 15)
        assert out.text == free.text[: free.text.index(stop)] and out.finish_reason == "stop"
    assert whole(trained)
