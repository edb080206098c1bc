"""What a rule reads, and whether it fails: found by letting it decide a few small blocks, its trial. Knows nothing of
engines.

An engine supplies what a rule reads, or refuses the rule when a request begins. So a rule sees the same on every
backend, and what no rule reads costs nothing.

Shape legend: B rows, K longest draft, J = K + 1 places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fly.errors import origin
from fly.policies.binding import Bindable, parts_of
from fly.types import Draft, LazyDraft, Noise, Target

__all__ = ["DRAFT_LOGITS", "PARTS", "Trial", "carry_logits", "note_logits", "supply_logits", "try_rule"]

DRAFT_LOGITS = "draft.logits"
_PAST = ("history", "generated", "relaxed", "relaxed_at", "nats", "spent")
PARTS = (DRAFT_LOGITS, *_PAST)  # everything that a rule may read besides the target's output and the drafted tokens
_SIZE = 32  # V of the blocks, unless a rule needs its whole vocabulary
_TEXT = 64  # tokens before a block


class Trial(NamedTuple):
    """What happens when a rule decides a few small blocks.

    ``reads`` are the ``PARTS`` that it asked for, and those that it declares. ``error`` tells the first error that it
    raised, if any: what it would have asked for after that is not known. ``errors`` has an error for rows at
    temperature 0 (True), or for rows above it (False), if it raised one on all blocks of such rows.
    """

    reads: frozenset[str]
    error: str | None
    errors: Mapping[bool, str]


def try_rule(rule: Any) -> Trial:
    """Let ``rule`` decide a few small blocks, greedy and drawn. Raises ``ValueError`` if it declares an unknown
    part."""
    declared = frozenset(_declared(rule))
    vocabulary = rule._vocabulary
    size, device = (_SIZE, torch.device("cpu")) if vocabulary is None else (vocabulary.size, vocabulary.device)
    # A few tokens are enough, and much faster, unless the rule compares logits with a mask over its vocabulary.
    trial = _decide_blocks(rule, min(size, _SIZE), device)
    if trial.error is not None and size > _SIZE:
        trial = _decide_blocks(rule, size, device)
    return trial._replace(reads=declared | trial.reads)


def _decide_blocks(rule: Any, size: int, device: torch.device) -> Trial:
    """Let a rule decide blocks over ``size`` tokens."""
    noted = set[str]()
    errors = list[tuple[bool | None, str | None]]()
    for target, draft, noise in _blocks(size, device, noted):
        kind = None if target.some_greedy and not target.all_greedy else target.all_greedy
        try:
            with torch.no_grad():
                rule.checked_verdict(target, draft, noise)
            errors.append((kind, None))
        except Exception as error:  # a user's rule may raise anything
            errors.append((kind, _tell_error(error)))
    first = next((text for _, text in errors if text is not None), None)
    of_kind = {kind: [text for other, text in errors if other is kind] for kind in (True, False)}
    always = {kind: texts[0] for kind, texts in of_kind.items() if texts[0] is not None and None not in texts}
    return Trial(frozenset(noted), first, always)


def _tell_error(error: Exception) -> str:
    """Return an error's type, the first line of its text, and where it was raised."""
    path, _, place = origin(error).rpartition(":")
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}{': ' * bool(text)}{text} ({Path(path).name}:{place})"


def _declared(rule: Bindable) -> Iterator[str]:
    """Yield what a rule and its parts declare. Raises ``ValueError`` for an unknown name."""
    for part in parts_of(rule):
        for name in part.also_reads:
            if name not in PARTS:
                raise ValueError(f"{part}: also_reads names {name!r}; choices: {list(PARTS)}")
            yield name


def _blocks(size: int, device: torch.device, noted: set[str]) -> Iterator[tuple[Target, Draft, Noise]]:
    """Yield blocks of two rows that note what is asked: greedy and drawn ones, of drawn drafts and of others, and of
    rows of both kinds. Every second drafted token is a mismatch. The text before a block is long enough to look back
    at."""
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
    kinds: list[tuple[bool, Tensor | None, bool]] = [(True, None, False), (False, None, True), (False, None, False)]
    kinds += [(False, mixed_B, True), (False, mixed_B, False)]
    for all_greedy, greedy_B, drawn in kinds:
        probs_BJV = None if all_greedy else logits_BJV.softmax(-1)
        target = _note_past(noted, logits_BJV, probs_BJV, greedy_B)
        probs_BKV = draft_BKV.softmax(-1) if drawn else None
        draft = Draft(tokens_BK, lengths_B, probs_BKV, logits_BKV=draft_BKV)
        yield target, note_logits(draft, noted), noise


def _note_past(noted: set[str], logits_BJV: Tensor, probs_BJV: Tensor | None, greedy_B: Tensor | None) -> Target:
    """Return a target that notes which parts of the past are asked for. Each row has emitted one token, which was
    relaxed."""
    rows, _, size = logits_BJV.shape

    def column(part: str, dtype: torch.dtype) -> Tensor:
        noted.add(part)
        return torch.ones(rows, dtype=dtype, device=logits_BJV.device)

    def lists(part: str, values: list[int]) -> list[list[int]]:
        noted.add(part)
        return [list(values) for _ in range(rows)]

    return Target(
        logits_BJV,
        probs_BJV,
        greedy_B=greedy_B,
        control_V=logits_BJV.new_zeros(size, dtype=torch.bool),
        generated_B=lambda: column("generated", torch.int64),
        relaxed_B=lambda: column("relaxed", torch.int64),
        nats_B=lambda: column("nats", torch.float32),
        spent=lambda label: column("spent", torch.float32),
        relaxed_at=lambda: lists("relaxed_at", [_TEXT - 1]),
        history=lambda: lists("history", [0] * _TEXT),
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
    than it would see alone. A draft of no tokens gets zeros. ``size`` is V. From rules of this package, which read
    none, nothing is withheld.

    Raises ``ValueError`` if the draft has none where the rule reads them.
    """
    if rule.is_built_in:
        return draft
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
