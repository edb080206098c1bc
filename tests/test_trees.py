"""Trees: judged like chains along their paths, verified in one forward, committed without a trace."""

from __future__ import annotations

import random
from collections import abc

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams, Why
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft
from fly.drafts.base import pad_trees
from fly.drafts.tree import TreeDraft
from fly.ops import depths
from fly.policies import AcceptancePolicy, AgreeingWindow, EntropyGate, Exact, FLy, Room, verify
from fly.runner.request import Row
from fly.testing import ConformanceError, check_trees
from fly.types import Draft, Noise, Target
from tests.test_conformance import NoResidual
from tests.test_drafts import LARGE, SMALL, VOCAB, make_row
from tests.toys import caches, dense_logits, ready, run

trees = st.lists(st.integers(-1, 9), max_size=9).map(lambda raw: [min(p, i - 1) for i, p in enumerate(raw)])


# --- verdicts --------------------------------------------------------------------------------------------


def naive_walk(parents: list[int], tokens: list[int], logits: torch.Tensor, rule: FLy | None) -> tuple[list[int], int]:
    """At temperature 0, written out: go to the child that is the target's choice; where there is none, to the first
    child that FLy excuses along some path below it. Returns the path and the token that follows."""
    choice = logits.argmax(-1).tolist()
    probs = logits.softmax(-1)

    def right(node: int) -> bool:
        return tokens[node] == choice[parents[node] + 1]

    def excused(node: int) -> bool:
        if rule is None:
            return False
        top = sorted(probs[parents[node] + 1].tolist(), reverse=True)[:3]
        undecided = sum(-p * torch.tensor(p).log().item() for p in top if p > 0) >= rule.theta
        below = [[node]]
        found = False
        while below:
            path = below.pop()
            children = [n for n, p in enumerate(parents) if p == path[-1]]
            below += [[*path, n] for n in children]
            follow = path[1:]
            room = not rule.hold or len(follow) >= rule.hold
            found |= room and len(follow) >= rule.window and all(right(n) for n in follow[: rule.window])
        return undecided and found

    path: list[int] = []
    while True:
        at = path[-1] if path else -1
        children = [n for n, p in enumerate(parents) if p == at]
        standing = [n for n in children if right(n)] or [n for n in children if excused(n)]
        if not standing:
            return path, choice[at + 1]
        path.append(standing[0])


@given(st.lists(trees, min_size=1, max_size=3), st.integers(0, 10_000), st.sampled_from(["exact", "fly", "tight"]))
def test_a_greedy_verdict_is_the_walk_written_out(shapes: list[list[int]], seed: int, kind: str) -> None:
    rule = {"exact": None, "fly": FLy(theta=0.3, window=1, hold=1), "tight": FLy(theta=0.9, window=2, hold=0)}[kind]
    generator, rng, vocab = torch.Generator().manual_seed(seed), random.Random(seed), 5
    longest = max(map(len, shapes))
    logits = 2 * torch.randn(len(shapes), longest + 1, vocab, generator=generator)
    drafts = []
    for b, parents in enumerate(shapes):
        tokens = [rng.randrange(vocab) for _ in parents]
        for node, parent in enumerate(parents):
            if rng.random() < 0.6:  # mostly the target's choice, unless a sibling has it
                tokens[node] = int(logits[b, parent + 1].argmax())
        drafts.append((tokens, parents))
    draft = pad_trees(drafts)
    noise = Noise(torch.rand(len(shapes), longest, generator=generator), torch.rand(len(shapes), generator=generator))
    verdict = verify(rule or Exact(), Target(logits), draft, noise)
    for b, (tokens, parents) in enumerate(drafts):
        path, following = naive_walk(parents, tokens, logits[b], rule)
        event(f"accepted {len(path)}, relaxed {any(tokens[n] != logits[b, parents[n] + 1].argmax() for n in path)}")
        assert verdict.paths()[b] == path
        assert int(verdict.next_token_B[b]) == following
        for node, token in enumerate(tokens):
            matches = token == int(logits[b, parents[node] + 1].argmax())
            expected = (Why.MATCH if matches else Why.RELAXED) if node in path else Why.REJECTED
            assert int(verdict.why_BK[b, node]) == expected


