"""What a decided block does to its row: the tokens that are kept, why each is, and the counts. Knows nothing of models.

Shape legend: B rows, J positions of a row, N positions in all, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from fly.runtime.request import Sequence, Token
from fly.types import Decision, Why

__all__ = ["OnToken", "apply", "logprobs", "note"]

OnToken = Callable[[Sequence, int], bool]  # is given each emitted token in order; whether it ends the row there


def apply(
    row: Sequence, decisions: abc.Sequence[Decision], most: int, stopped: OnToken | None = None, prompt: bool = False
) -> list[Token]:
    """Extend the row by the tokens that are kept of its blocks, up to exactly where it ends, and count them.

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
            for node, relaxed, held, nats, costs in mismatches:
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
                    for label, cost in costs.items():
                        stats.spent[label] = stats.spent.get(label, 0.0) + cost
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
    own_J1 = log_JV.gather(1, torch.tensor(ids, device=log_JV.device)[:, None])
    return [_entry(token, *values) for token, values in zip(ids, _listed(log_JV, own_J1, most))]


def _listed(log_NV: Tensor, own_NX: Tensor, most: int) -> list[tuple[list[float], list[float]]]:
    """For each position the tokens ``own_NX`` and the ``most`` likeliest: their ids, then their log-probabilities. Asks
    the device once."""
    top = log_NV.topk(min(most, log_NV.shape[-1]), dim=-1)
    own = own_NX.shape[1]
    values = torch.cat([column.double() for column in (own_NX, top.indices, top.values)], 1).tolist()
    return [(line[:own], line[own:]) for line in values]


def _entry(token: int, own: list[float], likeliest: list[float], most: int | None = None) -> dict[int, float]:
    ids, values = likeliest[: len(likeliest) // 2], likeliest[len(likeliest) // 2 :]
    entry = dict(zip(map(int, ids[:most]), values))
    entry.setdefault(token, own[0])
    return entry


def note(
    raw_BJV: Tensor,
    rows: abc.Sequence[Sequence],
    decisions: abc.Sequence[Decision],
    before: abc.Sequence[int],
    index: Callable[[list[int]], Tensor],
) -> None:
    """Note the log-probabilities and explanations that rows asked for, of the tokens they just emitted: those after the
    first ``before[b]``.

    Args:
        raw_BJV: the logits, as the target gave them.
        index: puts numbers on the logits' device, which is asked for all rows at once.
    """
    watched = [b for b, row in enumerate(rows) if row.params.logprobs is not None or row.params.explain]
    if not watched:
        return
    numbers, at, tokens = list[int](), list[int](), list[Token]()
    for b in watched:
        new = rows[b].provenance[before[b] :]
        numbers += [b] * len(new)
        at += [0, *(node + 1 for node in decisions[b].path)][: len(new)]  # the place that each token follows
        tokens += new
    ids = [token.id for token in tokens]
    choices = [token.id if token.target_choice is None else token.target_choice for token in tokens]
    b_N, at_N, id_N, choice_N = index([*numbers, *at, *ids, *choices]).view(4, -1)
    log_NV = raw_BJV[b_N, at_N].log_softmax(-1)
    probs_NV = log_NV.exp()
    entropy_N = -(probs_NV * log_NV.clamp_min(torch.finfo(log_NV.dtype).min)).sum(-1)  # 0 * -inf is 0 here
    both_N2 = torch.stack([id_N, choice_N], 1)
    own_N4 = torch.cat([log_NV.gather(1, id_N[:, None]), probs_NV.gather(1, both_N2), entropy_N[:, None]], 1)
    most = max(rows[b].params.logprobs or 0 for b in watched)
    found = iter(_listed(log_NV, own_N4, most))
    for b in watched:
        row, entries, explained = rows[b], [], []
        for token in row.provenance[before[b] :]:
            own, likeliest = next(found)
            entries.append(_entry(token.id, own, likeliest, row.params.logprobs or 0))
            explained.append(token._replace(prob=own[1], choice_prob=own[2], entropy=own[3]))
        if row.params.logprobs is not None:
            row.logprobs += entries
        if row.params.explain:
            row.provenance[before[b] :] = explained
