"""The distribution that a policy emits, as an exact sum over all drafts of one shape and over all noise.

The verdict on a block is a step function of its noise; its steps are found by bisection, the unit cube falls into cells
on which the verdict is constant, and the distribution of what is emitted is a sum over all drafts and cells. It is
compared with the target's distribution over all strings of D+1 tokens.

Shape legend: N drafts, K drafted tokens, M = K + 1 places a token can follow (0 is the row's last token, j + 1 the
drafted token j), D longest path, V vocabulary, A = K + 1 axes of noise (K coins and one draw), L lines along an axis, P
points of noise. A table of distributions is a list with one tensor [V^j, V] for each j: what follows each prefix of j
tokens, which are numbered in base V.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fly.ops import pick
from fly.policies import AcceptancePolicy, verify
from fly.sampling import BatchSampling
from fly.testing.distributions import TICK, rounded
from fly.types import Draft, Noise, SamplingParams, Target, depths

__all__ = ["Divergence", "chain_divergences", "tree_divergences"]

_TREES = (([-1, -1], 3), ([-1, -1, 0], 3), ([-1, -1, 1], 2), ([-1, 0, 0], 2))  # parents, vocabulary


@dataclass(frozen=True)
class Divergence:
    """How the distribution of D+1 tokens differs from the target's."""

    gap: float  # largest difference of any string's probability
    total: float  # total variation distance; at temperature 0 the share of drafts that change the text
    first: tuple[float, float] | None  # KL(emitted || target) and total variation of the first token alone
    story: str


def chain_divergences(policy: AcceptancePolicy) -> Iterator[Divergence]:
    """Comparisons on chains from the smallest to the largest, so that the first that fails is a small counterexample."""
    for longest, vocab in ((1, 3), (2, 3), (3, 3), (11, 2)):
        yield from _greedy(policy, longest, vocab)
    for longest, vocab, seeds in ((1, 2, 24), (1, 3, 6), (2, 2, 4), (2, 3, 3), (3, 2, 3), (3, 3, 1)):
        for seed in range(seeds):
            yield from _sampled(policy, list(range(-1, longest - 1)), vocab, seed)


def tree_divergences(policy: AcceptancePolicy) -> Iterator[tuple[list[int], Divergence]]:
    """The parents of small trees, and comparisons on them: siblings drawn independently from one distribution, and
    every certain tree (of different siblings)."""
    for parents, vocab in _TREES:
        for divergence in _sampled(policy, parents, vocab, len(parents), tree=True):
            yield parents, divergence


class _Drafts:
    """Every draft of one shape, and where its places stand in tables."""

    def __init__(self, parents: list[int], vocab: int) -> None:
        self.tokens_NK = torch.tensor(list(itertools.product(range(vocab), repeat=len(parents))))
        self.depths = [0, *(depth + 1 for depth in depths(parents))]  # of each place
        numbers = [torch.zeros(len(self.tokens_NK), dtype=torch.int64)]
        for j, parent in enumerate(parents):
            numbers.append(numbers[parent + 1] * vocab + self.tokens_NK[:, j])
        self.numbers_NM = torch.stack(numbers, dim=1)  # of the prefix at each place

    def look_up(self, table: list[Tensor]) -> Tensor:
        """[N, M, V]: what a table says at each place."""
        return torch.stack([table[d][self.numbers_NM[:, m]] for m, d in enumerate(self.depths)], dim=1)


def _greedy(policy: AcceptancePolicy, longest: int, vocab: int) -> Iterator[Divergence]:
    """At temperature 0 the emitted tokens must be the target's argmax path, for every chain of ``longest`` tokens.

    ``total`` is the share of all drafts that change the text.
    """
    generator = torch.Generator().manual_seed(longest)
    drafts = _Drafts(list(range(-1, longest - 1)), vocab)
    tokens_NK, rows = drafts.tokens_NK, len(drafts.tokens_NK)
    # Position j's logits depend on the drafted prefix, as a model's do.
    logits = drafts.look_up([torch.randn(vocab**j, vocab, generator=generator) for j in range(longest + 1)])
    target = Target(logits, history=[[0]] * rows)
    for coin in (0.0, 0.5, 1 - TICK):  # coins must not matter, the lowest least of all
        noise = Noise(torch.full((rows, longest), coin), torch.full((rows,), coin))
        verdict = verify(policy, target, Draft(tokens_NK, torch.full((rows,), longest)), noise)
        kept = torch.arange(longest) < verdict.accepted_B.unsqueeze(1)
        choice = target.argmax_BK
        wrong = (kept & (tokens_NK != choice[:, :-1])).any(-1)
        wrong |= verdict.next_token_B != pick(choice, verdict.accepted_B)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            n = int(verdict.accepted_B[b])
            emitted = [*tokens_NK[b, :n].tolist(), int(verdict.next_token_B[b])]
            yield Divergence(
                1.0,
                float(wrong.float().mean()),
                None,
                f"at temperature 0 draft {tokens_NK[b].tolist()} emits {emitted}, the target "
                f"{choice[b, : n + 1].tolist()}",
            )


