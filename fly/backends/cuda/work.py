"""One round of a batch of a fixed shape, as work for the device alone: draft, score, decide, go on.

Shape legend: R rows (padding included), K longest draft, J = K + 1 positions, V vocabulary, N new tokens of each row,
W pages of a row, C columns of the state, S tokens that end a row.

What a round must know of a row is one line of a table on the device, which the round itself updates: the host uploads
it once, and then only reads the result of each round. Rows above temperature 0 stand first."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fly.backends.cuda.chain import Chain, Proposal
from fly.backends.cuda.feed import Feed, feed_of
from fly.backends.cuda.graphs import Captures, Download, Kept, Part
from fly.backends.cuda.packing import may_relax, nats_of, pack
from fly.backends.cuda.says import Says
from fly.backends.cuda.shape import Asking, Column, Model, Shape
from fly.backends.cuda.table import Table
from fly.backends.cuda.trees import Grown
from fly.backends.cuda.waits import OnHost
from fly.backends.torch import TorchHead
from fly.cache import PagedKVCache
from fly.ops import Stream, argmax, uniforms
from fly.policies import AcceptancePolicy, verify
from fly.types import Draft, Noise, Target, Why

__all__ = ["Group", "Work"]


class Group(NamedTuple):
    """Rows that one policy decides about, all above temperature 0 or all at it."""

    policy: AcceptancePolicy
    drawn: bool
    rows: int


class Found(NamedTuple):
    """The target's output."""

    logits_RJV: Tensor
    choices_RJ: Tensor
    states_RJF: Tensor | None  # after all tokens, if they are wanted


