"""Drafts in one call of compiled code against drafts step by step, with and without a lookup."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.backends import executor_of
from fly.backends.cpu import CpuExecutor, PackedLlama
from fly.backends.cpu.host import HostDistribution
from fly.cache import PagedKVCache
from fly.drafts import NGramDraft, SingleDraft, SuffixDraft
from fly.ops import Stream, draw, uniforms
from fly.policies import Exact, FLy
from fly.runner.executor import Batch, DraftSpec, Lookup
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from tests.kernels import (
    DTYPES,
    GREEDY,
    VARIANTS,
    W4,
    W4A8,
    W8A8,
    built,
    drafted_by,
    make_row,
    same_bits,
    sampled,
    stepwise,
    text,
)
from tests.toys import random_llama, ready


@built
@settings(max_examples=30)
@given(data=st.data())
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafting_at_once_is_drafting_step_by_step(variant: str, data: st.DataObject) -> None:
    """Tokens, and all that is cached of every row, over rounds in which some of each draft stands."""
    vocab, rows_n = 11, data.draw(st.integers(1, 4))  # few tokens, so that stop ids come up
    dtype = data.draw(st.sampled_from(DTYPES))
    model = executor_of(random_llama(data.draw(st.integers(0, 9)), vocab_size=vocab).to(dtype), variant)
    stops = [frozenset(data.draw(st.sets(st.integers(0, vocab - 1), max_size=2))) for _ in range(rows_n)]
    prompts = [text(data.draw(st.integers(1, 40)), b, vocab).tolist() for b in range(rows_n)]
    drawn = st.lists(st.one_of(st.just(GREEDY), sampled), min_size=rows_n, max_size=rows_n)
    every_params = [GREEDY] * rows_n if data.draw(st.booleans()) else data.draw(drawn)
    seeds = [data.draw(st.integers(0, 2**62)) for _ in range(rows_n)]
    rows = [make_row(*row) for row in zip(prompts, stops, every_params, seeds)]
    tokens = data.draw(st.sampled_from([48, 96, 400]))
    stop = {
        "confidence": data.draw(st.sampled_from([0.0, 0.0, 0.313, 0.571, 0.99])),
        "reach": data.draw(st.sampled_from([0.0, 0.0, 0.117, 0.517])),
    }
    fast, slow = (
        ready(SingleDraft(some, cache_tokens=tokens, block_size=4, **stop))  # type: ignore[arg-type]
        for some in (model, stepwise(model))
    )
    if tokens == 400 and data.draw(st.booleans()):  # with room, a lookup changes nothing
        fast = ready(
            SingleDraft(model, NGramDraft(data.draw(st.integers(1, 5)), 1, data.draw(st.integers(1, 9))), **stop)
        )
    for _ in range(data.draw(st.integers(1, 4))):
        most = [data.draw(st.integers(0, 9)) for _ in rows]
        outcomes, distributions = [], []
        for strategy in (fast, slow):
            try:
                draft = strategy.propose(rows, most)
                outcomes.append((draft.tokens_BK.tolist(), draft.lengths_B.tolist()))
                distributions.append(None if draft.probs_BKV is None else draft.probs_BKV[draft.mask_BK()])
            except RuntimeError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
        if distributions and distributions[0] is None:
            assert distributions[1] is None
        elif distributions:
            torch.testing.assert_close(distributions[0], distributions[1], rtol=2e-5, atol=1e-7)
        if isinstance(outcomes[0], type):
            return
        caches = [{row.id: strategy.runner._cached.get(row.id) for row in rows} for strategy in (fast, slow)]
        assert caches[0] == caches[1]
        lengths = [[strategy.runner.cache.allocator.length(row.id) for row in rows] for strategy in (fast, slow)]
        assert lengths[0] == lengths[1]
        drafted, counts = outcomes[0]
        for row, new, n in zip(rows, drafted, counts):
            row.tokens += new[: data.draw(st.integers(0, n))] + [data.draw(st.integers(0, vocab - 1))]
        for strategy in (fast, slow):
            strategy.commit(rows)


@built
@given(data=st.data())
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_distribution_drawn_from_is_the_processed_distribution(variant: str, data: st.DataObject) -> None:
    """Of any vocabulary, with ties and far logits; and the token is what that distribution and the uniform number
    give."""
    vocab = data.draw(st.sampled_from([2, 11, 32, 33, 100]))
    reference = random_llama(data.draw(st.integers(0, 9)), vocab_size=vocab)
    with torch.no_grad():
        weight = reference.lm_head.weight
        weight.copy_(
            weight[torch.arange(vocab) % data.draw(st.integers(1, vocab))] * data.draw(st.sampled_from([1, 40]))
        )
    model, params = PackedLlama(reference, variant), data.draw(sampled)
    cache = PagedKVCache.for_model(model, 16)
    cache.resize(0, 1)
    tokens_T, positions_T, kv = torch.tensor([1]), torch.tensor([0]), cache.batch([0], [0], [1])
    sampling, seed = BatchSampling.of([params]), data.draw(st.integers(-(2**63), 2**63 - 1))
    uniform_BK = uniforms(torch.tensor([seed]), torch.tensor([1]), Stream.SAMPLE, 1)
    row = make_row([1], params=params)
    drafted, probs_BKV, *_ = CpuExecutor(model).extend(Batch([1], [0], kv), DraftSpec(), [row], [1], sampling, [seed])
    wanted_BKV = sampling.probs(model.logits(model(tokens_T, positions_T, kv)).unsqueeze(0))
    assert probs_BKV is not None
    torch.testing.assert_close(probs_BKV, wanted_BKV, rtol=2e-5, atol=1e-7)
    assert drafted == draw(probs_BKV[:, 0], uniform_BK[:, 0]).unsqueeze(0).tolist()


@built
@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("variant", [*VARIANTS, *W8A8[:1], *W4A8[:1], *W4[:1]])
def test_a_lookup_changes_nothing_of_what_is_drafted(variant: str, data: st.DataObject) -> None:
    """Tokens, the distributions they were drawn from and all that is stored, bit for bit, however much is copied."""
    vocab, rows_n = data.draw(st.sampled_from([2, 3, 11])), data.draw(st.integers(1, 4))
    dtype = data.draw(st.sampled_from(DTYPES))
    model = executor_of(random_llama(data.draw(st.integers(0, 9)), vocab_size=vocab).to(dtype), variant)
    lengths = st.one_of(st.integers(1, 40), st.integers(1, 40), st.integers(250, 300))  # more than a tile
    prompts = [text(data.draw(lengths), b, vocab).tolist() for b in range(rows_n)]
    starts = [data.draw(st.integers(0, len(prompt) - 1)) for prompt in prompts]
    most = [data.draw(st.integers(1, 20)) for _ in prompts]
    stops = [frozenset(data.draw(st.sets(st.integers(0, vocab - 1), max_size=1))) for _ in prompts]
    sampling, seeds = None, [data.draw(st.integers(0, 2**62)) for _ in prompts]
    if data.draw(st.booleans()):
        sampling = BatchSampling.of([data.draw(st.one_of(st.just(GREEDY), sampled)) for _ in prompts])
    a, b = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    lookup = Lookup(max(a, b), min(a, b), data.draw(st.integers(1, 24)))
    learned = model._c_lookup(lookup)
    for number in range(len(learned.share)):
        learned.share[number] = data.draw(st.sampled_from([1.0, 1.0, 0.8, 0.3]))
    threads = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.integers(1, 2)))
    try:
        wanted = drafted_by(model, prompts, starts, most, None, stops, sampling, seeds)
        for _ in range(2):  # with what was learned of it as well
            got = drafted_by(model, prompts, starts, most, lookup, stops, sampling, seeds)
            assert got[0] == wanted[0]
            assert got[1] is wanted[1] is None or same_bits(got[1], wanted[1])  # type: ignore[arg-type]
            assert all(map(same_bits, got[2], wanted[2]))
    finally:
        torch.set_num_threads(threads)


def naive_lookup(tokens: list[int], longest: int, shortest: int) -> tuple[int, int] | None:
    """The token that followed the latest place of the longest n-gram that ends the text, and how many tokens before
    both are the same."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                while n < end and tokens[end - n - 1] == tokens[-n - 1]:
                    n += 1
                return tokens[end], n
    return None