def test_a_wrong_residual_shows_on_trees() -> None:
    with pytest.raises(ConformanceError, match="tree"):
        check_trees(NoResidual())


# --- in the engine ---------------------------------------------------------------------------------------


class RandomTrees(DraftStrategy):
    """Trees of any shape, partly of the target's own words, from a seed and the row alone."""

    spare = 12

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        drafts = []
        for row, most in zip(rows, max_len):
            rng = random.Random(f"{self.seed}/{row.tokens}")
            parents = [rng.randrange(-1, i) for i in range(rng.randrange(13))]
            levels = depths(parents)
            keep = [n for n in range(len(parents)) if levels[n] < most]
            number = {n: i for i, n in enumerate(keep)} | {-1: -1}
            parents = [number[parents[n]] for n in keep]
            tokens: list[int] = []
            for node, parent in enumerate(parents):
                before: list[int] = []
                at = parent
                while at >= 0:
                    before.insert(0, tokens[at])
                    at = parents[at]
                ranked = dense_logits(LARGE, row.tokens + before)[-1].argsort(descending=True).tolist()
                taken = {tokens[n] for n in range(node) if parents[n] == parent}
                tokens.append(next(t for t in ranked[rng.randrange(3) :] + ranked if t not in taken))
            drafts.append((tokens, parents))
        return pad_trees(drafts)


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


@settings(max_examples=25)
@given(st.lists(prompts, min_size=1, max_size=3), st.integers(0, 1000), st.integers(1, 9), st.integers(1, 24))
def test_greedy_text_with_trees_is_the_greedy_text(texts: list[list[int]], seed: int, k: int, tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, stop_token_ids=(3,))
    llm = LLM(LARGE, draft=RandomTrees(seed), k=k, cache=512, block_size=4)
    wanted = llm.generate(texts, params, k=0)
    got = llm.generate(texts, params)
    for a, b in zip(wanted, got, strict=True):
        assert b.token_ids == a.token_ids and b.finish_reason == a.finish_reason
        assert [t.target_choice for t in b.provenance] == a.token_ids
        assert b.stats.accepted == sum(t.why is Why.MATCH for t in b.provenance)
        event(f"tau {b.stats.tau:.0f}")
    assert llm.engine.runner.cache.allocator.num_free == llm.engine.runner.cache.allocator.num_blocks


