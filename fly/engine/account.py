"""Apply a decided block to its row: append the kept tokens, record why each was kept, and count. Knows nothing of
models.

Shape legend: B rows, J positions of a row, N positions in all, X numbers of a position, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from fly.runner.request import Row, Token
from fly.types import Decision, Mismatch, Why

__all__ = ["apply", "explain_tokens", "logprobs"]


def apply(row: Row, decisions: abc.Sequence[Decision], left: int, prompt: bool = False) -> list[Token]:
    """Extend the row by the tokens that its decided blocks emit, exactly up to where the row ends, and count them.

    Args:
        decisions: one for each block, in order; tokens after the row's end are dropped.
        left: the number of tokens that the row may still emit.
        prompt: whether the block comes from the forward that ended the prompt, which does not count as a round.

    Returns the emitted tokens. A row that ends gets its ``finish_reason``.
    """
    stats = row.stats
    first = len(row.provenance)
    if row.on_token is None and len(decisions) > 1 and not any(decision.drafted for decision in decisions[:-1]):
        # Rounds without a draft emit one token each. Only the last round of a call can end a row, so the tokens of the
        # others are appended together.
        _append_bonuses(row, decisions[:-1])
        left -= len(decisions) - 1
        decisions = decisions[-1:]
    for drafted, path, next_token, bonus, choices, mismatches in decisions:
        if row.finish_reason:
            break
        # Append the accepted path and the target's own token, up to the row's end.
        ids = [drafted[node] for node in path] if drafted else []
        ids.append(next_token)
        count = _extend(row, ids, left)
        left -= count
        # Record why each token was kept, and what the target would have chosen in its place.
        kept = path if count > len(path) else path[:count]
        block: list[Token] = []
        place = 0  # index into the target's choices: 0 is after the row, node + 1 after a drafted token
        for node in kept:
            block.append(Token(drafted[node], Why.MATCH, None, choices[place]))
            place = node + 1
        if count > len(path):
            block.append(Token(next_token, Why.BONUS if bonus else Why.CORRECTION, None, choices[place]))
        if mismatches:
            _record_mismatches(row, block, kept, mismatches, count > len(path))
        row.provenance += block
        stats.generated += count
        if not prompt:
            stats.rounds += 1
            stats.emitted += count
        if drafted:
            stats.drafted += len(drafted)
            stats.accepted += len(kept)
            row.drafts.append((len(drafted), len(kept)))
    return row.provenance[first:]


def _append_bonuses(row: Row, decisions: abc.Sequence[Decision]) -> None:
    """Extend the row by rounds without a draft that do not end it."""
    row.tokens += [decision.next_token for decision in decisions]
    row.provenance += [Token(decision.next_token, Why.BONUS, None, decision.choices[0]) for decision in decisions]
    row.stats.generated += len(decisions)
    row.stats.emitted += len(decisions)
    row.stats.rounds += len(decisions)


def _record_mismatches(
    row: Row, block: list[Token], kept: abc.Sequence[int], mismatches: abc.Sequence[Mismatch], complete: bool
) -> None:
    """Mark relaxed tokens of the ``block``, which follows ``row.provenance``, with the clauses that excused them. Note
    their positions, and count what each clause did.

    If the row ended within the path (not ``complete``), mismatches after its end were not emitted and do not count.
    """
    stats = row.stats
    relaxation = row.policy.relaxation
    place_of = {node: place for place, node in enumerate(kept)}
    for mismatch in mismatches:
        if not complete and mismatch.node not in place_of:
            continue
        held = mismatch.held
        if relaxation is not None and held:
            stats.count_gates(held, *relaxation.deciding(held))
        if mismatch.relaxed:
            place = place_of[mismatch.node]
            clause = " & ".join(label for label, yes in held.items() if yes) or str(row.policy)
            block[place] = block[place]._replace(why=Why.RELAXED, clause=clause)
            row.relaxed_at.append(row.prompt_length + len(row.provenance) + place)
            stats.charge(mismatch)


def _extend(row: Row, ids: list[int], left: int) -> int:
    """Append ``ids``, at least one, to the row up to its end, and return how many were appended."""
    if row.on_token is None and len(ids) < left and row.stop_ids.isdisjoint(ids):
        row.tokens += ids
        return len(ids)
    before = len(row.tokens)
    for count, token in enumerate(ids, start=1):
        row.tokens.append(token)
        try:
            ended = row.on_token is not None and row.on_token(token)  # called with end tokens as well
        except BaseException:
            del row.tokens[before:]  # tokens and provenance must have equal lengths
            raise
        if ended or token in row.stop_ids:
            row.finish_reason = "stop"
        elif count == left:
            row.finish_reason = "length"
        if row.finish_reason:
            break
    return count


def logprobs(log_JV: Tensor, ids: abc.Sequence[int], count: int) -> list[dict[int, float]]:
    """Return for each position the log-probabilities of the ``count`` likeliest tokens, likeliest first, and of its
    token in ``ids``."""
    log_J1 = log_JV.gather(1, torch.tensor(ids, device=log_JV.device)[:, None])
    lines = _read_likeliest(log_JV, log_J1, count)
    return [_make_entry(token, log, likeliest, count) for token, ((log,), likeliest) in zip(ids, lines)]


def _read_likeliest(log_NV: Tensor, values_NX: Tensor, count: int) -> list[tuple[list[float], list[float]]]:
    """Return two lists for each position: its ``values_NX``; and the ids of the ``count`` likeliest tokens, followed by
    their log-probabilities. Copies to the host once."""
    top = log_NV.topk(min(count, log_NV.shape[-1]), dim=-1)
    width = values_NX.shape[1]
    lines = torch.cat([column.double() for column in (values_NX, top.indices, top.values)], 1).tolist()
    return [(line[:width], line[width:]) for line in lines]


def _make_entry(token: int, log: float, likeliest: list[float], count: int) -> dict[int, float]:
    """Return the log-probabilities, by id, of the ``count`` likeliest tokens and of ``token``, which has ``log``."""
    ids, values = likeliest[: len(likeliest) // 2], likeliest[len(likeliest) // 2 :]
    entry = dict(zip(map(int, ids[:count]), values))
    entry.setdefault(token, log)
    return entry


def explain_tokens(
    raw_BJV: Tensor,
    rows: abc.Sequence[Row],
    decisions: abc.Sequence[Decision],
    emitted: abc.Sequence[list[Token]],
    put: Callable[[list[int]], Tensor],
) -> None:
    """Record log-probabilities and explanations of the tokens just emitted, for the rows that ask for them.

    Args:
        raw_BJV: the logits, as the target gave them.
        emitted: for each row, the tokens that it got, the last ones of its ``provenance``.
        put: puts numbers on the logits' device (called once, for all rows).
    """
    watched = [b for b, row in enumerate(rows) if row.params.logprobs is not None or row.params.explain]
    if not watched:
        return
    # Gather the new tokens of these rows, and the place in the block that each follows.
    numbers = list[int]()
    places = list[int]()
    tokens = list[Token]()
    for b in watched:
        new = emitted[b]
        numbers += [b] * len(new)
        places += [0, *(node + 1 for node in decisions[b].path)][: len(new)]
        tokens += new
    ids = [token.id for token in tokens]
    choices = [token.id if token.target_choice is None else token.target_choice for token in tokens]
    b_N, place_N, id_N, choice_N = put([*numbers, *places, *ids, *choices]).view(4, -1)
    # Compute: log-probability, probability, the choice's probability and the entropy (in nats) at each.
    log_NV = raw_BJV[b_N, place_N].log_softmax(-1)
    probs_NV = log_NV.exp()
    entropy_N = -(probs_NV * log_NV.clamp_min(torch.finfo(log_NV.dtype).min)).sum(-1)  # 0 * -inf is 0 here
    pairs_N2 = torch.stack([id_N, choice_N], 1)
    values_N4 = torch.cat([log_NV.gather(1, id_N[:, None]), probs_NV.gather(1, pairs_N2), entropy_N[:, None]], 1)
    lines = iter(_read_likeliest(log_NV, values_N4, max(rows[b].params.logprobs or 0 for b in watched)))
    # Record them, row by row.
    for b in watched:
        row = rows[b]
        entries = []
        explained = []
        for token in emitted[b]:
            (log, prob, choice_prob, entropy), likeliest = next(lines)
            entries.append(_make_entry(token.id, log, likeliest, row.params.logprobs or 0))
            explained.append(token._replace(prob=prob, choice_prob=choice_prob, entropy=entropy))
        if row.params.logprobs is not None:
            row.logprobs += entries
        if row.params.explain:
            row.provenance[len(row.provenance) - len(explained) :] = explained
