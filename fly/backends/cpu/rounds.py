"""Whole rounds of speculative decoding in one call of the library: its arguments and its result.

Shape legend: B rows, J positions of a row, K longest draft, N places, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from fly.backends.cpu.clauses import Clause
from fly.backends.cpu.host import c_sampling
from fly.backends.cpu.library import ASK, Ask, CGrowth, CLookup, CRounds, Going, Sure, number, usual
from fly.backends.cpu.library import Clause as CClause
from fly.backends.cpu.packed import PackedLlama
from fly.executor import Answer, Question, RoundPlan, Rounds, Spent
from fly.types import Decision, Mismatch

__all__ = ["take_rounds"]

_MOST_SCORED, _MOST_ASKS = 1024, 256  # tokens, and mismatches, over the rounds of one call


def take_rounds(
    target: PackedLlama,
    drafter: PackedLlama | None,
    plan: RoundPlan,
    lookup: CLookup | None,
    clauses: abc.Sequence[abc.Sequence[Clause]] | None,
    ask: Callable[[list[Decision], Question], Answer | None],
) -> Rounds | None:
    """``Executor.rounds``: ``clauses`` are the conditions of each row that must all hold to excuse a mismatch; None
    leaves that to ``ask``, for a row alone.

    Errors as for a forward; one of ``ask`` ends the call and is given back. What a signal's handler raises in place of
    the first line of ``ask`` is lost, and comes back as a ``KeyboardInterrupt``.
    """
    rows, kv = plan.rows, plan.kv
    count, lengths = len(rows), [len(row.tokens) for row in rows]
    rooms = [kv.cache.allocator.length(seq) for seq in kv.seqs]
    most_k = [min(row.k, row.left - 1) for row in rows]
    tree = plan.spec.tree
    widest = max(most_k) if tree is None else tree.nodes
    room = max(map(int.__sub__, rooms, lengths)) + 1
    most = min(room, 1 + _MOST_SCORED // (count * (widest + 1)), max(plan.rounds, 1))
    batch = target.batch(None, None, kv)
    given, firsts = plan.given, [0] * count if plan.given is None else plan.given.first
    draft_batch, draft_starts = None, lengths
    if drafter is not None and plan.draft_kv is not None:
        draft_starts = [first + start for first, start in zip(firsts, plan.draft_kv.starts)]
        draft_batch = drafter.batch(None, None, plan.draft_kv)
    texts, copies, stops, going = [], [], [array("q", row.stop_ids) for row in rows], (Going * count)()
    for b, (row, one) in enumerate(zip(rows, going)):
        text = array("q", row.tokens)
        text.frombytes(bytes(8 * (rooms[b] + 1 - lengths[b])))
        texts.append(text)
        one.length, one.room, one.left, one.k, one.seed = lengths[b], rooms[b], row.left, most_k[b], row.seed
        one.context, one.draft_start = min(plan.draft_context, 2**31 - 1), draft_starts[b]
        one.first = firsts[b]
        copies.append(array("i", text) if lookup is not None else None)
        one.hand(text=text, stop=stops[b], copied=copies[b])
    logits_NV = torch.empty(count * (widest + 1), target.vocab)
    size = count * most
    drafted, following = array("q", bytes(8 * size * widest)), array("q", bytes(8 * size))
    choices, counts, accepted = (array("i", bytes(4 * size * each)) for each in (widest + 1, 1, 1))
    stands = array("i", [0])
    call = CRounds(k=widest, most=most, nanoseconds=int(1e9 * plan.seconds), variant=number(usual()))
    call.hand(going=going, hurry=plan.hurry, logits=logits_NV, drafted=drafted, drafted_count=counts, choice=choices)
    call.hand(accepted=accepted, following=following, stands=stands, sure=Sure.each(plan.spec, count))
    parent, path = (array("i", bytes(0 if tree is None else 4 * size * widest)) for _ in range(2))
    if tree is not None:
        growth = CGrowth(tree.nodes, tree.follow)
        growth.hand(width=array("i", tree.widths))
        call.growth = ctypes.pointer(growth)
    paths = memoryview(path)  # which then cannot grow
    read_NF: Tensor | None = None
    if plan.states:
        width = len(plan.states) * target.config.hidden_size
        read_NF = torch.empty(size * (widest + 1), width, dtype=target.dtype)
    asks, listed = (
        array("B"),
        [CClause(CClause.KINDS.index(kind), *rest) for own in clauses or () for kind, *rest in own],
    )
    if listed:
        at = 0
        for one, own in zip(going, clauses or ()):
            one.clause_at, one.clauses = at, len(own)
            at += len(own)
        asks.frombytes(bytes(ASK.size * max(_MOST_ASKS, 2 * len(logits_NV))))
    probs_BKV: Tensor | None = None
    if plan.sampling is not None and drafter is not None and tree is None:
        probs_BKV = torch.empty(count, widest, target.vocab)
    call.hand(
        parent=parent,
        path=path,
        state=array("i", plan.states),
        read=read_NF,
        given=None if given is None else given.states_TF.to(target.dtype).contiguous(),
        clause=(CClause * len(listed))(*listed) if listed else None,
        control=plan.control_V,
        ask=asks,
        sampling=None if plan.sampling is None else c_sampling(plan.sampling),
        distributions=probs_BKV,
    )
    told, error = 0, None

    def decisions(b: int, first: int, end: int) -> list[Decision]:
        at, to, wide = b * most + first, b * most + end, widest + 1
        chains, said = drafted[at * widest : to * widest].tolist(), choices[at * wide : to * wide].tolist()
        found = []
        for i, (n, m, token) in enumerate(zip(counts[at:to], accepted[at:to], following[at:to])):
            chain, own = chains[i * widest : i * widest + n], said[i * wide : i * wide + n + 1]
            stands: abc.Sequence[int] = range(m)
            bonus = m == n
            if tree is not None:
                first = (at + i) * widest
                stands = path[first : first + m].tolist()
                bonus = (stands[-1] if stands else -1) not in parent[first : first + n]
            found.append(Decision(chain, stands, token, bonus, own))
        return found

    def asked(this: int) -> None:
        nonlocal told, error
        try:
            *before, (chain, _, _, _, said, _) = decisions(0, told, this + 1)
            told, n = this + 1, len(chain)
            probs_1KV = None if probs_BKV is None else probs_BKV[:, :n]
            parents = None if tree is None else parent[this * widest : this * widest + n].tolist()
            answer = ask(before, Question(chain, said, logits_NV[: n + 1].unsqueeze(0), probs_1KV, parents))
            if answer is None:
                stands[0] = -1
                return
            stands[0], following[this] = len(answer.path), answer.next_token
            if tree is not None:
                nodes = array("i", answer.path)
                paths[this * widest : this * widest + len(nodes)] = nodes
        except BaseException as raised:  # compiled code cannot be left by an error
            error, stands[0] = raised, -1

    if clauses is None:
        call.decide = CRounds.Decide(asked)
    target.library.fly_rounds(
        target.handle,
        ctypes.byref(batch),
        None if drafter is None else drafter.handle,
        None if draft_batch is None else ctypes.byref(draft_batch),
        None if lookup is None else ctypes.byref(lookup),
        ctypes.byref(call),
    )
    if stands[0] == CRounds.UNANSWERED:  # a signal came before the first line of ``asked``
        error = KeyboardInterrupt()
    last = call.rounds - 1
    taken = call.rounds - any(following[b * most + last] < 0 for b in range(count))  # a NaN leaves the last one open
    if not taken and error is None:
        return None
    # Of a chain all fed tokens are stored, of a tree the kept ones.
    fed = counts if tree is None else array("i", [max(n, 0) for n in accepted])
    stored = [text[: one.length + fed[b * most + last]].tolist() for b, (text, one) in enumerate(zip(texts, going))]
    spent = zip((1, last), call.elapsed, call.scoring, call.drafting)
    first, others = (Spent(rounds, *(ns / 1e9 for ns in each)) for rounds, *each in spent)
    found = [decisions(b, told, taken) for b in range(count)]
    states = []
    if read_NF is not None:
        places: list[list[int]] = [[] for _ in rows]  # of the kept tokens of each round, and of all tokens of the last
        at = 0
        for i in range(call.rounds):
            for b, kept in enumerate(places):
                this = b * most + i
                kept += range(at, at + (fed if i == last else accepted)[this] + 1)
                at += counts[this] + 1
        states = [(length - 1, read_NF[kept]) for length, kept in zip(lengths, places)]
    if asks:
        _add_mismatches(found, map(Ask._make, ASK.iter_unpack(asks[: call.asks * ASK.size])), plan)
    return Rounds(found, stored, [one.draft_start for one in going], (first, others), states, error)


def _add_mismatches(found: list[list[Decision]], asks: abc.Iterable[Ask], plan: RoundPlan) -> None:
    """Note what the clauses decided about each mismatch."""
    relaxations = [row.policy.relaxation for row in plan.rows]
    labels = [
        [] if relaxation is None else [clause.label for clause in relaxation.clauses] for relaxation in relaxations
    ]
    said: dict[tuple[int, int], dict[str, bool]] = {}
    made: dict[tuple[int, int], list[Mismatch]] = {}
    for row, this, position, bits, excused, nats in asks:
        if (held := said.get((row, bits))) is None:
            held = said[row, bits] = {label: bool(bits >> bit & 1) for bit, label in enumerate(labels[row])}
        made.setdefault((row, this), []).append(Mismatch(position, bool(excused), held, nats))
    for (row, this), mismatches in made.items():
        if this == len(found[row]):  # it is open
            continue
        found[row][this] = found[row][this]._replace(mismatches=mismatches)
