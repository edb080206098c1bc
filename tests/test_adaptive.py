"""Draft length: confidence and reach stops against their definition, goodput on simulated clocks."""

from __future__ import annotations

import math
import random
import sys
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly import LLM, SamplingParams
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft, TreeDraft
from fly.drafts.adaptive import AdaptiveDraft
from fly.drafts.base import Continuation, StopsByChance, pad, pad_trees
from fly.ops import first_branch
from fly.policies import Block, Condition, Exact, draft_log_probs
from fly.runner.executor import DraftSpec, Spent
from fly.runner.request import Row
from fly.types import Draft
from tests.test_drafts import LARGE, MEDIUM, SMALL, VOCAB, make_row, proposals
from tests.toys import caches, dense_logits, ready, run

texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)


# --- stops -----------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.lists(texts, min_size=1, max_size=3),
    st.sampled_from([0.0, 0.08, 0.12, 0.3]),
    st.sampled_from([0.0, 1e-4, 0.01, 0.2]),
    st.booleans(),
    st.booleans(),
)
def test_drafting_ends_after_the_first_token_it_is_unsure_of(
    texts: list[list[int]], confidence: float, reach: float, cascade: bool, sampled: bool
) -> None:
    """The tokens are those of unlimited drafting; their number is set by the distribution at each place, before its
    draw."""
    rows = [make_row(text, 1.0 if sampled else 0.0, seed=b) for b, text in enumerate(texts)]
    below = (lambda: NGramDraft()) if cascade else (lambda: None)
    free = ready(SingleDraft(run(MEDIUM), draft=below())).propose(rows, [6] * len(rows))
    limited = ready(SingleDraft(run(MEDIUM), draft=below(), confidence=confidence, reach=reach))
    draft = limited.propose(rows, [6] * len(rows))
    for row, everything, some in zip(rows, proposals(free), proposals(draft)):
        assert some == everything[: len(some)]
        reached = 1.0
        for j in range(len(some)):
            distribution = dense_logits(MEDIUM, row.tokens + everything[:j])[-1].softmax(-1)
            reached *= float(distribution.amax())
            sure = reached >= reach and float(distribution.amax()) >= confidence
            if j < len(some) - 1:
                assert sure
            elif len(some) < len(everything):
                assert not sure
                event("stopped")
        limited.release(row)
    for allocator in caches(limited):
        assert allocator.num_free == allocator.num_blocks


