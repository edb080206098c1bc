"""Apply a policy to a draft of chains or trees. Knows nothing of models, caches or ranks.

Shape legend: B rows, K drafted tokens, M = K + 1 places (place 0 is after the row's last token, place j + 1 after
drafted token j), V vocabulary, P paths from the row to a leaf, D longest path, J = D + 1 places of a path, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fly.ops import depths, draw, first_branch, leaf_paths, nan_at, pick, upload, vectors_at
from fly.policies.base import AcceptancePolicy, accepts_exactly, exact_accept_probs
from fly.policies.conditions import Block
from fly.policies.reads import carry_logits, supply_logits
from fly.types import IMPOSSIBLE, UNDECIDED, Decision, Draft, Guarantee, Mismatch, Noise, Target, Verdict, Why

__all__ = ["add_costs", "decide", "verify"]


def decide(policy: AcceptancePolicy, target: Target, draft: Draft, noise: Noise | None) -> list[Decision]:
    """Call ``verify`` and convert its result to one ``Decision`` per row. The host waits for the device once.

    Raises ``ValueError`` if the policy reads the draft's logits, and there are none.
    """
    draft = supply_logits(policy, draft, target.logits_BKV.shape[-1])
    verdict = verify(policy, target, draft, noise)
    why_BK = verdict.why_BK.tolist()
    asked_BK = verdict.asked_BK.tolist()
    following = verdict.next_token_B.tolist()
    clauses = {label: held_BK.tolist() for label, held_BK in verdict.clauses.items()}
    chains = draft.chains
    trees = draft.trees
    # Compute what relaxed tokens cost. This reads the target's log-probabilities, so do it for all rows at once.
    relaxed = [(b, node) for b, why in enumerate(why_BK) for node, code in enumerate(why) if code == Why.RELAXED]
    nats: dict[tuple[int, int], float] = {}
    if relaxed:
        places = [(b, node if trees is None else trees[b][node] + 1, chains[b][node]) for b, node in relaxed]
        nats = dict(zip(relaxed, target.nats_of(places)))
    decisions = []
    for b, (chain, path) in enumerate(zip(chains, verdict.paths())):
        # Report the mismatches that the decision depends on.
        mismatches = []
        for node in range(len(chain) if nats or clauses else 0):
            stands = (b, node) in nats
            if stands or (clauses and asked_BK[b][node]):
                outcomes = {label: rows[b][node] for label, rows in clauses.items()}
                mismatches.append(Mismatch(node, stands, outcomes, nats.get((b, node), 0.0)))
        bonus = len(path) == len(chain) if trees is None else (path[-1] if path else -1) not in trees[b]
        decisions.append(Decision(chain, path, following[b], bonus, target.choices[b], mismatches))
    return decisions


def add_costs(budgets: Sequence[Any], target: Target, draft: Draft, b: int, decision: Decision) -> Decision:
    """Return the decision on row ``b`` with the cost of each relaxed token under each of the rule's ``budgets``
    (``CostBudget``)."""
    relaxed = [mismatch.node for mismatch in decision.mismatches if mismatch.relaxed]
    if not relaxed:
        return decision
    draft = draft.to(target.logits_BKV.device)
    row = b
    positions = relaxed
    if draft.trees is not None:  # the accepted path is a chain
        path = list(decision.path)
        path_1D, length_1 = _pad_paths([path], draft.tokens_BK.device)
        rows_11 = torch.full_like(length_1, b).unsqueeze(1)
        draft, target = Draft(draft.tokens_BK[rows_11, path_1D], length_1), _along_paths(target, rows_11, path_1D, [b])
        row, positions = 0, [path.index(node) for node in relaxed]
    rows_N, positions_N = upload([row] * len(relaxed) + positions, draft.tokens_BK.device).chunk(2)
    costs = {budget.label: budget.costs(target, draft, rows_N, positions_N).tolist() for budget in budgets}
    paid = {node: {label: each[n] for label, each in costs.items()} for n, node in enumerate(relaxed)}
    mismatches = [m._replace(costs=paid[m.node]) if m.relaxed else m for m in decision.mismatches]
    return decision._replace(mismatches=mismatches)


def verify(policy: AcceptancePolicy, target: Target, draft: Draft, noise: Noise | None) -> Verdict:
    """Apply ``policy`` to a block. Flip the coins (a token is kept if its coin is strictly below its chance), excuse
    mismatches, accept the longest prefix, draw the correction or the bonus, and record why each token is kept.

    Args:
        target: distributions at K + 1 places.
        draft: [B, K] tokens, chains or trees. A policy that judges whole blocks (it overrides ``verdict``) gets only
            the chain of first children of a tree.
        noise: one coin per drafted token and one draw per row. It may be None at temperature 0 for a policy that
            ``accepts_exactly``, which needs no coins there.

    The next token is ``UNDECIDED`` if the outcome depends on a NaN in the policy's chances, its correction, the draft's
    distribution or the target's logits, and ``IMPOSSIBLE`` if a ``verdict`` of the policy's own cannot be true.

    Raises:
        ValueError: the shapes of target, draft and noise do not fit together, or ``noise`` is missing.
    """
    rows, longest = draft.shape
    if target.logits_BKV.shape[:2] != (rows, longest + 1):
        raise ValueError(
            f"target covers {tuple(target.logits_BKV.shape[:2])} (rows, positions), "
            f"a draft of shape {(rows, longest)} needs {(rows, longest + 1)}"
        )
    if noise is None:
        if not (target.all_greedy and accepts_exactly(policy)):
            raise ValueError(f"{policy} needs coins here, and noise is None")
        device = target.logits_BKV.device
        noise = Noise(torch.zeros(rows, longest, device=device), torch.zeros(rows, device=device))
    if noise.accept_BK.shape != (rows, longest) or noise.sample_B.shape != (rows,):
        raise ValueError(
            f"noise has shapes {tuple(noise.accept_BK.shape)} and {tuple(noise.sample_B.shape)}, "
            f"a draft of shape {(rows, longest)} needs {(rows, longest)} and {(rows,)}"
        )
    # Judge chains or trees.
    if draft.parents_BK is None:
        verdict = policy.checked_verdict(target, draft, noise)
    elif type(policy).verdict is AcceptancePolicy.verdict:
        verdict = _verify_tree(policy, target, draft, noise)
    else:
        verdict = _verify_first_path(policy, target, draft, noise)
    if target.has_no_nan:
        return verdict
    # If the target's logits at the end of the accepted path contain a NaN, the next token is undecided.
    end_B, path_BD = verdict.accepted_B, verdict.path_BK
    if path_BD is not None and path_BD.shape[1]:
        end_B = torch.where(end_B > 0, pick(path_BD, (end_B - 1).clamp_min(0)) + 1, 0)
    nan_B = pick(nan_at(target.logits_BKV, target.argmax_BK), end_B)  # argmax points to a NaN if there is one
    if type(policy).verdict is not AcceptancePolicy.verdict:
        nan_B &= verdict.next_token_B != IMPOSSIBLE
    return replace(verdict, next_token_B=torch.where(nan_B, UNDECIDED, verdict.next_token_B))


def _verify_tree(policy: AcceptancePolicy, target: Target, draft: Draft, noise: Noise) -> Verdict:
    """Judge a tree. Siblings are tried in order, and the accepted path continues from each token that is kept.

    This is multi-candidate speculative sampling (SpecInfer, arXiv 2305.09781, alg. 2), with the policy in place of the
    paper's test of target/draft. Each sibling is judged as a draft of one token. A rejection replaces the target's
    distribution by the policy's correction. The next sibling is tried against this distribution, and after the last
    sibling the correction is drawn from it. If the policy is lossless for one token, each step splits a distribution
    into "keep the token" and "go on with the remaining mass". So the tree is lossless as well, whatever was drafted.

    A relaxation is evaluated along every path as if the path were a chain. An excused token is kept only if the policy
    keeps none of its siblings. The host reads only the trees' shapes (``Draft.trees``).
    """
    rows, device = len(draft.tokens_BK), draft.tokens_BK.device
    trees = draft.trees
    assert draft.parents_BK is not None and trees is not None
    # Find the tokens that the policy keeps, the tokens that the relaxation excuses, and the accepted path.
    kept_BK, exact_BK, probs_BMV, nan_BM = _try_siblings(policy, target, draft, trees, noise)
    excused_BK, clauses = _excuse(policy, target, draft, trees, kept_BK)
    path_BD, accepted_B, last_B = _walk(draft, kept_BK, excused_BK)

    # Record the reasons. Tokens on the path are kept; siblings that were tried at its end are mismatches to report.
    rows_B1 = torch.arange(rows, device=device).unsqueeze(1)
    stands_BD = torch.arange(path_BD.shape[1], device=device) < accepted_B.unsqueeze(1)
    on_path_BK = _at_tokens(stands_BD, rows_B1, path_BD, stands_BD, draft) > 0
    codes_BK = torch.where(exact_BK, int(Why.MATCH), int(Why.RELAXED))
    why_BK = torch.where(on_path_BK, codes_BK, int(Why.REJECTED)).to(torch.int8)
    tried_BK = draft.parents_BK + 1 == last_B.unsqueeze(1)
    asked_BK = ~exact_BK & draft.mask_BK() & (on_path_BK | tried_BK)
    # At the place where the path ends, draw the correction, or the bonus if this is a leaf.
    if probs_BMV is None:
        next_token_B = pick(target.argmax_BK, last_B)
    else:
        next_token_B = draw(probs_BMV[rows_B1.squeeze(1), last_B], noise.sample_B)
    next_token_B = torch.where(pick(nan_BM, last_B), UNDECIDED, next_token_B)
    return Verdict(accepted_B, next_token_B, why_BK, asked_BK, clauses, path_BD)


def _verify_first_path(policy: AcceptancePolicy, target: Target, draft: Draft, noise: Noise) -> Verdict:
    """Judge only the chain of first children of each tree, for a policy that judges whole blocks."""
    assert draft.trees is not None
    chains = [first_branch(parents) for parents in draft.trees]
    path_BD, lengths_B = _pad_paths(chains, draft.tokens_BK.device)
    rows_B1 = torch.arange(len(chains), device=path_BD.device).unsqueeze(1)
    probs_BDV = None if draft.probs_BKV is None else vectors_at(draft.probs_BKV, rows_B1, path_BD)
    first = carry_logits(draft, Draft(draft.tokens_BK[rows_B1, path_BD], lengths_B, probs_BDV), rows_B1, path_BD)
    coins = Noise(noise.accept_BK[rows_B1, path_BD], noise.sample_B)
    verdict = policy.checked_verdict(_along_paths(target, rows_B1, path_BD, list(range(len(chains)))), first, coins)
    mask_BD = first.mask_BK()

    # Map results along the chains back to the trees' tokens.
    def of_all(found_BD: Tensor) -> Tensor:
        return _at_tokens(found_BD, rows_B1, path_BD, mask_BD, draft).to(found_BD.dtype)

    clauses = {name: of_all(held_BD) for name, held_BD in verdict.clauses.items()}
    why_BK, asked_BK = of_all(verdict.why_BK), of_all(verdict.asked_BK)
    return Verdict(verdict.accepted_B, verdict.next_token_B, why_BK, asked_BK, clauses, path_BD)


def _pad_paths(paths: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad paths with 0 to int64 [P, D]; also return their lengths [P]."""
    longest = max(map(len, paths), default=0)
    lines = [[len(path), *path, *[0] * (longest - len(path))] for path in paths]
    lengths_and_paths = upload([number for line in lines for number in line], device).view(len(paths), longest + 1)
    return lengths_and_paths[:, 1:], lengths_and_paths[:, 0]


