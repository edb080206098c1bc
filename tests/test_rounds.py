"""Several rounds in one call of the compiled kernels against one round a step: the same in all that is told of a row.

Skipped as a whole where the library was not built.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fly import LLM, SamplingParams
from fly.backends import executor_of
from fly.backends.cpu import available, why_not
from fly.backends.cpu import executor as cpu
from fly.backends.torch import TorchExecutor
from fly.cache import OutOfBlocks, PagedKVCache
from fly.drafts import (
    AdaptiveDraft,
    CascadeDraft,
    DraftStrategy,
    NGramDraft,
    SingleDraft,
    SuffixDraft,
    TreeDraft,
)
from fly.engine import Engine
from fly.parallel.compiled import CompiledPart
from fly.policies import AcceptancePolicy, AgreeingWindow, Block, Condition, EntropyGate, Exact, parse_policy
from fly.runner.executor import Executor, RoundRow, Rounds
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import Why
from tests.test_drafts import perturbed
from tests.toys import caches, random_llama

VARIANTS = [name for name in available() if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")

VOCAB, CONTEXT = 23, 200
SIZES = {"vocab_size": VOCAB, "hidden": 16, "heads": 2, "kv_heads": 1, "layers": 1, "max_positions": CONTEXT}
PLAIN = random_llama(0, **SIZES)
if VARIANTS:
    TARGET = executor_of(PLAIN, VARIANTS[0])
    DRAFTS = [
        executor_of(perturbed(PLAIN, 0.05), VARIANTS[0]),
        executor_of(random_llama(5, **SIZES), VARIANTS[0]),
        executor_of(random_llama(0, **{**SIZES, "max_positions": 30}), VARIANTS[0]),  # the target, for short texts
    ]
POLICIES = [
    Exact(),
    parse_policy("fly(theta=0.1, window=2)"),
    Exact() | EntropyGate(0.4),
    Exact() | EntropyGate(0.4) & AgreeingWindow(1),
    parse_policy("(exact | entropy(0.2)) & after(6)"),
    parse_policy("exact | ~window(2) & room(1) & ~control"),
    parse_policy("exact | entropy(0.2) & (window(1) | room(3)) & ~control"),
    # Cores that only Python knows: every block of theirs comes back open.
    parse_policy("lossy(lenience=3)"),
    parse_policy("block"),
    # More clauses than a table has room for, joined by more than '&': Python decides each mismatch.
    parse_policy("exact | (entropy(0.2) | margin(0.1)) & after(0) & after(1) & room(0) & room(1) & above(1)"),
    # What a clause reads of the past changes from round to round of one call.
    parse_policy("exact | regret(4, 2) & budget(0.2)"),
    parse_policy("exact | margin(1.5) & at_most(5) & above(9)"),
    parse_policy("exact | margin(1.5) & nats(7)"),
    parse_policy("exact | suffix_regret(0.5) & regret_budget(3) & ~regret_budget(0.2) & at_most(2, per=block)"),
    parse_policy("exact | mars(0.2) & ~phase(5, 6) & after(2)"),
    parse_policy("exact | phase(5, 6, inside_first=True) & ~margin(0.1)"),
    parse_policy("near(0.3)"),
    parse_policy("topn(4, 0.5)"),
    parse_policy("typical"),
]
FOREVER = 1e6


def engine(
    drafting: int | None, lookup: bool, most: int | None, blocks: tuple[int, int], size: int, **stop: float
) -> Engine:
    runner = Runner(TARGET, PagedKVCache(TARGET.config, blocks[0], size), control_ids=(3, 4))
    strategy: DraftStrategy | None = NGramDraft(3, 1, most or 5) if lookup else None
    if drafting is not None:
        own = {"cache_tokens": blocks[1] * size, "block_size": size, "k": most}
        strategy = SingleDraft(DRAFTS[drafting], **own, **stop)  # type: ignore[arg-type]
        if lookup:
            strategy = CascadeDraft([NGramDraft(3, 1), strategy])
    return Engine(runner, strategy)


def told(row: Row) -> tuple[object, ...]:
    return row.tokens, row.provenance, row.stats, row.drafts, row.finish_reason


def held(engine: Engine) -> list[dict[object, int]]:
    allocators = [engine.runner.cache.allocator, *(caches(engine.strategy) if engine.strategy else [])]
    return [{seq: a.length(seq) for seq in a.sequences()} for a in allocators]


def ends_at(row: Row, count: int, token: int) -> bool:
    return row.generated == count


def take_steps(made: Engine, rows: list[Row]) -> int:
    """Decode rows until all have ended or no page is left, and check after each step what was noted and is cached.
    Returns the number of steps."""
    steps = 0
    while going := [row for row in rows if not row.finish_reason]:
        try:
            made.step(going)
        except OutOfBlocks:
            return steps
        steps += 1
        for row in going:
            assert [token.id for token in row.provenance] == row.tokens[row.prompt_length :]
            cached = made.runner._cached[row.id]
            assert cached == row.tokens[: len(cached)] and len(cached) < len(row.tokens)
            assert made.runner.cache.allocator.length(row.id) == len(cached)
            if row.finish_reason:
                made.release(row)
    assert not any(held(made))
    return steps


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
        "reach": data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.4])),
    }
    cold = data.draw(st.booleans())
    drawn = {
        "temperature": data.draw(st.sampled_from([0.3, 0.7, 1.0, 2.0])),
        "top_k": data.draw(st.sampled_from([0, 0, 1, 4])),
        "top_p": data.draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
        "min_p": data.draw(st.sampled_from([0.0, 0.0, 0.2])),
    }
    most_tokens = data.draw(st.integers(1, 220))
    params = SamplingParams(max_tokens=most_tokens, **({"temperature": 0} if cold else drawn))
    seed = data.draw(st.integers(-(2**63), 2**63 - 1))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    stops = frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)))
    gate, window, room = (
        data.draw(st.sampled_from([0, 0.1, 0.4])),
        data.draw(st.integers(0, 4)),
        data.draw(st.integers(0, 5)),
    )
    drawn_rule = f"exact | entropy({gate}) & window({window}) & ~control & room({room}) & room({room})"
    policy = data.draw(st.sampled_from([*POLICIES, parse_policy(drawn_rule)]))
    k = data.draw(st.integers(0, 7))
    end = data.draw(st.sampled_from([None, 3, 17, 40]))  # as a stop string would end it

    ahead = data.draw(st.sampled_from([(1,), (7, 1), (30, 2, 1), (128, 32, 8, 1)]))  # fewer or more than there is left

    def decode(stretch: Callable[[], float]) -> tuple[Row, object]:
        made, row = (
            engine(*setting, **stop),
            Row(list(prompt), len(prompt), params, policy, seed, k, stop_ids=stops),
        )
        row.on_token = None if end is None else partial(ends_at, row, end)
        while not row.finish_reason:
            made.stretch, before = stretch(), (len(row.tokens), held(made)[0])
            try:
                made.step([row])
            except OutOfBlocks:
                assert before == (len(row.tokens), held(made)[0])
                return row, "out of blocks"
            assert [token.id for token in row.provenance] == row.tokens[row.prompt_length :]
            drafter = None if drafting is None else made.strategy.continuation([row]).runner
            for runner in filter(None, (made.runner, drafter)):
                cached = runner._cached.get(row.id, [])
                assert cached == row.tokens[: len(cached)]
                assert len(cached) < len(row.tokens) and runner.cache.allocator.length(row.id) == len(cached)
        made.release(row)
        assert not any(held(made))
        return row, None

    slow, slowly = decode(lambda: 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fly.runner.runner._EXTRA_TOKENS", ahead)
        patch.setattr("fly.backends.cpu.rounds._MAX_SCORED", data.draw(st.sampled_from([1, 20, 4096])))
        patch.setattr("fly.backends.cpu.rounds._MAX_MISMATCHES", data.draw(st.sampled_from([1, 20, 1024])))
        fast, at_once = decode(lambda: FOREVER)
        assert at_once == slowly
        assert told(fast) == told(slow)
        mixed, mixedly = decode(lambda: data.draw(st.sampled_from([0, 1e-9, FOREVER])))
        assert mixedly == slowly and told(mixed) == told(slow)


def rows_of(*prompts: list[int], policy: AcceptancePolicy | None = None, **given: object) -> list[Row]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 60, **given})
    return [Row(list(prompt), len(prompt), params, policy or Exact(), 0, 4) for prompt in prompts]


@settings(max_examples=40)
@given(data=st.data())
def test_a_row_alone_and_beside_others_by_turns(data: st.DataObject) -> None:
    setting = data.draw(st.sampled_from([None, 0, 1, 2])), data.draw(st.booleans()), None, (400, 400), 4
    stop = {"confidence": data.draw(st.sampled_from([0.0, 0.3]))}
    rows = [
        Row(
            prompt,
            len(prompt),
            SamplingParams(temperature=data.draw(st.sampled_from([0, 0.7, 1.5])), top_p=0.9, max_tokens=60),
            data.draw(st.sampled_from(POLICIES)),
            data.draw(st.integers(0, 2**62)),
            data.draw(st.sampled_from([1, 4, 6])),
        )
        for prompt in ([1, 2, 3], [7, 7], [9, 4, 1, 0])
    ]
    want = [row.sample(row.seed) for row in rows]
    plain = engine(*setting, **stop)
    plain.stretch = 0
    for row in want:
        while not row.finish_reason:
            plain.step([row])
    made = engine(*setting, **stop)
    made.stretch = data.draw(st.sampled_from([1e-9, FOREVER]))  # a round or two of each call, or as many as there are
    while going := [row for row in rows if not row.finish_reason]:
        made.step(going if data.draw(st.booleans()) else [data.draw(st.sampled_from(going))])
    assert [told(row) for row in rows] == [told(row) for row in want]


@settings(max_examples=120)
@given(data=st.data())
def test_rows_beside_one_another_take_the_rounds_of_as_many_steps(data: st.DataObject) -> None:
    """Whatever rules, temperatures, lengths and ends they have, and however full the caches are."""
    size, tight = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    blocks = tuple(data.draw(st.integers(20, 90)) if tight else 900 for _ in range(2))
    setting = data.draw(st.sampled_from([None, 0, 0, 1, 2])), data.draw(st.booleans()), None, blocks, size
    stop = {"confidence": data.draw(st.sampled_from([0.0, 0.0, 0.4]))}
    all_cold = data.draw(st.booleans())
    rules = st.sampled_from([Exact(), Exact(), *POLICIES[1:-1]])
    given_rows = [
        Row(
            prompt := data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)),
            len(prompt),
            SamplingParams(
                temperature=0 if all_cold else data.draw(st.sampled_from([0, 0.8])),
                top_k=data.draw(st.sampled_from([0, 5])),
                max_tokens=data.draw(st.integers(1, 60)),
            ),
            data.draw(rules),
            data.draw(st.integers(0, 2**62)),
            data.draw(st.integers(0, 6)),
            stop_ids=frozenset(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2))),
        )
        for _ in range(data.draw(st.integers(2, 4)))
    ]
    ends_early = data.draw(st.booleans())

    def decode(stretch: float) -> tuple[list[object], int]:
        made, rows = engine(*setting, **stop), [row.sample(row.seed) for row in given_rows]
        made.stretch = stretch
        for row in rows if ends_early else ():
            row.on_token = partial(ends_at, row, 17)
        steps = take_steps(made, rows)
        return [told(row) for row in rows], steps

    slow, many = decode(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fly.runner.runner._EXTRA_TOKENS", data.draw(st.sampled_from([(1,), (30, 1), (128, 32, 8, 1)])))
        patch.setattr("fly.backends.cpu.rounds._MAX_SCORED", data.draw(st.sampled_from([1, 60, 4096])))
        patch.setattr("fly.backends.cpu.rounds._MAX_MISMATCHES", data.draw(st.sampled_from([1, 1024])))
        fast, few = decode(FOREVER)
    assert fast == slow and few <= many


def test_a_waiting_call_ends_another_after_its_current_round() -> None:
    for count in (1, 3):
        rows, made = rows_of(*[[1, 2, 3]] * count), engine(0, False, None, (400, 400), 4)
        made.stretch = FOREVER
        made.step(rows)
        made.hurry(True)
        for _ in range(3):
            rounds = rows[0].stats.rounds
            made.step(rows)
            assert rows[0].stats.rounds == rounds + 1
        made.hurry(False)
        made.step(rows)
        assert rows[0].stats.rounds > rounds + 2 and rows[0].finish_reason


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The models of the calls that take rounds, noted as they come."""
    calls: list[object] = []
    rounds = cpu.take_rounds

    def noted(*values: Any) -> Rounds:
        calls.append(values[0])
        return rounds(*values)

    monkeypatch.setattr(cpu, "take_rounds", noted)
    return calls


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rule_that_only_python_knows_leaves_other_rows_to_compiled_code(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    decided: list[int] = []
    decide = TARGET.decide
    monkeypatch.setattr(TARGET, "decide", lambda rows, *rest: decided.append(len(rows)) or decide(rows, *rest))
    calls = calls_of(monkeypatch)
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=1, ignore_eos=True)
    prompts = [[1, 2, first] for first in range(6)]
    rules = [parse_policy("lossy(lenience=3)"), *[Exact()] * 5]
    together = LLM(TARGET, SingleDraft(DRAFTS[0]), k=4).generate(prompts, params, policy=rules)
    rounds = len(calls)
    # Python decides the first round of all six rows, which reads the prompts. After it, Python decides the blocks of
    # the first row alone.
    assert rounds > 5 and decided[0] == 6 and set(decided[1:]) == {1}
    alone = [
        LLM(TARGET, SingleDraft(DRAFTS[0]), k=4).generate([prompt], params, policy=rule)[0]
        for prompt, rule in zip(prompts, rules)
    ]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("drafting", [None, 0])
