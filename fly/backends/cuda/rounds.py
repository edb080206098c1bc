"""Whole rounds on the device: the host launches, waits once, and decides whether to go on.

Shape legend: R rows with padding, J places of a round, F hidden states side by side.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fly.backends.cuda.attention import flash_takes
from fly.backends.cuda.feed import Feed
from fly.backends.cuda.graphs import Captures, Kept
from fly.backends.cuda.packing import unpack
from fly.backends.cuda.shape import Asked, Cuts, Model, Shape, fixed, line, numbers_of, padding, size, text_size
from fly.backends.cuda.waits import host_wait
from fly.backends.cuda.work import Decide, Group, Work
from fly.backends.torch import TorchHead
from fly.cache import PagedBatch, PagedKVCache
from fly.drafts.ngram import Index
from fly.drafts.ways import Ways
from fly.executor import Lookup, RoundPlan, RoundRow, Rounds, Spent
from fly.policies import AcceptancePolicy
from fly.types import Decision

__all__ = ["LONGEST", "Works", "pages", "take_rounds"]

_log = logging.getLogger("fly")
LONGEST = 128  # tokens of a draft in one graph
_LOOKUP = 1.08  # how much longer a forward of a draft model of 1B takes with prompt lookup, for some 30 short kernels
_RIDGE = 256  # tokens up to which a forward takes as long as reading the weights does
_TOGETHER = 4  # rounds that processes which share a model take in one call
_LOGITS, _ALL_LOGITS = 1 << 30, 2 << 30  # bytes that the logits of one round may take, and those that graphs keep


class Works:
    """What was made so far for batches of one cache."""

    def __init__(self, captures: Captures) -> None:
        self.captures = captures
        self.made: Kept[tuple[Shape, int], Work] = Kept(32, _ALL_LOGITS, lambda work: work.logit_bytes)
        self._often: set[Shape] = set()
        self.lookup = Ways()  # whether prompt lookup pays below a draft model, in forwards a drafted token
        self._texts: Kept[tuple[Lookup, object], Index] = Kept(256)
        self._reasons: Kept[tuple[AcceptancePolicy, bool, bool], list[str | None]] = Kept(256)

    def work(
        self,
        shape: Shape,
        target: Model | TorchHead,
        cache: PagedKVCache,
        drafter: Model | TorchHead | None = None,
        draft_cache: PagedKVCache | None = None,
    ) -> Work:
        """The memory and graphs for batches of this shape; a shape that came often gets new ones, with compiled
        layers."""
        plain = shape, id(draft_cache)
        if (found := self.made.made.get(plain)) is not None and found.rounds >= target.often and target.compiles:
            del self.made.made[plain]
            self._often.add(shape)
            _log.info("compiling layers for %d rows and drafts of %d tokens, which takes a while", shape.rows, shape.k)
        if shape in self._often:
            shape = replace(shape, compiled=True)

        def make() -> Work:
            return Work(shape, target, cache, drafter, draft_cache, self.captures)

        return self.made.get((shape, id(draft_cache)), make, lambda work: work.serves(cache, draft_cache))

    def why_not(self, group: Group, sampled: bool) -> str | None:
        """Why a graph cannot hold what a group's policy decides."""
        key = group.policy, group.drawn, sampled
        return self._reasons.get(key, lambda: [host_wait(*key)])[0]

    def text(self, lookup: Lookup, seq: object) -> Index:
        """The index of a row's text."""
        return self._texts.get((lookup, seq), lambda: Index(lookup.longest, lookup.shortest))


class _Lot(NamedTuple):
    """The rows of a plan in groups of one policy, each padded to a size of its own."""

    groups: tuple[Group, ...]
    order: list[int]  # the number of the row in each place; -1 is padding

    @staticmethod
    def of(rows: Sequence[RoundRow]) -> _Lot:
        """Those above temperature 0 come first."""
        numbers: dict[tuple[bool, AcceptancePolicy], list[int]] = {}
        for b, row in enumerate(rows):
            numbers.setdefault((row.greedy, row.policy), []).append(b)
        groups, order = [], []
        for (greedy, policy), own in sorted(numbers.items(), key=lambda item: item[0][0]):
            order += own + [-1] * (size(len(own)) - len(own))
            groups.append(Group(policy, not greedy, size(len(own))))
        return _Lot(tuple(groups), order)


