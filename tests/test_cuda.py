"""The CUDA backend on an emulated device: the texts of the CPU, one wait a round, no graph captured twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.backends import executor_of
from fly.backends.cuda import attention, rounds
from fly.backends.cuda import executor as cuda_executor
from fly.backends.cuda.chain import look_up
from fly.backends.cuda.device_round import DeviceRound
from fly.backends.cuda.executor import CudaExecutor
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import (
    CascadeDraft,
    DraftStrategy,
    NGramDraft,
    SingleDraft,
)
from fly.drafts.ngram import Index
from fly.engine import Engine
from fly.models import Llama
from fly.models.families import FULL, SLIDING
from fly.ops import derive, derived
from fly.policies import AcceptancePolicy, Exact, condition_types, parse_policy, policy_types
from fly.policies.waits import find_wait
from fly.runner.executor import Executor, Lookup, TokenByToken, Wrapped
from fly.runner.request import BadWords, Row
from fly.runner.runner import Runner
from fly.testing.policies import check_cuda_graph
from fly.types import SamplingParams
from tests.emulator import Gpu, emulated
from tests.test_drafts import perturbed
from tests.toys import build_llama, random_llama

VOCAB = 23
SIZES = {"vocab_size": VOCAB, "hidden": 16, "heads": 2, "kv_heads": 1, "layers": 1, "max_positions": 700}
TARGET = random_llama(0, **SIZES)
DRAFTS = {"near": perturbed(TARGET, 0.05), "short": perturbed(random_llama(0, **{**SIZES, "max_positions": 40}), 0.05)}
SLIDES = {"layer_types": (SLIDING, FULL), "sliding_window": 3, "num_hidden_layers": 2}
SLIDING_TARGET = build_llama(TARGET.config.model_copy(update=SLIDES))
WINDOWED = SLIDING_TARGET, perturbed(SLIDING_TARGET, 0.05)
POLICIES = [
    Exact(),
    parse_policy("fly(theta=0.1, window=2, hold=2)"),
    parse_policy("(exact | entropy(0.2)) & after(6)"),
    parse_policy("exact | entropy(0.1) & budget(0.3) & nats(9.0) & ~control"),
    parse_policy("lossy(lenience=3)"),
    parse_policy("typical"),
    parse_policy("exact | entropy(0.1) & above(12)"),  # it asks for the text: no graph holds that
]
IN_GRAPHS = POLICIES[:-1]


def on_gpu(model: Llama) -> Llama:
    """The same model with its weights there."""
    made = Llama(model.config).eval()
    for module, original in zip(made.modules(), model.modules()):
        for name, weight in list(original.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(weight.data.to("cuda"), requires_grad=False))
    return made


@contextmanager
def device(way: str = "pages") -> Iterator[Gpu]:
    """An emulated device, whose attention goes this way (``WAYS``): by our kernels, by FlashAttention, which takes
    float32 too, or over copies."""
    with pytest.MonkeyPatch.context() as patch, emulated(any_dtype=True) as gpu:
        attend_by(way, patch)
        yield gpu


WAYS = ["pages", "flash", "copies"]


def attend_by(way: str, patch: pytest.MonkeyPatch) -> None:
    for module, name, used in (
        ("attention", "takes_pages", way == "pages"),
        ("executor", "takes_pages", way == "pages"),
        ("attention", "takes_flash", way == "flash"),
    ):
        patch.setattr(f"fly.backends.cuda.{module}.{name}", lambda cache, used=used: used)


def engine_of(run: Callable[[Llama], Executor], drafting: str | None, lookup: bool = False, **stop: Any) -> Engine:
    executor = run(TARGET)
    strategy: DraftStrategy | None = NGramDraft(3, 1, 4) if lookup else None
    if drafting is not None:
        strategy = SingleDraft(run(DRAFTS[drafting]), cache_tokens=6000, **stop)
        strategy = CascadeDraft([NGramDraft(3, 1, 4), strategy]) if lookup else strategy
    return Engine(Runner(executor, PagedKVCache.for_model(executor, 6000), control_ids=(3, 4)), strategy)


def on_cpu(model: Llama) -> Executor:
    return TorchExecutor(model)


def there(model: Llama) -> Executor:
    made = executor_of(on_gpu(model))
    assert isinstance(made, CudaExecutor)
    return made


def told(row: Row) -> tuple[object, ...]:
    return row.tokens, row.provenance, replace(row.stats, nats=round(row.stats.nats, 3)), row.drafts, row.finish_reason


def row_of(prompt: list[int], policy: AcceptancePolicy | None = None, k: int = 4, seed: int = 1, **asked: Any) -> Row:
    stops = frozenset(asked.pop("stops", ()))
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, **asked})
    bad = BadWords(params.bad_words_ids)
    return Row(list(prompt), len(prompt), params, policy or Exact(), seed, k, stop_ids=stops, bad=bad)


def decode(engine: Engine, rows: list[Row], most: int = 10**6) -> None:
    while (going := [row for row in rows if not row.finish_reason]) and most:
        engine.step(going)
        most -= 1


prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    st.integers(244, 256).map(lambda n: [(i * i) % VOCAB for i in range(n)]),  # just before its second page
)


@settings(max_examples=15)
@given(data=st.data())
def test_rounds_on_the_device_are_those_of_the_cpu(data: st.DataObject) -> None:
    drafting = data.draw(st.sampled_from(["near", "near", "near", "short", None]))
    lookup, way = data.draw(st.booleans()), data.draw(st.sampled_from(WAYS))
    stop = {} if drafting is None else {"confidence": data.draw(st.sampled_from([0.0, 0.0, 0.3]))}
    if stop and data.draw(st.booleans()):
        stop |= {"reach": data.draw(st.sampled_from([0.0, 0.01, 0.2]))}
    cold = data.draw(st.booleans())
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        temperature = 0.0 if cold else data.draw(st.sampled_from([0.0, 0.7, 1.0]))
        rows.append(
            row_of(
                data.draw(prompts), data.draw(st.sampled_from(POLICIES)), data.draw(st.integers(0, 6)),
                data.draw(st.integers(-(2**63), 2**63 - 1)), temperature=temperature,
                max_tokens=data.draw(st.integers(1, 30)),
                stops=data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)),
                top_k=data.draw(st.sampled_from([0, 5])), top_p=data.draw(st.sampled_from([1.0, 0.9])),
                min_p=data.draw(st.sampled_from([0.0, 0.05])),
            )
        )  # fmt: skip
    want = [row.sample(row.seed) for row in rows]
    plain = engine_of(on_cpu, drafting, lookup, **stop)
    plain.stretch = 0
    decode(plain, want)
    leaves = data.draw(st.sampled_from([None, None, 0, len(rows) - 1]))  # a row that is cancelled on its way
    with device(way):
        engine = engine_of(there, drafting, lookup, **stop)
        ways = data.draw(st.sampled_from([[1e-9], [1e6], [0], [0, 1e6]]))  # a round a call, or many, or the plain way
        going = list(rows)
        for step in range(10**6):
            if leaves is not None and step == 3 and not rows[leaves].finish_reason:
                engine.release(rows[leaves])
                going.remove(rows[leaves])
                rows[leaves].finish_reason = "cancelled"
            going = [row for row in going if not row.finish_reason]
            if not going:
                break
            engine.stretch = ways[step % len(ways)]
            before = [row.generated for row in going]
            engine.step(going)
            for row, generated in zip(going, before):
                assert row.generated == len(row.provenance) > generated
                cached = engine.runner._cached[row.id]
                assert cached == row.tokens[: len(cached)] and len(cached) < len(row.tokens)
                if row.finish_reason:
                    engine.release(row)
    for row, other in zip(rows, want):
        if row.finish_reason == "cancelled":
            assert row.tokens == other.tokens[: len(row.tokens)]
        else:
            assert told(row) == told(other)


KINDS = [("near", False, {}), ("near", True, {}), ("near", True, {"reach": 0.2}), (None, True, {}), (None, False, {})]


def made_by(engine: Engine) -> list[DeviceRound]:
    """The rounds with a drafter, the last used at the end."""
    (rounds_of,) = engine.runner.executor._rounds.values()  # type: ignore[attr-defined]
    return [each for each in rounds_of.made.values() if each.drafter is not None]


def forwards_of(engine: Engine) -> int:
    """Of the last draft."""
    chain = made_by(engine)[-1].chain
    assert chain is not None
    return chain.forwards


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("drafting", "lookup", "stop"), KINDS)
def test_a_round_is_one_wait_and_a_few_launches(
    drafting: str | None, lookup: bool, stop: dict[str, Any], temperature: float, count: int
) -> None:
    with device() as gpu:
        engine = engine_of(there, drafting, lookup, **stop)
        engine.stretch = 1e-9
        rows = [
            row_of([1, 2, 3 + b], POLICIES[b % 2], seed=b, temperature=temperature, max_tokens=300)
            for b in range(count)
        ]
        decode(engine, rows, 4)
        for _ in range(3):
            gpu.waits.clear(), gpu.launches.clear()
            gpu.glances = 0
            engine.step(rows)
            assert [place for place in gpu.waits if "event" not in place] == [] and len(gpu.waits) == 1
            # draft, score and decide; the state and, at times, pages or copies go up, and the result comes down
            further = 0
            if stop or (lookup and drafting is not None):  # a graph a forward, with a number of where it stands
                further = forwards_of(engine) - 1
            assert further < rows[0].k and gpu.glances <= further
            assert gpu.launches["graph"] == 2 + (drafting is not None or lookup) + further
            assert gpu.launches.total() <= 7 + (drafting is not None and count) + 2 * further


@pytest.mark.parametrize("lookup", [False, True])
def test_a_draft_takes_no_more_forwards_than_it_needs_and_one(lookup: bool) -> None:
    """Where it stops by itself, or copied tokens stand: as many as step by step on the CPU."""
    needed: list[int] = []

    class Counted(SingleDraft):
        def propose(self, rows: Any, max_len: Any, worth: float = 0.0) -> Any:
            needed.append(0)
            return super().propose(rows, max_len, worth)

    class Counting(Wrapped):
        def score(self, *arguments: Any) -> Any:
            needed[-1] += 1
            return super().score(*arguments)

    k, stop = 12, {} if lookup else {"reach": 0.3}
    prompt = [1, 2, 3, 4, 5, 6] * 3
    for temperature in (0.0, 0.8):
        needed.clear()
        level: DraftStrategy = Counted(
            Counting(on_cpu(DRAFTS["near"])), NGramDraft(3, 1, 4) if lookup else None, **stop
        )
        plain = Engine(Runner(on_cpu(TARGET), PagedKVCache.for_model(on_cpu(TARGET), 6000)), level)
        plain.stretch = 0  # type: ignore[attr-defined]
        want, row = (row_of(prompt, k=k, temperature=temperature, max_tokens=70) for _ in range(2))
        decode(plain, [want])
        with device():
            engine, taken = engine_of(there, "near", lookup, **stop), list[int]()
            engine.stretch = 1e-9
            engine.step([row])
            while not row.finish_reason:
                engine.step([row])
                taken += [forwards_of(engine)] if made_by(engine) else []
        assert told(row) == told(want)
        assert all(most <= own <= most + 1 for own, most in zip(taken, needed))
        assert temperature or sum(taken) < 0.7 * k * len(taken)


@given(st.data())
def test_prompt_lookup_on_the_device_is_that_of_the_host(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3))
    longest = data.draw(st.integers(1, 5))
    shortest, most = data.draw(st.integers(1, longest)), data.draw(st.integers(1, 7))
    text_RS = torch.randint(0, 3, (len(texts), 24), generator=torch.Generator().manual_seed(0))  # what comes after
    for row_S, text in zip(text_RS, texts):
        row_S[: len(text)] = torch.tensor(text)
    lookup = Lookup(longest, shortest, most)
    copied_RW, found_R = look_up(text_RS, torch.tensor([len(text) for text in texts]), lookup, most)
    for text, tokens, found in zip(texts, copied_RW.tolist(), found_R.tolist()):
        assert (tokens if found else []) == Index(longest, shortest).copied(text, most)


def test_prompt_lookup_is_left_out_where_forwards_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some number of tokens a forward takes longer than reading the weights does; texts are the same."""
    monkeypatch.setattr(rounds, "_RIDGE", 10)
    for count, copies in ((2, 3), (4, 0)):
        rows, want = ([row_of([1, 2, 1, 2, b], max_tokens=20, seed=b) for b in range(count)] for _ in range(2))
        decode(engine_of(on_cpu, "near", True), want)
        with device():
            engine = engine_of(there, "near", True)
            decode(engine, rows)
            assert made_by(engine)[0].shape.copies == copies
        assert [told(row) for row in rows] == [told(row) for row in want]