def test_a_call_takes_as_many_rounds_if_the_cache_is_full_of_idle_pages(
    monkeypatch: pytest.MonkeyPatch, drafting: int | None, share: bool
) -> None:
    calls = calls_of(monkeypatch)
    made = engine(drafting, False, None, (40, 40), 4)
    made.stretch = FOREVER
    made.runner.share = share
    needed = []
    for first in range(12):  # each needs 16 of 40 pages, and leaves most of them with content
        (row,) = rows_of([first, 1, 2])
        calls.clear()
        while not row.finish_reason:
            made.step([row])
        made.release(row)
        needed.append(len(calls))
    assert set(needed) == {1}
    assert made.runner.cache.allocator.num_idle >= 16 * share


def test_it_is_used_only_if_nothing_has_to_be_done_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)

    class Own(SingleDraft):
        pass

    def used(strategy: DraftStrategy | None, k: int = 4, rule: str = "exact", **asked: object) -> bool:
        calls.clear()
        params = SamplingParams(**{"temperature": 0, "max_tokens": 20, **asked})
        (output,) = LLM(TARGET, strategy, k=k).generate([[1, 2, 3]], params, policy=parse_policy(rule))
        assert output.token_ids
        return bool(calls)

    near = DRAFTS[0]
    assert used(SingleDraft(near, confidence=0.4)) and used(SingleDraft(near, reach=0.2))
    assert used(None) and used(SingleDraft(near)) and used(SingleDraft(near), k=0)
    assert used(SingleDraft(near), rule="fly") and used(CascadeDraft([NGramDraft(), SingleDraft(near)]))
    assert used(NGramDraft()) and not used(Own(near)) and not used(type("Own", (NGramDraft,), {})())
    assert not used(CascadeDraft([SuffixDraft(), SingleDraft(near)]))
    assert used(SingleDraft(near), rule="lossy(lenience=3)")  # whose blocks come back open
    hot: dict[str, object] = {"temperature": 0.8, "top_p": 0.9}
    assert used(None, **hot) and used(SingleDraft(near), **hot) and used(SingleDraft(near), rule="fly", **hot)
    assert used(CascadeDraft([NGramDraft(), SingleDraft(near)]), **hot)
    assert used(SingleDraft(near), rule="block", **hot)
    for asked in ({"logprobs": 1}, {"explain": True}, {"min_tokens": 20, "stop_token_ids": (1,)}):
        assert not used(None, **asked), asked
    for asked in ({"logit_bias": {3: 1.0}}, {"presence_penalty": 1.0}):
        assert not used(SingleDraft(near), **asked), asked
    assert not used(TreeDraft(near)) and used(TreeDraft(near), k=0)
    assert not used(SingleDraft(TorchExecutor(perturbed(PLAIN, 0.05))))  # a drafter that has no such call


