"""The reference executor: any model on any device that PyTorch knows.

Shape legend: T packed tokens, N places, C hidden width, V vocabulary, F hidden states side by side.
"""

from __future__ import annotations

from collections import abc
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fly.backends.int8 import INT8
from fly.models import Llama
from fly.models.config import LlamaConfig
from fly.models.llama import record_states
from fly.ops import upload
from fly.runner.executor import Batch, Executor, Scores

__all__ = ["Model", "TorchExecutor"]


@runtime_checkable
class Model(Protocol):
    """A model that can be run, such as ``fly.models.Llama``."""

    config: LlamaConfig

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: Any) -> Tensor:
        """Return the final hidden states [T, C]."""

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Return the logits [T, V], float32."""


class TorchExecutor(Executor):
    """Runs ``model`` operation by operation."""

    def __init__(self, model: Model) -> None:
        self.model = model
        if isinstance(model, Llama):
            model.rotary()  # its tables are built now, and not by the first request
            if model.rounded:
                self.kernels = INT8
        self.config = model.config
        self.device = model.device
        self.dtype = model.dtype

    @property
    def weight_bytes(self) -> float:
        return 1 if self.kernels == INT8 else super().weight_bytes

    @property
    def model_name(self) -> str:
        return type(self.model).__name__

    @property
    def gives_states(self) -> bool:  # type: ignore[override]
        return isinstance(self.model, Llama)

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        tokens_T, positions_T = upload([*batch.tokens, *batch.positions], self.device).chunk(2)
        recorded_states: dict[int, Tensor] = dict.fromkeys(states, positions_T)
        options: dict[str, Any] = {"through": record_states(recorded_states)} if states else {}
        hidden_TC = self.model(tokens_T, positions_T, batch.kv, **options)
        states_TF = torch.cat([recorded_states[number] for number in states], -1) if states else None
        if places is not None:
            if not len(places):
                return Scores(torch.zeros(0, self.config.vocab_size, device=self.device), None, states_TF)
            hidden_TC = hidden_TC[upload(places, self.device)]
        return Scores(self.model.logits(hidden_TC), None, states_TF)

    def embedding(self) -> Tensor:
        if not isinstance(self.model, Llama):
            return super().embedding()
        weight = self.model.embed_tokens.weight
        if type(weight) is torch.nn.Parameter and len(weight) == self.config.vocab_size:
            return weight.detach()  # the table itself, which takes no more memory
        # A rank holds a part of the table, which is called like a module.
        embedding_VC: Tensor = self.model.embed_tokens(torch.arange(self.config.vocab_size, device=self.device))
        return embedding_VC.detach()

    def logits(self, hidden_NC: Tensor) -> Tensor:
        if not isinstance(self.model, Llama):
            return super().logits(hidden_NC)
        return self.model.logits(hidden_NC.to(self.device, self.dtype))

    def output(self) -> Tensor:
        if isinstance(self.model, Llama):
            weight = self.model.lm_head.weight
            if type(weight) is torch.nn.Parameter and len(weight) == self.config.vocab_size:
                return weight.detach()  # the matrix itself, which takes no more memory
        return super().output()
