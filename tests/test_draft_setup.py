"""What a strategy is given when it is attached."""

from __future__ import annotations

from collections import abc
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fly
from fly.backends import load
from fly.drafts import AdaptiveDraft, CascadeDraft, ChooseDraft, DraftStrategy, NGramDraft, SingleDraft, pad
from fly.drafts.base import DraftSetup
from fly.drafts.setup import TranslatingSetup
from fly.policies import AcceptancePolicy, Exact, FLy
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import Draft
from tests.test_drafts import make_row
from tests.toys import random_llama, run

MODEL = run(random_llama(1))


class Silent(DraftStrategy):
    """Drafts nothing."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return pad([[] for _ in rows])


class Watching(Silent):
    def attach(self, setup: DraftSetup) -> None:
        self.setup = setup


def setup_of(target: object = None) -> DraftSetup:
    return TranslatingSetup(Runner(run(target or random_llama()), None), load=load)


def test_a_strategy_is_given_who_it_drafts_for() -> None:
    above, below = Watching(), Watching()
    llm = fly.LLM("fly-target", above)
    assert above.setup.target is llm.engine.runner and above.setup.vocabulary is llm.vocabulary
    level = SingleDraft("fly-draft")
    fly.LLM("fly-target", CascadeDraft([below, level])).close()
    assert below.setup.target.executor.config.hidden_size == 80 or below.setup.target is not llm.engine.runner
    assert below.setup.vocabulary.texts == llm.vocabulary.texts


def test_what_is_loaded_is_as_the_target_unless_it_is_said_otherwise() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        setup = setup_of(random_llama(vocab_size=1024).to(dtype))
        assert setup.load("fly-tiny").executor.dtype == dtype
        assert setup.load("fly-tiny", dtype="float32").executor.dtype == torch.float32


def test_caches_share_what_is_left_to_them() -> None:
    setup = setup_of()
    free, sized = setup.load(run(random_llama(1))), setup.load(run(random_llama(2)), cache_tokens=24, block_size=8)
    assert setup.bytes_per_token == free.bytes_per_token
    setup.reserve(64)
    assert free.allocator.num_blocks * free.allocator.block_size >= 64
    assert (sized.allocator.num_blocks, sized.allocator.block_size) == (3, 8)
    with pytest.raises(ValueError, match="draft head"):
        setup.load("fly-eagle3")


def test_a_reader_of_hidden_states_is_asked_about_new_rows_and_told_of_ended_ones() -> None:
    """Each reader for itself. Pages are adopted only as far as no reader needs the states of their tokens."""
    runner = Runner(run(random_llama()), None)
    runner.reserve(64, 2)
    first, second = (make_row([1, 2, 3, 4, 5, 6, 7]) for _ in range(2))
    ended: list[list[Row]] = [[], []]
    for known, rows in zip((4, 2), ended):
        runner.watch((0, 1), partial(lambda known, row: known, known), rows.append)
    runner.feed([first], [[]])
    runner.commit([first])
    assert runner.begin(second) == [1, 2]
    runner.release(first)
    assert ended == [[first], [first]]


@given(
    st.integers(1, 9),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 0.0, 0.2]),
    st.sampled_from([Exact(), FLy()]),
    st.fixed_dictionaries(
        {}, optional={"cache_tokens": st.integers(8, 64), "block_size": st.integers(1, 8), "dtype": st.just("float32")}
    ),
)
def test_a_cascade_is_its_last_level_with_a_draft_and_owns_all_that_it_has(
    k: int, confidence: float, reach: float | None, policy: AcceptancePolicy, options: dict[str, Any]
) -> None:
    below = NGramDraft()
    last = SingleDraft(MODEL, None, policy, k, confidence, reach, **options)
    before = vars(last) | {"options": dict(last.options)}
    cascade = CascadeDraft([below, last])
    assert vars(cascade) == vars(SingleDraft(MODEL, below, policy, k, confidence, reach, **options))
    cascade.options["cache_tokens"] = 1000
    assert vars(last) == before


def test_a_level_that_drafts_alone_may_also_stand_in_a_cascade() -> None:
    last = SingleDraft(MODEL)
    setup_of().attach(last)
    cascade = CascadeDraft([NGramDraft(), last])
    setup_of().attach(cascade)
    assert cascade.runner is not last.runner and cascade.runner.executor is last.runner.executor


def test_strategies_that_decide_by_time_share_a_clock() -> None:
    whole, mine = setup_of(), lambda: 3.0
    setup = whole.among_ranks(lambda: 5.0)
    assert setup.caches is whole.caches and setup.load_by is whole.load_by and setup.clock is not whole.clock
    shared, own = AdaptiveDraft(NGramDraft()), AdaptiveDraft(NGramDraft(), clock=mine)
    setup.attach(ChooseDraft(a=shared, b=own))
    assert shared.clock is setup.clock and own.clock is mine


def test_only_our_strategies_compute_by_executors_alone() -> None:
    setup = setup_of()
    setup.attach(NGramDraft())
    assert setup.all_built_in
    setup.attach(AdaptiveDraft(NGramDraft(), Silent()))
    assert not setup.all_built_in