@dataclass(frozen=True)
class Broken(Condition):
    """Cannot be asked of a row that has so many tokens behind it."""

    name = "broken"

    def evaluate(self, block: Block) -> Tensor:
        if any(len(tokens) >= 20 for tokens in block.target.history or []):
            raise RuntimeError("the condition broke")
        return torch.zeros_like(block.agree_BK)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_before_a_rule_fails_are_kept(temperature: float) -> None:
    asked = {"temperature": temperature}
    (row,), (want,) = rows_of([1, 2, 3], policy=Exact() | Broken(), **asked), rows_of([1, 2, 3], **asked)
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

    def fail(token: int) -> bool:
        if row.generated == 11:
            raise KeyError("no text")
        return False

    row.on_token = fail

    with pytest.raises(KeyError):
        while not row.finish_reason:
            made.step([row])
    assert row.generated == len(row.provenance) <= 11 and row.provenance[-1].why in (Why.BONUS, Why.CORRECTION)
    assert held(made)[0][row.id] == len(row.tokens) - 1


def test_an_error_of_the_call_leaves_row_and_caches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,), made = rows_of([1, 2, 3]), engine(0, False, None, (400, 400), 4)
    made.step([row])
    rounds, before = cpu.take_rounds, (list(row.tokens), held(made))

    def fails(*values: Any) -> Rounds:
        rounds(*values)
        raise MemoryError("no memory")

    monkeypatch.setattr(cpu, "take_rounds", fails)
    with pytest.raises(MemoryError):
        made.step([row])
    lengths = [{seq: n for seq, n in each.items() if n} for each in held(made)]
    assert (row.tokens, lengths[0]) == (before[0], before[1][0])
    assert lengths[1].get(row.id, 0) < len(row.tokens)
    monkeypatch.undo()
    (want,), plain = rows_of([1, 2, 3]), engine(0, False, None, (400, 400), 4)
    while not (row.finish_reason and want.finish_reason):
        made.step([row] if not row.finish_reason else [])
        plain.step([want] if not want.finish_reason else [])
    assert told(row) == told(want)


