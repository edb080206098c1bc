"""A trimmed model. Its head has rows only for some tokens of the vocabulary, so it reads all tokens but emits only
these.

The head is a large part of the weights that a small model reads for each token (28 % of Qwen2.5-Coder-0.5B in 8 bits),
and most of its rows are for rare tokens (FR-Spec, arXiv 2502.14856). The distribution of a trimmed draft model sums to
1 over the kept tokens, and is 0 for the others. Drafted tokens are drawn from this distribution, and drafts carry it,
so a lossless rule stays lossless.

Shape legend: U kept tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from fly.models.config import LlamaConfig
from fly.models.llama import Llama, skeleton
from fly.models.loading import Piece, layout

__all__ = ["TrimmedHead", "kept_tokens"]


def kept_tokens(vocabulary: int | str | Path | Collection[int], size: int, always: Collection[int] = ()) -> list[int]:
    """Return the ids to keep from a vocabulary of ``size`` tokens, in ascending order.

    Args:
        vocabulary: how many of the lowest ids to keep (tokenizers that merge pairs of bytes number frequent tokens
            first), the ids themselves, or a JSON file with a list of them.
        always: further ids to keep, such as those of control tokens. Without control tokens a draft would never end.

    Raises:
        ValueError: a number below 1, or ids outside the vocabulary.
        OSError: the file cannot be read.
    """
    if isinstance(vocabulary, int):
        if vocabulary < 1:
            raise ValueError(f"vocabulary {vocabulary} must keep at least 1 token")
        return sorted({*range(min(vocabulary, size)), *always})
    source, ids = "vocabulary", vocabulary
    if isinstance(vocabulary, (str, Path)):
        source = f"vocabulary {str(vocabulary)!r}"
        try:
            ids = json.loads(Path(vocabulary).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{source} is no JSON file: {error}") from error
    if not isinstance(ids, Collection) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"{source} must be a number of tokens, or a list of token ids")
    known_ids = {token for token in ids if isinstance(token, int) and 0 <= token < size}
    if unknown_ids := {*ids} - known_ids:
        raise ValueError(f"{source} has the id {min(unknown_ids)}; the model has {size} tokens, numbered from 0")
    return sorted({*known_ids, *always})


class TrimmedHead:
    """The ``fly.models.loading.ModelPart`` of a trimmed model: all layers, and the head's rows for the ``kept`` tokens
    (in ascending order)."""

    def __init__(self, config: LlamaConfig, kept: list[int]) -> None:
        self.config, self.kept = config, kept

    def build(self) -> Llama:
        """Build the module without memory. Head and embedding are separate, even if the checkpoint ties them."""
        model = skeleton(self.config)
        model.lm_head.weight = nn.Parameter(torch.empty(len(self.kept), self.config.hidden_size, device="meta"))
        model.lm_head.out_features, model.kept = len(self.kept), self.kept
        return model

    @property
    def pieces(self) -> Mapping[str, list[Piece]]:
        """Return the pieces of the model. The head has one piece for each run of consecutive ids."""
        plan = layout(self.config, dict(skeleton(self.config).named_parameters()))
        name = "embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        (stored,) = plan[name]
        width = slice(0, stored.shape[1])
        rows, pieces = 0, []
        for first, end in _runs(self.kept):
            filled = slice(rows, rows + end - first)
            pieces.append(Piece(stored.key, stored.shape, filled, (slice(first, end), width)))
            rows = filled.stop
        return {**plan, "lm_head.weight": pieces}


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Return the first id and the end of each run of consecutive ids."""
    starts = [n for n in range(len(ids)) if n == 0 or ids[n] != ids[n - 1] + 1]
    return [(ids[start], ids[end - 1] + 1) for start, end in zip(starts, [*starts[1:], len(ids)])]
