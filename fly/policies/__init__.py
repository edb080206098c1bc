"""Acceptance policies: which drafted tokens may stand, and the conditions they are composed of."""

from fly.policies.base import AcceptancePolicy, Bound, Relaxed
from fly.policies.conditions import AgreeingWindow, Block, Condition, ControlToken, EntropyGate, Room
from fly.policies.gates import BiLD, Fuzzy, LogMargin, RelaxedTopN, TopRatio, Typical
from fly.policies.loosened import AdditiveSlack, Cactus, Cascade, Ears, Mentored, Thresholds
from fly.policies.lossless import BlockVerification, ExactSample
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
from fly.policies.verification import verify

__all__ = [
    "AboveContext",
    "AcceptancePolicy",
    "AdditiveSlack",
    "AfterTokens",
    "AgreeingWindow",
    "AtMost",
    "BiLD",
    "Block",
    "BlockVerification",
    "Bound",
    "Budget",
    "Cactus",
    "Cascade",
    "Condition",
    "ControlToken",
    "Ears",
    "EntropyGate",
    "Exact",
    "ExactSample",
    "FLy",
    "Fuzzy",
    "LogMargin",
    "LossySampling",
    "Mentored",
    "NatsBudget",
    "Phase",
    "PolicyField",
    "Relaxed",
    "RelaxedTopN",
    "Room",
    "Thresholds",
    "TopRatio",
    "Typical",
    "condition_types",
    "dump_policy",
    "load_policy",
    "parse_policy",
    "policy_types",
    "verify",
]
