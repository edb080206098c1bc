"""One round of a batch, run by the device alone: draft, score, decide, advance.

rounds.py calls ``DeviceRound.launch`` once a round, and waits once, for the download that ``DecisionStage`` begins.
Nothing else comes back to the host, with two exceptions. The host watches a draft that may end early (chain.py). A rule
that no graph can hold runs between two graphs, where it may wait or raise an error.

The stages read what they need about each row from the table on the device (table.py). Rows above temperature 0 come
first in it.

Shape legend: R rows (padding included), B rows of a group, D rows above temperature 0, K longest draft, J = K + 1
positions, T packed tokens, W pages of a row's table, C hidden width, F hidden states side by side, V vocabulary, X
columns of a packed decision.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.backends.cuda.attention import place_tokens
from fly.backends.cuda.chain import Chain, Proposal, copy_tokens
from fly.backends.cuda.drafter import Drafter, HeadDrafter, Model
from fly.backends.cuda.graphs import Download, GraphPool, Part, Shared, Timer, upload_into
from fly.backends.cuda.ops import uniforms
from fly.backends.cuda.table import Column, Shape, Table, pack
from fly.backends.heads import TorchHead
from fly.cache import PagedKVCache
from fly.contents import Keyed
from fly.ops import Stream, argmax, pick, sent
from fly.policies import AcceptancePolicy, verify
from fly.policies.base import accepts_exactly
from fly.policies.reads import supply_logits
from fly.policies.waits import find_wait, see_on_device
from fly.types import Draft, Noise, Target, Why

__all__ = ["DecisionStage", "DeviceRound", "Group", "Scored", "find_refusal"]

_MOST_STAGES = 16  # the most that a round keeps
_NEW = 2  # so many rounds of a shape run before all is captured


class Group(NamedTuple):
    """Adjacent rows of the table. They have the same rule, and are all above temperature 0 or all at it."""

    keyed: Keyed[AcceptancePolicy]  # stages and graphs are looked up by it
    drawn: bool
    rows: int  # padding included

    @property
    def policy(self) -> AcceptancePolicy:
        return self.keyed.value


def find_refusal(group: Group, drafter: object) -> str | None:
    """Return why a graph cannot hold the decision about this group (``find_wait``), or None if it can."""
    return _find_wait(group.keyed, group.drawn, group.drawn and drafter is not None)


@lru_cache(256)
def _find_wait(keyed: Keyed[AcceptancePolicy], drawn: bool, sampled: bool) -> str | None:
    return find_wait(keyed.value, drawn, sampled)


class Scored(NamedTuple):
    """The target's output after each row's last token, and after each drafted one."""

    logits_RJV: Tensor  # float32 if a rule reads more than the likeliest tokens, else as the head computes them
    choices_RJ: Tensor  # the likeliest tokens
    states_RJF: Tensor | None  # hidden states of the fed tokens, if they are wanted


class DeviceRound:
    """The memory of a batch of one shape, and the stages of its rounds."""

    def __init__(
        self,
        shape: Shape,
        target: Model,
        cache: PagedKVCache,
        drafter: Model | TorchHead | None,
        draft_cache: PagedKVCache | None,
        pool: GraphPool,
        shared: Shared,
    ) -> None:
        self.shape = shape
        self.target = target
        self.pool = pool
        self.shared = shared
        self.rounds = 0
        # Graphs hold addresses, not this object, so dropping the cache frees its memory.
        self.cache: PagedKVCache = weakref.proxy(cache)
        self.table = Table(shape, target.device)
        # The drafted tokens and, in the last column, their number. A ``Chain`` has its own memory instead.
        self._drafted_RJ = torch.zeros(shape.rows, shape.k + 1, dtype=torch.int64, device=target.device)
        self.proposal = Proposal(self._drafted_RJ[:, :-1], self._drafted_RJ[:, -1])
        self.drafter: Drafter | None = None
        self.chain: Chain | None = None
        if drafter is not None and draft_cache is not None:
            if isinstance(drafter, TorchHead):
                self.drafter = HeadDrafter(self.table, drafter, draft_cache)
            else:
                self.drafter = Drafter(self.table, drafter, draft_cache)
            self.chain = Chain(self.drafter, pool, shared)
            self.proposal = self.chain.proposal
        self.copy = Part(lambda: copy_tokens(self.table, self.proposal), pool)
        self.score = Part(self._score, pool)
        self.stages: dict[tuple[Group, ...], DecisionStage] = {}

    def prepared(self) -> AbstractContextManager[Any]:
        """Return a context to enter around a round. The first two rounds of a shape run and compile new code; from the
        third on, everything is captured."""
        return self.pool.preparing() if self.rounds < _NEW else nullcontext()

    def launch(self, stage: DecisionStage, longest: int, timer: Timer) -> None:
        """Launch a round with drafts of up to ``longest`` tokens. Its result has arrived once the event ``timer.done``
        has passed.

        If a rule that no graph can hold raises an error, the error is passed on, and the round is void.
        """
        self.rounds += 1
        timer.start.record()
        # Draft: a drafter's tokens, or what prompt lookup copies, or nothing.
        if self.chain is not None:
            self.chain.draft(longest)
        elif self.shape.spec.lookup is not None:
            self.copy()
        timer.drafted.record()
        # Score: one forward of the target over the whole block.
        self.scored = self.score()
        # Decide: the rules say what is kept, the table moves on to the next round, and the download of the result
        # begins.
        stage.begin()
        timer.done.record()

    def propose(self, drafts: Sequence[list[int]]) -> None:
        """Upload drafts that were made on the host, for the first lines of the table."""
        lines = [[*tokens, *[0] * (self.shape.k - len(tokens)), len(tokens)] for tokens in drafts]
        upload_into(self._drafted_RJ[: len(lines)], torch.tensor(lines))

    def find_stage(self, groups: tuple[Group, ...], control_V: Tensor) -> DecisionStage:
        """Find or make the last stage for rows in these ``groups``. ``control_V`` is ``Target.control_V``."""
        if groups not in self.stages:
            if len(self.stages) == _MOST_STAGES:
                del self.stages[next(iter(self.stages))]
            self.stages[groups] = DecisionStage(self, groups, control_V)
        return self.stages[groups]

    def _score(self) -> Scored:
        """Run the target over every row's last token and its draft."""
        table, (tokens_RK, count_R, *_) = self.table, self.proposal
        tokens_RJ = torch.cat([table.column(Column.LAST).unsqueeze(1), tokens_RK], 1)
        fed_RJ = torch.arange(self.shape.k + 1, device=table.device) <= count_R.unsqueeze(1)
        fed_RJ = fed_RJ & (table.column(Column.LEFT) > 0).unsqueeze(1)
        start_R = table.column(Column.LENGTH) - 1
        positions_T, kv = place_tokens(self.cache, table.target_pages_RW, start_R, fed_RJ)
        states = dict.fromkeys(self.shape.states, start_R)
        hidden_TC = self.target.hidden(tokens_RJ.flatten(), positions_T, kv, states, self.shape.compiled)
        logits_RJV = self.target.logits(hidden_TC, exact=False).unflatten(0, tokens_RJ.shape)
        if type(logits_RJV) is Tensor:  # each graph would keep its own; parts of a vocabulary are small
            shared_RJV = self.shared.lend("target", logits_RJV.shape, logits_RJV.dtype, logits_RJV.device)
            logits_RJV = shared_RJV.copy_(logits_RJV)
        states_RJF: Tensor | None = None
        if states:
            states_RJF = torch.cat([states[number] for number in self.shape.states], -1).unflatten(0, tokens_RJ.shape)
        return Scored(logits_RJV, argmax(logits_RJV), states_RJF)


