"""A rank's part of a Llama on compiled kernels. Knows nothing of the engine or policies.

Shape legend: T packed tokens, C hidden width, W a rank's part of the vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fly.backends.cpu import PackedLlama
from fly.backends.torch import TorchExecutor
from fly.models import Llama
from fly.models.llama import KV
from fly.parallel.logits import VocabularyShards
from fly.parallel.plan import Part
from fly.parallel.ranks import Ranks

__all__ = ["CompiledPart", "PartExecutor"]

_Sum = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class CompiledPart(PackedLlama):
    """A loaded ``part`` of a model. Its compiled forward calls back for each sum over ranks, so all ranks must make the
    same calls.

    Forward and logits are separate calls, since one call for both would return this rank's logits alone. The logits are
    ``VocabularyShards``. Before each forward, its tokens and positions are added to the rank's checksum
    (``Ranks.note``).
    """

    def __init__(self, model: Llama, variant: str, part: Part, ranks: Ranks) -> None:
        super().__init__(model, variant)
        self.ranks = ranks
        self._error: BaseException | None = None
        self._sum = _Sum(self._sum_over_ranks)  # must live as long as the model
        first_token = part.slots("vocab_size").start
        self.library.fly_share(self.handle, self._sum, part.config.vocab_size, first_token)

    def _sum_over_ranks(self, address: int, count: int) -> None:
        """Sum over ranks; the C++ forward calls this. An error cannot pass through C++, so it is raised after the
        forward."""
        if self._error is None:
            try:
                values = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
                self.ranks.sum_(values)
            except BaseException as error:  # also KeyboardInterrupt, which C++ would lose
                self._error = error

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: KV) -> Tensor:
        self.ranks.note(tokens_T, positions_T)
        hidden_TC = super().__call__(tokens_T, positions_T, kv)
        if (error := self._error) is not None:
            self._error = None
            raise error
        return hidden_TC

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Return the logits [T, ranks * W], in float32, as ``VocabularyShards``."""
        return VocabularyShards(super().logits(hidden_TC), self.ranks)


class PartExecutor(TorchExecutor):
    """Runs a ``CompiledPart``."""

    def __init__(self, model: CompiledPart) -> None:
        super().__init__(model)
        self.part, self.kernels = model, model.kernels

    @property
    def weight_bytes(self) -> float:
        return self.part.weight_bytes

    @property
    def model_name(self) -> str:
        return "Llama"
