"""The host's side of whole rounds on the device: launch, wait once, read, decide whether to go on.

``CudaExecutor.rounds`` calls ``take_rounds`` with a plan. In order:

1. Group the rows by rule, and find or make memory and graphs for a batch of this shape (shapes.py).
2. Feed the drafter the tokens that it lacks, and upload the table of the rows (table.py).
3. Launch round after round (device_round.py). While the device works, the host unpacks the decisions of the round
   before. Then it waits for the device, once, and reads how many tokens each row got.
4. Return all decisions as plain values, with the number of tokens that the drafter has cached.

A call ends after a round in which a row ended, when pages or time run out, or when another thread makes the engine
hurry. A round is void if a rule that runs between graphs raises an error, or if a NaN leaves a row undecided. The
rounds before it count.

Shape legend: R rows with padding, B rows of a group, J places of a round, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fly.backends.cuda.device_round import DeviceRound, Group
from fly.backends.cuda.drafter import Model
from fly.backends.cuda.graphs import Timer
from fly.backends.cuda.shapes import DeviceRounds, TooLarge
from fly.backends.cuda.table import PADDING, Column, Shape, count_pages, make_line, round_up, unpack
from fly.contents import Keyed
from fly.policies import AcceptancePolicy
from fly.runner.executor import DraftSpec, RoundPlan, RoundRow, Rounds, Spent
from fly.runner.request import most_drafted
from fly.types import Decision

__all__ = ["LONGEST", "note_plain_way", "take_rounds"]

_log = logging.getLogger("fly")
LONGEST = 128  # the most drafted tokens of a row in one graph
_ROUNDS_AMONG_RANKS = 4  # rounds of each call among ranks; a time limit would not do, as the ranks' clocks differ
_SHORTEST_TEXT = 1024  # the least room, in tokens, for a row's text on the device
_RIDGE = 256  # a forward over at most so many tokens takes no longer than reading the weights


def take_rounds(target: Model, plan: RoundPlan, device_rounds: DeviceRounds) -> Rounds | None:
    """Do what ``Executor.rounds`` promises. Return None if a draft is too long, if the batch needs too much memory, or
    if the first round is void by a NaN."""
    groups, order = _group_rows(plan.rows)
    shape = _choose_shape(plan, groups)
    if shape.k > LONGEST:
        note_plain_way(f"a draft of {shape.k} tokens is longer than the {LONGEST} of a graph", logging.WARNING)
        return None
    drafter: Any = plan.drafter  # a ``Model`` or a head: see ``CudaExecutor.joins``
    draft_cache = None if plan.draft_kv is None else plan.draft_kv.cache
    try:
        round_ = device_rounds.find(shape, groups, target, plan.kv.cache, drafter, draft_cache)
    except TooLarge as error:
        note_plain_way(str(error), logging.WARNING)
        return None
    call = _Call(plan, groups, order, round_)
    call.load()
    goes_on = True
    while goes_on:
        # Launch a round. While the device works on it, unpack the decisions of the round before. Then wait, once.
        with call.round.prepared():
            call.launch()
            call.unpack()
            call.wait()
        # Whether there is another round depends on what each row got.
        goes_on = call.read() and call.may_go_on()
    return call.result()


@cache
def note_plain_way(reason: str, level: int = logging.INFO) -> None:
    """Log, once for each reason, why rows take the plain way."""
    _log.log(level, "these rows take the plain way, with several waits a round: %s", reason)


def _group_rows(rows: Sequence[RoundRow]) -> tuple[tuple[Group, ...], list[int]]:
    """Group the rows by their rule and by whether they are above temperature 0, and put the groups above 0 first. Pad
    each group to one of a few sizes. Also return the number of the row in each line of the table; -1 is padding."""
    numbers: dict[tuple[bool, Keyed[AcceptancePolicy]], list[int]] = {}
    for b, row in enumerate(rows):
        numbers.setdefault((row.greedy, row.policy.keyed), []).append(b)
    groups, order = list[Group](), list[int]()
    for (greedy, keyed), members in sorted(numbers.items(), key=lambda item: item[0][0]):
        count = round_up(len(members))
        groups.append(Group(keyed, not greedy, count))
        order += members + [-1] * (count - len(members))
    return tuple(groups), order


def _choose_shape(plan: RoundPlan, groups: Sequence[Group]) -> Shape:
    """Choose sizes for the plan's rows, rounded up so that few graphs serve all batches."""
    rows = sum(group.rows for group in groups)
    how = plan.sampling
    spec = plan.spec
    drafts = plan.drafter is not None or spec.lookup is not None
    k = round_up(max(min(row.k, plan.draft_context) for row in plan.rows)) if drafts else 0
    lookup = spec.lookup if k else None
    if plan.drafter is None:
        spec = DraftSpec(lookup=lookup)
    else:
        # Lookup pays only as long as the copied tokens do not make a forward slower.
        pays = lookup is not None and rows * min(lookup.k + 1, k) <= _RIDGE
        spec = replace(spec, reach=(1.0,) if any(spec.reach) else (), lookup=lookup if pays else None)
    shape = Shape(
        rows=rows,
        drawn=sum(group.rows for group in groups if group.drawn),
        k=k,
        pages=count_pages(plan.kv, k),
        draft_pages=0 if plan.draft_kv is None else count_pages(plan.draft_kv, k),
        stops=round_up(max(len(row.stop_ids) for row in plan.rows)),
        spec=spec,
        top_k=1 << (how.most_k - 1).bit_length() if how is not None and how.most_k else 0,
        top_p=how is not None and how.top_p,
        min_p=how is not None and how.min_p,
        states=plan.states,
    )
    if not shape.copies and (plan.drafter is not None or lookup is None):
        return shape
    longest = max(plan.rooms) + k + shape.copies + 1
    return replace(shape, text=max(1 << (longest - 1).bit_length(), _SHORTEST_TEXT))  # for texts that grow


