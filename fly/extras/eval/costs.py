"""What speculation costs in a run, and how fast a rule would be if its decisions took no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Costs", "measured_costs", "neutral_speed"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Costs:
    """What speculation costs with one draft at one length: ``c`` is the time to draft a token, and ``v`` the time of a
    verification. Both are relative to the target's forward of one token."""

    c: float
    v: float


def measured_costs(speculative: Sequence[Record], autoregressive: Sequence[Record]) -> Costs | None:
    """Compute the costs from the records of exact speculation and of autoregressive decoding. Return None if one of
    the two decoded nothing, or a server made them, which does not tell the time of its models."""
    if any("target" not in record["seconds"] for record in (*speculative, *autoregressive)):
        return None

    def total(records: Sequence[Record], name: str) -> float:
        return sum(record[name] if name in record else record["seconds"][name] for record in records)

    rounds, drafted = total(speculative, "rounds"), total(speculative, "drafted")
    forwards = total(autoregressive, "rounds")
    base = total(autoregressive, "target") / max(forwards, 1)  # seconds of a forward of one token
    if not (rounds and drafted and base):
        return None
    return Costs(total(speculative, "draft") / drafted / base, total(speculative, "target") / rounds / base)


def neutral_speed(tau: float, drafted: float, costs: Costs) -> float:
    """Return the speed, relative to autoregressive decoding, that a rule would have if decisions took no time:

        S = τ / (K̄·c + v)

    τ is the number of tokens per round, and K̄ the number of drafted tokens per round (``drafted``). Exact speculation
    in the same run, with the same draft and length, measures c and v. S separates a rule from its implementation: the
    measured speed is lower, because it includes the time of decisions, of prompts, and of all else that a round does
    besides running the models. Source: Leviathan et al. 2023, theorem 3.8, where v is 1.
    """
    return tau / (drafted * costs.c + costs.v)
