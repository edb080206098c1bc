"""The step: speculation changes nothing but speed, ends are exact, counts add up, and nothing leaks."""

from __future__ import annotations

import itertools
import math
from collections import abc
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fly
from fly import LLM, SamplingParams
from fly.backends.torch import TorchExecutor
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft
from fly.drafts.base import pad
from fly.models import Llama, LlamaConfig
from fly.ops import common_prefix
from fly.policies import (
    AcceptancePolicy,
    AdditiveSlack,
    AgreeingWindow,
    EntropyGate,
    Exact,
    FLy,
    LossySampling,
    Room,
    verify,
)
from fly.policies.verification import decide
from fly.runner.executor import Batch, Executor, Scores
from fly.runner.request import Gate, Row
from fly.runner.sampling import BatchSampling
from fly.types import Draft, Noise, Target
from tests.toy_engine import (
    CONTEXT,
    FAR,
    NEAR,
    SIZES,
    STRATEGIES,
    TARGET,
    VOCAB,
    autoregression,
    check_counts,
    every_strategy,
    expected,
    make_llm,
    prompts,
    requests,
    stop_ids,
    whole,
)
from tests.toys import dense_logits, random_llama, run

# --- speculation is invisible ----------------------------------------------------------------------------


@every_strategy
@settings(max_examples=12)
@given(batch=requests, k=st.integers(1, 32), block_size=st.integers(1, 16))
def test_greedy_speculation_gives_the_autoregressive_output(
    name: str, batch: list[tuple[list[int], SamplingParams]], k: int, block_size: int
) -> None:
    llm = make_llm(name, k, block_size)
    outs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    for out, (prompt, params) in zip(outs, batch, strict=True):
        assert (out.token_ids, out.finish_reason) == expected(prompt, params)
        assert out.prompt_token_ids == prompt and out.text == ""
        check_counts(out, params, k)
        assert name != "none" or not out.stats.drafted
    assert whole(llm)


any_policy = st.sampled_from([Exact(), FLy(window=1, hold=1), FLy.paper(), LossySampling(3), Exact() | Room(2)])


@every_strategy
@settings(max_examples=12)
@given(
    batch=st.lists(
        st.tuples(
            prompts,
            st.builds(
                SamplingParams,
                temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
                top_k=st.sampled_from([0, 5]),
                max_tokens=st.integers(0, 24),
                stop_token_ids=stop_ids,
                seed=st.integers(0, 2**62),
                logprobs=st.sampled_from([None, 2]),
            ),
            any_policy,
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=5,
    ),
    data=st.data(),
)
def test_rows_of_all_kinds_share_a_batch(
    name: str, batch: list[tuple[list[int], SamplingParams, AcceptancePolicy, int]], data: st.DataObject
) -> None:
    """Policy, K, temperature and length of its own for each row: none of them matters to another row."""
    llm = make_llm(name)
    ids, params, policies, ks = (list(column) for column in zip(*batch))
    outs = llm.generate(ids, params, policy=policies, k=ks)
    for out, prompt, param, policy, k in zip(outs, ids, params, policies, ks, strict=True):
        if param.temperature == 0 and (policy == Exact() or k == 0):
            assert (out.token_ids, out.finish_reason) == expected(prompt, param)
        check_counts(out, param, k)
        assert out.guarantee is policy.guarantee
    alone = data.draw(st.integers(0, len(batch) - 1))
    (again,) = llm.generate([ids[alone]], params[alone], policy=policies[alone], k=ks[alone])
    assert again.token_ids == outs[alone].token_ids
    assert again.provenance == outs[alone].provenance
    assert whole(llm)


@every_strategy
@pytest.mark.parametrize("k", [0, 1, 6])
def test_the_seed_decides(name: str, k: int) -> None:
    llm = make_llm(name, k)
    params = [SamplingParams(temperature=1.0, max_tokens=24, seed=seed) for seed in range(6)]
    prompt = [3, 1, 4, 1, 5]
    outs = [out.token_ids for out in llm.generate([prompt] * 6, params)]
    assert outs == [out.token_ids for p in params for out in make_llm(name, k).generate([prompt], p)]
    assert all(a != b for a, b in itertools.combinations(outs, 2))
    fresh = [out.token_ids for out in llm.generate([prompt] * 2, SamplingParams(max_tokens=24))]
    assert fresh[0] != fresh[1]  # no seed is a seed of one's own


def test_speculation_does_speculate() -> None:
    """The strategies of these tests are accepted often enough, and rejected often enough, to test anything."""
    prompts = [[seed, 2 * seed % VOCAB, 7] for seed in range(12)]
    params = SamplingParams(temperature=0, max_tokens=40)
    taus = {}
    for name in STRATEGIES:
        stats = sum((out.stats for out in make_llm(name, 6).generate(prompts, params)), start=fly.Stats())
        taus[name] = stats.tau
        if name not in ("none", "the target itself"):
            assert 0 < stats.accepted < stats.drafted, name
    assert taus["none"] == 1 and taus["the target itself"] > 6, taus
    assert all(taus[name] > 1.3 for name in ("n-gram", "a near model", "two levels", "three levels")), taus


# --- ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", range(12))
def test_output_ends_at_a_stop_id_inside_a_kept_block(temperature: float, at: int) -> None:
    """The target drafts for itself, so that whole blocks stand; nothing behind the end is kept or counted."""
    prompt = [5, 2, 9]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=30, logprobs=1)
    llm = make_llm("the target itself", 5)
    (free,) = llm.generate([prompt], params)
    stop = free.token_ids[at]
    first = free.token_ids.index(stop)
    (out,) = llm.generate([prompt], params.model_copy(update={"stop_token_ids": (stop,)}))
    assert out.token_ids == free.token_ids[: first + 1] and out.finish_reason == "stop"
    check_counts(out, params, 5)
    (short,) = llm.generate([prompt], params.model_copy(update={"max_tokens": at + 1}))
    assert len(short.token_ids) == at + 1 and short.finish_reason == "length"
    if temperature == 0:
        assert short.token_ids == free.token_ids[: at + 1]
    check_counts(short, params, 5)
    assert whole(llm)


