"""Decisions on the host, in lists and short calls of compiled code: the same as ``fly.policies.verification.decide``
does in tensors.

Between two forwards of a small model, lists take a fifth of the time of tensors, whose code is no longer in any cache.

Shape legend: B rows, K longest draft, J positions of a row, V vocabulary.
"""

from __future__ import annotations

import math
from array import array
from collections import abc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fly.backends.cpu.library import Sampling, short
from fly.executor import Executor
from fly.ops import Stream
from fly.policies.base import AcceptancePolicy, accepts_exactly, draws_exactly
from fly.policies.conditions import AgreeingWindow, Block, Condition, ControlToken, EntropyGate, Not, Room
from fly.sampling import BatchSampling, ProcessedDistribution
from fly.types import UNDECIDED, Decision, Draft, Mismatch, Target

__all__ = ["HostDecisions", "HostDistribution", "c_sampling", "decide_on_host", "top_at", "uniforms"]

_SOON = 1 << 18  # logits that are gone through sooner than another thread would give the interpreter back
_SMALL = 8192  # vocabularies up to this are gone through in one go


@lru_cache(64)
def c_sampling(sampling: BatchSampling) -> Any:
    """Sampling parameters as compiled code takes them, an array of a row each."""
    columns = sampling.temperature_B, sampling.top_p_B, sampling.min_p_B, sampling.top_k_B, sampling.greedy_B
    rows = list(zip(*(column.tolist() for column in columns)))
    made = (Sampling * len(rows))()
    for row, (temperature, top_p, min_p, top_k, greedy) in zip(made, rows):
        row.temperature, row.top_p, row.top_k = 0.0 if greedy else temperature, top_p, min(top_k, 2**31 - 1)
        row.floor = temperature * math.log(min_p) if min_p else -math.inf
    return made


def uniforms(seeds: abc.Sequence[int], starts: abc.Sequence[int], stream: int, n: int) -> array[float]:
    """``fly.ops.uniforms`` of rows, one row after the other."""
    seed, start, found = array("q", seeds), array("q", starts), array("f", bytes(4 * n * len(seeds)))
    short("fly_uniforms")(seed, start, stream, n, found)
    return found


def top_at(logits_BKV: Tensor, b: int, j: int, n: int) -> tuple[list[float], float]:
    """Of one position: the min(n, V) largest logits, largest first, and ln of the sum of exp over all."""
    n = min(n, logits_BKV.shape[-1])
    found = array("f", bytes(4 * (n + 1)))
    short("fly_top")(logits_BKV[b, j], n, found)
    log_total = found.pop()
    return found.tolist(), log_total


class HostDistribution(ProcessedDistribution):
    """The processed distribution of logits on the CPU, small ones found by compiled code."""

    def _find(self) -> tuple[Tensor, Tensor | None, Tensor]:
        rows, positions, width = self.logits_BJV.shape
        if width > _SMALL:
            return super()._find()
        find = short("fly_kept", self.logits_BJV.numel() > _SOON)  # it goes over all of one many times
        logits_BJV, found_3BJ = self.logits_BJV.contiguous(), torch.empty(3, rows, positions)
        find(logits_BJV, positions, width, c_sampling(self.sampling), found_3BJ)
        peak_BJ, least_BJ, total_BJ = found_3BJ
        sampling = self.sampling
        return peak_BJ, least_BJ if sampling.most_k or sampling.top_p or sampling.min_p else None, total_BJ

    def keeps(self, draft: Draft, coins: array[float], all_: bool) -> list[list[bool]] | None:
        """Which drafted tokens of each row the exact rule keeps (``coin < target / draft``): those up to the first that
        it does not keep, or ``all_`` of them. ``coins`` are K a row. None where a draft's distribution is of no kind
        that compiled code reads, or NaN."""
        rows, places, width = self.logits_BJV.shape
        probs_BKV = draft.probs_BKV
        if probs_BKV is not None and not (
            probs_BKV.dtype == torch.float32 and probs_BKV.shape == (rows, places - 1, width)
        ):
            return None
        if not all(0 <= token < width for chain in draft.chains for token in chain):
            return None
        accepts = short("fly_accepts", self.logits_BJV.numel() > _SOON)
        logits_BJV, how = self.logits_BJV.contiguous(), c_sampling(self.sampling)
        probs_BKV = None if probs_BKV is None else probs_BKV.contiguous()
        found, longest = [], places - 1
        for b, chain in enumerate(draft.chains):
            kept, own_KV = array("b", bytes(len(chain))), None if probs_BKV is None else probs_BKV[b]
            own_coins = coins[b * longest : (b + 1) * longest]
            if accepts(logits_BJV[b], width, how[b], array("q", chain), own_KV, own_coins, all_, kept) < 0:
                return None
            found.append([keep != 0 for keep in kept])
        return found

    def follow(self, b: int, j: int, rejected: int | None, draft: Draft, uniform: float) -> int:
        """The token drawn at position ``j`` of row ``b``: from its distribution or, where the exact rule ``rejected`` a
        drafted token, from what the draft's leaves of it (``max(target - draft, 0)``): less than 0 if that holds a
        NaN."""
        logits_V, probs_V = self.logits_BJV[b, j].contiguous(), None
        if rejected is not None and draft.probs_BKV is not None:
            probs_V = draft.probs_BKV[b, j].contiguous()
        number, how = -1 if rejected is None else rejected, c_sampling(self.sampling)
        token: int = short("fly_follow")(logits_V, how[b], number, probs_V, uniform)
        return token


