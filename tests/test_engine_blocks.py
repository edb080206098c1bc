"""Rules of fly on another engine's blocks (``fly.extras.engines.blocks``), held to ``verify`` and to a decision row by
row. No engine is needed.

Shape legend: as in the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fly.extras.engines import blocks
from fly.extras.engines.blocks import Blocks, Row, decide, decide_rows, name_seed, read_rule
from fly.ops import Stream, uniforms
from fly.policies import AcceptancePolicy, Condition, Exact, parse_policy
from fly.policies.conditions import Block
from fly.policies.verification import add_costs
from fly.policies.verification import decide as decide_on_host
from fly.types import UNDECIDED, Draft, Noise, SamplingParams, Target, Verdict
from tests.on_device import put, read_all_places

SIZE = 8
STOPS = (2, 5)
GREEDY = SamplingParams(temperature=0)
EXACT = parse_policy("exact")
RULES = [
    "exact",
    "exact | regret(2.3, 4)",
    "fly(window=1, hold=1)",
    "fly(window=2, hold=0) & ~control",
    "lossy(3)",
    "block",
    "sample",
    "typical",
    "ensemble(0.5)",
    "exact | entropy(0.1) & at_most(1)",
    "exact | entropy(0.1) & budget(0.3)",
    "exact | margin(3) & nats(4)",
    "exact | margin(5) & regret_budget(4) & after(3)",
    "exact | margin(5) & above(6)",
    "exact | margin(5) & phase(1, 3, inside_first=True)",
]
TEMPERATURES = [0.0, 0.7, 1.0]


@dataclass
class Past:
    """What a request has behind it, on the host."""

    text: list[int]
    generated: int
    relaxed: int = 0
    nats: float = 0.0
    spent: float = 0.0


def decide_alone(
    row: Row, past: Past, tokens: list[int], logits_JV: Tensor, draft_KV: Tensor | None, position: int
) -> tuple[list[int], Past]:
    """Decide on one row on the host, as the first plug-in for vLLM did row by row: the whole softmax, no padding, every
    cost a float."""
    logits_1JV = logits_JV[: len(tokens) + 1].unsqueeze(0)
    greedy = row.params.temperature == 0
    control_V = torch.zeros(SIZE, dtype=torch.bool)
    control_V[list(row.control)] = True
    target = Target(
        logits_1JV,
        None if greedy else (logits_1JV / row.params.temperature).softmax(-1),
        control_V=control_V,
        generated_B=torch.tensor([past.generated]),
        relaxed_B=torch.tensor([past.relaxed]),
        nats_B=torch.tensor([past.nats]),
        spent=lambda label: torch.tensor([past.spent]),
        history=[past.text],
    )
    draft = Draft.of([tokens])
    if not greedy and draft_KV is not None:
        draft = Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), draft_KV[: len(tokens)].unsqueeze(0))
    seed_1, position_1 = torch.tensor([row.seed]), torch.tensor([position])
    coins = uniforms(seed_1, position_1, Stream.ACCEPT, len(tokens)), uniforms(seed_1, position_1, Stream.SAMPLE, 1)[0]
    decision = decide_on_host(row.rule, target, draft, Noise(*coins))[0]
    if row.rule.relaxation is not None:
        decision = add_costs(row.rule.relaxation.budgets, target, draft, 0, decision)
    relaxed = [mismatch for mismatch in decision.mismatches if mismatch.relaxed]
    after = Past(
        past.text,
        past.generated,
        past.relaxed + len(relaxed),
        past.nats + sum(mismatch.nats for mismatch in relaxed),
        past.spent + sum(sum(mismatch.costs.values()) for mismatch in relaxed),
    )
    return [*(decision.drafted[node] for node in decision.path), decision.next_token], after


def make_batch(
    seed: int, rule: str, temperatures: list[float], lengths: list[int], drawn: bool, placeholders: bool
) -> tuple[list[Row], list[Past], Blocks]:
    """Random blocks. What must not count is noise: tokens beyond a draft, and logits beyond the place after it."""
    generator = torch.Generator().manual_seed(seed)
    count, longest = len(lengths), max(lengths)
    logits_BJV = 3 * torch.randn(count, longest + 1, SIZE, generator=generator)
    logits_BJV = logits_BJV.masked_fill(torch.rand(logits_BJV.shape, generator=generator) < 0.1, -torch.inf)
    logits_BJV[..., 0] = 0.0  # no place without any token
    swapped_BK = torch.rand(count, longest, generator=generator) < 0.4
    others_BK = torch.randint(0, SIZE, (count, longest), generator=generator)
    tokens_BK = torch.where(swapped_BK, others_BK, logits_BJV[:, :-1].argmax(-1))
    draft_BKV = torch.randn(count, longest, SIZE, generator=generator).softmax(-1) if drawn else None
    if placeholders:
        tokens_BK = tokens_BK.masked_fill(torch.rand(count, longest, generator=generator) < 0.2, -1)
    rows, pasts = [], []
    for b, temperature in enumerate(temperatures):
        row = Row(parse_policy(rule), SIZE, SamplingParams(temperature=temperature), seed + b, STOPS)
        past = Past(torch.randint(0, SIZE, (5 + b,), generator=generator).tolist(), 1 + b)
        if row.keeps_account and b % 2:
            past.relaxed, past.nats, past.spent = b, b / 2, b / 3
            row.account_A = torch.tensor([b, b / 2, *[b / 3] * len(row.labels)], dtype=torch.float64)
        rows.append(row)
        pasts.append(past)
    positions_B = torch.tensor([len(past.text) for past in pasts])
    generated_B = torch.tensor([past.generated for past in pasts])
    history = [past.text for past in pasts]
    found = Blocks(logits_BJV, tokens_BK, torch.tensor(lengths), positions_B, draft_BKV, generated_B, history)
    return rows, pasts, found


def drafted(found: Blocks, b: int) -> list[int]:
    """The tokens of a row before its first placeholder."""
    tokens = found.tokens_BK[b, : int(found.lengths_B[b])].tolist()
    return tokens[: tokens.index(-1)] if -1 in tokens else tokens


some_rows = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(TEMPERATURES)), min_size=1, max_size=4)


@given(some_rows, st.sampled_from(RULES), st.integers(0, 10**6), st.booleans(), st.booleans())
@example([(0, 0.7)], RULES[9], 0, False, False)
def test_rows_together_decide_as_each_alone(
    some: list[tuple[int, float]], rule: str, seed: int, drawn: bool, placeholders: bool
) -> None:
    """Ragged drafts, placeholders, mixed temperatures, budgets, stop tokens: all rows at once give the tokens, counts
    and costs that ``verify`` gives row by row on the host."""
    lengths, temperatures = [length for length, _ in some], [temperature for _, temperature in some]
    rows, pasts, found = make_batch(seed, rule, temperatures, lengths, drawn, placeholders)
    decided = decide(rows, found)
    for b, (row, past) in enumerate(zip(rows, pasts)):
        tokens = drafted(found, b)
        emitted = decided.tokens_BJ[b, : int(decided.counts_B[b])].tolist()
        if not tokens:
            assert emitted == []  # the engine's own token stands
            expected, after = [], past
        else:
            draft_KV = None if found.draft_BKV is None else found.draft_BKV[b]
            expected, after = decide_alone(row, past, tokens, found.logits_BJV[b], draft_KV, len(past.text))
            assert emitted == expected
            assert decided.tokens_BJ[b, len(expected) :].tolist() == [-1] * (max(lengths) + 1 - len(expected))
        if row.keeps_account:
            account = decided.account_BA[b].tolist()
            assert account[0] == after.relaxed
            assert account[1] == pytest.approx(after.nats, abs=1e-4) or "nats" not in row.past
            assert account[2:] == pytest.approx([after.spent] * len(row.labels), abs=1e-4)


@given(some_rows.filter(lambda some: any(length for length, _ in some)), st.sampled_from(RULES), st.integers(0, 10**6))
def test_a_row_decides_alike_in_any_batch(some: list[tuple[int, float]], rule: str, seed: int) -> None:
    """Padding and other rows change nothing, so ranks and parts of a batch agree."""
    lengths, temperatures = [length for length, _ in some], [temperature for _, temperature in some]
    rows, _, found = make_batch(seed, rule, temperatures, lengths, True, False)
    together = decide(rows, found)
    for b in range(len(rows)):
        part = slice(b, b + 1)
        alone = decide(
            rows[part],
            Blocks(
                found.logits_BJV[part],
                found.tokens_BK[part],
                found.lengths_B[part],
                found.positions_B[part],
                None if found.draft_BKV is None else found.draft_BKV[part],
                None if found.generated_B is None else found.generated_B[part],
                None if found.history is None else found.history[part],
            ),
        )
        assert torch.equal(alone.tokens_BJ[0], together.tokens_BJ[b])


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("rule", [rule for rule in RULES if "above" not in rule and "phase" not in rule])
def test_the_host_waits_for_nothing(rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule but those that read the text makes the host look at a tensor."""
    read_all_places(monkeypatch)
    rows, _, found = make_batch(3, rule, [temperature, 0.0], [4, 2], True, True)
    assert "history" not in rows[0].past
    expected = decide(rows, found)
    on_device = Blocks(**{name: put(value) for name, value in vars(found).items() if isinstance(value, Tensor)})
    output, before = torch.full((2, 6), 77), torch.full((2, 6), 77)
    for numbers, decided in decide_rows(dict(enumerate(rows)), 5, SIZE, lambda numbers: on_device):
        blocks.write_tokens(put(output), torch.tensor(numbers), decided)
    blocks.write_tokens(before, torch.arange(2), expected)
    assert torch.equal(output, before)


