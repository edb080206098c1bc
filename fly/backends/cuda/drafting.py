"""A draft alone, in one call: K forwards as one graph, and one wait. A target's forward alone, as one graph.

Shape legend: B rows, D of them above temperature 0, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fly.backends.cuda.graphs import upload
from fly.backends.cuda.rounds import Works, catch_up, pages
from fly.backends.cuda.says import ids_of
from fly.backends.cuda.shape import Cuts, Model, Shape, fixed, line, numbers_of, padding, size, text_size
from fly.constraints import constrains
from fly.executor import Batch, Drafted, DraftSpec
from fly.request import Sequence as Row
from fly.sampling import BatchSampling

__all__ = ["draft", "score_few"]


def draft(
    model: Model,
    batch: Batch,
    spec: DraftSpec,
    rows: Sequence[Row],
    most: Sequence[int],
    sampling: BatchSampling | None,
    seeds: Sequence[int],
    works: Works,
) -> Drafted:
    """``Executor.extend``, of rows of at least two tokens.

    The first token keeps to the row's form, since the host knows what that allows after the text. The other tokens are
    checked after they are downloaded. If no row of the batch is drawn, a draft that leaves the form is restarted once
    at that place; it ends where it leaves the form again.
    """
    kv, greedy = batch.kv, [True] * len(rows) if sampling is None else sampling.greedy_B.tolist()
    drawn, cold = ([b for b, one in enumerate(greedy) if one is kind] for kind in (False, True))
    order = [b for own in (drawn, cold) for b in (*own, *[-1] * (size(len(own)) - len(own)))]
    k, stops = size(max(most)), size(max(len(row.stop_ids) for row in rows))
    forms = any(row.matcher is not None for row in rows)
    asked = [row.params for row in rows if constrains(row) and row.matcher is None]
    shape = Shape(size(len(drawn)), len(order), k, stops, fixed(spec, True), Cuts.of(sampling), 0, pages(kv, k))
    shape = replace(shape, alone=True, says=ids_of(asked), forms=forms)
    if shape.copies or asked:
        shape = replace(shape, text=text_size(max(len(row.tokens) for row in rows) + k + shape.copies + 1))
    work = works.work(shape, model, kv.cache, model, kv.cache)
    chain = work.chain
    assert chain is not None
    late = [b for b, row in enumerate(rows) if kv.starts[b] < len(row.tokens) - 2]
    catch_up(model, kv, late, [kv.starts[b] for b in late], [rows[b].tokens for b in late])
    numbers = numbers_of(sampling, len(rows))
    work.ask([rows[b] if b >= 0 else None for b in order])

    def go_on(
        texts: list[list[int]], most: Sequence[int], lacks: Sequence[bool], masks: list[bytearray | None]
    ) -> None:
        lines = [padding(stops)] * len(order)
        for at, b in enumerate(order):
            if b >= 0:
                counts = [len(texts[b]), most[b] + 1, most[b], 2**31, seeds[b] if seeds else 0, 0, 0, int(lacks[b])]
                reach = spec.reach[b] if spec.reach else 0.0
                lines[at] = line(texts[b][-2:], counts, 0.0, numbers[b], rows[b].stop_ids, stops, reach)
        work.table.load(lines, None, kv, order)
        work.table.know([texts[b] if b >= 0 else [] for b in order])
        if forms:
            chain.allow([masks[b] if b >= 0 else None for b in order])
        work.begin(max(most))
        tokens_RK, count_R, _ = work.proposal
        with works.captures.awaited():
            values = torch.cat([tokens_RK, count_R.unsqueeze(1)], 1).cpu().tolist()
        for b, own in zip(order, values):
            if b >= 0:
                found[b] += own[: own[-1]]

    found: list[list[int]] = [[] for _ in rows]
    # a target that shares the cache may have stored the last token but one
    lacks = [start < len(row.tokens) - 1 for start, row in zip(kv.starts, rows)]
    texts, masks = [row.tokens for row in rows], [next(iter(_masks(row, [])), None) for row in rows]
    go_on(texts, most, lacks, masks)
    if forms and (broken := _leave(rows, found)) and not drawn:  # what others were drawn from would be lost
        left = [n - len(found[b]) if b in broken else 0 for b, n in enumerate(most)]
        texts = [row.tokens + tokens for row, tokens in zip(rows, found)]
        go_on(texts, left, [False] * len(rows), [broken.get(b) for b in range(len(rows))])
        _leave(rows, found)
    probs_DKV = work.proposal.probs_DKV
    if probs_DKV is None:
        return Drafted(found)
    tokens_RK, count_R, _ = work.proposal
    place = {b: at for at, b in enumerate(order) if b >= 0}
    probs_BKV = _in_order(tokens_RK, count_R, probs_DKV, [place[b] for b in range(len(rows))])
    return Drafted(found, probs_BKV[:, : max(most)])


def _masks(row: Row, draft: list[int]) -> list[bytearray]:
    """What the form of a row allows after its text, and after each of these tokens up to the first that it forbids."""
    return [] if row.matcher is None else row.matcher.masks(row.tokens[row.prompt_length :], draft)


def _leave(rows: Sequence[Row], drafts: list[list[int]]) -> dict[int, bytearray]:
    """Cut each draft before the first token that its row's form forbids. Gives what is allowed there, for those cut."""
    left = {}
    for b, row in enumerate(rows):
        if (masks := _masks(row, drafts[b])) and len(masks) <= len(drafts[b]):
            left[b] = masks[-1]
            del drafts[b][len(masks) - 1 :]
    return left


def score_few(model: Model, batch: Batch, places: Sequence[int] | None, works: Works) -> Tensor:
    """Logits [N, V] after a few new tokens of each row, or after those that ``places`` numbers."""
    kv, new, first = batch.kv, [], 0
    for count in kv.counts:
        new.append(batch.tokens[first : first + count])
        first += count
    k = size(max(kv.counts) - 1)
    shape = Shape(0, size(len(new)), k, 0, pages=pages(kv, k))
    work = works.work(shape, model, kv.cache)
    empty = shape.rows - len(new)
    lines = [
        line([0, tokens[0]], [start + 1, 1, 0, 0, 0, 0, 0, 0], 0.0, numbers_of(None, 1)[0], (), 0)
        for tokens, start in zip(new, kv.starts)
    ]
    work.table.load(lines + [padding(0)] * empty, kv, None, [*range(len(new)), *[-1] * empty])
    work.copy([tokens[1:] for tokens in new] + [[]] * empty)
    work.begin(0)
    work.finish()
    at = [row * (k + 1) + n for row, count in enumerate(kv.counts) for n in range(count)]
    chosen = at if places is None else [at[place] for place in places]
    return work.found.logits_RJV.flatten(0, 1)[upload(chosen, model.device)]


def _in_order(tokens_RK: Tensor, count_R: Tensor, probs_DKV: Tensor, places: list[int]) -> Tensor:
    """[B, K, V] of the rows in these places: what was drawn from, one-hot at temperature 0, and 0 after each draft. A
    copy, since the graph will write over what it made."""
    sure_RKV = torch.zeros(*tokens_RK.shape, probs_DKV.shape[2], device=probs_DKV.device)
    sure_RKV.scatter_(2, tokens_RK.unsqueeze(2), 1.0)
    sure_RKV[: len(probs_DKV)] = probs_DKV
    after_RK = torch.arange(tokens_RK.shape[1], device=tokens_RK.device) >= count_R.unsqueeze(1)
    return sure_RKV.masked_fill_(after_RK.unsqueeze(2), 0.0)[upload(places, probs_DKV.device)]