@dataclass
class _Row:
    """What the host knows about a row between two rounds."""

    plan: RoundRow
    line: int  # of the table
    group: int
    room: int  # tokens that its pages have room for
    context: int  # the longest text that the drafter drafts for
    text: list[int]
    left: int  # tokens it may still emit
    fed: int  # length of the text when the target was last fed
    drafted: list[int]  # the draft that it was fed then
    in_drafter: int  # tokens that the drafter has cached
    relaxed_at: list[int]  # positions of its relaxed tokens, up to the last decision
    spent: dict[str, float]  # what they have cost, by each budget of its rule
    emitted: list[int] = field(default_factory=list)  # how many tokens each round emitted
    decisions: list[Decision] = field(default_factory=list)

    def wanted(self) -> int:
        """Return the most tokens to draft in the next round."""
        return min(most_drafted(self.plan.k, self.left), self.context - len(self.text))

    def read(self, line: list[int]) -> None:
        """Note the tokens that the row got, because the next round depends on them."""
        count, accepted, next_token = line[:3]
        self.fed, self.drafted = len(self.text), line[3 : 3 + count]
        new = [*self.drafted[:accepted], next_token]
        self.text += new
        self.left -= len(new)
        self.emitted.append(len(new))

    def may_go_on(self) -> bool:
        """Whether the row goes on and its pages have room for another round."""
        new = self.text[-self.emitted[-1] :]
        ended = self.left < 1 or any(token in self.plan.stop_ids for token in new)
        return not ended and len(self.text) + most_drafted(self.plan.k, self.left) <= self.room