def _at_tokens(values_PD: Tensor, rows_P1: Tensor, path_PD: Tensor, counted_PD: Tensor, draft: Draft) -> Tensor:
    """Sum, for each token, the values that paths have at it, int64 [B, K]. Only values where ``counted_PD`` count."""
    rows, longest = draft.tokens_BK.shape
    at_PD = rows_P1 * (longest + 1) + torch.where(counted_PD, path_PD, longest)  # the last column collects the others
    sums_N = torch.zeros(rows * (longest + 1), dtype=torch.int64, device=path_PD.device)
    return sums_N.scatter_add_(0, at_PD.flatten(), values_PD.long().flatten()).view(rows, -1)[:, :longest]


def _along_paths(target: Target, rows_P1: Tensor, path_PD: Tensor, numbers: list[int]) -> Target:
    """Return the target's output along paths as if they were chains. ``numbers`` are the paths' rows in the batch."""
    places_PJ = torch.cat([path_PD.new_zeros(len(path_PD), 1), path_PD + 1], dim=1)
    probs = None if target.all_greedy else vectors_at(target.probs_BKV, rows_P1, places_PJ)
    return target.about(rows_P1.squeeze(1), vectors_at(target.logits_BKV, rows_P1, places_PJ), probs, numbers)


def _places(draft: Draft) -> Tensor:
    """Return the place [B, K] at which each token follows its parent; M for padding."""
    assert draft.parents_BK is not None
    return torch.where(draft.mask_BK(), draft.parents_BK + 1, draft.shape[1] + 1)