def test_a_stop_id_wins_over_the_last_token() -> None:
    prompt = [5, 2, 9]
    last = autoregression(tuple(prompt), 8)[-1]
    first = autoregression(tuple(prompt), 8).index(last)
    params = SamplingParams(temperature=0, max_tokens=first + 1, stop_token_ids=(last,))
    assert make_llm("the target itself").generate([prompt], params)[0].finish_reason == "stop"


@every_strategy
@settings(max_examples=12)
@given(batch=st.lists(st.tuples(prompts, st.integers(0, 12), stop_ids), min_size=1, max_size=3), k=st.integers(1, 9))
def test_min_tokens_bans_the_same_ends_with_and_without_speculation(
    name: str, batch: list[tuple[list[int], int, tuple[int, ...]]], k: int
) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=20, min_tokens=least, stop_token_ids=stop) for _, least, stop in batch
    ]
    ids = [prompt for prompt, _, _ in batch]
    for out, prompt, p in zip(make_llm(name, k).generate(ids, params), ids, params):
        wanted: list[int] = []
        while len(wanted) < 20 and not (wanted and wanted[-1] in p.stop_token_ids):
            logits = dense_logits(TARGET, prompt + wanted)[-1].clone()
            if len(wanted) < p.min_tokens:
                logits[list(p.stop_token_ids)] = -math.inf
            wanted.append(int(logits.argmax()))
        assert out.token_ids == wanted
        check_counts(out, p, k)


@pytest.mark.parametrize("policy", [FLy(theta=0, window=0, hold=0), Exact() | Room(0), LossySampling(1e9)])
@pytest.mark.parametrize("name", ["n-gram", "the target itself"])
def test_no_relaxation_ends_before_min_tokens(name: str, policy: AcceptancePolicy) -> None:
    prompt = [4, 8, 15, 4, 8, 15, 4, 8]
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=15, stop_token_ids=(4, 8, 15))
    (out,) = make_llm(name, 6).generate([prompt], params, policy=policy)
    assert len(out.token_ids) >= 15 and not {4, 8, 15} & set(out.token_ids[:15])


