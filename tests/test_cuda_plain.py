"""The plain way on an emulated CUDA device: what no graph takes whole gives the texts of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.cache import PagedKVCache
from fly.drafts import (
    CascadeDraft,
    ChooseDraft,
    DraftStrategy,
    NGramDraft,
    SingleDraft,
    TreeDraft,
)
from fly.engine import Engine
from fly.models import Llama
from fly.models.families import FULL, SLIDING
from fly.models.tokenizer import Tokenizer
from fly.policies import parse_policy
from fly.runner.executor import Executor
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.runner.structured import Grammars
from tests.test_cuda import DRAFTS, POLICIES, TARGET, VOCAB, decode, device, on_cpu, row_of, there
from tests.test_drafts import perturbed
from tests.toys import build_llama, save_tokenizer

SLIDES = {"layer_types": (SLIDING, FULL), "sliding_window": 3, "num_hidden_layers": 2}
SLIDING_TARGET = build_llama(TARGET.config.model_copy(update=SLIDES))
WINDOWED = SLIDING_TARGET, perturbed(SLIDING_TARGET, 0.05)
ASKS: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    {"logit_bias": {5: 2.0, 7: -100.0, 1: 0.5}},
    {"min_tokens": 25, "stops": (2, 3, 9)},
    {"repetition_penalty": 0.8, "logit_bias": {2: 1.0}, "min_tokens": 9, "stops": (5,)},
    {"bad_words_ids": ((5,), (11,), *((a, (5 * a + b) % VOCAB) for a in range(VOCAB) for b in range(9)), (1, 2, 3))},
    {"logprobs": 2},
    {"explain": True},
]
FORMS = ["[a-r]*", "([a-f][g-r]?){40}", "(ab?|[c-r]+[ab])*", "[a-r]{2,30}"]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of a vocabulary of 18 letters, and two tokens that are none."""
    directory = tmp_path_factory.mktemp("letters")
    end = save_tokenizer(directory, list("abcdefghijklmnopqr")) - 2
    return Grammars(Tokenizer(directory), VOCAB, [end])


def form(pattern: str) -> dict[str, Any]:
    """What a row asks whose text is to match."""
    return {"structured": {"regex": pattern}, "stops": (18,)}


def engine_by(run: Callable[[Llama], Executor], kind: str, slow: bool = False) -> Engine:
    """An engine on the device or on the CPU, with a strategy of one of ``STRATEGIES``."""
    target = WINDOWED[0] if kind == "windowed tree" else TARGET
    executor = run(target).deterministic() if slow else run(target)
    strategy = STRATEGIES[kind](run)
    return Engine(Runner(executor, PagedKVCache.for_model(executor, 6000), control_ids=(3, 4)), strategy)


def model(run: Callable[[Llama], Executor], draft: Llama = DRAFTS["near"]) -> SingleDraft:
    return SingleDraft(run(draft), cache_tokens=6000, reach=0.02)


def tree(run: Callable[[Llama], Executor], draft: Llama = DRAFTS["near"], **sizes: Any) -> TreeDraft:
    return TreeDraft(run(draft), cache_tokens=6000, **sizes)


STRATEGIES: dict[str, Callable[[Callable[[Llama], Executor]], DraftStrategy | None]] = {
    "none": lambda run: None,
    "lookup": lambda run: NGramDraft(3, 1, 4),
    "model": model,
    "lookup below a model": lambda run: CascadeDraft([NGramDraft(3, 1, 4), model(run)]),
    "three levels": lambda run: CascadeDraft([NGramDraft(3, 1, 4), model(run, DRAFTS["short"]), model(run)]),
    "choice": lambda run: ChooseDraft(small=model(run), tree=tree(run, nodes=5, depth=3)),
    "windowed tree": lambda run: tree(run, WINDOWED[1], nodes=8, depth=3),
}


def said(row: Row) -> tuple[object, ...]:
    """What must be the same to the last bit."""
    return row.tokens, [token[:4] for token in row.provenance], row.drafts, row.finish_reason


def check_same(rows: list[Row], want: list[Row]) -> None:
    assert [said(row) for row in rows] == [said(row) for row in want]
    for row, other in zip(rows, want):
        for mine, theirs in zip(row.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        for mine, theirs in zip(row.provenance, other.provenance):
            if theirs.prob is not None:
                assert mine[4:] == pytest.approx(theirs[4:], abs=1e-4)


@settings(max_examples=6)
@given(data=st.data())
def test_the_plain_way_gives_the_texts_of_the_cpu(grammars: Grammars, data: st.DataObject) -> None:
    """Penalties, biases, bans, log-probabilities and forms, of any rule and temperature, by strategies of every kind;
    and targets that are fed token by token."""
    kind, slow = data.draw(st.sampled_from([*STRATEGIES])), data.draw(st.sampled_from([False, False, True]))
    policies, temperatures = st.sampled_from([*POLICIES, parse_policy("block")]), st.sampled_from([0.0, 0.9])
    asks = st.tuples(policies, temperatures, st.sampled_from([{}, *ASKS, *map(form, FORMS)]))
    asked = data.draw(st.lists(asks, min_size=1, max_size=3))

    def rows_of() -> list[Row]:
        rows = [
            row_of([1, 2, 3, 1, 2, b], policy, 5, b, **{"temperature": temperature, "max_tokens": 25, **more})
            for b, (policy, temperature, more) in enumerate(asked)
        ]
        for b, row in enumerate(rows):
            row.matcher = grammars.matcher(row.params) if row.params.structured else None
            row.draft = ["small", "tree"][b % 2] if kind == "choice" else ""
        return rows

    rows, want = rows_of(), rows_of()
    decode(engine_by(on_cpu, kind, slow), want)
    with device(data.draw(st.booleans())):
        decode(engine_by(there, kind, slow), rows)
    check_same(rows, want)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_ask_for_more_and_others_take_turns(temperature: float) -> None:
    """The plain way while one of the rows asks for more: its forwards are graphs too, and none is captured again. Then
    whole rounds, with one wait each."""

    def rows_of() -> list[Row]:
        long, short = (
            row_of([1, 2, 3 + b], POLICIES[1], 4, b, temperature=temperature, max_tokens=most, **asked)
            for b, (most, asked) in enumerate([(160, {}), (60, {"repetition_penalty": 1.3})])
        )
        return [long, short]

    rows, want = rows_of(), rows_of()
    decode(engine_by(on_cpu, "model"), want)
    with device() as gpu:
        engine = engine_by(there, "model")
        engine.stretch = 1e-9
        decode(engine, rows, 12)
        before = gpu.graphs
        while not rows[1].finish_reason:
            gpu.launches.clear(), gpu.waits.clear()
            engine.step(rows)
            assert gpu.launches["graph"] >= 2 and len(gpu.waits) > 1
        assert gpu.graphs <= before + 2  # rows may stop drafting one after the other
        decode(engine, rows, 4)
        gpu.waits.clear()
        engine.step([rows[0]])
        assert not rows[0].finish_reason and len(gpu.waits) == 1
        decode(engine, rows)
    check_same(rows, want)