def test_rounds_are_freed_with_their_cache() -> None:
    with device():
        engine, row = engine_of(there, "near", True), row_of([1, 2, 3], max_tokens=40)
        decode(engine, [row])
        executor: Any = engine.runner.executor
        drafter: Any = made_by(engine)[-1].drafter
        assert len(executor._rounds) == len(drafter.model._rounds) == 1
        del engine
        assert not executor._rounds and not drafter.model._rounds


def test_no_graph_is_captured_again_in_30_ragged_rounds() -> None:
    with device() as gpu:
        engine = engine_of(there, "near", confidence=0.2)
        engine.stretch = 1e-9

        def batch(first: int) -> list[Row]:
            prompts = [[1, 2, first], [5] * (first % 7 + 1), [first, 3]]
            return [
                row_of(
                    prompt, POLICIES[b % 2], 2 + 3 * b, seed=first, temperature=0.8 * (b > 1), max_tokens=60, stops=()
                )
                for b, prompt in enumerate(prompts)
            ]

        def ragged(first: int) -> int:
            rows = batch(first)
            while going := [row for row in rows if not row.finish_reason]:
                engine.step(going)
            for row in rows:
                engine.release(row)
            return sum(row.stats.rounds for row in rows)

        ragged(1), ragged(2)
        before, taken = gpu.graphs, 0
        for first in range(3, 40):
            if (taken := taken + ragged(first % VOCAB)) > 30:
                break
        assert taken > 30 and gpu.graphs == before


