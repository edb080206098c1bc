"""The CUDA backend on an emulated device: the texts of the CPU, one wait a round, no graph captured twice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import Unsupported

from fly.backends import executor_of
from fly.backends.cuda import attention, fused, rounds
from fly.backends.cuda.chain import looked_up
from fly.backends.cuda.executor import CudaExecutor
from fly.backends.cuda.waits import host_wait
from fly.backends.cuda.work import Work
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.constraints import constrain
from fly.drafts import (
    CascadeDraft,
    ChooseDraft,
    DraftStrategy,
    NGramDraft,
    SingleDraft,
    TreeDraft,
    UnionDraft,
)
from fly.drafts.ngram import Index
from fly.engine import Engine
from fly.executor import Executor, Lookup, TokenByToken
from fly.models import Llama
from fly.models.families import FULL, SLIDING
from fly.models.tokenizer import Tokenizer
from fly.ops import Stream, derive, derived, draw, uniforms
from fly.policies import AcceptancePolicy, Exact, condition_types, parse_policy, policy_types
from fly.request import BadWords, Sequence
from fly.runner import Runner
from fly.sampling import BatchSampling
from fly.structured import Grammars
from fly.testing.policies import check_cuda_graph
from fly.types import SamplingParams
from tests.emulator import Gpu, emulated
from tests.test_drafts import perturbed
from tests.test_structured import save_tokenizer
from tests.toys import build_llama, dense_logits, random_llama

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
def device(flash: bool = True) -> Iterator[Gpu]:
    """An emulated device, whose FlashAttention takes float32 too."""
    with pytest.MonkeyPatch.context() as patch, emulated() as gpu:
        for module in (attention, rounds):
            patch.setattr(module, "flash_takes", lambda cache: flash)
        patch.setattr("fly.backends.cuda.table.flash_takes", lambda cache: flash)
        patch.setattr("fly.backends.cuda.executor.flash_takes", lambda cache: flash)
        yield gpu


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


def told(row: Sequence) -> tuple[object, ...]:
    return row.tokens, row.provenance, replace(row.stats, nats=round(row.stats.nats, 3)), row.drafts, row.finish_reason


def row_of(
    prompt: list[int], policy: AcceptancePolicy | None = None, k: int = 4, seed: int = 1, **asked: Any
) -> Sequence:
    stops = frozenset(asked.pop("stops", ()))
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, **asked})
    bad = BadWords(params.bad_words_ids)
    return Sequence(list(prompt), len(prompt), params, policy or Exact(), seed, k, stop_ids=stops, bad=bad)


def decode(engine: Engine, rows: list[Sequence], most: int = 10**6) -> None:
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
    lookup, flash = data.draw(st.booleans()), data.draw(st.booleans())
    stop = {} if drafting is None else {"confidence": data.draw(st.sampled_from([0.0, 0.0, 0.3]))}
    if stop and data.draw(st.booleans()):
        stop |= {"entropy": 1.5, "reach": data.draw(st.sampled_from([0.0, 0.01, 0.2]))}
    cold = data.draw(st.booleans())
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        temperature = 0.0 if cold else data.draw(st.sampled_from([0.0, 0.7, 1.0]))
        asked: dict[str, Any] = {"top_k": data.draw(st.sampled_from([0, 5]))}
        asked |= {"top_p": data.draw(st.sampled_from([1.0, 0.9]))}
        asked |= data.draw(
            st.sampled_from([{}, {}, {"repetition_penalty": 1.3, "logit_bias": {5: 1.0}, "min_tokens": 9}])
        )
        if data.draw(st.booleans()):
            word = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)
            asked |= {"bad_words_ids": data.draw(st.lists(word, max_size=9))}
        rows.append(
            row_of(
                data.draw(prompts), data.draw(st.sampled_from(POLICIES)), data.draw(st.integers(0, 6)),
                data.draw(st.integers(-(2**63), 2**63 - 1)), temperature=temperature,
                max_tokens=data.draw(st.integers(asked.get("min_tokens", 1), 30)),
                stops=data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)),
                min_p=data.draw(st.sampled_from([0.0, 0.05])), **asked,
            )
        )  # fmt: skip
    want = [row.sample(row.seed) for row in rows]
    plain = engine_of(on_cpu, drafting, lookup, **stop)
    plain.stretch = 0
    decode(plain, want)
    leaves = data.draw(st.sampled_from([None, None, 0, len(rows) - 1]))  # a row that is cancelled on its way
    with device(flash):
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
            emitted = engine.step(going)
            assert all(emitted)
            for row in going:
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


def works_of(engine: Engine) -> list[Work]:
    """What was made for whole rounds."""
    (works,) = engine.runner.executor._works.values()  # type: ignore[attr-defined]
    return [work for work in works.made.made.values() if work.shape.pages and work.shape.draft_pages]


@pytest.mark.parametrize("count", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("drafting", "lookup", "stop"), KINDS)
def test_a_round_is_one_wait_and_a_few_launches(
    drafting: str | None, lookup: bool, stop: dict[str, Any], temperature: float, count: int
) -> None:
    with device() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds.Ways, "choose", lambda ways: (1, 10**6))  # with prompt lookup, where there is one
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
                chain = works_of(engine)[-1].chain
                assert chain is not None
                further = chain.forwards - 1
            assert further < rows[0].k and gpu.glances <= further
            assert gpu.launches["graph"] == 2 + (drafting is not None) + further
            assert gpu.launches.total() <= 7 + (drafting is not None and count) + 2 * further


@pytest.mark.parametrize("lookup", [False, True])
def test_a_draft_takes_no_more_forwards_than_it_needs_and_one(lookup: bool) -> None:
    """Where it stops by itself, or copied tokens stand: as many as step by step on the CPU."""
    needed: list[int] = []

    class Counted(SingleDraft):
        def propose(self, rows: Any, max_len: Any) -> Any:
            needed.append(0)
            return super().propose(rows, max_len)

        def _advance(self, *arguments: Any) -> Any:
            needed[-1] += 1
            return super()._advance(*arguments)

    k, stop = 12, {} if lookup else {"reach": 0.3}
    prompt = [1, 2, 3, 4, 5, 6] * 3
    for temperature in (0.0, 0.8):
        needed.clear()
        level: DraftStrategy = Counted(on_cpu(DRAFTS["near"]), NGramDraft(3, 1, 4) if lookup else None, **stop)
        plain = Engine(Runner(on_cpu(TARGET), PagedKVCache.for_model(on_cpu(TARGET), 6000)), level)
        plain.stretch, level._one_call = 0, False  # type: ignore[attr-defined]
        want, row = (row_of(prompt, k=k, temperature=temperature, max_tokens=70) for _ in range(2))
        decode(plain, [want])
        with device(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds.Ways, "choose", lambda ways: (1, 10**6))  # with prompt lookup, where there is one
            engine, taken = engine_of(there, "near", lookup, **stop), []
            engine.stretch = 1e-9
            engine.step([row])
            while not row.finish_reason:
                engine.step([row])
                taken += [work.chain.forwards for work in works_of(engine)[-1:] if work.chain is not None]
        assert told(row) == told(want)
        assert all(most <= own <= most + 1 for own, most in zip(taken, needed))
        assert temperature or sum(taken) < 0.7 * k * len(taken)


@pytest.mark.parametrize("repeats", [True, False])
def test_prompt_lookup_is_taken_while_it_saves_forwards(repeats: bool) -> None:
    """Of a text that repeats itself, and of one that never does."""
    with device(), pytest.MonkeyPatch.context() as patch:
        engine = engine_of(there, "near", True)
        engine.stretch = 1e-9
        row = row_of([1, 2, 3, 4], k=8, temperature=0 if repeats else 2.0, max_tokens=200)
        while not row.finish_reason:
            engine.step([row])
        (works,) = engine.runner.executor._works.values()  # type: ignore[attr-defined]
        assert works.lookup.faster == repeats
        assert {work.shape.copies for work in works_of(engine)} == {0, 4}  # both were tried
        patch.setattr(rounds, "_RIDGE", 2)  # forwards of more tokens would take longer
        shape = works_of(engine)[-1].shape
        assert rounds._forward_cost(replace(shape, spec=replace(shape.spec, lookup=Lookup(3, 1, 4)))) == 1.08 * 5 / 2


@given(st.data())
def test_prompt_lookup_on_the_device_is_that_of_the_host(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3))
    longest = data.draw(st.integers(1, 5))
    shortest, most = data.draw(st.integers(1, longest)), data.draw(st.integers(1, 7))
    text_RS = torch.randint(0, 3, (len(texts), 24), generator=torch.Generator().manual_seed(0))  # what comes after
    for row_S, text in zip(text_RS, texts):
        row_S[: len(text)] = torch.tensor(text)
    copied_RW, found_R = looked_up(text_RS, torch.tensor([len(text) for text in texts]), longest, shortest, most)
    for text, tokens, found in zip(texts, copied_RW.tolist(), found_R.tolist()):
        assert (tokens if found else []) == Index(longest, shortest).copied(text, most)


def test_no_graph_is_captured_again_in_200_ragged_rounds() -> None:
    with device() as gpu:
        engine = engine_of(there, "near", confidence=0.2)
        engine.stretch = 1e-9

        def batch(first: int) -> list[Sequence]:
            prompts = [[1, 2, first], [5] * (first % 7 + 1), [first, 3]]
            return [
                row_of(
                    prompt, POLICIES[b % 2], 2 + 3 * b, seed=first, temperature=0.8 * (b > 1), max_tokens=150, stops=()
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
            if (taken := taken + ragged(first % VOCAB)) > 200:
                break
        assert taken > 200 and gpu.graphs == before


def test_pages_go_up_only_where_they_changed() -> None:
    with device() as gpu:
        engine = engine_of(there, "near")
        engine.stretch = 1e-9
        (row,) = [row_of([1, 2, 3], max_tokens=400)]
        changed = 0
        decode(engine, [row], 4)
        (works,) = engine.runner.executor._works.values()  # type: ignore[attr-defined]
        (work,) = (each for each in works.made.made.values() if each.shape.pages and each.shape.draft_pages)
        while not row.finish_reason and row.generated < 390:
            before = work.table.loaded
            gpu.launches.clear()
            engine.step([row])
            changed += work.table.loaded is not before
        assert changed <= 4  # of two caches, with what is reserved ahead


@pytest.mark.parametrize("rule", ["exact | entropy(0.1) & above(12)", "exact | entropy(0.1) & phase(3, 4)"])
def test_what_a_graph_cannot_hold_waits_at_most_three_times(rule: str) -> None:
    policy = parse_policy(rule)
    assert "text before the block" in str(host_wait(policy))
    with device() as gpu:
        engine = engine_of(there, "near")
        engine.stretch = 1e-9
        rows = [row_of([1, 2, 3], policy, max_tokens=100), row_of([4, 5], policy, max_tokens=100)]
        decode(engine, rows, 4)
        gpu.waits.clear(), gpu.launches.clear()
        engine.step(rows)
        assert len(gpu.waits) <= 3 and gpu.launches["graph"] == 2


@pytest.mark.parametrize("asked", [{"logprobs": 2}, {"explain": True, "temperature": 0.8}])
def test_what_rows_ask_to_be_told_takes_three_waits(asked: dict[str, Any]) -> None:
    """Graphs for draft and target, and the rule between; the plain way of rounds."""
    with device() as gpu:
        engine = engine_of(there, "near")
        rows = [row_of([1, 2, 3], POLICIES[1], max_tokens=100, **asked) for _ in range(3)]
        decode(engine, rows, 5)
        gpu.waits.clear(), gpu.launches.clear()
        engine.step(rows)
        assert len(gpu.waits) <= 3 and gpu.launches["graph"] == 2
    want = [row.sample(row.seed) for row in rows]
    for row in want:
        del row.tokens[3:]
    plain = engine_of(on_cpu, "near")
    decode(plain, want, 6)
    assert [row.tokens for row in rows] == [row.tokens for row in want]
    for row, other in zip(rows, want):
        for mine, theirs in zip(row.logprobs, other.logprobs):
            assert mine == pytest.approx(theirs, abs=1e-4)


ASKS: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    {"logit_bias": {5: 2.0, 7: -100.0, 1: 0.5}},
    {"min_tokens": 25, "stops": (2, 3, 9)},
    {"repetition_penalty": 0.8, "logit_bias": {2: 1.0}, "min_tokens": 9, "stops": (5,)},
    {"bad_words_ids": ((5,), (11,), *((a, (5 * a + b) % VOCAB) for a in range(VOCAB) for b in range(9)), (1, 2, 3))},
    {},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("plainly", [False, True])
def test_what_rows_ask_of_their_tokens_is_part_of_graphs(lookup: bool, temperature: float, plainly: bool) -> None:
    """Penalties, biases, bans and bad words, in whole rounds and in the plain way."""
    rows = [
        row_of([1, 2, 3, 1, 2, 3, b], POLICIES[b % 2], 5, b, temperature=temperature, **dict(asked))
        for b, asked in enumerate(ASKS)
    ]
    want = [row.sample(row.seed) for row in rows]
    plain = engine_of(on_cpu, "near", lookup, reach=0.02)
    decode(plain, want)
    with device() as gpu:
        engine = engine_of(there, "near", lookup, reach=0.02)
        engine.stretch = 0 if plainly else 1e-9
        decode(engine, rows, 4)
        going = [row for row in rows if not row.finish_reason]
        for _ in range(2):  # the first may be of fewer rows than those before, which are sampled otherwise
            gpu.waits.clear()
            engine.step(going)
        assert len(gpu.waits) <= (3 if plainly else 1) and not any(row.finish_reason for row in going)
        decode(engine, rows)
    assert [told(row) for row in rows] == [told(row) for row in want]
    assert sum(row.stats.accepted for row in rows) > 0


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of a vocabulary of 18 letters, and two tokens that are none."""
    directory = tmp_path_factory.mktemp("letters")
    end = save_tokenizer(directory, list("abcdefghijklmnopqr")) - 2
    return Grammars(Tokenizer(directory), VOCAB, [end])


