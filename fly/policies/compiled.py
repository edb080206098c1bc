"""Relaxations that compiled code can ask itself. Knows nothing of models, caches or the engine."""

from __future__ import annotations

import ctypes

from fly.kernels.library import Clause
from fly.policies.conditions import AgreeingWindow, All, Condition, ControlToken, EntropyGate, Not, Room

__all__ = ["clauses_of"]

_MOST = 31  # a bit each
_FAR = 2**30  # tokens, more than any draft has


def clauses_of(relaxation: Condition) -> ctypes.Array[Clause] | None:
    """What ``CompiledLlama.rounds`` takes of a relaxation at temperature 0, in the order of ``relaxation.clauses``: one
    condition, or several that must all hold, each as it is or negated. None for any other, which Python has to ask."""
    parts = _parts(relaxation)
    if len(parts) > _MOST:
        return None
    made = [_clause(part.part, True) if type(part) is Not else _clause(part, False) for part in parts]
    known = [clause for clause in made if clause is not None]
    return (Clause * len(known))(*known) if len(known) == len(made) else None


def _parts(condition: Condition) -> list[Condition]:
    if type(condition) is not All:
        return [condition]
    return [leaf for part in condition.parts for leaf in _parts(part)]


def _clause(condition: Condition, negated: bool) -> Clause | None:
    """None for what is no leaf, or somebody's own: a subclass may say something else."""
    if type(condition) not in (EntropyGate, AgreeingWindow, Room, ControlToken):
        return None
    if isinstance(condition, EntropyGate):
        return Clause(Clause.ENTROPY, negated, 0, condition.theta) if condition.entropy == "top3" else None
    if isinstance(condition, AgreeingWindow):
        return Clause(Clause.WINDOW, negated, min(condition.window, _FAR), 0)
    if isinstance(condition, Room):
        return Clause(Clause.ROOM, negated, min(condition.hold, _FAR), 0)
    return Clause(Clause.CONTROL, negated, 0, 0)