class Work:
    """The memory of a batch of a fixed shape, and the parts of its rounds."""

    def __init__(
        self,
        shape: Shape,
        target: Model | TorchHead,
        cache: PagedKVCache,
        drafter: Model | TorchHead | None,
        draft_cache: PagedKVCache | None,
        captures: Captures,
    ) -> None:
        self.shape, self.target, self.captures = shape, target, captures
        self.device = target.device
        self.vocab_size, self.rounds = target.config.vocab_size, 0
        # Graphs hold addresses, not these objects: so dropping the cache frees its memory.
        self._cache, self._draft_cache = weakref.ref(cache), None if draft_cache is None else weakref.ref(draft_cache)
        self.table = Table(shape, target.device)
        self.copies_RJ = torch.zeros(shape.rows, shape.k + 1, dtype=torch.int64, device=self.device)
        self.says: Says | None = None
        self.draft_says: Says | None = None
        self.feed: Feed | None = None
        self.chain: Chain | None = None
        self.grown: Grown | None = None
        if drafter is not None and draft_cache is not None:
            self.feed = feed_of(self.table, drafter, draft_cache)
            if shape.says is not None or shape.forms:
                self.draft_says = Says(shape.rows, shape.says, shape.forms, self.vocab_size, self.device)
            if shape.spec.tree is not None:
                self.grown = Grown(self.feed, self.draft_says, shape.spec.tree, captures)
            else:
                self.chain = Chain(self.feed, self.draft_says, self.vocab_size, captures)
        if shape.says is not None and not shape.alone:
            self.says = Says(shape.rows, shape.says, False, self.vocab_size, self.device)
        self.score = Part(self._score, captures)
        self._decide: Kept[tuple[Group, ...], Decide] = Kept(16)

    @property
    def logit_bytes(self) -> int:
        return self.shape.logit_bytes(self.vocab_size)

    def serves(self, cache: PagedKVCache, draft_cache: PagedKVCache | None) -> bool:
        """Whether it was made for these caches."""
        own = None if self._draft_cache is None else self._draft_cache()
        return self._cache() is cache and own is draft_cache

    def decide(self, groups: tuple[Group, ...], control_V: Tensor, why_not: str | None) -> Decide:
        """How the policies of ``groups`` decide; ``why_not`` a graph holds that."""
        return self._decide.get(groups, lambda: Decide(self, groups, control_V, why_not))

    def ask(self, rows: Sequence[Asking | None]) -> None:
        """Upload what the rows in each place say of single tokens; None is padding."""
        for says in (self.says, self.draft_says):
            if says is not None:
                says.load(rows)

    def copy(self, lists: list[list[int]]) -> None:
        """Upload what is drafted without a model."""
        k = self.shape.k
        lines = [[*tokens, *[0] * (k - len(tokens)), len(tokens)] for tokens in lists]
        self.copies_RJ.copy_(torch.tensor(lines).pin_memory(), non_blocking=True)

    def _score(self) -> Found:
        """The target's forward over every row's last token and its draft."""
        cache, shape, target, proposal = self._cache(), self.shape, self.target, self.proposal
        assert cache is not None and not isinstance(target, TorchHead)
        tokens_RJ = torch.cat([self.table.column(Column.LAST).unsqueeze(1), proposal.tokens_RK], 1)
        fed_RJ = torch.arange(shape.k + 1, device=self.device) <= proposal.count_R.unsqueeze(1)
        fed_RJ = fed_RJ & (self.table.column(Column.LEFT) > 0).unsqueeze(1)
        table_RW, start_R = self.table.pages_RW[:, : shape.pages], self.table.column(Column.LENGTH) - 1
        branches = self.table.branches(start_R)
        taken = dict.fromkeys(shape.states, start_R)
        hidden_RJC = self.table.forward(target, cache, table_RW, tokens_RJ, start_R, fed_RJ, branches, taken)
        logits_RJV = target.logits(hidden_RJC.flatten(0, 1)).unflatten(0, tokens_RJ.shape)
        states_RJF: Tensor | None = None
        if shape.states:
            states_RJF = torch.cat([taken[number] for number in shape.states], -1).unflatten(0, tokens_RJ.shape)
        if (text_RS := self.table.text_RS) is not None:  # beyond the row it holds anything
            text_RS.scatter_(1, self.table.after(proposal.tokens_RK.shape[1]), proposal.tokens_RK)
        if self.says is not None:
            self.says.begin(self.table)
            places = []
            for j, logits_R1V in enumerate(logits_RJV.split(1, 1)):
                if j:
                    self.says.note(proposal.tokens_RK[:, j - 1 : j], j <= proposal.count_R)
                places.append(self.says.on(logits_R1V, self.table, j, False))
            logits_RJV = torch.cat(places, 1)
        return Found(logits_RJV, argmax(logits_RJV), states_RJF)

    def begin(self, longest: int) -> None:
        """Draft up to ``longest`` tokens a row, which ``finish`` goes on from."""
        self.rounds += 1
        if self.grown is not None:
            self.proposal = self.grown.run()
        elif self.chain is None:
            self.proposal = Proposal(self.copies_RJ[:, :-1], self.copies_RJ[:, -1])
        else:
            self.proposal = self.chain.run(longest)

    def finish(self) -> None:
        """Score what was drafted."""
        if self.chain is not None:
            self.chain.follow(self.score)
        self.found = self.score()