@pytest.mark.parametrize(("option", "value"), [("confidence", 1.5), ("reach", -1.0), ("reach", math.nan), ("k", 0)])
def test_wrong_limits_are_named(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        SingleDraft(run(SMALL), **{option: value})  # type: ignore[arg-type]


# --- goodput on a simulated machine ----------------------------------------------------------------------


@dataclass
class Machine:
    """A clock that draft steps and verifications advance, and texts of which drafts are right with a fixed chance.

    Every text is a function of its number: whoever drafts for it, and however much, meets the same one.
    """

    draft_step: float
    verify: float
    per_token: float
    chance: float
    jump: float = 0.0  # what any draft adds to a verification, whatever its length
    below: float | None = None  # chance that a drafted token is one that a level below had proposed: a cascade
    catch_up: float = 0.0  # for each token of a text not seen before
    pauses: float = 0.0  # chance that a step takes ten seconds more
    now: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    asked: list[int] = field(default_factory=list)
    texts: int = 0

    def clock(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds + 10 * (self.rng.random() < self.pauses)

    def draft(self, n: int, late: int) -> None:
        rounds = n
        if self.below is not None:
            left, rounds = n, 0
            while left > 0:
                rounds, left = rounds + 1, left - 1
                while left > 0 and self.rng.random() < self.below:
                    left -= 1
        self.spend(self.draft_step * rounds + self.catch_up * late)

    def right(self, length: int, chance: float | None = None) -> list[bool]:
        """At which positions of the next text a draft is right."""
        self.texts += 1
        rng = random.Random(self.texts)
        return [rng.random() < (self.chance if chance is None else chance) for _ in range(length)]

    def run(self, strategy: DraftStrategy, tokens: int, k: int, prompt: int = 40) -> float:
        """Seconds to emit ``tokens`` tokens of one row, drafting with ``strategy``."""
        row, start, length = make_row([1] * (prompt + 1)), self.now, prompt + 1 + tokens
        row.prompt_length = prompt
        right = self.right(length)
        while len(row.tokens) < length:
            most = min(k, length - len(row.tokens) - 1)
            n = int(strategy.propose([row], [most]).lengths_B) if most else 0
            self.asked.append(n)
            self.spend(self.verify + self.per_token * n + self.jump * (n > 0))
            at = len(row.tokens)
            stands = next((i for i in range(n) if not right[at + i]), n)
            row.tokens += [1] * (stands + 1)
            if n:
                row.drafts.append((n, stands))
            strategy.commit([row])
        strategy.release(row)
        return self.now - start

    def run_fixed(self, tokens: int, k: int) -> float:
        """The same as ``run`` with a strategy that always drafts as much as it may: a sum, without its tensors."""
        start, at, seen, length = self.now, 41, 0, 41 + tokens
        right = self.right(length)
        while at < length:
            n = min(k, length - at - 1)
            if n:
                self.draft(n, at - seen)
                seen = at
            self.spend(self.verify + self.per_token * n + self.jump * (n > 0))
            at += 1 + next((i for i in range(n) if not right[at + i]), n)
        return self.now - start

    def run_at_once(self, strategy: DraftStrategy, tokens: int, k: int, stop: float, stretch: float = 100.0) -> float:
        """The same as compiled kernels do it: several rounds between two of the strategy's, which take ``stop``
        seconds more each time."""
        row, start, length, seen = make_row([1] * 41), self.now, 41 + tokens, 0
        row.prompt_length, row.k = 40, k
        right = self.right(length)
        while len(row.tokens) < length:
            told = strategy.continuation([row])
            assert told is not None
            self.spend(stop)
            begin, rounds = self.now, list[tuple[float, float]]()
            while True:
                since, at = self.now, len(row.tokens)
                n = min(row.k, told.max_len[0], length - at - 1)
                if n:
                    self.draft(n, at - seen)
                    seen = at
                drafted = self.now - since
                self.spend(self.verify + self.per_token * n + self.jump * (n > 0))
                stands = next((i for i in range(n) if not right[at + i]), n)
                row.tokens += [1] * (stands + 1)
                row.stats.rounds += 1
                self.asked.append(n)
                if n:
                    row.drafts.append((n, stands))
                took = self.now - since
                rounds.append((took, drafted))
                over = len(rounds) >= told.rounds or self.now - begin >= stretch
                if over or len(row.tokens) >= length:
                    break
            if told.report is not None:
                parts = rounds[:1], rounds[1:]
                first, others = (Spent(len(p), sum(t for t, _ in p), 0.0, sum(d for _, d in p)) for p in parts)
                told.report((first, others))
            strategy.commit([row])
        strategy.release(row)
        return self.now - start


class Simulated(DraftStrategy):
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seen: dict[int, int] = {}
        self.heard = 0

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        late = sum(len(row.tokens) - self.seen.get(row.id, 0) for row, n in zip(rows, max_len) if n)
        self.seen |= {row.id: len(row.tokens) for row, n in zip(rows, max_len) if n}
        self.machine.draft(max(max_len), late)
        return pad([[0] * n for n in max_len])

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation:
        return Continuation(None, [sys.maxsize] * len(rows))

    def commit(self, rows: abc.Sequence[Row]) -> None:
        self.heard += 1


def seconds(machine: Callable[[int], Machine], k: int | None, requests: int, tokens: int, skip: int = 0) -> float:
    """Mean seconds of a request after the first ``skip``, over some seeds; ``k`` None drafts adaptively, up to 15."""
    total, seeds = 0.0, 8
    for seed in range(seeds):
        there = machine(seed)
        there.texts = 1000 * seed
        if k is None:
            strategy = AdaptiveDraft(Simulated(there), clock=there.clock)
            times = [there.run(strategy, tokens, 15) for _ in range(requests)]
        else:
            times = [there.run_fixed(tokens, k) for _ in range(requests)]
        total += sum(times[skip:]) / (requests - skip) / seeds
    return total


@settings(max_examples=40)
@given(st.floats(0.01, 2.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 15), st.booleans())
def test_where_nothing_can_be_predicted_little_is_lost(
    step: float, per_token: float, jump: float, k: int, at_once: bool
) -> None:
    """In time of the simulated machine, whatever drafting and verification cost: first what it takes to find out, then
    tries of two rounds, which become rare."""
    machine = Machine(step, 1.0, per_token, chance=0.0, jump=jump, catch_up=0.001)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
    first, second = (
        machine.run_at_once(strategy, 1200, k, 0.0) if at_once else machine.run(strategy, 1200, k) for _ in range(2)
    )
    vain = 4 * (step + per_token) + jump  # a round in which nothing stands, beyond what it emits
    assert first <= 1200 + (8 + 2 * 8) * vain + 2
    assert second <= 1200 + 2 * 3 * vain + 2


@pytest.mark.parametrize("chance", [0.8, 0.95, 1.0])
@pytest.mark.parametrize("stop", [0.0, 3.0])
def test_rounds_taken_at_once_come_near_the_best_fixed_length(chance: float, stop: float) -> None:
    times = {}
    for k in (0, 1, 2, 4, 8, 15, None):
        total = 0.0
        for seed in range(8):
            machine = Machine(0.1, 1.0, 0.03, chance, jump=0.2, catch_up=0.002)
            machine.texts = 1000 * seed
            inner: DraftStrategy = Simulated(machine)
            strategy = inner if k is not None else AdaptiveDraft(inner, clock=machine.clock)
            runs = [machine.run_at_once(strategy, 300, 15 if k is None else k, stop) for _ in range(4)]
            total += sum(runs[1:])
        times[k] = total
    adaptive = times.pop(None)
    assert adaptive <= 1.15 * min(times.values())


class HardPlaces(Machine):
    """Most places are easy, some are hard."""

    chances = (0.99, 0.35)

    def chance_at(self, at: int) -> float:
        return self.chances[random.Random(at).random() < 0.2]

    def right(self, length: int, chance: float | None = None) -> list[bool]:
        return [self.rng.random() < self.chance_at(at) for at in range(length)]


class Knowing(Simulated, StopsByChance):
    """Knows the chance of each token that it drafts, and ends where the next is not worth it."""

    machine: HardPlaces

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], worth: float = 0.0) -> Draft:
        drafts = []
        for row, most in zip(rows, max_len):
            reach, n = 1.0, 0
            while n < most and reach >= worth:
                reach *= self.machine.chance_at(len(row.tokens) + n)
                n += 1
            drafts.append([0] * n)
        self.machine.draft(max(map(len, drafts)), 0)
        return pad(drafts)