def _sampled(
    policy: AcceptancePolicy, parents: list[int], vocab: int, seed: int, tree: bool = False
) -> Iterator[Divergence]:
    """Emitted against target distribution for one table: with a draft that was drawn, and with every certain draft."""
    drafts = _Drafts(parents, vocab)
    tokens_NK, longest = drafts.tokens_NK, max(drafts.depths)
    logits, targets, claims = _tables(longest, vocab, seed)
    target = Target(drafts.look_up(logits), drafts.look_up(targets), history=[[0]] * len(tokens_NK))
    probs_NKV = drafts.look_up(claims)[:, [parent + 1 for parent in parents]]
    lengths_N = torch.full((len(tokens_NK),), len(parents))
    drawn = Draft(tokens_NK, lengths_N, probs_NKV, torch.tensor(parents).expand_as(tokens_NK) if tree else None)
    chance_N = pick(probs_NKV, tokens_NK).double().prod(-1)
    wanted = _continuations(targets, 0, 0)

    def emitted(draft: Draft, rows_N: Tensor) -> Tensor:
        """[rows, V^(D+1)] distribution of D+1 tokens after some drafts: those that the verdict emits, the rest by the
        target; exact over all noise."""
        found = torch.zeros(len(rows_N), vocab ** (longest + 1), dtype=torch.float64)
        for b, volume, place, token in _cells(policy, target.rows(rows_N), draft.rows(rows_N)):
            prefix = int(drafts.numbers_NM[rows_N[b], place]) * vocab + token
            rest = _continuations(targets, drafts.depths[place] + 1, prefix)
            found[b, prefix * len(rest) : (prefix + 1) * len(rest)] += volume * rest
        return found

    def compare(emitted: Tensor, draft: str) -> Divergence:
        difference = (emitted - wanted).abs()
        worst = int(difference.argmax())
        string = [worst // vocab**i % vocab for i in range(longest, -1, -1)]
        first, first_wanted = (distribution.view(vocab, -1).sum(1) for distribution in (emitted, wanted))
        ratio = first.clamp_min(1e-12) / first_wanted.clamp_min(1e-300)
        return Divergence(
            gap=float(difference.max()),
            total=float(difference.sum() / 2),
            first=(float((first * ratio.log()).sum()), float((first - first_wanted).abs().sum() / 2)),
            story=(
                f"K={longest}, {draft}, target distribution {rounded(targets[0])}: emits {string} with probability "
                f"{float(emitted[worst]):.5f}, the target {float(wanted[worst]):.5f}"
            ),
        )

    possible = chance_N.nonzero().squeeze(1)
    mean = (emitted(drawn, possible) * chance_N[possible].unsqueeze(1)).sum(0)
    yield compare(mean, f"{'siblings drawn from one' if tree else 'draft'} distribution {rounded(claims[0])}")
    texts = tokens_NK.tolist()
    different = [b for b, tokens in enumerate(texts) if len(set(zip(parents, tokens))) == len(parents)]  # siblings
    for b, one in zip(different, emitted(dataclasses.replace(drawn, probs_BKV=None), torch.tensor(different))):
        yield compare(one, f"certain {'tokens' if tree else 'draft'} {texts[b]}")


def _tables(longest: int, vocab: int, seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tables of raw logits, of the target's processed distributions, and of the draft's."""
    generator = torch.Generator().manual_seed(1000 * longest + 100 * vocab + seed)
    simple = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75], [0.0, 1.0], [0.75, 0.25]])
    processed = BatchSampling.of([SamplingParams(temperature=0.6, top_k=vocab - 1 if vocab > 2 else 0)])
    found = []
    for j in range(longest + 1):
        size = vocab**j
        if longest == 1 and vocab == 2 and seed < 20:
            target, draft = (simple[at % 5].expand(size, -1) for at in (seed, seed // 5 + 2 * j + 2))
            raw = target.clamp_min(1e-6).log() * 0.6  # what temperature 0.6 turns into the target's distribution
        else:
            raw = torch.randn(size, vocab, generator=generator) * 1.5
            noisy = raw + torch.randn(size, vocab, generator=generator)
            target, draft = (processed.probs(logits.unsqueeze(0))[0] for logits in (raw, noisy))
        found.append((raw, target, draft))
    logits, targets, drafts = map(list, zip(*found))
    return logits, targets, drafts


def _continuations(table: list[Tensor], length: int, number: int) -> Tensor:
    """[V^(D + 1 - length)] float64: the probability of every string of D+1 tokens that goes on from a prefix of
    ``length`` tokens, given that prefix."""
    joint = torch.ones(1, dtype=torch.float64)
    for after in table[length:]:
        width = len(joint)
        joint = (joint.unsqueeze(1) * after[number * width : (number + 1) * width].double()).reshape(-1)
    return joint


def _cells(policy: AcceptancePolicy, target: Target, draft: Draft) -> list[tuple[int, float, int, int]]:
    """``(row, volume, place, next token)`` of every cell of the noise cube on which a row's verdict is constant."""
    cells = [
        (b, sides)
        for b, steps in enumerate(_steps(policy, target, draft))
        for sides in itertools.product(*(list(itertools.pairwise([0.0, *at, 1.0])) for at in steps))
    ]
    rows_P = torch.tensor([b for b, _ in cells])
    middle_PA = torch.tensor([[(low + high) / 2 for low, high in sides] for _, sides in cells], dtype=torch.float64)
    places_P, tokens_P = _evaluate(policy, target, draft, rows_P, middle_PA)
    volumes = (math.prod(high - low for low, high in sides) for _, sides in cells)
    return list(zip(rows_P.tolist(), volumes, places_P.tolist(), tokens_P.tolist()))


def _evaluate(
    policy: AcceptancePolicy, target: Target, draft: Draft, rows_P: Tensor, noise_PA: Tensor
) -> tuple[Tensor, Tensor]:
    """[P] places that the next tokens follow, and the next tokens, of some rows under a point of noise each."""
    noise_PA = noise_PA.float().clamp_max(1 - TICK)
    verdict = verify(policy, target.rows(rows_P), draft.rows(rows_P), Noise(noise_PA[:, :-1], noise_PA[:, -1]))
    if verdict.path_BK is None:
        return verdict.accepted_B, verdict.next_token_B
    return torch.tensor([path[-1] + 1 if path else 0 for path in verdict.paths()]), verdict.next_token_B


def _steps(policy: AcceptancePolicy, target: Target, draft: Draft) -> list[list[list[float]]]:
    """Where each row's verdict changes along each axis of noise, to 2^-24: found on a grid, refined by bisection.

    An axis is scanned with the other coins at both ends (accepting and rejecting), which shows every step of rules
    whose thresholds do not depend on other coins; all published ones are such.
    """
    rows, longest = draft.shape
    lines = [
        (b, axis, corner)
        for b, axis in itertools.product(range(rows), range(longest + 1))
        for corner in itertools.product(
            *([0.0] if a in (axis, longest) else [0.0, 1 - TICK] for a in range(longest + 1))
        )
    ]
    row_L, axis_L = (torch.tensor([line[i] for line in lines]) for i in (0, 1))
    corner_LA = torch.tensor([corner for _, _, corner in lines], dtype=torch.float64)

    def outcomes(line_P: Tensor, at_P: Tensor) -> Tensor:
        """Codes of the verdicts on points of lines."""
        noise_PA = corner_LA[line_P].scatter(1, axis_L[line_P].unsqueeze(1), at_P.unsqueeze(1))
        places_P, tokens_P = _evaluate(policy, target, draft, row_L[line_P], noise_PA)
        return places_P * (target.logits_BKV.shape[-1] + 1) + tokens_P

    grid = torch.linspace(0, 1, 65, dtype=torch.float64)
    codes = outcomes(torch.arange(len(lines)).repeat_interleave(len(grid)), grid.repeat(len(lines))).view(-1, len(grid))
    line_P, at_P = (codes[:, 1:] != codes[:, :-1]).nonzero().unbind(1)
    low_P, end_P, left_P, right_P = grid[at_P], grid[at_P + 1], codes[line_P, at_P], codes[line_P, at_P + 1]
    found: list[list[set[float]]] = [[set() for _ in range(longest + 1)] for _ in range(rows)]
    while len(line_P):
        high_P = end_P
        for _ in range(20):
            middle_P = (low_P + high_P) / 2
            same_P = outcomes(line_P, middle_P) == left_P
            low_P, high_P = torch.where(same_P, middle_P, low_P), torch.where(same_P, high_P, middle_P)
        for line, step in zip(line_P.tolist(), high_P.tolist()):
            b, axis, _ = lines[line]
            found[b][axis].add(round(step * 2**22) / 2**22)
        after_P = outcomes(line_P, high_P)
        again_P = (after_P != right_P) & (end_P - high_P > 2 * TICK)  # another step before the end of the interval
        line_P, low_P, end_P, left_P, right_P = (
            values[again_P] for values in (line_P, high_P, end_P, after_P, right_P)
        )
    return [[sorted(step for step in steps if 0 < step < 1) for steps in row] for row in found]
