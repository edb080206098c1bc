"""Logits of which only the likeliest tokens, the mass and the entropy are known, as in a recording.

Rules use such a tensor like any other. The functions of ``fly.ops``, a softmax, and picking positions are answered from
what is known; anything that needs the whole vocabulary raises ``Unknown``.

Shape legend: V vocabulary, n likeliest tokens, "..." any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fly.ops import Top, argmax, entropy, log_mass, nan_at, pick, top
from fly.ops.partial import ATTRIBUTES, at_index

__all__ = ["Known", "Unknown"]


class Unknown(ValueError):
    """A recording does not hold what a rule needs."""


class Known(Tensor):
    """A tensor [..., V] of which ``n`` likeliest values are known, and that of one token more.

    Args:
        size: V.
        ids: [..., n + 1] int64, the likeliest tokens, likeliest first, and the one more (which may be one of them).
        values: [..., n + 1] their logits, log-probabilities or probabilities.
        rest: [...] the value of any other token: what is left of the mass, evenly spread.
        mass: [...] of logits, ln of the sum of exp(logit - largest).
        nats: [...] the entropy.
        kind: what the values are.
    """

    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    kind: str

    @staticmethod
    def __new__(
        cls, size: int, ids: Tensor, values: Tensor, rest: Tensor, mass: Tensor, nats: Tensor, kind: str = "logits"
    ) -> Known:
        made = Tensor._make_wrapper_subclass(cls, (*ids.shape[:-1], size), dtype=values.dtype, device=values.device)
        made.parts, made.kind = (ids, values, rest, mass, nats), kind
        return made

    @staticmethod
    def of(size: int, ids: Tensor, logits: Tensor, mass: Tensor, nats: Tensor) -> Known:
        """Logits, what the others have being spread evenly (and none more than the least known)."""
        peak, known = logits[..., :1], logits[..., :-1]
        again = (ids[..., -1:] == ids[..., :-1]).any(-1)  # the one more is one of them
        shares = (logits - peak).exp()
        left = mass.exp() - shares[..., :-1].sum(-1) - shares[..., -1].masked_fill(again, 0.0)
        others = (size - known.shape[-1] - (~again).long()).clamp_min(1)
        left = left.clamp_min(torch.finfo(mass.dtype).tiny)
        rest = (peak.squeeze(-1) + (left / others).log()).minimum(known[..., -1])
        return Known(size, ids, logits, rest, mass, nats)

    def like(self, change: Callable[[Tensor], Tensor]) -> Known:
        """The same of every part."""
        ids, values, rest, mass, nats = map(change, self.parts)
        return Known(self.shape[-1], ids, values, rest, mass, nats, self.kind)

    def scaled(self, shift: Tensor, kind: str) -> Known:
        """Other values: logits less ``shift`` [...], and of probabilities their exponential."""
        ids, values, rest, mass, nats = self.parts
        values, rest = values - shift.unsqueeze(-1), rest - shift
        if kind == "probs":
            values, rest = values.exp(), rest.exp()
        return Known(self.shape[-1], ids, values, rest, mass, nats, kind)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        found = NotImplemented
        if args and isinstance(args[0], Known) and (own := _OWN.get(function)) is not None:
            found = own(*args, **kwargs)
        return cls.__torch_dispatch__(function, types) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.__name__.strip("_")
        raise Unknown(f"it needs a whole distribution ('{name}'), of which the likeliest tokens alone are recorded")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Known({self.kind}, {list(self.shape)}, {self.parts[0].shape[-1] - 1} likeliest)"


def _at(x: Known, index: Any) -> Any:
    return at_index(x.dim(), index, x.like, _pick)


def _flatten(x: Known, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not 0 <= start_dim <= end_dim < x.dim() - 1:
        return NotImplemented
    return x.like(lambda part: part.flatten(start_dim, end_dim))


def _unflatten(x: Known, dim: int, sizes: Any) -> Any:
    return x.like(lambda part: part.unflatten(dim, sizes)) if 0 <= dim < x.dim() - 1 else NotImplemented


def _pick(x: Known, index: Tensor) -> Tensor:
    ids, values, rest, _, _ = x.parts
    same = ids == index.unsqueeze(-1)
    found = values.gather(-1, same.int().argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where(same.any(-1), found, rest)


def _top(x: Known, n: int) -> Top:
    ids, values, *_ = x.parts
    if n > ids.shape[-1] - 1:
        raise Unknown(f"it needs the {n} likeliest tokens, of which {ids.shape[-1] - 1} are recorded")
    return Top(values[..., :n], ids[..., :n])


def _log_mass(
    x: Known,
    peak_N: Tensor,
    temperature_N: Tensor | None = None,
    least_N: Tensor | None = None,
    at_N: Tensor | None = None,
) -> Any:
    if x.kind != "logits" or temperature_N is not None or least_N is not None:
        return NotImplemented
    values, mass = x.parts[1], x.parts[3]
    total = mass + values[..., 0]
    return (total if at_N is None else total[at_N]) - peak_N


def _softmax(kind: str) -> Callable[..., Any]:
    def change(x: Known, dim: int, *_: Any, **__: Any) -> Any:
        if x.kind != "logits" or dim not in (-1, x.dim() - 1):
            return NotImplemented
        values, mass = x.parts[1], x.parts[3]
        return x.scaled(values[..., 0] + mass, kind)

    return change


def _exp(x: Known) -> Any:
    return x.scaled(torch.zeros_like(x.parts[2]), "probs") if x.kind == "log_probs" else NotImplemented


def _amax(x: Known, dim: Any = (), keepdim: bool = False) -> Any:
    if dim not in (-1, x.dim() - 1):
        return NotImplemented
    return x.parts[1][..., :1] if keepdim else x.parts[1][..., 0]


_SOFT, _LOG = _softmax("probs"), _softmax("log_probs")
_OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__getitem__: _at,
    Tensor.flatten: _flatten,
    Tensor.unflatten: _unflatten,
    Tensor.float: lambda x: x,
    Tensor.softmax: _SOFT,
    torch.softmax: _SOFT,
    torch.nn.functional.softmax: _SOFT,
    Tensor.log_softmax: _LOG,
    torch.log_softmax: _LOG,
    torch.nn.functional.log_softmax: _LOG,
    Tensor.exp: _exp,
    Tensor.amax: _amax,
    torch.amax: _amax,
    argmax: lambda x: x.parts[0][..., 0],
    top: _top,
    pick: _pick,
    nan_at: lambda x, index: torch.zeros_like(index, dtype=torch.bool),
    log_mass: _log_mass,
    entropy: lambda x: x.parts[4] if x.kind == "probs" else NotImplemented,
}
