"""What tokens say: vocabularies, and the rules, conditions and drafts that are bound to one."""

from __future__ import annotations

import pickle
from collections import abc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers
from torch import Tensor

import fly
from fly.drafts import CascadeDraft, DraftStrategy, SingleDraft, pad
from fly.drafts.base import DraftSetup
from fly.models.bundled import resolve_checkpoint
from fly.models.tokenizer import Tokenizer
from fly.policies import (
    AcceptancePolicy,
    AfterTokens,
    Block,
    Condition,
    EntropyGate,
    Exact,
    FLy,
    Phase,
    TextCondition,
    TokenText,
    condition_types,
    dump_policy,
    parse_policy,
)
from fly.policies.base import ExactCore
from fly.runner.request import Row
from fly.testing import check_draft, check_policy
from fly.types import Draft, Target, Why
from fly.vocabulary import Vocabulary
from tests.toys import random_llama

LOOSE = FLy(theta=0.0, window=0, hold=0)


def has_digit(text: str) -> bool:
    return any(map(str.isdigit, text))


@dataclass(frozen=True)
class Digit(TextCondition):
    """As a user writes it."""

    def holds_for(self, text: str) -> bool:
        return has_digit(text)


@given(st.lists(st.binary(max_size=4), max_size=9), st.sets(st.integers(0, 11)), st.integers(1, 12))
def test_a_mask_is_what_the_predicate_says_of_plain_tokens(spelled: list[bytes], control: set[int], size: int) -> None:
    vocabulary = Vocabulary(size, spelled, control)
    naive = [
        i < len(spelled) and spelled[i] != b"" and i not in control and has_digit(spelled[i].decode("utf-8", "replace"))
        for i in range(size)
    ]
    assert vocabulary.where(has_digit).tolist() == naive
    assert len(vocabulary.bytes) == len(vocabulary.texts) == size


ASKED: list[str] = []  # the texts that a rule below was asked about


@dataclass(frozen=True)
class Counted(TextCondition):
    wanted: str
    more: Any = ()

    def holds_for(self, text: str) -> bool:
        ASKED.append(text)
        return text == self.wanted


@dataclass(frozen=True)
class Unhashable(Counted):
    more: Any = field(default_factory=lambda: ["x", {"y": [1]}])


@dataclass(frozen=True)
class ByLambda(Counted):
    """Makes a new function for every block."""

    def holds_for(self, text: str) -> bool:
        return False

    def evaluate(self, block: Block) -> Tensor:
        wanted = self.wanted
        also = [wanted]
        return self.vocabulary.where(lambda text: bool(ASKED.append(text)) or text in also)[block.draft.tokens_BK]


@pytest.mark.parametrize("rule", [Counted("a"), Unhashable("a"), ByLambda("a"), ByLambda("a", [{"k": {1}}])])
def test_a_mask_is_worked_out_once_for_rules_that_hold_the_same(rule: Counted) -> None:
    """Also if a rule cannot be hashed, and if it makes its predicate anew in every block."""

    def masks() -> None:
        for _ in range(3):
            each = replace(rule).bind(vocabulary)
            assert each.evaluate(block).tolist() == [[True, False, False]]

    vocabulary = Vocabulary(3, [b"a", b"b", b"c"])
    block = Block(Target(torch.zeros(1, 4, 3)), Draft.of([[0, 1, 2]]), torch.zeros(1, 3, dtype=torch.bool))
    ASKED.clear()
    masks()
    assert ASKED == ["a", "b", "c"]
    other = replace(rule, wanted="b").bind(vocabulary)
    assert other.evaluate(block).tolist() == [[False, True, False]] and len(ASKED) == 6
    masks()
    assert len(ASKED) == 6


def test_without_a_tokenizer_texts_are_unknown() -> None:
    vocabulary = Vocabulary(7)
    with pytest.raises(ValueError, match="no tokenizer"):
        vocabulary.where(has_digit)
    with pytest.raises(ValueError, match="'<think>' is text"):
        vocabulary.token_id("<think>")
    llm = fly.LLM(random_llama(0), "none")
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate([[1, 2]], policy=LOOSE & ~Digit())


@given(st.text(max_size=40))
def test_the_bytes_of_ids_join_to_the_text(text: str) -> None:
    tokenizer = Tokenizer(resolve_checkpoint("fly-target"))
    vocabulary = tokenizer.vocabulary(1024)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not tokenizer.control_ids & set(ids):
        assert b"".join(vocabulary.bytes[i] for i in ids) == text.encode()


