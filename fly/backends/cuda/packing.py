"""Packs the decisions about a batch into one int32 tensor, so that one download brings them to the host.

Shape legend: R rows, K longest draft, J = K + 1 positions, V vocabulary, D longest path of a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fly.ops import pick
from fly.policies import AcceptancePolicy
from fly.policies.base import accepts_exactly
from fly.types import Decision, Draft, Mismatch, Target, Verdict, Why

__all__ = ["may_relax", "nats_of", "pack", "unpack"]

_BITS = 31  # clauses that one number holds


def may_relax(policy: AcceptancePolicy) -> bool:
    """Whether a token may stand that the exact rule does not keep."""
    return not (accepts_exactly(policy) and policy.relaxation is None)


def nats_of(target: Target, draft: Draft) -> Tensor:
    """[R, K] float32, -ln target(token) of the unprocessed distribution."""
    logits_RKV = target.logits_BKV[:, :-1]
    if draft.parents_BK is not None:
        rows_R1 = torch.arange(len(logits_RKV), device=logits_RKV.device).unsqueeze(1)
        logits_RKV = target.logits_BKV[rows_R1, draft.parents_BK + 1]
    return -pick(logits_RKV.log_softmax(-1), draft.tokens_BK)


def pack(draft: Draft, choices_RJ: Tensor, verdict: Verdict, nats_RK: Tensor | None) -> Tensor:
    """[R, columns] int32; ``unpack`` says what in. Rules of one batch may have made different numbers of columns."""
    columns = [draft.lengths_B.unsqueeze(1), verdict.accepted_B.unsqueeze(1), verdict.next_token_B.unsqueeze(1)]
    columns += [draft.tokens_BK, choices_RJ]
    if nats_RK is not None:
        columns += [verdict.why_BK, verdict.asked_BK, nats_RK.view(torch.int32)]
        held = list(verdict.clauses.values())
        for first in range(0, len(held), _BITS):
            bits = [held_RK.int() << bit for bit, held_RK in enumerate(held[first : first + _BITS])]
            columns.append(torch.stack(bits).sum(0))
    if verdict.path_BK is not None:
        columns.append(verdict.path_BK)
    return torch.cat([column.to(torch.int32) for column in columns], dim=1)


def unpack(
    values: Sequence[int],
    nats: Sequence[float],
    longest: int,
    labels: Sequence[str],
    relaxes: bool,
    parents: Sequence[int] | None = None,
    deep: int = 0,
) -> Decision:
    """The decision about one row. ``nats`` are the same columns as float32; ``parents`` are those of a tree, of a batch
    whose longest path has ``deep`` tokens."""
    count, accepted, following, *rest = values
    drafted, choices = rest[:count], rest[longest : longest + count + 1]
    path: Sequence[int] = range(accepted)
    if parents is None:
        bonus = accepted == count
    else:
        path = rest[len(rest) - deep :][:accepted]
        bonus = (path[-1] if path else -1) not in parents
    mismatches = list(_mismatches(values, nats, longest, labels, path)) if relaxes else []
    return Decision(drafted, path, following, bonus, choices, mismatches)


def _mismatches(
    values: Sequence[int], nats: Sequence[float], longest: int, labels: Sequence[str], path: Sequence[int]
) -> Iterator[Mismatch]:
    count = values[0]
    why, asked, cost, bits = (3 + 2 * longest + 1 + n * longest for n in range(4))
    for node in range(count):
        stands = node in path and values[why + node] == Why.RELAXED
        if stands or (labels and values[asked + node]):
            held = {
                label: bool(values[bits + number // _BITS * longest + node] >> number % _BITS & 1)
                for number, label in enumerate(labels)
            }
            yield Mismatch(node, stands, held, nats[cost + node] if stands else 0.0)