class Decide:
    """How the policies of groups of rows decide, and the state after it. ``labels`` are those of each group's
    clauses."""

    def __init__(self, work: Work, groups: tuple[Group, ...], control_V: Tensor, why_not: str | None) -> None:
        self.work, self.groups, self.control_V = weakref.proxy(work), groups, control_V
        self.labels: list[list[str]] = [[] for _ in groups]
        self.relaxes = [may_relax(group.policy) for group in groups]
        self.run = Part(self._run, work.captures, why_not)
        self.history: list[list[list[int]]] | None = None  # the texts of each group, for what runs outside of a graph
        self.download: Download | None = None

    def begin(self, done: torch.cuda.Event) -> None:
        """Decide, and start to download the result."""
        self.run.follow(self.work.score)
        found_RX = self.run()
        if self.download is None:
            self.download = Download(found_RX)
        self.download.begin(found_RX, done)

    def _run(self) -> Tensor:
        """[R, X] int32, as ``pack`` gives; the state is that of the next round then."""
        table, (tokens_RK, count_R, probs_DKV, _) = self.work.table, self.work.proposal
        (logits_RJV, choices_RJ, _), k = self.work.found, self.work.shape.k
        seed_R, length_R = table.column(Column.SEED), table.column(Column.LENGTH)
        accept_RK = uniforms(seed_R, length_R, Stream.ACCEPT, k)
        sample_R = uniforms(seed_R, length_R, Stream.SAMPLE, 1).squeeze(1)
        packed, accepted, following, relaxed, nats, first = [], [], [], [], [], 0
        for number, (policy, drawn, count) in enumerate(self.groups):
            rows = slice(first, first := first + count)
            history: list[list[int]] | None = OnHost()
            if self.run.why_not is not None:
                history = None if self.history is None else self.history[number]
            target = Target(
                logits_RJV[rows],
                table.sampling(rows).on(logits_RJV[rows]) if drawn else None,
                control_V=self.control_V,
                generated_B=table.column(Column.GENERATED)[rows],
                relaxed_B=table.column(Column.RELAXED)[rows],
                nats_B=table.column(Column.NATS)[rows].float(),
                history=history,
            )
            target._argmax = choices_RJ[rows]
            probs_BKV = probs_DKV[rows] if drawn and probs_DKV is not None else None
            draft = Draft(tokens_RK[rows], count_R[rows], probs_BKV)
            verdict = verify(policy, target, draft, Noise(accept_RK[rows], sample_R[rows]))
            cost_BK = nats_of(target, draft) if self.relaxes[number] else None
            self.labels[number] = list(verdict.clauses)
            packed.append(pack(draft, choices_RJ[rows], verdict, cost_BK))
            accepted.append(verdict.accepted_B)
            following.append(verdict.next_token_B)
            if cost_BK is None:
                relaxed.append(torch.zeros_like(verdict.accepted_B))
                nats.append(torch.zeros_like(verdict.accepted_B, dtype=torch.float64))
            else:
                excused_BK = verdict.why_BK == int(Why.RELAXED)
                relaxed.append(excused_BK.sum(1))
                nats.append(cost_BK.double().masked_fill(~excused_BK, 0.0).sum(1))
        self._go_on(torch.cat(accepted), torch.cat(following), torch.cat(relaxed), torch.cat(nats))
        widest = max(block.shape[1] for block in packed)
        padded = [torch.nn.functional.pad(block, (0, widest - block.shape[1])) for block in packed]
        return torch.cat(padded) if len(padded) > 1 else padded[0]

    def _go_on(self, accepted_R: Tensor, next_R: Tensor, relaxed_R: Tensor, nats_R: Tensor) -> None:
        """The state after the round; padding stays as it is."""
        table, tokens_RK = self.work.table, self.work.proposal.tokens_RK
        last_R = table.column(Column.LAST)
        active_R = table.column(Column.LEFT) > 0
        emitted_R = torch.where(active_R, accepted_R + 1, 0)
        before_R = last_R
        if tokens_RK.shape[1]:
            drafted_R = tokens_RK.gather(1, (accepted_R - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
            before_R = torch.where(accepted_R > 0, drafted_R, last_R)
        if table.text_RS is not None:
            place_R1 = table.after(tokens_RK.shape[1] + 1).gather(1, accepted_R.unsqueeze(1))
            table.text_RS.scatter_(1, place_R1, next_R.unsqueeze(1))
        table.column(Column.BEFORE).copy_(torch.where(active_R, before_R, table.column(Column.BEFORE)))
        last_R.copy_(torch.where(active_R, next_R, last_R))
        table.column(Column.LENGTH).add_(emitted_R)
        table.column(Column.LEFT).sub_(emitted_R)
        table.column(Column.GENERATED).add_(emitted_R)
        table.column(Column.RELAXED).add_(torch.where(active_R, relaxed_R, 0))
        table.column(Column.NATS).add_(torch.where(active_R, nats_R, 0.0))
        if self.work.feed is not None:
            self.work.feed.go_on(tokens_RK, accepted_R, next_R, self.work.found.states_RJF)
