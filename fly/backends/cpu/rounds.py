"""Whole rounds of speculative decoding in one call of the library: its arguments and its result.

``CpuExecutor.rounds`` calls ``take_rounds`` with a plan. In order:

1. Texts, memory for blocks (host.py) and room for logits are laid out for as many rounds as the plan has room for.
2. The library takes the rounds: draft, verify, decide, emit (src/rounds.cpp). The interpreter is free meanwhile.
3. Decisions, what is cached now, and blocks that the library left open go back as plain values.

Rounds end after one in which a row ended, when pages or time run out, when someone asks the engine to hurry, and with a
round that leaves a block open. Errors are as for a forward: no round counts then.

Shape legend: B rows, J positions of a row, K longest draft, N places, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import abc

import torch
from torch import Tensor

from fly.backends.cpu.host import Blocks, lay_rules
from fly.backends.cpu.library import CGrowth, CLookup, CRounds, Going, Sure
from fly.backends.cpu.packed import PackedLlama
from fly.runtime.executor import OpenBlocks, RoundPlan, Rounds, Spent
from fly.types import Draft

__all__ = ["take_rounds"]

_MOST_SCORED, _MOST_ASKS = 1024, 256  # tokens, and mismatches, over the rounds of one call


def take_rounds(target: PackedLlama, drafter: PackedLlama | None, plan: RoundPlan, lookup: CLookup | None) -> Rounds:
    """``Executor.rounds``."""
    rows, tree, count = plan.rows, plan.spec.tree, len(plan.rows)
    lengths = [len(row.tokens) for row in rows]
    rooms = [plan.kv.cache.allocator.length(seq) for seq in plan.kv.seqs]
    k = max(min(row.k, row.left - 1) for row in rows) if tree is None else tree.nodes
    most = max(map(int.__sub__, rooms, lengths)) + 1
    most = min(most, 1 + _MOST_SCORED // (count * (k + 1)), max(plan.rounds, 1))

    # What the call reads: the rows' texts with room for what follows, their rules, and who drafts.
    batch = target.batch(None, None, plan.kv)
    draft_batch = None
    if drafter is not None and plan.draft_kv is not None:
        draft_batch = drafter.batch(None, None, plan.draft_kv)
    texts = [array("q", row.tokens) for row in rows]
    for text, room, length in zip(texts, rooms, lengths):
        text.frombytes(bytes(8 * (room + 1 - length)))
    stops = [array("q", row.stop_ids) for row in rows]
    copies = [None if lookup is None else array("i", text) for text in texts]
    going = _lay_rows(plan, texts, stops, copies, rooms)
    rules = lay_rules([(row.policy, row.seed) for row in rows], plan.sampling, plan.control_V, target.vocab)

    # What it writes: blocks; logits of the last round, and what its drafts were drawn from; hidden states of all.
    blocks = Blocks(count, k, most, tree is not None, max(_MOST_ASKS, 2 * count * (k + 1)))
    logits_NV, probs_BKV, read_NF = torch.empty(count * (k + 1), target.vocab), None, None
    if plan.sampling is not None and drafter is not None and tree is None:
        probs_BKV = torch.empty(count, k, target.vocab)
    if plan.states:
        width = len(plan.states) * target.config.hidden_size
        read_NF = torch.empty(count * most * (k + 1), width, dtype=target.dtype)
    call = CRounds(nanoseconds=int(1e9 * plan.seconds))
    call.rules, call.blocks = ctypes.pointer(rules), ctypes.pointer(blocks.c)
    call.hand(
        going=going,
        hurry=plan.hurry,
        logits=logits_NV,
        distributions=probs_BKV,
        sure=Sure.each(plan.spec, count),
        state=array("i", plan.states),
        given=None if plan.given is None else plan.given.states_TF.to(target.dtype).contiguous(),
        read=read_NF,
    )
    if tree is not None:
        growth = CGrowth(tree.nodes, tree.follow)
        growth.hand(width=array("i", tree.widths))
        call.growth = ctypes.pointer(growth)
    target.library.fly_rounds(
        target.handle,
        ctypes.byref(batch),
        None if drafter is None else drafter.handle,
        None if draft_batch is None else ctypes.byref(draft_batch),
        None if lookup is None else ctypes.byref(lookup),
        ctypes.byref(call),
    )

    # What it says. Of a chain all fed tokens are stored, of a tree the kept ones, or all while it is open.
    last = call.rounds - 1
    left_open = [b for b in range(count) if blocks.is_open(b, last)]
    fed = [(blocks.accepted if tree and b not in left_open else blocks.count)[b * most + last] for b in range(count)]
    decided = [last + (b not in left_open) for b in range(count)]
    spent = zip((1, last), call.elapsed, call.scoring, call.drafting)
    first, others = (Spent(rounds, *(ns / 1e9 for ns in each)) for rounds, *each in spent)
    return Rounds(
        decisions=blocks.decisions(decided, [row.policy.relaxation for row in rows]),
        texts=[text[: one.length + n].tolist() for text, one, n in zip(texts, going, fed)],
        draft_cached=[one.draft_start for one in going],
        spent=(first, others),
        states=[] if read_NF is None else _states(blocks, lengths, last, fed, read_NF),
        open=_open_blocks(blocks, left_open, last, call.longest, logits_NV, probs_BKV) if left_open else None,
    )


def _lay_rows(
    plan: RoundPlan,
    texts: list[array[int]],
    stops: list[array[int]],
    copies: abc.Sequence[array[int] | None],
    rooms: list[int],
) -> ctypes.Array[Going]:
    """What the call is told of each row. The lists have to live as long as the call."""
    going = (Going * len(texts))()
    firsts = [0] * len(texts) if plan.given is None else plan.given.first
    starts = [len(row.tokens) for row in plan.rows]
    if plan.draft_kv is not None:
        starts = [first + start for first, start in zip(firsts, plan.draft_kv.starts)]
    for b, (row, one) in enumerate(zip(plan.rows, going)):
        one.length, one.room, one.left, one.k = len(row.tokens), rooms[b], row.left, min(row.k, row.left - 1)
        one.context, one.draft_start, one.first = min(plan.draft_context, 2**31 - 1), starts[b], firsts[b]
        one.hand(text=texts[b], stop=stops[b], copied=copies[b])
    return going


def _states(blocks: Blocks, lengths: list[int], last: int, fed: list[int], read_NF: Tensor) -> list[tuple[int, Tensor]]:
    """Hidden states of each row's kept tokens, round after round, and of all that is stored of the last one."""
    places: list[list[int]] = [[] for _ in lengths]
    at = 0
    for i in range(last + 1):
        for b, kept in enumerate(places):
            this = b * blocks.most + i
            kept += range(at, at + (fed[b] if i == last else blocks.accepted[this]) + 1)
            at += blocks.count[this] + 1
    return [(length - 1, read_NF[kept]) for length, kept in zip(lengths, places)]