@every_strategy
@pytest.mark.parametrize("prompt", [[7], [1, 2, 3]])
def test_no_tokens_one_token_and_the_shortest_prompt(name: str, prompt: list[int]) -> None:
    llm = make_llm(name, 5)
    for most in (0, 1, 2):
        params = SamplingParams(temperature=0, max_tokens=most, logprobs=1)
        (out,) = llm.generate([prompt], params)
        assert (out.token_ids, out.finish_reason) == (list(autoregression(tuple(prompt), most)), "length")
        check_counts(out, params, 5)
    assert whole(llm) and llm.generate([]) == []


@every_strategy
@pytest.mark.parametrize("length", [CONTEXT - 20, CONTEXT - 2, CONTEXT - 1])
def test_output_ends_with_the_targets_context(name: str, length: int) -> None:
    prompt = [i * i % VOCAB for i in range(length)]
    params = SamplingParams(temperature=0, max_tokens=99)
    (out,) = make_llm(name, 7).generate([prompt], params)
    assert (out.token_ids, out.finish_reason) == expected(prompt, params)
    assert len(prompt) + len(out.token_ids) == CONTEXT and out.finish_reason == "length"
    check_counts(out, params, 7)


@pytest.mark.parametrize("below", [False, True])
def test_a_draft_with_a_shorter_context_falls_silent(below: bool) -> None:
    sizes = {**SIZES, "max_positions": 24}
    short = SingleDraft(run(random_llama(0, **sizes)))  # the target's own weights
    llm = LLM(TARGET, CascadeDraft([short, SingleDraft(run(NEAR))]) if below else short, k=6)
    prompts = [[1, 2, 3], list(range(20)), [i % 7 for i in range(40)]]
    params = SamplingParams(temperature=0, max_tokens=40)
    outs = llm.generate(prompts, params)
    for out, prompt in zip(outs, prompts):
        assert (out.token_ids, out.finish_reason) == expected(prompt, params)
        check_counts(out, params, 6)
    assert outs[0].stats.accepted and (below or not outs[2].stats.drafted)
    assert whole(llm)


# --- records ---------------------------------------------------------------------------------------------


@every_strategy
@settings(max_examples=8)
@given(
    batch=st.lists(prompts, min_size=1, max_size=3), temperature=st.sampled_from([0.0, 0.8]), most=st.integers(0, 40)
)
def test_logprobs_are_the_targets_own(name: str, batch: list[list[int]], temperature: float, most: int) -> None:
    params = SamplingParams(temperature=temperature, top_k=9, seed=3, max_tokens=14, logprobs=most)
    for out in make_llm(name, 5).generate(batch, params):
        assert out.logprobs is not None
        text = out.prompt_token_ids + out.token_ids
        wanted = dense_logits(TARGET, text)[len(out.prompt_token_ids) - 1 : -1].log_softmax(-1)
        for token, entry, log_V in zip(out.token_ids, out.logprobs, wanted, strict=True):
            assert token in entry and len(entry) in (min(most, VOCAB), min(most, VOCAB) + 1)
            for other, value in entry.items():
                assert value == pytest.approx(float(log_V[other]), abs=1e-4)
            top = list(entry.values())[: min(most, VOCAB)]
            assert top == pytest.approx(log_V.sort(descending=True).values[: len(top)].tolist(), abs=1e-4)
        check_counts(out, params, 5)


def test_relaxed_tokens_are_recorded() -> None:
    """A wide open gate relaxes much: every such token names its clauses, and the gates count what was asked."""
    params = SamplingParams(temperature=0, max_tokens=60)
    policy = FLy(theta=0.2, window=1, hold=1)
    outs = make_llm("a near model", 8).generate([[i, 3, i] for i in range(8)], params, policy=policy)
    stats = sum((out.stats for out in outs), start=fly.Stats())
    assert stats.relaxed > 10
    assert [name.split("(")[0] for name in stats.gates] == ["entropy", "window", "room", "~control"]
    names = set(stats.gates)
    for out in outs:
        check_counts(out, params, 8)
        for token in out.provenance:
            assert token.clause is None or set(token.clause.split(" & ")) == names
    gates = stats.gates.values()
    (asked,) = {gate.asked for gate in gates}
    assert asked > min(gate.passed for gate in gates)
    for gate in gates:  # in a conjunction every clause decides what stands, and each fall has at most one culprit
        assert gate.excused == stats.relaxed
        assert gate.refused <= gate.asked - gate.passed
    assert 0 < sum(gate.refused for gate in gates) <= asked - stats.relaxed


