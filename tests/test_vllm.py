"""fly's rules inside vLLM, on stand-ins of its functions' signatures: no vLLM is needed. tests/wheels holds the same on
vLLM's own code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from fly.extras.engines.blocks import Blocks, Row, decide
from fly.extras.engines.vllm import first, second
from fly.extras.engines.vllm.requests import TRIED, check_request, read_row
from fly.ops import Stream, uniforms
from fly.policies import FLy, parse_policy, verify
from fly.types import Draft, Noise, SamplingParams, Target
from tests.on_device import put, read_all_places

SIZE = 8
RULES = [
    "exact",
    "exact | regret(2.3, 4)",
    "fly(window=1, hold=1)",
    "lossy(3)",
    "block",
    "exact | entropy(0.1) & at_most(1)",
]
UNTOUCHED = 77


def coins(seed: int, position: int, count: int) -> Noise:
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    return Noise(
        uniforms(seeds, positions, Stream.ACCEPT, count), uniforms(seeds, positions, Stream.SAMPLE, 1).squeeze(1)
    )


def judge(rule: str, row: Row, tokens: Tensor, logits: Tensor, probs: Tensor | None, position: int) -> list[int]:
    """What ``verify`` emits for one row, whose target is built here once more. ``logits`` has one place for each
    token, and one after the last."""
    greedy, count = row.params.temperature == 0, len(tokens)
    processed = logits.unsqueeze(0)
    control_V = torch.zeros(SIZE, dtype=torch.bool)
    control_V[list(row.control)] = True
    target = Target(
        processed if greedy else processed * row.params.temperature,
        None if greedy else processed.softmax(-1),
        control_V=control_V,
        generated_B=torch.tensor([1]),
    )
    own = None if greedy or probs is None else probs.unsqueeze(0)
    draft = Draft(tokens.long().unsqueeze(0), torch.tensor([count]), own)
    verdict = verify(parse_policy(rule), target, draft, coins(row.seed, position, count))
    return [*tokens.tolist()[: int(verdict.accepted_B[0])], int(verdict.next_token_B[0])]


# The first model runner.


def untouched(draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int, *others: Any) -> Tensor:
    """vLLM's own decision, as far as rows without a rule can tell: any tokens of its shape."""
    return torch.full((len(num_draft_tokens), max_spec_len + 1), UNTOUCHED, dtype=torch.int32)


def request(rule: str, temperature: float = 0.0, seed: int = 0) -> SimpleNamespace:
    row = Row(parse_policy(rule), SIZE, SamplingParams(temperature=temperature), seed)
    return SimpleNamespace(fly=row, prompt_token_ids=[1, 2], output_token_ids=[3])


def metadata_of(rules: dict[int, Any], **more: Any) -> SimpleNamespace:
    """As vLLM's ``SamplingMetadata``: without seeds, greedy and drawn rows together."""
    return SimpleNamespace(**{"fly": rules, "generators": {}, "all_greedy": False, **more})


def sample(counts: list[int], rules: dict[int, Any], seed: int = 0, drawn: bool = False) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    tokens = torch.randint(0, SIZE, (total,), generator=generator, dtype=torch.int32)
    logits = 2 * torch.randn(total, SIZE, generator=generator)
    probs = torch.randn(total, SIZE, generator=generator).softmax(-1) if drawn else None
    bonus = torch.arange(len(counts)).unsqueeze(1).int() % SIZE
    ends = torch.tensor(counts).cumsum(0)
    metadata, kept = metadata_of(rules), logits.clone()
    output = first.decide_after(untouched)(tokens, counts, max(counts), ends, probs, logits, bonus, metadata)
    assert torch.equal(logits, kept)  # vLLM reads them again, for logprobs
    return output, (tokens, logits, probs, bonus, ends.tolist())


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    st.lists(st.sampled_from(RULES), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=4, max_size=4),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_decisions_are_those_of_verify(
    counts: list[int], rules: list[str], temperatures: list[float], seed: int, drawn: bool
) -> None:
    """Every second row has no rule; each of the others is judged by ``verify`` on a block that is built here."""
    chosen = {b: request(rules[b], temperatures[b], seed + b) for b in range(0, len(counts), 2)}
    output, (tokens, logits, probs, bonus, ends) = sample(counts, chosen, seed, drawn)
    for b, count in enumerate(counts):
        if b not in chosen or not count:
            assert output[b].tolist() == [UNTOUCHED] * (max(counts) + 1)
            continue
        part = slice(ends[b] - count, ends[b])
        certain = torch.full((1, SIZE), -torch.inf)
        certain[0, bonus[b, 0]] = 0.0
        own = None if probs is None else probs[part]
        expected = judge(rules[b], chosen[b].fly, tokens[part], torch.cat([logits[part], certain]), own, 1)
        assert output[b].tolist() == expected + [-1] * (max(counts) + 1 - len(expected))


