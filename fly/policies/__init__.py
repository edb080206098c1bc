"""Acceptance policies: which drafted tokens may stand, and the conditions they are composed of."""

from fly.policies.base import AcceptancePolicy, Bound, Relaxed, verify
from fly.policies.conditions import AgreeingWindow, Block, Condition, ControlToken, EntropyGate, Room
from fly.policies.registry import (
    PolicyField,
    condition_types,
    dump_policy,
    load_policy,
    parse_policy,
    policy_types,
)
from fly.policies.rules import Exact, FLy, LossySampling
from fly.policies.schedule import AboveContext, AfterTokens, AtMost, Budget, NatsBudget, Phase

__all__ = [
    "AboveContext",
    "AcceptancePolicy",
    "AfterTokens",
    "AgreeingWindow",
    "AtMost",
    "Block",
    "Bound",
    "Budget",
    "Condition",
    "ControlToken",
    "EntropyGate",
    "Exact",
    "FLy",
    "LossySampling",
    "NatsBudget",
    "Phase",
    "PolicyField",
    "Relaxed",
    "Room",
    "condition_types",
    "dump_policy",
    "load_policy",
    "parse_policy",
    "policy_types",
    "verify",
]