def _open_blocks(
    blocks: Blocks, rows: list[int], last: int, longest: int, logits_NV: Tensor, probs_BKV: Tensor | None
) -> OpenBlocks:
    """The blocks of these rows in the last round, padded to the longest of them."""
    counts = [blocks.count[b * blocks.most + last] for b in range(len(blocks.count) // blocks.most)]
    chains = [blocks.chain(b, last) for b in rows]
    wide = max(map(len, chains)) + 1
    choices, logits, probs = list[list[int]](), list[Tensor](), list[Tensor]()
    for b, chain in zip(rows, chains):
        at, n = sum(counts[:b]) + b, len(chain) + 1
        first = (b * blocks.most + last) * (blocks.k + 1)
        own = blocks.choice[first : first + n].tolist()
        choices.append(own + own[-1:] * (wide - n))
        logits.append(_padded(logits_NV[at : at + n], wide))
        if probs_BKV is not None:
            # Rows that drafted stand side by side, ``longest`` tokens each.
            drawn = sum(map(bool, counts[:b])) * longest
            probs.append(_padded(probs_BKV.flatten(0, 1)[drawn : drawn + n - 1], wide - 1))
    draft = Draft.of(chains, trees=[blocks.tree(b, last) for b in rows] if blocks.trees else None)
    if probs:
        draft = Draft(draft.tokens_BK, draft.lengths_B, torch.stack(probs))
    known = all(token >= 0 for own in choices for token in own)
    return OpenBlocks(rows, draft, torch.stack(logits), choices if known else None)


def _padded(values_NV: Tensor, count: int) -> Tensor:
    """Values with the last line repeated up to so many."""
    if len(values_NV) == count:
        return values_NV
    last_1V = values_NV[-1:] if len(values_NV) else values_NV.new_zeros(1, values_NV.shape[1])
    return torch.cat([values_NV, last_1V.expand(count - len(values_NV), -1)])