def test_the_first_runner_makes_the_host_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rules beside a row without one, some rows greedy, on tensors that refuse to be looked at."""
    read_all_places(monkeypatch)
    counts = [3, 2, 4]

    def decide_step(place: Callable[[Tensor], Tensor]) -> Tensor:
        rules = {0: request(RULES[1], 0.7), 2: request(RULES[5])}
        generator = torch.Generator().manual_seed(2)
        total = sum(counts)
        inputs = (
            torch.randint(0, SIZE, (total,), generator=generator, dtype=torch.int32),
            torch.tensor(counts).cumsum(0),
            torch.randn(total, SIZE, generator=generator).softmax(-1),
            2 * torch.randn(total, SIZE, generator=generator),
            torch.ones(len(counts), 1, dtype=torch.int32),
        )
        tokens, ends, probs, logits, bonus = map(place, inputs)
        output = first.decide_after(lambda *others: place(untouched(*others)))(
            tokens, counts, max(counts), ends, probs, logits, bonus, metadata_of(rules)
        )
        return output.as_subclass(Tensor)

    expected = decide_step(lambda tensor: tensor)
    assert torch.equal(decide_step(put), expected) and (expected[[0, 2]] != UNTOUCHED).all()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    st.sets(st.integers(0, 3)),
    st.none() | st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_vllm_decides_where_something_of_it_is_left(
    counts: list[int], ruled: set[int], broken: int | None, seeded: bool, all_greedy: bool, seed: int
) -> None:
    """vLLM's decision is computed if a row has no rule, no draft or no token (its logits are NaN), or if it draws from
    generators; and the rows are those of a run that always computes it."""
    rules = {b: request("exact | margin(1)", 1.0 - all_greedy, seed + b) for b in ruled if b < len(counts)}
    total, generator = sum(counts), torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SIZE, (total,), generator=generator, dtype=torch.int32)
    logits, ends = 2 * torch.randn(total, SIZE, generator=generator), torch.tensor(counts).cumsum(0)
    if broken is not None and broken < len(counts):
        logits[ends[broken] - counts[broken] : ends[broken]] = torch.nan
    calls = []

    def original(*given: Any) -> Tensor:
        calls.append(given)
        return untouched(*given)

    metadata = metadata_of(rules, generators={0: generator} if seeded else {}, all_greedy=all_greedy)
    bonus = torch.arange(len(counts)).unsqueeze(1).int() % SIZE
    arguments = (tokens, counts, max(counts), ends, None, logits, bonus, metadata)
    output = first.decide_after(original)(*arguments)
    decided = [UNTOUCHED not in row for row in output.tolist()]
    for b, count in enumerate(counts):
        # Where logits are NaN, a greedy row may still accept its draft: the likeliest token is the first NaN.
        assert b == broken or decided[b] == (b in rules and count > 0)
        assert not decided[b] or output[b, 0] >= 0
    assert len(calls) == (not all(decided) or (seeded and not all_greedy))
    for one in rules.values():
        one.fly_blocks = 0  # the same coins again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "_replaces_all", lambda *_: False)
        assert torch.equal(first.decide_after(original)(*arguments), output)


def test_what_vllm_033_adds_to_the_call_reaches_it() -> None:
    """``rejection_sample`` of 0.33 has three more keywords than that of 0.32; others may follow."""
    added = {"fly_window_size": None, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3, "use_fp64_gumbel": True}
    calls = []

    def original(*given: Any, **keywords: Any) -> Tensor:
        calls.append((given[8:], keywords))
        return untouched(*given[:8])

    tokens, logits = torch.zeros(1, dtype=torch.int32), torch.zeros(1, SIZE)
    bonus = torch.zeros(1, 1, dtype=torch.int32)
    first.decide_after(original)(
        tokens, [1], 1, torch.tensor([1]), None, logits, bonus, metadata_of({}), False, None, **added
    )
    assert calls == [((False, None), added)]


# Six steps of vLLM 0.32.0 on the bundled pair (n-gram and model drafts, temperature 0 and 1), with what vLLM decided.
CAPTURED = load_file(Path(__file__).parent / "data" / "vllm_blocks.safetensors")
STEPS = sorted({name.partition(".")[0] for name in CAPTURED})


@given(st.sampled_from(STEPS), st.sampled_from(RULES), st.integers(0, 10**6))
def test_decisions_on_captured_blocks_are_those_of_verify(step: str, rule: str, seed: int) -> None:
    """Each row of a captured step under a rule; greedy rows under ``exact`` also decide as vLLM did."""
    tokens, counts, logits, bonus, output, greedy = (
        CAPTURED[f"{step}.{name}"] for name in ("draft", "counts", "logits", "bonus", "output", "greedy")
    )
    temperature, size = 0.0 if greedy else 1.0, logits.shape[1]
    rows = {b: request(rule, temperature, seed + b) for b in range(len(counts))}
    for one in rows.values():
        one.fly = Row(parse_policy(rule), size, SamplingParams(temperature=temperature), one.fly.seed)
    decided = first.decide_after(lambda *_: torch.full_like(output, UNTOUCHED))(
        tokens.int(), counts.tolist(), int(counts.max()), counts.cumsum(0), None, logits, bonus.view(-1, 1).int(),
        metadata_of(rows),
    )  # fmt: skip
    for b, (count, end) in enumerate(zip(counts.tolist(), counts.cumsum(0).tolist())):
        if not count:
            continue
        certain_1V = torch.full((1, size), -torch.inf)
        certain_1V[0, int(bonus[b])] = 0.0
        logits_1JV = torch.cat([logits[end - count : end], certain_1V]).unsqueeze(0)
        target = Target(logits_1JV, None if greedy else logits_1JV.softmax(-1), generated_B=torch.tensor([1]))
        draft = Draft(tokens[end - count : end].long().unsqueeze(0), torch.tensor([count]), None)
        verdict = verify(parse_policy(rule), target, draft, coins(seed + b, 1, count))
        kept = int(verdict.accepted_B[0])
        expected = [*draft.tokens_BK[0, :kept].tolist(), int(verdict.next_token_B[0])]
        assert [token for token in decided[b].tolist() if token >= 0] == expected
        if greedy and rule == "exact":
            assert expected == [token for token in output[b].tolist() if token >= 0]


def test_a_request_keeps_its_row_when_it_comes_back() -> None:
    """A preempted request is added again; its budget goes on, unless it has another rule now. Requests that left are
    forgotten."""
    batch, params = SimpleNamespace(vocab_size=SIZE), sampling("exact | margin(1) & at_most(1)")
    one, two = (SimpleNamespace(req_id=name, sampling_params=params) for name in ("one", "two"))
    add = first.add_row(lambda self, request: 0)
    make = first.attach_rows(lambda self: SimpleNamespace())
    add(batch, one), add(batch, two)
    one.fly.account_A = account = torch.ones(2)
    batch.req_id_to_index = {"two": 0}
    assert list(make(batch).fly) == [0] and list(batch.fly) == ["two"]
    add(batch, one)
    batch.req_id_to_index = {"two": 1, "one": 0}
    assert one.fly.account_A is account and make(batch).fly == {0: one, 1: two}
    one.sampling_params = sampling("exact | margin(1) & at_most(2)")
    add(batch, one)
    assert one.fly.account_A is None
    one.sampling_params = sampling(None)
    add(batch, one)
    assert one.fly is None


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.7, 1.0, 2.0]), st.integers(0, 4)), min_size=1, max_size=5))
def test_each_drafted_token_gets_the_value_of_its_row(rows: list[tuple[float, int]]) -> None:
    values, counts = (torch.tensor(each) for each in zip(*rows))
    found = first.expand_batch_to_tokens(values, counts.cumsum(0).int(), int(counts.sum()), 0, 1)
    expected = [value or 1.0 for value, count in rows for _ in range(count)]
    assert found.dtype == values.dtype and torch.equal(found, torch.tensor(expected, dtype=values.dtype))


# The second model runner.


def sampling(rule: Any, temperature: float = 0.0, seed: int | None = None) -> SimpleNamespace:
    extra = None if rule is None else {"fly": rule}
    return SimpleNamespace(extra_args=extra, temperature=temperature, seed=seed, all_stop_token_ids={2})


class Sampler(SimpleNamespace):
    """What the plug-in reads of vLLM's sampler."""

    def __init__(self, slots: int = 6) -> None:
        super().__init__(
            sampling_states=SimpleNamespace(vocab_size=SIZE, seeds=SimpleNamespace(np=np.arange(slots) + 100)),
            req_states=SimpleNamespace(
                index_to_req_id={},
                total_len=SimpleNamespace(gpu=torch.full((slots,), 5, dtype=torch.int32)),
                prompt_len=SimpleNamespace(gpu=torch.full((slots,), 4, dtype=torch.int32)),
                all_token_ids=SimpleNamespace(gpu=torch.arange(10 * slots).view(slots, 10) % SIZE),
            ),
        )
        self.added: list[int] = []

    def add(self, slot: int, name: str, rule: Any, temperature: float = 0.0) -> Row | None:
        self.req_states.index_to_req_id[slot] = name
        second.set_row(lambda self, slot, params: self.added.append(slot))(self, slot, sampling(rule, temperature))
        row: Row | None = self.fly.by_slot.get(slot)
        return row


