"""A draft alone, in one call: K forwards as one graph, and one wait. A target's forward alone, as one graph.

Shape legend: B rows, D of them above temperature 0, K longest draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fly.backends.cuda.rounds import Works, pages
from fly.backends.cuda.shape import Asked, Cuts, Model, Shape, fixed, line, numbers_of, padding, size, text_size
from fly.backends.torch import TorchHead
from fly.constraints import asks
from fly.executor import Batch, Drafted, DraftSpec, Scores
from fly.ops import upload
from fly.request import Sequence as Row
from fly.sampling import BatchSampling

__all__ = ["draft", "score_few"]


def draft(
    model: Model | TorchHead,
    batch: Batch,
    spec: DraftSpec,
    rows: Sequence[Row],
    most: Sequence[int],
    sampling: BatchSampling | None,
    seeds: Sequence[int],
    works: Works,
    states_TF: Tensor | None = None,
) -> Drafted:
    """``Executor.extend``, of rows of at least two tokens, or ``Head.chains`` by the target's hidden states.

    The first token keeps to the row's form, since the host knows what that allows after the text. The other tokens are
    checked after they are downloaded, and a tree loses what the form forbids. At temperature 0 a model's chain that
    leaves the form is restarted once at that place; it ends where it leaves the form again. What was drawn stays as it
    was, or it would not be of the distribution that it is said to be of: such a draft ends with the token that leaves
    the form, which no target keeps.
    """
    kv, greedy = batch.kv, [True] * len(rows) if sampling is None else sampling.greedy_B.tolist()
    drawn, cold = ([b for b, one in enumerate(greedy) if one is kind] for kind in (False, True))
    order = [b for own in (drawn, cold) for b in (*own, *[-1] * (size(len(own)) - len(own)))]
    k = size(max(most)) if spec.tree is None else len(spec.tree.widths)
    stops, tree = size(max(len(row.stop_ids) for row in rows)), spec.tree is not None
    forms = any(row.matcher is not None for row in rows)
    asked = list(filter(asks, rows))
    shape = Shape(size(len(drawn)), len(order), k, stops, fixed(spec, True), Cuts.of(sampling), 0, pages(kv, k, tree))
    shape = replace(shape, alone=True, says=Asked.by(asked), forms=forms)
    if shape.copies or asked:
        shape = replace(shape, text=text_size(max(len(row.tokens) for row in rows) + k + shape.copies + 1))
    work = works.work(shape, model, kv.cache, model, kv.cache)
    feed = work.feed
    assert feed is not None
    texts = [row.tokens for row in rows]
    firsts = [len(text) - start - count for text, start, count in zip(texts, kv.starts, kv.counts)]
    lacks = feed.load(kv, texts, states_TF, [True] * len(rows), order)
    numbers = numbers_of(sampling, len(rows))
    work.ask([rows[b] if b >= 0 else None for b in order])

    def go_on(texts: list[list[int]], most: Sequence[int], lacks: Sequence[int], masks: list[bytearray | None]) -> None:
        lines = [padding(stops)] * len(order)
        for at, b in enumerate(order):
            if b >= 0:
                counts = [len(texts[b]), most[b] + 1, most[b], 2**31, seeds[b] if seeds else 0, 0, 0]
                counts += [lacks[b], firsts[b]]
                reach = spec.reach[b] if spec.reach else 0.0
                lines[at] = line(texts[b][-2:], counts, 0.0, numbers[b], rows[b].stop_ids, stops, reach)
        work.table.load(lines, None, kv, order)
        work.table.know([texts[b] if b >= 0 else [] for b in order])
        if forms and work.draft_says is not None:
            work.draft_says.allow([masks[b] if b >= 0 else None for b in order])
        work.begin(max(most))
        tokens_RK, count_R, _, parents_RK = work.proposal
        columns = [count_R.unsqueeze(1), tokens_RK, *([] if parents_RK is None else [parents_RK])]
        with works.captures.awaited():
            values = torch.cat(columns, 1).cpu().tolist()
        for b, (count, *own) in zip(order, values):
            if b >= 0:
                found[b] += own[:count]
                parents[b] += own[tokens_RK.shape[1] :][:count]

    found: list[list[int]] = [[] for _ in rows]
    parents: list[list[int]] = [[] for _ in rows]
    go_on(texts, most, lacks, [_masks(row, []).get(0) for row in rows])
    if tree:
        for b, row in enumerate(rows):
            found[b], parents[b] = _within(row, found[b], parents[b])
        return Drafted(found, parents=parents)
    probs_DKV = work.proposal.probs_DKV
    if forms and (broken := _leave(rows, found)) and states_TF is None:
        probs_DKV = None if probs_DKV is None else probs_DKV.clone()  # the next draft writes over it
        left = [n - len(found[b]) if b in broken else 0 for b, n in enumerate(most)]
        texts = [row.tokens + tokens for row, tokens in zip(rows, found)]
        go_on(texts, left, [0] * len(rows), [broken.get(b) for b in range(len(rows))])
        _leave(rows, found)
    probs_BKV = None if probs_DKV is None else _drawn_from(found, probs_DKV, drawn, max(most))
    return Drafted(found, probs_BKV)


def _masks(row: Row, draft: list[int], parents: Sequence[int] | None = None) -> dict[int, bytearray]:
    """What the form of a row allows after its text, at 0, and after each of these tokens that it allows."""
    return {} if row.matcher is None else row.matcher.masks(row.tokens[row.prompt_length :], draft, parents)


def _within(row: Row, tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """A row's tree without what its form forbids, and parents there."""
    if row.matcher is None:
        return tokens, parents
    masks, kept = _masks(row, tokens, parents), {-1: -1}
    for node, (token, parent) in enumerate(zip(tokens, parents)):
        bits = masks.get(parent + 1, b"")
        if parent in kept and token // 8 < len(bits) and bits[token // 8] >> token % 8 & 1:
            kept[node] = len(kept) - 1
    return [tokens[node] for node in kept if node >= 0], [kept[parents[node]] for node in kept if node >= 0]