def _try_siblings(
    policy: AcceptancePolicy, target: Target, draft: Draft, trees: list[list[int]], noise: Noise
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Try the children of every place, one sibling after another.

    Returns four tensors: the tokens that the policy keeps, bool [B, K]; the tokens that the exact rule keeps if their
    older siblings are rejected, bool [B, K]; the distribution [B, M, V] at each place after all its children are
    rejected (None at temperature 0); and the places where the outcome depends on a NaN, bool [B, M].
    """
    (rows, longest), device = draft.shape, draft.tokens_BK.device
    kept_BK, exact_BK = (torch.zeros(rows, longest, dtype=torch.bool, device=device) for _ in range(2))
    nan_BM = torch.zeros(rows, longest + 1, dtype=torch.bool, device=device)
    probs_BMV = None if target.all_greedy else target.probs_BKV
    nodes = [(b, node, parent) for b, tree in enumerate(trees) for node, parent in enumerate(tree)]
    children = [(trees[b][:node].count(parent), b, node, parent + 1) for b, node, parent in nodes]
    for number in range(1 + max((older for older, *_ in children), default=-1)):
        # Judge child ``number`` of each place that has one, as a draft of one token in its own row: N rows.
        siblings = [child for older, *child in children if older == number]
        rows_N, nodes_N, places_N = upload([i for node in siblings for i in node], device).view(-1, 3).unbind(1)
        at = rows_N, places_N
        claims_N1V = None if draft.probs_BKV is None else draft.probs_BKV[rows_N, nodes_N].unsqueeze(1)
        sibling = Draft(draft.tokens_BK[rows_N, nodes_N].unsqueeze(1), torch.ones_like(rows_N), claims_N1V)
        sibling = carry_logits(draft, sibling, rows_N, nodes_N)
        logits_N2V = target.logits_BKV[at].unsqueeze(1).expand(-1, 2, -1)
        probs_NV = None if probs_BMV is None else probs_BMV[at]
        probs_N2V = None if probs_NV is None else probs_NV.unsqueeze(1).expand(-1, 2, -1)
        block = target.about(rows_N, logits_N2V, probs_N2V, [b for b, _, _ in siblings])
        # Compare its coin with the policy's chance. Compare it with the exact rule's chance to record the reason.
        coin_N, chance_N = noise.accept_BK[rows_N, nodes_N], policy.chances(block, sibling).squeeze(1)
        keeps_N, nan_N = coin_N < chance_N, chance_N.isnan()
        exact_N = keeps_N
        if policy.core.guarantee is not Guarantee.LOSSLESS:
            exact_N = coin_N < exact_accept_probs(block, sibling).squeeze(1)
        kept_BK.index_put_((rows_N, nodes_N), keeps_N)
        exact_BK.index_put_((rows_N, nodes_N), exact_N)
        # After a rejection the next sibling faces the policy's correction.
        if probs_BMV is not None and probs_NV is not None:
            residual_NV = policy.corrected(block, sibling, torch.zeros_like(nodes_N))
            mass_N1 = residual_NV.sum(-1, keepdim=True)
            # Without residual mass the distributions are equal. Then only a rounding error can reject the token, so
            # keep the distribution as it was.
            probs_BMV = probs_BMV.index_put(at, torch.where(mass_N1 > 0, residual_NV / mass_N1, probs_NV))
            nan_N = nan_N | (mass_N1.squeeze(1).isnan() & ~keeps_N & ~block.greedy_B)
        nan_BM.index_put_(at, nan_BM[at] | nan_N)
    return kept_BK, exact_BK, probs_BMV, nan_BM


def _excuse(
    policy: AcceptancePolicy, target: Target, draft: Draft, trees: list[list[int]], kept_BK: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return which tokens are excused along at least one path through them, bool [B, K], and where each clause held."""
    paths = [(b, path) for b, tree in enumerate(trees) for path in leaf_paths(tree)] if policy.may_excuse else []
    if not paths:
        return torch.zeros_like(kept_BK), {}
    # Treat each path from the row to a leaf as a chain. A token agrees if the policy keeps it.
    device = kept_BK.device
    path_PD, lengths_P = _pad_paths([path for _, path in paths], device)
    numbers = [b for b, _ in paths]
    rows_P1 = upload(numbers, device).unsqueeze(1)
    chain = carry_logits(draft, Draft(draft.tokens_BK[rows_P1, path_PD], lengths_P), rows_P1, path_PD)
    agree_PD = kept_BK[rows_P1, path_PD] & chain.mask_BK()
    block = Block(_along_paths(target, rows_P1, path_PD, numbers), chain, agree_PD)

    def anywhere(held_PD: Tensor) -> Tensor:
        return _at_tokens(held_PD, rows_P1, path_PD, chain.mask_BK(), draft) > 0

    return anywhere(policy.excused(block)), {name: anywhere(held_PD) for name, held_PD in block.clauses.items()}


def _walk(draft: Draft, kept_BK: Tensor, excused_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the accepted path. At each place, go to the first child that is kept, else to the first excused child.

    Returns the path [B, D] padded with 0, its length [B] and the place [B] where it ends.
    """
    (rows, longest), device = draft.tokens_BK.shape, kept_BK.device
    node_K = torch.arange(longest, device=device)
    # Children in order of preference: kept ones by number, then excused ones, then none.
    order_BK = torch.where(kept_BK, node_K, torch.where(excused_BK, node_K + longest, 2 * longest))
    best_BM = torch.full((rows, longest + 2), 2 * longest, device=device)
    best_BM.scatter_reduce_(1, _places(draft), order_BK, "amin")
    at_B, path = torch.zeros(rows, dtype=torch.int64, device=device), list[Tensor]()
    accepted_B = torch.zeros_like(at_B)
    for _ in range(max((1 + max(depths(tree)) for tree in draft.trees or () if tree), default=0)):
        order_B = pick(best_BM, at_B)
        goes_B = order_B < 2 * longest
        path.append(torch.where(goes_B, order_B % longest, 0))
        at_B = torch.where(goes_B, path[-1] + 1, at_B)
        accepted_B = accepted_B + goes_B
    path_BD = torch.stack(path, 1) if path else at_B.new_zeros(rows, 0)
    return path_BD, accepted_B, at_B
