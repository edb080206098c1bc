"""Drafting a whole block in one forward, by a trained head that reads the target's hidden states: DFlash
(arXiv 2602.06036), DSpark and P-EAGLE (arXiv 2602.01469).

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from pathlib import Path

import torch

from fly.drafts.base import (
    Continuation,
    DraftSetup,
    DraftStrategy,
    RowDraft,
    Wrapper,
    is_built_in,
    join_rows,
    split_rows,
)
from fly.drafts.ngram import NGramDraft
from fly.drafts.stops import REACH_BLOCK
from fly.drafts.suffix import SuffixDraft
from fly.drafts.trained import HeadDraft
from fly.models.trimmed import kept_tokens
from fly.ops import common_prefix
from fly.runner.executor import BlockHead, DraftSpec, Head
from fly.runner.request import Row
from fly.types import Draft

__all__ = ["BlockDraft", "LookupDraft"]

_AGREE = 2  # a lookup's tokens are followed after this many that the head drafts too (rounds.cpp: look_beside)


class BlockDraft(HeadDraft):
    """A trained head that drafts a block of tokens in one forward: DFlash, DSpark or P-EAGLE.

    Args:
        head: the name or path of a head (``fly.models.dflash``, ``fly.models.eagle``), or a loaded head.
        k: the most tokens (None: as many as the caller asks for, and the head drafts).
        confidence: stop after a token whose chance to be kept is below this. 0 never stops. The chance is what a
            DSpark head's confidence head says, or the largest probability at the token's place.
        reach: stop after a token if the product of these chances falls below this. None means 0.05. The head computes
            all its places in any case, so stopping saves the target's work alone.
        cache_tokens: how many tokens its cache holds over all rows (None: as many as the target's).
        block_size: tokens in a page of its cache (None: as suits the device).
        dtype, device, kernels: how to load and run a head, as for ``LLM``. On compiled kernels, heads are rounded as
            ``kernels`` says; ``"auto"`` is four bits for a large head, otherwise the target's kernels.
        vocabulary: the tokens that a DFlash or DSpark head drafts, as for ``SingleDraft``. None: all that it can.

    Above temperature 0, each token is drawn from the distribution at its place after the row's sampling settings, which
    a DSpark head corrects by the token drawn before. The draft reports these distributions (``probs_BKV``), so a
    lossless rule stays lossless.

    Raises ``ValueError`` if it is attached to a target that has another width, depth or vocabulary, or gives no hidden
    states.
    """

    kind = BlockHead
    one_forward = True
    gives_logits = True

    def __init__(
        self,
        head: str | Path | Head,
        k: int | None = None,
        confidence: float = 0.0,
        reach: float | None = 0.0,
        cache_tokens: int | None = None,
        block_size: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        kernels: str = "auto",
        vocabulary: int | str | Path | abc.Collection[int] | None = None,
    ) -> None:
        super().__init__(head, k, confidence, reach, cache_tokens, block_size, dtype, device, kernels)
        self.reach = REACH_BLOCK if reach is None else reach
        self.vocabulary = vocabulary

    def _prepare(self, head: Head, setup: DraftSetup) -> None:
        if self.vocabulary is not None:
            assert isinstance(head, BlockHead)
            head.trim(kept_tokens(self.vocabulary, head.config.vocab_size, setup.vocabulary.control_ids))

    def attach(self, setup: DraftSetup) -> None:
        super().attach(setup)
        head = self.head
        assert isinstance(head, BlockHead)
        self.spare = head.room(1, DraftSpec())  # a block takes all its places, however few tokens are asked for
        self.k = min((n for n in (self.k, head.longest) if n is not None), default=None)

    def _limit(self, row: Row) -> int:
        n = super()._limit(row)
        # Every place of a block, which begins at the row's last token, needs a position.
        fits = len(row.tokens) - 1 + self.head.room(1, DraftSpec()) <= self.head.config.max_position_embeddings
        return n if fits else 0


class LookupDraft(Wrapper):
    """A block drafter with a lookup beside it, as ``ngram+block(HEAD)`` writes it.

    A block drafter verifies nothing, so a lookup cannot draft for it. But a text that is copied continues as the
    lookup says, where late places of a block are guesses. So both propose. If the head's first two tokens are the
    lookup's, the draft goes on with the lookup's tokens.

    Those tokens are certain given the two before them, and are reported so. So a lossless rule stays lossless. Of a
    greedy row, the longer draft counts. A drawn draft may not depend on how long the head's own would be, since that
    depends on the tokens drawn after the first two: what is left of those is not drawn from what the head reports.
    """

    def __init__(self, lookup: DraftStrategy, block: DraftStrategy) -> None:
        if not isinstance(lookup, (NGramDraft, SuffixDraft)):
            raise ValueError(
                f"{type(lookup).__name__} stands below a block drafter, which verifies nothing; only ngram or suffix "
                "may stand there"
            )
        super().__init__([lookup, block])

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation | None:
        lookup, block = (member.continuation(rows) for member in self.members)
        if lookup is None or block is None or not is_built_in(type(self)):
            return None
        max_len = [max(each) for each in zip(lookup.max_len, block.max_len)]
        spec = replace(block.spec, lookup=lookup.spec.lookup)
        return block._replace(max_len=max_len, spec=spec, longest=max(block.max_len))

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        lookup, block = self.members
        draft = block.propose(rows, max_len)
        drafted = split_rows(draft)
        long = [n if len(row_draft.tokens) > _AGREE else 0 for row_draft, n in zip(drafted, max_len)]
        if not any(long):
            return draft
        looked = lookup.propose(rows, long).chains
        least = [len(row_draft.tokens) if row.greedy else _AGREE + 1 for row, row_draft in zip(rows, drafted)]
        pieces = [_followed(*each) for each in zip(drafted, looked, least)]
        return draft if all(piece is row_draft for piece, row_draft in zip(pieces, drafted)) else join_rows(pieces)


def _followed(row_draft: RowDraft, looked: list[int], least: int) -> RowDraft:
    """Return the head's draft. If the lookup begins like it and has at least ``least`` tokens, the draft goes on with
    the lookup's."""
    if len(looked) < least or common_prefix(row_draft.tokens, looked) < _AGREE:
        return row_draft
    if row_draft.probs_NV is None:
        return RowDraft(looked)
    certain_NV = torch.nn.functional.one_hot(torch.tensor(looked[_AGREE:]), row_draft.probs_NV.shape[-1])
    probs_NV = torch.cat([row_draft.probs_NV[:_AGREE], certain_NV.to(row_draft.probs_NV)])
    return RowDraft(looked, None, probs_NV)
