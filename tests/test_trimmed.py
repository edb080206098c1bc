"""Trimmed heads: the logits of the tokens that are kept, and of no other; drafts from exactly what they report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly import LLM
from fly.backends import load
from fly.backends.cpu.library import available
from fly.cache import PagedKVCache
from fly.drafts import NGramDraft, SingleDraft
from fly.models import save_model
from fly.models.trimmed import kept_tokens
from fly.policies import Exact
from fly.runner.drafting import Batch, DraftSpec
from fly.runner.executor import Executor
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.types import SamplingParams
from tests.toys import random_llama

SIZE = 37
PROMPT = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."
ids = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=12)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(random_llama(3, SIZE, tied=request.param), path, torch.float32)
    return path


def opened(path: Path, kernels: str, kept: list[int] | None) -> Executor:
    return load(path, kernels=kernels, vocabulary=kept).executor


def cached(executor: Executor, tokens: list[int], room: int = 0) -> Batch:
    cache = PagedKVCache.for_model(executor, 256, None)
    cache.resize(1, len(tokens) + room)
    return Batch.of([tokens], cache.batch([1], [0], [len(tokens)]))


def scores(executor: Executor, tokens: list[int]) -> tuple[Tensor, list[int] | None]:
    found = executor.score(cached(executor, tokens))
    return found.logits_NV, found.argmax


@pytest.mark.parametrize("kernels", available())
@settings(max_examples=10)
@given(kept=ids, tokens=ids)
def test_its_logits_are_those_of_the_whole_model(
    checkpoint: Path, kernels: str, kept: list[int], tokens: list[int]
) -> None:
    """Of tokens that it keeps. It reads every token, and gives no other any chance."""
    whole_NV, _ = scores(opened(checkpoint, kernels, None), tokens)
    logits_NV, argmax = scores(opened(checkpoint, kernels, kept), tokens)
    wanted_NV = torch.full_like(whole_NV, -torch.inf)
    wanted_NV[:, kept] = whole_NV[:, kept]
    torch.testing.assert_close(logits_NV, wanted_NV, atol=1e-5, rtol=0)
    assert argmax is None or argmax == logits_NV.argmax(-1).tolist()


@pytest.mark.parametrize("kernels", available())
@settings(max_examples=15)
@given(
    kept=ids,
    tokens=ids,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 2**32),
    with_logits=st.booleans(),
    reach=st.sampled_from([0.0, 0.3]),
)
def test_drafts_are_drawn_from_what_they_report(
    checkpoint: Path,
    kernels: str,
    kept: list[int],
    tokens: list[int],
    temperature: float,
    seed: int,
    with_logits: bool,
    reach: float,
) -> None:
    """In one call of compiled code and token by token alike: the same tokens, and the distribution of the whole model
    processed after the others were taken out, which sums to 1 over what is kept."""
    params = SamplingParams(temperature=temperature, top_p=0.9)
    spec = DraftSpec(reach=(reach,), with_logits=with_logits and not temperature)
    drafted = []
    for way in (kernels, "torch"):
        executor = opened(checkpoint, way, kept)
        row = Row(tokens, len(tokens), params, Exact(), seed, 6)
        sampling = BatchSampling.of([params]) if temperature else None
        drafted.append(executor.extend(cached(executor, tokens, 6), spec, [row], [5], sampling, [seed]))
    ours, theirs = drafted
    assert ours.tokens == theirs.tokens and {*ours.tokens[0]} <= {*kept}
    count = len(ours.tokens[0])
    if temperature:
        assert ours.probs_BKV is not None and theirs.probs_BKV is not None
        probs_KV = ours.probs_BKV[0, :count]
        torch.testing.assert_close(probs_KV, theirs.probs_BKV[0, :count], atol=1e-4, rtol=0)
        torch.testing.assert_close(probs_KV[:, [*{*kept}]].sum(-1), torch.ones(count))
    elif spec.with_logits:
        assert ours.logits_BKV is not None and theirs.logits_BKV is not None
        torch.testing.assert_close(ours.logits_BKV[0, :count], theirs.logits_BKV[0, :count], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["auto", "w8a8", "w4a8", "w4"])
def test_exact_speculation_stays_the_target_s_own_text(kernels: str) -> None:
    """However few tokens the draft keeps; and it drafts alike in rounds of one call, and in steps."""
    alone = LLM("fly-target", kernels="w4a8" if kernels == "w4" else kernels)
    prompt = alone.chat_prompt(PROMPT)
    (wanted,) = alone.generate([prompt], temperature=0, max_tokens=40)
    lengths = []
    for vocabulary in (None, 512, 60):
        for draft in (None, NGramDraft()):
            strategy = SingleDraft("fly-draft", draft, vocabulary=vocabulary, kernels=kernels)
            llm = LLM(alone, draft=strategy)
            (found,) = llm.generate([prompt], temperature=0, max_tokens=40)
            llm.engine.stretch = 0
            (again,) = llm.generate([prompt], temperature=0, max_tokens=40)
            assert found.token_ids == again.token_ids == wanted.token_ids
            assert found.stats.tau == again.stats.tau
            lengths.append(found.stats.tau)
    assert lengths[0] > lengths[2] > lengths[4] > 1


@pytest.mark.parametrize("draft", ["model(fly-draft, vocabulary=40)", "ngram+model(fly-draft, vocabulary=40)"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_form_may_allow_none_of_the_kept_tokens(draft: str, temperature: float) -> None:
    """The draft then proposes what the form forbids, and the target rejects it."""
    alone = LLM("fly-target", max_context=512)
    prompt = alone.chat_prompt(PROMPT)
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=3, structured={"regex": "[qxz]{3,20}"})
    (found,) = LLM(alone, draft=draft).generate([prompt], params)
    assert {*found.text} <= {*"qxz"} and len(found.text) >= 3
    if temperature == 0:
        assert found.token_ids == alone.generate([prompt], params)[0].token_ids


def test_a_number_keeps_the_lowest_ids_and_a_file_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([5, 3, 3]))
    assert kept_tokens(3, 10, [9]) == [0, 1, 2, 9]
    assert kept_tokens(99, 10) == [*range(10)]
    assert kept_tokens(path, 10, {1}) == kept_tokens(str(path), 10, {1}) == kept_tokens([3, 5], 10, [1]) == [1, 3, 5]


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (0, "vocabulary 0 must keep at least 1"),
        ([], "must be a number of tokens, or a list"),
        ([1, "a"], "must be a number of tokens, or a list"),
        ([1, 10], "has the id 10; the model has 10 tokens"),
        ([-1, 3], "has the id -1"),
    ],
)
def test_what_is_no_vocabulary_is_refused(vocabulary: list[int] | int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kept_tokens(vocabulary, 10)


def test_it_is_refused_where_there_is_nothing_to_trim(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    alone = LLM("fly-target")
    loaded = load("fly-draft").executor
    for model, vocabulary, message in (
        (loaded, 100, "loaded already"),
        ("fly-eagle3", 100, "is a draft head"),
        ("fly-draft", str(tmp_path / "broken.json"), "broken.json.* is no JSON file"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(alone, draft=SingleDraft(model, vocabulary=vocabulary))