def decide_chunk(
    sampler: Any,
    slots: list[int],
    counts: list[int],
    most: int,
    seed: int,
    draft_logits: Tensor | None,
    grammar: bool,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the wrapped ``_verify`` on random logits, each tensor where ``place`` puts it. Return the tokens, their
    numbers, and what it was given."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts) + len(counts)
    cu = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0).int()
    logits = 2 * torch.randn(total, SIZE, generator=generator)
    drafted = torch.randint(0, SIZE, (total,), generator=generator)
    if grammar:
        drafted = drafted.masked_fill(torch.rand(total, generator=generator) < 0.3, -1)
    shape = len(counts), most + 1
    sampled, num_sampled = torch.full(shape, UNTOUCHED), torch.full(shape[:1], UNTOUCHED, dtype=torch.int32)

    def original(self: Any, logits: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        return logits, place(sampled), place(num_sampled)

    me, numbers = SimpleNamespace(sampler=sampler, num_speculative_steps=most), torch.tensor(slots, dtype=torch.int32)
    none = torch.zeros(0)
    second.decide_after(original)(
        me, place(logits), None if draft_logits is None else place(draft_logits), place(drafted),
        place(torch.arange(total) + 50), place(cu), place(numbers), numbers.numpy(), none, none, none.numpy(),
        place(drafted),
    )  # fmt: skip
    return sampled, num_sampled, logits, drafted


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.sampled_from([None, *RULES]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=4, max_size=4),
    st.permutations(range(6)),
    st.integers(0, 10**6),
    st.sampled_from([None, SIZE - 2, SIZE, SIZE + 3]),
    st.booleans(),
)
def test_chunks_are_decided_as_by_verify(
    counts: list[int],
    rules: list[str | None],
    temperatures: list[float],
    slots: list[int],
    seed: int,
    width: int | None,
    grammar: bool,
) -> None:
    """Ragged rows in any slots; the row after the last draft is the target's; draft logits are by slot and step, before
    the temperature, of a smaller or larger vocabulary; -1 ends a draft."""
    most, sampler = 4, Sampler()
    rows = [sampler.add(slots[b], f"r{b}", rules[b], temperatures[b]) for b in range(len(counts))]
    generator = torch.Generator().manual_seed(seed)
    draft_logits = None if width is None else torch.randn(6, most, width, generator=generator)
    sampled, num_sampled, logits, drafted = decide_chunk(
        sampler, slots[: len(counts)], counts, most, seed, draft_logits, grammar
    )
    start = 0
    for b, (count, row) in enumerate(zip(counts, rows)):
        tokens = drafted[start + 1 : start + 1 + count].tolist()
        count = tokens.index(-1) if -1 in tokens else count
        if row is None or not count:
            assert sampled[b].tolist() == [UNTOUCHED] * (most + 1) and num_sampled[b] == UNTOUCHED
        else:
            probs = torch.zeros(most, SIZE)
            if draft_logits is not None:
                scaled = draft_logits[slots[b], :, :SIZE] / (row.params.temperature or 1.0)
                probs[:, : scaled.shape[1]] = scaled.softmax(-1)
            own = None if draft_logits is None else probs[:count]
            places = logits[start : start + count + 1]
            expected = judge(str(rules[b]), row, torch.tensor(tokens[:count]), places, own, 50 + start)
            assert sampled[b, : int(num_sampled[b])].tolist() == expected
        start += counts[b] + 1


