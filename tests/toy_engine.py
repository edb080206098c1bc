"""A toy target with every kind of draft, its greedy texts by another way, and checks of what outputs record."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from fly import LLM, Output, SamplingParams, Why
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft
from tests.test_drafts import perturbed
from tests.toys import dense_logits, random_llama, run

VOCAB, CONTEXT = 23, 128
SIZES = {"vocab_size": VOCAB, "hidden": 16, "heads": 2, "kv_heads": 1, "layers": 1, "max_positions": CONTEXT}
TARGET = random_llama(0, **SIZES)
NEAR, NEARER, FAR = perturbed(TARGET, 0.05), perturbed(TARGET, 0.02), random_llama(5, **SIZES)


STRATEGIES: dict[str, Callable[[], DraftStrategy | None]] = {
    "none": lambda: None,
    "n-gram": NGramDraft,
    "another model": lambda: SingleDraft(run(FAR)),
    "a near model": lambda: SingleDraft(run(NEAR), block_size=5),
    "the target itself": lambda: SingleDraft(run(TARGET)),
    "two levels": lambda: CascadeDraft([NGramDraft(), SingleDraft(run(NEAR))]),
    "three levels": lambda: CascadeDraft(
        [NGramDraft(2), SingleDraft(run(NEAR), k=3), SingleDraft(run(NEARER), block_size=3)]
    ),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def make_llm(name: str, k: int = 4, block_size: int = 16, **options: object) -> LLM:
    return LLM(TARGET, STRATEGIES[name](), k=k, block_size=block_size, **options)  # type: ignore[arg-type]


@cache
def autoregression(prompt: tuple[int, ...], most: int) -> tuple[int, ...]:
    """What the target says greedily, without cache, batch, draft or engine."""
    out: list[int] = []
    while len(out) < most:
        first, second = dense_logits(TARGET, [*prompt, *out])[-1].topk(2).values.tolist()
        if first - second < 1e-5:
            assume(False)  # rounding may decide, and another order of summation may decide otherwise
        out.append(int(dense_logits(TARGET, [*prompt, *out])[-1].argmax()))
    return tuple(out)


def expected(prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """The greedy completion and why it ends."""
    most = min(params.max_tokens, CONTEXT - len(prompt))
    tokens = list(autoregression(tuple(prompt), most))
    for at, token in enumerate(tokens):
        if token in params.stop_token_ids:
            return tokens[: at + 1], "stop"
    return tokens, "length"


def whole(llm: LLM) -> bool:
    """Whether every block of every cache is free."""
    return all(a.num_free == a.num_blocks and not a.sequences() for a in llm.scheduler.allocators)


def check_counts(out: Output, params: SamplingParams, k: int) -> None:
    """All records of an output tell one story."""
    stats, whys = out.stats, [token.why for token in out.provenance]
    assert [token.id for token in out.provenance] == out.token_ids
    assert len(out.token_ids) == stats.generated <= params.max_tokens
    assert (out.logprobs is None) == (params.logprobs is None)
    assert out.logprobs is None or len(out.logprobs) == stats.generated
    assert stats.prompt_tokens == len(out.prompt_token_ids)
    if not whys:
        assert stats.rounds == stats.emitted == 0 and stats.tau == 0
        return
    assert whys[0] is Why.BONUS  # the prompt's forward drafts nothing
    blocks: list[list[Why]] = [[]]
    for why in whys[1:]:
        assert why is not Why.REJECTED
        blocks[-1].append(why)
        if why in (Why.CORRECTION, Why.BONUS):
            blocks.append([])
    blocks = [block for block in blocks if block]
    assert stats.rounds == len(blocks)
    assert all(len(block) <= k + 1 for block in blocks)
    assert all(why in (Why.MATCH, Why.RELAXED) for block in blocks for why in block[:-1])
    assert stats.emitted == stats.generated - 1 == sum(map(len, blocks))
    assert stats.emitted <= stats.rounds * (k + 1)
    assert stats.tau == (stats.emitted / stats.rounds if stats.rounds else 0)
    assert stats.accepted == whys.count(Why.MATCH) + whys.count(Why.RELAXED) <= stats.drafted <= stats.rounds * k
    assert stats.relaxed == whys.count(Why.RELAXED)
    assert stats.acceptance_rate == (stats.accepted / stats.drafted if stats.drafted else 0)
    for token in out.provenance:
        assert (token.clause is not None) == (token.why is Why.RELAXED)
        if params.temperature == 0:
            assert (token.target_choice != token.id) == (token.why is Why.RELAXED)
    for gate in stats.gates.values():
        assert 0 <= gate.excused <= gate.passed <= gate.asked and 0 <= gate.refused <= gate.asked - gate.excused


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
stop_ids = st.one_of(st.just(()), st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple))
greedy_params = st.builds(
    SamplingParams, temperature=st.just(0.0), max_tokens=st.integers(0, 30), stop_token_ids=stop_ids
)
requests = st.lists(st.tuples(prompts, greedy_params), min_size=1, max_size=5)
