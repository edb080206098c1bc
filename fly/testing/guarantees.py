"""Whether an acceptance policy keeps what it declares: its guarantee, on chains and trees, and what is monotone.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fly.policies import AcceptancePolicy, Exact
from fly.policies.base import exact_accept_probs
from fly.testing.blocks import Case, block, cases
from fly.testing.distributions import TICK, TOLERANCE, one_hot
from fly.testing.report import ConformanceError, require
from fly.testing.sums import chain_divergences, tree_divergences
from fly.types import Draft, Guarantee, Noise, Target

__all__ = ["check_guarantee", "check_monotone", "check_trees"]


def check_monotone(policy: AcceptancePolicy) -> str:
    """Where the policy claims it (``monotone``), a larger parameter never accepts less (or more, for -1)."""
    for name, direction in policy.monotone.items():
        for seed in range(40):
            case = block(seed, 4, 8, 5, (0.0, 1.0, None)[seed % 3])
            previous: Tensor | None = None
            for value in _around(getattr(policy, name)):
                try:
                    variant = dataclasses.replace(policy, **{name: value})  # type: ignore[type-var]
                except ValueError:
                    continue  # outside the parameter's range
                accepted = case.verdict(variant).accepted_B
                if previous is not None:
                    message = f"{name}={value} accepts {accepted.tolist()}, a smaller one {previous.tolist()}"
                    require(bool(((accepted - previous) * direction >= 0).all()), message)
                previous = accepted
    claims = (f"{name} {'up' if sign > 0 else 'down'}" for name, sign in policy.monotone.items())
    return ", ".join(claims) or "nothing claimed"


def _around(value: float | int) -> list[float | int]:
    """Values about ``value``, ascending, of its own type."""
    if isinstance(value, int):
        return sorted({max(0, value + step) for step in (-3, -1, 0, 1, 3)})
    return sorted({value * factor for factor in (0.0, 0.25, 0.5, 1.0, 1.5, 3.0)} | {0.05})


def check_guarantee(policy: AcceptancePolicy) -> str:
    """Lossless as declared, within the bound as declared, or, for a heuristic, how far from the target it strays."""
    guarantee, bound = policy.guarantee, policy.bound
    worst, where = 0.0, ""
    for divergence in chain_divergences(policy):
        if guarantee is Guarantee.LOSSLESS and divergence.gap > TOLERANCE:
            raise ConformanceError("; ".join([f"declared lossless, but {divergence.story}", *_suspicions(policy)]))
        if bound is not None and divergence.first is not None:
            distance = divergence.first[0 if bound.measure == "kl" else 1]
            require(distance <= bound.value + 1e-4, f"declared {bound}, found {distance:.5f}: {divergence.story}")
        if divergence.total > worst:
            worst, where = divergence.total, divergence.story
    require(guarantee is not Guarantee.BOUNDED or bound is not None, "declared bounded, but names no bound")
    if guarantee is Guarantee.LOSSLESS:
        return f"lossless: exact sum over all drafts, K = 1, 2, 3 (largest gap {worst:.1e})"
    if worst <= TOLERANCE:
        return f"declared {guarantee.value}; no draft of up to 3 tokens (11 at temperature 0) changed it"
    return f"moves the distribution of a block by up to {worst:.3f} in total variation: {where}"


def _suspicions(policy: AcceptancePolicy) -> list[str]:
    """What may be wrong with a rule that is not lossless: each an experiment on random sampled blocks."""
    found: list[str] = []
    for seed in range(24):
        sampled = block(seed, 4, 5, 4, 1.0)
        if any(_keeps_the_excluded(policy, case) for case in (block(seed, 4, 5, 4, 0.0), sampled)):
            found.append("a coin of 0 keeps a token that the target excludes (keep where coin < chance, strictly)")
        found += _of_its_chances(policy, sampled.target, sampled.draft, any("its chances" in said for said in found))
    return list(dict.fromkeys(found))


def _keeps_the_excluded(policy: AcceptancePolicy, case: Case) -> bool:
    """Whether a coin of 0 keeps more than the next larger one."""
    lowest_B, next_B = (
        dataclasses.replace(case, noise=Noise(torch.full_like(case.noise.accept_BK, coin), case.noise.sample_B))
        .verdict(policy)
        .accepted_B
        for coin in (0.0, TICK)
    )
    return bool((lowest_B > next_B).any())


def _of_its_chances(policy: AcceptancePolicy, target: Target, draft: Draft, explained: bool) -> list[str]:
    """What is wrong with the chances of keeping tokens or, if these are right, with the corrections."""
    mask_BK, chances_BK, exact_BK = (
        draft.mask_BK(),
        policy.accept_probs(target, draft),
        exact_accept_probs(target, draft),
    )
    found = []

    def differ(other_BK: Tensor) -> bool:
        return bool(((other_BK - chances_BK)[mask_BK].abs() > TOLERANCE).any())

    if differ(policy.accept_probs(Target(target.logits_BKV * 1.7, target.probs_BKV), draft)):
        found.append("its chances change with the unprocessed logits while the target's processed distribution stays")
    if not differ(exact_BK):
        for j in range(mask_BK.shape[1]):
            at_B = torch.full((len(mask_BK),), j)
            own_BV, exact_BV = (rule.correction(target, draft, at_B) for rule in (policy, Exact()))
            apart_BV = own_BV / own_BV.sum(-1, keepdim=True) - exact_BV / exact_BV.sum(-1, keepdim=True)
            asked_B = mask_BK[:, j] & (exact_BV.sum(-1) > 1e-3)
            if bool((apart_BV.abs().amax(-1)[asked_B] > 1e-3).any()):
                found.append("its correction is not drawn from max(target - draft, 0)")
        return found
    if draft.probs_BKV is not None:
        other = dataclasses.replace(
            draft, probs_BKV=0.5 * (draft.probs_BKV + one_hot(draft.tokens_BK, draft.probs_BKV))
        )
        if not differ(policy.accept_probs(target, other)):
            found.append("its chances ignore the distribution that the draft was drawn from (draft.probs_BKV)")
    if not (found or explained):
        b, j = divmod(int(((exact_BK - chances_BK).abs() * mask_BK).argmax()), mask_BK.shape[1])
        own, exact = float(chances_BK[b, j]), float(exact_BK[b, j])
        found.append(f"its chances are not min(1, target/draft): {own:.4f} where that is {exact:.4f}")
    return found


def check_trees(policy: AcceptancePolicy) -> str:
    """On trees: a chain written as a tree is judged as a chain, and a lossless rule stays lossless with several
    candidates for a place, certain ones and sampled ones (an exact sum, as for chains)."""
    if type(policy).verdict is AcceptancePolicy.verdict:
        for case in cases():
            rows, longest = case.draft.shape
            parents_BK = torch.arange(-1, longest - 1).expand(rows, -1)
            tree = dataclasses.replace(case, draft=dataclasses.replace(case.draft, parents_BK=parents_BK))
            for b, (expected, found) in enumerate(zip(case.outcomes(policy), tree.outcomes(policy))):
                message = f"as a chain (accepted, next, why) {expected}, as a tree {found}: {case.show(b)}"
                require(found == expected, message)
    if policy.guarantee is not Guarantee.LOSSLESS:
        return "chains written as trees"
    worst = 0.0
    for parents, divergence in tree_divergences(policy):
        message = f"declared lossless, but a tree of parents {parents}, {divergence.story}"
        require(divergence.gap <= TOLERANCE, message)
        worst = max(worst, divergence.gap)
    return f"lossless: exact sum over trees of up to 3 tokens (largest gap {worst:.1e})"
