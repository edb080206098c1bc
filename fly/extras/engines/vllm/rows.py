"""One row of vLLM's batch with a rule of fly, and the decision on its block. Knows nothing of vLLM.

Shape legend: B rows (here one), K drafted tokens of the row, J = K + 1 places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fly.policies import AcceptancePolicy
from fly.policies.registry import load_policy
from fly.policies.verification import add_costs, decide
from fly.types import UNDECIDED, Draft, Noise, Target
from fly.vocabulary import Vocabulary

__all__ = ["Row", "read_rule"]

_LONGEST = 2000  # most characters of a rule in a request


def read_rule(extra_args: Mapping[str, Any] | None, size: int) -> AcceptancePolicy | None:
    """Read the rule in ``extra_args["fly"]``: its text, or ``{"policy": text}``. None if there is no such entry.

    ``size`` is V. A request can never import code. Raises ``ValueError`` if the text is no rule or is longer than 2000
    characters, or if the rule needs the text of tokens, which vLLM's sampler lacks.
    """
    if not extra_args or "fly" not in extra_args:
        return None
    given = extra_args["fly"]
    if isinstance(given, Mapping):
        if given.keys() != {"policy"}:
            raise ValueError(f"fly has the entries {sorted(map(str, given))}; it takes one entry, 'policy'")
        given = given["policy"]
    if not isinstance(given, str) or len(given) > _LONGEST:
        raise ValueError(f"fly: the policy must be a text of at most {_LONGEST} characters, as in 'exact | regret(2)'")
    try:
        return load_policy(given).bind(Vocabulary(size))
    except (ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(f"fly: {error}") from None


@dataclass
class Row:
    """A request while it is generated: its rule, and what its relaxed tokens cost so far."""

    rule: AcceptancePolicy
    stop_ids: frozenset[int] = frozenset()  # tokens that end the text; '~control' never excuses them
    relaxed: int = 0
    nats: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def decide(
        self,
        tokens_K: Tensor,
        logits_KV: Tensor,
        draft_KV: Tensor | None,
        bonus: int,
        temperature: float,
        prompt: list[int],
        output: list[int],
        coins_J: Tensor,
    ) -> list[int]:
        """Decide on the block. Return the tokens that it emits: the accepted ones, then a correction or the bonus.

        Args:
            tokens_K: the draft. logits_KV: the target's processed logits, already divided by the temperature.
            draft_KV: the distributions that the draft was drawn from; None if it is deterministic.
            bonus: vLLM's own sample after the whole draft. temperature: the row's; 0 is greedy.
            prompt, output: the tokens before the block. coins_J: uniforms in [0, 1).

        Raises ``ValueError`` if a NaN leaves open which token follows.
        """
        count, size = logits_KV.shape
        # vLLM has drawn the bonus already, so the distribution after the draft gives the bonus all the probability.
        last_1V = torch.full((1, size), -torch.inf, device=logits_KV.device)
        last_1V[0, bonus] = 0.0
        processed_1JV = torch.cat([logits_KV.float(), last_1V]).unsqueeze(0)
        greedy = temperature == 0
        control_V = torch.zeros(size, dtype=torch.bool, device=logits_KV.device)
        control_V[[token for token in self.stop_ids if token < size]] = True
        target = Target(
            processed_1JV if greedy else processed_1JV * temperature,
            None if greedy else processed_1JV.softmax(-1),
            control_V=control_V,
            generated_B=self._column(len(output), logits_KV, torch.int64),
            relaxed_B=self._column(self.relaxed, logits_KV, torch.int64),
            nats_B=self._column(self.nats, logits_KV),
            spent=lambda label: self._column(self.spent.get(label, 0.0), logits_KV),
            history=[[*prompt, *output]],
        )
        probs_1KV = None if greedy or draft_KV is None else draft_KV.float().unsqueeze(0)
        lengths_1 = torch.tensor([count], device=logits_KV.device)
        draft = Draft(tokens_K.long().unsqueeze(0), lengths_1, probs_1KV)
        decision = decide(self.rule, target, draft, Noise(coins_J[:count].unsqueeze(0), coins_J[count:]))[0]
        if decision.next_token == UNDECIDED:
            raise ValueError(f"{self.rule}: a NaN leaves open which token follows")
        # For budgets, add up what this block's relaxed tokens cost.
        relaxation = self.rule.relaxation
        if relaxation is not None and relaxation.budgets:
            decision = add_costs(relaxation.budgets, target, draft, 0, decision)
        for mismatch in decision.mismatches:
            if mismatch.relaxed:
                self.relaxed += 1
                self.nats += mismatch.nats
                for label, cost in mismatch.costs.items():
                    self.spent[label] = self.spent.get(label, 0.0) + cost
        return [*(decision.drafted[node] for node in decision.path), decision.next_token]

    @staticmethod
    def _column(value: float, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=like.device)