def test_pages_go_up_only_where_they_changed() -> None:
    with device():
        engine = engine_of(there, "near")
        engine.stretch = 1e-9
        row = row_of([1, 2, 3], max_tokens=200)
        changed = 0
        decode(engine, [row], 4)
        (round_,) = made_by(engine)
        while not row.finish_reason and row.generated < 190:
            before = round_.table._loaded_pages
            engine.step([row])
            changed += round_.table._loaded_pages is not before
        assert changed <= 4  # of two caches, with what is reserved ahead


@pytest.mark.parametrize("rule", ["exact | entropy(0.1) & above(12)", "exact | entropy(0.1) & phase(3, 4)"])
def test_what_a_graph_cannot_hold_waits_at_most_three_times(rule: str) -> None:
    policy = parse_policy(rule)
    assert "text before the block" in str(find_wait(policy))
    with device() as gpu:
        engine = engine_of(there, "near")
        engine.stretch = 1e-9
        rows = [row_of([1, 2, 3], policy, max_tokens=100), row_of([4, 5], policy, max_tokens=100)]
        decode(engine, rows, 4)
        gpu.waits.clear(), gpu.launches.clear()
        engine.step(rows)
        assert len(gpu.waits) <= 3 and gpu.launches["graph"] == 3


@pytest.mark.parametrize(("outside", "temperature"), [("by its text", 0.0), ("by a value", 0.8)])
def test_a_graph_decides_for_the_neighbours_of_a_rule_that_none_can_hold(outside: str, temperature: float) -> None:
    """The rule runs operation by operation, and waits as often as alone. Its neighbours add no launch to that but the
    joining of the lines (a view of each group and one copy), and get what they get alone."""
    rule = POLICIES[-1] if outside == "by its text" else ByValue()

    def batch(policies: list[AcceptancePolicy]) -> list[Row]:
        return [row_of([1, 2, 3 + b], p, 4, b, temperature=temperature, max_tokens=20) for b, p in enumerate(policies)]

    def count(policies: list[AcceptancePolicy]) -> tuple[list[str], Counter[str]]:
        engine, rows = engine_of(there, "near"), batch(policies)
        engine.stretch = 1e-9
        decode(engine, rows, 4)
        gpu.waits.clear(), gpu.launches.clear()
        engine.step(rows)
        counted = [*gpu.waits], gpu.launches.copy()
        decode(engine, rows)
        for row, alone in zip(rows, batch(policies)):
            decode(engine_of(on_cpu, "near"), [alone])
            assert told(row) == told(alone)
        return counted

    with device() as gpu:
        waits, launches = count([rule])
        waits_beside, launches_beside = count([rule, *IN_GRAPHS[:3]])
        assert waits_beside == waits
        assert launches["graph"] == launches_beside["graph"] == 3  # draft, score, and all other decisions
        assert (launches_beside - launches).total() <= len(IN_GRAPHS[:3]) + 1


