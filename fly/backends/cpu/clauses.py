"""Relaxations that compiled code can evaluate, as plain values. Knows nothing of models, caches or the engine."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fly.policies.conditions import AgreeingWindow, All, Condition, ControlToken, EntropyGate, Not, Room

__all__ = ["Clause", "clauses_of"]

_MOST = 31  # a bit each
_FAR = 2**30  # tokens, more than any draft has


class Clause(NamedTuple):
    """A condition: ``tokens`` of a window or a room, ``theta`` of an entropy gate."""

    kind: Literal["entropy", "window", "room", "control"]
    negated: bool
    tokens: int = 0
    theta: float = 0.0


def clauses_of(relaxation: Condition) -> list[Clause] | None:
    """What a relaxation says at temperature 0, in the order of ``relaxation.clauses``: one condition, or several that
    must all hold, each as it is or negated. None for any other, which Python has to evaluate."""
    parts = _parts(relaxation)
    if len(parts) > _MOST:
        return None
    made = [_clause(part.part, True) if type(part) is Not else _clause(part, False) for part in parts]
    known = [clause for clause in made if clause is not None]
    return known if len(known) == len(made) else None


def _parts(condition: Condition) -> list[Condition]:
    if type(condition) is not All:
        return [condition]
    return [leaf for part in condition.parts for leaf in _parts(part)]


def _clause(condition: Condition, negated: bool) -> Clause | None:
    """None if it is no single condition, or of an unknown class: a subclass may decide differently."""
    if type(condition) not in (EntropyGate, AgreeingWindow, Room, ControlToken):
        return None
    if isinstance(condition, EntropyGate):
        return Clause("entropy", negated, theta=condition.theta) if condition.entropy == "top3" else None
    if isinstance(condition, AgreeingWindow):
        return Clause("window", negated, min(condition.window, _FAR))
    if isinstance(condition, Room):
        return Clause("room", negated, min(condition.hold, _FAR))
    return Clause("control", negated)
