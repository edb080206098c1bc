"""A draft's head with a sketch: which tokens get logits, what these are, and that drafts come from what they report.

Shape legend: N places, V vocabulary, C hidden width, S strips of 16 tokens, K drafted tokens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from fly import LLM
from fly.backends import load
from fly.backends.cpu import packed
from fly.backends.cpu.blocks import four_bits
from fly.backends.cpu.executor import CpuExecutor
from fly.backends.cpu.packed import PackedLlama
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.models import LlamaConfig, save_model
from fly.policies import Exact
from fly.runner.drafting import Batch, DraftSpec
from fly.runner.executor import Executor
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.types import SamplingParams
from tests.kernels import VARIANTS, built, same_bits, stepwise
from tests.toys import build_llama
from tests.twins import decoded

STRIP, LIKELY, FINE = 16, 256, 15  # src/fly.h, src/logits.h
# Vocabulary and width: no multiples of what is sketched at once, and more inputs than a sum of 16 bits holds.
SIZES = {
    "narrow": (16_421, 72),
    "wide": (5_003, 2_220),
}
pytestmark = built


def config_of(vocab: int, width: int = 72, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip


@cache
def model_of(size: str, tied: bool) -> tuple[Tensor, dict[str, PackedLlama], dict[str, PackedLlama]]:
    """The head's weights, and for each variant the model with a sketch and without."""
    vocab, width = SIZES[size]
    model = build_llama(config_of(vocab, width, tied), 1)
    with pytest.MonkeyPatch.context() as patched:
        made = []
        for least in (1, vocab + 1):
            patched.setattr(packed, "_SKETCHED", least)
            made.append({name: PackedLlama(model, f"{name}-w4") for name in VARIANTS})
    return model.lm_head.weight.detach(), made[0], made[1]


def sketched(weight_VC: Tensor, hidden_NC: Tensor) -> Tensor:
    """The twin: inputs in whole steps, with the signs of the weights in four bits, times their mean size."""
    head_VC = decoded(four_bits(weight_VC), "Q4_K", weight_VC.shape[1])
    peak_N1 = hidden_NC.abs().amax(1, keepdim=True)
    inverse_N1 = torch.where(peak_N1 > 0, torch.full_like(peak_N1, FINE) / peak_N1, 0)
    signs_VC = torch.where(head_VC > 0, 1.0, -1.0)
    return (hidden_NC * inverse_N1).round() @ signs_VC.T * head_VC.abs().mean(1)


def strips(values_NV: Tensor) -> Tensor:
    """The largest value of each strip, [N, S]."""
    return pad(values_NV, (0, -values_NV.shape[1] % STRIP), value=-torch.inf).unflatten(1, (-1, STRIP)).amax(2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=10)
@given(count=st.integers(1, 40), seed=st.integers(0, 99), scale=st.sampled_from([0.0, 1e-3, 1.0, 50.0]))
def test_likely_tokens_have_the_head_s_logits_and_others_none(
    variant: str, size: str, tied: bool, count: int, seed: int, scale: float
) -> None:
    """Whole strips of 16 tokens, 256 of them or more where some are equal: those whose best token is likeliest by the
    sketch. Their logits are those of the model without a sketch, to the last bit."""
    weight_VC, with_sketch, without = model_of(size, tied)
    ours, whole = with_sketch[variant], without[variant]
    drawn_NC = torch.randn(count, weight_VC.shape[1], generator=torch.Generator().manual_seed(seed)) * scale
    hidden_NC = drawn_NC.to(torch.bfloat16).float()  # AVX-512 rounds hidden states to bfloat16
    logits_NV, whole_NV = ours.logits(hidden_NC), whole.logits(hidden_NC)
    finite_NV = logits_NV.isfinite()
    assert torch.equal(logits_NV[finite_NV], whole_NV[finite_NV])
    assert (logits_NV[~finite_NV] == -torch.inf).all()
    chosen_NS = strips(finite_NV.float()) > 0
    assert torch.equal(chosen_NS.repeat_interleave(STRIP, 1)[:, : logits_NV.shape[1]], finite_NV)
    assert (chosen_NS.sum(1) >= min(LIKELY, chosen_NS.shape[1])).all()
    peaks_NS = strips(sketched(weight_VC, hidden_NC))
    slack = 1e-5 * peaks_NS.abs().amax()
    for peaks_S, chosen_S in zip(peaks_NS, chosen_NS):
        least = peaks_S.topk(LIKELY).values[-1]
        assert peaks_S[chosen_S].min() >= least - slack
        assert chosen_S[peaks_S > least + slack].all()


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=10)
@given(count=st.integers(2, 40), seed=st.integers(0, 99), threads=st.integers(1, 5))
def test_a_row_alone_is_that_row_among_others(variant: str, count: int, seed: int, threads: int) -> None:
    """On any number of threads."""
    _, with_sketch, _ = model_of("narrow", True)
    model = with_sketch[variant]
    hidden_NC = torch.randn(count, SIZES["narrow"][1], generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([model.logits(row_1C) for row_1C in hidden_NC.split(1)])
        torch.set_num_threads(threads)
        assert same_bits(model.logits(hidden_NC), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=15)
@given(
    tokens=st.lists(st.integers(0, SIZES["narrow"][0] - 1), min_size=1, max_size=12),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 2**32),
    reach=st.sampled_from([0.0, 1e-4]),
)
def test_drafts_are_drawn_from_what_they_report(
    variant: str, tokens: list[int], temperature: float, seed: int, reach: float
) -> None:
    """One call drafts what single steps draft. The reported distribution sums to 1 over the likely tokens."""
    _, with_sketch, _ = model_of("narrow", False)
    whole = CpuExecutor(with_sketch[variant])
    params, spec = SamplingParams(temperature=temperature), DraftSpec(reach=(reach,))
    drafted = []
    for executor in (whole, stepwise(whole)):
        row = Row(tokens, len(tokens), params, Exact(), seed, 6)
        sampling = BatchSampling.of([params]) if temperature else None
        drafted.append(executor.extend(_cached(executor, tokens), spec, [row], [5], sampling, [seed]))
    ours, theirs = drafted
    assert ours.tokens == theirs.tokens
    assert reach > 0 or len(ours.tokens[0]) == 5
    if temperature:
        assert ours.probs_BKV is not None and theirs.probs_BKV is not None
        count = len(ours.tokens[0])
        probs_KV = ours.probs_BKV[0, :count]
        torch.testing.assert_close(probs_KV, theirs.probs_BKV[0, :count], atol=1e-5, rtol=0)
        torch.testing.assert_close(probs_KV.sum(-1), torch.ones(count))
        assert ((probs_KV > 0).sum(-1) <= STRIP * LIKELY).all()
        assert (probs_KV.gather(1, torch.tensor(ours.tokens).T) > 0).all()


