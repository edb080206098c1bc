"""Draft strategies as text: names, checkpoints, cascades, parameters, plug-ins."""

from __future__ import annotations

import shutil
from collections import abc
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fly import expressions
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft
from fly.drafts.base import pad
from fly.drafts.registry import STRATEGIES, draft_types, parse_draft
from fly.models import CheckpointError
from fly.models.bundled import resolve_checkpoint
from fly.policies import AfterTokens, Exact, FLy
from fly.runner.request import Row
from fly.types import Draft
from tests.toys import ready

HERE = __name__


class Plugged(DraftStrategy):
    """A plug-in with parameters of every simple type; drafts nothing."""

    def __init__(
        self,
        count: int = 1,
        share: float = 0.5,
        kind: Literal["slow", "fast"] = "fast",
        name: str | None = None,
        on: bool = True,
        below: DraftStrategy | None = None,
    ) -> None:
        if count < 1:
            raise ValueError(f"count {count} must be at least 1")
        self.parameters = (count, share, kind, name, on)
        self.below = below

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return Draft.empty(len(rows))


class Several(DraftStrategy):
    """Takes strategies one by one."""

    def __init__(self, *members: DraftStrategy, dtype: str = "none given") -> None:
        self.members, self.dtype = list(members), dtype

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return pad([[] for _ in rows])


class Listed(Several):
    """Takes a list of strategies."""

    def __init__(self, members: abc.Sequence[DraftStrategy], rate: float = 0.1) -> None:
        super().__init__(*members)
        self.rate = rate


class Staged(Several):
    """Takes strategies with a number each."""

    def __init__(self, stages: abc.Sequence[tuple[DraftStrategy, int]]) -> None:
        super().__init__(*(member for member, _ in stages))
        self.lengths = [length for _, length in stages]


FINISHED = NGramDraft(longest=2)


def ngram(strategy: DraftStrategy | None) -> tuple[int, int, int]:
    assert isinstance(strategy, NGramDraft)
    return strategy.longest, strategy.shortest, strategy.k


