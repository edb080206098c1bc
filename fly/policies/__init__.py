"""Acceptance policies, which decide which drafted tokens to keep, and the conditions that they consist of."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.policies.base import (
        AcceptancePolicy,
        Bound,
        ExactCore,
        Promise,
        Relaxed,
        exact_accept_probs,
        longest_prefix,
        verdict_of,
    )
    from fly.policies.conditions import AgreeingWindow, Block, Condition, ControlToken, EntropyGate, Room
    from fly.policies.formulas import (
        draft_log_probs,
        drafted,
        gate_distribution,
        gate_probs,
        matches,
        possible,
        raw_log_probs,
    )
    from fly.policies.gates import BiLD, Fuzzy, LogMargin, Near, Regret, RelaxedTopN, SuffixRegret, TopRatio, Typical
    from fly.policies.loosened import AdditiveSlack, Cactus, Cascade, Ears, Ensemble, Mentored, Thresholds
    from fly.policies.lossless import BlockVerification, Exact, ExactSample
    from fly.policies.registry import PolicyField, condition_types, dump_policy, load_policy, parse_policy, policy_types
    from fly.policies.rules import FLy, LossySampling, asd
    from fly.policies.schedule import (
        AboveContext,
        AfterTokens,
        AtMost,
        Budget,
        CostBudget,
        NatsBudget,
        Phase,
        RegretBudget,
    )
    from fly.policies.texts import TextCondition, TokenText
    from fly.policies.verification import verify
else:
    __getattr__, __dir__ = find_late(__name__)

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
    "CostBudget",
    "Ears",
    "Ensemble",
    "EntropyGate",
    "Exact",
    "ExactCore",
    "ExactSample",
    "FLy",
    "Fuzzy",
    "LogMargin",
    "LossySampling",
    "Mentored",
    "NatsBudget",
    "Near",
    "Phase",
    "PolicyField",
    "Promise",
    "Regret",
    "RegretBudget",
    "Relaxed",
    "RelaxedTopN",
    "Room",
    "SuffixRegret",
    "TextCondition",
    "Thresholds",
    "TokenText",
    "TopRatio",
    "Typical",
    "asd",
    "condition_types",
    "draft_log_probs",
    "drafted",
    "dump_policy",
    "exact_accept_probs",
    "gate_distribution",
    "gate_probs",
    "load_policy",
    "longest_prefix",
    "matches",
    "parse_policy",
    "policy_types",
    "possible",
    "raw_log_probs",
    "verdict_of",
    "verify",
]