@given(st.lists(st.booleans(), min_size=3, max_size=3))
def test_a_clause_decides_where_another_answer_would_change_the_outcome(said: list[bool]) -> None:
    gate, window, room = EntropyGate(0.3), AgreeingWindow(2), Room(3)
    held = dict(zip([gate.label, window.label, room.label], said))
    stats = fly.Stats()
    rule = (gate & window) | ~(gate | room)
    stats.count_gates(held, *rule.deciding(held))

    def outcome(g: bool, w: bool, r: bool) -> bool:
        return (g and w) or not (g or r)

    assert rule.holds_given(held) == outcome(*said)
    for number, (name, passed) in enumerate(held.items()):
        flipped = [not s if n == number else s for n, s in enumerate(said)]
        decided = outcome(*said) != outcome(*flipped)
        assert stats.gates[name] == Gate(1, passed, decided and outcome(*said), decided and not outcome(*said))


def test_stats_add_up() -> None:
    outs = make_llm("a near model", 4).generate(
        [[1], [2], [3]], SamplingParams(temperature=0, max_tokens=9), policy=FLy()
    )
    total = sum((out.stats for out in outs), start=fly.Stats())
    for name in ("prompt_tokens", "generated", "rounds", "emitted", "drafted", "accepted", "relaxed"):
        assert getattr(total, name) == sum(getattr(out.stats, name) for out in outs)
    assert total.tau == total.emitted / total.rounds


# --- room, errors, leaks ---------------------------------------------------------------------------------


@every_strategy
@settings(max_examples=8)
@given(batch=requests, pages=st.integers(0, 6), block_size=st.integers(1, 7))
def test_a_small_pool_makes_rows_wait_and_changes_nothing(
    name: str, batch: list[tuple[list[int], SamplingParams]], pages: int, block_size: int
) -> None:
    """The cache holds the largest request and little more."""
    most = max(len(prompt) + params.max_tokens for prompt, params in batch)
    llm = make_llm(name, 5, block_size, cache=most + pages * block_size)
    outs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    for out, (prompt, params) in zip(outs, batch, strict=True):
        assert (out.token_ids, out.finish_reason) == expected(prompt, params)
    assert whole(llm)


def test_a_small_draft_pool_makes_rows_wait_too() -> None:
    llm = LLM(
        TARGET, CascadeDraft([SingleDraft(run(FAR), cache_tokens=40), SingleDraft(run(NEAR), cache_tokens=48)]), k=6
    )
    params = SamplingParams(temperature=0, max_tokens=20)
    prompts = [[i, i + 1, i] for i in range(5)]
    for out, prompt in zip(llm.generate(prompts, params), prompts):
        assert out.token_ids == expected(prompt, params)[0]
    with pytest.raises(ValueError, match="cache"):
        llm.generate([[1] * 30], params)
    assert whole(llm)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([], "empty"),
        ([VOCAB], str(VOCAB)),
        ([1, -1], "-1"),
        ([1] * CONTEXT, str(CONTEXT)),
        ([1] * (CONTEXT + 5), str(CONTEXT + 5)),
        ([1] * 60, "cache"),
        ("text", "tokenizer"),
    ],
)
def test_a_bad_prompt_runs_nothing(bad: list[int], words: str) -> None:
    calls: list[int] = []

    class Watched(NGramDraft):
        def propose(self, rows: object, max_len: object) -> Draft:
            calls.append(1)
            return super().propose(rows, max_len)  # type: ignore[arg-type]

    llm = LLM(TARGET, Watched(), cache=64)
    params = SamplingParams(temperature=0, max_tokens=10)
    with pytest.raises(ValueError, match=words):
        llm.generate([[1, 2], bad, [3]], params)
    assert not calls and whole(llm)
    assert llm.generate([[1, 2]], params)[0].token_ids == expected([1, 2], params)[0]


# --- the distribution of the output, end to end -------------------------------------------------------------------


