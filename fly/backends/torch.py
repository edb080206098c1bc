"""Any model on any device that PyTorch knows: the reference.

Shape legend: T packed tokens, N places, C hidden width, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fly.backends.int8 import INT8
from fly.executor import Batch, Executor, Scores
from fly.models import Llama
from fly.models.config import LlamaConfig

__all__ = ["Model", "TorchExecutor"]


@runtime_checkable
class Model(Protocol):
    """What can be run: ``fly.models.Llama`` is one."""

    config: LlamaConfig

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: Any) -> Tensor:
        """Final hidden states [T, C]."""

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """[T, V] float32."""


class TorchExecutor(Executor):
    """Runs ``model`` operation by operation, through all layers or those numbered in ``layers`` only (which takes a
    model whose forward has a parameter of that name)."""

    def __init__(self, model: Model, layers: abc.Sequence[int] | None = None) -> None:
        self.model = model
        if isinstance(model, Llama) and model.rounded:
            self.kernels = INT8
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self._options = {} if layers is None else {"layers": layers}

    @property
    def weight_bytes(self) -> int:
        return 1 if self.kernels == INT8 else super().weight_bytes

    @property
    def model_name(self) -> str:
        return type(self.model).__name__

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None) -> Scores:
        tokens_T = torch.tensor(batch.tokens, device=self.device)
        positions_T = torch.tensor(batch.positions, device=self.device)
        hidden_TC = self.model(tokens_T, positions_T, batch.kv, **self._options)
        if places is not None:
            if not len(places):
                return Scores(torch.zeros(0, self.config.vocab_size, device=self.device))
            hidden_TC = hidden_TC[torch.tensor(places, device=self.device)]
        return Scores(self.model.logits(hidden_TC))

    def with_layers(self, layers: abc.Sequence[int]) -> Executor:
        if not isinstance(self.model, Llama):
            return super().with_layers(layers)
        return type(self)(self.model, layers)
