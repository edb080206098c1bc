"""Decisions by compiled code (src/decide.cpp): prepare its arguments, call it, and read its results.

``CpuExecutor.decide_group`` calls ``decide_compiled`` for blocks whose logits Python holds: those after a prompt, and
those of rows that ``CpuExecutor.takes`` refuses. rounds.py uses the same rules and blocks for several rounds in one
call.

Shape legend: B rows, K longest draft, J positions of a row, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import abc
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fly.backends.cpu.library import (
    MISMATCH,
    CBlocks,
    CClause,
    CMismatch,
    CRule,
    CRules,
    Sampling,
    clause_kinds,
    default_number,
    fast_call,
)
from fly.policies.base import AcceptancePolicy, accepts_exactly, draws_exactly
from fly.policies.conditions import Clause, Condition, Past
from fly.runner.sampling import BatchSampling, ProcessedDistribution
from fly.types import Decision, Draft, Mismatch, Target

__all__ = [
    "Blocks",
    "HostDistribution",
    "c_sampling",
    "clauses_of",
    "decide_compiled",
    "is_compiled",
    "lay_rules",
    "uniforms",
]

_MAX_VALUE = 2.0**53  # the largest number in a clause; nothing that it is compared with is as large
_MAX_CLAUSES = 31  # each clause has a bit
# A call over at most this many logits holds the interpreter lock: reading them is faster than taking the lock back from
# another thread.
_MAX_LOCKED = 1 << 18
_MAX_VOCAB = 8192  # compiled code computes distributions over vocabularies up to this size


@lru_cache(64)
def c_sampling(sampling: BatchSampling) -> Any:
    """Lay out sampling parameters for the library: an array with an element for each row."""
    columns = sampling.temperature_B, sampling.top_p_B, sampling.min_p_B, sampling.top_k_B, sampling.greedy_B
    rows = list(zip(*(column.tolist() for column in columns)))
    c_rows = (Sampling * len(rows))()
    for c_row, (temperature, top_p, min_p, top_k, greedy) in zip(c_rows, rows):
        c_row.temperature = 0.0 if greedy else temperature
        c_row.top_p = top_p
        c_row.top_k = min(top_k, 2**31 - 1)
        c_row.floor = temperature * math.log(min_p) if min_p else -math.inf
    return c_rows


def uniforms(seeds: abc.Sequence[int], starts: abc.Sequence[int], stream: int, n: int) -> array[float]:
    """Return what ``fly.ops.uniforms`` returns, row after row."""
    seed = array("q", seeds)
    start = array("q", starts)
    numbers = array("f", bytes(4 * n * len(seeds)))
    fast_call("fly_uniforms")(seed, start, stream, n, numbers)
    return numbers


def _can_read(logits: Tensor) -> bool:
    """Whether compiled code can read these logits: a plain float32 tensor on the CPU."""
    return type(logits) is Tensor and logits.device.type == "cpu" and logits.dtype == torch.float32


class HostDistribution(ProcessedDistribution):
    """The processed distribution of logits on the CPU. Compiled code computes it for small vocabularies."""

    def _find(self) -> tuple[Tensor, Tensor | None, Tensor]:
        rows, positions, width = self.logits_BJV.shape
        if width > _MAX_VOCAB or not _can_read(self.logits_BJV):
            return super()._find()
        find = fast_call("fly_kept", self.logits_BJV.numel() > _MAX_LOCKED)
        logits_BJV, found_3BJ = self.logits_BJV.contiguous(), torch.empty(3, rows, positions)
        find(logits_BJV, positions, width, c_sampling(self.sampling), found_3BJ)
        peak_BJ, least_BJ, total_BJ = found_3BJ
        sampling = self.sampling
        return peak_BJ, least_BJ if sampling.most_k or sampling.top_p or sampling.min_p else None, total_BJ


def is_compiled(policy: AcceptancePolicy, greedy: bool) -> bool:
    """Whether compiled code implements the core of a rule: the core keeps what the exact rule keeps and, above
    temperature 0, draws corrections like the exact rule, or it is a gate that compiled code knows."""
    if accepts_exactly(policy):
        return greedy or draws_exactly(policy)
    gate = policy.compiled_gate
    return policy.relaxation is None and gate is not None and gate.kind in clause_kinds()


def clauses_of(policy: AcceptancePolicy) -> list[Clause] | None:
    """Return the compiled clauses of a rule that ``is_compiled``: those that excuse a mismatch, or its gate. None if
    only Python knows whether a mismatch is excused."""
    if not accepts_exactly(policy):
        gate = policy.compiled_gate
        return None if gate is None else [gate]
    relaxation = policy.relaxation
    if relaxation is None:
        return []
    clauses = relaxation.compiled
    if clauses is None or len(clauses) > _MAX_CLAUSES or not all(clause.kind in clause_kinds() for clause in clauses):
        return None
    return clauses if relaxation.joins_all or relaxation.table is not None else None


def _lay_clause(clause: Clause, past: Past, masks: list[Tensor]) -> CClause:
    """Lay out a clause for the library, with the values that it takes from the row's past. A mask is appended to
    ``masks`` unless it is there, and the clause gets its number."""
    kind, names = clause_kinds()[clause.kind]
    laid = CClause(kind)
    laid.value[0] = clause.negated
    for n, name in enumerate(names, start=1):
        value = clause.values[name]
        if isinstance(value, Tensor):
            number: float = next((n for n, mask in enumerate(masks) if mask is value), len(masks))
            if number == len(masks):
                masks.append(value)
        else:
            number = value(past) if callable(value) else value
        laid.value[n] = max(-_MAX_VALUE, min(number, _MAX_VALUE))
    return laid


def lay_rules(
    rows: abc.Sequence[tuple[AcceptancePolicy, bool, int, Past]],
    sampling: BatchSampling | None,
    control_V: Tensor | None,
    vocab: int,
) -> CRules:
    """Lay out the rules of rows for the library.

    Args:
        rows: each row's policy, whether it is greedy, its seed and its past. Blocks of a policy whose core is not
            compiled (``is_compiled``) stay open.
        sampling: how rows are sampled; None at temperature 0.
        control_V: bool, the control tokens of the vocabulary; None for none.
        vocab: V, the width of the logits.
    """
    rule = (CRule * len(rows))()
    listed = list[CClause]()
    masks = list[Tensor]()
    for c_rule, (policy, greedy, seed, past) in zip(rule, rows):
        c_rule.seed = seed
        c_rule.unknown = not is_compiled(policy, greedy)
        clauses = [] if c_rule.unknown else clauses_of(policy)
        c_rule.clause_at = len(listed)
        c_rule.in_python = clauses is None
        c_rule.is_gate = not accepts_exactly(policy)
        listed += [_lay_clause(clause, past, masks) for clause in clauses or ()]
        c_rule.clauses = len(listed) - c_rule.clause_at
        if clauses:
            c_rule.table = 0b10 if policy.relaxation is None else policy.relaxation.table or 0  # a gate is one clause
    rules = CRules(default_number(), vocab)
    if listed and control_V is None:
        control_V = torch.zeros(vocab, dtype=torch.bool)
    for mask in masks:
        if mask.shape != (vocab,):
            raise ValueError(f"a condition's mask has {len(mask)} tokens, and the logits have {vocab}")
    rules.hand(
        rule=rule,
        sampling=None if sampling is None else c_sampling(sampling),
        clause=(CClause * len(listed))(*listed) if listed else None,
        control=control_V,
        mask=torch.stack(masks) if masks else None,
    )
    return rules


class Blocks:
    """Blocks of some rows, round after round, in memory that the library reads and writes.

    Args:
        rows: how many rows there are.
        k: the most tokens of a block.
        max_rounds: the most rounds.
        mismatches: how many mismatches there is room for. They are noted only if there are clauses.
    """

    def __init__(self, rows: int, k: int, max_rounds: int, mismatches: int) -> None:
        size = rows * max_rounds
        self.k, self.max_rounds = k, max_rounds
        self.drafted = array("q", bytes(8 * size * k))
        self.following = array("q", bytes(8 * size))
        self.count = array("i", bytes(4 * size))
        self.accepted = array("i", bytes(4 * size))
        self.choice = array("i", bytes(4 * size * (k + 1)))
        self._mismatch = array("B", bytes(MISMATCH.size * mismatches))
        self.c = CBlocks(k, max_rounds)
        self.c.hand(drafted=self.drafted, drafted_count=self.count, choice=self.choice)
        self.c.hand(accepted=self.accepted, following=self.following, mismatch=self._mismatch)

    def is_open(self, b: int, round_: int) -> bool:
        """Whether the block of row ``b`` is still to be decided."""
        return self.following[b * self.max_rounds + round_] < 0

    def chain(self, b: int, round_: int) -> list[int]:
        """Return the drafted tokens of a block."""
        at = b * self.max_rounds + round_
        return self.drafted[at * self.k : at * self.k + self.count[at]].tolist()

    def decisions(self, rounds: abc.Sequence[int], relaxations: abc.Sequence[Condition | None]) -> list[list[Decision]]:
        """Return, for each row, the decisions of the first ``rounds[b]`` rounds."""
        k, wide = self.k, self.k + 1
        decisions: list[list[Decision]] = [[] for _ in rounds]
        for b, (of_row, end) in enumerate(zip(decisions, rounds)):
            at = b * self.max_rounds
            to = at + end
            chains, choices = self.drafted[at * k : to * k].tolist(), self.choice[at * wide : to * wide].tolist()
            for i, (n, m, token) in enumerate(zip(self.count[at:to], self.accepted[at:to], self.following[at:to])):
                chain, target_choices = chains[i * k : i * k + n], choices[i * wide : i * wide + n + 1]
                of_row.append(Decision(chain, range(m), token, m == n, target_choices))
        if self.c.mismatches:
            self._add_mismatches(decisions, relaxations)
        return decisions

    def _add_mismatches(self, decisions: list[list[Decision]], relaxations: abc.Sequence[Condition | None]) -> None:
        """Add each mismatch to its decision, with the clauses that held for it."""
        labels = [[] if each is None else [clause.label for clause in each.clauses] for each in relaxations]
        budgets = [[] if each is None else [budget.label for budget in each.budgets] for each in relaxations]
        held_by_bits: dict[tuple[int, int], dict[str, bool]] = {}
        mismatches_of: dict[tuple[int, int], list[Mismatch]] = {}
        noted = map(CMismatch._make, MISMATCH.iter_unpack(self._mismatch[: self.c.mismatches * MISMATCH.size]))
        for row, round_, node, bits, excused, nats, regret in noted:
            if (held := held_by_bits.get((row, bits))) is None:
                held = held_by_bits[row, bits] = {label: bool(bits >> bit & 1) for bit, label in enumerate(labels[row])}
            # All budgets that compiled code knows are of regret (``RegretBudget``).
            costs = dict.fromkeys(budgets[row], regret) if excused else {}
            mismatch = Mismatch(node, bool(excused), held, nats, costs)
            mismatches_of.setdefault((row, round_), []).append(mismatch)
        for (row, round_), mismatches in mismatches_of.items():
            decisions[row][round_] = decisions[row][round_]._replace(mismatches=mismatches)


class _TargetCosts:
    """What a target says of the account of row ``b``, which is read when a clause asks."""

    def __init__(self, target: Target, b: int) -> None:
        self._target, self._b = target, b

    @property
    def relaxed(self) -> int:
        return int(self._target.relaxed_B[self._b])

    @property
    def nats(self) -> float:
        return float(self._target.nats_B[self._b])

    def cost(self, label: str) -> float:
        return float(self._target.spent(label)[self._b])


class _TargetPast:
    """What a target says of the past of row ``b``, which is read when a clause asks."""

    def __init__(self, target: Target, b: int) -> None:
        self._target, self._b = target, b

    @property
    def account(self) -> _TargetCosts:
        return _TargetCosts(self._target, self._b)

    @property
    def generated(self) -> int:
        return int(self._target.generated_B[self._b])

    @property
    def history(self) -> list[int] | None:
        return None if self._target.history is None else self._target.history[self._b]


def decide_compiled(
    policy: AcceptancePolicy, target: Target, draft: Draft, seeds: abc.Sequence[int], starts: abc.Sequence[int]
) -> list[Decision] | None:
    """Decide by compiled code as ``Executor.decide_group`` does. Return None if the tensor rule has to decide: compiled
    code lacks this rule or this kind of draft, only Python knows whether a mismatch is excused, or the decision depends
    on a NaN."""
    logits_BJV = target.logits_BKV
    processed = target.lazy_distribution
    probs_BKV = None if target.all_greedy else draft.probs_BKV
    count, longest = draft.shape
    vocab = logits_BJV.shape[-1]
    if (
        draft.trees is not None
        or not is_compiled(policy, target.all_greedy)
        or not _can_read(logits_BJV)
        or not (target.all_greedy or isinstance(processed, HostDistribution))
        or logits_BJV.shape[:2] != (count, longest + 1)
        or not all(0 <= token < vocab for chain in draft.chains for token in chain)
    ):
        return None
    if probs_BKV is not None and (probs_BKV.dtype != torch.float32 or probs_BKV.shape != (count, longest, vocab)):
        return None
    sampling = processed.sampling if isinstance(processed, HostDistribution) else None
    rows = [(policy, target.all_greedy, seed, _TargetPast(target, b)) for b, seed in enumerate(seeds)]
    rules = lay_rules(rows, sampling, target.control_V, vocab)
    blocks = Blocks(count, longest, 1, count * (longest + 1))
    for b, chain in enumerate(draft.chains):
        at, n = b * longest, len(chain)
        blocks.count[b] = n
        blocks.drafted[at : at + n] = array("q", chain)
        blocks.choice[b * (longest + 1) : (b + 1) * (longest + 1)] = array("i", target.choices[b])
    decide = fast_call("fly_decide", logits_BJV.numel() > _MAX_LOCKED)
    decide(
        ctypes.byref(rules),
        ctypes.byref(blocks.c),
        array("q", starts),
        logits_BJV.contiguous(),
        None if probs_BKV is None else probs_BKV.contiguous(),
    )
    if any(blocks.is_open(b, 0) for b in range(count)):
        return None
    return [one for (one,) in blocks.decisions([1] * count, [policy.relaxation] * count)]
