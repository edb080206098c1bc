"""Draft length: confidence and entropy stops against their definition, goodput on simulated clocks, layers skipped."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft
from fly.drafts.adaptive import AdaptiveDraft
from fly.drafts.base import pad, pad_trees
from fly.drafts.skip import LayerSkipDraft, expected_speedup
from fly.types import Draft, Sequence
from tests.test_drafts import LARGE, MEDIUM, SMALL, VOCAB, make_row, proposals
from tests.toys import dense_logits, random_llama

texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)


# --- stops -----------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.lists(texts, min_size=1, max_size=3),
    st.sampled_from([0.0, 0.08, 0.12, 0.3]),
    st.sampled_from([math.inf, 2.75, 2.6, 1.0]),
    st.booleans(),
    st.booleans(),
)
def test_drafting_ends_before_the_first_token_it_is_unsure_of(
    texts: list[list[int]], confidence: float, entropy: float, cascade: bool, sampled: bool
) -> None:
    """The tokens are those of unlimited drafting; their number is set by the law at each place, before its draw."""
    rows = [make_row(text, 1.0 if sampled else 0.0, seed=b) for b, text in enumerate(texts)]
    below = (lambda: NGramDraft()) if cascade else (lambda: None)
    free = SingleDraft(MEDIUM, draft=below()).propose(rows, [6] * len(rows))
    limited = SingleDraft(MEDIUM, draft=below(), confidence=confidence, entropy=entropy)
    draft = limited.propose(rows, [6] * len(rows))
    for row, everything, some in zip(rows, proposals(free), proposals(draft)):
        assert some == everything[: len(some)]
        for j in range(len(everything)):
            law = dense_logits(MEDIUM, row.tokens + everything[:j])[-1].softmax(-1)
            sure = float(law.amax()) >= confidence and float(-(law * law.log()).sum()) <= entropy
            if j == len(some):
                assert not sure
                event("stopped")
                break
            assert sure
        limited.release(row)
    for allocator in limited.allocators():
        assert allocator.num_free == allocator.num_blocks


@pytest.mark.parametrize(("option", "value"), [("confidence", 1.5), ("entropy", -1.0), ("entropy", math.nan), ("k", 0)])
def test_wrong_limits_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        SingleDraft(SMALL, **{option: value})  # type: ignore[arg-type]


# --- goodput on a simulated machine ----------------------------------------------------------------------


@dataclass
class Machine:
    """A clock that draft steps and verifications advance, and text of which drafts are right with a fixed chance."""

    draft_step: float
    verify: float
    per_token: float
    chance: float
    now: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    asked: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def run(self, strategy: DraftStrategy, tokens: int, k: int, row: Sequence | None = None) -> float:
        """Seconds to emit ``tokens`` tokens of one row, drafting with ``strategy``."""
        row, start = row or make_row([1]), self.now
        row.tokens, length = [1], 1 + tokens
        while len(row.tokens) < length:
            draft = strategy.propose([row], [min(k, length - len(row.tokens) - 1)])
            n = int(draft.lengths_B)
            self.asked.append(n)
            self.now += self.verify + self.per_token * n
            stands = 0
            while stands < n and self.rng.random() < self.chance:
                stands += 1
            row.tokens += [1] * (stands + 1)
            strategy.commit([row])
        strategy.release(row)
        return self.now - start


class Simulated(DraftStrategy):
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def propose(self, rows: Rows[Sequence], max_len: Rows[int]) -> Draft:
        self.machine.now += self.machine.draft_step * max(max_len)
        return pad([[0] * n for n in max_len])


@settings(max_examples=40)
@given(st.floats(0.01, 2.0), st.floats(0.0, 1.0), st.integers(1, 15))
def test_where_nothing_can_be_predicted_it_costs_two_percent_at_most(step: float, per_token: float, k: int) -> None:
    """Whatever drafting and verification cost: over some requests of 300 tokens, in time of the simulated machine."""
    machine = Machine(step, 1.0, per_token, chance=0.0)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
    first = machine.run(strategy, 300, k)
    rest = sum(machine.run(strategy, 300, k) for _ in range(4))
    overshoot = (machine.draft_step + machine.per_token) * 4  # one round of up to four tokens, before anything is known
    assert first <= 300 * 1.01 + overshoot + 4
    assert rest <= 4 * 300 * 1.02 + 2 * (machine.draft_step + machine.per_token) * 2


@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("step", [0.02, 0.1, 0.4])
def test_where_drafting_pays_it_comes_near_the_best_fixed_length(chance: float, step: float) -> None:
    def fixed(k: int) -> float:
        machine = Machine(step, 1.0, 0.03, chance)
        return sum(machine.run(Simulated(machine), 400, k) for _ in range(5)) / 2000

    best = min(fixed(k) for k in range(16))
    machine = Machine(step, 1.0, 0.03, chance)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
    machine.run(strategy, 400, 15)
    adaptive = sum(machine.run(strategy, 400, 15) for _ in range(5)) / 2000
    assert adaptive <= 1.12 * best


def test_it_learns_that_the_text_has_changed() -> None:
    machine = Machine(0.05, 1.0, 0.03, chance=0.0)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
    machine.run(strategy, 400, 15)
    assert sum(machine.asked[-100:]) < 30
    machine.chance = 0.98
    for _ in range(4):
        machine.run(strategy, 400, 15)
    machine.asked.clear()
    machine.run(strategy, 400, 15)
    assert sum(machine.asked) / len(machine.asked) > 8


class Bushes(Simulated):
    """Two candidates for every place, the second never right."""

    def propose(self, rows: Rows[Sequence], max_len: Rows[int]) -> Draft:
        self.machine.now += self.machine.draft_step * max(max_len)
        return pad_trees([([0, 2] * n, [2 * (i // 2) - 2 if i > 1 else -1 for i in range(2 * n)]) for n in max_len])


def test_of_trees_it_counts_what_can_be_emitted() -> None:
    machine = Machine(0.02, 1.0, 0.01, chance=0.9)
    strategy = AdaptiveDraft(Bushes(machine), clock=machine.clock)
    row = make_row([1])
    for _ in range(60):
        draft = strategy.propose([row], [15])
        n = int(draft.lengths_B) // 2
        machine.asked.append(n)
        machine.now += machine.verify + machine.per_token * 2 * n
        stands = next((i for i in range(n) if machine.rng.random() > 0.9), n)
        row.tokens += [1] * (stands + 1)
        strategy.commit([row])
    assert sum(machine.asked[-20:]) / 20 > 8


def test_adaptive_rows_do_not_change_the_text_and_leave_nothing() -> None:
    strategy = AdaptiveDraft(CascadeDraft([NGramDraft(), SingleDraft(SMALL)]))
    llm = LLM(LARGE, draft=strategy, k=8, cache_tokens=512)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompts = [[1, 2, 3], [4], [5, 6]]
    wanted = [out.token_ids for out in llm.generate(prompts, params, k=0)]
    assert [out.token_ids for out in llm.generate(prompts, params)] == wanted
    assert not strategy._rows
    for allocator in llm.scheduler.allocators():
        assert allocator.num_free == allocator.num_blocks


# --- layers skipped --------------------------------------------------------------------------------------

DEEP = random_llama(3, VOCAB, hidden=16, heads=2, kv_heads=1, layers=4, max_positions=64)


@settings(max_examples=20)
@given(st.lists(texts, min_size=1, max_size=3), st.sets(st.integers(0, 3), max_size=3), st.sampled_from([0.0, 0.9]))
def test_skipped_layers_draft_what_the_model_without_them_says(
    texts: list[list[int]], skip: set[int], temperature: float
) -> None:
    strategy = LayerSkipDraft(tuple(skip), k=5)
    llm = LLM(DEEP, draft=strategy, k=5, cache_tokens=512, block_size=4)
    params = [SamplingParams(temperature=temperature, max_tokens=20, seed=b) for b in range(len(texts))]
    outs = llm.generate(texts, params)
    if temperature == 0:
        assert [o.token_ids for o in outs] == [o.token_ids for o in llm.generate(texts, params, k=0)]
        if skip:
            less = random_llama(3, VOCAB, hidden=16, heads=2, kv_heads=1, layers=4, max_positions=64)
            less.layers = torch.nn.ModuleList(layer for n, layer in enumerate(less.layers) if n not in skip)
            for number, layer in enumerate(less.layers):
                layer.self_attn.layer = number  # type: ignore[union-attr,assignment]
            # with all of the context through fewer layers the keys differ; at the first token they are the same
            row = make_row([2])
            llm.engine.runner.feed([row], [[]])
            llm.engine.runner.commit([row])
            (drafted,) = proposals(strategy.propose([row], [1]))
            assert drafted == [int(dense_logits(less, [2])[-1].argmax())]
            llm.engine.release(row)
    else:
        assert [o.token_ids for o in outs] == [llm.generate([t], p)[0].token_ids for t, p in zip(texts, params)]
    assert not strategy.runner._cached
    allocator = llm.engine.runner.cache.allocator
    assert allocator.num_free == allocator.num_blocks


def test_calibration_finds_the_layers_that_do_nothing() -> None:
    model = random_llama(5, VOCAB, hidden=16, heads=2, kv_heads=1, layers=4, max_positions=128)
    with torch.no_grad():
        for number in (1, 3):  # these add nothing to the residual stream
            model.layers[number].self_attn.o_proj.weight.zero_()  # type: ignore[union-attr,operator]
            model.layers[number].mlp.down_proj.weight.zero_()  # type: ignore[union-attr,operator]
    strategy = LayerSkipDraft(k=6, calibration=16)
    llm = LLM(model, draft=strategy, k=6)
    (out,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=60))
    assert strategy.skip is not None and {1, 3} <= set(strategy.skip)
    assert out.stats.tau > 2
    assert strategy.calibrate(list(range(16)))[(1,)] == 1.0


def test_what_cannot_skip_is_refused() -> None:
    with pytest.raises(ValueError, match="layers 0 to 3"):
        LLM(DEEP, draft=LayerSkipDraft((1, 4)))
    with pytest.raises(ValueError, match="attached to none"):
        LayerSkipDraft((1,)).propose([make_row([1])], [3])


@pytest.mark.parametrize(("a", "c", "k", "wanted"), [(1.0, 0.0, 4, 5.0), (0.0, 0.5, 4, 1.0), (0.5, 0.5, 1, 1.0)])
def test_expected_speedup_by_hand(a: float, c: float, k: int, wanted: float) -> None:
    assert expected_speedup(a, c, k)[0] == pytest.approx(wanted)
    assert expected_speedup(a, c, k)[1] == {5.0: 4, 1.0: 0}[wanted]