FORMS = ["[a-r]*", "([a-f][g-r]?){40}", "(ab?|[c-r]+[ab])*", "[a-r]{2,30}"]


def formed(grammars: Grammars, number: int, **asked: Any) -> Sequence:
    """A row whose text is to have one of these forms."""
    asked = {"structured": {"regex": FORMS[number]}, "max_tokens": 60, "stops": (18,), **asked}
    row = row_of([1, 2, 3 + number], Exact(), 5, number, **asked)
    row.matcher = grammars.matcher(row.params)
    return row


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_form_takes_three_waits(grammars: Grammars, temperature: float) -> None:
    """The draft learns what it may begin with and, at temperature 0, once more where it left the form; texts are then
    those of the CPU. Rows of both temperatures, and with bans besides, share a batch."""
    asked = [{"temperature": temperature}, {}, {"bad_words_ids": ((1, 2), (3,))}, {"temperature": temperature}]
    rows, want = (
        [*(formed(grammars, number, **each) for number, each in enumerate(asked)), row_of([4, 5], k=5)]
        for _ in range(2)
    )
    decode(engine_of(on_cpu, "near"), want)
    with device() as gpu:
        engine, most = engine_of(there, "near"), 0
        decode(engine, rows, 4)
        while going := [row for row in rows if not row.finish_reason]:
            gpu.waits.clear()
            engine.step(going)
            most = max(most, len(gpu.waits))
        assert most <= 3
    for row, other, form in zip(rows, want, [*FORMS, None]):
        assert row.tokens == other.tokens or not row.greedy
        if form is not None and row.finish_reason == "stop":
            assert re.fullmatch(form, "".join("abcdefghijklmnopqr"[token] for token in row.tokens[3:-1]))
    share = sum(row.stats.accepted for row in rows[:4]) / sum(row.stats.accepted for row in want[:4])
    assert share > (0.5 if temperature else 0.8)


