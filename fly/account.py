"""What a decided block does to its row: the tokens that stand, why each does, and the counts. Knows nothing of models.

Shape legend: J positions of a row, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from fly.request import Sequence, Token
from fly.types import Decision, Why

__all__ = ["OnToken", "apply", "explained", "logprobs"]

OnToken = Callable[[Sequence, int], bool]  # is given each emitted token in order; whether it ends the row there


def apply(
    row: Sequence, decisions: abc.Sequence[Decision], most: int, stopped: OnToken | None = None, prompt: bool = False
) -> list[Token]:
    """Extend the row by what stands of its blocks, up to exactly where it ends, and count it.

    Args:
        decisions: in order; what comes after the row's end is dropped.
        most: tokens the row may still emit.
        prompt: the blocks came with the end of the prompt, whose forward counts as no round.

    Returns the tokens that were emitted. A row that ends gets its ``finish_reason``.
    """
    stats, relaxation, first = row.stats, row.policy.relaxation, len(row.provenance)
    if stopped is None and len(decisions) > 1 and not any(decision.drafted for decision in decisions[:-1]):
        # Without a draft, many of the same kind at once; of rounds of one call only the last may end the row.
        ids = [decision.next_token for decision in decisions[:-1]]
        row.tokens += ids
        row.provenance += [Token(one.next_token, Why.BONUS, None, one.choices[0]) for one in decisions[:-1]]
        stats.generated += len(ids)
        stats.emitted += len(ids)
        stats.rounds += len(ids)
        most, decisions = most - len(ids), decisions[-1:]
    for drafted, path, next_token, bonus, choices, mismatches in decisions:
        if row.finish_reason:
            break
        ids = [drafted[node] for node in path] if drafted else []
        ids.append(next_token)
        count = _extend(row, ids, most, stopped)
        most -= count
        standing = min(count, len(path))
        block: list[Token] = []
        place = 0  # of the target's choices: 0 comes after the row, node + 1 after a drafted token
        for node in path[:standing]:
            block.append(Token(drafted[node], Why.MATCH, None, choices[place]))
            place = node + 1
        if count > standing:
            block.append(Token(next_token, Why.BONUS if bonus else Why.CORRECTION, None, choices[place]))
        if mismatches:
            # a row that ended before the rest was tried says nothing of the rest
            heard = None if count > len(path) else {*path[:standing]}
            number = {node: at for at, node in enumerate(path[:standing])}
            for node, relaxed, held, nats in mismatches:
                if heard is not None and node not in heard:
                    continue
                if relaxation is not None and held:
                    stats.count_gates(held, *relaxation.deciding(held))
                if relaxed:
                    at = number[node]
                    clause = " & ".join(label for label, yes in held.items() if yes) or str(row.policy)
                    block[at] = block[at]._replace(why=Why.RELAXED, clause=clause)
                    stats.relaxed += 1
                    stats.nats += nats
        row.provenance += block
        stats.generated += count
        if not prompt:
            stats.rounds += 1
            stats.emitted += count
        if drafted:
            stats.drafted += len(drafted)
            stats.accepted += standing
            row.drafts.append((len(drafted), standing))
    return row.provenance[first:]


def _extend(row: Sequence, ids: list[int], most: int, stopped: OnToken | None) -> int:
    """Append ``ids`` to the row, as many as there are up to its end, and return how many."""
    if stopped is None and len(ids) < most and row.stop_ids.isdisjoint(ids):
        row.tokens += ids
        return len(ids)
    count, before = 0, len(row.tokens)
    for count, token in enumerate(ids, start=1):
        row.tokens.append(token)
        try:
            ended = stopped is not None and stopped(row, token)  # it hears of every token, ends included
        except BaseException:
            del row.tokens[before:]  # no more than the provenance says
            raise
        if ended or token in row.stop_ids:
            row.finish_reason = "stop"
        elif count == most:
            row.finish_reason = "length"
        if row.finish_reason:
            break
    return count


def logprobs(log_JV: Tensor, ids: abc.Sequence[int], most: int) -> list[dict[int, float]]:
    """For each token its own log-probability and those of the ``most`` likeliest, likeliest first."""
    top = log_JV.topk(min(most, log_JV.shape[-1]), dim=-1)
    own_J1 = log_JV.gather(1, torch.tensor(ids, device=log_JV.device)[:, None])
    entries = [dict(zip(*likely)) for likely in zip(top.indices.tolist(), top.values.tolist())]
    for entry, token, (own,) in zip(entries, ids, own_J1.tolist()):
        entry.setdefault(token, own)
    return entries


def explained(log_JV: Tensor, tokens: list[Token]) -> list[Token]:
    """The same tokens, with what the target thought of each."""
    probs_JV = log_JV.exp()
    entropy_J = -(probs_JV * log_JV.clamp_min(torch.finfo(log_JV.dtype).min)).sum(-1)  # 0 * -inf is 0 here
    ids = [[token.id, token.id if token.target_choice is None else token.target_choice] for token in tokens]
    own_J2 = probs_JV.gather(1, torch.tensor(ids, device=log_JV.device))
    return [
        token._replace(prob=own, choice_prob=choice, entropy=entropy)
        for token, (own, choice), entropy in zip(tokens, own_J2.tolist(), entropy_J.tolist())
    ]
