"""A rule sees and says the same everywhere: through PyTorch, in compiled rounds, on an emulated CUDA device, and in a
recording. One rule of each kind, at temperature 0 and above it.

Shape legend: B rows, K longest draft.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fly
from fly.backends import executor_of
from fly.backends.cpu.rounds import take_rounds
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import (
    AdaptiveDraft,
    CascadeDraft,
    ChooseDraft,
    DraftStrategy,
    NGramDraft,
    SingleDraft,
    SuffixDraft,
    TreeDraft,
)
from fly.engine import Engine
from fly.extras.engines import blocks
from fly.extras.eval.kit import check_in_a_recording
from fly.models import Llama
from fly.policies import (
    AcceptancePolicy,
    Block,
    Condition,
    Exact,
    condition_types,
    draft_log_probs,
    gate_probs,
    parse_policy,
    policy_types,
)
from fly.policies.reads import PARTS, _blocks, supply_logits
from fly.policies.verification import verify
from fly.runner.executor import Executor
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.testing.policies import check_in_a_graph, check_monotone, check_what_it_reads
from fly.types import Draft, Noise, SamplingParams, Target, Why
from tests.kernels import VARIANTS, built
from tests.test_cuda import device, on_gpu
from tests.test_drafts import perturbed
from tests.toys import random_llama

VOCAB = 23
TARGET = random_llama(0, vocab_size=VOCAB, hidden=32, heads=2, kv_heads=1, layers=1, max_positions=400)
NEAR = perturbed(TARGET, 0.05)
ENDS = (1, 5, 9, 13)  # the tokens that end a sentence


@dataclass(frozen=True)
class NearBest(AcceptancePolicy):
    """A core that only Python knows."""

    share: float = 0.3

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        own_BK, best_BK = gate_probs(target, draft)
        return own_BK >= self.share * best_BK


@dataclass(frozen=True)
class Third(Condition):
    """A condition that only Python knows: the token is one of the target's three likeliest."""

    def evaluate(self, block: Block) -> Tensor:
        best_BK3 = block.target.logits_BKV[:, :-1].topk(3, dim=-1).indices
        return (best_BK3 == block.draft.tokens_BK.unsqueeze(-1)).any(-1)


# What the rules below saw of each block that Python decided: by text and draft, the draft's peaks or the places.
SEEN: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}


def note(target: Target, draft: Draft, values: list[Any]) -> None:
    if type(target.history) is list:  # not in a graph, which has no texts and notes nothing
        for text, chain, value in zip(target.history, draft.chains, values):
            if not chain:  # a row without a draft is seen only beside one that has some
                continue
            SEEN[tuple(text), tuple(chain)] = value[: len(chain)].tolist() if isinstance(value, Tensor) else [*value]


@dataclass(frozen=True)
class Sure(Condition):
    """The draft was sure of the token."""

    monotone: ClassVar[Mapping[str, int]] = {"chance": -1}
    chance: float = 0.3

    def evaluate(self, block: Block) -> Tensor:
        return draft_log_probs(block.draft)[1].exp() >= self.chance


@dataclass(frozen=True)
class WatchedSure(Sure):
    """It also notes what it saw, so no graph holds it."""

    def evaluate(self, block: Block) -> Tensor:
        own_BK, peak_BK = draft_log_probs(block.draft)
        note(block.target, block.draft, list(torch.stack([own_BK, peak_BK], -1).exp()))
        return super().evaluate(block)


@dataclass(frozen=True)
class Confident(AcceptancePolicy):
    """A core that reads the draft's logits."""

    chance: float = 0.3

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        assert draft.logits_BKV is not None
        return (draft.logits_BKV.softmax(-1).amax(-1) >= self.chance) | (target.probs_of(draft.tokens_BK) > 0.5)


@dataclass(frozen=True)
class OneASentence(Condition):
    """At most one token of a sentence is relaxed."""

    def evaluate(self, block: Block) -> Tensor:
        note(block.target, block.draft, block.target.relaxed_at)
        marks_V = torch.zeros(block.target.logits_BKV.shape[-1], dtype=torch.bool)
        marks_V[[token for token in ENDS if token < len(marks_V)]] = True
        return block.relaxed_since(marks_V) <= 1


RULES: dict[str, AcceptancePolicy] = {
    "compiled": parse_policy("exact | entropy(0.2) & budget(0.5)"),
    "core": NearBest(),
    "condition": Exact() | Third(),
    "draft's logits": Exact() | Sure(),
    "draft's logits, watched": Exact() | WatchedSure(),
    "draft's logits by a core": Confident(),
    "relaxed places": Exact() | OneASentence(),
}