@built
@settings(max_examples=40)
@given(data=st.data())
def test_what_is_looked_up_is_the_latest_place_of_the_longest_match(data: st.DataObject) -> None:
    """A lookup that copies nothing still sees, by the length of the match, whether the copy would have stood."""
    vocab, seed = data.draw(st.integers(2, 12)), data.draw(st.integers(0, 9))
    model = executor_of(random_llama(seed, vocab_size=vocab), VARIANTS[0])
    prompt = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=200))
    start = data.draw(st.integers(0, len(prompt) - 1))
    a, b = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    lookup = Lookup(max(a, b), min(a, b), 0)
    share = list(model._c_lookup(lookup).share)
    ((drafted,), _, _) = drafted_by(model, [prompt], [start], [9], lookup)
    for number, token in enumerate(drafted):
        if (found := naive_lookup(prompt + drafted[:number], max(a, b), min(a, b))) is not None:
            at = min(found[1], len(share)) - 1
            share[at] += 0.05 * ((found[0] == token) - share[at])
    assert list(model._c_lookup(lookup).share) == pytest.approx(share, abs=1e-6)


@built
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_repetition_is_drafted_in_one_forward(variant: str) -> None:
    """By copies of copies, where as many are thought to stand as are asked for."""
    model = executor_of(random_llama(4, vocab_size=11, layers=1), variant)
    ((rolled,), _, _) = drafted_by(model, [[1, 2, 3]], [0], [60], None)
    one, other = rolled[-2:]
    assert rolled[-20:] == [one, other] * 10 and one != other
    lookup = Lookup(4, 1, 7)
    ((drafted,), _, _) = drafted_by(model, [[1, 2, 3, *rolled[:-8]]], [50], [8], lookup)
    assert drafted == [one, other] * 4
    assert [number + 1 for number, time in enumerate(model._c_lookup(lookup).time) if time] == [5 + 7]


