"""Checks whether a policy keeps the guarantee that it declares, on chains and on trees, by exact sums without samples.

The verdict on a block is a step function of its noise. Ever finer grids find the steps, which divide the unit cube into
cells on which the verdict is constant. The distribution of the emitted tokens is then a sum over all drafts of one
shape and over all cells. It is compared with the target's distribution over all strings of D + 1 tokens
(docs/explanation/losslessness.md).

Shape legend: B rows, N drafts, R drafts of all tables, K drafted tokens, M = K + 1 places where a token can follow
(place 0 is after the row's last token, place j + 1 after drafted token j), D longest path, V vocabulary, A = K + 1 axes
of noise (K coins and one draw), L lines along an axis, P points of noise, I = 3 points within an interval. A table of
distributions is a list with one tensor [V^j, V] for each j: the distributions after each prefix of j tokens. Prefixes
are numbered in base V.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from fly.ops import depths, one_hot, pick
from fly.policies import AcceptancePolicy, Block, Exact, verify
from fly.policies.base import exact_accept_probs
from fly.runner.sampling import BatchSampling
from fly.testing.blocks import (
    TICK,
    TOLERANCE,
    Case,
    bind_to,
    ids_of,
    make_block,
    make_cases,
    make_draft_logits,
    markers_of,
    require_same,
    rounded,
)
from fly.testing.report import ConformanceError, require
from fly.types import Draft, Guarantee, Noise, SamplingParams, Target

__all__ = ["check_guarantee", "check_tokens_judged_alone", "check_trees"]

_VOCAB = 40  # V of single tokens


def check_guarantee(policy: AcceptancePolicy) -> str:
    """The policy is lossless or bounded as it declares. For a heuristic policy, the report says how far it moves the
    distribution of the text."""
    guarantee, bound = policy.guarantee, policy.bound
    # The largest above temperature 0, at temperature 0, and in long texts.
    warm = cold = late = _Divergence(0.0, 0.0, None, "")
    for divergence in itertools.chain(_chains(policy), _late_tokens(policy)):
        if guarantee is Guarantee.LOSSLESS and divergence.gap > TOLERANCE:
            raise ConformanceError("; ".join([f"declared lossless, but {divergence.story}", *_suspicions(policy)]))
        if bound is not None and divergence.first is not None:
            distance = divergence.first[0 if bound.measure == "kl" else 1]
            require(distance <= bound.value + 1e-4, f"declared {bound}, found {distance:.5f}: {divergence.story}")
        if divergence.late:
            late = max(late, divergence, key=lambda each: each.total)
        elif divergence.first is None:
            cold = max(cold, divergence, key=lambda each: each.total)
        else:
            warm = max(warm, divergence, key=lambda each: each.total)
    require(guarantee is not Guarantee.BOUNDED or bound is not None, "declared bounded, but names no bound")
    if guarantee is Guarantee.LOSSLESS:
        gap = max(warm.total, cold.total, late.total)
        return (
            f"lossless: exact sum over all drafts, K = 1, 2, 3, and over single tokens of texts (largest gap {gap:.1e})"
        )
    if warm.total <= TOLERANCE and not cold.total:
        short = "no draft of up to 3 tokens (11 at temperature 0) moved the distribution"
        if late.total > TOLERANCE:
            return f"not lossless, as declared ({guarantee.value}): {short} of a text's first block, but {late.story}"
        return f"declared {guarantee.value}; {short}"
    moved = "no draft of up to 3 tokens moved the distribution of a block (longer drafts may)"
    if warm.total > TOLERANCE:
        moved = (
            "drafts of up to 3 tokens move the distribution of a block by up to "
            f"{warm.total:.3f} in total variation (longer drafts may move it more), {warm.story}"
        )
    changed = cold.story or "at temperature 0 no draft of up to 11 tokens changed the text"
    return f"not lossless, as declared ({guarantee.value}): {changed}; above temperature 0 {moved}"


def check_tokens_judged_alone(policy: AcceptancePolicy) -> str:
    """The chance of keeping token j depends on position j alone. (This is the chance given that the tokens before j are
    kept. In a tree, several tokens may follow token j, or none.)"""
    if type(policy).verdict is not AcceptancePolicy.verdict:
        return "judges whole blocks"
    for case in make_cases():
        chances_BK, mask_BK = case.chances(policy), case.draft.mask_BK()
        for j in range(case.draft.shape[1]):
            for first, side in ((0, "after"), (j, "before")):
                chance_B = case.cut(first, j).chances(policy)[:, -1]
                apart_B = ((chance_B - chances_BK[:, j]).abs() > TOLERANCE) & mask_BK[:, j]
                b = int(apart_B.long().argmax())
                require(
                    not apart_B[b],
                    f"accept_probs: position j depends on tokens {side} j: write a Condition or override verdict. The "
                    f"chance at position {j} is {float(chances_BK[b, j]):.4f}, and {float(chance_B[b]):.4f} without "
                    f"the tokens {side} it: {case.show(b)}",
                )
    return f"holds on {len(make_cases())} random blocks"


def check_trees(policy: AcceptancePolicy) -> str:
    """A chain written as a tree is judged like the chain. A lossless rule stays lossless on trees with siblings,
    deterministic or drawn (an exact sum, as for chains)."""
    check_tokens_judged_alone(policy)
    for case in make_cases() if type(policy).verdict is AcceptancePolicy.verdict else []:
        parents_BK = torch.arange(-1, case.draft.shape[1] - 1).expand(case.draft.shape)
        tree = replace(case, draft=replace(case.draft, parents_BK=parents_BK))
        require_same(case, "as a chain", case.outcomes(policy), "as a tree", tree.outcomes(policy))
    if policy.guarantee is not Guarantee.LOSSLESS:
        return "chains written as trees are judged like the chains"
    largest_gap = 0.0
    for parents, vocab in (([-1, -1], 3), ([-1, -1, 0], 3), ([-1, -1, 1], 2), ([-1, 0, 0], 2)):
        for divergence in _sampled(policy, parents, vocab, [len(parents)], tree=True):
            gap, story = divergence.gap, divergence.story
            require(gap <= TOLERANCE, f"declared lossless, but a tree of parents {parents}, {story}")
            largest_gap = max(largest_gap, gap)
    return f"lossless: exact sum over trees of up to 3 tokens (largest gap {largest_gap:.1e})"


def _suspicions(policy: AcceptancePolicy) -> list[str]:
    """Find likely faults of a rule that is not lossless, each by an experiment on random blocks."""
    faults: list[str] = []

    def suspect(fault: str, seen: bool) -> None:
        if seen and fault not in faults:
            faults.append(fault)

    for seed in range(24):
        case = make_block(seed, 4, 5, 4, 1.0)
        target = case.target
        draft = case.draft
        mask_BK = draft.mask_BK()
        rule = bind_to(policy, target)
        # A rule may say yes or no instead of a chance, and booleans cannot be subtracted.
        chances_BK, exact_BK = rule.accept_probs(target, draft).double(), exact_accept_probs(target, draft)

        def differ(other_BK: Tensor) -> bool:
            return bool(((other_BK.double() - chances_BK)[mask_BK].abs() > TOLERANCE).any())  # noqa: B023

        exactly, coldest = not differ(exact_BK), make_block(seed, 4, 5, 4, 0.0)
        suspect(
            "a coin of 0 keeps a token that the target excludes (keep where coin < chance, strictly)",
            _keeps_the_excluded(policy, coldest) or _keeps_the_excluded(policy, case),
        )
        suspect(
            "its chances change with the raw logits while the target's processed distribution stays",
            differ(rule.accept_probs(Target(target.logits_BKV * 1.7, target.probs_BKV), draft)),
        )
        if (probs_BKV := draft.probs_BKV) is not None:
            flatter = replace(draft, probs_BKV=0.5 * probs_BKV + 0.5 * one_hot(probs_BKV, draft.tokens_BK))
            suspect(
                "its chances ignore the distribution that the draft was drawn from (draft.probs_BKV)",
                not exactly and not differ(rule.accept_probs(target, flatter)),
            )
        suspect(
            "its correction is not drawn from max(target - draft, 0)",
            exactly and _corrects_otherwise(rule, target, draft),
        )
        if not exactly and not any(fault.startswith("its chances") for fault in faults):
            b, j = divmod(int(((exact_BK - chances_BK).abs() * mask_BK).argmax()), mask_BK.shape[1])
            own_chance, exact_chance = float(chances_BK[b, j]), float(exact_BK[b, j])
            suspect(
                f"its chances are not min(1, target/draft): {own_chance:.4f} where that is {exact_chance:.4f}", True
            )
    return faults


def _keeps_the_excluded(policy: AcceptancePolicy, case: Case) -> bool:
    """Return whether a coin of 0 keeps more tokens than the smallest positive coin."""
    coins = (torch.full_like(case.noise.accept_BK, coin) for coin in (0.0, TICK))
    lowest, following = (replace(case, noise=replace(case.noise, accept_BK=coin)).verdict(policy) for coin in coins)
    return bool((lowest.accepted_B > following.accepted_B).any())


def _corrects_otherwise(policy: AcceptancePolicy, target: Target, draft: Draft) -> bool:
    """Return whether the policy draws corrections from another distribution than the exact rule, at any position where
    a token can be rejected."""
    rows, longest = draft.shape
    for j in range(longest):
        policy_BV, exact_BV = (rule.correction(target, draft, torch.full((rows,), j)) for rule in (policy, Exact()))
        apart_BV = policy_BV / policy_BV.sum(-1, keepdim=True) - exact_BV / exact_BV.sum(-1, keepdim=True)
        drafted_B = draft.mask_BK()[:, j] & (exact_BV.sum(-1) > 1e-3)
        if bool((apart_BV.abs().amax(-1)[drafted_B] > 1e-3).any()):
            return True
    return False


@dataclass(frozen=True)
class _Divergence:
    """How the distribution of D + 1 tokens differs from the target's."""

    gap: float  # the largest difference in the probability of a string
    total: float  # the total variation distance; at temperature 0 the share of drafts that change the text
    first: tuple[float, float] | None  # KL(emitted || target) and total variation of the first token alone
    story: str  # the case, and the string with the largest difference
    late: bool = False  # of one token of a text that has begun (``_late_tokens``)