@settings(max_examples=10)
@given(texts, st.integers(2, 4), st.booleans())
def test_where_a_draft_stops_is_told_to_it_in_each_round(text: list[int], k: int, trees: bool) -> None:
    """``AdaptiveDraft`` changes nothing of the strategy, which drafts for itself as before. Trees are not told."""
    told = []

    class Told(TreeDraft if trees else SingleDraft):  # type: ignore[misc]
        def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], worth: float = 0.0) -> Draft:
            machine.now += 0.02 * max(max_len)
            return super().propose(rows, max_len, worth)  # type: ignore[no-any-return]

        def spec(self, rows: abc.Sequence[Row], worth: float = 0.0) -> DraftSpec:
            told.append(worth)
            return super().spec(rows, worth)  # type: ignore[no-any-return]

    level = Told(run(SMALL))
    machine = Machine(0.02, 1.0, 0.01, chance=0.9)
    strategy = ready(AdaptiveDraft(level, Nothing(), clock=machine.clock))
    before = {name: value for name, value in vars(level).items() if name != "_runner"}
    row = make_row(text)
    for _ in range(6):  # the whole first branch of each draft is kept
        draft = strategy.propose([row], [k])
        machine.now += 1.0 + 0.05 * len(draft.chains[0])
        kept = first_branch(draft.trees[0]) if draft.trees else range(len(draft.chains[0]))
        row.tokens += [*(draft.chains[0][node] for node in kept), 1]
        strategy.commit([row])
    assert {name: value for name, value in vars(level).items() if name != "_runner"} == before
    assert any(told) != trees and all(0.05 <= worth <= 0.9 for worth in told if worth)
    told.clear()
    assert level.spec([row]) == ready(Told(run(SMALL))).spec([row]) and told == [0.0, 0.0]