def test_a_text_is_written_as_the_tokenizer_writes_it() -> None:
    llm = fly.LLM("fly-tiny")
    assert llm.tokenizer is not None
    for text in ("#### 5", "Take the list", "<|end|>"):
        ids = llm.vocabulary.encode(text)
        assert ids == llm.tokenizer.encode(text, add_special_tokens=False)
        assert "".join(llm.vocabulary.texts[i] for i in ids) == text
    spelled = Vocabulary(4, [b"a", b"ab", b"", b"c"])
    assert spelled.encode("abcaab") == [1, 3, 0, 1]
    with pytest.raises(ValueError, match="'d' cannot be written"):
        spelled.encode("d")
    with pytest.raises(ValueError, match="no tokenizer"):
        Vocabulary(4).encode("a")


def test_a_space_before_a_word_is_part_of_its_token(tmp_path: Path) -> None:
    """As SentencePiece has it, with single bytes for what is no token."""
    pieces = ["<unk>", "▁a", "a", "▁the", "ing", *(f"<0x{byte:02X}>" for byte in range(256))]
    raw = RawTokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Tokenizer(tmp_path).vocabulary(300)
    assert vocabulary.bytes[1:5] == [b" a", b"a", b" the", b"ing"]
    assert vocabulary.bytes[5 + 0xC8] == b"\xc8" and vocabulary.bytes[299] == b""


WORDS = Vocabulary(6, [b" word", b"7", b"<think>", b"</think>", b"x1", b"<end>"], [5])


@pytest.mark.parametrize(
    "rule",
    [
        LOOSE & ~Digit(),
        Exact() | Phase("<think>", "</think>") & TokenText("digits"),
        FLy(),
        Exact() | ~Digit() | Digit(),
    ],
    ids=str,
)
def test_a_bound_rule_is_the_rule(rule: AcceptancePolicy) -> None:
    bound = rule.bind(WORDS)
    assert bound == rule and hash(bound) == hash(rule) and str(bound) == str(rule)
    assert dump_policy(bound) == dump_policy(rule)
    assert bound.bind(WORDS) is bound and bound.vocabulary is WORDS
    copy = pickle.loads(pickle.dumps(bound))
    assert copy == rule and len(pickle.dumps(bound)) == len(pickle.dumps(rule))
    with pytest.raises(ValueError, match="bound to no vocabulary"):
        _ = copy.vocabulary


def test_another_vocabulary_is_looked_up_anew() -> None:
    phase = Phase("<think>", "</think>").bind(WORDS)
    other = phase.bind(Vocabulary(4, [b"</think>", b"<think>"]))
    assert (phase._markers, other._markers) == ((2, 3), (1, 0))


@dataclass(frozen=True)
class Composed(ExactCore):
    """Makes its relaxation itself."""

    theta: float = 0.0

    @property
    def relaxation(self) -> Condition:
        return EntropyGate(self.theta) & ~Digit()


@dataclass(frozen=True)
class Reading(AcceptancePolicy):
    """A rule, and no condition, that asks what tokens say."""

    def accept_probs(self, target: Target, draft: Draft) -> Tensor:
        ratio_BK = target.probs_of(draft.tokens_BK) / draft.own_probs_BK()
        digit_BK = self.vocabulary.where(has_digit)[draft.tokens_BK]
        return torch.where(digit_BK, ratio_BK, 2 * ratio_BK).clamp_max(1)


CONDITIONS = ["phase('<think>', '</think>')", "above(8)", "token(digits)"]


@pytest.mark.parametrize("text", CONDITIONS)
def test_conditions_that_need_texts_or_history_pass_the_kit(text: str) -> None:
    assert check_policy(parse_policy(f"exact | {text}")).passed


def test_rules_that_need_texts_pass_the_kit() -> None:
    for rule in (LOOSE & ~Digit(), Composed(), Reading()):
        assert check_policy(rule).passed
    assert "token" in condition_types()