@settings(max_examples=25)
@given(st.integers(0, 2**62), st.integers(0, 3), st.lists(st.integers(0, 17), max_size=12), st.integers(1, 9))
def test_a_drawn_draft_of_a_form_is_of_the_distribution_that_it_says(
    grammars: Grammars, seed: int, number: int, letters: list[int], most: int
) -> None:
    """Token by token it is drawn, by a coin of its own, from what is reported: the draft model's distribution, which at
    the first token keeps to the form. So the exact rule stays lossless; the draft ends where a token is forbidden,
    which the target gives no mass."""
    row = formed(grammars, number, temperature=0.9, top_k=7)
    for letter in letters:
        if row.matcher is None or len(row.matcher.masks(row.tokens[3:], [letter])) < 2:
            break
        row.tokens.append(letter)
    sampling, own = BatchSampling.of([row.params]), DRAFTS["near"]
    with device():
        strategy = SingleDraft(there(DRAFTS["near"]), cache_tokens=6000)
        row.seed = seed
        draft = strategy.propose([row], [most])
        assert draft.probs_BKV is not None
        (tokens,), said_KV = draft.chains, draft.probs_BKV[0].cpu().clone()
    assert row.matcher is not None
    masks = row.matcher.masks(row.tokens[3:], tokens).values()
    allowed = [bool(mask[token // 8] >> token % 8 & 1) for mask, token in zip(masks, tokens)]
    assert all(allowed[:-1]) and len(allowed) == len(tokens)
    assert len(tokens) == most or not allowed[-1] or tokens[-1] in row.stop_ids
    for j, token in enumerate(tokens):
        text = row.tokens + tokens[:j]
        logits_11V = dense_logits(own, text)[-1:].unsqueeze(0)
        if not j:
            logits_11V = constrain(logits_11V, [row], [[]])
        want_V = sampling.probs(logits_11V)[0, 0]
        torch.testing.assert_close(said_KV[j], want_V, rtol=1e-4, atol=1e-5)
        coin = uniforms(torch.tensor([derive(seed, len(row.tokens))]), torch.tensor([len(text)]), Stream.SAMPLE, 1)
        assert token == int(draw(said_KV[j : j + 1], coin[0]))


@st.composite
def growths(draw: st.DrawFn) -> dict[str, Any]:
    """The shape of a tree."""
    if draw(st.booleans()):
        return {"branching": draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))}
    return {"nodes": draw(st.integers(1, 12)), "depth": draw(st.integers(1, 5)), "width": draw(st.integers(1, 4))}


def tree_engine(
    run: Callable[[Llama], Executor], sizes: dict[str, Any], windowed: bool = False, slow: bool = False
) -> Engine:
    executor, drafter = map(run, WINDOWED if windowed else (TARGET, DRAFTS["near"]))
    executor = executor.deterministic() if slow else executor
    drafts = TreeDraft(drafter, cache_tokens=6000, **sizes)
    return Engine(Runner(executor, PagedKVCache.for_model(executor, 6000), control_ids=(3, 4)), drafts)


@settings(max_examples=15)
@given(data=st.data())
def test_trees_on_the_device_are_those_of_the_cpu(data: st.DataObject) -> None:
    """Rows of any policy and temperature, some of which ask something of their tokens; models that see the last tokens
    only; and targets that are fed token by token."""
    how = data.draw(growths()), data.draw(st.booleans()), data.draw(st.sampled_from([False, False, False, True]))
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):
        policy = data.draw(st.sampled_from([*POLICIES, parse_policy("block")]))
        asked = data.draw(st.sampled_from([{}, {}, {}, *ASKS]))
        rows.append(
            row_of(
                data.draw(prompts), policy, data.draw(st.integers(0, 6)), data.draw(st.integers(0, 2**62)),
                temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
                max_tokens=data.draw(st.integers(asked.get("min_tokens", 1), 30)),
                **{"stops": data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=2)), **asked},
            )
        )  # fmt: skip
    want = [row.sample(row.seed) for row in rows]
    decode(tree_engine(on_cpu, *how), want)
    with device(data.draw(st.booleans())):
        decode(tree_engine(there, *how), rows)
    assert [told(row) for row in rows] == [told(row) for row in want]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sizes", [{"nodes": 8, "depth": 3}, {"branching": (3, 2, 1)}])