class Table(Executor):
    """A toy executor that can only score: the distribution of the next token depends on the last one alone."""

    def __init__(self, logits_VV: Tensor) -> None:
        self.table = logits_VV
        self.config = LlamaConfig(
            vocab_size=len(logits_VV), hidden_size=2, intermediate_size=1, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, head_dim=2, max_position_embeddings=32,
        )  # fmt: skip
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None) -> Scores:
        tokens_T = torch.tensor(batch.tokens)
        return Scores(self.table[tokens_T if places is None else tokens_T[list(places)]])


def surprise(policy: AcceptancePolicy, strategy: DraftStrategy, table: Tensor) -> float:
    """Distance of 2000 completions of four tokens from the target's distribution, in deviations of the chi-square
    distribution."""
    vocab, length, rounds = len(table), 4, 10
    llm = LLM(Table(table), strategy, policy, k=2, cache=10_000, block_size=8)
    counts = torch.zeros([vocab] * length)
    for batch in range(rounds):
        params = [SamplingParams(temperature=1, max_tokens=length, seed=batch * 200 + i) for i in range(200)]
        for out in llm.generate([[0]] * 200, params):
            counts[tuple(out.token_ids)] += 1
    distribution = table.softmax(-1)
    joint = distribution[0]
    for _ in range(length - 1):
        joint = joint.unsqueeze(-1) * distribution
    wanted = joint * counts.sum()
    assert wanted.min() > 3
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    freedom = vocab**length - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_sampled_completions_follow_the_targets_distribution() -> None:
    g = torch.Generator().manual_seed(3)
    table, other, third = (0.4 * torch.randn(3, 3, generator=g) for _ in range(3))

    def strategies() -> list[DraftStrategy]:
        small, large = SingleDraft(Table(third), cache_tokens=10_000), SingleDraft(Table(other), cache_tokens=10_000)
        return [NGramDraft(), SingleDraft(Table(other), cache_tokens=10_000), CascadeDraft([small, large])]

    for strategy in strategies():
        assert abs(surprise(Exact(), strategy, table)) < 4, strategy
    assert surprise(LossySampling(2), strategies()[1], table) > 8  # the yardstick sees a lossy rule


# --- decisions -------------------------------------------------------------------------------------------


def test_a_rule_that_tosses_coins_tosses_them_at_temperature_0_too() -> None:
    """And the same ones alone as beside a row that samples."""
    decide_rows = TorchExecutor(TARGET).decide
    logits_BJV = torch.zeros(1, 2, 5)
    logits_BJV[..., 3] = 9.0
    stood = 0
    for seed in range(400):
        row = Row([1], 1, SamplingParams(temperature=0.0), AdditiveSlack(eps=0.25), seed=seed, k=1)
        other = Row([1], 1, SamplingParams(temperature=1.0), AdditiveSlack(eps=0.25), seed=7, k=1)
        draft = Draft(torch.tensor([[2]]), torch.tensor([1]))
        (alone,) = decide_rows([row], Target(logits_BJV), draft)
        distribution = BatchSampling.of([row.params, other.params]).on(logits_BJV.expand(2, -1, -1))
        both = Target(logits_BJV.expand(2, -1, -1), distribution, greedy_B=torch.tensor([True, False]))
        beside, _ = decide_rows([row, other], both, Draft(torch.tensor([[2], [2]]), torch.tensor([1, 1])))
        assert len(alone.path) == len(beside.path)
        stood += len(alone.path)
    assert 70 < stood < 130


@given(st.integers(0, 700), st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_a_common_prefix_is_found_wherever_it_ends(alike: int, more: int, others: int, differ: bool) -> None:
    a, b = [1] * alike + [2] * more, [1] * alike + [3 if differ else 2] * others
    naive = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == common_prefix(b, a) == naive


@given(st.integers(0, 999), st.booleans())
def test_what_a_relaxed_token_costs_is_its_surprise(seed: int, elsewhere: bool) -> None:
    """For a plain tensor on the CPU and for any other."""

    class Shards(Tensor):
        pass

    generator = torch.Generator().manual_seed(seed)
    logits_BJV = 4 * torch.randn(3, 5, 37, generator=generator)
    tokens = [(2, 0, 5), (0, 4, 36), (2, 3, int(logits_BJV[2, 3].argmax()))]
    wanted = [-float(logits_BJV[b, at].log_softmax(-1)[token]) for b, at, token in tokens]
    target = Target(logits_BJV.as_subclass(Shards) if elsewhere else logits_BJV)
    assert target.nats_of(tokens) == pytest.approx(wanted, abs=1e-5)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3))
