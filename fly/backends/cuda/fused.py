"""The layers of a model in fewer kernels, by torch.compile where it works: for shapes that come up often.

Shape legend: T packed tokens, C hidden width.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fly.models.compiled import CompiledLayers

__all__ = ["Fused", "refusal"]

_log = logging.getLogger("fly")


def refusal() -> str | None:
    """Why torch.compile has no kernels for the CUDA device here; None if it has."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability() < (7, 0):
        return "Triton takes devices of compute capability 7.0 or later"
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        return "there is no C compiler (gcc, clang, or what CC names), which Triton needs"
    return None


@cache
def _say_once(reason: str) -> None:
    _log.warning("layers are not compiled, and run operation by operation inside of CUDA graphs: %s", reason)


class Fused:
    """The compiled layers of one model. If compiling fails, one warning says so, and the model runs without it."""

    def __init__(self) -> None:
        self._layers: CompiledLayers | None = None
        self._refused = False

    @property
    def there(self) -> bool:
        """Whether to compile."""
        if self._layers is None and not self._refused:
            if (reason := refusal()) is None:
                self._layers = CompiledLayers()
            else:
                self._give_up(reason)
        return not self._refused

    def hidden(self, tokens: int, run: Callable[[CompiledLayers], Tensor]) -> Tensor | None:
        """What ``run`` makes with the layers: final hidden states [T, C] of so many tokens. None if they cannot be
        compiled."""
        if not self.there:
            return None
        assert self._layers is not None
        try:
            return run(self._layers)
        except Exception as error:
            from torch._dynamo.exc import TorchDynamoException  # known by now

            if not isinstance(error, TorchDynamoException):
                raise
            self._give_up(f"{type(error).__name__} for {tokens} tokens: {str(error).strip().splitlines()[0]}")
            return None

    def _give_up(self, reason: str) -> None:
        self._refused = True
        _say_once(reason)
