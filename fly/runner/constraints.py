"""Penalties, biases, bans and forms: how a request changes logits at each place of a draft. Knows nothing of models.

Shape legend: B rows, J positions of a row, V vocabulary.
"""

from __future__ import annotations

import struct
from collections import Counter, abc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fly.runner.request import Row

__all__ = ["constrain", "constrains"]

Numbers = Callable[[list[int] | Tensor], Tensor]


def constrains(row: Row) -> bool:
    """Whether ``constrain`` may change anything for a row, now or later in its draft."""
    ends_too_early = bool(row.stop_ids) and row.generated < row.params.min_tokens
    return row.params.penalises or ends_too_early or row.matcher is not None


def constrain(
    logits_BJV: Tensor,
    rows: abc.Sequence[Row],
    drafts: abc.Sequence[list[int]],
    parents: abc.Sequence[list[int]] | None = None,
    numbers: Numbers | None = None,
) -> Tensor:
    """Apply each row's penalties, biases and bans (-inf) to the logits, in this order. Return the result: a copy if
    anything applies.

    These tokens are banned: stop tokens before ``min_tokens``, the token that would complete a bad sequence, and last
    of all the tokens that a row's form does not allow (``fly.runner.structured.Matcher``).

    Position 0 follows the row's last token. Position j + 1 follows the drafted token j and the path to it (``parents``
    is as in ``Draft``; None for chains). Positions beyond a row's draft are padding and stay as they are. ``numbers``
    puts whole numbers on the logits' device (``Executor.numbers``).
    """
    constrained, numbers = logits_BJV, numbers or partial(torch.as_tensor, device=logits_BJV.device)
    for b, (row, draft) in enumerate(zip(rows, drafts)):
        if not constrains(row):
            continue
        early = row.stop_ids and row.generated < row.params.min_tokens
        constrained = logits_BJV.clone() if constrained is logits_BJV else constrained
        tree = range(-1, len(draft) - 1) if parents is None else parents[b]
        texts = [row.tokens[row.prompt_length :]]
        if early or row.params.penalises:
            for token, parent in zip(draft, tree):
                texts.append([*texts[parent + 1], token])
            for logits_V, text in zip(constrained[b], texts):
                if row.params.penalises:
                    _penalise(logits_V, row, text, numbers)
                if early and len(text) < row.params.min_tokens:
                    logits_V[numbers(sorted(row.stop_ids))] = -torch.inf
        if row.matcher is not None:
            raw_JV = logits_BJV[b] if early or row.bad else None
            row.matcher.constrain(constrained[b], texts[0], draft, tree, raw_JV, numbers)
    return constrained


def _penalise(logits_V: Tensor, row: Row, text: list[int], numbers: Numbers) -> None:
    """Apply a request's penalties, biases and bad words to the logits after ``text``, in place."""
    params = row.params
    counts = Counter(text)
    if params.repetition_penalty != 1:
        seen_ids = numbers(sorted({*row.tokens[: row.prompt_length], *counts}))
        seen_logits = logits_V[seen_ids]
        logits_V[seen_ids] = torch.where(
            seen_logits > 0, seen_logits / params.repetition_penalty, seen_logits * params.repetition_penalty
        )
    if counts and (params.frequency_penalty or params.presence_penalty):
        ids, times = numbers([*counts, *counts.values()]).chunk(2)
        logits_V[ids] -= params.frequency_penalty * times.to(logits_V.dtype) + params.presence_penalty
    if biases := params.logit_bias:
        # Copy the biases' bits as whole numbers, in one copy with the ids.
        bits = struct.unpack(f"{len(biases)}q", struct.pack(f"{len(biases)}d", *biases.values()))
        ids, values = numbers([*biases, *bits]).chunk(2)
        logits_V[ids] += values.view(torch.float64).to(logits_V.dtype)
    if row.bad and (banned := row.bad.next(row.tokens[: row.prompt_length] + text)):
        logits_V[numbers(banned)] = -torch.inf
