"""The processed distribution of logits on a CUDA device: one kernel finds the kept logits, one computes the shares of
the mass, each at all positions at once.

Shape legend: B rows, J positions of a row, N = B·J, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fly.backends.cuda.ops import find_kept, share_mass
from fly.runner.sampling import ProcessedDistribution

__all__ = ["DeviceDistribution"]


class DeviceDistribution(ProcessedDistribution):
    """Logits that ranks share are processed operation by operation."""

    def dense(self) -> Tensor:
        if not _is_whole(self.logits_BJV) or self.sampling.some_greedy:
            return super().dense()
        self._summary = self._summary or self._find()
        logits_NV, temperature_B = self.logits_BJV.flatten(0, 1), self.sampling.temperature_B
        temperature_N = temperature_B.repeat_interleave(self.logits_BJV.shape[1])
        return share_mass(logits_NV, self._summary_3N, temperature_N).unflatten(0, self.logits_BJV.shape[:2])

    def _find_kept(self, logits_NV: Tensor, *limits_N: Any) -> Tensor:
        if not _is_whole(logits_NV):
            return super()._find_kept(logits_NV, *limits_N)
        self._summary_3N: Tensor = find_kept(logits_NV, *limits_N)
        return self._summary_3N


def _is_whole(logits: Tensor) -> bool:
    """Whether the logits are a plain tensor, not divided among ranks (``fly.ops.vocabulary``)."""
    return type(logits).__torch_function__ in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