def read(text: str) -> Any:
    strategy = parse_draft(text, trusted=True, dtype="float32", device="cpu")
    if strategy is not None:
        strategy = ready(strategy)
    return strategy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose path needs quotes."""
    path = tmp_path_factory.mktemp("drafts") / "odd name+this=one, (it's)"
    shutil.copytree(resolve_checkpoint("fly-tiny"), path)
    return path


def levels(strategy: DraftStrategy | None) -> list[DraftStrategy]:
    """From the cheapest to the one that drafts for the target."""
    found = strategy
    chain: list[DraftStrategy] = []
    while found is not None:
        chain.insert(0, found)
        found = getattr(found, "draft", None)
    return chain


def test_todays_texts_keep_working(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("none") is None and read(" none ") is None
    assert ngram(read("ngram")) == ngram(NGramDraft())
    small = read("fly-tiny")
    assert isinstance(small, SingleDraft) and type(small.draft) is NGramDraft
    alone = read("model(fly-tiny)")
    assert isinstance(alone, SingleDraft) and alone.draft is None and alone.reach == 0 and small.reach is None
    assert [type(level) for level in levels(read("ngram+fly-tiny+fly-draft"))] == [NGramDraft, *[CascadeDraft] * 2]
    assert [type(level) for level in levels(read(" ngram + fly-tiny "))] == [NGramDraft, CascadeDraft]
    for text in (str(checkpoint), f'"{checkpoint}"', str(resolve_checkpoint("fly-tiny"))):
        assert read(text).vocab_size == small.vocab_size
    monkeypatch.chdir(resolve_checkpoint("fly-tiny").parent)
    assert read("./fly-tiny").vocab_size == small.vocab_size
    assert len(levels(read("ngram+./fly-tiny"))) == 2


def test_parameters() -> None:
    assert ngram(read("ngram(longest=3, k=8)")) == (3, 1, 8)
    assert ngram(read("ngram(3, 2)")) == (3, 2, 6)
    assert ngram(read("ngram()")) == ngram(NGramDraft())
    single = read("model(fly-tiny, k=8, draft=ngram(k=2), policy='fly(theta=0.5) & after(2)')")
    assert single.k == 8 and ngram(single.draft)[2] == 2
    assert single.policy == FLy(theta=0.5) & AfterTokens(2)
    assert read("model(fly-tiny, policy=exact)").policy == Exact()
    chain = levels(read("ngram(k=3) + model(fly-tiny, k=4) + fly-draft"))
    assert ngram(chain[0])[2] == 3 and [level.k for level in chain[1:]] == [4, None]  # type: ignore[attr-defined]


def test_dtype_and_device_reach_every_checkpoint_unless_the_text_says_otherwise() -> None:
    for text in ("fly-tiny", "model(fly-tiny)", "'fly-tiny'"):
        assert read(text).runner.executor.dtype == torch.float32
    assert read("model(fly-tiny, dtype=bfloat16)").runner.executor.dtype == torch.bfloat16
    assert read(f"{HERE}:Several(fly-tiny)").members[0].options["dtype"] == "float32"
    assert read(f"{HERE}:Several()").dtype == "float32"


def test_strategies_of_strategies() -> None:
    for text in ("Several(ngram, ngram(k=2))", "Listed([ngram, ngram(k=2)])"):
        both = read(f"{HERE}:{text}")
        assert [ngram(member)[2] for member in both.members] == [6, 2]
    assert read(f"{HERE}:Listed([ngram], rate=1)").rate == 1
    deep = read(f"{HERE}:Several(ngram+fly-tiny, {HERE}:Several('fly-tiny'))")
    assert isinstance(deep.members[0], CascadeDraft) and isinstance(deep.members[1].members[0], SingleDraft)
    staged = read(f"{HERE}:Staged([(ngram, 4), (fly-tiny, 8)])")
    assert staged.lengths == [4, 8] and isinstance(staged.members[1], SingleDraft)
    assert ngram(read(f"{HERE}:Plugged(below=ngram)").below) == ngram(NGramDraft())


def test_plug_ins_are_imported_only_where_the_source_is_trusted() -> None:
    assert read(f"{HERE}:Plugged(3, kind=slow, name=it)").parameters == (3, 0.5, "slow", "it", True)
    assert read(f"{HERE}:Plugged(share=1, on=False, name=None)").parameters == (1, 1, "fast", None, False)
    assert read(f"{HERE}:FINISHED") is FINISHED
    for text in (f"{HERE}:Plugged", f"{HERE}:FINISHED", f"ngram+{HERE}:Plugged(2)"):
        with pytest.raises(ValueError, match="not allowed"):
            parse_draft(text)
    with pytest.raises(ValueError, match="finished strategy"):
        read(f"{HERE}:FINISHED(3)")
    for text in (f"{HERE}:pytest", f"{HERE}:DraftStrategy"):
        with pytest.raises(ValueError, match="must be a class that subclasses DraftStrategy"):
            read(text)
    for text in ("absent_module_x:Draft", f"{HERE}:absent"):
        with pytest.raises(ValueError, match=r"absent.*cannot be imported"):
            read(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fly-drft", ["'fly-drft'", "fly-draft"]),
        ("ngrm(k=3)", ["'ngrm'", "ngram"]),
        ("ngram+", ["expression"]),
        ("ngram(3", ["expression"]),
        ("", ["expression"]),
        ("'no such'", ["'no such'", "fly-draft"]),
        ("ngram+none", ["'none'"]),
        ("3", ["'3' is no strategy"]),
        ("ngram-3*2", ["'ngram-3*2'"]),
        ("fly-draft(k=3)", ["'fly-draft' is unknown"]),
        ("ngram(n=3)", ["'n'", "longest", "shortest", "k"]),
        ("ngram(**x)", ["longest '**x'"]),
        ("ngram(1, 2, 3, 4)", ["ngram", "too many"]),
        ("ngram(k=0)", ["ngram", "k 0"]),
        ("ngram(k=many)", ["k 'many'", "integer"]),
        ("ngram(k=1.5)", ["k 1.5", "integer"]),
        ("ngram(k=True)", ["k True", "integer"]),
        ("ngram(k=[x for x in y])", ["expression"]),
        ("ngram(k=1<2)", ["k", "'1<2'"]),
        ("ngram(k=ngram)", ["k 'ngram'"]),
        ("ngram(k=ngram())", ["k <", "integer"]),
        ("model()", ["model", "'model'"]),
        ("model(5)", ["model 5", "string"]),
        ("model(fly-none)", ["'fly-none'", "fly-tiny"]),
        ("model(fly-tiny, policy=flx)", ["'flx'", "'fly'"]),
        ("model(fly-tiny, draft=3)", ["draft 3"]),
        ("model(fly-tiny, draft=ngrm)", ["'ngrm'", "ngram"]),
        ("model(fly-tiny, dtype=int3)", ["int3", "bfloat16"]),
        ("fly-tiny+ngram", ["level 1", "NGramDraft"]),
        (f"{HERE}:Plugged(count=x)", ["count 'x'"]),
        (f"{HERE}:Plugged(count=0)", ["count 0"]),
        (f"{HERE}:Plugged(share=half)", ["share 'half'"]),
        (f"{HERE}:Plugged(kind=medium)", ["kind 'medium'", "slow"]),
        (f"{HERE}:Plugged(on=1)", ["on 1"]),
        (f"{HERE}:Plugged(below=3)", ["below 3"]),
        (f"{HERE}:Listed(3)", ["members 3"]),
        (f"{HERE}:Several(3)", ["members 3"]),
        (f"{HERE}:Staged(ngram)", ["stages"]),
    ],
)
def test_errors_are_one_line_that_names_the_part_and_the_choices(text: str, said: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read(text)
    message = str(caught.value)
    assert "\n" not in message and message.count("draft '") <= 2, message
    assert [part for part in said if part not in message] == [], message
    assert repr(text) in message


def test_a_checkpoint_that_cannot_be_used_stays_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(str(tmp_path))


# Pieces that a mutated text is likely made of; no existing checkpoint, so that nothing is loaded.
pieces = st.sampled_from(["ngram", "model", "none", "fly-drft", "(", ")", "+", ",", "=", "k", "k=", "3", "'", '"', " "])
fragments = st.lists(pieces | st.text(max_size=3), max_size=12).map("".join)


@given(st.text(max_size=40) | fragments)
def test_any_text_is_a_strategy_or_a_value_error(text: str) -> None:
    try:
        strategy = parse_draft(text)
    except ValueError:
        return
    assert strategy is None or isinstance(strategy, DraftStrategy)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 99), st.sampled_from(["", " ", "\n"]))
def test_parameters_arrive(longest: int, shortest: int, k: int, space: str) -> None:
    text = f"ngram({space}longest={space}{longest},{space}k={k},{space}shortest = {min(shortest, longest)})"
    assert ngram(parse_draft(text)) == (longest, min(shortest, longest), k)


def test_long_texts() -> None:
    for text in ("+".join(["ngram"] * 5000), "(" * 5000, "ngram(" * 500 + ")" * 500, "x" * 10_000):
        with pytest.raises(ValueError):
            parse_draft(text)


def test_entry_points_join_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, attribute: str) -> None:
        def found(group: str) -> list[EntryPoint]:
            assert group == "fly.drafts"
            return [EntryPoint(name, f"{HERE}:{attribute}", group)]

        monkeypatch.setattr(expressions, "entry_points", found)
        vars(STRATEGIES).pop("types", None)

    try:
        install("plugged", "Plugged")
        assert draft_types()["plugged"] is Plugged
        assert isinstance(parse_draft("plugged(2, kind=slow)"), Plugged)
        install("ngram", "Plugged")
        with pytest.raises(ValueError, match=r"ngram.*taken"):
            draft_types()
        install("x", "pytest")
        with pytest.raises(ValueError, match=r"entry point x.*must be a class"):
            draft_types()
    finally:
        vars(STRATEGIES).pop("types", None)


def test_the_table_is_a_copy() -> None:
    draft_types().clear()
    assert draft_types()["ngram"] is NGramDraft
    for name, strategy in draft_types().items():
        assert name.isidentifier() and (strategy.__doc__ or "").strip()
