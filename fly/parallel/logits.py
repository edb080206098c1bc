"""Logits that are divided among ranks by vocabulary, and gathered only if an operation needs all of them.

To select positions, ranks exchange nothing. For the reductions of ``fly.ops`` (argmax, the n largest, one token's
logit, the mass of all) they exchange a few numbers per position. Every other operation first gathers the positions
selected so far. Knows nothing of policies.

Shape legend: N positions, V vocabulary, W a rank's part of it, M the largest of all ranks, "..." any leading
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fly.ops import Top, vocabulary
from fly.ops.partial import ATTRIBUTES, at_index
from fly.parallel.ranks import Ranks

__all__ = ["VocabularyShards"]


class VocabularyShards(Tensor):
    """A tensor [..., V] whose last dimension is divided evenly among ranks; this rank holds ``shard`` [..., W].

    It has no memory of its own. So an operation that this class does not know gathers or fails, but never gives a wrong
    result.
    """

    shard: Tensor
    ranks: Ranks
    whole: Tensor | None

    @staticmethod
    def __new__(cls, shard: Tensor, ranks: Ranks) -> VocabularyShards:
        shape = (*shard.shape[:-1], shard.shape[-1] * ranks.size)
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=shard.dtype, device=shard.device)
        tensor.shard = shard
        tensor.ranks = ranks
        tensor.whole = None
        return tensor

    def gathered(self) -> Tensor:
        """Gather all ranks' parts: a plain tensor [..., V]. A collective."""
        if self.whole is None:
            self.whole = self.ranks.join(self.shard)
        return self.whole

    def like(self, change: Callable[[Tensor], Tensor]) -> VocabularyShards:
        """Apply ``change`` to every rank's part."""
        return VocabularyShards(change(self.shard), self.ranks)

    @property
    def start(self) -> int:
        """The first token of this rank's part."""
        return self.ranks.rank * self.shard.shape[-1]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs or {})
        on_shards = _ON_SHARDS.get(function)
        if on_shards is not None and isinstance(args[0], VocabularyShards) and args[0].whole is None:
            result = on_shards(*args, **kwargs or {})
            if result is not NotImplemented:
                return result
        return cls.__torch_dispatch__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the gathered tensor."""
        args, kwargs = tree_map(lambda x: x.gathered() if isinstance(x, VocabularyShards) else x, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"VocabularyShards({list(self.shape)}, {self.start} to {self.start + self.shard.shape[-1]} here)"


def _at(x: VocabularyShards, index: Any) -> Any:
    return at_index(x.dim(), index, x.like, _pick)


# A view that does not change the vocabulary's dimension is taken of each rank's part.


def _unless_last(x: VocabularyShards, dim: int, change: Callable[[Tensor], Tensor]) -> Any:
    return NotImplemented if dim % x.dim() == x.dim() - 1 else x.like(change)


def _flatten(x: VocabularyShards, start_dim: int = 0, end_dim: int = -1) -> Any:
    return _unless_last(x, end_dim, lambda shard: shard.flatten(start_dim, end_dim))


def _unflatten(x: VocabularyShards, dim: int, sizes: Any) -> Any:
    return _unless_last(x, dim, lambda shard: shard.unflatten(dim, sizes))


def _unsqueeze(x: VocabularyShards, dim: int) -> Any:
    return NotImplemented if dim in (-1, x.dim()) else x.like(lambda shard: shard.unsqueeze(dim))


def _expand(x: VocabularyShards, *sizes: int) -> Any:
    return NotImplemented if sizes[-1] not in (-1, x.shape[-1]) else x.like(lambda shard: shard.expand(*sizes[:-1], -1))


def _unbind(x: VocabularyShards, dim: int = 0) -> Any:
    if dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return tuple(VocabularyShards(shard, x.ranks) for shard in x.shard.unbind(dim))


# For a reduction over the vocabulary, ranks exchange the results for their parts.


def _amax(x: VocabularyShards, dim: Any = (), keepdim: bool = False) -> Any:
    if dim not in (-1, x.dim() - 1):
        return NotImplemented
    return x.ranks.max_(x.shard.amax(-1, keepdim=keepdim))


def _top(x: VocabularyShards, n: int) -> Top:
    """Return the n largest values, which are among the n largest of each rank. If n is 1, the lowest index is first
    among equal values. Values and indices are gathered as one tensor of float64, which holds both exactly.
    """
    if n == 1:  # topk does not say which of equal values comes first; argmax does
        indices = vocabulary.argmax(x.shard).unsqueeze(-1)
        values = x.shard.gather(-1, indices)
    else:
        values, indices = vocabulary.top(x.shard, n)
    pairs = x.ranks.gather(torch.stack([values.double(), (indices + x.start).double()]))
    values_NM, indices_NM = (torch.cat(pairs[:, i].unbind(0), dim=-1) for i in (0, 1))
    if n == 1:
        place = (values_NM == values_NM.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1, keepdim=True)
    else:
        place = values_NM.topk(min(n, values_NM.shape[-1]), dim=-1).indices
    return Top(values_NM.gather(-1, place).to(x.dtype), indices_NM.gather(-1, place).long())


def _pick(x: VocabularyShards, index: Tensor) -> Tensor:
    """Sum over ranks: the rank that holds the token adds its logit, the others add 0. So the sum is exact."""
    local = index - x.start
    is_local = (local >= 0) & (local < x.shard.shape[-1])
    values = vocabulary.pick(x.shard, local.masked_fill(~is_local, 0))
    return x.ranks.sum_(values.masked_fill_(~is_local, 0.0))


def _log_mass(
    x: VocabularyShards,
    peak_N: Tensor,
    temperature_N: Tensor | None = None,
    least_N: Tensor | None = None,
    at_N: Tensor | None = None,
) -> Tensor:
    shard_NW = x.shard if at_N is None else x.shard[at_N]
    scaled_NW = shard_NW - peak_N.unsqueeze(1)
    if temperature_N is not None:
        scaled_NW /= temperature_N.unsqueeze(1)
    if least_N is not None:
        scaled_NW.masked_fill_(shard_NW < least_N.unsqueeze(1), -torch.inf)
    return x.ranks.gather(scaled_NW.logsumexp(-1)).logsumexp(0)


_ON_SHARDS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__getitem__: _at,
    Tensor.flatten: _flatten,
    Tensor.unflatten: _unflatten,
    Tensor.unsqueeze: _unsqueeze,
    Tensor.expand: _expand,
    Tensor.float: lambda x: x.like(Tensor.float),
    Tensor.unbind: _unbind,
    Tensor.amax: _amax,
    vocabulary.argmax: lambda x: _top(x, 1).indices.squeeze(-1),
    vocabulary.top: _top,
    vocabulary.pick: _pick,
    vocabulary.nan_at: lambda x, index: torch.zeros_like(index, dtype=torch.bool),
    vocabulary.log_mass: _log_mass,
}
