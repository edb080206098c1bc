"""Logits that are known only in part, as in a recording: the most likely tokens, the mass and the entropy.

Rules use such a tensor like any other. The known parts are enough for the functions of ``fly.ops``, and for torch's own
functions that do the same: a softmax, the most likely tokens, values at positions and tokens, how many tokens are more
likely, and the usual ways to write an entropy. Anything that needs the whole vocabulary raises ``Unknown``.

Shape legend: V vocabulary, n most likely tokens, N used positions, "..." any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fly.ops import Top, argmax, entropy, log_mass, nan_at, one_hot, pick, top
from fly.ops.partial import ATTRIBUTES, at_index

__all__ = ["Known", "Unknown"]


class Unknown(ValueError):
    """A recording lacks what a replay needs. ``reason`` says what. ``rule`` is the rule that needs it, or None."""

    def __init__(self, reason: str, rule: object = None) -> None:
        super().__init__(reason if rule is None else f"'{rule}' cannot be replayed: {reason}")
        self.reason = reason
        self.rule = rule


class Known(Tensor):
    """A tensor [..., V] with known values for n + 1 tokens: the n most likely ones, and one more.

    Args:
        size: V.
        ids: [..., n + 1] int64, the n most likely tokens, in order, then the extra token (which may be one of them).
        values: [..., n + 1] the values of these tokens.
        rest: [...] the value of every other token. Logits spread the remaining mass evenly over these.
        mass: [...] ln of the sum of exp(logit - largest logit).
        nats: [...] the entropy.
        kind: what the values are: ``logits``, ``probs``, ``log_probs``, ``bool``, or probs times log_probs (``p ln p``
            or ``-p ln p``, whose sums are known from the entropy).
    """

    parts: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    kind: str

    @staticmethod
    def __new__(
        cls, size: int, ids: Tensor, values: Tensor, rest: Tensor, mass: Tensor, nats: Tensor, kind: str = "logits"
    ) -> Known:
        wrapper = Tensor._make_wrapper_subclass(cls, (*ids.shape[:-1], size), dtype=values.dtype, device=values.device)
        wrapper.parts, wrapper.kind = (ids, values, rest, mass, nats), kind
        return wrapper

    @staticmethod
    def of(size: int, ids: Tensor, logits: Tensor, mass: Tensor, nats: Tensor) -> Known:
        """Make known logits. The mass of the other tokens is spread evenly over them, but none gets a logit above the
        smallest known one."""
        peak, known = logits[..., :1], logits[..., :-1]
        repeated = (ids[..., -1:] == ids[..., :-1]).any(-1)  # the extra token is one of the n
        shares = (logits - peak).exp()
        remaining = mass.exp() - shares[..., :-1].sum(-1) - shares[..., -1].masked_fill(repeated, 0.0)
        other_count = (size - known.shape[-1] - (~repeated).long()).clamp_min(1)
        remaining = remaining.clamp_min(torch.finfo(mass.dtype).tiny)
        rest = (peak.squeeze(-1) + (remaining / other_count).log()).minimum(known[..., -1])
        return Known(size, ids, logits, rest, mass, nats)

    def like(self, change: Callable[[Tensor], Tensor]) -> Known:
        """Apply ``change`` to every part."""
        ids, values, rest, mass, nats = map(change, self.parts)
        return Known(self.shape[-1], ids, values, rest, mass, nats, self.kind)

    def scaled(self, shift: Tensor, kind: str) -> Known:
        """Subtract ``shift`` [...] from logits, to get values of another kind. For probabilities, also take the
        exponential."""
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
        result = NotImplemented
        if args and isinstance(args[0], Known) and (override := _OWN.get(function)) is not None:
            result = override(*args, **kwargs)
        return cls.__torch_dispatch__(function, types) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no cls
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.__name__.strip("_")
        raise Unknown(f"it needs a whole distribution ('{name}'), of which only the most likely tokens are recorded")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Known({self.kind}, {list(self.shape)}, {self.parts[0].shape[-1] - 1} known)"


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
    picked = values.gather(-1, same.int().argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where(same.any(-1), picked, rest)


def _gather(x: Known, dim: int, index: Tensor, **_: Any) -> Any:
    if not _last(x, dim):
        return NotImplemented
    return torch.stack([_pick(x, index_N) for index_N in index.unbind(-1)], -1)


def _top(x: Known, n: int) -> Top:
    ids, values, *_ = x.parts
    if n > ids.shape[-1] - 1:
        raise Unknown(f"it needs the {n} most likely tokens, of which {ids.shape[-1] - 1} are recorded")
    return Top(values[..., :n], ids[..., :n])


def _topk(x: Known, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return torch.return_types.topk(_top(x, k)) if largest and _last(x, dim) else NotImplemented


def _one_hot(x: Known, tokens: Tensor) -> Any:
    ids, values, rest, mass, nats = x.parts
    if not torch.equal(tokens, ids[..., 0]):  # works for the most likely tokens only
        return NotImplemented
    certain = (ids == tokens.unsqueeze(-1)).to(values.dtype)
    return Known(x.shape[-1], ids, certain, rest * 0, mass * 0, nats * 0, "probs")


def _compared(compare: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
    """Make a comparison with a single number, or with one number at each position."""

    def answer(x: Known, other: Any) -> Any:
        by_place = isinstance(other, Tensor) and other.dim() > 0
        if isinstance(other, Known) or (by_place and (other.dim() != x.dim() or other.shape[-1] != 1)):
            return NotImplemented
        ids, values, rest, mass, nats = x.parts
        below = compare(rest, other.squeeze(-1) if by_place else other)
        return Known(x.shape[-1], ids, compare(values, other), below, mass, nats, "bool")

    return answer


def _sum(x: Known, dim: Any = None, keepdim: bool = False) -> Any:
    if keepdim or not _last(x, dim) or x.kind not in ("bool", "p ln p", "-p ln p"):
        return NotImplemented
    ids, values, rest, _, nats = x.parts
    if x.kind != "bool":
        return nats if x.kind == "-p ln p" else -nats
    is_new = (ids[..., -1:] != ids[..., :-1]).all(-1)  # whether the extra token is none of the n
    other_count = x.shape[-1] - values.shape[-1] + (~is_new).long()
    return values[..., :-1].sum(-1) + (values[..., -1] & is_new) + rest * other_count


def _changed(kind: str, to: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Make a function that maps values of ``kind`` to values of the kind ``to``."""

    def changed(x: Any, *_: Any, **__: Any) -> Any:
        if x is NotImplemented or x.kind != kind:
            return NotImplemented
        ids, values, rest, mass, nats = x.parts
        return Known(x.shape[-1], ids, change(values), change(rest), mass, nats, to)

    return changed


