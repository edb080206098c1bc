"""fly's rules inside SGLang, on stand-ins of what its functions get: no SGLang is needed. tests/wheels holds the same
on SGLang's own code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fly.extras.engines.blocks import Blocks, decide
from fly.extras.engines.sglang import plugin
from fly.extras.engines.sglang.requests import ALGORITHMS, TRIED, Served, check_request, read_row
from fly.runner.sampling import BatchSampling
from fly.types import SamplingParams
from tests.on_device import put, read_all_places

SIZE, SLOTS = 8, 4
RULES = ["exact", "exact | regret(2.3, 2)", "fly(window=1, hold=1)", "block", "exact | margin(3) & at_most(1)"]
UNTOUCHED = 5
SERVED = Served("0.5.23", "EAGLE", 1, True, "cuda")


@pytest.fixture(autouse=True, scope="module")
def served() -> Iterator[None]:
    """SGLang's own configuration, which the plug-in reads in its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "_find_served", lambda: SERVED)
        yield


def sampling(rule: Any, temperature: float = 1.0, **others: Any) -> SimpleNamespace:
    """Parameters as SGLang normalizes them: temperature 0 is ``top_k`` 1 at temperature 1."""
    greedy = temperature == 0
    defaults = {
        "custom_params": None if rule is None else {"fly": rule, "thinking_budget": 3},
        "temperature": 1.0 if greedy else temperature,
        "top_k": 1 if greedy else 1 << 30,
        "top_p": 1.0,
        "sampling_seed": None,
        "stop_token_ids": None,
    }
    return SimpleNamespace(**{**defaults, **others})


def request(name: str, rule: Any, temperature: float = 1.0, **others: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rid=name,
        sampling_params=sampling(rule, temperature, **others),
        eos_token_ids={2},
        origin_input_ids=[1, 2, 3],
        output_ids=[4],
    )