@pytest.mark.parametrize(
    ("kind", "holds", "others"),
    [
        ("digits", ["7", " x1", "x²"], ["a", " ", "."]),
        ("capitals", [" Tom", "A"], ["tom", " 7", "."]),
        ("letters", [" word", "é"], ["a1", " ", "don't"]),
        ("punctuation", [".", ' "', "});"], ["a.", " ", "7"]),
        ("blanks", [" ", "\n  "], ["a", " a"]),
        ("newlines", ["\n", ".\n"], [" ", "a"]),
    ],
)
def test_kinds_of_tokens(kind: str, holds: list[str], others: list[str]) -> None:
    token = parse_policy(f"exact | token({kind})").relaxation
    assert isinstance(token, TokenText)
    assert all(map(token.holds_for, holds)) and not any(map(token.holds_for, others))


def test_a_wrong_kind_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'digit'.*'digits', 'capitals'"):
        parse_policy("exact | token(digit)")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_token_with_a_digit_is_excused(temperature: float) -> None:
    llm = fly.LLM("fly-target", "fly-tiny", k=8)
    prompt = llm.chat_prompt("Take the list 14 39 25 7. Reverse the list, then sort from low to high.")
    params = fly.SamplingParams(temperature=temperature, max_tokens=60, seed=1)

    def excused(rule: AcceptancePolicy) -> list[str]:
        [out] = llm.generate([prompt], params, policy=rule)
        assert out.policy == rule and str(out.policy) == str(rule)
        return [llm.vocabulary.texts[token.id] for token in out.provenance if token.why == Why.RELAXED]

    assert any(map(has_digit, excused(LOOSE)))
    for rule in (LOOSE & ~Digit(), Composed(), LOOSE & ~TokenText("digits")):
        found = excused(rule)
        assert found and not any(map(has_digit, found))


def test_the_engine_decides_rows_of_equal_rules_together() -> None:
    llm = fly.LLM("fly-target", "none")
    rows = llm.requests(["a", "b"], policy=[LOOSE & ~Digit() & AfterTokens(2) for _ in range(2)])
    assert rows[0].row.policy is rows[1].row.policy


class Bound(DraftStrategy):
    """Notes what it is bound to, and states a size only then."""

    def attach(self, setup: DraftSetup) -> None:
        self.vocabulary = setup.vocabulary
        self.vocab_size = setup.vocabulary.size

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        last = [(row.tokens[-1] + 1) % self.vocabulary.size for row in rows]
        return pad([[token][:most] for token, most in zip(last, max_len)])


class Unstated(Bound):
    def attach(self, setup: DraftSetup) -> None:
        self.vocabulary = setup.vocabulary


def test_drafts_are_bound_to_the_vocabulary_of_their_rows() -> None:
    below, beside = Bound(), Bound()
    level = SingleDraft("fly-draft", policy=Exact() | Digit())
    llm = fly.LLM("fly-target", CascadeDraft([below, level]))
    assert below.vocabulary is not None and below.vocabulary.texts == llm.vocabulary.texts
    assert below.vocabulary is not llm.vocabulary  # that of the level's model
    prompt = llm.chat_prompt("Reverse the list 4 9 5 7.")
    [out] = llm.generate([prompt], fly.SamplingParams(temperature=0.0, max_tokens=30))  # the level's rule is bound
    [plain] = llm.generate([prompt], fly.SamplingParams(temperature=0.0, max_tokens=30), k=0)
    assert out.text == plain.text
    other = fly.LLM(llm, beside)
    assert beside.vocabulary is other.vocabulary and beside.vocab_size == 1024


@pytest.mark.usefixtures("few_seeds")
def test_a_forgotten_vocab_size_is_one_line() -> None:
    assert check_draft(Bound).passed
    [finding] = check_draft(Unstated, raises=False).findings
    assert not finding.passed and "Unstated states no vocab_size" in finding.detail


class Wide(DraftStrategy):
    """Claims distributions over more tokens than there are."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        tokens_B1 = torch.tensor([row.tokens[-1:] for row in rows])
        probs_B1V = torch.nn.functional.one_hot(tokens_B1, 2000).float()
        return Draft(tokens_B1, torch.tensor(max_len).clamp_max(1), probs_B1V)


def test_a_distribution_of_another_width_is_named() -> None:
    [finding] = check_draft(Wide, raises=False).findings
    assert "Wide states no vocab_size" in finding.detail and "2000 tokens" in finding.detail
    with pytest.raises(ValueError, match="Wide proposed distributions over 2000 tokens to a target of 1024"):
        fly.LLM("fly-target", Wide()).generate(["Tom"], fly.SamplingParams(max_tokens=4, seed=0))