def test_a_class_of_ones_own_may_propose_without_worth() -> None:
    """It is not told where to stop."""

    class Mine(SingleDraft):
        def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:  # type: ignore[override]
            return super().propose(rows, max_len)

    llm = LLM(run(LARGE), AdaptiveDraft(Mine(run(SMALL))), k=3)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    [output], [expected] = (each.generate([[1, 2, 3]], params) for each in (llm, LLM(run(LARGE))))
    assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("step", [0.03, 0.3])
def test_a_draft_that_knows_its_chances_beats_every_fixed_length(step: float) -> None:
    times = {}
    for k in (0, 1, 2, 3, 4, 6, 8, 11, 15, None):
        machine = HardPlaces(step, 1.0, 0.03, chance=0.0)
        inner = Knowing(machine)
        strategy = inner if k is not None else AdaptiveDraft(inner, clock=machine.clock)
        times[k] = sum([machine.run(strategy, 400, 15 if k is None else k) for _ in range(8)][1:])
    adaptive = times.pop(None)
    assert adaptive < min(times.values())


class InOneForward(Knowing):
    """Takes the same time for a draft of any length, as a block drafter does."""

    one_forward = True

    def __init__(self, machine: HardPlaces) -> None:
        super().__init__(machine)
        machine.draft = lambda n, late: Machine.draft(machine, min(n, 1), late)  # type: ignore[method-assign]


class Nothing(DraftStrategy):
    """A lookup that finds nothing."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return pad([[] for _ in rows])


@pytest.mark.parametrize("step", [0.6, 1.0])
def test_a_block_drafter_drafts_on_while_the_target_has_little_to_verify(step: float) -> None:
    """A longer draft costs it nothing. A draft that is thought to cost by its tokens ends too early."""
    times = dict[int | str, float]()
    for how in (0, 1, 2, 4, 8, 15, "adaptive", "by its tokens"):
        machine = HardPlaces(step, 1.0, 0.03, chance=0.0)
        inner = InOneForward(machine)
        inner.one_forward = how != "by its tokens"
        strategy = inner if isinstance(how, int) else AdaptiveDraft(inner, Nothing(), machine.clock)
        runs = [machine.run(strategy, 400, how if isinstance(how, int) else 15) for _ in range(8)]
        times[how] = sum(runs[1:])
    adaptive, other = times.pop("adaptive"), times.pop("by its tokens")
    assert adaptive < min(times.values()) and adaptive < 0.97 * other


COSTS = {  # draft step, more of it
    "cheap": {"draft_step": 0.02},
    "usual": {"draft_step": 0.1, "jump": 0.2},
    "dear": {"draft_step": 0.3, "jump": 0.1},
    "cascade": {"draft_step": 0.2, "jump": 0.1, "below": 0.6, "catch_up": 0.004},
}


@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("tokens", [60, 400])
def test_where_drafting_pays_it_comes_near_the_best_fixed_length(chance: float, costs: str, tokens: int) -> None:
    """The best in hindsight, from the second request on. What a cascade drafts takes a different time every round, so
    that its costs are harder to learn."""

    def machine(seed: int) -> Machine:
        return Machine(verify=1.0, per_token=0.03, chance=chance, rng=random.Random(seed), **COSTS[costs])  # type: ignore[arg-type]

    requests = 8 if tokens < 100 else 3
    best = min(seconds(machine, k, requests, tokens, skip=1) for k in (0, 1, 2, 3, 4, 6, 8, 11, 15))
    assert seconds(machine, None, requests, tokens, skip=1) <= (1.2 if costs == "cascade" else 1.1) * best


@pytest.mark.parametrize("k", [0, 3])
def test_a_fixed_length_takes_what_a_strategy_of_that_length_takes(k: int) -> None:
    first, second = (Machine(0.1, 1.0, 0.03, 0.8, jump=0.2, below=0.6, catch_up=0.004) for _ in range(2))
    strategy = Simulated(first)
    for _ in range(2):
        assert first.run(strategy, 60, k) == second.run_fixed(60, k)


def test_pauses_of_the_machine_are_no_costs() -> None:
    """A pause may fall on any of the first measurements, and nothing may be given up for it."""
    for seed in range(40):
        machine = Machine(0.1, 1.0, 0.03, 0.97, jump=0.2, pauses=0.03, catch_up=0.002, rng=random.Random(seed))
        strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
        for _ in range(3):
            machine.run(strategy, 60, 15)
        machine.asked.clear()
        for _ in range(5):
            machine.run(strategy, 60, 15)
        assert sum(machine.asked) / len(machine.asked) > 6, seed


class Reader(Simulated):
    """Takes five seconds to read a prompt."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        self.machine.spend(5.0 * sum(row.id not in self.seen for row in rows))
        return super().propose(rows, max_len)


