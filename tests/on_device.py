"""Tensors that stand for a GPU's: whoever looks at a value makes the host wait, and that is an error here."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fly.policies.conditions import Block

__all__ = ["OnDevice", "put", "read_all_places"]


class OnDevice(Tensor):
    """A tensor as a GPU has it: to look at its value, or to copy it, the host would wait.

    A function of ``fly.ops`` is one step here: on accelerators it takes another way, without a wait.
    """

    LOOKS: ClassVar[set[Any]] = {
        getattr(Tensor, name)
        for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
    } | {torch.nonzero, torch.equal, torch.masked_select, Tensor.masked_select}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.LOOKS:
            raise AssertionError(f"the host waits for the device: {func.__name__}")
        indexing = func in (Tensor.__getitem__, Tensor.__setitem__)
        if indexing and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in _indices(args[1])):
            raise AssertionError("the host waits for the device: a mask as an index")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return tree_map(lambda x: x.as_subclass(cls) if isinstance(x, Tensor) else x, result)


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def put(tensor: Tensor) -> OnDevice:
    """Return the tensor as a GPU has it; both have the same memory."""
    return tensor.as_subclass(OnDevice)


def read_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let conditions read every place, as on an accelerator. On CPUs they list the mismatches, which would be a look at
    values."""

    def everywhere(block: Block) -> tuple[Tensor, Tensor]:
        count, longest = block.agree_BK.shape
        return torch.arange(count).repeat_interleave(longest), torch.arange(longest).repeat(count)

    monkeypatch.setattr(Block, "_read", property(everywhere))