class _Call:
    """One call of ``take_rounds`` under way."""

    def __init__(self, plan: RoundPlan, groups: tuple[Group, ...], order: list[int], round_: DeviceRound) -> None:
        self.plan = plan
        self.order = order
        self.round = round_
        self.stage = round_.find_stage(groups, plan.control_V)
        group_of_line = [number for number, group in enumerate(groups) for _ in range(group.rows)]
        self.firsts = [0] * len(plan.rows) if plan.head_input is None else plan.head_input.first
        self.rows = list[_Row]()
        for b, (row, room) in enumerate(zip(plan.rows, plan.rooms)):
            line = order.index(b)
            text = list(row.tokens)
            in_drafter = 0 if plan.draft_kv is None else self.firsts[b] + plan.draft_kv.starts[b]
            place = line, group_of_line[line], room, plan.draft_context
            spent = {budget.label: row.account.cost(budget.label) for budget in row.policy.budgets}
            self.rows.append(_Row(row, *place, text, row.left, len(text) - 1, [], in_drafter, [*row.relaxed_at], spent))
        self.unread: list[list[int]] = []  # the lines of the last round, until they are unpacked
        self.states: list[Tensor] = []  # of each round, [R, J, F]
        self.failed = False
        self.timer = Timer()
        self.spent = [Spent(0, 0.0, 0.0, 0.0)] * 2  # by the first round, and by the others
        self.begin = self.last = time.perf_counter()

    def load(self) -> None:
        """Feed the drafter what it lacks, and upload the table."""
        plan = self.plan
        table = self.round.table
        lacks = [0] * len(self.rows)
        if self.round.drafter is not None:
            lacks = self.round.drafter.catch_up(plan, [row.wanted() > 0 for row in self.rows], self.order)
        values = [self.describe(b, lacks[b]) if b >= 0 else PADDING for b in self.order]
        ends = [plan.rows[b].stop_ids if b >= 0 else () for b in self.order]
        lines = [make_line(row_values, stop_ids, table.shape.stops) for row_values, stop_ids in zip(values, ends)]
        table.load(lines, plan.kv, plan.draft_kv, self.order)
        table.load_texts(self.texts())

    def describe(self, b: int, lacks: int) -> dict[Column, float]:
        """Return the values of row ``b`` to upload. ``lacks``: tokens before its last one that the drafter has not
        cached."""
        plan, row = self.plan, self.plan.rows[b]
        values: dict[Column, float] = {
            Column.BEFORE: row.tokens[-2],
            Column.LAST: row.tokens[-1],
            Column.LENGTH: len(row.tokens),
            Column.LEFT: row.left,
            Column.K: row.k,
            Column.CONTEXT: min(plan.draft_context, 2**31),
            Column.SEED: row.seed,
            Column.GENERATED: row.generated,
            Column.RELAXED: row.account.relaxed,
            Column.LACKS: lacks,
            Column.FIRST: self.firsts[b],
            Column.NATS: row.account.nats,
            Column.REACH: plan.spec.reach[b] if plan.spec.reach else 0.0,
        }
        if (how := plan.sampling) is not None:
            values[Column.TEMPERATURE] = float(how.temperature_B[b])
            values[Column.TOP_K] = int(how.top_k_B[b])
            values[Column.TOP_P] = float(how.top_p_B[b])
            values[Column.MIN_P] = float(how.min_p_B[b])
        return values

    def texts(self) -> list[list[int]]:
        """Return the text in each line of the table; padding has two tokens."""
        return [self.rows[b].text if b >= 0 else [0, 0] for b in self.order]

    def launch(self) -> None:
        """Launch a round. A rule that no graph can hold may raise an error. Only the first round passes it on; a later
        round is void, and the next call asks the rule again."""
        try:
            if self.stage.needs_texts:
                self.unpack()  # now, because the rule may ask where relaxed tokens stand
                self.stage.texts = self.texts()
                self.stage.relaxed_at = [self.rows[b].relaxed_at if b >= 0 else [] for b in self.order]
                self.stage.spent = [self.rows[b].spent if b >= 0 else {} for b in self.order]
            self.round.launch(self.stage, max(row.wanted() for row in self.rows), self.timer)
        except Exception:
            self.timer.done.record()
            if not self.rows[0].emitted:
                raise
            self.failed = True
        else:
            if (states_RJF := self.round.scored.states_RJF) is not None:
                self.states.append(states_RJF.clone())  # the next round overwrites them

    def unpack(self) -> None:
        """Turn the last lines that were read into decisions."""
        for row in self.rows if self.unread else ():
            relaxes, conditions = self.stage.relaxes[row.group], self.stage.conditions[row.group]
            decision = unpack(self.unread[row.line], self.round.shape.k, relaxes, conditions, [*row.spent])
            for mismatch in decision.mismatches:
                if mismatch.relaxed:
                    row.relaxed_at.append(row.fed + mismatch.node)
                    for label, cost in mismatch.costs.items():
                        row.spent[label] += cost
            row.decisions.append(decision)
        self.unread = []

    def wait(self) -> None:
        """Wait for the device, once a round. It is idle from then until the next launch."""
        with self.round.pool.awaited():
            self.timer.done.synchronize()

    def read(self) -> bool:
        """Read what each row got. Return False if an error or a NaN made the round void."""
        lines = [] if self.stage.download is None else self.stage.download.host.tolist()
        if self.failed or any(lines[row.line][2] < 0 for row in self.rows):  # UNDECIDED or IMPOSSIBLE
            return False
        for row in self.rows:
            drafts, length = row.wanted() > 0, len(row.text)
            row.read(lines[row.line])
            if drafts and self.plan.draft_kv is not None:
                # A draft model has cached all of its draft but the last token. A head has cached none that counts,
                # since it was fed its own features.
                row.in_drafter = length
                if self.plan.head_input is None:
                    row.in_drafter += min(len(row.drafted), row.emitted[-1]) - 1
        self.unread = lines
        now, (draft, rest) = time.perf_counter(), self.timer.seconds()
        which = int(self.spent[0].rounds > 0)
        rounds, whole, target, drafter = self.spent[which]
        if self.plan.draft_kv is None:
            draft, rest = 0.0, draft + rest
        self.spent[which] = Spent(rounds + 1, whole + now - self.last, target + rest, drafter + draft)
        self.last = now
        return True

    def may_go_on(self) -> bool:
        """Whether all rows, and the limits of the call, allow another round."""
        plan, rounds = self.plan, len(self.rows[0].emitted)
        if self.round.pool.among_ranks:
            is_time = rounds < _ROUNDS_AMONG_RANKS
        else:
            is_time = self.last - self.begin < plan.seconds and (plan.hurry is None or not plan.hurry[0])
        return is_time and rounds < plan.rounds and all(row.may_go_on() for row in self.rows)

    def result(self) -> Rounds | None:
        """Return all rounds as plain values; None if a NaN made the first one void."""
        if not self.rows[0].emitted:
            return None
        self.unpack()
        self.round.table.note_texts(self.texts())
        states = list[tuple[int, Tensor]]()  # of each row's tokens, from the one that was its last
        for row in self.rows if self.states else ():
            parts = [states_RJF[row.line, :count] for states_RJF, count in zip(self.states, row.emitted)]
            states.append((len(row.plan.tokens) - 1, torch.cat(parts)))
        return Rounds(
            decisions=[row.decisions for row in self.rows],
            texts=[row.text[: row.fed] + row.drafted for row in self.rows],
            draft_cached=[row.in_drafter for row in self.rows],
            spent=(self.spent[0], self.spent[1]),
            states=states,
        )