def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    wider = executor_of(random_llama(3, **{**SIZES, "vocab_size": 500}), VARIANTS[0])
    with pytest.raises(ValueError, match="500 tokens, the target's 23"):
        Engine(Runner(TARGET, PagedKVCache(TARGET.config, 99, 4)), SingleDraft(wider))


def test_a_draft_length_beyond_all_use_costs_nothing() -> None:
    (row,), (want,) = rows_of([1, 2, 3]), rows_of([1, 2, 3])
    row.k, want.k = 10**12, 59
    for each in (row, want):
        made, steps = engine(0, False, None, (400, 400), 4), 0
        made.stretch = FOREVER
        while not each.finish_reason:
            made.step([each])
            steps += 1
        assert steps <= 5  # the prompt's, and few for all that follows
    assert told(row) == told(want)


def test_a_rule_with_corrections_of_its_own_draws_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above temperature 0; compiled code knows the exact rule's alone."""

    @dataclass(frozen=True)
    class Always(Exact):
        name = "always"

        def residual(self, target_BV: Tensor, draft_BV: Tensor) -> Tensor:
            return torch.eye(target_BV.shape[1])[7].expand_as(target_BV)

    for policy in (Always(), Always() | EntropyGate(9.0)):
        made = engine(1, False, None, (400, 400), 4)
        (row,) = rows_of([1, 2, 3], policy=policy, temperature=1.0)
        while not row.finish_reason:
            made.step([row])
        corrections = [token.id for token in row.provenance if token.why == Why.CORRECTION]
        assert len(corrections) > 9 and set(corrections) == {7}