@pytest.mark.parametrize("prompt", [8, 30, 60])
def test_reading_a_prompt_is_no_cost_of_drafting(prompt: int) -> None:
    machine = Machine(0.1, 1.0, 0.03, 0.9)
    strategy = AdaptiveDraft(Reader(machine), clock=machine.clock)
    for tokens in (5, 5, 30):
        machine.run(strategy, tokens, 15, prompt)
        assert strategy._measured[True].costs.step in (None, pytest.approx(0.1, rel=0.2))
    assert strategy._measured[True].costs.step


def test_it_follows_costs_that_drift() -> None:
    machine = Machine(0.05, 1.0, 0.03, chance=0.9)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
    means = []
    for step, per_token in ((0.05, 0.03), (0.6, 0.03), (0.05, 0.5), (0.05, 0.03)):
        machine.draft_step, machine.per_token = step, per_token
        for _ in range(4):
            machine.run(strategy, 300, 15)
        machine.asked.clear()
        machine.run(strategy, 300, 15)
        means.append(sum(machine.asked) / len(machine.asked))
    # by hand: (1 - 0.9^(n+1)) / 0.1 / (1 + n (step + per_token)) is largest at n = 11, 2, 2 and 11
    assert means[0] > 8 and 1 < means[1] < 5 and 1 < means[2] < 5 and means[3] > 8


def test_it_learns_that_the_text_has_changed() -> None:
    machine = Machine(0.05, 1.0, 0.03, chance=0.0)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
    machine.run(strategy, 400, 15)
    assert sum(n > 0 for n in machine.asked[-100:]) < 10
    machine.chance = 0.98
    for _ in range(4):
        machine.run(strategy, 400, 15)
    machine.asked.clear()
    machine.run(strategy, 400, 15)
    assert sum(machine.asked) / len(machine.asked) > 8
    machine.chance = 0.0
    machine.run(strategy, 400, 15)
    machine.asked.clear()
    assert machine.run(strategy, 400, 15) < 1.05 * 400


def test_rows_of_one_batch_are_kept_apart() -> None:
    """One that can be predicted and one that cannot, drafted for at once."""
    machine = Machine(0.05, 1.0, 0.03, chance=0.97)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)
    rows = [make_row([1, 1]), make_row([1, 1])]
    right = [machine.right(2000), machine.right(2000, chance=0.0)]
    asked = []
    for _ in range(120):
        lengths = strategy.propose(rows, [15, 15]).lengths_B.tolist()
        asked.append(lengths)
        machine.spend(1.0 + 0.03 * sum(lengths))
        for row, n, text in zip(rows, lengths, right):
            at, row.stats.rounds = len(row.tokens), row.stats.rounds + 1
            stands = next((i for i in range(n) if not text[at + i]), n)
            row.tokens += [1] * (stands + 1)
            if n:
                row.drafts.append((n, stands))
        strategy.commit(rows)
    good, bad = zip(*asked[20:])
    assert sum(good) / len(good) > 8
    assert sum(bad) / len(bad) < 0.5


def test_temperatures_have_costs_of_their_own() -> None:
    """Drafting by draws may be far dearer; what was learned from greedy rows is not charged to it, nor it to them."""
    machine = Machine(0.02, 1.0, 0.03, chance=1.0)
    strategy = AdaptiveDraft(Simulated(machine), clock=machine.clock)

    def lengths(temperature: float) -> list[int]:
        machine.draft_step = 2.0 if temperature else 0.02
        row, asked = make_row([1, 1], temperature), []
        for _ in range(30):
            asked.append(n := int(strategy.propose([row], [15]).lengths_B))
            machine.spend(1.0 + 0.03 * n)
            row.tokens += [1] * (n + 1)
            strategy.commit([row])
        return asked[-10:]

    assert sum(lengths(0.0)) > 120
    assert sum(lengths(1.0)) <= 2  # in a trial
    assert sum(lengths(0.0)) > 120