def test_the_tensor_that_refuses_a_look_refuses_it() -> None:
    tensor = put(torch.ones(1))
    for look in (lambda: tensor.item(), lambda: tensor.tolist(), lambda: bool(tensor), lambda: tensor[tensor > 0]):
        with pytest.raises(AssertionError, match="waits"):
            look()


def test_a_nan_leaves_the_engines_decision() -> None:
    rows, _, found = make_batch(0, "exact | margin(9) & regret_budget(50)", [1.0, 1.0], [3, 3], False, False)
    found.logits_BJV[0] = torch.nan
    decided = decide(rows, found)
    assert decided.counts_B[0] == 0 and decided.counts_B[1] > 0
    assert decided.account_BA[0].tolist() == [0.0] * 3
    output = torch.full((2, 4), 77)
    blocks.write_tokens(output, torch.arange(2), decided)
    assert output[0].tolist() == [77] * 4 and UNDECIDED not in output[1, : int(decided.counts_B[1])].tolist()


def block_of(tokens: list[int], logits_JV: Tensor) -> Blocks:
    return Blocks(
        logits_JV.unsqueeze(0), torch.tensor([tokens]), torch.tensor([len(tokens)]), torch.zeros(1, dtype=torch.int64)
    )


def tokens_of(decisions: list[tuple[list[int], blocks.Decided]]) -> dict[int, list[int]]:
    """The tokens of each row."""
    return {b: tokens for numbers, decided in decisions for b, tokens in zip(numbers, decided.tokens_BJ.tolist())}