def test_ranks_have_no_such_call() -> None:
    assert not issubclass(CompiledPart, Executor) and TorchExecutor.rounds is Executor.rounds


@dataclass(frozen=True)
class OwnGate(EntropyGate):
    """Somebody's own, which compiled code must not take for the one it is a subclass of."""

    name = "own_gate"

    def evaluate(self, block: Block) -> Tensor:
        return torch.ones_like(block.agree_BK)


def test_what_compiled_code_asks_itself_and_what_it_leaves_to_python() -> None:
    for rule, count in (
        ("fly", 4),
        ("fly.reference", 4),
        ("exact | entropy(0.4)", 1),
        ("exact | ~control & room(2)", 2),
        ("(exact | entropy(0.2)) & after(6)", 2),
        ("fly & budget(0.1)", 5),
        ("fly.paper", 4),
        ("exact | entropy(0.2) | window(1)", 2),
        ("exact | ~(entropy(0.2) & ~window(1))", 2),
    ):
        relaxation = parse_policy(rule).relaxation
        assert relaxation is not None
        clauses = relaxation.compiled
        assert clauses is not None and len(clauses) == count == len(relaxation.clauses)
    for rule in (
        "fly & token(digits)",
        "fly & phase('<think>', 6)",
    ):
        relaxation = parse_policy(rule).relaxation
        assert relaxation is not None and relaxation.compiled is None
    assert OwnGate(9.0).compiled is None and (~OwnGate(9.0)).compiled is None
    (row,) = rows_of([1, 2, 3], policy=Exact() | OwnGate(9.0))
    made = engine(1, False, None, (400, 400), 4)
    while not row.finish_reason:
        made.step([row])
    (gate,) = row.stats.gates.values()
    assert row.stats.relaxed > 9 and gate.passed == gate.asked


