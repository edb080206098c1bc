"""Which speculation a request may ask for. Knows nothing of HTTP or engines.

Policies in requests are untrusted: they may combine the rules that the operator enabled, and never import code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fly.policies import AcceptancePolicy, Exact, Promise, condition_types, parse_policy, policy_types
from fly.policies.registry import PRESETS, read_policy
from fly.types import Guarantee

__all__ = ["Rules", "Speculation"]

_LONGEST = 2000  # most characters of a policy in a request (about a hundred conditions)


@dataclass(frozen=True)
class Speculation:
    """How one request speculates."""

    policy: AcceptancePolicy
    k: int
    draft: str  # "none" without a draft
    promise: Promise  # of the policy, on this model

    def as_dict(self) -> dict[str, Any]:
        """Return the form that answers show. ``guarantee`` is what the policy promises about the distribution of the
        text."""
        guarantee, bound = self.promise
        return {
            "policy": str(self.policy),
            "guarantee": guarantee.value,
            "bound": None if bound is None else str(bound),
            "k": self.k,
            "draft": self.draft,
        }


class Rules:
    """The server's default speculation, and what requests may change.

    Args:
        policy, k, draft: defaults of requests. ``draft`` is the draft's text, "none" if there is none.
        among: names of the drafts if several are loaded (``choose(...)``). Requests choose one of them; the first is
            the default.
        enabled: policies that requests may use. A rule's name (``fly``, ``entropy``) enables it with any parameters; a
            whole policy (``fly(theta=0.3) & after(2)``, ``my_rules:Mine``) or a preset (``fly.paper``) enables just
            that. None enables every installed rule. ``exact`` and the default policy are always enabled.
        max_k: upper limit of drafted tokens per round; None is 64, or ``k`` if that is more.
        require_lossless: whether to refuse policies that are not lossless.
        promise: returns what a policy promises on the model (``Executor.promise``).

    Raises:
        ValueError: an entry is not a rule or policy, the default policy is not lossless although it has to be, or ``k``
            is above ``max_k``.
    """

    def __init__(
        self,
        policy: AcceptancePolicy,
        k: int,
        draft: str,
        enabled: tuple[str, ...] | None = None,
        max_k: int | None = None,
        require_lossless: bool = False,
        among: Sequence[str] = (),
        promise: Callable[[AcceptancePolicy], Promise] = Promise.of,
    ) -> None:
        self.policy = policy
        self.k = k
        self.draft = among[0] if among else draft
        self.drafts = list(dict.fromkeys([*(among or [draft]), "none"]))  # drafts that requests may name
        self.promise = promise
        self.max_k, self.require_lossless = max(64, k) if max_k is None else max_k, require_lossless
        if k > self.max_k:
            raise ValueError(f"k {k} is the default of requests and above max_k {max_k}; lower --k as well")
        self._by_text: dict[str, AcceptancePolicy] = {_squeeze(str(policy)): policy}
        installed = {**policy_types(), **condition_types()}
        self.names = sorted(installed) if enabled is None else ["exact"]
        for entry in enabled or ():
            if entry in installed:
                self.names.append(entry)
            else:
                self._by_text[_squeeze(entry)] = parse_policy(entry, trusted=True)
        if enabled is None:
            self._by_text |= {name: make() for name, make in PRESETS.items()}
        self._check_promise(policy)

    @property
    def choices(self) -> list[str]:
        """Rules, policies and presets that requests may name."""
        return list(dict.fromkeys([*self.names, *map(str, self._by_text)]))

    def choose(
        self,
        policy: str | Mapping[str, Any] | None = None,
        k: int | None = None,
        draft: str | None = None,
        off: bool = False,
    ) -> Speculation:
        """Return the speculation that a request asks for; None takes the default. Raises ``ValueError`` if something is
        not allowed. The message starts with the field's name, and lists the choices."""
        if draft is not None and draft not in self.drafts:
            raise ValueError(f"draft: {draft!r} is not enabled here; choices: {self.drafts}")
        if k is not None and not 0 <= k <= self.max_k:
            raise ValueError(f"k: {k} is not in 0..{self.max_k}, which this server allows")
        if k and "none" in (draft, self.draft):
            raise ValueError(f"k: {k} tokens cannot be drafted without a draft")
        if off:
            if options := [n for n, v in (("policy", policy), ("k", k), ("draft", draft)) if v is not None]:
                raise ValueError(f"off: true leaves nothing that {', '.join(options)} could change")
            return Speculation(Exact(), 0, "none", self.promise(Exact()))
        rule = self.policy if policy is None else self._read(policy)
        chosen = (self.k if k is None else k) if (draft or self.draft) != "none" else 0
        return Speculation(rule, chosen, (draft or self.draft) if chosen else "none", self.promise(rule))

    def _read(self, source: str | Mapping[str, Any]) -> AcceptancePolicy:
        if isinstance(source, str) and (known_policy := self._by_text.get(_squeeze(source))) is not None:
            return self._check_promise(known_policy)
        size = len(source if isinstance(source, str) else json.dumps(source))
        if size > _LONGEST:
            raise ValueError(f"policy: {size} characters; at most {_LONGEST} are read")
        try:
            rule, rule_names = read_policy(source)
        except (RecursionError, MemoryError, TypeError, OverflowError) as error:
            raise ValueError(f"policy: cannot be read: {error}") from None
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None
        if refused := sorted(rule_names - {*self.names, *self._by_text}):
            raise ValueError(f"policy: {', '.join(refused)} not enabled here; choices: {self.choices}")
        return self._check_promise(rule)

    def _check_promise(self, rule: AcceptancePolicy) -> AcceptancePolicy:
        if self.require_lossless and (guarantee := self.promise(rule).guarantee) is not Guarantee.LOSSLESS:
            raise ValueError(
                f"policy: {str(rule)!r} is {guarantee.value} on this model; this server requires lossless ones"
            )
        return rule


def _squeeze(text: str) -> str:
    return "".join(text.split())