@built
def test_a_level_looks_up_by_itself_where_its_call_cannot() -> None:
    """A constrained row takes the n-gram index, which never heard of the rounds before."""
    model = executor_of(random_llama(4, vocab_size=11, layers=1), VARIANTS[0])
    level, twin = ready(SingleDraft(model, NGramDraft())), ready(SingleDraft(stepwise(model)))
    rows = [make_row([1, 2, 3]), make_row([1, 2, 3])]
    rows[1].params = SamplingParams(temperature=0.0, logit_bias={5: -1.0})
    for number in range(6):
        going = rows[: 1 + number // 2 % 2]
        mine, plain = (strategy.propose(going, [8] * len(going)).chains for strategy in (level, twin))
        assert mine == plain
        for row, tokens in zip(going, mine):
            row.tokens += [*tokens[: 3 + number], number]
        for strategy in (level, twin):
            strategy.commit(going)


@built
def test_what_a_row_draws_does_not_hang_on_the_rows_beside_it() -> None:
    """One of which keeps the level from drafting in one call."""
    model = executor_of(random_llama(4, vocab_size=11, layers=1), VARIANTS[0])
    drawn = SamplingParams(temperature=1.0)
    for seed in range(8):
        alone, beside = (make_row([1, 2, 3, 1, 2, 3], frozenset(), drawn, seed) for _ in range(2))
        other = make_row([4, 5], frozenset(), SamplingParams(temperature=0.0, logit_bias={5: -1.0}), 0)
        one, two = (ready(SingleDraft(model, NGramDraft())) for _ in range(2))
        mine, theirs = one.propose([alone], [8]), two.propose([beside, other], [8, 8])
        assert mine.chains[0] == theirs.chains[0]
        assert mine.probs_BKV is not None and theirs.probs_BKV is not None
        torch.testing.assert_close(theirs.probs_BKV[0], mine.probs_BKV[0], rtol=2e-5, atol=1e-7)


@built
@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.7, 2.0]), st.sampled_from([0, 3]), st.sampled_from([0.6, 1.0])), max_size=4
    ),
)
def test_what_sampling_keeps_does_not_hang_on_the_rows_beside_it(
    seed: int, beside: list[tuple[float, int, float]]
) -> None:
    """To the last bit, greedy rows among them."""
    every = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=0.01) for t, k, p in [(0.9, 0, 0.8), *beside]]
    logits_BJV = 3 * torch.randn(len(every), 2, 301, generator=torch.Generator().manual_seed(seed))
    together, alone = (
        HostDistribution(BatchSampling.of(every), logits_BJV)._find(),
        HostDistribution(BatchSampling.of(every[:1]), logits_BJV[:1])._find(),
    )
    for all_rows, one in zip(together, alone):
        assert all_rows is not None and one is not None and same_bits(all_rows[:1], one)