class HostDecisions(Executor):
    """An executor whose logits are on the CPU, where the compiled library is there: what it can, it decides on the
    host. Logits of another kind, such as those that ranks share, go to tensors."""

    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution:
        return HostDistribution(sampling, logits_BJV) if _plain(logits_BJV) else super().process(sampling, logits_BJV)

    def decide(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        if (found := decide_on_host(policy, target, draft, seeds, starts)) is not None:
            return found
        return super().decide(policy, target, draft, seeds, starts)


def _plain(logits: Tensor) -> bool:
    return type(logits) is Tensor and logits.device.type == "cpu" and logits.dtype == torch.float32


def decide_on_host(
    policy: AcceptancePolicy, target: Target, draft: Draft, seeds: abc.Sequence[int], starts: abc.Sequence[int]
) -> list[Decision] | None:
    """``Executor.decide``, for a policy that keeps what the exact rule keeps; None where it is another, or
    where only tensors can say. A relaxation is asked of one mismatch after the other, up to the first that it does not
    excuse."""
    logits_BKV, processed, relaxation = target.logits_BKV, target.lazy_distribution, policy.relaxation
    if not accepts_exactly(policy):
        return None
    if draft.trees is not None:
        plain = target.all_greedy and relaxation is None and type(policy).verdict is AcceptancePolicy.verdict
        return _checked([*map(_descend, draft.chains, draft.trees, target.choices)], target) if plain else None
    if not _plain(logits_BKV) or logits_BKV.stride(-1) != 1:
        return None
    if target.all_greedy:
        rows = zip(draft.chains, target.choices)
        agree = [[token == choice for token, choice in zip(chain, choices)] for chain, choices in rows]
    elif isinstance(processed, HostDistribution) and draws_exactly(policy):
        coins = uniforms(seeds, starts, Stream.ACCEPT, draft.shape[1])
        if (kept := processed.keeps(draft, coins, relaxation is not None)) is None:
            return None
        agree = kept
    else:
        return None
    block: _HostBlock | None = None
    found = []
    for b, (chain, same) in enumerate(zip(draft.chains, agree)):
        n, end = 0, len(chain)
        mismatches = []
        while True:
            while n < end and same[n]:
                n += 1
            if n == end:
                break
            held: dict[str, bool] = {}
            excused, nats = False, 0.0
            if relaxation is not None:
                block = block or _HostBlock(target, draft, agree)
                held = {clause.label: _holds(clause, block, b, n) for clause in relaxation.clauses}
                logit = logits_BKV[b, n, chain[n]].item()
                excused = relaxation.decide(held) and logit != -math.inf  # as ``Target.allowed``
                if excused:
                    nats = top_at(logits_BKV, b, n, 1)[1] - logit
                mismatches.append(Mismatch(n, excused, held, nats))
            if not excused:
                break
            n += 1
        if target.all_greedy:
            following = target.choices[b][n]
        else:
            assert isinstance(processed, HostDistribution)
            uniform = uniforms(seeds[b : b + 1], starts[b : b + 1], Stream.SAMPLE, 1)[0]
            following = processed.follow(b, n, chain[n] if n < end else None, draft, uniform)
        found.append(Decision(chain, range(n), following, n == end, target.choices[b], mismatches))
    return _checked(found, target)


def _checked(found: list[Decision], target: Target) -> list[Decision]:
    """The decisions, ``UNDECIDED`` where logits are NaN (their largest is NaN then), if nobody has looked."""
    if target.checked:
        return found
    ends = [one.path[-1] + 1 if len(one.path) else 0 for one in found]
    largest = (target.logits_BKV[b, end, one.choices[end]].item() for b, (end, one) in enumerate(zip(ends, found)))
    return [one._replace(next_token=UNDECIDED) if math.isnan(x) else one for x, one in zip(largest, found)]


def _descend(tokens: list[int], parents: list[int], choices: list[int]) -> Decision:
    """The nodes of a tree that are kept at temperature 0: the branch of the target's own choices."""
    path: list[int] = []
    at = -1
    for node, parent in enumerate(
        parents
    ):  # no token comes before its parent, nor before a sibling that is tried first
        if parent == at and tokens[node] == choices[at + 1]:
            path.append(node)
            at = node
    return Decision(tokens, path, choices[at + 1], at not in parents, choices)


class _HostBlock:
    """A block whose agreement is known as lists; as tensors if a condition needs them."""

    def __init__(self, target: Target, draft: Draft, agree: list[list[bool]]) -> None:
        self.target, self.draft, self.agree = target, draft, agree
        self._tensors: Block | None = None

    @property
    def tensors(self) -> Block:
        if self._tensors is None:
            longest = self.draft.shape[1]
            agree_BK = torch.tensor([[*same, *[False] * (longest - len(same))] for same in self.agree])
            self._tensors = Block(self.target, self.draft, agree_BK)
        return self._tensors


def _holds(condition: Condition, block: _HostBlock, b: int, j: int) -> bool:
    """Whether a condition excuses the mismatch at position ``j`` of row ``b``: computed on the host for known kinds,
    else by its tensors."""
    if type(condition) is Not and type(condition.part) in _ON_HOST:
        said = _ON_HOST[type(condition.part)](condition.part, block, b, j)
        return bool(condition.holds(block.tensors)[b, j]) if said is None else not said
    if (ask := _ON_HOST.get(type(condition))) is not None and (said := ask(condition, block, b, j)) is not None:
        return said
    return bool(condition.holds(block.tensors)[b, j])


def _entropy(gate: EntropyGate, block: _HostBlock, b: int, j: int) -> bool | None:
    target = block.target
    if gate.entropy != "top3" or not (target.all_greedy or not gate.processed):
        return None
    likeliest, log_total = top_at(target.logits_BKV, b, j, 3)
    entropy = 0.0  # one after the other, as compiled code does
    for z in likeliest:
        if z > -math.inf:
            entropy -= math.exp(z - log_total) * (z - log_total)
    return entropy >= gate.theta


def _window(condition: AgreeingWindow, block: _HostBlock, b: int, j: int) -> bool:
    following = block.agree[b][j + 1 : j + 1 + condition.window]
    return len(following) == condition.window and all(following)


def _room(condition: Room, block: _HostBlock, b: int, j: int) -> bool:
    return j + 1 + condition.hold <= len(block.draft.chains[b])


def _control(condition: ControlToken, block: _HostBlock, b: int, j: int) -> bool:
    control_V = block.target.control_V
    return control_V is not None and bool(control_V.numpy()[block.draft.chains[b][j]])


# Exact kinds only: a subclass may say something else.
_ON_HOST: dict[type[Condition], Callable[[Any, _HostBlock, int, int], bool | None]] = {
    EntropyGate: _entropy,
    AgreeingWindow: _window,
    Room: _room,
    ControlToken: _control,
}