def take_rounds(target: Model, drafter: Model | TorchHead | None, plan: RoundPlan, works: Works) -> Rounds | None:
    """``Executor.rounds``. None where the batch would need too much memory, or a NaN leaves the first round open."""
    copies, way = drafter is None and plan.spec.lookup is not None, -1
    if drafter is not None and plan.spec.lookup is not None:
        way, most = works.lookup.choose()
        plan.rounds = min(plan.rounds, most)
        if not way:
            plan.spec = replace(plan.spec, lookup=None)
    lot, k = _Lot.of(plan.rows), max(min(row.k, plan.draft_context) for row in plan.rows)
    k = size(k) if drafter is not None or copies else 0
    shape = _shape(plan, lot, k)
    if k > LONGEST or shape.logit_bytes(target.config.vocab_size) > _LOGITS:
        return None
    draft_cache = None if plan.draft_kv is None else plan.draft_kv.cache
    work = works.work(shape, target, plan.kv.cache, drafter, draft_cache)
    reasons = (works.why_not(group, group.drawn and drafter is not None) for group in lot.groups)
    why_not = next((reason for reason in reasons if reason is not None), None)
    decide = work.decide(lot.groups, plan.control_V, why_not)
    call = _Call(plan, lot, work, decide, copies)
    if work.feed is not None:
        call.feed(work.feed)
    work.table.load(call.lines(), plan.kv, plan.draft_kv, lot.order)
    work.table.know(call.placed())
    work.ask([plan.rows[b] if b >= 0 else None for b in lot.order])
    while call.round(works):
        pass
    if way >= 0 and call.drafted:
        rounds = sum(each.rounds for each in call.spent)
        works.lookup.add(way, call.forwards * _forward_cost(shape), call.drafted, rounds)
    if call.open and not call.decisions[0]:
        return None
    return call.told()


def _forward_cost(shape: Shape) -> float:
    """How long a forward of the drafter takes, relative to one of a row's last token alone. Computed, not timed, so
    that processes that share a model decide alike."""
    if not shape.copies:
        return 1.0
    return _LOOKUP * max(shape.rows * (shape.copies + 1), _RIDGE) / max(shape.rows, _RIDGE)