class _Decided(NamedTuple):
    """What a rule decided about the rows of a group."""

    accepted_B: Tensor
    next_B: Tensor
    relaxed_B: Tensor  # how many accepted tokens it relaxed
    nats_B: Tensor  # what these cost, float64


class DecisionStage:
    """The last stage of a round: the rules of its rows decide, and the table moves on to the next round.

    Groups whose rule no graph can hold are decided first, operation by operation. A graph decides all others, which so
    do what they would do without such a neighbour, and moves the table on for all rows.

    ``relaxes`` says for each group whether its rule excuses mismatches, and ``conditions`` names the rule's conditions.
    If ``needs_texts``, some rule runs outside of the graph, and the host sets before each round the ``texts`` of all
    rows, where relaxed tokens stand in them, and their cost so far by each budget (``spent``). ``budgets`` are those of
    each group's rule.
    """

    def __init__(self, round_: DeviceRound, groups: tuple[Group, ...], control_V: Tensor) -> None:
        self.round = round_
        self.groups = groups
        self.control_V = control_V
        policies = [group.policy for group in groups]
        self.relaxes = [not accepts_exactly(policy) or policy.relaxation is not None for policy in policies]
        self.conditions: list[list[str]] = [[] for _ in groups]
        self.texts: list[list[int]] | None = None
        self.relaxed_at: list[list[int]] = []
        self.spent: list[Mapping[str, float]] = []
        self.budgets = [policy.budgets for policy in policies]
        # What the rules outside of the graph decided, by the group's number, at addresses that the graph reads.
        self.outside: dict[int, _Decided | None] = {
            number: None for number, group in enumerate(groups) if find_refusal(group, round_.drafter) is not None
        }
        self.needs_texts = bool(self.outside)
        self.part = Part(self._decide, round_.pool, round_.score)
        self.download: Download | None = None

    def begin(self) -> None:
        """Decide, and queue the download of the result."""
        lines = dict(map(self._decide_outside, self.outside))
        inside_lines = self.part()
        if lines:
            rest = iter(inside_lines)
            lines_RX = _join([lines[n] if n in lines else next(rest) for n in range(len(self.groups))])
        else:
            (lines_RX,) = inside_lines
        if self.download is None:
            self.download = Download(lines_RX)
        self.download.begin(lines_RX)

    def _decide_outside(self, number: int) -> tuple[int, Tensor]:
        """Decide about a group outside of the graph. Return its number and its lines."""
        decided, line_BX = self._decide_group(number)
        if (memory := self.outside[number]) is None:
            self.outside[number] = _Decided(*map(torch.clone, decided))
        else:
            for memory_B, decided_B in zip(memory, decided):
                memory_B.copy_(decided_B)
        return number, line_BX

    def _decide(self) -> list[Tensor]:
        """Decide about all groups but those outside, and move the table on. Return ``pack``ed lines, [B, X] int32, of
        each group, joined if no group is outside."""
        decided = list[_Decided]()
        lines = list[Tensor]()
        for number in range(len(self.groups)):
            if (group_decided := self.outside.get(number)) is None:
                group_decided, line_BX = self._decide_group(number)
                lines.append(line_BX)
            decided.append(group_decided)
        self._advance(*map(torch.cat, zip(*decided)))
        return lines if self.outside else [_join(lines)]

    def _decide_group(self, number: int) -> tuple[_Decided, Tensor]:
        """Let the rule of a group decide about its rows, as on every device (``verify``). Return what it decided, and
        ``pack``ed lines, [B, X] int32."""
        table, (tokens_RK, count_R, probs_DKV, drafter_RKV) = self.round.table, self.round.proposal
        logits_RJV, choices_RJ, _ = self.round.scored
        keyed, drawn, count = self.groups[number]
        policy = keyed.value
        relaxes = self.relaxes[number]
        # Take the group's rows of the block.
        first = sum(group.rows for group in self.groups[:number])
        rows = slice(first, first + count)
        logits_BJV = logits_RJV[rows].float() if drawn or relaxes else logits_RJV[rows]
        target = self._make_target(rows, drawn, logits_BJV, inside=number not in self.outside)
        vars(target)["argmax_BK"] = choices_RJ[rows]
        probs_BKV = probs_DKV[rows] if drawn and probs_DKV is not None else None
        drafter_BKV = None if drafter_RKV is None else drafter_RKV[rows]
        draft = Draft(tokens_RK[rows], count_R[rows], probs_BKV, logits_BKV=drafter_BKV)
        draft = supply_logits(policy, draft, logits_RJV.shape[-1])
        # Coins are hashes of the row's seed and of the position where the round begins.
        seed_B, length_B = table.column(Column.SEED)[rows], table.column(Column.LENGTH)[rows]
        accept_BK = uniforms(seed_B, length_B, Stream.ACCEPT, tokens_RK.shape[1])
        sample_B = uniforms(seed_B, length_B, Stream.SAMPLE, 1).squeeze(1)
        verdict = verify(policy, target, draft, Noise(accept_BK, sample_B))
        self.conditions[number] = list(verdict.clauses)
        # Count what was relaxed, and what that costs.
        cost_BK = _compute_cost(target, draft) if relaxes else None
        excused_BK = verdict.why_BK == int(Why.RELAXED)
        nats_BK = torch.zeros_like(excused_BK, dtype=torch.float64)
        if cost_BK is not None:
            nats_BK = cost_BK.double().masked_fill(~excused_BK, 0.0)
        decided = _Decided(verdict.accepted_B, verdict.next_token_B, excused_BK.sum(1), nats_BK.sum(1))
        costs = [_compute_budget(budget, target, draft) for budget in self.budgets[number]]
        return decided, pack(draft, choices_RJ[rows], verdict, cost_BK, costs)

    def _make_target(self, rows: slice, drawn: bool, logits_BJV: Tensor, inside: bool) -> Target:
        """Return the target's output about one group's block, as it is seen ``inside`` the graph or outside of it."""
        table = self.round.table
        target = Target(
            logits_BJV,
            table.process(rows, logits_BJV) if drawn else None,
            control_V=self.control_V,
            generated_B=table.column(Column.GENERATED)[rows],
            relaxed_B=table.column(Column.RELAXED)[rows],
            nats_B=table.column(Column.NATS)[rows].float(),
            spent=lambda label: sent(torch.tensor([row.get(label, 0.0) for row in self.spent[rows]]), table.device),
            relaxed_at=self.relaxed_at[rows],
            history=None if self.texts is None else self.texts[rows],
        )
        return see_on_device(target, inside)

    def _advance(self, accepted_R: Tensor, next_R: Tensor, relaxed_R: Tensor, nats_R: Tensor) -> None:
        """Update the table for the next round. Padding does not change."""
        table, drafter = self.round.table, self.round.drafter
        # The round emits the accepted tokens and the one after them.
        emitted_RJ = F.pad(self.round.proposal.tokens_RK, (0, 1)).scatter(
            1, accepted_R.unsqueeze(1), next_R.unsqueeze(1)
        )
        table.write_text(table.column(Column.LENGTH), emitted_RJ)
        text_R1J = torch.cat([table.column(Column.LAST).unsqueeze(1), emitted_RJ], 1)
        before_R = text_R1J.gather(1, accepted_R.unsqueeze(1)).squeeze(1)

        there_R = table.column(Column.LEFT) > 0
        count_R = torch.where(there_R, accepted_R + 1, 0)
        for column, new_R in ((Column.BEFORE, before_R), (Column.LAST, next_R)):
            table.column(column).copy_(torch.where(there_R, new_R, table.column(column)))
        table.column(Column.LENGTH).add_(count_R)
        table.column(Column.LEFT).sub_(count_R)
        table.column(Column.GENERATED).add_(count_R)
        table.column(Column.RELAXED).add_(torch.where(there_R, relaxed_R, 0))
        table.column(Column.NATS).add_(torch.where(there_R, nats_R, 0.0))
        if drafter is not None:
            drafter.advance(emitted_RJ, accepted_R, self.round.scored.states_RJF)


def _join(lines: Sequence[Tensor]) -> Tensor:
    """Join the lines of all groups, [R, X], padded to the longest."""
    widest = max(line_BX.shape[1] for line_BX in lines)
    return torch.cat([F.pad(line_BX, (0, widest - line_BX.shape[1])) for line_BX in lines])


def _compute_budget(budget: Any, target: Target, draft: Draft) -> Tensor:
    """Return the cost [B, K], float32, of keeping each drafted token by a ``CostBudget``."""
    (rows, longest), device = draft.shape, draft.tokens_BK.device
    rows_N = torch.arange(rows, device=device).repeat_interleave(longest)
    return budget.costs(target, draft, rows_N, torch.arange(longest, device=device).repeat(rows)).view(rows, longest)


def _compute_cost(target: Target, draft: Draft) -> Tensor:
    """Return the cost [B, K], float32, of keeping each drafted token: -ln target(token), of the unprocessed
    distribution."""
    return -pick(target.logits_BKV[:, :-1].log_softmax(-1), draft.tokens_BK)
