"""Several drafts are loaded, and each request has one of them."""

from __future__ import annotations

import asyncio
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fly
from fly.drafts import (
    AdaptiveDraft,
    ChooseDraft,
    DraftStrategy,
    NGramDraft,
    SingleDraft,
    TranslatedDraft,
    TreeDraft,
    parse_draft,
)
from fly.drafts.base import Wrapper
from fly.policies import Block, Condition, Exact, draft_log_probs
from fly.runner.request import Row
from fly.testing import check_draft
from fly.types import Draft, Target
from tests.toys import random_llama, ready

TEXTS = [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4], [7, 8, 9, 7, 8, 9], [2, 2, 2], [5, 6, 5, 6]]


def made() -> dict[str, DraftStrategy]:
    small = random_llama(1, layers=1)
    return {"small": SingleDraft(small), "copy": NGramDraft(), "tree": TreeDraft(small, k=3)}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_is_drafted_for_by_the_one_it_names_as_if_that_were_alone(temperature: float) -> None:
    target, names = random_llama(0), ["small", "copy", "tree" if temperature == 0 else "copy", "", "small"]
    params = [fly.SamplingParams(temperature=temperature, max_tokens=24, seed=n) for n in range(len(TEXTS))]
    llm = fly.LLM(target, ChooseDraft(**made()), k=4)
    together = llm.generate(TEXTS, params, draft=names)
    for text, own, name, out in zip(TEXTS, params, names, together):
        [alone] = fly.LLM(target, made()[name or "small"], k=4).generate([text], own)
        assert out.token_ids == alone.token_ids
        assert (out.stats.drafted, out.stats.accepted) == (alone.stats.drafted, alone.stats.accepted)
    assert all(allocator.num_free == allocator.num_blocks for allocator in llm.scheduler.allocators)


def test_a_choice_within_a_choice_gives_its_first() -> None:
    inner = ChooseDraft(copy=NGramDraft(), other=NGramDraft(k=1))
    llm = fly.LLM(random_llama(0), ChooseDraft(a=inner, b=NGramDraft(k=1)), k=4)
    first, other = llm.generate([TEXTS[0]] * 2, temperature=0, max_tokens=24, draft=["a", "b"])
    [alone] = fly.LLM(random_llama(0), "ngram", k=4).generate([TEXTS[0]], temperature=0, max_tokens=24)
    assert first.token_ids == other.token_ids == alone.token_ids and first.stats.drafted == alone.stats.drafted


@dataclass(frozen=True)
class Sure(Condition):
    """The draft was sure of the token."""

    def evaluate(self, block: Block) -> Tensor:
        return draft_log_probs(block.draft)[1] > -1


class Around(Wrapper):
    """Passes a strategy's drafts on."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return self.members[0].propose(rows, max_len)


WRAPPERS: dict[str, Callable[[DraftStrategy], DraftStrategy]] = {
    "itself": lambda choice: choice,
    "adaptive": AdaptiveDraft,
    "adaptive with a lookup": lambda choice: AdaptiveDraft(choice, NGramDraft(k=1)),
    "a user's": lambda choice: Around([choice]),
    "two": lambda choice: AdaptiveDraft(Around([choice])),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@given(st.permutations(["small", "copy", "tree"]))
@settings(max_examples=3)
def test_a_choice_within_another_strategy_is_made_and_answered_for(
    wrap: Callable[[DraftStrategy], DraftStrategy], order: list[str]
) -> None:
    """Requests choose by the names of the ``choose`` within. A rule that reads logits is refused or not by the limits
    of the member that its request chose."""
    members = made()
    choice = ChooseDraft(**{name: members[name] for name in order})
    llm = fly.LLM(random_llama(0), wrap(choice), k=4)
    assert llm.draft_names == order
    rule, few = Exact() | Sure(), fly.SamplingParams(temperature=0.0, max_tokens=12)
    for name in ("", *order):
        if (name or order[0]) == "small":
            assert len(llm.generate([[1, 2, 3]], few, policy=rule, draft=name)[0].token_ids) == 12
        else:
            with pytest.raises(ValueError, match=r"reads the draft's logits .* has none"):
                llm.generate([[1, 2, 3]], few, policy=rule, draft=name)
    both = llm.generate(TEXTS[:2], few, policy=[rule, Exact()], draft=["small", "copy"])
    assert [len(out.token_ids) for out in both] == [12, 12]
    with pytest.raises(ValueError, match=r"draft 'nope' is not loaded; choices: \['"):
        llm.generate([[1, 2]], draft="nope")


def test_a_strategy_without_a_choice_drafts_for_every_name() -> None:
    strategy = AdaptiveDraft(NGramDraft())
    assert strategy.drafter_of("small") is strategy and list(strategy.names) == []


class Heard(NGramDraft):
    """Notes whose calls it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: set[int] = set()

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        self.heard |= {row.id for row in rows}
        return super().propose(rows, max_len)

    def observe(self, rows: abc.Sequence[Row], draft: Draft, target: Target) -> None:
        assert draft.shape[0] == len(rows) == target.logits_BKV.shape[0]
        self.heard |= {row.id for row in rows}

    def commit(self, rows: abc.Sequence[Row]) -> None:
        self.heard |= {row.id for row in rows}

    def release(self, row: Row) -> None:
        self.heard.add(row.id)


