"""Acceptance policies: which drafted tokens may stand, and the conditions they are composed of."""

from fly.policies.base import AcceptancePolicy, Bound, Relaxed, verify
from fly.policies.conditions import AgreeingWindow, Block, Condition, ControlToken, EntropyGate, Room
from fly.policies.rules import Exact, FLy, LossySampling
from fly.policies.text import parse_policy

__all__ = [
    "AcceptancePolicy",
    "AgreeingWindow",
    "Block",
    "Bound",
    "Condition",
    "ControlToken",
    "EntropyGate",
    "Exact",
    "FLy",
    "LossySampling",
    "Relaxed",
    "Room",
    "parse_policy",
    "verify",
]
