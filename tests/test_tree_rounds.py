"""Rounds of trees in one call of the compiled kernels against one round a step, in which Python grows the trees and
tensors judge them: the same in all that is told of a row. Skipped as a whole where the library was not built."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.backends.cpu import available, why_not
from fly.cache import PagedKVCache
from fly.drafts import AdaptiveDraft, DraftStrategy, Eagle3Draft, TreeDraft
from fly.engine import Engine
from fly.policies import Exact, parse_policy
from fly.runtime.request import Sequence
from fly.runtime.runner import Runner
from tests import test_eagle, test_rounds
from tests.test_rounds import FOREVER, POLICIES, calls_of, take_steps, told

VARIANTS = [name for name in available() if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")

if VARIANTS:
    HEADED = test_eagle.target_on(VARIANTS[0])
    HEAD = test_eagle.head_on(test_eagle.make_head(12), VARIANTS[0])
RULES = [*POLICIES, parse_policy("exact | entropy(0.1) & window(1) & room(1)"), parse_policy("exact | ~room(2)")]


@st.composite
def makers(draw: st.DrawFn) -> tuple[object, ...]:
    """What an engine of one tree strategy is made of: kind, drafter, its shape, pages and their size."""
    size, tight = draw(st.integers(1, 6)), draw(st.sampled_from([False, False, True]))
    blocks = tuple(draw(st.integers(5, 60)) if tight else 500 for _ in range(2))
    k = draw(st.sampled_from([None, None, 2]))
    most = {"nodes": 12, "depth": 5, "width": 4}
    sizes: dict[str, object] = {name: draw(st.integers(1, size)) for name, size in most.items()}
    kind = draw(st.sampled_from(["model", "model", "head"]))
    return kind, draw(st.integers(0, 2)), {"k": k, **sizes}, blocks, size


def engine(kind: str, drafting: int, shape: dict[str, object], blocks: tuple[int, int], size: int) -> Engine:
    own = {**shape, "cache_tokens": blocks[1] * size, "block_size": size}
    target = HEADED if kind == "head" else test_rounds.TARGET
    strategy: DraftStrategy = (
        Eagle3Draft(HEAD, **own) if kind == "head" else TreeDraft(test_rounds.DRAFTS[drafting], **own)  # type: ignore[arg-type]
    )
    return Engine(Runner(target, PagedKVCache(target.config, blocks[0], size), control_ids=(3, 4)), strategy)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_trees_of_one_call_are_the_trees_of_as_many_steps(data: st.DataObject) -> None:
    """Whatever shapes, rules, temperatures, lengths and ends there are, and however full the caches are."""
    setting = data.draw(makers())
    all_cold, alone = data.draw(st.booleans()), data.draw(st.booleans())
    given_rows = []
    for _ in range(1 if alone else data.draw(st.integers(2, 3))):
        temperature = 0 if all_cold else data.draw(st.sampled_from([0, 0.5, 1.0, 2.0]))
        rules = RULES if alone else [Exact(), Exact(), *(rule for rule in RULES if rule is not POLICIES[-1])]
        prompt = data.draw(st.lists(st.integers(0, 22), min_size=1, max_size=9))
        params = SamplingParams(
            temperature=temperature,
            top_k=data.draw(st.sampled_from([0, 0, 3])),
            top_p=data.draw(st.sampled_from([1.0, 0.8])),
            max_tokens=data.draw(st.integers(1, 50)),
        )
        stops = frozenset(data.draw(st.sets(st.integers(0, 22), max_size=2)))
        seed, k = data.draw(st.integers(0, 2**62)), data.draw(st.integers(0, 6))
        given_rows.append(
            Sequence(prompt, len(prompt), params, data.draw(st.sampled_from(rules)), seed, k, stop_ids=stops)
        )
    stopped = None if data.draw(st.booleans()) else lambda row, token: row.generated == 17

    def decode(stretch: float) -> tuple[list[Sequence], int]:
        made, rows = engine(*setting), [row.sample(row.seed) for row in given_rows]
        made.stretch = stretch
        return rows, take_steps(made, rows, stopped)

    slow, many = decode(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fly.runtime.runner._EXTRA_TOKENS", data.draw(st.sampled_from([(1,), (30, 1), (128, 32, 8, 1)])))
        patch.setattr("fly.backends.cpu.rounds._MAX_SCORED", data.draw(st.sampled_from([1, 60, 4096])))
        patch.setattr("fly.backends.cpu.rounds._MAX_MISMATCHES", data.draw(st.sampled_from([1, 1024])))
        fast, few = decode(FOREVER)
    event(f"{setting[0]}, {len(slow)} rows, relaxed {any(row.stats.relaxed for row in slow)}, calls {few < many}")
    for one, other in zip(fast, slow, strict=True):
        assert one.stats.nats == pytest.approx(other.stats.nats, rel=1e-5, abs=1e-5)  # tensors round elsewhere
        one.stats.nats = other.stats.nats
    assert [told(row) for row in fast] == [told(row) for row in slow] and few <= many


def test_they_are_used_and_only_where_nothing_is_to_be_done_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)

    class Own(TreeDraft):
        pass

    def used(strategy: DraftStrategy, rule: str = "exact", target: object = None, **asked: object) -> bool:
        calls.clear()
        params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **asked})
        llm = LLM(test_rounds.TARGET if target is None else target, strategy, k=4)
        (output,) = llm.generate([[1, 2, 3]], params, policy=parse_policy(rule))
        assert output.token_ids and output.stats.accepted
        return bool(calls)

    near = test_rounds.DRAFTS[0]
    assert used(TreeDraft(near)) and used(TreeDraft(near, width=1)) and used(AdaptiveDraft(TreeDraft(near)))
    assert used(TreeDraft(near), rule="fly") and used(TreeDraft(near), temperature=0.8, top_p=0.9)
    assert used(TreeDraft(near), rule="fly & budget(0.1)")  # asked of Python, round by round
    assert not used(TreeDraft(near), rule="lossy(lenience=3)") and not used(Own(near))
    assert not used(TreeDraft(near), logprobs=1) and not used(TreeDraft(near), logit_bias={3: 1.0})
    assert used(Eagle3Draft(test_eagle.head_on(test_eagle.make_head(24), VARIANTS[0]), nodes=8), target=HEADED)