def test_a_round_with_trees_is_two_waits(sizes: dict[str, Any], temperature: float, count: int) -> None:
    """One for the trees, which are one graph, and one for the decisions; moving what stands takes none."""
    with device() as gpu:
        engine = tree_engine(there, sizes)
        rows = [
            row_of([1, 2, 3 + b], POLICIES[b % 4], seed=b, temperature=temperature, max_tokens=300)
            for b in range(count)
        ]
        decode(engine, rows, 6)
        for _ in range(4):
            gpu.waits.clear(), gpu.launches.clear()
            engine.step(rows)
            assert len(gpu.waits) == 2 and gpu.launches["graph"] <= 3  # what the drafter lacks, its tree, the target
        assert sum(row.stats.accepted for row in rows) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["union", "choose"])
def test_strategies_made_of_several_wait_at_most_three_times(kind: str, temperature: float) -> None:
    def made(run: Callable[[Llama], Executor]) -> Engine:
        small = SingleDraft(run(DRAFTS["near"]), cache_tokens=6000)
        tree = TreeDraft(run(DRAFTS["near"]), nodes=5, depth=3, cache_tokens=6000)
        union = UnionDraft([NGramDraft(3, 1, 4), small])
        executor = run(TARGET)
        strategy = union if kind == "union" else ChooseDraft(small=small, tree=tree)
        return Engine(Runner(executor, PagedKVCache.for_model(executor, 6000)), strategy)

    rows = [row_of([1, 2, 3 + b], POLICIES[b % 2], seed=b, temperature=temperature, max_tokens=50) for b in range(4)]
    for b, row in enumerate(rows):
        row.draft = ["small", "tree"][b % 2] if kind == "choose" else ""
    want = [row.sample(row.seed) for row in rows]
    decode(made(on_cpu), want)
    with device() as gpu:
        engine = made(there)
        decode(engine, rows, 5)
        for _ in range(4):
            gpu.waits.clear()
            engine.step([row for row in rows if not row.finish_reason])
            assert len(gpu.waits) <= 3
        decode(engine, rows)
    assert [told(row) for row in rows] == [told(row) for row in want]