def batch_of(requests: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(
        reqs=requests,
        seq_lens=torch.arange(len(requests)) + 4,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
    )


def expect(one: Any, position: int, tokens: Tensor, logits: Tensor, draft: Tensor | None) -> list[int] | None:
    """What the shared module decides on one row alone; None if SGLang's decision stands."""
    if (row := read_row(one.sampling_params, SIZE, one.rid, one.eos_token_ids)) is None or not len(tokens):
        return None
    lengths, places = torch.tensor([len(tokens)]), torch.tensor([position])
    probs = None if draft is None else draft.unsqueeze(0)
    decided = decide([row], Blocks(logits.unsqueeze(0), tokens.unsqueeze(0), lengths, places, probs))
    return decided.tokens_BJ[0, : int(decided.counts_B[0])].tolist()


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tensors that were copied from the first rank to the others."""
    calls: list[int] = []
    monkeypatch.setattr(plugin, "_agree", lambda *tensors: calls.append(len(tensors)))
    return calls


@given(
    st.lists(
        st.tuples(st.sampled_from([None, *RULES]), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, SLOTS - 1)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 10**6),
    st.booleans(),
    st.integers(1, SLOTS),
)
def test_chains_are_decided_as_each_alone(some: list[Any], seed: int, drawn: bool, depth: int) -> None:
    """Chains of any length (n-grams may match fewer tokens), sampled and greedy rows, with and without rules. ``depth``
    is the most that SGLang emits of a row, which may be less than the slots of its draft."""
    generator = torch.Generator().manual_seed(seed)
    count = len(some)
    requests = [request(f"r{b}", rule, temperature, top_k=4 if b % 2 else 1 << 30) for b, (rule, temperature, _) in
                enumerate(some)]  # fmt: skip
    for one, (_, temperature, _) in zip(requests, some):
        if temperature == 0:
            one.sampling_params.top_k = 1
    batch = batch_of(requests)
    tokens = torch.randint(0, SIZE, (count, SLOTS), generator=generator)
    following = torch.arange(1, SLOTS + 1).repeat(count, 1)
    for b, (_, _, length) in enumerate(some):
        following[b, length:] = -1
    draft = torch.randn(count, SLOTS - 1, SIZE, generator=generator).softmax(-1) if drawn else None
    logits = 2 * torch.randn(count * SLOTS, SIZE, generator=generator)
    verify_input = SimpleNamespace(
        draft_token=tokens.flatten(), draft_token_num=SLOTS, retrieve_next_token=following, draft_probs=draft
    )

    def original(*_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.full((count * SLOTS,), UNTOUCHED, dtype=torch.int32),
            torch.full((count,), UNTOUCHED, dtype=torch.int32),
            torch.full((count, depth), UNTOUCHED, dtype=torch.int32),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "_agree", lambda *tensors: None)
        emitted, counts, index = plugin.sample_chains(
            original, verify_input, batch, SimpleNamespace(next_token_logits=logits)
        )
    for b, (one, (_, _, drafted)) in enumerate(zip(requests, some)):
        length = min(drafted, depth - 1)
        part = slice(b * SLOTS, b * SLOTS + length + 1)
        own = None if draft is None else draft[b, :length]
        expected = expect(one, b + 4, tokens[b, 1 : length + 1], logits[part], own)
        row = emitted[b * SLOTS : (b + 1) * SLOTS].tolist()
        if expected is None:
            assert {*row, int(counts[b]), *index[b].tolist()} == {UNTOUCHED}
            continue
        slots = list(range(b * SLOTS, b * SLOTS + len(expected)))
        assert counts[b] == len(expected) and index[b].tolist() == slots + [-1] * (depth - len(expected))
        assert emitted[slots].tolist() == expected and min(row) >= 0  # SGLang reads what follows, and drops it


def test_an_idle_step_and_a_batch_without_rules_are_left_alone(agreed: list[int]) -> None:
    batch, result = batch_of([request("a", None)]), (torch.zeros(4), torch.ones(1), torch.ones(1, 4))
    logits = SimpleNamespace(next_token_logits=torch.zeros(4, SIZE))
    assert plugin.sample_chains(lambda *_: result, None, batch, logits) == result and not agreed
    batch.forward_mode.is_idle = lambda: True
    assert plugin.sample_chains(lambda *_: result, None, batch, SimpleNamespace()) == result and not agreed


def test_a_retracted_request_keeps_its_account() -> None:
    one = request("a", "exact | margin(9) & at_most(1)", 0.0)
    row = plugin._find_rows(batch_of([request("b", None), one]), SIZE)[1]
    assert plugin._find_rows(batch_of([one]), SIZE) == {0: row}


@given(st.floats(0.2, 2), st.sampled_from([1 << 30, 3, 5]), st.sampled_from([1.0, 0.5, 0.9]), st.integers(0, 99))
def test_the_targets_distribution_has_the_requests_filters(heat: float, top_k: int, top_p: float, seed: int) -> None:
    """Top-k first, then top-p of what is left, as SGLang; here token by token."""
    row = read_row(sampling("exact", heat, top_k=top_k, top_p=top_p), SIZE, "a")
    assert row is not None
    logits = torch.randn(1, 1, SIZE, generator=torch.Generator().manual_seed(seed))
    found = BatchSampling.of([row.params]).probs(logits)[0, 0]
    probs, order = (logits[0, 0] / heat).softmax(-1).sort(descending=True)
    probs = probs[:top_k] / probs[:top_k].sum()
    kept, mass = torch.zeros(SIZE), 0.0
    for token, share in zip(order.tolist(), probs.tolist()):
        if mass < top_p:
            kept[token] = share
        mass += share
    assert torch.allclose(found, kept / kept.sum(), atol=1e-5)


def test_a_row_has_the_requests_seed_and_stop_tokens() -> None:
    seeded, plain = (read_row(sampling("exact", sampling_seed=seed), SIZE, "a", {2}) for seed in (7, None))
    assert seeded is not None and plain is not None
    assert seeded.seed == 7 and plain.seed != 7 and plain.control == (2,)
    greedy = read_row(sampling("exact", 0.0, stop_token_ids={4}), SIZE, "a", None)
    assert greedy is not None and greedy.params == SamplingParams(temperature=0) and greedy.control == (4,)


def commit(candidates: Tensor, accepted: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
    """What SGLang's ``_commit_accept`` returns: the tokens of each row, and how many."""
    tokens = torch.cat([candidates[:, 1:], bonus[:, None]], 1)
    return tokens.scatter(1, accepted.long()[:, None], bonus[:, None]), accepted + 1


class Worker(SimpleNamespace):
    """What the plug-in reads of the worker that drafts by DFlash."""

    _selector_sample: Any = None


@given(
    st.lists(st.tuples(st.sampled_from([None, *RULES]), st.sampled_from([0.0, 0.7])), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_blocks_of_dflash_are_decided_as_each_alone(some: list[Any], seed: int, selects: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = [request(f"r{b}", rule, temperature) for b, (rule, temperature) in enumerate(some)]
    count = len(some)
    tokens = torch.randint(0, SIZE, (count, SLOTS), generator=generator)
    logits = 2 * torch.randn(count * SLOTS, SIZE, generator=generator)
    worker, draft = Worker(), None
    if selects:  # drafts come from two candidates at each place
        others = (tokens[:, 1:] + 1) % SIZE
        candidates = torch.stack([tokens[:, 1:], others], -1)
        shares = torch.rand(count, SLOTS - 1, 1, generator=generator)
        worker._selector_sample = candidates, torch.cat([shares, 1 - shares], -1)
        draft = torch.zeros(count, SLOTS - 1, SIZE).scatter_(-1, candidates, worker._selector_sample[1])
    own = torch.full((count,), 1, dtype=torch.int32), torch.full((count,), UNTOUCHED)

    def original(self: Any, **_: Any) -> Any:
        return own[0].clone(), own[0] + 1, own[1].clone(), tokens, torch.ones(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "_agree", lambda *tensors: None)
        patch.setitem(sys.modules, "sglang.srt.speculative.dflash_worker_v2", SimpleNamespace(_commit_accept=commit))
        accepted, counts, bonus, emitted, _ = plugin.keep_batch(
            lambda self, batch: plugin.accept_block(original, self, next_token_logits=logits, candidates=tokens),
            worker,
            batch_of(requests),
        )
    for b, one in enumerate(requests):
        part = slice(b * SLOTS, (b + 1) * SLOTS)
        expected = expect(one, b + 4, tokens[b, 1:], logits[part], None if draft is None else draft[b])
        if expected is None:
            assert (int(accepted[b]), int(bonus[b])) == (1, UNTOUCHED)
        else:
            assert int(counts[b]) == len(expected) == int(accepted[b]) + 1
            assert emitted[b, : len(expected)].tolist() == expected and int(bonus[b]) == expected[-1]
    assert worker.fly_batch is None


@pytest.mark.parametrize("dflash", [False, True])
def test_the_host_waits_for_nothing(dflash: bool, agreed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All rules, greedy and drawn, with and without filters, on tensors that refuse to be looked at."""
    read_all_places(monkeypatch)
    commits = SimpleNamespace(_commit_accept=commit)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.dflash_worker_v2", commits)
    count = 2 * len(RULES)
    width = count * SLOTS

    def decide_step(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        requests = [request(f"r{b}", RULES[b // 2], 0.7 * (b % 2), top_p=0.9) for b in range(count)]
        batch = batch_of(requests)
        batch.seq_lens = place(batch.seq_lens)
        generator = torch.Generator().manual_seed(1)
        tokens = place(torch.randint(0, SIZE, (count, SLOTS), generator=generator))
        logits = place(2 * torch.randn(width, SIZE, generator=generator))
        kept = [torch.full((n,), UNTOUCHED, dtype=torch.int32) for n in (width, count, width, count)]
        emitted, counts, index, accepted = map(place, kept)
        if dflash:
            bonus = place(torch.full((count,), UNTOUCHED))
            result = accepted, counts, bonus, tokens, None
            plugin.keep_batch(
                lambda self, batch: plugin.accept_block(
                    lambda self, **_: result, self, next_token_logits=logits, candidates=tokens
                ),
                Worker(),
                batch,
            )
            return [accepted.as_subclass(Tensor), bonus.as_subclass(Tensor)]
        verify_input = SimpleNamespace(
            draft_token=tokens.flatten(),
            draft_token_num=SLOTS,
            retrieve_next_token=place(torch.arange(1, SLOTS + 1).repeat(count, 1)),
            draft_probs=place(torch.full((count, SLOTS - 1, SIZE), 1 / SIZE)),
        )
        of_engine = emitted, counts, index.view(count, SLOTS)
        plugin.sample_chains(lambda *_: of_engine, verify_input, batch, SimpleNamespace(next_token_logits=logits))
        return [column.as_subclass(Tensor) for column in of_engine]

    here, there = decide_step(lambda tensor: tensor), decide_step(put)
    assert all(map(torch.equal, here, there)) and (here[-1] != UNTOUCHED).any()


def test_dflash_keeps_the_logits_for_rules_alone() -> None:
    for rule, skips in (("exact", False), (None, True)):
        batch = batch_of([request("a", None), request("b", rule)])
        assert plugin.keep_logits(lambda *_: True, Worker(), batch, None) is skips
    result = (torch.zeros(1),) * 5
    assert plugin.accept_block(lambda self, **_: result, Worker(), next_token_logits=None, candidates=None) is result


@pytest.mark.parametrize(
    ("params", "served", "said"),
    [
        (sampling("exact"), SERVED._replace(version="0.5.24"), "SGLang 0.5.24 was not tried"),
        (sampling("exact"), SERVED._replace(algorithm=None), "no draft"),
        (sampling("exact"), SERVED._replace(algorithm="DSPARK"), "DSPARK"),
        (sampling("exact"), SERVED._replace(branches=4), "trees of 4 branches"),
        (sampling("exact | margin(1) & after(2)"), SERVED, "--disable-overlap-schedule"),
        (sampling("exact | margin(1) & above(2)"), SERVED, "--disable-overlap-schedule"),
        (sampling("exact", 0.5), SERVED._replace(device="cpu"), "greedily at any temperature"),
        (sampling("exact"), SERVED._replace(watermark=True), "watermark"),
        (sampling("exat"), SERVED, "exat"),
    ],
)
def test_what_cannot_be_decided_rightly_is_refused_by_name(params: Any, served: Served, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_request(params, SIZE, served)
    check_request(sampling(None), SIZE, served)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_can_be_decided_is_not_refused(algorithm: str) -> None:
    served = SERVED._replace(algorithm=algorithm)
    check_request(sampling("exact | margin(1) & at_most(2)"), SIZE, served)
    check_request(sampling("exact | margin(1) & after(2)"), SIZE, served._replace(overlap=False))
    check_request(sampling("exact", 0.0), SIZE, served._replace(device="cpu"))


def test_a_wrong_request_is_refused_before_sglang_looks_at_it() -> None:
    seen: list[int] = []
    plugin.check(lambda self, size: seen.append(size), sampling("exact"), SIZE)
    with pytest.raises(ValueError, match="exat"):
        plugin.check(lambda self, size: seen.append(size), sampling("exat"), SIZE)
    assert seen == [SIZE]


@pytest.mark.parametrize("rule", ["exat", 3, "exact | margin(1) & above(2)"])
def test_a_wrong_request_that_nobody_checked_ends_alone(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang loads no plug-ins in the processes of ``--tokenizer-worker-num 2``: the scheduler's ends the request, and
    goes on with the others."""
    reasons = SimpleNamespace(FINISH_ABORT=lambda *reason: reason)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", reasons)
    wrong, right = request("a", rule), request("b", "exact")
    assert [*plugin._find_rows(batch_of([wrong, right]), SIZE)] == [1]
    message, status, _ = wrong.to_finish
    assert "fly: " in message and status == 400 and not hasattr(right, "to_finish")


@pytest.mark.parametrize("given", [None, {}, {"thinking_budget": 3}, [1], "fly"])
def test_parameters_of_others_name_no_rule(given: Any) -> None:
    one = request("a", None, custom_params=given)
    assert plugin._find_rows(batch_of([one]), SIZE) == {}
    assert plugin.check(lambda self, size: "own", one.sampling_params, SIZE) == "own"


def test_tried_versions_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "engines.md").read_text(encoding="utf-8")
    assert all(version in page for version in TRIED)