def test_a_draft_of_lists_is_the_draft_of_its_tensors(chains: list[list[int]]) -> None:
    listed, longest = Draft.of(chains), max(map(len, chains), default=0)
    padded = [[*chain, *[0] * (longest - len(chain))] for chain in chains]
    plain = Draft(torch.tensor(padded).long().view(len(chains), longest), torch.tensor([*map(len, chains)]).long())
    assert listed.shape == plain.shape == (len(chains), longest)
    assert listed.chains == plain.chains and listed.trees is None
    for made in (listed, listed.to(torch.device("cpu")), replace(listed, parents_BK=None)):
        assert torch.equal(made.tokens_BK, plain.tokens_BK) and torch.equal(made.lengths_B, plain.lengths_B)
        assert torch.equal(made.mask_BK(), plain.mask_BK()) and made.tokens_BK.dtype == torch.int64
    changed = replace(listed, tokens_BK=plain.tokens_BK + 1)
    assert type(changed) is Draft and torch.equal(changed.tokens_BK, plain.tokens_BK + 1)
    assert pad(chains).chains == chains and all(a is not b for a, b in zip(pad(chains).chains, chains))


def test_a_verdict_without_coins_is_for_rules_that_need_none() -> None:
    logits_BKV = torch.randn(1, 3, 7, generator=torch.Generator().manual_seed(0))
    first, second = logits_BKV[0, :2].argmax(-1).tolist()
    zeros = Noise(torch.zeros(1, 2), torch.zeros(1))
    chain, tree = (
        Draft.of([[first, second]]),
        Draft(torch.tensor([[first, second]]), torch.tensor([2]), parents_BK=torch.tensor([[-1, 0]])),
    )
    for draft in (chain, tree):
        made = [decide(Exact(), Target(logits_BKV), draft, noise) for noise in (None, zeros)]
        assert made[0] == made[1] and list(made[0][0].path) == [0, 1]
    with pytest.raises(ValueError, match="needs coins"):
        verify(Exact(), Target(logits_BKV, logits_BKV.softmax(-1)), chain, None)


def test_a_rule_that_cannot_be_hashed_decides_like_any_other() -> None:
    @dataclass(frozen=True)
    class Listed(Exact):
        name = "listed"
        numbers: list[int] = field(default_factory=lambda: [1, 2])

    params = SamplingParams(temperature=0, max_tokens=20)
    llm = make_llm("a near model")
    for out, prompt in zip(llm.generate([[1, 2], [3]], params, policy=Listed()), ([1, 2], [3])):
        assert out.token_ids == expected(prompt, params)[0]


def test_an_executor_that_can_only_score_is_enough() -> None:
    """For every strategy, beside the executors of this backend: the same texts."""

    class ScoreOnly(Executor):
        def __init__(self, model: Llama) -> None:
            self.inner = TorchExecutor(model)
            self.config, self.device, self.dtype = model.config, self.inner.device, self.inner.dtype

        def score(self, batch: Batch, places: abc.Sequence[int] | None = None) -> Scores:
            return self.inner.score(batch, places)

    params = [SamplingParams(temperature=t, max_tokens=24, seed=5) for t in (0.0, 0.0, 1.0)]
    prompts = [[1, 2, 3], [7, 7, 7, 7], [9]]
    for name in STRATEGIES:
        wanted = make_llm(name).generate(prompts, params, policy=FLy(window=1, hold=1))
        plain = {"none": lambda: None, "n-gram": NGramDraft, "a near model": lambda: SingleDraft(ScoreOnly(NEAR))}
        strategy = plain.get(name, STRATEGIES[name])()
        llm = LLM(ScoreOnly(TARGET), strategy, k=4)
        found = llm.generate(prompts, params, policy=FLy(window=1, hold=1))
        assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
        assert [out.provenance for out in found] == [out.provenance for out in wanted]
