"""What a draft strategy is. Knows nothing of HTTP or ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Rows

import torch

from fly.cache import BlockAllocator
from fly.models.tokenizer import Tokenizer
from fly.types import Draft, Sequence

__all__ = ["DraftStrategy", "pad"]


class DraftStrategy(ABC):
    """Who proposes. A strategy may keep state by ``row.id``; it must never change a row."""

    vocab_size: int | None = None  # ids it may propose are below this; None: only ids it has seen in the row
    tokenizer: Tokenizer | None = None  # of its vocabulary, where it knows it
    context: int | None = None  # tokens a row may have at most to be drafted for; None: no limit

    @abstractmethod
    def propose(self, rows: Rows[Sequence], max_len: Rows[int]) -> Draft:
        """A draft of at most ``max_len[b]`` tokens for each row, to follow the row's last token.

        Fewer, or none, is always allowed. Where a token was drawn, ``probs_BKV`` holds the law it was drawn from.
        """

    def commit(self, rows: Rows[Sequence]) -> None:
        """The rows' tokens are now the truth: roll own state back to it. The default has no state."""

    def release(self, row: Sequence) -> None:
        """``row`` is over: free what is held for it. The default holds nothing."""

    def allocators(self) -> list[BlockAllocator]:
        """The allocators of its caches, so that requests are admitted only if all of them have room."""
        return []


def pad(drafts: Rows[list[int]], device: torch.device | str = "cpu") -> Draft:
    """A deterministic ``Draft`` of ragged token lists."""
    lengths = [len(tokens) for tokens in drafts]
    longest = max(lengths, default=0)
    padded = [tokens + [0] * (longest - len(tokens)) for tokens in drafts]
    return Draft(
        torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(drafts), longest),
        torch.tensor(lengths, dtype=torch.int64, device=device),
    )