def _leave(rows: Sequence[Row], drafts: list[list[int]]) -> dict[int, bytearray]:
    """Cut each draft before the first token that its row's form forbids, or after it if it was drawn. Gives what is
    allowed there, for those that may go on from there."""
    left = {}
    for b, row in enumerate(rows):
        if (masks := _masks(row, drafts[b])) and len(masks) <= len(drafts[b]):
            del drafts[b][len(masks) - row.greedy :]
            if row.greedy:
                left[b] = masks[len(masks) - 1]
    return left


def score_few(
    model: Model,
    batch: Batch,
    places: Sequence[int] | None,
    works: Works,
    trees: bool,
    states: tuple[int, ...],
) -> Scores:
    """``Executor.score`` of a few new tokens of each row. ``trees``: some rows have one."""
    kv, new, at, first = batch.kv, [], [], 0
    for count in kv.counts:
        new.append(batch.tokens[first : first + count])
        at.append(batch.positions[first : first + count])
        first += count
    k = size(max(kv.counts) - 1)
    shape = Shape(0, size(len(new)), k, 0, pages=pages(kv, k, trees), trees=trees, states=states)
    work = works.work(shape, model, kv.cache)
    empty = shape.rows - len(new)
    lines = [
        line([0, tokens[0]], [start + 1, 1, 0, 0, 0, 0, 0, 0, 0], 0.0, numbers_of(None, 1)[0], (), 0)
        for tokens, start in zip(new, kv.starts)
    ]
    work.table.load(lines + [padding(0)] * empty, kv, None, [*range(len(new)), *[-1] * empty])
    work.copy([tokens[1:] for tokens in new] + [[]] * empty)
    if trees:
        masks = zip(kv.starts, kv.counts, kv.masks or [None] * len(new))
        sees = [torch.ones(n, n).tril() > 0 if mask is None else mask[:, start:] for start, n, mask in masks]
        work.table.branch(sees, [[one - own[0] for one in own] for own in at])
    work.begin(0)
    work.finish()
    every = [row * (k + 1) + n for row, count in enumerate(kv.counts) for n in range(count)]
    chosen = every if places is None else [every[place] for place in places]
    logits_NV = work.found.logits_RJV.flatten(0, 1)[upload(chosen, model.device)]
    if work.found.states_RJF is None:
        return Scores(logits_NV)
    return Scores(logits_NV, states_TF=work.found.states_RJF.flatten(0, 1)[upload(every, model.device)])


def _drawn_from(found: list[list[int]], probs_DKV: Tensor, drawn: list[int], longest: int) -> Tensor:
    """[B, longest, V], a copy: what the ``drawn`` rows were drawn from, the others one-hot, and 0 after each draft."""
    lines = [[*tokens, *[0] * (longest - len(tokens)), len(tokens)] for tokens in found]
    values = upload([value for line in lines for value in line], probs_DKV.device).view(len(found), -1)
    tokens_BK, count_B1 = values[:, :-1], values[:, -1:]
    probs_BKV = torch.zeros(*tokens_BK.shape, probs_DKV.shape[2], device=probs_DKV.device)
    probs_BKV.scatter_(2, tokens_BK.unsqueeze(2), 1.0)
    probs_BKV.index_copy_(0, upload(drawn, probs_DKV.device), probs_DKV[: len(drawn), :longest])
    after_BK = torch.arange(longest, device=probs_DKV.device) >= count_B1
    return probs_BKV.masked_fill_(after_BK.unsqueeze(2), 0.0)
