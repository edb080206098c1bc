"""What a rule reads: found by letting it decide a few small blocks that note it. Knows nothing of engines.

An engine supplies what a rule reads, or refuses the rule when a request begins. So a rule sees the same on every
backend, and what no rule reads costs nothing.

Shape legend: B rows, K longest draft, J = K + 1 places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fly.policies.binding import Bindable, parts_of
from fly.types import Draft, LazyDraft, Noise, Target

__all__ = ["DRAFT_LOGITS", "PARTS", "carry_logits", "find_reads", "note_logits", "supply_logits"]

DRAFT_LOGITS = "draft.logits"
_PAST = ("history", "generated", "relaxed", "relaxed_at", "nats", "spent")
PARTS = (DRAFT_LOGITS, *_PAST)  # everything that a rule may read besides the target's output and the drafted tokens
_SIZE = 32  # V of the blocks, unless a rule needs its whole vocabulary


def find_reads(rule: Any) -> frozenset[str]:
    """Return the ``PARTS`` that ``rule`` reads: those that it asks for in some blocks, greedy and drawn, and those that
    it declares. A rule that fails on one of these blocks, which are none of its own, may read all of a row's past."""
    vocabulary = rule._vocabulary
    size, device = (_SIZE, torch.device("cpu")) if vocabulary is None else (vocabulary.size, vocabulary.device)
    # A few tokens are enough, and much faster, unless the rule compares logits with a mask over its vocabulary.
    noted, failed = _note_reads(rule, min(size, _SIZE), device)
    if failed and size > _SIZE:
        noted, failed = _note_reads(rule, size, device)
    return frozenset({*_declared(rule), *noted, *(_PAST if failed else ())})


def _note_reads(rule: Any, size: int, device: torch.device) -> tuple[set[str], bool]:
    """Let a rule decide blocks over ``size`` tokens. Return what it asked for, and whether it failed at one of them."""
    noted, failed = set[str](), False
    for target, draft, noise in _blocks(size, device, noted):
        try:
            with torch.no_grad():
                rule.verdict(target, draft, noise)
        except Exception:  # a user's rule may raise anything; it will do so again at a real block, and be named there
            failed = True
    return noted, failed


def _declared(rule: Bindable) -> Iterator[str]:
    """Yield what a rule and its parts declare. Raises ``ValueError`` for an unknown name."""
    for part in parts_of(rule):
        for name in part.also_reads:
            if name not in PARTS:
                raise ValueError(f"{part}: also_reads names {name!r}; choices: {list(PARTS)}")
            yield name


def _blocks(size: int, device: torch.device, noted: set[str]) -> Iterator[tuple[Target, Draft, Noise]]:
    """Yield blocks of two rows that note what is asked: greedy and drawn ones, of drawn drafts and of others, and of
    rows of both kinds. Every second drafted token is a mismatch."""
    rows, longest = 2, 5
    likely_J = torch.arange(longest + 1, device=device) % size
    logits_BJV = torch.zeros(rows, longest + 1, size, device=device).index_put_(
        (torch.arange(rows, device=device).unsqueeze(1), likely_J, likely_J), torch.tensor(2.0, device=device)
    )
    drafted_K = (likely_J[:-1] + torch.arange(longest, device=device) % 2) % size
    tokens_BK = drafted_K.expand(rows, longest).contiguous()
    lengths_B = torch.arange(longest, longest - rows, -1, device=device)
    draft_BKV = torch.zeros(rows, longest, size, device=device).scatter_(2, tokens_BK.unsqueeze(2), 2.0)
    noise = Noise(torch.full((rows, longest), 0.5, device=device), torch.full((rows,), 0.5, device=device))
    mixed_B = torch.arange(rows, device=device) == 0
    for greedy_B, drawn in ((None, False), (None, True), (mixed_B, True), (mixed_B, False)):
        probs_BJV = logits_BJV.softmax(-1) if drawn or greedy_B is not None else None
        target = _NotingTarget(noted, logits_BJV, probs_BJV, greedy_B, logits_BJV.new_zeros(size, dtype=torch.bool))
        probs_BKV = draft_BKV.softmax(-1) if drawn else None
        draft = Draft(tokens_BK, lengths_B, probs_BKV, logits_BKV=draft_BKV)
        yield target, note_logits(draft, noted), noise


class _NotingTarget(Target):
    """A target that notes which parts of the past are asked for. Each row has emitted one token, which was relaxed."""

    def __init__(
        self, noted: set[str], logits_BJV: Tensor, probs_BJV: Tensor | None, greedy_B: Tensor | None, control_V: Tensor
    ) -> None:
        rows, device = logits_BJV.shape[0], logits_BJV.device

        def column(part: str, dtype: torch.dtype) -> Tensor:
            noted.add(part)
            return torch.ones(rows, dtype=dtype, device=device)

        def lists(part: str, values: list[int]) -> list[list[int]]:
            noted.add(part)
            return [list(values) for _ in range(rows)]

        super().__init__(
            logits_BJV,
            probs_BJV,
            greedy_B=greedy_B,
            control_V=control_V,
            generated_B=lambda: column("generated", torch.int64),
            relaxed_B=lambda: column("relaxed", torch.int64),
            nats_B=lambda: column("nats", torch.float32),
            spent=lambda label: column("spent", torch.float32),
            relaxed_at=lambda: lists("relaxed_at", [1]),
            history=lambda: lists("history", [0, 0]),
        )


def note_logits(draft: Draft, noted: set[str]) -> Draft:
    """Return a draft that adds ``DRAFT_LOGITS`` to ``noted`` when its logits are read, or those of what is made of
    it."""

    def read() -> Tensor | None:
        noted.add(DRAFT_LOGITS)
        return draft.logits_BKV

    return LazyDraft.of_columns(draft, read)


def _withhold_logits(draft: Draft, rule: Any) -> Draft:
    """Return a draft that raises ``ValueError`` where the ``rule``, to which no logits were supplied, reads them."""

    def refuse() -> Tensor:
        raise ValueError(
            f"{rule} reads draft.logits_BKV at this block, and at none of those that find out what a rule reads: write "
            f"'also_reads = ({DRAFT_LOGITS!r},)' into its class"
        )

    return LazyDraft.of_columns(draft, refuse)


def supply_logits(rule: Any, draft: Draft, size: int) -> Draft:
    """Return ``draft`` with logits for a rule that reads them, and without for any other, so that no rule sees more
    than it would see alone. A draft of no tokens gets zeros. ``size`` is V.

    Raises ``ValueError`` if the draft has none where the rule reads them.
    """
    if not rule.reads_logits:
        return draft if isinstance(draft, LazyDraft) else _withhold_logits(draft, rule)
    if draft.logits_BKV is not None:
        return draft
    if draft.shape[1] and any(draft.chains):
        raise ValueError(f"{rule} reads draft.logits_BKV, and this draft has none")
    logits_BKV = torch.zeros(*draft.shape, size, device=draft.tokens_BK.device)
    return Draft(draft.tokens_BK, draft.lengths_B, draft.probs_BKV, draft.parents_BK, logits_BKV)


def carry_logits(draft: Draft, part: Draft, *index: Tensor) -> Draft:
    """Return ``part``, whose tokens are those of ``draft`` at ``index``, with their logits, if the rule sees them."""
    return draft.lend_logits(part, lambda logits_BKV: logits_BKV[index].view(*part.shape, -1))
