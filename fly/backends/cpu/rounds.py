"""Several rounds of speculative decoding in one call of the library: its arguments and its result.

``CpuExecutor.rounds`` calls ``take_rounds`` with a plan. In order:

1. The rows' texts, rules and room for results are laid out, for as many rounds as the plan has room for.
2. The library takes the rounds: propose, verify, decide, commit (src/rounds.cpp). The interpreter is free meanwhile.
3. Decisions, cached tokens, and blocks that the library left open come back as plain values.

The rounds end after one in which a row ended, when pages or time run out, when the engine has to hurry, and after a
round that leaves a block open. If a forward raises an error, none of the rounds counts.

Shape legend: B rows, J positions of a row, K longest draft, N places, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fly.backends.cpu.host import Blocks, lay_rules
from fly.backends.cpu.library import CLookup, CRoundRow, CRounds, CStops, spans
from fly.backends.cpu.packed import PackedLlama
from fly.runner.executor import OpenBlocks, RoundPlan, Rounds, Spent
from fly.types import Draft

__all__ = ["take_rounds"]

_MAX_SCORED, _MAX_MISMATCHES = 1024, 256  # limits for all rounds of a call: tokens scored, mismatches noted


@dataclass(frozen=True)
class _Results:
    """What a call writes: the blocks, the last round's logits, the distributions its drafts were drawn from, the
    drafter's logits for the rows whose rules read them, and the hidden states of all rounds."""

    blocks: Blocks
    logits_NV: Tensor
    probs_BKV: Tensor | None
    drafter_KV: list[Tensor | None]  # for each row
    states_NF: Tensor | None

    @staticmethod
    def make_room(target: PackedLlama, plan: RoundPlan) -> _Results:
        """Make room for as many rounds as the plan, its pages and ``_MAX_SCORED`` allow."""
        count = len(plan.rows)
        k = max(row.longest for row in plan.rows)
        max_rounds = max(room - len(row.tokens) for row, room in zip(plan.rows, plan.rooms)) + 1
        max_rounds = min(max_rounds, 1 + _MAX_SCORED // (count * (k + 1)), max(plan.rounds, 1))
        blocks = Blocks(count, k, max_rounds, max(_MAX_MISMATCHES, 2 * count * (k + 1)))
        drafter_KV = list[Tensor | None]()
        for row in plan.rows:
            reads_logits = plan.drafter is not None and row.policy.reads_logits
            drafter_KV.append(torch.empty(k, target.vocab) if reads_logits else None)
        probs_BKV = None if plan.sampling is None or plan.drafter is None else torch.empty(count, k, target.vocab)
        states_NF = None
        if plan.states:
            width = len(plan.states) * target.config.hidden_size
            states_NF = torch.empty(count * max_rounds * (k + 1), width, dtype=target.dtype)
        return _Results(blocks, torch.empty(count * (k + 1), target.vocab), probs_BKV, drafter_KV, states_NF)


def take_rounds(target: PackedLlama, drafter: PackedLlama | None, plan: RoundPlan, lookup: CLookup | None) -> Rounds:
    """Implement ``Executor.rounds``."""
    # What the call reads: the rows' texts with room for what follows, their rules, and how the drafter drafts.
    batch = target.batch(None, None, plan.kv)
    draft_batch = None if drafter is None or plan.draft_kv is None else drafter.batch(None, None, plan.draft_kv)
    texts = []
    for row, room in zip(plan.rows, plan.rooms):
        texts.append(array("q", row.tokens))
        texts[-1].frombytes(bytes(8 * (room + 1 - len(row.tokens))))
    rows = _lay_rows(plan, texts, lookup is not None)
    rules = lay_rules(
        [(row.policy, row.greedy, row.seed, row) for row in plan.rows], plan.sampling, plan.control_V, target.vocab
    )
    # What it writes.
    results = _Results.make_room(target, plan)
    call = CRounds(nanoseconds=int(1e9 * plan.seconds), head_drafts=min(plan.draft_longest, 2**31 - 1))
    call.rules, call.blocks = ctypes.pointer(rules), ctypes.pointer(results.blocks.c)
    call.hand(
        row=rows,
        hurry=plan.hurry,
        logits=results.logits_NV,
        distributions=results.probs_BKV,
        draft_logits=spans(results.drafter_KV),
        stops=CStops.of_rows(plan.spec, len(rows)),
        state=array("i", plan.states),
        head_states=None if plan.head_input is None else plan.head_input.states_TF.to(target.dtype).contiguous(),
        read=results.states_NF,
    )
    target.library.fly_rounds(
        target.handle,
        ctypes.byref(batch),
        None if drafter is None else drafter.handle,
        None if draft_batch is None else ctypes.byref(draft_batch),
        None if lookup is None else ctypes.byref(lookup),
        ctypes.byref(call),
    )
    return _read_results(plan, call, rows, texts, results)


def _read_results(
    plan: RoundPlan, call: CRounds, rows: ctypes.Array[CRoundRow], texts: list[array[int]], results: _Results
) -> Rounds:
    """Return what the call wrote as plain values and tensors."""
    blocks, last = results.blocks, call.rounds - 1
    left_open = [b for b in range(len(rows)) if blocks.is_open(b, last)]
    fed = [blocks.count[b * blocks.max_rounds + last] for b in range(len(rows))]  # in the last round
    decided = [last + (b not in left_open) for b in range(len(rows))]
    first, others = (
        Spent(rounds, call.elapsed[i] / 1e9, call.scoring[i] / 1e9, call.drafting[i] / 1e9)
        for i, rounds in enumerate((1, last))
    )
    return Rounds(
        decisions=blocks.decisions(decided, [row.policy.relaxation for row in plan.rows]),
        texts=[text[: row.length + n].tolist() for text, row, n in zip(texts, rows, fed)],
        draft_cached=[row.draft_start for row in rows],
        spent=(first, others),
        states=[] if results.states_NF is None else _read_states(plan, blocks, results.states_NF, last, fed),
        open=_read_open_blocks(results, left_open, last, call.longest) if left_open else None,
    )


def _lay_rows(plan: RoundPlan, texts: list[array[int]], copied: bool) -> ctypes.Array[CRoundRow]:
    """Lay out the rows for the library. ``copied``: also lay out a copy of each text, for a lookup."""
    rows = (CRoundRow * len(texts))()
    firsts = [0] * len(texts) if plan.head_input is None else plan.head_input.first
    starts = [len(row.tokens) for row in plan.rows]
    if plan.draft_kv is not None:
        starts = [first + start for first, start in zip(firsts, plan.draft_kv.starts)]
    handed = []
    for c_row, row, text, room, start, first in zip(rows, plan.rows, texts, plan.rooms, starts, firsts):
        c_row.length = len(row.tokens)
        c_row.room = room
        c_row.left = row.left
        c_row.k = row.longest
        c_row.context = min(plan.draft_context, 2**31 - 1)
        c_row.draft_start = start
        c_row.first = first
        handed.append((text, array("q", row.stop_ids), array("i", text) if copied else None))
        c_row.hand(text=handed[-1][0], stop=handed[-1][1], copied=handed[-1][2])
    vars(rows)["handed"] = handed  # reading an element makes a new object, which keeps nothing alive
    return rows


def _read_states(
    plan: RoundPlan, blocks: Blocks, states_NF: Tensor, last: int, fed: list[int]
) -> list[tuple[int, Tensor]]:
    """For each row, return the position of its last token before the call, and hidden states. They are those of the
    kept tokens, round after round, but in the last round those of all cached tokens."""
    places: list[list[int]] = [[] for _ in plan.rows]
    at = 0
    for i in range(last + 1):
        for b, kept in enumerate(places):
            at_block = b * blocks.max_rounds + i
            kept += range(at, at + (fed[b] if i == last else blocks.accepted[at_block]) + 1)
            at += blocks.count[at_block] + 1
    return [(len(row.tokens) - 1, states_NF[kept]) for row, kept in zip(plan.rows, places)]


def _read_open_blocks(results: _Results, rows: list[int], last: int, longest: int) -> OpenBlocks:
    """Return the blocks of these rows in the last round, padded to the longest of them."""
    blocks = results.blocks
    counts = [blocks.count[b * blocks.max_rounds + last] for b in range(len(blocks.count) // blocks.max_rounds)]
    chains = [blocks.chain(b, last) for b in rows]
    wide = max(map(len, chains)) + 1
    choices = list[list[int]]()
    logits = list[Tensor]()
    probs = list[Tensor]()
    drafters = [results.drafter_KV[b] for b in rows]
    for b, chain in zip(rows, chains):
        at, n = sum(counts[:b]) + b, len(chain) + 1
        first = (b * blocks.max_rounds + last) * (blocks.k + 1)
        row_choices = blocks.choice[first : first + n].tolist()
        choices.append(row_choices + row_choices[-1:] * (wide - n))
        logits.append(_pad(results.logits_NV[at : at + n], wide))
        if results.probs_BKV is not None:
            # Rows that drafted stand side by side, ``longest`` tokens each.
            drawn = sum(map(bool, counts[:b])) * longest
            probs.append(_pad(results.probs_BKV.flatten(0, 1)[drawn : drawn + n - 1], wide - 1))
    draft = Draft.of(chains)
    if probs:
        draft = Draft(draft.tokens_BK, draft.lengths_B, torch.stack(probs))
    if any(logits_KV is not None for logits_KV in drafters):
        # The rules of the other rows do not look.
        empty_KV = results.logits_NV.new_zeros(wide - 1, results.logits_NV.shape[1])
        draft_logits = [
            empty_KV if logits_KV is None else _pad(logits_KV[: len(chain)], wide - 1)
            for logits_KV, chain in zip(drafters, chains)
        ]
        draft = replace(draft, logits_BKV=torch.stack(draft_logits))
    known = all(token >= 0 for row_choices in choices for token in row_choices)
    return OpenBlocks(rows, draft, torch.stack(logits), choices if known else None)


def _pad(values_NV: Tensor, count: int) -> Tensor:
    """Repeat the last line of values until there are ``count`` lines."""
    if len(values_NV) == count:
        return values_NV
    last_1V = values_NV[-1:] if len(values_NV) else values_NV.new_zeros(1, values_NV.shape[1])
    return torch.cat([values_NV, last_1V.expand(count - len(values_NV), -1)])
