"""Replay: which tokens any rule would have kept of recorded blocks, thousands of blocks a second.

A rule judges a recorded block as it would have judged it in the run, past mismatches too, because target and draft had
read the drafted tokens. Two things are estimates:

- Where the next block begins. A relaxed text differs from the recorded one, and nothing is known about it. The replay
  continues in the text of exact decoding, after as many tokens as the rule kept. At temperature 0 the draft from there
  is known, since a draft model proposes the same tokens after the same text.
- What follows the end of a recorded block, where a draft that began later is longer: the next tokens of the exact text
  (``beyond``). One of them may be the bonus of a fully kept block, which was never drafted; it counts as a match.

Replaying exact speculation gives the run itself; with a smaller K the two differ by rounding only. ``Replay.blocks`` is
a plainer estimate, the mean over the recorded blocks. A stretch of text with three mismatches begins three recorded
blocks, though a rule that excuses them passes the stretch once.

Shape legend: C completions, B the unfinished ones, P places of all blocks (a block's drafted tokens, and one after
them), J = K + 1 places of a draft, K longest draft, n most likely tokens.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fly.bundled import resolve_checkpoint
from fly.drafts.ngram import Index, NGramDraft, lookup_forwards
from fly.eval.known import Known, Unknown
from fly.eval.plan import AUTOREGRESSIVE, Plan
from fly.eval.recording import Outputs, Recording
from fly.eval.records import read_records
from fly.eval.report import Costs, measured_costs, neutral_speed
from fly.eval.statistics import Estimate, bootstrap_ratio
from fly.models.tokenizer import Tokenizer
from fly.ops import Stream, uniforms
from fly.policies import AcceptancePolicy, verify
from fly.policies.base import accepts_exactly
from fly.policies.registry import load_policy
from fly.types import Draft, Noise, Target, Why
from fly.vocabulary import Vocabulary

__all__ = ["Blocks", "RelaxedToken", "Replay", "Unknown", "load_blocks", "replay"]


class RelaxedToken(NamedTuple):
    """A token that a rule would relax.

    ``place`` counts the tokens of the answer before it, ``choice`` is the target's own token, and ``before`` are the
    last tokens of the text in front of it.
    """

    problem: str
    place: int
    token: int
    choice: int
    before: list[int]
    nats: float


@dataclass
class Replay:
    """What a rule would have done in a recorded run.

    Attributes:
        tau: tokens emitted a round, with an interval (bootstrap over problems).
        blocks: the same as a mean over the recorded blocks.
        exact: tokens a round of exact speculation in the run.
        drafted: tokens drafted a round.
        relaxed: share of relaxed tokens.
        nats: cost of relaxed tokens, in a thousand tokens: the sum of -ln target(token).
        beyond: share of tokens that were kept beyond the end of a recorded block.
        curve: by place of a draft, the share in which that place was kept, among the drafts that were that long.
        speed: over autoregressive decoding if decisions took no time (``neutral_speed``); None if costs are unknown.
        seconds: how long the replay took.
        tokens: examples of relaxed tokens.
        forwards: forwards of the draft model a round, with prompt lookup below it; None unless asked for.
    """

    policy: AcceptancePolicy
    k: int
    confidence: float
    reach: float
    completions: int
    rounds: int
    tau: Estimate
    blocks: float
    exact: float
    drafted: float
    relaxed: float
    nats: float
    beyond: float
    curve: list[float]
    speed: float | None
    seconds: float
    tokens: list[RelaxedToken] = field(default_factory=list)
    forwards: float | None = None


@dataclass(frozen=True)
class _Chain:
    """The drafts of some rows, as numbers of places; the last place of a draft comes after its last token."""

    place_BJ: Tensor
    lengths_B: Tensor
    beyond_BJ: Tensor  # bool: beyond the end of the recorded block


class Blocks:
    """Recorded blocks of completions that share a draft, a draft length and a vocabulary.

    Args:
        recordings: one for each completion.
        vocabulary: the meaning of token ids, for rules that ask for it.
        costs: the measured costs of a drafted token and of a verification; None if unknown.

    Raises ``ValueError`` without recordings, or for recordings with different vocabularies or draft lengths.
    """

    def __init__(
        self, recordings: Sequence[Recording], vocabulary: Vocabulary | None = None, costs: Costs | None = None
    ) -> None:
        if not recordings:
            raise ValueError("there are no recorded blocks")
        self.recordings, self.costs = list(recordings), costs
        alike = {(each.about["k"], each.about["vocabulary"], *each.about["control"]) for each in recordings}
        if len(alike) > 1:
            raise ValueError("these blocks were recorded with several draft lengths or vocabularies")
        self.k, self.size = recordings[0].about["k"], recordings[0].about["vocabulary"]
        self.vocabulary = vocabulary or Vocabulary(self.size)
        self.control_V = torch.zeros(self.size, dtype=torch.bool)
        self.control_V[recordings[0].about["control"]] = True
        self.texts = [each.text.tolist() for each in recordings]
        self.prompt_C = torch.tensor([each.prompt for each in recordings])
        self.end_C = torch.tensor([len(text) for text in self.texts])
        self.seed_C = torch.tensor([each.about["row_seed"] for each in recordings])
        self._lay_out()

    def _lay_out(self) -> None:
        """Number the places of all blocks one after another. For each place, note its token (after a block's last
        token: the target's choice), whether a draft that reaches it goes on, and to which place it goes."""
        places = sum(len(each.target.mass) for each in self.recordings)  # also the number of the place where all end
        tokens: list[int] = []
        goes_to: list[int] = []
        goes_on: list[bool] = []
        jumps: list[bool] = []  # whether going on leaves the recorded block
        drafted_at: list[int] = []
        first: list[int] = []  # of each completion, where it begins in the next list
        at: list[int] = []  # by completion and position in its text: the place of a draft that begins there
        self._starts: list[tuple[int, int]] = []  # of each recorded block: completion, position
        for c, each in enumerate(self.recordings):
            starts, lengths, accepted = each.start_N.tolist(), each.length_N.tolist(), each.accepted_N.tolist()
            drafted, choices = each.drafted_T.tolist(), each.target.ids[:, 0].tolist()
            base, end = len(tokens), len(self.texts[c])
            nexts = [*starts[1:], end]

            # The exact text runs through the kept part of each block: the place of every position of the text.
            offset, own = base, [places] * end
            for start, n, following in zip(starts, lengths, nexts):
                own[start:following] = range(offset, offset + following - start)
                offset += n + 1
            first.append(len(at))
            at += own

            # A draft goes on within its block. From the block's end it goes on where the next block begins.
            offset, taken = base, 0
            for start, n, kept, following in zip(starts, lengths, accepted, nexts):
                tokens += [*drafted[taken : taken + n], choices[offset - base + n]]
                drafted_at += range(offset, offset + n)
                follows = [*range(offset + 1, offset + n + 1), own[following] if following < end else places]
                jumps += [False] * (n + 1)
                if n < self.k and n:  # the drafter stopped here by itself, or nothing was left to draft
                    follows[n - 1] = places
                elif n and kept < n:  # nothing is known after the whole draft, so the exact text follows
                    follows[n - 1] = own[start + n] if start + n < end else places
                    jumps[-2] = True
                goes_to += follows
                goes_on += [True] * n + [n == self.k]
                self._starts.append((c, start))
                offset, taken = offset + n + 1, taken + n
        self.token_P = torch.tensor([*tokens, 0])
        self._next_P = torch.tensor([*goes_to, places])
        self._jumps_P = torch.tensor([*jumps, False])
        self._goes_on_P = torch.tensor([*goes_on, False])
        self._drafted_P = torch.zeros(places + 1, dtype=torch.bool)
        self._drafted_P[torch.tensor(drafted_at, dtype=torch.int64)] = True
        self._at_P, self._first_C = torch.tensor(at), torch.tensor(first)

        # The outputs of both models at each place; at the end of a text, any will do.
        recorded = [each.target for each in self.recordings]
        last = recorded[-1].at(torch.tensor([-1])) if len(recorded[-1].mass) else Outputs.unknown(1)
        self.target = Outputs.join([*recorded, last])
        self._logit_P = self.target.logits[:, 0].clone()
        self._logit_P[self._drafted_P] = torch.cat([each.logit_T for each in self.recordings])
        self.draft: Outputs | None = None
        if any(each.draft is not None for each in self.recordings):
            drafts = [each.draft or Outputs.unknown(len(each.drafted_T)) for each in self.recordings]
            joined = Outputs.join([*drafts, Outputs.unknown(1)])
            index_P = torch.full((places + 1,), len(joined.mass) - 1)
            index_P[self._drafted_P] = torch.arange(len(joined.mass) - 1)
            self.draft = joined.at(index_P)

    @cached_property
    def exact(self) -> tuple[list[int], list[int]]:
        """By completion, how many tokens its recorded rounds emitted, and how many rounds there were."""
        emitted = [len(text) - int(each.start_N[0]) if len(each.start_N) else 0
                   for text, each in zip(self.texts, self.recordings)]  # fmt: skip
        return emitted, [len(each.start_N) for each in self.recordings]

    def chain(
        self, row_B: Tensor, at_B: Tensor, k: int, confidence: float = 0.0, reach: float = 0.0, go_on: bool = True
    ) -> _Chain:
        """The drafts for rows (numbers of completions) after ``at_B`` tokens of their texts: at most ``k`` tokens, up
        to the one at which ``confidence`` or ``reach`` stop a ``SingleDraft``; with ``go_on``, also beyond the block
        that was recorded there."""
        place_B = self._at_P[self._first_C[row_B] + at_B]
        live = place_B < len(self.token_P) - 1
        beyond_B, lengths_B = torch.zeros_like(live), torch.zeros_like(place_B)
        places, beyond = [], []
        peak_P = self._peaks() if confidence or reach else torch.ones(len(self._drafted_P))
        reached_B = torch.ones(len(live))
        for _ in range(k):
            live = live & (self._goes_on_P if go_on else self._drafted_P)[place_B]
            places.append(place_B)
            beyond.append(beyond_B)
            lengths_B = lengths_B + live
            peak_B = peak_P[place_B]
            reached_B = reached_B * peak_B
            if go_on:
                beyond_B = beyond_B | (self._jumps_P[place_B] & live)
                place_B = torch.where(live, self._next_P[place_B], place_B)
            else:
                place_B = torch.where(live, place_B + 1, place_B)
            live = live & (peak_B >= confidence) & (reached_B >= reach)
        places.append(place_B)
        beyond.append(beyond_B)
        return _Chain(torch.stack(places, 1), lengths_B, torch.stack(beyond, 1))

    def _peaks(self) -> Tensor:
        """[P] the draft model's largest probability at each place; 1 where it is not known."""
        if self.draft is None:
            raise Unknown("it needs the draft model's probabilities, which were not recorded")
        return (-self.draft.mass).exp().nan_to_num(1.0)

    def judged(
        self,
        policy: AcceptancePolicy,
        row_B: Tensor,
        at_B: Tensor,
        chain: _Chain,
        relaxed_B: Tensor,
        nats_B: Tensor,
        spent: Mapping[str, Tensor] = {},
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """How many tokens of each draft ``policy`` keeps [B], which of them are relaxed [B, K], and what these cost
        [B, K] by each of the policy's budgets. ``spent`` is what rows spent before, by budget [B]."""
        place_BJ, token_BJ = chain.place_BJ, self.token_P[chain.place_BJ]
        draft = Draft(token_BJ[:, :-1], chain.lengths_B)
        if self.draft is not None:
            draft = replace(draft, logits_BKV=self._known(self.draft, place_BJ[:, :-1], token_BJ[:, :-1]))
        target = Target(
            self._known(self.target, place_BJ, token_BJ, self._logit_P),
            control_V=self.control_V,
            generated_B=at_B - self.prompt_C[row_B],
            relaxed_B=relaxed_B,
            nats_B=nats_B,
            spent=lambda label: spent[label] if label in spent else torch.zeros(len(row_B)),
            history=[self.texts[c][:at] for c, at in zip(row_B.tolist(), at_B.tolist())],
        )
        noise = None
        if not accepts_exactly(policy):
            accept_BK = uniforms(self.seed_C[row_B], at_B, Stream.ACCEPT, draft.shape[1])
            noise = Noise(accept_BK, uniforms(self.seed_C[row_B], at_B, Stream.SAMPLE, 1).squeeze(1))
        try:
            verdict = verify(policy, target, draft, noise)
        except Unknown as error:
            raise Unknown(f"'{policy}' cannot be replayed: {error}") from None
        relaxes_BK, costs = verdict.why_BK == int(Why.RELAXED), {}
        for budget in () if policy.relaxation is None else policy.relaxation.budgets:
            cost_BK = torch.zeros(relaxes_BK.shape)
            cost_BK[relaxes_BK] = budget.cost(target, draft, *relaxes_BK.nonzero().unbind(1)).float()
            costs[budget.label] = cost_BK
        return verdict.accepted_B, relaxes_BK, costs

    def _known(self, outputs: Outputs, place_BJ: Tensor, token_BJ: Tensor, logit_P: Tensor | None = None) -> Known:
        """Logits at some places, as far as they are known. ``logit_P``: those of the drafted tokens; None for a draft
        model at temperature 0, which drafts its most likely token."""
        here = outputs.at(place_BJ)
        ids = torch.cat([here.ids.long(), token_BJ.unsqueeze(-1)], -1)
        own_BJ = here.logits[..., 0] if logit_P is None else logit_P[place_BJ]
        return Known.of(self.size, ids, torch.cat([here.logits, own_BJ.unsqueeze(-1)], -1), here.mass, here.entropy)

    def replay(
        self,
        policy: AcceptancePolicy,
        k: int | None = None,
        confidence: float = 0.0,
        reach: float = 0.0,
        cases: int = 0,
        lookup: NGramDraft | None = None,
    ) -> Replay:
        """What ``policy`` would have done.

        Args:
            k: the longest draft; None for the recorded one.
            confidence, reach: where drafts stop by themselves, as in ``SingleDraft``.
            cases: how many relaxed tokens to return as examples.
            lookup: prompt lookup below the draft model. It saves forwards, which are counted, and changes no token.

        Raises ``Unknown`` if the recording lacks what the rule needs, and ``ValueError`` for a longer draft.
        """
        k = self.k if k is None else k
        if not 1 <= k <= self.k:
            raise ValueError(f"k {k}: drafts of 1 to {self.k} tokens were recorded")
        for name, chance in (("confidence", confidence), ("reach", reach)):
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} {chance} must be in [0, 1]")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the tensors are small, and threads would only wait for one another
        try:
            return self._replay(policy.bind(self.vocabulary), k, confidence, reach, cases, lookup)
        finally:
            torch.set_num_threads(threads)

    def _replay(
        self, policy: AcceptancePolicy, k: int, confidence: float, reach: float, cases: int, lookup: NGramDraft | None
    ) -> Replay:
        begin, count = time.perf_counter(), len(self.recordings)
        forwards = 0
        indices = [] if lookup is None else [Index(lookup.longest, lookup.shortest) for _ in self.recordings]
        emitted_C, rounds_C, drafted_C, relaxed_C = (torch.zeros(count, dtype=torch.int64) for _ in range(4))
        nats_C, beyond, spent = torch.zeros(count), 0, dict[str, Tensor]()
        drafts_K, stood_K = (torch.zeros(k, dtype=torch.int64) for _ in range(2))
        found: list[RelaxedToken] = []
        at_C = torch.tensor([int(each.start_N[0]) if len(each.start_N) else len(text)
                             for text, each in zip(self.texts, self.recordings)])  # fmt: skip
        columns_K = torch.arange(k)
        # Every unfinished completion takes one round at a time.
        while len(row_B := (at_C < self.end_C).nonzero().flatten()):
            at_B = at_C[row_B]
            # Draft and verify.
            chain = self.chain(row_B, at_B, k, confidence, reach)
            before = {label: spent_C[row_B] for label, spent_C in spent.items()}
            accepted_B, why_BK, costs = self.judged(policy, row_B, at_B, chain, relaxed_C[row_B], nats_C[row_B], before)
            # Count what is emitted: no more than the text still has.
            emitted_B = (accepted_B + 1).minimum(self.end_C[row_B] - at_B)
            stands_BK = columns_K < accepted_B.minimum(emitted_B).unsqueeze(1)
            relaxes_BK = why_BK & stands_BK
            beyond += int((chain.beyond_BJ[:, :-1] & stands_BK).sum())
            drafts_K += (columns_K < chain.lengths_B.unsqueeze(1)).sum(0)
            stood_K += (columns_K < accepted_B.unsqueeze(1)).sum(0)
            # Charge the relaxed tokens to each row's budgets.
            if relaxes_BK.any():
                nats_BK = self._nats(chain.place_BJ[:, :-1])
                relaxed_C[row_B] += relaxes_BK.sum(1)
                nats_C[row_B] += torch.where(relaxes_BK, nats_BK, 0.0).sum(1)
                for label, cost_BK in costs.items():
                    spent_C = spent.setdefault(label, torch.zeros(count))
                    spent_C[row_B] += torch.where(relaxes_BK, cost_BK, 0.0).sum(1)
                if len(found) < cases:
                    found += self._examples(row_B, at_B, chain, relaxes_BK, nats_BK)
            emitted_C[row_B] += emitted_B
            drafted_C[row_B] += chain.lengths_B
            if lookup is not None:  # count the forwards that it leaves to the draft model
                for c, at, places, n in zip(row_B.tolist(), at_B.tolist(), chain.place_BJ, chain.lengths_B.tolist()):
                    tokens = self.token_P[places[:n]].tolist()
                    forwards += lookup_forwards(indices[c], self.texts[c][:at], tokens, lookup.k)
            # Go on behind what was emitted.
            rounds_C[row_B] += 1
            at_C[row_B] += emitted_B
        seconds = time.perf_counter() - begin
        rounds, emitted = int(rounds_C.sum()), int(emitted_C.sum())
        drafted = int(drafted_C.sum()) / max(rounds, 1)
        tau = self._by_problem(emitted_C.tolist(), rounds_C.tolist())
        step = max(len(found) // cases, 1) if cases else 1
        return Replay(
            policy,
            k,
            confidence,
            reach,
            count,
            rounds,
            tau,
            self._by_block(policy, k, confidence, reach),
            sum(self.exact[0]) / max(sum(self.exact[1]), 1),
            drafted,
            int(relaxed_C.sum()) / max(emitted, 1),
            1000 * float(nats_C.sum()) / max(emitted, 1),
            beyond / max(emitted, 1),
            (stood_K / drafts_K.clamp_min(1)).tolist(),
            self._speed(tau.value, drafted),
            seconds,
            found[::step][:cases],
            forwards / max(rounds, 1) if lookup is not None else None,
        )

    def _by_block(self, policy: AcceptancePolicy, k: int, confidence: float, reach: float) -> float:
        """The mean over the recorded blocks of the tokens that each emits."""
        row_B, at_B = torch.tensor(self._starts).reshape(-1, 2).unbind(1)
        chain = self.chain(row_B, at_B, k, confidence, reach, go_on=False)
        zeros_B = torch.zeros_like(row_B)
        accepted_B, _, _ = self.judged(policy, row_B, at_B, chain, zeros_B, zeros_B.float())
        return (accepted_B + 1).minimum(self.end_C[row_B] - at_B).double().mean().item()

    def _nats(self, place_BK: Tensor) -> Tensor:
        """[B, K] -ln target(token), of the unprocessed distribution."""
        return self.target.logits[place_BK, 0] + self.target.mass[place_BK] - self._logit_P[place_BK]

    def _examples(
        self, row_B: Tensor, at_B: Tensor, chain: _Chain, relaxes_BK: Tensor, nats_BK: Tensor
    ) -> list[RelaxedToken]:
        found = []
        for b, j in relaxes_BK.nonzero().tolist():
            c, places = int(row_B[b]), chain.place_BJ[b]
            drafted, choice = self.token_P[places].tolist(), int(self.target.ids[places[j], 0])
            before = [*self.texts[c][max(int(at_B[b]) - 12, 0) : int(at_B[b])], *drafted[:j]]
            place = int(at_B[b] - self.prompt_C[c]) + j
            problem = str(self.recordings[c].about["problem"])
            found.append(RelaxedToken(problem, place, drafted[j], choice, before, float(nats_BK[b, j])))
        return found

    def _by_problem(self, emitted: list[int], rounds: list[int]) -> Estimate:
        sums: dict[tuple[str, str], list[int]] = {}
        for each, tokens, turns in zip(self.recordings, emitted, rounds):
            sum_ = sums.setdefault((each.about["task"], each.about["problem"]), [0, 0])
            sum_[0] += tokens
            sum_[1] += turns
        return bootstrap_ratio([[a for a, _ in sums.values()]], [[b for _, b in sums.values()]])

    def _speed(self, tau: float, drafted: float) -> float | None:
        """The speed at no cost, with v for drafts of this length: a verification costs as much as the forward of one
        token, and more in proportion to the drafted tokens."""
        if self.costs is None:
            return None
        recorded = sum(len(each.drafted_T) for each in self.recordings) / max(sum(self.exact[1]), 1)
        v = 1 + (self.costs.v - 1) * drafted / max(recorded, 1e-9)
        return neutral_speed(tau, drafted, Costs(self.costs.c, v))

    def of(self, problems: Collection[str]) -> Blocks:
        """The blocks of some problems only."""
        kept = [each for each in self.recordings if each.about["problem"] in problems]
        return Blocks(kept, self.vocabulary, self.costs)


def load_blocks(run: str | Path, costs: Costs | None = None) -> dict[tuple[str, str], Blocks]:
    """The recorded blocks of a run's folder, by task and way. ``costs`` replaces the costs that the run measured.

    Raises ``ValueError`` for a folder that is no run, or has no recorded blocks.
    """
    run, plan = Path(run), Plan.of_run(run)
    completions = read_records(run).completions
    found: dict[tuple[str, str], list[Recording]] = {}
    for key, record in completions.items():
        if "blocks" in record:
            path = run / record["blocks"]
            if not path.exists():
                raise ValueError(f"{path}, which records.jsonl names, is missing")
            found.setdefault((key.task, key.way), []).append(Recording.load(path))
    if not found:
        raise ValueError(f"{str(run)!r} has no recorded blocks: 'fly eval --record' keeps them")
    sizes = {each.about["vocabulary"] for several in found.values() for each in several}
    tokenizer = Tokenizer.load(resolve_checkpoint(plan.model, weights=False))
    vocabularies = {size: Vocabulary(size) if tokenizer is None else tokenizer.vocabulary(size) for size in sizes}

    def of_way(task: str, way: str) -> list[dict[str, Any]]:
        return [record for key, record in completions.items() if (key.task, key.way) == (task, way)]

    return {
        (task, way): Blocks(
            several,
            vocabularies[several[0].about["vocabulary"]],
            costs or measured_costs(of_way(task, way), of_way(task, AUTOREGRESSIVE)),
        )
        for (task, way), several in found.items()
    }


def replay(
    run: str | Path,
    policy: AcceptancePolicy | str,
    k: int | None = None,
    confidence: float = 0.0,
    reach: float = 0.0,
    cases: int = 0,
    costs: Costs | None = None,
) -> dict[tuple[str, str], Replay]:
    """What ``policy`` would have done in a recorded run, by task and recorded way. Arguments and errors are those of
    ``Blocks.replay`` and ``load_blocks``."""
    rule = load_policy(policy, trusted=True)
    return {name: blocks.replay(rule, k, confidence, reach, cases) for name, blocks in load_blocks(run, costs).items()}