def test_what_graphs_do_not_take_goes_the_plain_way(caplog: pytest.LogCaptureFixture) -> None:
    """A draft of more forwards than one graph has, and a round of too many bytes: once for each, the log says why."""
    rounds.note_plain_way.cache_clear()
    (row,) = [row_of([1, 2, 3], k=rounds.LONGEST + 1, max_tokens=8)]
    with device():
        decode(engine_of(there, "near"), [row])
        rows, engine = [row_of([1, 2, b], max_tokens=20) for b in range(12)], engine_of(there, "near")
        engine.runner.executor._find_rounds(engine.runner.cache).budget = 2_000  # type: ignore[attr-defined]
        decode(engine, rows)
    said = [record.getMessage() for record in caplog.records if "take the plain way" in record.getMessage()]
    assert "longer than the 128" in said[0] and "12 rows and drafts of 4 tokens take 0.13 GiB" in said[1]
    assert len(said) == len(set(said))
    want = [
        row_of([1, 2, 3], k=rounds.LONGEST + 1, max_tokens=8),
        *(row_of([1, 2, b], max_tokens=20) for b in range(12)),
    ]
    for other in want:
        decode(engine_of(on_cpu, "near"), [other])
    assert [told(each) for each in (row, *rows)] == [told(each) for each in want]


