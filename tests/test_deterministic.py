"""Deterministic mode: bit for bit the same in bfloat16, whatever is fed together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import CascadeDraft, NGramDraft, SingleDraft, TreeDraft
from fly.policies import Exact
from fly.runner.executor import TokenByToken
from fly.runner.request import Row
from fly.runner.runner import Runner
from tests.toys import random_llama, run

SIZES = {"vocab_size": 29, "hidden": 96, "heads": 4, "kv_heads": 2, "intermediate": 160, "scale": 0.15}
MODEL = random_llama(1, **SIZES).bfloat16()  # type: ignore[arg-type]
NEAR = random_llama(2, **SIZES).bfloat16()  # type: ignore[arg-type]
INVARIANT = TorchExecutor(MODEL).deterministic()
prompts = st.lists(st.integers(0, 28), min_size=1, max_size=20)


def row_of(tokens: list[int]) -> Row:
    return Row(list(tokens), len(tokens), SamplingParams(temperature=0), Exact(), 0, 3)


def alone(tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of a text, one token a forward."""
    runner, row = Runner(INVARIANT, PagedKVCache.for_model(MODEL, 64, 4)), row_of([])
    found = []
    for token in tokens:
        row.tokens.append(token)
        found.append(runner.feed([row], [[]])[0][0, 0])
    return torch.stack(found)


@settings(deadline=None)
@given(st.lists(prompts, min_size=1, max_size=3), st.lists(prompts, min_size=3, max_size=3), st.data())
def test_logits_do_not_depend_on_batch_draft_chunks_or_pages(
    batch: list[list[int]], drafts: list[list[int]], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 5))
    cache = PagedKVCache.for_model(MODEL, 400, size)
    for hole in range(0, 60, 2):  # scattered pages
        cache.allocator.resize(("hole", hole), 1)
        cache.allocator.resize(("hole", hole + 1), 1)
    for hole in range(0, 60, 2):
        cache.allocator.release(("hole", hole))
    runner, rows = Runner(INVARIANT, cache), [row_of(tokens) for tokens in batch]
    for row in rows:
        chunk = data.draw(st.integers(0, len(row.tokens) - 1))
        if chunk:
            runner.feed([], [], prefill=[(row, chunk)])
    logits_BJV, _ = runner.feed(rows, drafts[: len(rows)])
    for row, draft, logits_JV in zip(rows, drafts, logits_BJV):
        expected = alone(row.tokens + draft)[len(row.tokens) - 1 :]
        assert torch.equal(logits_JV[: len(draft) + 1], expected)


def test_a_branch_of_a_tree_is_as_if_it_stood_alone() -> None:
    runner, row = Runner(INVARIANT, PagedKVCache.for_model(MODEL, 64, 4)), row_of([1, 2, 3])
    draft, parents = [4, 5, 6, 7], [-1, -1, 0, 1]
    logits_JV = runner.feed([row], [draft], [parents])[0][0]
    assert torch.equal(logits_JV[[0, 1, 3]], alone([1, 2, 3, 4, 6])[2:])
    assert torch.equal(logits_JV[[0, 2, 4]], alone([1, 2, 3, 5, 7])[2:])


@pytest.mark.parametrize(
    "make",
    [
        NGramDraft,
        lambda: SingleDraft(run(NEAR)),
        lambda: TreeDraft(run(NEAR), depth=3, nodes=6, width=2),
        lambda: CascadeDraft([NGramDraft(), SingleDraft(run(NEAR))]),
    ],
)
def test_speculative_text_is_autoregressive_text_in_bfloat16(make) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=0, max_tokens=24)
    asked = [[n, 2 * n, 3, n] for n in range(6)]
    plain = LLM(MODEL, deterministic=True)
    expected = [plain.generate([prompt], params)[0].token_ids for prompt in asked]
    for k in (1, 4, 9):
        llm = LLM(MODEL, make(), k=k, deterministic=True, step_tokens=5)
        assert [out.token_ids for out in llm.generate(asked, params)] == expected


def test_the_mode_takes_one_forward_a_token_only_where_the_model_is_not_invariant_itself() -> None:
    assert isinstance(LLM(MODEL, deterministic=True).engine.runner.executor, TokenByToken)
    assert INVARIANT.deterministic() is INVARIANT
    plain = LLM(MODEL).engine.runner.executor
    assert isinstance(plain, TorchExecutor) and plain.model is MODEL
