"""Results that do not depend on what else is computed with them. Knows nothing of policies or ranks.

Shape legend: T packed tokens, C hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fly.cache.paged import PagedBatch
from fly.models.config import LlamaConfig
from fly.models.llama import KV

if TYPE_CHECKING:
    from fly.engine import Model

__all__ = ["OneByOne", "invariant"]


def invariant(model: Model) -> Model:
    """``model`` itself if what it says of a token does not depend, to the last bit, on the tokens that are fed together
    with it (its attribute ``batch_invariant`` is true), else ``OneByOne`` of it."""
    return model if getattr(model, "batch_invariant", False) else OneByOne(model)


class OneByOne:
    """A model that is shown one token at a time, whatever it is fed.

    The matrix products of most libraries add up in an order that depends on how many rows there are, so that the same
    token gets other last bits in a batch, or as one of several drafted ones. One at a time every token takes the same
    way through the same kernels over the same keys in the same order. It costs as many forwards as there are tokens.
    """

    batch_invariant = True

    def __init__(self, model: Model) -> None:
        self.model = model
        self.config: LlamaConfig = model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self.model, "dtype", torch.float32)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: KV) -> Tensor:
        """Hidden states [T, C]; tokens come after all that they see. ``kv`` is a ``PagedBatch``."""
        assert isinstance(kv, PagedBatch)
        at = [
            self.model(tokens_T[t : t + 1], positions_T[t : t + 1], token_kv) for t, token_kv in enumerate(kv.tokens())
        ]
        return torch.cat(at)

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V]."""
        return torch.cat([self.model.logits(hidden_1C) for hidden_1C in hidden_TC.split(1)])