def through_pytorch(model: Llama) -> Executor:
    return TorchExecutor(model)


def compiled(model: Llama) -> Executor:
    return executor_of(model, VARIANTS[0])


def on_cuda(model: Llama) -> Executor:
    return executor_of(on_gpu(model))


def decode(run: Callable[[Llama], Executor], rows: list[Row], lookup: bool = False, stretch: float = 1e6) -> None:
    """Decode rows to their ends."""
    executor, strategy = run(TARGET), SingleDraft(run(NEAR), cache_tokens=4000)
    drafts = CascadeDraft([NGramDraft(3, 1, 4), strategy]) if lookup else strategy
    engine = Engine(Runner(executor, PagedKVCache.for_model(executor, 4000), control_ids=(3, 4)), drafts)
    engine.stretch = stretch
    while going := [row for row in rows if not row.finish_reason]:
        engine.step(going)


def make_rows(rules: list[AcceptancePolicy], temperature: float, seed: int) -> list[Row]:
    texts = ([(seed + 3 * b + i * i) % VOCAB for i in range(4 + b)] for b in range(len(rules)))
    params = SamplingParams(temperature=temperature, max_tokens=24)
    return [Row(text, len(text), params, rule, seed + b, 5) for b, (text, rule) in enumerate(zip(texts, rules))]


def said(row: Row) -> tuple[object, ...]:
    stats = replace(row.stats, nats=round(row.stats.nats, 3))
    return row.tokens, row.provenance, row.relaxed_at, stats


