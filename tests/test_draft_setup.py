"""What a strategy is given when it is attached."""

from __future__ import annotations

from collections import abc

import pytest
import torch

import fly
from fly.backends import load
from fly.drafts import AdaptiveDraft, CascadeDraft, ChooseDraft, DraftStrategy, NGramDraft, SingleDraft, pad
from fly.drafts.base import DraftSetup
from fly.drafts.setup import TranslatingSetup
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import Draft
from tests.toys import random_llama, run


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


def test_strategies_that_decide_by_time_share_a_clock() -> None:
    setup, mine = setup_of(), lambda: 3.0
    setup.clock = lambda: 5.0
    shared, own = AdaptiveDraft(NGramDraft()), AdaptiveDraft(NGramDraft(), clock=mine)
    setup.attach(ChooseDraft(a=shared, b=own))
    assert shared.clock is setup.clock and own.clock is mine


def test_only_our_strategies_compute_by_executors_alone() -> None:
    setup = setup_of()
    setup.attach(NGramDraft())
    assert setup.all_built_in
    setup.attach(AdaptiveDraft(NGramDraft(), Silent()))
    assert not setup.all_built_in