def test_a_budget_lasts_for_the_request() -> None:
    """``at_most(1)`` excuses one mismatch of the whole output, over all its blocks."""
    logits_JV = torch.zeros(2, SIZE)
    logits_JV[0, 0], logits_JV[1, 5] = 1.0, 1.0
    row, emitted = Row(parse_policy("exact | entropy(0.0) & at_most(1)"), SIZE, GREEDY), []
    for _ in range(2):
        ((_, decided),) = decide_rows({0: row}, 2, SIZE, lambda numbers: block_of([3], logits_JV))
        emitted.append(decided.tokens_BJ[0, : int(decided.counts_B[0])].tolist())
    assert emitted == [[3, 5], [0]] and row.account_A is not None and row.account_A.tolist() == [1.0, 0.0]


def test_rows_of_several_rules_each_decide_by_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are grouped by rule and stop tokens, however large the group."""
    logits_JV = torch.zeros(2, SIZE)
    logits_JV[0, 0], logits_JV[1, 5] = 1.0, 1.0
    texts = ["exact", "exact | margin(2)", "exact | margin(2) & ~control", "exact | margin(2) & ~control"]
    rows = {b: Row(parse_policy(text), SIZE, GREEDY, stop_ids=(3,) * (b == 2)) for b, text in enumerate(texts)}

    def read(numbers: list[int]) -> Blocks:
        one = block_of([3], logits_JV)
        sizes.append(len(numbers))
        return Blocks(*(tensor.expand(len(numbers), *tensor.shape[1:]) for tensor in list(vars(one).values())[:4]))

    for largest, parts in ((2**25, [1, 1, 1, 1]), (1, [1, 1, 1, 1])):
        sizes: list[int] = []
        monkeypatch.setattr(blocks, "_LARGEST", largest)
        decisions = decide_rows(rows, 2, SIZE, read)
        assert tokens_of(decisions) == {0: [0, -1], 1: [3, 5], 2: [0, -1], 3: [3, 5]} and sizes == parts
    alike = {b: Row(parse_policy("exact"), SIZE, GREEDY) for b in range(5)}
    for largest, parts in ((2**25, [5]), (2 * 2 * SIZE, [2, 2, 1])):
        sizes = []
        monkeypatch.setattr(blocks, "_LARGEST", largest)
        decide_rows(alike, 2, SIZE, read)
        assert sizes == parts


@dataclass(frozen=True)
class Named(Condition):
    """A condition whose parameters do not show in its text."""

    name: ClassVar[str] = "named"
    excuses: bool = False

    def evaluate(self, block: Block) -> Tensor:
        return torch.full_like(block.agree_BK, self.excuses)

    def __str__(self) -> str:
        return self.name


def test_rules_that_print_alike_are_decided_each_by_its_own() -> None:
    """As on the engine of this package, rules are told apart by what they hold, not by their text."""
    logits_JV = torch.zeros(2, SIZE)
    logits_JV[0, 0], logits_JV[1, 5] = 1.0, 1.0
    rows = {b: Row(Exact() | Named(excuses), SIZE, GREEDY) for b, excuses in enumerate((True, False))}
    assert str(rows[0].rule) == str(rows[1].rule)

    def read(numbers: list[int]) -> Blocks:
        one = block_of([3], logits_JV)
        return Blocks(*(tensor.expand(len(numbers), *tensor.shape[1:]) for tensor in list(vars(one).values())[:4]))

    assert tokens_of(decide_rows(rows, 2, SIZE, read)) == {0: [3, 5], 1: [0, -1]}


@dataclass(frozen=True)
class Unlikely(AcceptancePolicy):
    """Judges whole blocks, and names a token that does not exist, or keeps more tokens than were drafted."""

    name: ClassVar[str] = "unlikely"
    accepted: int = 0
    following: int = 0

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return torch.ones(draft.shape)

    def verdict(self, target: Target, draft: Draft, noise: Noise) -> Verdict:
        rows, longest = draft.shape
        accepted_B, next_token_B = torch.full((rows,), self.accepted), torch.full((rows,), self.following)
        none_BK = torch.zeros(rows, longest, dtype=torch.int8)
        return Verdict(accepted_B, next_token_B, none_BK, none_BK.bool())


@pytest.mark.parametrize(
    ("accepted", "following", "count"), [(1, 3, 2), (0, SIZE, 0), (0, -5, 0), (2, 3, 0), (-1, 3, 0)]
)
def test_a_verdict_that_cannot_be_true_leaves_the_engines_decision(accepted: int, following: int, count: int) -> None:
    decided = decide([Row(Unlikely(accepted, following), SIZE, GREEDY)], block_of([4], torch.zeros(2, SIZE)))
    assert decided.counts_B.tolist() == [count]


@dataclass(frozen=True)
class Broken(Condition):
    name: ClassVar[str] = "broken"

    def evaluate(self, block: Block) -> Tensor:
        raise RuntimeError("no such thing")


def test_a_rule_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rows = {0: Row(parse_policy("exact") | Broken(), SIZE, GREEDY), 1: Row(parse_policy("exact"), SIZE, GREEDY)}
    read = lambda numbers: block_of([3], torch.randn(2, SIZE))  # noqa: E731
    decisions = decide_rows(rows, 2, SIZE, read)
    assert [numbers for numbers, _ in decisions] == [[1]] and "the engine's own decision stands" in caplog.text


@pytest.mark.parametrize(
    ("rule", "past"),
    [
        ("exact", set()),
        ("exact | regret(2)", set()),
        ("fly", set()),
        ("block", set()),
        ("exact | regret(2) & after(3)", {"generated"}),
        ("exact | regret(2) & at_most(3, per=block)", set()),
        ("exact | regret(2) & at_most(3)", {"relaxed"}),
        ("exact | regret(2) & budget(0.1)", {"relaxed", "generated"}),
        ("exact | regret(2) & nats(3)", {"nats"}),
        ("exact | regret(2) & regret_budget(3)", {"spent"}),
        ("exact | regret(2) & (above(9) | phase(1, 2))", {"history"}),
    ],
)
def test_what_a_rule_asks_about_the_past_is_known_beforehand(rule: str, past: set[str]) -> None:
    row = Row(parse_policy(rule), SIZE, GREEDY)
    assert row.past == past
    assert row.reads_text == bool(past & {"history", "generated"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("exat", "exat"),
        ({"policy": "exact", "k": 3}, "it takes one entry"),
        ({"policy": 3}, "must be a text"),
        (3, "must be a text"),
        ("os:system", "os:system"),
        ("exact | token(digits)", "no tokenizer"),
        ("exact" * 500, "2000 characters"),
    ],
)
def test_a_bad_rule_is_an_error_of_the_request(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_rule(given, SIZE)


@pytest.mark.parametrize("error", [KeyError("colour"), ZeroDivisionError("by zero"), RuntimeError(), MemoryError()])
def test_whatever_a_rule_raises_as_it_is_read_is_an_error_of_the_request(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fussy(Named):
        def bind(self, vocabulary: Any) -> Any:
            raise error

    monkeypatch.setattr(blocks, "load_policy", lambda text: Exact() | Fussy())
    with pytest.raises(ValueError, match=f"fly: {type(error).__name__}: "):
        read_rule("fussy", SIZE)


def test_a_request_names_its_rule_in_two_forms() -> None:
    assert read_rule(None, SIZE) is None
    text = "exact | regret(2.3, 4)"
    assert str(read_rule(text, SIZE)) == str(parse_policy(text))
    # The same text is the same rule, also if it holds what equals nothing else: rows of one rule are decided together.
    assert read_rule(text, SIZE) is read_rule({"policy": text}, SIZE)


@given(st.integers(-(2**63), 2**64 - 1), st.text(max_size=40))
def test_seeds_are_64_bits(seed: int, name: str) -> None:
    """Of a request that gives one, and of one that gives none."""
    row = Row(EXACT, SIZE, GREEDY, seed)
    assert -(2**63) <= row.seed < 2**63 and (row.seed - seed) % 2**64 == 0
    assert -(2**63) <= name_seed(name) < 2**63 and name_seed(name) == name_seed(name) != name_seed(name + "x")


@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_cut_takes_rows_of_a_flat_batch(width: int, lengths: list[int]) -> None:
    flat = torch.arange(max(sum(lengths), 1))  # an empty row at the end starts beyond it
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    padded = blocks.cut(flat, starts, torch.tensor(lengths), width)
    for start, length, found in zip(starts.tolist(), lengths, padded.tolist()):
        expected = list(range(start, start + length))
        assert found[: min(length, width)] == expected[:width]