def test_rounds_in_one_call_read_the_account_that_the_row_keeps() -> None:
    (row,) = rows_of([1, 2, 3])
    assert RoundRow.of(row, 5, 3).account is row.stats


def test_what_a_rule_was_asked_with_is_not_held_on_to() -> None:
    held_on: list[weakref.ref[Tensor]] = []

    @dataclass(frozen=True)
    class Spy(Condition):
        name = "spy"

        def evaluate(self, block: Block) -> Tensor:
            held_on.append(weakref.ref(block.target.logits_BKV))
            return torch.zeros_like(block.agree_BK)

    gc.disable()
    try:
        (row,), made = rows_of([1, 2, 3], policy=Exact() | Spy()), engine(1, False, None, (400, 400), 4)
        while not row.finish_reason:
            made.step([row])
        assert held_on and not any(seen() is not None for seen in held_on)
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["model", "n-gram", "cascade"])
def test_adaptive_rounds_are_taken_at_once_and_counted_one_by_one(name: str, count: int) -> None:
    """Whatever it decides, tokens are the target's own, and it hears of every round."""
    strategies: dict[str, Callable[[], DraftStrategy]] = {
        "model": lambda: SingleDraft(executor_of(PLAIN, VARIANTS[0])),
        "n-gram": lambda: NGramDraft(3, 1),
        "cascade": lambda: CascadeDraft([SuffixDraft(), SingleDraft(DRAFTS[1])]),
    }
    adaptive = AdaptiveDraft(strategies[name]())
    made = Engine(Runner(TARGET, PagedKVCache(TARGET.config, 999, 4)), adaptive)
    prompts = [[1, 2, 3], [7, 7], [9, 4, 1, 0]][:count]
    wanted = rows_of(*prompts, max_tokens=150)
    plain = engine(None, False, None, (400, 400), 4)
    for want in wanted:
        while not want.finish_reason:
            plain.step([want])
    taken = 0
    for _ in range(6):
        rows, steps = rows_of(*prompts, max_tokens=150), 0
        rows[-1].k = 0 if count > 1 else 4  # one is not to be drafted for
        while going := [row for row in rows if not row.finish_reason]:
            made.step(going)
            steps += 1
            for row in rows:
                assert row.stats.rounds >= len(row.drafts) and row.generated == len(row.provenance)
        for row, want in zip(rows, wanted):
            assert row.tokens == want.tokens
            assert row.stats.drafted == sum(n for n, _ in row.drafts)
            assert row.stats.accepted == sum(n for _, n in row.drafts)
            made.release(row)
        assert steps <= sum(row.stats.rounds for row in rows) + 1
        taken += steps < max(row.stats.rounds for row in rows)
        assert not any(held(made))
    assert taken == 6
    assert any(load.costs.step is not None and load.rates.tried for load in adaptive._measured.values())