def test_a_strategy_sees_only_its_own_requests() -> None:
    one, other = Heard(), Heard()
    llm = fly.LLM(random_llama(0), ChooseDraft(one=one, other=other))
    llm.generate(TEXTS, fly.SamplingParams(temperature=0.0, max_tokens=9), draft=["one", "other", "one", "", "other"])
    assert (len(one.heard), len(other.heard)) == (3, 2) and not one.heard & other.heard


def test_it_drafts_for_texts_that_one_of_its_strategies_drafts_for() -> None:
    short, long = SingleDraft(random_llama(1, max_positions=12)), SingleDraft(random_llama(2, max_positions=64))
    both = ready(ChooseDraft(short=short, long=long))
    assert both.context == 64 and both.vocab_size == short.vocab_size
    assert ready(ChooseDraft(short=SingleDraft(random_llama(1, max_positions=12)), copy=NGramDraft())).context is None


def test_names_are_checked() -> None:
    llm = fly.LLM(random_llama(0), ChooseDraft(**made()))
    for call in (llm.generate, lambda prompts, draft: llm.requests(prompts, draft=draft)):
        with pytest.raises(ValueError, match=r"draft 'nope' is not loaded; choices: \['small', 'copy', 'tree'\]"):
            call([[1, 2]], draft="nope")  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"choices: none; LLM\(..., draft='choose\("):
        fly.LLM(random_llama(0), NGramDraft()).generate([[1]], draft="copy")
    once: Any = NGramDraft()
    for members, word in (({}, "at least one"), ({"none": once}, "'none'"), ({"a": once, "b": once}, "stands twice")):
        with pytest.raises(ValueError, match=word):
            ChooseDraft(**members)


@pytest.mark.usefixtures("few_seeds")
def test_a_text_loads_several_each_in_the_targets_vocabulary() -> None:
    strategy = parse_draft("choose(copy=ngram(k=3), small=fly-tiny)")
    assert isinstance(strategy, ChooseDraft) and strategy.names == ["copy", "small"]
    torch.manual_seed(0)
    other = SingleDraft(random_llama(3))  # of a vocabulary of its own, and no tokenizer
    with pytest.raises(ValueError, match="vocabulary"):
        fly.LLM("fly-target", ChooseDraft(copy=NGramDraft(), other=other))
    llm = fly.LLM("fly-target", strategy)
    assert not any(isinstance(member, TranslatedDraft) for member in llm.draft.members)  # type: ignore[union-attr]
    assert "".join(llm.stream("Tom", fly.SamplingParams(temperature=0.0, max_tokens=5), draft="small"))
    assert check_draft(lambda: ChooseDraft(a=NGramDraft(), b=NGramDraft())).passed


def test_every_call_takes_the_name_of_a_draft() -> None:
    heard = {name: Heard() for name in ("one", "other")}
    with fly.LLM("fly-tiny", ChooseDraft(**heard), k=2) as llm:
        few: Any = {"temperature": 0.0, "max_tokens": 6, "draft": "other"}

        async def waits() -> None:
            await llm.agenerate("Tom", **few)
            await llm.achat("Tom", **few)
            async for _ in llm.astream("Tom", **few):
                pass

        llm.generate(["Tom", "Tim"], **few)
        llm.chat([[{"role": "user", "content": "Tom"}], "Tim"], **few)
        "".join(llm.stream("Tom", **few))
        asyncio.run(waits())
        assert not heard["one"].heard and len(heard["other"].heard) == 8
        llm.generate("Tom", temperature=0.0, max_tokens=6, draft=None)
        assert heard["one"].heard
