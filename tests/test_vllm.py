"""fly's rules inside vLLM, on a stand-in of its rejection sampler's signature: no vLLM is needed."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from fly.extras.engines.vllm.plugin import deciding, expand_batch_to_tokens
from fly.extras.engines.vllm.rows import Row, read_rule
from fly.policies import FLy, parse_policy, verify
from fly.types import Draft, Noise, Target

SIZE = 8
RULES = [
    "exact",
    "exact | regret(2.3, 4)",
    "fly(window=1, hold=1)",
    "lossy(3)",
    "block",
    "exact | entropy(0.1) & at_most(1)",
]


def untouched(draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, *others: Any) -> Tensor:
    """vLLM's own decision, as far as rows without a rule can tell: any tokens of its shape."""
    return torch.full((len(num_draft_tokens), max_spec_len + 1), 77, dtype=torch.int32)


def request(rule: str) -> SimpleNamespace:
    return SimpleNamespace(fly=Row(parse_policy(rule)), prompt_token_ids=[1, 2], output_token_ids=[3])


def sample(
    counts: list[int], rules: dict[int, Any], temperature: float, seed: int = 0, drawn: bool = False
) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    tokens = torch.randint(0, SIZE, (total,), generator=generator, dtype=torch.int32)
    logits = 2 * torch.randn(total, SIZE, generator=generator)
    probs = torch.randn(total, SIZE, generator=generator).softmax(-1) if drawn else None
    metadata = SimpleNamespace(
        all_greedy=temperature == 0,
        temperature=torch.full((len(counts),), temperature),
        generators={b: torch.Generator().manual_seed(seed + b) for b in rules},
        fly=rules,
    )
    bonus = torch.arange(len(counts)).unsqueeze(1).int() % SIZE
    ends = torch.tensor(counts).cumsum(0)
    output = deciding(untouched)(tokens, counts, max(counts), ends, probs, logits, bonus, metadata)
    return output, (tokens, logits, probs, bonus, ends.tolist())


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    st.sampled_from(RULES),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_decisions_are_those_of_verify(
    counts: list[int], rule: str, temperature: float, seed: int, drawn: bool
) -> None:
    """Every second row has the rule; each of them is judged by ``verify`` on a block that is built here once more."""
    chosen = {b: request(rule) for b in range(0, len(counts), 2)}
    output, (tokens, logits, probs, bonus, ends) = sample(counts, chosen, temperature, seed, drawn)
    for b, count in enumerate(counts):
        if b not in chosen or not count:
            assert output[b].tolist() == [77] * (max(counts) + 1)
            continue
        rows = slice(ends[b] - count, ends[b])
        coins = torch.rand(count + 1, generator=torch.Generator().manual_seed(seed + b))
        certain = torch.full((1, SIZE), -torch.inf)
        certain[0, bonus[b, 0]] = 0.0
        processed = torch.cat([logits[rows], certain]).unsqueeze(0)
        greedy = temperature == 0
        target = Target(
            processed if greedy else processed * temperature,
            None if greedy else processed.softmax(-1),
            control_V=torch.zeros(SIZE, dtype=torch.bool),
            generated_B=torch.tensor([1]),
        )
        own = None if greedy or probs is None else probs[rows].unsqueeze(0)
        draft = Draft(tokens[rows].long().unsqueeze(0), torch.tensor([count]), own)
        verdict = verify(parse_policy(rule), target, draft, Noise(coins[:-1].unsqueeze(0), coins[-1:]))
        kept = int(verdict.accepted_B[0])
        expected = [*tokens[rows].tolist()[:kept], int(verdict.next_token_B[0])]
        assert output[b].tolist() == expected + [-1] * (max(counts) + 1 - len(expected))


# Six steps of vLLM 0.32.0 on the bundled pair (n-gram and model drafts, temperature 0 and 1), with what vLLM decided.
CAPTURED = load_file(Path(__file__).parent / "data" / "vllm_blocks.safetensors")
STEPS = sorted({name.partition(".")[0] for name in CAPTURED})


@given(st.sampled_from(STEPS), st.sampled_from(RULES), st.integers(0, 10**6))
def test_decisions_on_captured_blocks_are_those_of_verify(step: str, rule: str, seed: int) -> None:
    """Each row of a captured step under a rule; greedy rows under ``exact`` also decide as vLLM did."""
    tokens, counts, logits, bonus, output, greedy = (
        CAPTURED[f"{step}.{name}"] for name in ("draft", "counts", "logits", "bonus", "output", "greedy")
    )
    coins = torch.rand(int(counts.max()) + 1, generator=torch.Generator().manual_seed(seed))
    temperature = 0.0 if greedy else 1.0
    for b, (count, end) in enumerate(zip(counts.tolist(), counts.cumsum(0).tolist())):
        if not count:
            continue
        rows, last = slice(end - count, end), int(bonus[b])
        emitted = Row(parse_policy(rule)).decide(
            tokens[rows], logits[rows], None, last, temperature, [1], [], coins[: count + 1]
        )
        certain_1V = torch.full((1, logits.shape[1]), -torch.inf)
        certain_1V[0, last] = 0.0
        logits_1JV = torch.cat([logits[rows], certain_1V]).unsqueeze(0)
        target = Target(logits_1JV, None if greedy else logits_1JV.softmax(-1), generated_B=torch.tensor([0]))
        draft = Draft(tokens[rows].long().unsqueeze(0), torch.tensor([count]), None)
        verdict = verify(parse_policy(rule), target, draft, Noise(coins[:count].unsqueeze(0), coins[count : count + 1]))
        kept = int(verdict.accepted_B[0])
        assert emitted == [*tokens[rows].tolist()[:kept], int(verdict.next_token_B[0])]
        if greedy and rule == "exact":
            assert emitted == [token for token in output[b].tolist() if token >= 0]