@pytest.mark.parametrize("drawn", [False, True])
def test_the_second_runner_makes_the_host_wait_for_nothing(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules with and without an account, and one that asks how long the text is, greedy and drawn; the request states
    too are on the device."""
    read_all_places(monkeypatch)
    rules = [*RULES, "exact | margin(3) & after(1)"]
    draft_logits = torch.randn(len(rules), 3, SIZE, generator=torch.Generator().manual_seed(1)) if drawn else None
    decided = []
    for place in (lambda tensor: tensor, put):
        sampler = Sampler(len(rules))
        for name in ("total_len", "prompt_len", "all_token_ids"):
            state = getattr(sampler.req_states, name)
            state.gpu = place(state.gpu)
        for slot, rule in enumerate(rules):
            sampler.add(slot, f"r{slot}", rule, 0.7 * (slot % 2))
        slots = list(range(len(rules)))
        decided.append(decide_chunk(sampler, slots, [3] * len(rules), 3, 5, draft_logits, True, place)[:2])
    assert all(torch.equal(here, there) for here, there in zip(*decided))
    assert (decided[0][1] != UNTOUCHED).sum() > len(rules) / 2


def test_a_slot_used_again_has_the_new_requests_rule_or_none() -> None:
    sampler = Sampler()
    assert sampler.add(3, "one", "exact") is not None
    assert sampler.add(3, "two", None) is None
    assert sampler.add(3, "three", "block") is not None and sampler.added == [3, 3, 3]


def test_a_preempted_request_keeps_its_account_in_another_slot() -> None:
    sampler = Sampler()
    row = sampler.add(3, "one", "exact | margin(9) & at_most(1)")
    assert row is not None
    row.account_A = account = torch.ones(2)
    assert sampler.add(3, "two", None) is None
    again = sampler.add(5, "one", "exact | margin(9) & at_most(1)")
    assert again is not None and again.account_A is account
    runner = SimpleNamespace(sampler=sampler)
    second.forget_rows(lambda self, output: None)(runner, SimpleNamespace(finished_req_ids={"one", "unknown"}))
    ended = sampler.add(4, "one", "exact | margin(9) & at_most(1)")
    assert ended is not None and ended.account_A is None
    second.forget_rows(lambda self, output: None)(SimpleNamespace(sampler=None), SimpleNamespace(finished_req_ids={}))


def test_a_rule_that_reads_the_text_gets_the_slots_own() -> None:
    """``above(n)`` counts the text of the slot, prompt included: 5 tokens here."""
    tokens = {}
    for position in (5, 6):
        sampler = Sampler()
        sampler.add(2, "one", f"exact | margin(99) & above({position})")
        sampled, num_sampled, _, drafted = decide_chunk(sampler, [2], [1], 1, 1, None, False)
        tokens[position] = sampled[0, : int(num_sampled[0])].tolist(), int(drafted[1])
    (relaxed, token), (corrected, _) = tokens[5], tokens[6]
    assert relaxed[0] == token and corrected[0] != token and len(corrected) == 1


# What a request may ask for.


def config(**options: Any) -> SimpleNamespace:
    drafts = SimpleNamespace(
        rejection_sample_method=options.pop("method", "standard"),
        enable_adaptive_verification=options.pop("adaptive", False),
    )
    return SimpleNamespace(
        speculative_config=options.pop("drafts", drafts),
        use_v2_model_runner=options.pop("second", True),
        scheduler_config=SimpleNamespace(async_scheduling=options.pop("asynchronous", True)),
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=options.pop("sharded", False)),
        watermark_config=options.pop("watermark", None),
        **options,
    )


@pytest.mark.parametrize(
    ("rule", "options", "version", "said"),
    [
        ("exact", {}, "0.31.0", "vLLM 0.31.0 was not tried"),
        ("exact", {}, "0.34.0", "vLLM 0.34.0 was not tried"),
        ("exact", {"drafts": None}, "0.33.0", "no draft"),
        ("exact", {"method": "fly"}, "0.33.0", "rejection_sample_method='fly'"),
        ("exact", {"method": "block", "second": False}, "0.33.0", "rejection_sample_method='block'"),
        ("exact", {"method": "synthetic"}, "0.33.0", "rejection_sample_method='synthetic'"),
        ("exact", {"adaptive": True}, "0.33.0", "enable_adaptive_verification"),
        ("exact", {"watermark": object()}, "0.33.0", "watermark"),
        ("exact | margin(1) & after(3)", {"second": False}, "0.33.0", "--no-async-scheduling"),
        ("exact | margin(1) & above(3)", {"second": False}, "0.32.0", "--no-async-scheduling"),
        ("exact | margin(1) & nats(3)", {"sharded": True}, "0.33.0", "enable_batch_sharded_sampling"),
        ("exat", {}, "0.33.0", "exat"),
    ],
)
def test_what_cannot_be_decided_rightly_is_refused_by_name(rule: str, options: Any, version: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_request(sampling(rule), config(**options), SIZE, version)
    check_request(sampling(None), config(**options), SIZE, version)  # a request without a rule
    check_request(SimpleNamespace(), config(**options), SIZE, version)  # of pooling


@pytest.mark.parametrize(
    ("rule", "options", "version"),
    [
        ("exact", {"second": False, "asynchronous": False}, "0.32.0"),
        ("exact | regret(2)", {"second": False}, "0.32.0"),  # asynchronous, and it needs no history
        ("exact | regret(2) & at_most(3)", {"second": False}, "0.33.0"),  # its account is on the device
        ("exact | regret(2) & after(3)", {"second": False, "asynchronous": False}, "0.33.0"),
        ("exact | regret(2) & above(3)", {}, "0.33.0"),
        ("exact", {"sharded": True}, "0.33.0"),
        ("exact", {"second": True}, "0.32.0"),
    ],
)
def test_what_can_be_decided_is_not_refused(rule: str, options: Any, version: str) -> None:
    check_request(sampling(rule), config(**options), SIZE, version)


def test_tried_versions_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "engines.md").read_text(encoding="utf-8")
    assert all(version in page for version in TRIED)


@pytest.mark.parametrize(("temperature", "taken"), [(0.0, 0.0), (1e-6, 0.0), (0.01, 0.01), (1.5, 1.5)])
def test_a_row_has_the_requests_temperature_and_seed(temperature: float, taken: float) -> None:
    row, other = (read_row(sampling("exact", temperature, seed=7), SIZE, name) for name in "ab")
    assert row is not None and other is not None
    assert (row.params.temperature, row.seed, other.seed) == (taken, 7, 7)
    unseeded = [read_row(sampling("exact", temperature), SIZE, name) for name in "aab"]
    assert all(unseeded)
    a, same, b = (one.seed for one in unseeded if one is not None)
    assert a == same != b and row.control == (2,)


# What rules mean here.


def decide_one(row: Row, tokens: Tensor, logits: Tensor, draft: Tensor | None = None, position: int = 0) -> list[int]:
    """Decide on one row. ``logits`` has one place for each token, and one after the last."""
    lengths = torch.tensor([len(tokens)])
    probs = None if draft is None else draft.unsqueeze(0)
    decided = decide([row], Blocks(logits.unsqueeze(0), tokens.unsqueeze(0), lengths, torch.tensor([position]), probs))
    return decided.tokens_BJ[0, : int(decided.counts_B[0])].tolist()


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
    logits = scale * torch.randn(count + 1, SIZE, generator=generator)
    # Mostly the target's own choices, so that windows are followed often.
    swapped = torch.rand(count, generator=generator) < 0.3
    tokens = torch.where(swapped, torch.randint(0, SIZE, (count,), generator=generator), logits[:-1].argmax(-1))
    row = Row(FLy(window=window, hold=window), SIZE, SamplingParams(temperature=0 if greedy else 1), seed)
    flips = None if greedy else coins(seed, 0, count).accept_BK[0].tolist()
    kept = vllm_fly(tokens.tolist(), logits[:-1], window, flips)
    assert decide_one(row, tokens, logits)[:-1] == tokens.tolist()[:kept]


def test_exact_has_the_targets_distribution() -> None:
    """The first token of 20,000 blocks against the target's softmax: Pearson's chi-squared with 7 degrees of freedom is
    beyond 24.3 in one of 1000."""
    count = 20_000
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(SIZE, generator=generator)
    tokens_BK = torch.randint(0, SIZE, (count, 1), generator=generator)
    row = Row(parse_policy("exact"), SIZE, SamplingParams(temperature=1), seed=3)
    blocks = Blocks(
        logits_V.expand(count, 2, SIZE),
        tokens_BK,
        torch.ones(count, dtype=torch.int64),
        torch.arange(count),
        torch.full((count, 1, SIZE), 1 / SIZE),
    )
    emitted, wanted_V = Counter(decide([row] * count, blocks).tokens_BJ[:, 0].tolist()), logits_V.softmax(-1)
    chi = sum((emitted[t] - count * float(wanted_V[t])) ** 2 / (count * float(wanted_V[t])) for t in range(SIZE))
    assert chi < 24.3