def _floored(x: Known, least: float | None = None, *, min: float | None = None) -> Any:
    """Give probabilities a tiny floor, so that logarithms can be taken."""
    floor = least if min is None else min
    if not isinstance(floor, (int, float)) or floor > 1e-6:
        return NotImplemented
    return _changed("probs", "probs", lambda part: part.clamp_min(floor))(x)


def _times_log(x: Known, other: Any) -> Any:
    """Return the product of probabilities and their own logarithms."""
    kinds = {x.kind, other.kind} if isinstance(other, Known) else set()
    if kinds != {"probs", "log_probs"} or not torch.equal(x.parts[4], other.parts[4]):
        return NotImplemented
    probs = x if x.kind == "probs" else other
    return _changed("probs", "p ln p", lambda part: part.xlogy(part))(probs)


def _xlogy(x: Known, other: Any) -> Any:
    return _times_log(x, _LOG_OF(other)) if isinstance(other, Known) and other.kind == "probs" else NotImplemented


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


def _last(x: Known, dim: Any) -> bool:
    return dim in (-1, x.dim() - 1, (-1,), [-1])


def _softmax(kind: str) -> Callable[..., Any]:
    def change(x: Known, dim: int, *_: Any, **__: Any) -> Any:
        if x.kind != "logits" or not _last(x, dim):
            return NotImplemented
        values, mass = x.parts[1], x.parts[3]
        return x.scaled(values[..., 0] + mass, kind)

    return change


def _amax(x: Known, dim: Any = (), keepdim: bool = False) -> Any:
    if not _last(x, dim):
        return NotImplemented
    return x.parts[1][..., :1] if keepdim else x.parts[1][..., 0]


def _max(x: Known, dim: Any = None, keepdim: bool = False) -> Any:
    if not _last(x, dim) or keepdim:
        return NotImplemented
    return torch.return_types.max((x.parts[1][..., 0], x.parts[0][..., 0]))


def _argmax(x: Known, dim: Any = None, keepdim: bool = False) -> Any:
    return NotImplemented if keepdim or not _last(x, dim) else x.parts[0][..., 0]


_SOFT, _LOG = _softmax("probs"), _softmax("log_probs")
_LOG_OF, _NEGATED = _changed("probs", "log_probs", torch.log), _changed("p ln p", "-p ln p", torch.neg)
# The functions above, by the names that torch gives them, wherever torch has a function of that name.
_NAMED: dict[str, Callable[..., Any]] = {
    "flatten": _flatten,
    "unflatten": _unflatten,
    "float": lambda x: x,
    "softmax": _SOFT,
    "log_softmax": _LOG,
    "exp": _changed("log_probs", "probs", torch.exp),
    "log": _LOG_OF,
    "clamp": _floored,
    "clamp_min": _floored,
    "mul": _times_log,
    "xlogy": _xlogy,
    "entr": lambda x: _NEGATED(_xlogy(x, x)),
    "neg": _NEGATED,
    "sum": _sum,
    "amax": _amax,
    "max": _max,
    "argmax": _argmax,
    "gather": _gather,
    "topk": _topk,
    **{name: _compared(getattr(torch, name)) for name in ("gt", "ge", "lt", "le")},
}
_PLACES = (Tensor, torch, torch.special, torch.nn.functional)
_OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(place, name): own for name, own in _NAMED.items() for place in _PLACES if hasattr(place, name)},
    Tensor.__getitem__: _at,
    argmax: lambda x: x.parts[0][..., 0],
    top: _top,
    pick: _pick,
    one_hot: _one_hot,
    nan_at: lambda x, index: torch.zeros_like(index, dtype=torch.bool),
    log_mass: _log_mass,
    entropy: lambda x: x.parts[4] if x.kind == "probs" else NotImplemented,
}