def test_what_comes_often_is_compiled_inside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced whole (a graph break would be an error), and never for a prompt; texts are the same."""
    monkeypatch.setattr(CudaExecutor, "compiles_after", 3)
    torch._dynamo.reset()
    deep, small = (random_llama(seed, **{**SIZES, "layers": 2}) for seed in (3, 4))
    # drafts of one token: then both models are fed two at a time, and share what is compiled
    row, other, want, alike = (row_of([1, 2, 3 + n % 2], POLICIES[n % 2], 1, max_tokens=30) for n in range(4))

    def engine_on(run: Callable[[Llama], Executor]) -> Engine:
        executor = run(deep)
        drafts = SingleDraft(run(small), cache_tokens=6000)
        return Engine(Runner(executor, PagedKVCache.for_model(executor, 6000)), drafts)

    plain = engine_on(on_cpu)
    decode(plain, [want]), decode(plain, [alike])
    with device() as gpu:
        engine = engine_on(there)
        engine.stretch = 1e-9
        for each in (row, other):
            before = gpu.compiled.copy()
            engine.step([each])
            assert gpu.compiled == before  # of a prompt
            decode(engine, [each])
        names = {name for name, _ in gpu.compiled}
        assert (
            names == {"_before_attention", "_between_attentions", "_after_attention"}
            and made_by(engine)[-1].shape.compiled
        )
        assert gpu.compiled["_between_attentions", True] > 0  # captured, and launched no more
        assert gpu.compiled["_between_attentions", True] == gpu.compiled["_before_attention", True]
        assert sum(gpu.compiled.values()) < 60
        slow = engine.runner.executor.deterministic()
        assert isinstance(slow, TokenByToken) and isinstance(slow.inner, CudaExecutor)
        assert not slow.inner.compiles_layers
    assert [told(row), told(other)] == [told(want), told(alike)]


def test_layers_that_cannot_be_compiled_go_on_as_they_were(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no C compiler is here\nand more of that")

    monkeypatch.setattr(CudaExecutor, "compiles_after", 3)
    monkeypatch.setattr(cuda_executor, "CompiledLayers", Broken)
    want, row = (row_of([1, 2, 3], max_tokens=100) for _ in range(2))
    decode(engine_of(on_cpu, "near"), [want])
    with device():
        engine = engine_of(there, "near")
        engine.stretch = 1e-9
        decode(engine, [row])
        assert not engine.runner.executor.compiles_layers
    assert told(row) == told(want)
    said = [record.getMessage() for record in caplog.records if "layers are not compiled" in record.getMessage()]
    assert len(said) == 2  # of each model
    assert said[0].endswith("RuntimeError: no C compiler is here")


def test_a_rule_that_raises_discards_its_round() -> None:
    class Broken(type(POLICIES[2])):  # type: ignore[misc]
        def accept_probs(self, target: Any, draft: Any) -> Any:
            if target.history is not None and len(target.history[0]) > 12:
                raise KeyError("the rule broke")
            return super().accept_probs(target, draft)

    policy = Broken(Exact(), parse_policy("exact | entropy(0.1)").relaxation)
    with device():
        engine, row = engine_of(there, "near"), row_of([1, 2, 3], policy, max_tokens=60)
        with pytest.raises(KeyError, match="the rule broke"):
            decode(engine, [row])
        assert len(row.tokens) > 12 and not row.finish_reason
        row.policy = Exact()
        decode(engine, [row])
    want = row_of([1, 2, 3], max_tokens=60)
    decode(engine_of(on_cpu, "near"), [want])
    assert row.finish_reason == "length" and len(row.tokens) == len(want.tokens)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=5))
def test_seeds_are_derived_on_the_device_as_on_the_host(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*pairs))
    assert derived(seeds, positions).tolist() == [derive(*pair) for pair in pairs]


class ByValue(type(Exact())):  # type: ignore[misc]
    """Looks at a value on the host."""

    def accept_probs(self, target: Any, draft: Any) -> Any:
        return super().accept_probs(target, draft) * bool(draft.lengths_B.sum() > 0)


def test_of_all_rules_only_those_that_read_the_text_or_keep_accounts_are_outside_of_graphs() -> None:
    asked = {"phase": "phase(3, 5)", "token": "token(digits)"}
    texts = [*policy_types(), *(f"exact | {asked.get(name, name)}" for name in condition_types())]
    outside = [text for text in texts if check_cuda_graph(parse_policy(text)) != "runs inside the graph"]
    assert sorted(outside) == ["exact | above", "exact | phase(3, 5)", "exact | regret_budget"]


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (lambda x: bool(x.sum() > 0), "a tensor's value"),
        (lambda x: x[x > 0], "a mask as an index"),
        (lambda x: x.repeat_interleave(x.long().flatten(), 0), "the shape of what repeat_interleave gives"),
        (lambda x: torch.argwhere(x), "the shape of what nonzero gives"),
        (lambda x: x.tolist(), "copied between host and device"),
        (lambda x: x + torch.tensor([1.0], device=x.device), "values of the host"),
        (lambda x: x[x.long().flatten()[:1]], None),
        (lambda x: x.repeat_interleave(2, 0), None),
    ],
)
def test_what_waits_is_found_by_torchs_tags(wait: Callable[[Any], Any], said: str | None) -> None:
    class Waiting(type(Exact())):  # type: ignore[misc]
        def accept_probs(self, target: Any, draft: Any) -> Any:
            wait(draft.own_probs_BK())
            return super().accept_probs(target, draft)

    found = find_wait(Waiting())
    assert (found is None) if said is None else (found is not None and said in found)


def test_the_detector_names_the_line() -> None:
    assert all(find_wait(policy, drawn, drawn) is None for policy in IN_GRAPHS for drawn in (False, True))
    assert check_cuda_graph(POLICIES[1]) == "runs inside the graph"
    assert check_cuda_graph(POLICIES[-1]).startswith("runs outside of the graph: it looks at the text before the block")
    said = find_wait(ByValue())
    assert said is not None and "test_cuda.py" in said and "Python looks at a tensor's value" in said


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_a_gpu_the_texts_are_those_of_plain_rounds(temperature: float) -> None:
    dtype = torch.float32  # in halves near ties fall otherwise in another batch
    rows = [row_of([1, 2, 3 + b], POLICIES[b % 3], 3 + b, b, temperature=temperature) for b in range(4)]
    want = [row.sample(row.seed) for row in rows]
    assert dtype == TARGET.dtype
    plain, engine = engine_of(there, "near"), engine_of(there, "near")
    plain.stretch = 0
    decode(plain, want), decode(engine, rows)
    assert [told(row) for row in rows] == [told(row) for row in want]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_on_a_gpu_attention_over_pages_is_that_over_a_copy(window: int | None) -> None:
    check_attention(window, torch.bfloat16, 2e-2)


@pytest.mark.parametrize("window", [None, 1, 100])
def test_all_ways_of_attention_are_that_of_a_row_alone(window: int | None) -> None:
    with device():
        check_attention(window, torch.float32, 1e-5)


def check_attention(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    """All ways over scattered pages, for new tokens of several rows, against one row after the other."""
    config = TARGET.config.model_copy(update={"num_attention_heads": 4, "num_key_value_heads": 2})
    cache = PagedKVCache(config, 9, 256, dtype, "cuda")
    table = torch.tensor([[7, 2, 5], [0, 8, 9], [3, 9, 9]], dtype=torch.int32).to("cuda")
    start = torch.tensor([509, 100, 0]).to("cuda")
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to("cuda", dtype)

    with torch.inference_mode():
        for pages, stored in ((table, torch.ones(3, 5, dtype=torch.bool).to("cuda")),):
            history = random(9 * 256, 2, 8)
            cache.keys[0][: 9 * 256] = history
            cache.values[0][: 9 * 256] = history.flip(0)
            new = random(15, 4, 8), random(15, 2, 8), random(15, 2, 8)
            found = []
            for way in WAYS:
                with pytest.MonkeyPatch.context() as patch:
                    attend_by(way, patch)
                    _, kv = attention.place_tokens(cache, pages, start, stored)
                    found.append(kv.attend(0, *new, window))
        keys, values = (x[0].float().cpu().unflatten(0, (-1, 256)) for x in (cache.keys, cache.values))
    for b, (first, pages_B) in enumerate(zip(start.tolist(), table.cpu().long())):
        k, v = (x[pages_B].flatten(0, 1)[: first + 5].transpose(0, 1) for x in (keys, values))
        q = new[0].float().cpu()[5 * b : 5 * b + 5].transpose(0, 1)
        behind = torch.arange(first, first + 5).unsqueeze(1) - torch.arange(first + 5)
        mask = (behind >= 0) & (behind < (window or math.inf))
        want = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0]
        for out in found:
            own = out.float().cpu()[5 * b : 5 * b + 5].transpose(0, 1)
            torch.testing.assert_close(own, want, rtol=tolerance, atol=tolerance)