@built
def test_drafting_at_once_is_used_and_only_where_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    model = executor_of(random_llama(1), VARIANTS[0])
    honest = model.extend
    monkeypatch.setattr(model, "extend", lambda *args, **named: calls.append(1) or honest(*args, **named))
    row = make_row([1, 2, 3])

    def proposes(strategy: SingleDraft, row: Row) -> bool:
        calls.clear()
        strategy = ready(strategy)
        strategy.propose([row], [5])
        strategy.release(row)
        return bool(calls)

    assert proposes(SingleDraft(model), row)
    assert proposes(SingleDraft(model, confidence=0.1), row) and proposes(SingleDraft(model, reach=0.1), row)
    other = Row([1, 2, 3], 3, SamplingParams(), Exact(), seed=0, k=8, stop_ids=frozenset({4}))
    assert proposes(SingleDraft(model), other)
    assert proposes(SingleDraft(model, draft=NGramDraft()), other)
    assert not proposes(SingleDraft(model, draft=SuffixDraft()), other)
    assert not proposes(SingleDraft(model, draft=type("Own", (NGramDraft,), {})()), other)
    assert not proposes(SingleDraft(model, draft=NGramDraft(), policy=FLy()), row)
    for changed in ({"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"min_tokens": 9}):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **changed})  # type: ignore[arg-type]
        other = Row([1, 2, 3], 3, params, Exact(), seed=0, k=8, stop_ids=frozenset({4}))
        assert not model.looks_up([other]) and model.looks_up([row])
        assert not proposes(SingleDraft(model, draft=NGramDraft()), other)


@built
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_drafts_argmax_is_the_lowest_id_among_equals(variant: str) -> None:
    model = random_llama(2, vocab_size=70)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[torch.arange(70) % 35])  # every logit twice
    packed = executor_of(model, variant)
    (draft,) = ready(SingleDraft(packed)).propose([make_row([1, 2, 3])], [8]).tokens_BK.tolist()
    assert len(draft) == 8 and max(draft) < 35


@built
@pytest.mark.parametrize("draft", ["fly-draft", "ngram+fly-draft", "tree(fly-draft)"])
@pytest.mark.parametrize("k", [1, 7])
def test_exact_speculation_is_autoregression_bit_for_bit_in_bfloat16(draft: str, k: int) -> None:
    """Token for token with its log-probability, whatever proposes and in whatever batch."""
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    prompts = ["def add(a, b):", "Tom has 3 apples and", "x"]
    plain, fast = LLM("fly-target", device="cpu"), LLM("fly-target", draft, k=k, device="cpu")
    assert isinstance(plain.engine.runner.executor, CpuExecutor)
    assert plain.engine.runner.executor.dtype == torch.bfloat16
    alone = [plain.generate([prompt], params)[0] for prompt in prompts]
    for wanted, got in zip(alone, fast.generate(prompts, params)):
        assert got.token_ids == wanted.token_ids
        assert got.logprobs == wanted.logprobs