class _Call:
    """Rounds under way, as the host knows them."""

    def __init__(self, plan: RoundPlan, lot: _Lot, work: Work, decide: Decide, copies: bool) -> None:
        self.plan, self.lot, self.work, self.decide, self.copies = plan, lot, work, decide, copies
        self.texts, self.left = [list(row.tokens) for row in plan.rows], [row.left for row in plan.rows]
        # Of each row how long it was when it was last fed whole, and what was drafted then.
        self.fed: list[tuple[int, list[int]]] = [(len(text) - 1, []) for text in self.texts]
        self.pending: tuple[list[list[int]], Sequence[Sequence[float]]] | None = None
        self.firsts = [0] * len(plan.rows) if plan.given is None else plan.given.first
        self.drafter_has, self.lacks = [0] * len(plan.rows), [1] * len(plan.rows)
        if plan.draft_kv is not None:
            self.drafter_has = [first + start for first, start in zip(self.firsts, plan.draft_kv.starts)]
        self.states: list[Tensor] = []  # of each round, [R, J, F]
        self.stand: list[list[int]] = []  # of each round, how many of those of each row
        self.rooms = [plan.kv.cache.allocator.length(seq) for seq in plan.kv.seqs]
        self.decisions: list[list[Decision]] = [[] for _ in plan.rows]
        kinds = [number for number, group in enumerate(lot.groups) for _ in range(group.rows)]
        self.places = {b: (at, kinds[at]) for at, b in enumerate(lot.order) if b >= 0}
        self.forwards = self.drafted = 0  # by the drafter, and tokens of all rows
        self.error: BaseException | None = None
        self.open = False  # whether a NaN leaves the last round undecided
        self.together = work.captures.awaited is not nullcontext  # with other processes, whose clocks are others
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self.spent = Spent(0, 0.0, 0.0, 0.0), Spent(0, 0.0, 0.0, 0.0)
        self.begin = self.last = time.perf_counter()

    def most(self, b: int) -> int:
        """Tokens to draft for a row at most."""
        return min(self.plan.rows[b].k, self.left[b] - 1, self.plan.draft_context - len(self.texts[b]))

    def feed(self, feed: Feed) -> None:
        """Feed the drafter what it lacks of each row that it will draft for, but for what its draft begins with."""
        kv, given = self.plan.draft_kv, self.plan.given
        assert kv is not None
        going = [self.most(b) > 0 for b in range(len(self.texts))]
        self.lacks = feed.load(kv, self.texts, None if given is None else given.states_TF, going, self.lot.order)

    def lines(self) -> list[list[int]]:
        """The state of each place."""
        plan, stops, made = self.plan, self.work.shape.stops, []
        how = numbers_of(plan.sampling, len(plan.rows))
        for b in self.lot.order:
            if b < 0:
                made.append(padding(stops))
                continue
            row, text = plan.rows[b], self.texts[b]
            counts = [len(text), row.left, row.k, min(plan.draft_context, 2**31), row.seed, row.generated, row.relaxed]
            counts += [self.lacks[b], self.firsts[b]]
            reach = plan.spec.reach[b] if plan.spec.reach else 0.0
            made.append(line(text[-2:], counts, row.nats, how[b], row.stop_ids, stops, reach))
        return made

    def round(self, works: Works) -> bool:
        """Take a round, and say whether to take another."""
        start, drafted, done = self.events
        try:
            if self.copies:
                self.work.copy(self._looked_up(works))
            if self.decide.run.why_not is not None:
                self.decide.history = self._histories()
            start.record()
            self.work.begin(max(map(self.most, range(len(self.texts)))))
            drafted.record()
            self.work.finish()
            self.decide.begin(done)
            if self.work.found.states_RJF is not None:
                self.states.append(self.work.found.states_RJF.clone())  # the next round writes over it
            self._settle()
        except Exception as raised:  # a rule's own: the round is discarded
            done.record()
            self.error = raised
        with self.work.captures.awaited():
            done.synchronize()
        if self.error is not None:
            return False
        ended = self._take_in()
        if self.open:
            return False
        now = time.perf_counter()
        took, self.last = now - self.last, now
        later = self.spent[0].rounds > 0
        before, all_ = self.spent[later], start.elapsed_time(done) / 1e3
        drafting = 0.0 if self.plan.draft_kv is None else start.elapsed_time(drafted) / 1e3
        more = Spent(before.rounds + 1, before.whole + took, before.target + all_ - drafting, before.draft + drafting)
        self.spent = (self.spent[0], more) if later else (more, self.spent[1])
        return not ended and self._goes_on(now)

    def _take_in(self) -> bool:
        """Read the part of a round's result that the next round depends on, and say whether a row ended, or the round
        is open."""
        assert self.decide.download is not None
        found = self.decide.download.host
        values = found.tolist()
        if any(values[at][2] < 0 for at, _ in self.places.values()):
            self.open = True
            return True
        self.pending = values, found.view(torch.float32).tolist() if any(self.decide.relaxes) else values
        ended, stand = False, list[int]()
        self.forwards += 0 if self.work.chain is None else self.work.chain.forwards
        for b, (row, text) in enumerate(zip(self.plan.rows, self.texts)):
            own = values[self.places[b][0]]
            count, accepted, following = own[:3]
            drafted = own[3 : 3 + count]
            self.drafted += count
            if self.plan.draft_kv is not None and self.most(b) > 0:
                # of a head only what it was fed by the target's hidden states; of a model not the last drafted token
                self.drafter_has[b] = len(text) + (min(count - 1, accepted) if self.plan.given is None else 0)
            self.fed[b] = len(text), drafted
            new = [*drafted[:accepted], following]
            self.left[b] -= len(new)
            stand.append(len(new))
            ended = ended or self.left[b] < 1 or any(token in row.stop_ids for token in new)
            text += new
        self.stand.append(stand)
        return ended

    def _settle(self) -> None:
        """Turn what was read last into decisions, while the device is busy with the next round."""
        if self.pending is not None:
            (values, nats), k = self.pending, self.work.shape.k
            for b, (at, group) in self.places.items():
                one = unpack(values[at], nats[at], k, self.decide.labels[group], self.decide.relaxes[group])
                self.decisions[b].append(one)
            self.pending = None

    def _goes_on(self, now: float) -> bool:
        """Whether another round may begin, and there is room for it."""
        plan, rounds = self.plan, self.spent[0].rounds + self.spent[1].rounds
        late = now - self.begin >= plan.seconds or (plan.hurry is not None and plan.hurry[0])
        if rounds >= plan.rounds or (late and not self.together) or (self.together and rounds >= _TOGETHER):
            return False
        wanted = (len(text) + min(row.k, left - 1) for row, text, left in zip(plan.rows, self.texts, self.left))
        return all(most <= room for most, room in zip(wanted, self.rooms))

    def _looked_up(self, works: Works) -> list[list[int]]:
        """What followed the last time each text looked like this."""
        lookup, found = self.plan.spec.lookup, []
        assert lookup is not None
        for b in self.lot.order:
            tokens: list[int] = []
            if b >= 0 and (most := min(self.most(b), lookup.k)) > 0:
                tokens = works.text(lookup, self.plan.kv.seqs[b]).copied(self.texts[b], most)
                ends = (at for at, token in enumerate(tokens, start=1) if token in self.plan.rows[b].stop_ids)
                tokens = tokens[: next(ends, len(tokens))]
            found.append(tokens)
        return found

    def _histories(self) -> list[list[list[int]]]:
        """The texts of each group; of padding, two tokens."""
        texts, first, found = [self.texts[b] if b >= 0 else [0, 0] for b in self.lot.order], 0, []
        for group in self.lot.groups:
            found.append(texts[first : first + group.rows])
            first += group.rows
        return found

    def placed(self) -> list[list[int]]:
        """The text in each place."""
        return [self.texts[b] if b >= 0 else [] for b in self.lot.order]

    def told(self) -> Rounds:
        self._settle()
        self.work.table.knows(self.placed())
        cached = [text[:length] + drafted for text, (length, drafted) in zip(self.texts, self.fed)]
        return Rounds(self.decisions, cached, self.drafter_has, self.spent, self._states(), self.error)

    def _states(self) -> list[tuple[int, Tensor]]:
        """Hidden states of each row's tokens from the one that was its last."""
        found = []
        for b in range(len(self.texts)) if self.states and self.stand else ():
            at, _ = self.places[b]
            parts = [states_RJF[at, : stand[b]] for states_RJF, stand in zip(self.states, self.stand)]
            found.append((len(self.plan.rows[b].tokens) - 1, torch.cat(parts)))
        return found