def test_texts_are_the_target_s_own(tmp_path: Path) -> None:
    """Alone, in a batch, and round by round; drafts are kept, though the model lacks most logits."""
    save_model(build_llama(config_of(1 << 14), 1), tmp_path, torch.float32)
    alone = LLM(tmp_path, device="cpu")
    llm = LLM(alone, draft=(strategy := SingleDraft(tmp_path, kernels="w4")))
    drafter = strategy.runner.executor
    assert drafter.score(_cached(drafter, [5, 6, 7])).logits_NV.isinf().any(-1).all()
    prompts = [[5, 6, 7], [8, 9], [16_000, 12]]
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=20, seed=3, ignore_eos=True)
        batch = llm.generate(prompts, params)
        single = [llm.generate([prompt], params)[0] for prompt in prompts]
        llm.engine.stretch = 0
        by_rounds = llm.generate(prompts, params)
        llm.engine.stretch = 0.05
        assert [out.token_ids for out in batch] == [out.token_ids for out in single]
        assert [out.token_ids for out in batch] == [out.token_ids for out in by_rounds]
        if temperature == 0:
            assert [out.token_ids for out in batch] == [out.token_ids for out in alone.generate(prompts, params)]
            assert sum(out.stats.accepted for out in batch) > 0


@pytest.mark.parametrize("vocab", [(1 << 14) - 1, 1 << 14])
def test_a_large_head_alone_has_a_sketch(vocab: int) -> None:
    logits_NV = PackedLlama(build_llama(config_of(vocab), 1), "w4").logits(torch.randn(1, 72))
    assert bool(logits_NV.isfinite().all()) is (vocab < 1 << 14)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hidden_state_that_is_no_number_gives_no_token(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_SKETCHED", 1)
    model = build_llama(config_of(5_003), 1)
    executor = CpuExecutor(PackedLlama(model, f"{variant}-w4"))
    (token,) = executor.score(_cached(executor, [5, 6, 7]), [2]).argmax or [-1]
    assert token >= 0
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    executor = CpuExecutor(PackedLlama(model, f"{variant}-w4"))
    (token,) = executor.score(_cached(executor, [5, 6, 7]), [2]).argmax or [0]
    assert token < 0


def _cached(executor: Executor, tokens: list[int]) -> Batch:
    cache = PagedKVCache.for_model(executor, 256, None)
    cache.resize(1, len(tokens) + 6)
    return Batch.of([tokens], cache.batch([1], [0], [len(tokens)]))


def test_a_target_is_never_sketched() -> None:
    loaded = load("fly-tiny", kernels="w4").executor
    for model, kernels in (("fly-tiny", "w4"), (loaded, "auto")):
        with pytest.raises(ValueError, match=r"kernels '.*w4' are for drafts.*a target takes 'w4a8'"):
            LLM(model, device="cpu", kernels=kernels)
