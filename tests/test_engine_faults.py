"""A policy or a strategy that fails, or does what it must not, leaves rows and caches as they were."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fly import LLM, SamplingParams
from fly.cache import OutOfBlocks, PagedKVCache
from fly.drafts import CascadeDraft, DraftSetup, DraftStrategy, NGramDraft, SingleDraft
from fly.drafts.limits import check_draft
from fly.engine import Engine
from fly.policies import (
    Exact,
)
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import Draft, Target
from tests.toy_engine import (
    NEAR,
    STRATEGIES,
    TARGET,
    check_counts,
    every_strategy,
    expected,
    make_llm,
    whole,
)
from tests.toys import caches, run


@dataclass(frozen=True)
class Fragile(Exact):
    """Fails once a row has so many tokens behind it."""

    after: int = 6

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        if int(target.generated_B.max()) >= self.after:
            raise RuntimeError("the policy broke")
        return super().accept_probs(target, draft)


class Breaking(DraftStrategy):
    """Fails at one of its calls, before or after the strategy it wraps has done its work."""

    def __init__(self, inner: DraftStrategy, method: str, call: int, late: bool) -> None:
        self.inner, self.method, self.left, self.late = inner, method, call, late

    def attach(self, setup: DraftSetup) -> None:
        self.inner = setup.attach(self.inner)
        self.vocab_size, self.context = self.inner.vocab_size, self.inner.context

    def _do(self, method: str, *args: object) -> object:
        self.left -= method == self.method
        breaks = method == self.method and self.left == 0
        if breaks and not self.late:
            raise RuntimeError("the strategy broke")
        result = getattr(self.inner, method)(*args)
        if breaks:
            raise RuntimeError("the strategy broke")
        return result

    def propose(self, rows: object, max_len: object) -> Draft:  # type: ignore[override]
        return self._do("propose", rows, max_len)  # type: ignore[return-value]

    def commit(self, rows: object) -> None:  # type: ignore[override]
        self._do("commit", rows)

    def release(self, row: Row) -> None:
        self.inner.release(row)


PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


@every_strategy
def test_a_failing_policy_leaves_the_caches_whole(name: str) -> None:
    llm = make_llm(name, 3)
    params = SamplingParams(temperature=0, max_tokens=20)
    if llm.draft is not None:  # a rule that has nothing to judge is not asked
        with pytest.warns(RuntimeWarning, match="alone"), pytest.raises(RuntimeError, match="policy broke"):
            llm.generate(PROMPTS, params, policy=[Exact(), Fragile(), Exact(), Exact()])
    assert whole(llm)
    assert [out.token_ids for out in llm.generate(PROMPTS, params)] == [expected(p, params)[0] for p in PROMPTS]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("method", "call"), [("propose", 1), ("propose", 3), ("commit", 1), ("commit", 3)])
@pytest.mark.parametrize("name", ["n-gram", "a near model", "three levels"])
def test_a_failing_strategy_leaves_the_caches_whole(name: str, method: str, call: int, late: bool) -> None:
    inner = STRATEGIES[name]()
    assert inner is not None
    llm = LLM(TARGET, Breaking(inner, method, call, late), k=3)
    params = SamplingParams(temperature=0, max_tokens=20)
    with pytest.raises(RuntimeError, match="strategy broke"):
        llm.generate(PROMPTS[:1], params)
    assert whole(llm)
    assert isinstance(llm.draft, Breaking)
    llm.draft.left = call
    with pytest.warns(RuntimeWarning, match="strategy broke"):  # in a batch, each goes on alone
        assert [out.token_ids for out in llm.generate(PROMPTS, params)] == [expected(p, params)[0] for p in PROMPTS]
    assert whole(llm)
    assert [out.token_ids for out in llm.generate(PROMPTS, params)] == [expected(p, params)[0] for p in PROMPTS]


def engine_row(prompt: list[int], most: int = 30, k: int = 5) -> Row:
    return Row(list(prompt), len(prompt), SamplingParams(temperature=0, max_tokens=most), Exact(), 0, k)


@pytest.mark.parametrize("broken", ["target", "draft", "policy"])
@pytest.mark.parametrize("name", ["n-gram", "a near model", "three levels"])
def test_a_step_that_fails_can_be_taken_again(name: str, broken: str) -> None:
    """Rows and caches are as they were; with room, or without the culprit, all go on as if nothing had been."""
    strategy = STRATEGIES[name]()
    if broken == "draft":
        strategy = CascadeDraft([NGramDraft(), SingleDraft(run(NEAR), cache_tokens=44, block_size=2)])
    runner = Runner(run(TARGET), PagedKVCache(TARGET.config, 22 if broken == "target" else 999, 2))
    engine = Engine(runner, strategy)
    rows = [engine_row(prompt) for prompt in PROMPTS[:2]]
    if broken == "policy":
        rows[1].policy = Fragile(after=9)
    allocators = [runner.cache.allocator, *(caches(strategy) if strategy else [])]
    failures = 0
    for _ in range(60):
        before = [(list(row.tokens), list(row.provenance), row.stats.rounds) for row in rows]
        held = [{s: a.length(s) for s in a.sequences()} for a in allocators]
        try:
            engine.step(rows)
        except (OutOfBlocks, RuntimeError):
            assert before == [(row.tokens, row.provenance, row.stats.rounds) for row in rows]
            now = [{s: a.length(s) for s in a.sequences()} for a in allocators]
            for was, held_now in zip(held, now):
                assert {s: n for s, n in held_now.items() if n} == {s: n for s, n in was.items() if n}
            failures += 1
            if failures == 2:  # and the same again, from the very same state
                break
    assert failures == 2
    rows[1].policy = Exact()
    engine.release(rows[1])
    while not rows[0].finish_reason:
        engine.step(rows[:1])
    assert rows[0].tokens == PROMPTS[0] + expected(PROMPTS[0], rows[0].params)[0]
    while not rows[1].finish_reason and broken == "policy":
        engine.step(rows[1:])
    if broken == "policy":
        assert rows[1].tokens == PROMPTS[1] + expected(PROMPTS[1], rows[1].params)[0]
    for row in rows:
        engine.release(row)
    assert all(a.num_free == a.num_blocks for a in allocators)


@pytest.mark.filterwarnings("ignore:a step failed")
@pytest.mark.parametrize("count", [1, 3])
def test_a_strategy_that_changes_a_row_is_refused(count: int) -> None:
    """The text would go on from tokens that nobody emitted; what others ask for afterwards is as it was."""

    class Changes(NGramDraft):
        def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
            if any(row.params.max_tokens == 7 for row in rows):
                for row in rows:
                    row.tokens.append(3)
            return super().propose(rows, max_len)

    llm = LLM(TARGET, Changes(), k=4)
    with pytest.raises(ValueError, match="Changes changed the tokens of a row"):
        llm.generate([[1, 2, 1, 2]] * count, temperature=0, max_tokens=7)
    params = SamplingParams(temperature=0, max_tokens=8)
    assert llm.generate([[1, 2, 1, 2]], params)[0].token_ids == expected([1, 2, 1, 2], params)[0]


def test_a_tree_with_fewer_parents_than_tokens_is_refused() -> None:
    draft = replace(Draft.of([[1, 2, 3], [1, 2]]), parents_BK=torch.tensor([[-1, 0], [-1, 0]]))
    with pytest.raises(ValueError, match="Uneven proposed 3 tokens, with a tree of 2 parents"):
        check_draft(draft, [4, 4], 17, "Uneven")


def test_proposals_padded_to_any_width_are_taken() -> None:
    """A strategy may pad wider than its longest row."""

    class Wide(NGramDraft):
        def propose(self, rows: object, max_len: object) -> Draft:
            draft = super().propose(rows, max_len)  # type: ignore[arg-type]
            return Draft(torch.nn.functional.pad(draft.tokens_BK, (0, 3), value=5), draft.lengths_B)

    params = SamplingParams(temperature=0, max_tokens=30)
    prompts = [[1, 2, 1, 2, 1], [3, 4], [5, 5, 5]]
    for out, prompt in zip(LLM(TARGET, Wide(), k=4).generate(prompts, params), prompts):
        assert out.token_ids == expected(prompt, params)[0]
        check_counts(out, params, 4)