def test_what_graphs_do_not_take_goes_the_plain_way() -> None:
    """A draft of more forwards than one graph has, and logits of too many bytes."""
    (row,) = [row_of([1, 2, 3], k=rounds.LONGEST + 1, max_tokens=8)]
    with device(), pytest.MonkeyPatch.context() as patch:
        decode(engine_of(there, "near"), [row])
        patch.setattr(rounds, "_LOGITS", 2_000)
        rows = [row_of([1, 2, b], max_tokens=20) for b in range(12)]
        decode(engine_of(there, "near"), rows)
        patch.setattr(rounds, "_ALL_LOGITS", 4000)  # so much is kept of graphs: hardly one at a time
        crowded = [row_of([1, 2, b], k=2 + b, max_tokens=20) for b in range(4)]
        engine = engine_of(there, "near")
        for other in crowded:
            decode(engine, [other])
        (works,) = engine.runner.executor._works.values()  # type: ignore[attr-defined]
        assert sum(work.logit_bytes for work in works.made.made.values()) <= 4000 or len(works.made.made) == 1
    want = [
        row_of([1, 2, 3], k=rounds.LONGEST + 1, max_tokens=8),
        *(row_of([1, 2, b], max_tokens=20) for b in range(12)),
    ]
    want += [row_of([1, 2, b], k=2 + b, max_tokens=20) for b in range(4)]
    for other in want:
        decode(engine_of(on_cpu, "near"), [other])
    assert [told(each) for each in (row, *rows, *crowded)] == [told(each) for each in want]


