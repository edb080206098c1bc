"""Runs that are over: what their folders tell, without the code of the rules and drafts that they name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fly.extras.eval.plan import AUTOREGRESSIVE, Plan, WrittenPlan, WrittenWay
from fly.extras.eval.records import Records, read_records
from fly.policies import AcceptancePolicy, parse_policy

__all__ = ["Archive"]

_LABEL = re.compile(r"(?P<policy>.*?) k(?P<k>\d+)(?: (?P<draft>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Archive:
    """A run's folder, as far as it can be read without importing or loading anything.

    Attributes:
        ways: every way to decode, in the order of the plan.
        tasks: what the folder says of each task.
    """

    folder: Path
    plan: WrittenPlan
    ways: list[WrittenWay]
    tasks: dict[str, dict[str, Any]]
    records: Records

    @staticmethod
    def read(folder: str | Path) -> Archive:
        """Read a run's folder. Raises ``ValueError`` if it is no run."""
        folder = Path(folder)
        if not (folder / "plan.yaml").exists():
            missing = "there is no plan.yaml in it" if folder.is_dir() else "there is no such folder"
            raise ValueError(f"{str(folder)!r} is no run: {missing}; 'fly eval --out FOLDER' makes one")
        document = Plan.read_run(folder)
        settings = Plan.settings_of(document)
        plan = WrittenPlan.of(settings, settings.where)
        records = read_records(folder)
        ways = [WrittenWay(**each) for each in document["ways"]] if "ways" in document else _ways_of(records, plan)
        return Archive(folder, plan, ways, document["tasks"], records)

    @cached_property
    def rules(self) -> dict[str, AcceptancePolicy | ValueError]:
        """The rules by their names in ``ways``. A rule that cannot be read, for instance because its code is gone,
        stands under its text in the plan, and is the error."""
        rules: dict[str, AcceptancePolicy | ValueError] = {}
        for text in ("exact", *self.plan.policies, *(each.policy for each in self.plan.settings)):
            try:
                rule = parse_policy(text, trusted=True)
            except ValueError as error:
                rules[text] = error
            else:
                rules[str(rule)] = rule
        return rules

    def rule(self, way: WrittenWay) -> AcceptancePolicy:
        """Return the rule of a way. Raises ``ValueError`` if it cannot be read."""
        rule = self.rules.get(way.policy)
        if isinstance(rule, AcceptancePolicy):
            return rule
        errors = [str(error) for error in self.rules.values() if isinstance(error, ValueError)]
        raise ValueError("; ".join(errors) or f"policy {way.policy!r} is no rule of this run's plan")


def _ways_of(records: Records, plan: WrittenPlan) -> list[WrittenWay]:
    """Return the ways that records name, for a folder whose plan does not list them (up to version 0.3)."""
    ways: dict[str, WrittenWay] = {}
    for key, record in records.completions.items():
        label = _LABEL.fullmatch(key.way)
        if key.way in ways or (label is None and key.way != AUTOREGRESSIVE):
            continue
        policy, k, draft = ("exact", "0", "none") if label is None else label.group("policy", "k", "draft")
        ways[key.way] = WrittenWay(key.way, draft or plan.drafts[0], int(k), policy, record["guarantee"])
    return sorted(ways.values(), key=lambda way: way.drafts)  # the target alone comes first