def test_a_strategy_that_is_not_asked_observes_nothing() -> None:
    machine = Machine(0.5, 1.0, 0.5, chance=0.0)
    inner = Simulated(machine)
    strategy = AdaptiveDraft(inner, clock=machine.clock)
    machine.run(strategy, 200, 15)
    asked = sum(n > 0 for n in machine.asked)
    assert 0 < asked < 30
    assert inner.heard <= asked + 1  # the last round, in which nothing may be drafted, goes past the length


class Bushes(Simulated):
    """Two candidates for every place, the second never right."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        self.machine.draft(max(max_len), 0)
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
    strategy = AdaptiveDraft(CascadeDraft([NGramDraft(), SingleDraft(run(SMALL))]))
    llm = LLM(LARGE, draft=strategy, k=8, cache=512)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompts = [[1, 2, 3], [4], [5, 6]]
    wanted = [out.token_ids for out in llm.generate(prompts, params, k=0)]
    assert [out.token_ids for out in llm.generate(prompts, params)] == wanted
    for allocator in llm.scheduler.allocators:
        assert allocator.num_free == allocator.num_blocks


@dataclass(frozen=True)
class Sure(Condition):
    """The draft was sure of the token."""

    def evaluate(self, block: Block) -> Tensor:
        return draft_log_probs(block.draft)[1] > -1


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=12), st.booleans()), min_size=2, max_size=4),
    st.sampled_from([0.0, 0.8]),
    st.integers(0, 5),
)
def test_neighbours_of_a_rule_that_reads_logits_keep_their_lookup(
    asked: list[tuple[list[int], bool]], temperature: float, most: int
) -> None:
    """Copies have no logits, so rows with such a rule get none. Every other row gets what it gets alone. Drafting by
    the model is a hundred times as slow as a forward, so whatever can be copied is."""
    reading = Exact() | Sure()
    rows = [make_row(text, temperature) for text, _ in asked]
    for row, (_, reads) in zip(rows, asked):
        row.policy = reading if reads else row.policy

    def propose(some: list[Row]) -> list[list[int]]:
        strategy = ready(AdaptiveDraft(SingleDraft(run(SMALL)), clock=lambda: 0.0))
        for measured in map(strategy._measured.__getitem__, (True, False)):
            measured.costs.add_plain(len(some), 1.0)
            measured.costs.add_step(len(some), 100.0, len(some), 1.0)
        return proposals(strategy.propose(some, [most] * len(some)))

    together = propose(rows)
    for row, draft, (text, reads) in zip(rows, together, asked):
        assert draft == ([] if reads else propose([row])[0])
        event("copied" if draft else "reads" if reads else "nothing to copy")
        if not reads and text[-4:-2] == text[-2:]:  # suffix decoding copies as many tokens as match
            assert len(draft) >= min(most, 2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_cannot_use_copies_drafts_beside_a_lookup_where_that_pays(temperature: float) -> None:
    """It once drafted nothing while its neighbours copied. Its draft and theirs are what each gets alone."""
    texts = [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [2, 1, 0, 2, 1, 0, 2, 1, 0, 2], [1, 2, 2, 1, 2, 2, 1, 2, 2, 1], [1, 0, 2]]

    def propose(cost: float) -> tuple[str, list[list[int]], Draft]:
        rows = [make_row(text, temperature) for text in texts]
        rows[-1].policy = Exact() | Sure()
        strategy = ready(AdaptiveDraft(SingleDraft(run(SMALL)), clock=lambda: 0.0))
        for measured in map(strategy._measured.__getitem__, (True, False)):
            measured.costs.add_plain(len(rows), 1.0)
            measured.costs.add_step(len(rows), cost, len(rows), 1.0)
        for row in rows:
            strategy._row(row).copied.extend([(8, 8)] * 8)
        draft = strategy.propose(rows, [8] * len(rows))
        assert strategy._round is not None
        return strategy._round.way, proposals(draft), draft

    way, dear, _ = propose(100.0)
    assert way == "lookup" and all(dear[:3]) and not dear[3]
    way, cheap, draft = propose(1e-3)
    assert way == "lookup" and cheap[:3] == dear[:3] and cheap[3]
    assert draft.logits_BKV is not None and not draft.logits_BKV[3, : len(cheap[3])].isnan().any()
    row = make_row(texts[3], temperature)
    row.policy = Exact() | Sure()
    alone = ready(SingleDraft(run(SMALL))).propose([row], [8])
    assert cheap[3] == alone.chains[0][: len(cheap[3])]