def test_what_comes_often_is_compiled_inside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced whole (a graph break would be an error), and never for a prompt; texts are the same."""
    monkeypatch.setattr(CudaExecutor, "often", 3)
    monkeypatch.setattr(fused, "refusal", lambda: None)
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
        assert names == {"_first", "_between", "_last"} and all(work.shape.compiled for work in works_of(engine)[-1:])
        assert gpu.compiled["_between", True] > 0  # captured, and launched no more
        assert gpu.compiled["_between", True] == gpu.compiled["_first", True]
        assert sum(gpu.compiled.values()) < 60
        slow = engine.runner.executor.deterministic()
        assert isinstance(slow, TokenByToken) and isinstance(slow.inner, CudaExecutor) and not slow.inner.compiles
    assert [told(row), told(other)] == [told(want), told(alike)]


@pytest.mark.parametrize("missing", [True, False])
def test_layers_that_cannot_be_compiled_go_on_as_they_were(
    missing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise Unsupported("no such kernel\nand more of that")

    monkeypatch.setattr(CudaExecutor, "often", 3)
    monkeypatch.setattr(fused, "refusal", lambda: "no compiler is here" if missing else None)
    monkeypatch.setattr(fused, "CompiledLayers", Broken)
    fused._say_once.cache_clear()
    want, row = (row_of([1, 2, 3], max_tokens=100) for _ in range(2))
    decode(engine_of(on_cpu, "near"), [want])
    with device():
        engine = engine_of(there, "near")
        engine.stretch = 1e-9
        decode(engine, [row])
    assert told(row) == told(want)
    said = [record.getMessage() for record in caplog.records if "layers are not compiled" in record.getMessage()]
    assert len(said) == 1 + (not missing)  # of each model
    assert said[0].endswith("no compiler is here" if missing else "Unsupported for 2 tokens: no such kernel")


def test_what_layers_need_to_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    assert fused.refusal() == "Triton is not installed"
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert "compute capability 7.0" in str(fused.refusal())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(fused.shutil, "which", lambda name: None)
    assert "no C compiler" in str(fused.refusal())
    monkeypatch.setattr(fused.shutil, "which", lambda name: name)
    assert fused.refusal() is None


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


def test_of_all_rules_only_those_that_read_the_text_are_outside_of_graphs() -> None:
    asked = {"phase": "phase(3, 5)", "token": "token(digits)"}
    texts = [*policy_types(), *(f"exact | {asked.get(name, name)}" for name in condition_types())]
    outside = [text for text in texts if check_cuda_graph(parse_policy(text)) != "runs inside the graph"]
    assert outside == ["exact | above", "exact | phase(3, 5)"]


def test_the_detector_names_the_line() -> None:
    assert all(host_wait(policy, drawn, drawn) is None for policy in IN_GRAPHS for drawn in (False, True))
    assert check_cuda_graph(POLICIES[1]) == "runs inside the graph"
    assert check_cuda_graph(POLICIES[-1]).startswith("runs outside of the graph: it looks at the text before the block")
    said = host_wait(ByValue())
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
def test_on_a_gpu_flash_attention_over_pages_is_that_over_a_copy(window: int | None) -> None:
    check_attention(window, torch.bfloat16, 2e-2)


@pytest.mark.parametrize("window", [None, 1, 100])
def test_both_ways_of_attention_are_that_of_a_row_alone(window: int | None) -> None:
    with device():
        check_attention(window, torch.float32, 1e-5)


def check_attention(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    """Both ways over scattered pages, for new tokens of several rows, against one row after the other."""
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
            slots = attention.Slots.even_rows(pages, start, stored, 256, cache.nobody)
            found = [attention.PagedAttention(cache, slots, flash).attend(0, *new, window) for flash in (True, False)]
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