def vllm_fly(tokens: list[int], logits: Tensor, window: int, coins: list[float] | None) -> int:
    """How many drafted tokens the FLy of vLLM 0.33 keeps (its v1/spec_decode/fly.py, theta 0.3, top 3): one by one.

    ``coins`` is None at temperature 0. Drafts are deterministic, so their probability is 1.
    """
    probs = logits.softmax(-1)
    native = [
        int(probs[i].argmax()) == token if coins is None else float(probs[i, token]) >= coins[i]
        for i, token in enumerate(tokens)
    ]
    for i in range(len(tokens)):
        top = probs[i].topk(3).values.tolist()
        undecided = -sum(share * math.log(share) for share in top if share > 0) >= 0.3
        followed = i + window < len(tokens) and all(native[i + 1 : i + 1 + window])
        if not native[i] and not (undecided and followed and float(probs[i, tokens[i]]) > 0):
            return i
    return len(tokens)


@given(st.integers(1, 3), st.integers(2, 8), st.booleans(), st.floats(0.5, 6), st.integers(0, 10**6))
def test_fly_keeps_what_the_fly_of_vllm_033_keeps(
    window: int, count: int, greedy: bool, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(count, SIZE, generator=generator)
    # Mostly the target's own choices, so that windows are followed often.
    swapped = torch.rand(count, generator=generator) < 0.3
    tokens = torch.where(swapped, torch.randint(0, SIZE, (count,), generator=generator), logits.argmax(-1))
    coins = torch.rand(count + 1, generator=generator)
    rule = FLy(window=window, hold=window)
    emitted = Row(rule).decide(tokens, logits, None, 5, 0.0 if greedy else 1.0, [1], [], coins)
    kept = vllm_fly(tokens.tolist(), logits, window, None if greedy else coins.tolist())
    assert emitted[:-1] == tokens.tolist()[:kept]


def test_exact_has_the_targets_distribution() -> None:
    """The first token of 20,000 blocks against the target's softmax: Pearson's chi-squared with 7 degrees of freedom is
    beyond 24.3 in one of 1000."""
    torch.manual_seed(0)
    logits, bonus, count = torch.randn(1, SIZE), 5, 20_000
    wanted, found = logits.softmax(-1)[0], Counter()
    row = Row(parse_policy("exact"))
    for _ in range(count):
        tokens = torch.multinomial(torch.full((SIZE,), 1 / SIZE), 1)
        draft = torch.full((1, SIZE), 1 / SIZE)
        found[row.decide(tokens, logits, draft, bonus, 1.0, [], [], torch.rand(2))[0]] += 1
    chi = sum((found[t] - count * float(wanted[t])) ** 2 / (count * float(wanted[t])) for t in range(SIZE))
    assert chi < 24.3


def test_a_budget_lasts_for_the_request() -> None:
    """``at_most(1)`` excuses one mismatch of the whole output, over all its blocks."""
    row, logits = Row(parse_policy("exact | entropy(0.0) & at_most(1)")), torch.zeros(1, SIZE)
    logits[0, 0] = 1.0
    arguments = (torch.tensor([3]), logits, None, 5, 0.0, [], [], torch.zeros(2))
    assert row.decide(*arguments) == [3, 5] and row.relaxed == 1
    assert row.decide(*arguments) == [0] and row.nats > 0


def test_a_rule_that_fails_leaves_vllms_own_decision() -> None:
    broken = request("exact")
    broken.fly.decide = lambda *arguments: 1 / 0
    output, _ = sample([2, 2], {0: broken}, 1.0)
    assert output.tolist() == [[77] * 3] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("exat", "exat"),
        ({"policy": "exact", "k": 3}, "it takes one entry"),
        ({"policy": 3}, "must be a text"),
        ("os:system", "os:system"),
        ("exact | token(digits)", "no tokenizer"),
        ("exact" * 500, "2000 characters"),
    ],
)
def test_a_bad_rule_is_an_error_of_the_request(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_rule({"fly": given}, SIZE)


def test_a_request_names_its_rule_in_two_forms() -> None:
    assert read_rule(None, SIZE) is None and read_rule({"other": 1}, SIZE) is None
    text = "exact | regret(2.3, 4)"
    assert str(read_rule({"fly": text}, SIZE)) == str(read_rule({"fly": {"policy": text}}, SIZE))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.7, 1.0, 2.0]), st.integers(0, 4)), min_size=1, max_size=5))
def test_each_drafted_token_gets_the_value_of_its_row(rows: list[tuple[float, int]]) -> None:
    values, counts = (torch.tensor(each) for each in zip(*rows))
    found = expand_batch_to_tokens(values, counts.cumsum(0).int(), int(counts.sum()), 0, 1)
    expected = [value or 1.0 for value, count in rows for _ in range(count)]
    assert found.dtype == values.dtype and torch.equal(found, torch.tensor(expected, dtype=values.dtype))