@contextmanager
def watched() -> Iterator[dict[Any, Any]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()


@settings(max_examples=3)
@given(st.sampled_from([0.0, 0.0, 0.8]), st.integers(0, 1000), st.booleans(), st.data())
def test_a_rule_says_the_same_on_every_backend(
    temperature: float, seed: int, lookup: bool, data: st.DataObject
) -> None:
    """Texts, why each token was kept, where relaxed ones stand and how often each condition held are those of PyTorch's
    single rounds. Rules of all kinds are in one batch."""
    rules = data.draw(st.permutations(list(RULES.values())))[:4]
    want = make_rows(rules, temperature, seed)
    with watched() as seen:
        decode(through_pytorch, want, stretch=0)
        expected = dict(seen)
    for row in want:  # the places are those of the provenance
        relaxed = [at for at, token in enumerate(row.provenance, start=row.prompt_length) if token.why is Why.RELAXED]
        assert row.relaxed_at == relaxed
    ways: list[Callable[[list[Row]], None]] = []
    if VARIANTS:
        ways.append(lambda rows: decode(compiled, rows, lookup))

    def by_cuda(rows: list[Row]) -> None:
        with device():
            decode(on_cuda, rows, lookup)

    for way in (*ways, by_cuda):
        rows = make_rows(rules, temperature, seed)
        with watched() as seen:
            way(rows)
            for row, other in zip(rows, want):
                assert said(row) == said(other), row.policy
            for block, values in seen.items():  # compiled code asks Python about mismatches only
                torch.testing.assert_close(values, expected[block], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_the_same_of_a_recorded_block_and_in_a_graph(name: str) -> None:
    assert "recorded blocks as live ones" in str(check_in_a_recording(RULES[name]))
    assert "holds on random blocks" in check_in_a_graph(RULES[name])


@built
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_compiled_rounds_draft_with_logits(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that reads them sends no row to single rounds."""
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return take_rounds(*arguments)

    monkeypatch.setattr("fly.backends.cpu.executor.take_rounds", counted)
    (row,) = make_rows([RULES["draft's logits"]], temperature, 5)
    decode(compiled, [row])
    assert len(calls) >= row.stats.rounds // 3 and row.stats.drafted


def test_what_rules_read_is_found() -> None:
    found = {name: rule.reads for name, rule in RULES.items()}
    assert found == {
        "compiled": {"generated", "relaxed"},
        "core": set(),
        "condition": set(),
        "draft's logits": {"draft.logits"},
        "draft's logits, watched": {"draft.logits", "history"},
        "draft's logits by a core": {"draft.logits"},
        "relaxed places": {"history", "relaxed_at"},
    }
    assert [name for name, rule in RULES.items() if rule.reads_logits] == [name for name in RULES if "logits" in name]
    # ``reads_logits`` takes for granted that no rule of the catalogue does.
    catalogue = [kind() for kind in policy_types().values()]
    catalogue += [parse_policy(f"exact | {name}") for name in condition_types() if name not in ("phase", "token")]
    assert not any("draft.logits" in rule.reads for rule in catalogue)


COPIES: dict[str, Callable[[Draft], Draft]] = {
    "the draft": lambda draft: draft,
    "rows": lambda draft: draft.rows(torch.arange(draft.shape[0])),
    "moved": lambda draft: draft.to(torch.device("meta")),
    "replaced": lambda draft: replace(draft, probs_BKV=None),
    "replaced tokens": lambda draft: replace(draft, tokens_BK=draft.tokens_BK.clone(), parents_BK=None),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "copied twice": lambda draft: replace(copy.copy(draft).rows(torch.arange(draft.shape[0])), probs_BKV=None),
}


@dataclass(frozen=True)
class Copying(Condition):
    """Copies the draft, and reads the copy's logits or only its tokens."""

    way: str
    logits: bool

    def evaluate(self, block: Block) -> Tensor:
        draft = COPIES[self.way](replace(block, agree_BK=block.agree_BK).draft)
        if draft.tokens_BK.device.type == "meta":
            return block.agree_BK | (self.logits and draft.logits_BKV is None)
        return draft_log_probs(draft)[1] > -0.5 if self.logits else draft.tokens_BK % 2 == 0


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_draft_reads_its_logits_only_where_the_rule_does(way: str) -> None:
    """Whatever a rule makes of its draft asks for the logits when they are read, and not before."""
    reads, other = Exact() | Copying(way, True), Exact() | Copying(way, False)
    assert (reads.reads, other.reads) == ({"draft.logits"}, frozenset())
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    copying = fly.LLM(TARGET, NGramDraft(), k=4)
    with pytest.raises(ValueError, match=r"Copying.* reads the draft's logits .*, and NGramDraft has none"):
        copying.generate([prompt], policy=reads)
    assert copying.generate([prompt], policy=other, max_tokens=8)[0].token_ids
    drafting = fly.LLM(TARGET, SingleDraft(NEAR), k=4)
    assert drafting.generate([prompt], policy=reads, max_tokens=8)[0].token_ids
    noise = Noise(torch.full((1, 2), 0.5), torch.full((1,), 0.5))
    draft = supply_logits(other, Draft.of([[1, 2]]), 4)
    with pytest.raises(ValueError, match=r"Copying.* reads draft\.logits_BKV at this block"):
        verify(reads, Target(torch.eye(4)[:3].unsqueeze(0)), draft, noise)


def test_a_row_by_row_reader_says_the_same_as_a_reader_of_all_rows() -> None:
    """A rule may read each row's logits by ``Draft.rows``, and give a copy logits that it made."""

    @dataclass(frozen=True)
    class EachRow(Condition):
        def evaluate(self, block: Block) -> Tensor:
            rows = [block.draft.rows(torch.tensor([b])) for b in range(len(block.agree_BK))]
            rows = [replace(row, logits_BKV=1 * row.logits_BKV) for row in rows]
            return torch.cat([draft_log_probs(row)[1] for row in rows]).exp() >= 0.3

    rule, prompts = Exact() | EachRow(), [[1, 2, 3], [4, 5]]
    assert rule.reads == {"draft.logits"}
    llm = fly.LLM(TARGET, SingleDraft(NEAR), k=4)
    each, together = (llm.generate(prompts, temperature=0, max_tokens=24, policy=r) for r in (rule, Exact() | Sure()))
    assert [out.token_ids for out in each] == [out.token_ids for out in together]
    assert sum(out.stats.relaxed for out in each)


@dataclass(frozen=True)
class Past(Condition):
    """Copies the target's output, and reads a part of the past from the copy, or none."""

    way: Callable[[Target], Target]
    part: str

    def evaluate(self, block: Block) -> Tensor:
        target = self.way(replace(block, draft=block.draft).target)
        return block.agree_BK | (bool(self.part) and getattr(target, self.part) is None)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda target: target.rows(torch.arange(2))])
@pytest.mark.parametrize("part", ["", "history", "relaxed_at", "nats_B"])
def test_a_copy_of_the_target_reads_of_the_past_only_what_the_rule_does(way: Any, part: str) -> None:
    assert (Exact() | Past(way, part)).reads == {part.removesuffix("_B")} - {""}


@dataclass(frozen=True)
class Late(Condition):
    """Reads the draft's logits in some blocks only."""

    def evaluate(self, block: Block) -> Tensor:
        if block.draft.tokens_BK.shape[1] < 6:
            return torch.zeros_like(block.agree_BK)
        return draft_log_probs(block.draft)[1] > -1


@dataclass(frozen=True)
class LateAndDeclared(Late):
    also_reads = ("draft.logits",)


@dataclass(frozen=True)
class Misspelt(Late):
    also_reads = ("draft.probs",)


def test_what_is_read_in_some_blocks_only_is_refused_or_declared() -> None:
    """The kit says so before, the engine when it happens, and neither gives None in silence."""
    rule = Exact() | Late()
    with pytest.raises(AssertionError, match=r"reads draft\.logits_BKV in some blocks only: write 'also_reads"):
        check_what_it_reads(rule)
    assert "reads draft.logits" in check_what_it_reads(Exact() | LateAndDeclared())
    with pytest.raises(ValueError, match=r"also_reads names 'draft.probs'; choices: \['draft.logits', "):
        _ = (Exact() | Misspelt()).reads
    assert PARTS[0] == "draft.logits"
    llm = fly.LLM(TARGET, SingleDraft(NEAR), k=7)
    prompt = list(range(9))
    with pytest.raises(ValueError, match=r"exact \| Late reads draft\.logits_BKV at this block"):
        llm.generate([prompt], temperature=0, max_tokens=30, policy=rule)
    assert llm.generate([prompt], temperature=0, max_tokens=30, policy=Exact() | LateAndDeclared())[0].token_ids


@dataclass(frozen=True)
class Fails(Condition):
    """Fails at blocks of these rows."""

    when: str

    def evaluate(self, block: Block) -> Tensor:
        if self.when == "always" or (self.when == "at temperature 0") == block.target.all_greedy:
            raise KeyError("no such\nthing")
        return torch.zeros_like(block.agree_BK)


@dataclass(frozen=True)
class FailsAsCore(Exact):
    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        return target.probs_of(draft.tokens_BK)[:, None]


FAILING: dict[AcceptancePolicy, str] = {
    Exact() | Fails("always"): r"KeyError: 'no such\\nthing' \(test_same_rule.py:\d+ in evaluate\)",
    FailsAsCore(): r"ValueError: FailsAsCore: accept_probs gave .* not a tensor \[B, K\] of \[2, 5\] \(.*\)",
}


@pytest.mark.parametrize(("rule", "error"), FAILING.items(), ids=map(str, FAILING))
def test_a_rule_that_fails_is_refused_at_the_start_with_its_own_error(
    rule: AcceptancePolicy, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was taken to read all of a row's past, and other engines refused it with that for a reason."""
    told = f"the rule '{re.escape(str(rule))}' fails on a trial block: {error}$"
    with pytest.raises(ValueError, match=f"^{told}"):
        fly.LLM(TARGET, NGramDraft(), policy=rule)
    llm = fly.LLM(TARGET, NGramDraft(), k=4)
    for temperature in (0.0, 0.8):
        with pytest.raises(ValueError, match=f"^prompt 1: {told}"):
            llm.generate([[1], [2]], temperature=temperature, policy=[Exact(), rule])
    assert llm.generate([[1, 2, 3]], policy=rule, k=0, max_tokens=3)[0].token_ids  # nothing is decided
    assert rule.reads == set()
    with pytest.raises(AttributeError, match=r"^'Target' object has no"):  # no name that a user does not know
        _ = next(_blocks(4, torch.device("cpu"), set()))[0].logit_BKV  # type: ignore[attr-defined]
    monkeypatch.setattr(blocks, "load_policy", lambda text: rule)
    with pytest.raises(ValueError, match=f"^fly: {told}"):
        blocks.read_rule("failing", VOCAB)


@pytest.mark.parametrize("when", ["at temperature 0", "above it"])
def test_a_rule_that_fails_at_some_temperatures_serves_the_others(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a single request; an engine that decides rows of all temperatures together refuses it."""
    rule = Exact() | Fails(when)
    llm = fly.LLM(TARGET, NGramDraft(), policy=rule, k=4)
    fails, decides = (0.0, 0.8) if when == "at temperature 0" else (0.8, 0.0)
    with pytest.raises(ValueError, match="fails on a trial block: KeyError"):
        llm.generate([[1, 2, 3]], temperature=fails)
    assert llm.generate([[1, 2, 1, 2, 1, 2]], temperature=decides, max_tokens=8)[0].stats.drafted
    monkeypatch.setattr(blocks, "load_policy", lambda text: rule)
    with pytest.raises(ValueError, match="fails on a trial block: KeyError"):
        blocks.read_rule("failing", VOCAB)


@pytest.mark.parametrize(
    ("draft", "name"),
    [
        (NGramDraft(), "NGramDraft"),
        (SuffixDraft(), "SuffixDraft"),
        (AdaptiveDraft(NGramDraft()), "AdaptiveDraft"),
        (TreeDraft(NEAR), "TreeDraft"),
    ],
)
def test_a_draft_without_logits_refuses_the_rule_at_the_start(draft: DraftStrategy, name: str) -> None:
    """With the names of both; a rule that reads none goes on."""
    rule = Exact() | Sure()
    said = rf"the rule 'exact \| Sure\(chance=0.3\)' reads the draft's logits .*, and {name} has none"
    llm = fly.LLM(TARGET, draft, k=4)
    with pytest.raises(ValueError, match=f"prompt 0: {said}"):
        llm.generate([[1, 2, 3]], policy=rule)
    assert llm.generate([[1, 2, 3]], policy=rule, k=0, max_tokens=3)[0].token_ids  # nothing is drafted
    assert llm.generate([[1, 2, 3]], policy=RULES["condition"], max_tokens=3)[0].token_ids


def test_the_start_of_an_engine_refuses_its_own_rule() -> None:
    with pytest.raises(ValueError, match="and NGramDraft has none"):
        fly.LLM(TARGET, NGramDraft(), policy=Exact() | Sure())
    chosen = ChooseDraft(copy=NGramDraft(), near=SingleDraft(NEAR))
    llm = fly.LLM(TARGET, chosen, k=4)
    for asked in ("", "copy"):
        with pytest.raises(ValueError, match="and NGramDraft has none"):
            llm.generate([[1, 2, 3]], policy=Exact() | Sure(), draft=asked)
    rules = [Exact() | Sure(), RULES["condition"]]
    texts = [[1, 2, 3], [4, 4, 4, 4]]
    both = llm.generate(texts, max_tokens=20, policy=rules, draft=["near", "copy"])
    alone = [
        llm.generate([text], max_tokens=20, policy=rule, draft=name)[0]
        for text, rule, name in zip(texts, rules, ["near", "copy"])
    ]
    assert [out.token_ids for out in both] == [out.token_ids for out in alone]


def test_a_surer_draft_is_kept_more_at_temperature_0() -> None:
    """tau falls as the chance that the draft must give grows, through its own lookup too."""
    adaptive = AdaptiveDraft(SingleDraft(NEAR), clock=lambda: 0.0)  # a busy machine costs it nothing
    for draft in (SingleDraft(NEAR), CascadeDraft([NGramDraft(), SingleDraft(NEAR)]), adaptive):
        llm = fly.LLM(TARGET, draft, k=5)
        found = []
        for chance in (0.0, 0.3, 1.0):
            outs = llm.generate(
                [[i, 2, 3] for i in range(6)], temperature=0, max_tokens=40, policy=Exact() | Sure(chance)
            )
            found.append(sum(out.stats.relaxed for out in outs))
        assert found[0] > found[1] > found[2] == 0


@dataclass(frozen=True)
class Backwards(Sure):
    monotone = {"chance": 1}  # noqa: RUF012


def test_what_a_condition_declares_as_monotone_is_checked() -> None:
    assert "a larger chance never holds for more (of Sure(chance=0.3))" in check_monotone(Exact() | Sure())
    assert "of Sure(chance=0.3)" in check_monotone(NearBest() | ~Sure() & Third())
    for rule in (Exact() | Backwards(), Exact() | Third() & ~Backwards()):
        with pytest.raises(AssertionError, match=r"Backwards\(chance=0.3\): chance=0.\d+ holds for"):
            check_monotone(rule)
    claims = [check_monotone(parse_policy(f"exact | {name}")) for name in ("entropy", "regret", "at_most", "budget")]
    assert "a larger theta never holds for more (of entropy(0.3))" in claims[0]
    assert "a larger nats never holds for less" in claims[1] and "a larger window never holds for more" in claims[1]
    assert "a larger count never holds for less" in claims[2]
    assert "declares no parameter" not in claims[3]
