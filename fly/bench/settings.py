"""The decoding settings that benches compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fly.eval import Setting
from fly.llm import LLM
from fly.policies import AcceptancePolicy, Exact
from fly.policies.base import Relaxed

__all__ = ["rule_name", "settings_of"]


def rule_name(rule: AcceptancePolicy) -> str:
    """A short name for a table: without parameters, and of what is composed only that there is more."""
    return f"{rule.base.name} | …" if isinstance(rule, Relaxed) else rule.name


def settings_of(plain: LLM, fast: LLM, k: int, rules: Sequence[AcceptancePolicy]) -> list[Setting]:
    """Autoregressive decoding of ``plain``; of ``fast`` exact speculation, and each rule that is another."""
    different = [rule for number, rule in enumerate(rules) if rule not in rules[:number]]
    named = [Setting(rule_name(rule), fast, k, rule) for rule in different if rule != Exact()]
    names = [setting.name for setting in named]
    named = [replace(each, name=str(each.policy)) if names.count(each.name) > 1 else each for each in named]
    return [Setting("autoregressive", plain, 0), Setting("exact", fast, k), *named]