def naive_text(prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy decoding without a cache or a draft, penalties written out."""
    text: list[int] = []
    while len(text) < params.max_tokens:
        logits = dense_logits(LARGE, prompt + text)[-1].clone()
        for v in range(VOCAB):
            if v in prompt + text:
                r = params.repetition_penalty
                logits[v] = logits[v] / r if logits[v] > 0 else logits[v] * r
            logits[v] -= params.frequency_penalty * text.count(v) + params.presence_penalty * (v in text)
            logits[v] += params.logit_bias.get(v, 0.0)
        text.append(int(logits.argmax()))
    return text


@settings(max_examples=20)
@given(
    st.lists(prompts, min_size=1, max_size=3),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.3, 1.5]),
    st.sampled_from([0.0, 0.4, -0.5]),
    st.sampled_from([1.0, 1.4]),
    st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 1.0]), max_size=3),
    st.sampled_from(["trees", "model", "ngram+model", "none"]),
)
def test_penalties_are_right_inside_a_speculated_block(
    texts: list[list[int]],
    seed: int,
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    kind: str,
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=16,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
    )
    strategy = {
        "trees": lambda: RandomTrees(seed),
        "model": lambda: SingleDraft(run(SMALL)),
        "ngram+model": lambda: CascadeDraft([NGramDraft(), SingleDraft(run(SMALL))]),
        "none": lambda: None,
    }[kind]()
    outs = LLM(LARGE, draft=strategy, k=6, cache=512).generate(texts, params)
    for text, out in zip(texts, outs):
        assert out.token_ids == naive_text(text, params)
        event(f"tau {out.stats.tau:.0f}")


@settings(max_examples=15)
@given(
    st.lists(prompts, min_size=2, max_size=3),
    st.integers(0, 1000),
    st.sampled_from(
        [Exact(), FLy(theta=0.2, window=1, hold=1), Exact() | EntropyGate(0.5) & AgreeingWindow(1) & Room(1)]
    ),
    st.sampled_from([0.0, 0.8]),
)
def test_a_row_with_trees_does_not_depend_on_the_batch(
    texts: list[list[int]], seed: int, policy: AcceptancePolicy, temperature: float
) -> None:
    params = [SamplingParams(temperature=temperature, max_tokens=14, seed=b, top_k=9) for b in range(len(texts))]
    llm = LLM(LARGE, draft=RandomTrees(seed), k=6, policy=policy, cache=512)
    together = llm.generate(texts, params)
    for text, p, out in zip(texts, params, together):
        alone = llm.generate([text], p)[0]
        assert alone.token_ids == out.token_ids
        assert [t.why for t in alone.provenance] == [t.why for t in out.provenance]


# --- strategies ------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(prompts, min_size=1, max_size=3), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_a_draft_models_tree_holds_its_likeliest_paths(texts: list[list[int]], most: list[int]) -> None:
    """Level by level from the dense model: the tree is the ``nodes`` likeliest of what the levels offered."""
    strategy = ready(TreeDraft(run(SMALL), nodes=7, depth=4, width=2))
    rows = [make_row(text, stop=(3,)) for text in texts]
    draft = strategy.propose(rows, most[: len(rows)])
    for b, row in enumerate(rows):
        limit = min(most[b], 4)
        paths: dict[tuple[int, ...], float] = {}
        frontier: list[tuple[int, ...]] = [()]
        for _ in range(limit):
            offered = []
            for path in frontier:
                log = dense_logits(SMALL, row.tokens + list(path))[-1].log_softmax(-1)
                for token in log.argsort(descending=True)[:2].tolist():
                    paths[(*path, token)] = paths.get(path, 0.0) + float(log[token])
                    offered.append((*path, token))
            frontier = sorted((path for path in offered if path[-1] != 3), key=lambda path: -paths[path])[:2]
        wanted = dict(sorted(paths.items(), key=lambda item: -item[1])[:7])
        n = int(draft.lengths_B[b])
        if not n:
            continue
        assert draft.parents_BK is not None
        tokens, parents = draft.tokens_BK[b, :n].tolist(), draft.parents_BK[b, :n].tolist()
        found: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        assert set(found) == set(wanted) and len(found) == len(wanted)
        strategy.release(row)
    (allocator,) = caches(strategy)
    assert allocator.num_free == allocator.num_blocks


def test_trees_leave_the_text_alone() -> None:
    strategy = TreeDraft(run(SMALL), nodes=9, depth=3)
    llm = LLM(LARGE, draft=strategy, k=6, cache=512, block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts = [[1, 2, 3], [4], [5, 6]]
    wanted = [out.token_ids for out in llm.generate(texts, params, k=0)]
    outs = llm.generate(texts, params)
    assert [out.token_ids for out in outs] == wanted
    assert sum(out.stats.accepted for out in outs) > 10
    for allocator in llm.scheduler.allocators:
        assert allocator.num_free == allocator.num_blocks


def test_what_is_told_of_a_trees_tokens_is_of_their_path() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, explain=True)
    llm = LLM(LARGE, draft=TreeDraft(run(SMALL), nodes=9, depth=3), k=6, cache=512, block_size=4)
    [out], [plain] = llm.generate([[1, 2, 3]], params), llm.generate([[1, 2, 3]], params, k=0)
    assert out.stats.accepted > 10 and out.logprobs is not None and plain.logprobs is not None
    for told, wanted in zip(out.logprobs, plain.logprobs):
        assert told == pytest.approx(wanted, abs=1e-4)
    for token, same in zip(out.provenance, plain.provenance):
        assert (token.id, token.target_choice) == (same.id, same.target_choice)
        assert (token.prob, token.choice_prob, token.entropy) == pytest.approx(
            (same.prob, same.choice_prob, same.entropy), abs=1e-4
        )
