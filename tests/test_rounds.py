"""Several rounds in one call of the compiled kernels against one round a step: the same in all that is told of a row.

Skipped as a whole where the library was not built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly import LLM, SamplingParams
from fly.cache import OutOfBlocks, PagedKVCache
from fly.drafts import AdaptiveDraft, CascadeDraft, DraftStrategy, NGramDraft, SingleDraft, SuffixDraft
from fly.engine import Engine, Runner
from fly.kernels import CompiledLlama, available, why_not
from fly.kernels.llama import Ran
from fly.policies import AcceptancePolicy, AgreeingWindow, Block, Condition, EntropyGate, Exact, parse_policy
from fly.types import Sequence, Why
from tests.test_drafts import perturbed
from tests.toys import random_llama

VARIANTS = [name for name in available() if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")

VOCAB, CONTEXT = 23, 128
SIZES = {"vocab_size": VOCAB, "hidden": 16, "heads": 2, "kv_heads": 1, "layers": 1, "max_positions": CONTEXT}
PLAIN = random_llama(0, **SIZES)
if VARIANTS:
    TARGET = CompiledLlama(PLAIN, VARIANTS[0])
    DRAFTS = [
        CompiledLlama(perturbed(PLAIN, 0.05), VARIANTS[0]),
        CompiledLlama(random_llama(5, **SIZES), VARIANTS[0]),
        CompiledLlama(random_llama(0, **{**SIZES, "max_positions": 30}), VARIANTS[0]),  # the target, for short texts
    ]
POLICIES = [
    Exact(),
    parse_policy("fly(theta=0.1, window=2)"),
    Exact() | EntropyGate(0.4),
    Exact() | EntropyGate(0.4) & AgreeingWindow(1),
    parse_policy("(exact | entropy(0.2)) & after(6)"),
    parse_policy("lossy(lenience=3)"),
]
FOREVER = 1e6


def engine(
    drafting: int | None, lookup: bool, most: int | None, blocks: tuple[int, int], size: int, **stop: float
) -> Engine:
    runner = Runner(TARGET, PagedKVCache(TARGET.config, blocks[0], size))
    strategy: DraftStrategy | None = NGramDraft(3, 1, most or 5) if lookup else None
    if drafting is not None:
        own = {"cache_tokens": blocks[1] * size, "block_size": size, "k": most}
        strategy = SingleDraft(DRAFTS[drafting], **own, **stop)  # type: ignore[arg-type]
        if lookup:
            strategy = CascadeDraft([NGramDraft(3, 1), strategy])
    return Engine(runner, strategy)


def told(row: Sequence) -> tuple[object, ...]:
    return row.tokens, row.provenance, row.stats, row.finish_reason


def held(engine: Engine) -> list[dict[object, int]]:
    allocators = [engine.runner.cache.allocator, *(engine.strategy.allocators() if engine.strategy else [])]
    return [{seq: a.length(seq) for seq in a.sequences()} for a in allocators]


@settings(max_examples=250)
@given(data=st.data())
def test_rounds_of_one_call_are_the_rounds_of_as_many_steps(data: st.DataObject) -> None:
    drafting = data.draw(st.sampled_from([None, 0, 0, 1, 2]))
    tight = data.draw(st.sampled_from([False, False, True]))
    size = data.draw(st.integers(1, 6))
    blocks = tuple(data.draw(st.integers(1, 60)) if tight else 400 for _ in range(2))
    setting = drafting, data.draw(st.booleans()), data.draw(st.sampled_from([None, 3])), blocks, size
    stop = {
        "confidence": data.draw(st.sampled_from([0.0, 0.0, 0.3, 0.6])),
        "entropy": data.draw(st.sampled_from([math.inf, math.inf, 1.5, 0.7])),
    }
    cold = data.draw(st.booleans())
    drawn = {
        "temperature": data.draw(st.sampled_from([0.3, 0.7, 1.0, 2.0])),
        "top_k": data.draw(st.sampled_from([0, 0, 1, 4])),
        "top_p": data.draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
        "min_p": data.draw(st.sampled_from([0.0, 0.0, 0.2])),
    }
    most_tokens = data.draw(st.integers(1, 140))
    params = SamplingParams(max_tokens=most_tokens, **({"temperature": 0} if cold else drawn))
    seed = data.draw(st.integers(-(2**63), 2**63 - 1))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    stops = frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)))
    policy, k = data.draw(st.sampled_from(POLICIES)), data.draw(st.integers(0, 7))
    ends_at = data.draw(st.sampled_from([None, 3, 17, 40]))  # as a stop string would end it

    def decode(stretch: Callable[[], float]) -> tuple[Sequence, object]:
        made, row = (
            engine(*setting, **stop),
            Sequence(list(prompt), len(prompt), params, policy, seed, k, stop_ids=stops),
        )
        emitted = []
        stopped = None if ends_at is None else lambda row, token: row.generated == ends_at
        while not row.finish_reason:
            made.stretch, before = stretch(), (len(row.tokens), held(made)[0])
            try:
                (tokens,) = made.step([row], stopped)
            except OutOfBlocks:
                assert before == (len(row.tokens), held(made)[0])
                return row, "out of blocks"
            emitted += tokens
            drafter = None if drafting is None else made.strategy.continuation(row).runner
            for runner in filter(None, (made.runner, drafter)):
                cached = runner._cached.get(row.id, [])
                assert cached == row.tokens[: len(cached)]
                assert len(cached) < len(row.tokens) and runner.cache.allocator.length(row.id) == len(cached)
        assert emitted == row.provenance
        made.release(row)
        assert not any(held(made))
        return row, None

    slow, slowly = decode(lambda: 0)
    fast, at_once = decode(lambda: FOREVER)
    assert at_once == slowly
    assert told(fast) == told(slow)
    mixed, mixedly = decode(lambda: data.draw(st.sampled_from([0, 1e-9, FOREVER])))
    assert mixedly == slowly and told(mixed) == told(slow)


def rows_of(*prompts: list[int], policy: AcceptancePolicy | None = None, **given: object) -> list[Sequence]:
    params = SamplingParams(temperature=0, **{"max_tokens": 60, **given})
    return [Sequence(list(prompt), len(prompt), params, policy or Exact(), 0, 4) for prompt in prompts]


@pytest.mark.parametrize("drafting", [None, 0])
def test_a_row_alone_and_beside_others_by_turns(drafting: int | None) -> None:
    prompts = [[1, 2, 3], [7, 7], [9, 4, 1, 0]]
    want = rows_of(*prompts)
    plain = engine(drafting, False, None, (400, 400), 4)
    plain.stretch = 0
    for row in want:
        while not row.finish_reason:
            plain.step([row])
    rows, made = rows_of(*prompts), engine(drafting, False, None, (400, 400), 4)
    made.stretch = 1e-9  # a settled round or two of each call
    for turn in range(300):
        going = [row for row in rows if not row.finish_reason]
        if not going:
            break
        made.step(going if turn % 3 == 0 else [going[turn % len(going)]])
    assert [told(row) for row in rows] == [told(row) for row in want]


def test_it_is_used_and_only_where_nothing_is_to_be_done_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    rounds = CompiledLlama.rounds

    def noted(self: CompiledLlama, *values: Any, **named: Any) -> Ran:
        calls.append(self)
        return rounds(self, *values, **named)

    monkeypatch.setattr(CompiledLlama, "rounds", noted)

    class Own(SingleDraft):
        pass

    def used(strategy: DraftStrategy | None, k: int = 4, rule: str = "exact", **asked: object) -> bool:
        calls.clear()
        params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **asked})
        (output,) = LLM(TARGET, strategy, k=k).generate([[1, 2, 3]], params, policy=parse_policy(rule))
        assert output.token_ids
        return bool(calls)

    near = DRAFTS[0]
    assert used(SingleDraft(near, confidence=0.4)) and used(SingleDraft(near, entropy=2.0))
    assert used(None) and used(SingleDraft(near)) and used(SingleDraft(near), k=0)
    assert used(SingleDraft(near), rule="fly") and used(CascadeDraft([NGramDraft(), SingleDraft(near)]))
    assert used(NGramDraft()) and not used(Own(near)) and not used(type("Own", (NGramDraft,), {})())
    assert not used(CascadeDraft([SuffixDraft(), SingleDraft(near)])) and not used(AdaptiveDraft(SingleDraft(near)))
    assert not used(SingleDraft(near), rule="lossy(lenience=3)")
    hot: dict[str, object] = {"temperature": 0.8, "top_p": 0.9}
    assert used(None, **hot) and used(SingleDraft(near), **hot) and used(SingleDraft(near), rule="fly", **hot)
    assert used(CascadeDraft([NGramDraft(), SingleDraft(near)]), **hot)
    assert not used(SingleDraft(near), rule="block", **hot)  # judges whole blocks, but comes to ids at temperature 0
    for asked in ({"logprobs": 1}, {"explain": True}, {"min_tokens": 20, "stop_token_ids": (1,)}):
        assert not used(None, **asked), asked
    for asked in ({"logit_bias": {3: 1.0}}, {"presence_penalty": 1.0}):
        assert not used(SingleDraft(near), **asked), asked
    assert not used(SingleDraft(perturbed(PLAIN, 0.05), kernels="torch"))  # a drafter that has no such call


@dataclass(frozen=True)
class Broken(Condition):
    """Cannot be asked of a row that has so many tokens behind it."""

    name = "broken"

    def evaluate(self, block: Block) -> Tensor:
        if any(len(tokens) >= 20 for tokens in block.target.history or []):
            raise RuntimeError("the condition broke")
        return torch.zeros_like(block.agree_BK)


def test_what_is_settled_before_a_rule_fails_stands() -> None:
    (row,), (want,) = rows_of([1, 2, 3], policy=Exact() | Broken()), rows_of([1, 2, 3])
    made, plain = engine(0, False, None, (400, 400), 4), engine(0, False, None, (400, 400), 4)
    while not want.finish_reason:
        plain.step([want])
    with pytest.raises(RuntimeError, match="the condition broke"):
        while not row.finish_reason:
            made.step([row])
    assert len(row.tokens) >= 20 and row.tokens == want.tokens[: len(row.tokens)] and not row.finish_reason
    assert row.provenance == want.provenance[: len(row.provenance)] and len(row.provenance) == row.generated
    row.policy = Exact()
    while not row.finish_reason:
        made.step([row])
    row.stats.gates.clear()
    assert told(row) == told(want)


def test_a_callback_that_fails_leaves_whole_rounds() -> None:
    (row,), made = rows_of([1, 2, 3]), engine(0, False, None, (400, 400), 4)
    made.stretch = FOREVER

    def stopped(row: Sequence, token: int) -> bool:
        if row.generated == 11:
            raise KeyError("no text")
        return False

    with pytest.raises(KeyError):
        while not row.finish_reason:
            made.step([row], stopped)
    assert row.generated == len(row.provenance) <= 11 and row.provenance[-1].why in (Why.BONUS, Why.CORRECTION)
    assert held(made)[0][row.id] == len(row.tokens) - 1