def _chains(policy: AcceptancePolicy) -> Iterator[_Divergence]:
    """Compare the emitted distribution with the target's on chains, small ones first, so that the first failure is a
    small counterexample."""
    markers = range(len(markers_of(policy)))
    for last in (*markers, -1) if markers else (0,):  # texts with each marker, and one without
        for longest, vocab in ((1, 3), (2, 3), (3, 3), (11, 2)):
            yield from _greedy(policy, longest, vocab, last % vocab)
        for longest, vocab, seeds in ((1, 2, 24), (1, 3, 6), (2, 2, 4), (2, 3, 3), (3, 2, 3), (3, 3, 1)):
            yield from _sampled(policy, list(range(-1, longest - 1)), vocab, range(seeds), last=last % vocab)


def _late_tokens(policy: AcceptancePolicy) -> Iterator[_Divergence]:
    """Compare the distribution of one emitted token with the target's, by the chance that it is kept or excused and by
    the correction. The token stands anywhere in a block, after short and long texts, some with relaxed tokens, and has
    every id of a vocabulary, or the ids that the rule names. The other tokens of the block agree with the target.

    Rules that judge whole blocks have no such chance.
    """
    if type(policy).verdict is not AcceptancePolicy.verdict:
        return
    named = [token for token in ids_of(policy) if token >= _VOCAB]
    for seed in range(12):
        yield from _late_token(policy, seed, _VOCAB, range(_VOCAB), seed % _VOCAB)
        if named and seed < 6:
            yield from _late_token(policy, seed, max(named) + 2, [*named, 5], named[seed // 2 % len(named)])


def _late_token(
    policy: AcceptancePolicy, seed: int, vocab: int, tokens: Sequence[int], last: int
) -> Iterator[_Divergence]:
    """Compare it for one block after a text that ends with ``last``. At one place of the block stand all ``tokens``."""
    generator = torch.Generator().manual_seed(seed)
    longest, count, is_greedy = 8, len(tokens), seed % 2 == 0
    place = seed % longest
    # The text before the block: of two tokens, short, or long.
    generated = (0, 7, 600)[seed % 3]
    text = torch.randint(0, vocab, (generated + 1,), generator=generator).tolist()
    text.append(last)
    relaxed_at = [len(text) - 1 - n for n in range(min(generated // 4, 8))][::-1]
    logits_JV = 2 * torch.randn(longest + 1, vocab, generator=generator)
    target_JV = (logits_JV / 0.7).softmax(-1)
    draft_JV = (logits_JV + torch.randn(longest + 1, vocab, generator=generator)).softmax(-1)[:-1]
    likeliest = int(logits_JV[place].argmax())

    def each(line: Tensor) -> Tensor:
        return line.unsqueeze(0).expand(count, *line.shape).contiguous()

    target = Target(
        each(logits_JV),
        None if is_greedy else each(target_JV),
        control_V=torch.arange(vocab) == vocab - 1,
        generated_B=torch.full((count,), generated),
        relaxed_B=torch.full((count,), len(relaxed_at)),
        nats_B=torch.full((count,), 0.5 * len(relaxed_at)),
        spent=lambda label: torch.full((count,), 0.5 * len(relaxed_at)),
        relaxed_at=[relaxed_at] * count,
        history=[text] * count,
    )
    tokens_BK = each(logits_JV[:-1].argmax(-1))
    tokens_BK[:, place] = torch.tensor(tokens)
    certain = Draft(tokens_BK, torch.full((count,), longest))
    drafts = [replace(certain, logits_BKV=make_draft_logits(certain, vocab))]
    if not is_greedy and count == vocab:
        drawn = replace(certain, probs_BKV=each(draft_JV))
        drafts.append(replace(drawn, logits_BKV=make_draft_logits(drawn, vocab)))
    wanted_V = one_hot(logits_JV[place], logits_JV[place].argmax()) if is_greedy else target_JV[place]
    rule = bind_to(policy, target)
    for draft in drafts:
        agree_BK = torch.arange(longest).expand(count, longest) != place
        excused_B = rule.excused(Block(target, draft, agree_BK))[:, place]
        kept_B1 = rule.chances(target, draft)[:, place].double().clamp(0, 1).masked_fill(excused_B, 1.0).unsqueeze(1)
        correction_BV = each(wanted_V).double()
        if not is_greedy:
            residual_BV = rule.corrected(target, draft, torch.full((count,), place)).double()
            mass_B1 = residual_BV.sum(-1, keepdim=True)
            correction_BV = torch.where(mass_B1 > 0, residual_BV / mass_B1, correction_BV)
        emitted_BV = one_hot(correction_BV, tokens_BK[:, place]) * kept_B1 + (1 - kept_B1) * correction_BV
        if draft.probs_BKV is not None:
            emitted_BV = (draft_JV[place].double().unsqueeze(1) * emitted_BV).sum(0, keepdim=True)
        apart_BV = (emitted_BV - wanted_V).abs()
        b, token = divmod(int(apart_BV.argmax()), vocab)
        tv = float(apart_BV[b].sum() / 2)
        ratio_V = emitted_BV[b].clamp_min(1e-12) / wanted_V.double().clamp_min(1e-300)
        kl = float((emitted_BV[b] * ratio_V.log()).sum())
        drafted = "drawn" if draft.probs_BKV is not None else f"drafted as {tokens[b]}"
        kind = f"at temperature 0, where the target wants {likeliest}" if is_greedy else "above temperature 0"
        before = f"after {generated} tokens of a text, {len(relaxed_at)} of them relaxed"
        chances = f"with probability {float(emitted_BV[b, token]):.5f}, not {float(wanted_V[token]):.5f}"
        story = f"{before}, token {place} of a block, {drafted} {kind}, is {token} {chances}"
        yield _Divergence(float(apart_BV.max()), tv, None if is_greedy else (kl, tv), story, late=True)


class _Drafts:
    """All drafts of one shape. For each of their places, ``depths`` and ``numbers`` locate its distribution in a table
    of distributions."""

    def __init__(self, parents: list[int], vocab: int) -> None:
        self.tokens_NK = torch.tensor(list(itertools.product(range(vocab), repeat=len(parents))))
        self.depths = [0, *(depth + 1 for depth in depths(parents))]  # the depth of each place
        self.numbers = [torch.zeros(len(self.tokens_NK), dtype=torch.int64)]  # the number of the prefix at each place
        for parent, tokens_N in zip(parents, self.tokens_NK.unbind(1)):
            self.numbers.append(self.numbers[parent + 1] * vocab + tokens_N)

    def look_up(self, table: list[Tensor]) -> Tensor:
        """Return the entry of a table at each place, [N, M, V]."""
        return torch.stack([table[depth][number_N] for depth, number_N in zip(self.depths, self.numbers)], dim=1)


def _greedy(policy: AcceptancePolicy, longest: int, vocab: int, last: int) -> Iterator[_Divergence]:
    """Yield a divergence if, at temperature 0, a chain of ``longest`` tokens emits other tokens than the target's
    argmax path."""
    generator = torch.Generator().manual_seed(longest)
    drafts = _Drafts(list(range(-1, longest - 1)), vocab)
    rows, texts = len(drafts.tokens_NK), drafts.tokens_NK.tolist()
    # The logits at position j depend on the drafted prefix, like a model's.
    logits = drafts.look_up([torch.randn(vocab**j, vocab, generator=generator) for j in range(longest + 1)])
    target, draft = Target(logits, history=[[last]] * rows), Draft(drafts.tokens_NK, torch.full((rows,), longest))
    for surer, coin in enumerate((0.0, 0.3, 0.6, 1 - TICK)):  # coins must not matter
        draft = replace(draft, logits_BKV=make_draft_logits(draft, vocab, surer))
        case = Case(target, draft, Noise(torch.full((rows, longest), coin), torch.full((rows,), coin)))
        emitted = ([*text[:n], token] for text, (n, token, _) in zip(texts, case.outcomes(policy)))
        pairs = [(text, out, path[: len(out)]) for text, out, path in zip(texts, emitted, target.argmax_BK.tolist())]
        if wrong_pairs := [pair for pair in pairs if pair[1] != pair[2]]:
            text, out, target_tokens = wrong_pairs[0]
            emitted_tokens = [token if token >= 0 else "NaN" for token in out]
            story = f"at temperature 0 draft {text} emits {emitted_tokens}, the target {target_tokens}"
            yield _Divergence(1.0, len(wrong_pairs) / rows, None, story)


def _sampled(
    policy: AcceptancePolicy, parents: list[int], vocab: int, seeds: Sequence[int], tree: bool = False, last: int = 0
) -> Iterator[_Divergence]:
    """Compare the emitted distribution with the target's for the table of each seed, after the text of one token,
    ``last``. Do this for a drawn draft (whose siblings are drawn independently from one distribution), and for every
    deterministic draft without equal siblings. All tables are judged together, as rows of one batch."""
    drafts = _Drafts(parents, vocab)
    tokens_NK = drafts.tokens_NK
    longest = max(drafts.depths)
    size = len(tokens_NK)
    tables = [_tables(longest, vocab, seed) for seed in seeds]
    logits_RMV, targets_RMV, claims_RMV = (torch.cat([drafts.look_up(part) for part in each]) for each in zip(*tables))
    target = Target(logits_RMV, targets_RMV, history=[[last]] * len(logits_RMV))
    tokens_RK = tokens_NK.repeat(len(tables), 1)
    probs_RKV = claims_RMV[:, [parent + 1 for parent in parents]]
    lengths_R, parents_RK = torch.full((len(tokens_RK),), len(parents)), torch.tensor(parents).expand_as(tokens_RK)
    drawn = Draft(tokens_RK, lengths_R, probs_RKV, parents_RK if tree else None)
    drawn = replace(drawn, logits_BKV=make_draft_logits(drawn, vocab))
    chance_R = pick(probs_RKV, tokens_RK).double().prod(-1)
    expected = [_continuations(targets, 0, 0) for _, targets, _ in tables]

    def emitted(draft: Draft, rows_P: Tensor) -> dict[int, Tensor]:
        """Return the distribution of D + 1 tokens for each of some rows, [V^(D+1)]. The target continues the emitted
        tokens. The sum over all noise is exact."""
        rows = rows_P.tolist()
        sums = torch.zeros(len(rows), len(expected[0]), dtype=torch.float64)
        for b, volume, place, token in _cells(policy, target.rows(rows_P), draft.rows(rows_P)):
            table, n = divmod(rows[b], size)
            prefix = int(drafts.numbers[place][n]) * vocab + token
            continuations = _continuations(tables[table][1], drafts.depths[place] + 1, prefix)
            sums[b, prefix * len(continuations) : (prefix + 1) * len(continuations)] += volume * continuations
        return dict(zip(rows, sums))

    def compare(emitted: Tensor, table: int, draft: str) -> _Divergence:
        apart = (emitted - expected[table]).abs()
        worst_text = int(apart.argmax())
        string = [worst_text // vocab**i % vocab for i in range(longest, -1, -1)]
        first, first_wanted = (distribution.view(vocab, -1).sum(1) for distribution in (emitted, expected[table]))
        ratio = first.clamp_min(1e-12) / first_wanted.clamp_min(1e-300)
        kl, tv = float((first * ratio.log()).sum()), float((first - first_wanted).abs().sum() / 2)
        return _Divergence(
            float(apart.max()),
            float(apart.sum() / 2),
            (kl, tv),
            f"K={longest}, {draft}, target distribution at the first place {rounded(tables[table][1][0])}: "
            f"emits {string} with probability {float(emitted[worst_text]):.5f}, "
            f"the target {float(expected[table][worst_text]):.5f}",
        )

    texts = tokens_NK.tolist()
    distinct = [n for n, tokens in enumerate(texts) if len(set(zip(parents, tokens))) == len(parents)]  # siblings
    certain_R = torch.tensor([table * size + n for table in range(len(tables)) for n in distinct])
    of_drawn = emitted(drawn, chance_R.nonzero().squeeze(1))
    certain = replace(drawn, probs_BKV=None)
    of_certain = emitted(replace(certain, logits_BKV=make_draft_logits(certain, vocab)), certain_R)
    for table, (_, _, claims) in enumerate(tables):
        rows = range(table * size, (table + 1) * size)
        mean = torch.stack([of_drawn[row] * chance_R[row] for row in rows if row in of_drawn]).sum(0)
        draft_kind = "siblings drawn from one" if tree else "draft"
        yield compare(mean, table, f"{draft_kind} distribution {rounded(claims[0])}")
        for n in distinct:
            yield compare(of_certain[rows[n]], table, f"certain {'tokens' if tree else 'draft'} {texts[n]}")


@cache
def _tables(longest: int, vocab: int, seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Make tables of raw logits, and of the target's and the draft's processed distributions, for all rules."""
    generator = torch.Generator().manual_seed(1000 * longest + 100 * vocab + seed)
    simple = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75], [0.0, 1.0], [0.75, 0.25]])
    processed = BatchSampling.of([SamplingParams(temperature=0.6, top_k=vocab - 1 if vocab > 2 else 0)])
    tables = []
    for j in range(longest + 1):
        if longest == 1 and vocab == 2 and seed < 20:
            target, draft = (simple[at % 5].expand(vocab**j, -1) for at in (seed, seed // 5 + 2 * j + 2))
            raw = target.clamp_min(1e-6).log() * 0.6  # temperature 0.6 turns it into the target's distribution
        else:
            raw, noise = (torch.randn(vocab**j, vocab, generator=generator) for _ in range(2))
            raw *= 1.5
            target, draft = (processed.probs(logits.unsqueeze(0))[0] for logits in (raw, raw + noise))
        tables.append((raw, target, draft))
    logits, targets, drafts = map(list, zip(*tables))
    return logits, targets, drafts


def _continuations(table: list[Tensor], length: int, number: int) -> Tensor:
    """Return the probability of every string of D + 1 tokens given its prefix, [V^(D + 1 - length)] float64. The prefix
    has ``length`` tokens."""
    joint = torch.ones(1, dtype=torch.float64)
    for after in table[length:]:
        joint = (joint.unsqueeze(1) * after[number * len(joint) : (number + 1) * len(joint)].double()).reshape(-1)
    return joint


def _cells(policy: AcceptancePolicy, target: Target, draft: Draft) -> list[tuple[int, float, int, int]]:
    """Return ``(row, volume, place, next token)`` for every cell of the noise on which a row's verdict is constant."""
    policy = bind_to(policy, target)
    edges: dict[tuple[int, int], set[float]] = defaultdict(lambda: {0.0, 1.0})
    for b, axis, step in _steps(policy, target, draft):
        edges[b, axis].add(step)
    cells = [
        (b, sides)
        for b in range(draft.shape[0])
        for sides in itertools.product(*(list(itertools.pairwise(sorted(edges[b, axis]))) for axis in _axes(draft)))
    ]
    rows_P = torch.tensor([b for b, _ in cells])
    middle_PA = torch.tensor([[(low + high) / 2 for low, high in sides] for _, sides in cells], dtype=torch.float64)
    places_P, tokens_P = _evaluate(policy, target, draft, rows_P, middle_PA)
    volumes = (math.prod(high - low for low, high in sides) for _, sides in cells)
    return list(zip(rows_P.tolist(), volumes, places_P.tolist(), tokens_P.tolist()))


def _axes(draft: Draft) -> range:
    """Return the axes of noise: a coin for each token, then the draw."""
    return range(draft.shape[1] + 1)


def _evaluate(
    policy: AcceptancePolicy, target: Target, draft: Draft, rows_P: Tensor, noise_PA: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge rows by a bound policy, each with its own point of noise. Returns the place [P] where the next token
    follows, and the next token [P]."""
    noise_PA = noise_PA.float().clamp_max(1 - TICK)
    verdict = verify(policy, target.rows(rows_P), draft.rows(rows_P), Noise(noise_PA[:, :-1], noise_PA[:, -1]))
    if verdict.path_BK is None:
        return verdict.accepted_B, verdict.next_token_B
    return torch.tensor([path[-1] + 1 if path else 0 for path in verdict.paths()]), verdict.next_token_B


def _steps(policy: AcceptancePolicy, target: Target, draft: Draft) -> set[tuple[int, int, float]]:
    """Find where verdicts change, as (row, axis of noise, position on the axis), to within 2^-24. A grid shows the
    intervals in which a verdict changes, and finer grids refine them.

    Each axis is scanned with the other coins at both ends (accepting and rejecting). This finds every step of a rule
    whose thresholds do not depend on other coins, as is true of all published rules.
    """
    axes, ends = _axes(draft), [0.0, 1 - TICK]
    lines = [
        (b, axis, corner)
        for b, axis in itertools.product(range(draft.shape[0]), axes)
        for corner in itertools.product(*([0.0] if a in (axis, axes[-1]) else ends for a in axes))
    ]
    row_L, axis_L = (torch.tensor([line[i] for line in lines]) for i in (0, 1))
    corner_LA = torch.tensor([corner for _, _, corner in lines], dtype=torch.float64)

    def outcomes(line_P: Tensor, at_P: Tensor) -> Tensor:
        """Return a code of the verdict at each point of a line, [P]."""
        noise_PA = corner_LA[line_P].scatter(1, axis_L[line_P].unsqueeze(1), at_P.unsqueeze(1))
        places_P, tokens_P = _evaluate(policy, target, draft, row_L[line_P], noise_PA)
        return places_P * (target.logits_BKV.shape[-1] + 1) + tokens_P

    # Find the intervals of a grid in which the verdict changes.
    grid = torch.linspace(0, 1, 65, dtype=torch.float64)
    codes = outcomes(torch.arange(len(lines)).repeat_interleave(len(grid)), grid.repeat(len(lines))).view(-1, len(grid))
    line_P, at_P = (codes[:, 1:] != codes[:, :-1]).nonzero().unbind(1)
    low_P = grid[at_P]
    end_P = grid[at_P + 1]
    left_P = codes[line_P, at_P]
    right_P = codes[line_P, at_P + 1]
    # Keep the quarter with the first step, ten times; where another step remains behind it, search the rest again.
    parts = torch.arange(1, 4, dtype=torch.float64) / 4
    step_places: set[tuple[int, int, float]] = set()
    while len(line_P):
        high_P = end_P
        for _ in range(10):
            size_P1 = (high_P - low_P).unsqueeze(1)
            at_PI = low_P.unsqueeze(1) + size_P1 * parts
            same_PI = outcomes(line_P.repeat_interleave(3), at_PI.flatten()).view(-1, 3) == left_P.unsqueeze(1)
            low_P = low_P + same_PI.cumprod(1).sum(1) / 4 * size_P1.squeeze(1)
            high_P = low_P + size_P1.squeeze(1) / 4
        steps = ((high_P * 2**22).round() / 2**22).tolist()
        step_places.update(zip(row_L[line_P].tolist(), axis_L[line_P].tolist(), steps))
        after_P = outcomes(line_P, high_P)
        again_P = (after_P != right_P) & (end_P - high_P > 2 * TICK)  # another step before the end of the interval
        line_P, low_P, end_P, left_P, right_P = (part[again_P] for part in (line_P, high_P, end_P, after_P, right_P))
    return step_places