def _shape(plan: RoundPlan, lot: _Lot, k: int) -> Shape:
    """What the plan's rows need."""
    drawn = sum(group.rows for group in lot.groups if group.drawn)
    stops = size(max(len(row.stop_ids) for row in plan.rows))
    own, drafts = (0 if kv is None else pages(kv, k) for kv in (plan.kv, plan.draft_kv))
    spec = fixed(plan.spec, plan.drafter is not None)
    shape = Shape(drawn, len(lot.order), k, stops, spec, Cuts.of(plan.sampling), own, drafts)
    asked = [row for row in plan.rows if row.params is not None]
    shape = replace(shape, says=Asked.by(asked), states=plan.states)
    if not (shape.copies or asked):
        return shape
    longest = max(map(plan.kv.cache.allocator.length, plan.kv.seqs))
    return replace(shape, text=text_size(longest + k + shape.copies + 1))


def pages(kv: PagedBatch, k: int, trees: bool = False) -> int:
    """Pages that a row's table has room for: with FlashAttention (which takes no ``trees``), for which they cost
    nothing, those of a whole context; else of what is reserved, in powers of two. Padding may stand beyond."""
    allocator, flash = kv.cache.allocator, flash_takes(kv.cache) and not trees
    longest = kv.cache.context if flash else max(map(allocator.length, kv.seqs))
    count = allocator.blocks_for(longest + k + 2)
    return count if flash else 1 << (count - 1).bit_length()
