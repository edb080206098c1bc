"""Replay: compute which tokens of recorded blocks a rule would have kept, thousands of blocks per second.

The verdict on a recorded block is the one that the rule would have given in the run, even after a mismatch, because
target and draft model had read all drafted tokens. Two things are estimates:

- Where the next block begins. After a relaxed token the text would differ from the recorded one, and the models'
  outputs for it are unknown. The replay goes on in the recorded text, which comes from exact decoding, after as many
  tokens as the rule emitted. At temperature 0 the draft from there is known, since a draft model proposes the same
  tokens after the same text.
  A trained head proposes others, since it reads the target's hidden states where a recorded draft has guesses.
- How a draft goes on beyond the end of a recorded block, if it begins inside that block. The replay takes the next
  tokens of the recorded text (``beyond``). One of them may be the bonus token of a fully kept block, which was never
  drafted; it counts as a match.

A replay of exact speculation reproduces the run. With a smaller K, replay and run differ by rounding only.

Shape legend: C completions, B the unfinished ones, P places of all blocks (one for each drafted token of a block, and
one after them), N blocks, T drafted tokens in all blocks, J = K + 1 places of a draft, K longest draft, n most likely
tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fly.drafts.ngram import Index, NGramDraft, lookup_forwards
from fly.extras.eval.archive import Archive
from fly.extras.eval.costs import Costs, measured_costs, neutral_speed
from fly.extras.eval.known import Known, Unknown
from fly.extras.eval.plan import AUTOREGRESSIVE
from fly.extras.eval.recording import Outputs, Recording
from fly.extras.statistics import Estimate, bootstrap_ratio
from fly.models.bundled import resolve_checkpoint
from fly.models.tokenizer import Tokenizer
from fly.ops import Stream, uniforms
from fly.policies import AcceptancePolicy, verify
from fly.policies.base import accepts_exactly
from fly.policies.reads import supply_logits
from fly.policies.registry import load_policy
from fly.types import Draft, Noise, Target, Why
from fly.vocabulary import Vocabulary

__all__ = ["Accounts", "Blocks", "RelaxedToken", "Replay", "Unknown", "load_blocks", "replay"]


class RelaxedToken(NamedTuple):
    """A token that a rule would relax.

    ``place`` is the number of answer tokens before it, ``choice`` is the token that the target would have chosen, and
    ``before`` holds the last tokens of the text in front of it.
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
        tau: tokens emitted per round, with an interval (bootstrap over problems).
        exact: tokens per round of the run's exact speculation.
        drafted: tokens drafted per round.
        relaxed: share of emitted tokens that were relaxed.
        nats: cost of the relaxed tokens per thousand emitted tokens: the sum of -ln target(token).
        beyond: share of emitted tokens that were kept beyond the end of a recorded block.
        curve: for each token of a draft, the share of drafts that were kept up to it, among those that are long enough.
        speed: relative to autoregressive decoding, if decisions took no time (``neutral_speed``); None if costs are
            unknown.
        seconds: how long the replay took.
        tokens: examples of relaxed tokens.
        forwards: how many forwards the draft model runs per round, with prompt lookup below it; None without lookup.
    """

    policy: AcceptancePolicy
    k: int
    confidence: float
    reach: float
    completions: int
    rounds: int
    tau: Estimate
    exact: float
    drafted: float
    relaxed: float
    nats: float
    beyond: float
    curve: list[float]
    speed: float | None
    seconds: float
    tokens: list[RelaxedToken]
    forwards: float | None


@dataclass(frozen=True)
class _Chain:
    """The drafts of some rows, given as place numbers. The last place of a draft comes after its last token."""

    place_BJ: Tensor
    lengths_B: Tensor
    beyond_BJ: Tensor  # bool: beyond the end of the recorded block


class Accounts:
    """What the relaxed tokens of C texts have cost so far, as ``fly.types.Account`` says it of one."""

    def __init__(self, count: int) -> None:
        self.relaxed_C = torch.zeros(count, dtype=torch.int64)
        self.nats_C = torch.zeros(count)
        self.spent: dict[str, Tensor] = {}  # [C] each, by the budget's label

    def columns(self, row_B: Tensor) -> dict[str, Any]:
        """Return the arguments of ``Target`` that say what these texts have spent."""

        def spent(label: str) -> Tensor:
            return self.spent[label][row_B] if label in self.spent else torch.zeros(len(row_B))

        return {"relaxed_B": self.relaxed_C[row_B], "nats_B": self.nats_C[row_B], "spent": spent}

    def charge(self, row_B: Tensor, relaxes_BK: Tensor, nats_BK: Tensor, costs: Mapping[str, Tensor]) -> None:
        """Add the relaxed tokens of these texts, bool [B, K]. Their nats, and their costs by each budget's label, are
        [B, K] too; other places do not count."""
        self.relaxed_C[row_B] += relaxes_BK.sum(1)
        self.nats_C[row_B] += torch.where(relaxes_BK, nats_BK, 0.0).sum(1)
        for label, cost_BK in costs.items():
            spent_C = self.spent.setdefault(label, torch.zeros_like(self.nats_C))
            spent_C[row_B] += torch.where(relaxes_BK, cost_BK, 0.0).sum(1)


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
        alike = {(longest_of(each), each.about["vocabulary"], *each.about["control"]) for each in recordings}
        if len(alike) > 1:
            raise ValueError("these blocks were recorded with several draft lengths or vocabularies")
        self.k, self.size = longest_of(recordings[0]), recordings[0].about["vocabulary"]
        self.head = recordings[0].about.get("head", "")  # the word for the trained head that drafted; "": none did
        self.vocabulary = vocabulary or Vocabulary(self.size)
        self.control_V = torch.zeros(self.size, dtype=torch.bool)
        self.control_V[recordings[0].about["control"]] = True
        self.stopped = 0  # how many drafts are shorter than k, though neither the text nor a stop token ended them
        self.texts = [each.text.tolist() for each in recordings]
        self.prompt_C = torch.tensor([each.prompt for each in recordings])
        self.end_C = torch.tensor([len(text) for text in self.texts])
        self.seed_C = torch.tensor([each.about["row_seed"] for each in recordings])
        self._lay_out_places()
        self._lay_out_outputs()

    def _lay_out_places(self) -> None:
        """Number the places of all blocks consecutively, and add one last place where every text ends. For each place,
        record its token (after a draft: the target's choice), whether a draft goes on from there, the next place, and
        whether going there leaves the recorded block. Also record the place of each position of the texts."""
        nowhere = sum(len(each.target.mass) for each in self.recordings)
        tokens, follows, places, firsts = (list[int]() for _ in range(4))
        drafted, goes_on, jumps = (list[bool]() for _ in range(3))
        for each in self.recordings:
            starts = each.start_N.tolist()
            lengths = each.length_N.tolist()
            accepted = each.accepted_N.tolist()
            choices, drafts = each.target.ids[:, 0].tolist(), each.drafted_T.split(lengths)
            end, base = len(each.text), len(tokens)
            ends, offsets = [*starts[1:], end], accumulate((n + 1 for n in lengths), initial=base)
            blocks = list(zip(starts, ends, lengths, accepted, drafts, offsets))

            # The exact text runs through the kept part of each block.
            place_at = [nowhere] * (end + 1)
            for start, following, _, _, _, offset in blocks:
                place_at[start:following] = range(offset, offset + following - start)
            firsts.append(len(places))
            places += place_at

            # A draft goes on within its block. From the end of the block, it goes on at the start of the next block.
            for start, following, n, n_accepted, draft, offset in blocks:
                ended = start + n + 1 >= end or bool({*draft[-1:].tolist()} & {*each.about["stop"]})
                self.stopped += n < self.k and not ended
                tokens += [*draft.tolist(), choices[offset - base + n]]
                after = [*range(offset + 1, offset + n + 1), place_at[following]]
                leaves = [False] * (n + 1)
                if n < self.k and n:  # the drafter stopped here by itself, or nothing was left to draft
                    after[n - 1] = nowhere
                elif n and n_accepted < n:  # nothing is known after the whole draft, so the exact text follows
                    after[n - 1], leaves[n - 1] = place_at[min(start + n, end)], True
                follows += after
                jumps += leaves
                drafted += [True] * n + [False]
                goes_on += [True] * n + [n == self.k]
        self.token_P, self._next_P = torch.tensor([*tokens, 0]), torch.tensor([*follows, nowhere])
        self._drafted_P, self._goes_on_P, self._jumps_P = (
            torch.tensor([*flags, False]) for flags in (drafted, goes_on, jumps)
        )
        self._places, self._first_C = torch.tensor(places), torch.tensor(firsts)

    def _lay_out_outputs(self) -> None:
        """Join the recorded outputs of both models at each place. At the end of a text, any output will do."""
        target_outputs = [each.target for each in self.recordings]
        last = target_outputs[-1].at(torch.tensor([-1])) if len(target_outputs[-1].mass) else Outputs.unknown(1)
        self.target = Outputs.join([*target_outputs, last])
        self._logit_P = self.target.logits[:, 0].clone()
        self._logit_P[self._drafted_P] = torch.cat([each.logit_T for each in self.recordings])
        self.draft: Outputs | None = None
        if any(each.draft is not None for each in self.recordings):
            drafts = [each.draft or Outputs.unknown(len(each.drafted_T)) for each in self.recordings]
            index_P = torch.where(self._drafted_P, self._drafted_P.cumsum(0) - 1, self._drafted_P.sum())
            self.draft = _certain_where_unknown(Outputs.join([*drafts, Outputs.unknown(1)]).at(index_P), self.token_P)

    @cached_property
    def exact(self) -> tuple[list[int], list[int]]:
        """For each completion, the number of tokens that its recorded rounds emitted, and the number of rounds."""
        emitted = (self.end_C - self.begin_C).tolist()
        return emitted, [len(each.start_N) for each in self.recordings]

    @cached_property
    def begin_C(self) -> Tensor:
        """The position [C] where the first recorded block begins; the end of the text if there is none."""
        pairs = zip(self.texts, self.recordings)
        return torch.tensor([int(each.start_N[0]) if len(each.start_N) else len(text) for text, each in pairs])

    def chain(self, row_B: Tensor, at_B: Tensor, k: int, confidence: float = 0.0, reach: float = 0.0) -> _Chain:
        """Return the drafts after the first ``at_B`` tokens of the completions ``row_B``. A draft has at most ``k``
        tokens. It ends earlier where ``confidence`` or ``reach`` would stop a ``SingleDraft``."""
        place_B = self._places[self._first_C[row_B] + at_B]
        live = place_B < len(self.token_P) - 1
        beyond_B, lengths_B = torch.zeros_like(live), torch.zeros_like(place_B)
        peak_P = self._peaks() if confidence or reach else torch.ones(len(self._drafted_P))
        reached_B = torch.ones(len(live))
        places, beyond = [place_B], [beyond_B]
        for _ in range(k):
            live = live & self._goes_on_P[place_B]
            lengths_B = lengths_B + live
            peak_B = peak_P[place_B]
            reached_B = reached_B * peak_B
            beyond_B = beyond_B | (self._jumps_P[place_B] & live)
            place_B = torch.where(live, self._next_P[place_B], place_B)
            live = live & (peak_B >= confidence) & (reached_B >= reach)
            places.append(place_B)
            beyond.append(beyond_B)
        return _Chain(torch.stack(places, 1), lengths_B, torch.stack(beyond, 1))

    def _peaks(self) -> Tensor:
        """Return the draft model's largest probability [P] at each place; 1 where it is not known
        (``_certain_where_unknown``)."""
        if any(each.about.get("own_chance") for each in self.recordings):
            raise Unknown("confidence and reach stop drafts of this head by its own estimates, which are not recorded")
        if self.draft is None:
            raise Unknown("confidence and reach need the draft model's probabilities, which were not recorded")
        return (-self.draft.mass).exp()

    def judge(
        self,
        policy: AcceptancePolicy,
        row_B: Tensor,
        at_B: Tensor,
        chain: _Chain,
        accounts: Accounts,
        relaxed_at: list[list[int]] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Judge each draft by ``policy``. Returns the number of tokens kept [B], which of them are relaxed [B, K], and
        for each of the policy's budgets what these cost [B, K]. ``accounts`` are those of all rows before the
        block; ``relaxed_at`` are the positions of each row's relaxed tokens."""
        place_BJ, token_BJ = chain.place_BJ, self.token_P[chain.place_BJ]
        draft = Draft(token_BJ[:, :-1], chain.lengths_B)
        if policy.reads_logits:
            if self.draft is None:
                raise Unknown(f"'{policy}' cannot be replayed: it reads the draft's logits, which were not recorded")
            draft = replace(draft, logits_BKV=self._known(self.draft, place_BJ[:, :-1], token_BJ[:, :-1]))
        draft = supply_logits(policy, draft, self.size)
        target = Target(
            self._known(self.target, place_BJ, token_BJ, self._logit_P),
            control_V=self.control_V,
            generated_B=at_B - self.prompt_C[row_B],
            **accounts.columns(row_B),
            relaxed_at=relaxed_at,
            history=[self.texts[c][:at] for c, at in zip(row_B.tolist(), at_B.tolist())],
        )
        noise = None
        if not accepts_exactly(policy):
            accept_BK = uniforms(self.seed_C[row_B], at_B, Stream.ACCEPT, draft.shape[1])
            noise = Noise(accept_BK, uniforms(self.seed_C[row_B], at_B, Stream.SAMPLE, 1).squeeze(1))
        try:
            verdict = verify(policy, target, draft, noise)
        except Unknown as error:
            raise Unknown(error.reason, policy) from None
        relaxes_BK, costs = verdict.why_BK == int(Why.RELAXED), {}
        for budget in policy.budgets:
            cost_BK = torch.zeros(relaxes_BK.shape)
            cost_BK[relaxes_BK] = budget.costs(target, draft, *relaxes_BK.nonzero().unbind(1))
            costs[budget.label] = cost_BK
        return verdict.accepted_B, relaxes_BK, costs

    def _known(self, outputs: Outputs, place_BJ: Tensor, token_BJ: Tensor, logit_P: Tensor | None = None) -> Known:
        """Return the logits at some places, as far as they are known. ``logit_P`` has the logit of each place's own
        token. None stands for a draft model at temperature 0, whose own token is its most likely one."""
        outputs_BJ = outputs.at(place_BJ)
        ids = torch.cat([outputs_BJ.ids.long(), token_BJ.unsqueeze(-1)], -1)
        logit_BJ = outputs_BJ.logits[..., 0] if logit_P is None else logit_P[place_BJ]
        return Known.of(
            self.size,
            ids,
            torch.cat([outputs_BJ.logits, logit_BJ.unsqueeze(-1)], -1),
            outputs_BJ.mass,
            outputs_BJ.entropy,
        )

    def replay(
        self,
        policy: AcceptancePolicy,
        k: int | None = None,
        confidence: float = 0.0,
        reach: float = 0.0,
        cases: int = 0,
        lookup: NGramDraft | None = None,
    ) -> Replay:
        """Compute what ``policy`` would have done in the recorded run.

        Args:
            k: the longest draft; None for the recorded one.
            confidence, reach: where drafts stop by themselves, as in ``SingleDraft``.
            cases: how many relaxed tokens to return as examples.
            lookup: prompt lookup below the draft model. It changes no token, but saves forwards of the draft
                model; those that remain are counted.

        Raises ``Unknown`` if the recording lacks what the rule needs, and ``ValueError`` for a longer draft or a rule
        that fails on a trial block (``AcceptancePolicy.refuse_failing``).
        """
        k = self.k if k is None else k
        if not 1 <= k <= self.k:
            raise ValueError(f"k {k}: drafts of 1 to {self.k} tokens were recorded")
        for name, chance in (("confidence", confidence), ("reach", reach)):
            if not 0 <= chance <= 1:
                raise ValueError(f"{name} {chance} must be in [0, 1]")
        rule = policy.bind(self.vocabulary)
        rule.refuse_failing(greedy=True)
        walk = _Walk(self, rule, k, confidence, reach, cases, lookup)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the tensors are small, and threads would only wait for one another
        try:
            # In each turn of this loop, every unfinished completion takes one round.
            while len(row_B := (walk.at_C < self.end_C).nonzero().flatten()):
                walk.take_round(row_B)
            return walk.result()
        finally:
            torch.set_num_threads(threads)

    def nats(self, place_BK: Tensor) -> Tensor:
        """Return -ln target(token) [B, K], by the raw distribution."""
        return self.target.logits[place_BK, 0] + self.target.mass[place_BK] - self._logit_P[place_BK]

    def by_problem(self, emitted: list[int], rounds: list[int]) -> Estimate:
        """Return the mean number of tokens per round, from the tokens and rounds of each completion, with an interval
        (bootstrap over problems)."""
        sums: dict[tuple[str, str], list[int]] = {}
        for each, tokens, turns in zip(self.recordings, emitted, rounds):
            sum_ = sums.setdefault((each.about["task"], each.about["problem"]), [0, 0])
            sum_[0] += tokens
            sum_[1] += turns
        return bootstrap_ratio([[a for a, _ in sums.values()]], [[b for _, b in sums.values()]])

    def speed(self, tau: float, drafted: float) -> float | None:
        """Return the speed relative to AR if decisions took no time. The cost ``v`` of a verification is scaled to
        drafts of this length: one forward of one token, plus an amount for each drafted token."""
        if self.costs is None:
            return None
        recorded_length = sum(len(each.drafted_T) for each in self.recordings) / max(sum(self.exact[1]), 1)
        v = 1 + (self.costs.v - 1) * drafted / max(recorded_length, 1e-9)
        return neutral_speed(tau, drafted, Costs(self.costs.c, v))

    def of(self, problems: Collection[str]) -> Blocks:
        """Return the blocks of some problems only."""
        recordings = [each for each in self.recordings if each.about["problem"] in problems]
        return Blocks(recordings, self.vocabulary, self.costs)


def longest_of(recording: Recording) -> int:
    """Return the most tokens of a draft."""
    about = recording.about
    longest: int = about.get("longest", about["k"])
    return longest


def _certain_where_unknown(outputs: Outputs, token_P: Tensor) -> Outputs:
    """Return a draft model's outputs at all places. Where the model drafted nothing, such as at a bonus token, which
    counts as a match, it is taken to be certain of the place's token."""
    unknown_P1 = outputs.mass.isnan().unsqueeze(1)
    rank_n = torch.arange(outputs.ids.shape[1])
    ids_Pn = torch.where(rank_n == 0, token_P.unsqueeze(1), -1 - rank_n).int()
    logits_n = torch.where(rank_n == 0, 0.0, -torch.inf)
    return Outputs(
        torch.where(unknown_P1, ids_Pn, outputs.ids),
        torch.where(unknown_P1, logits_n, outputs.logits),
        outputs.mass.nan_to_num(0.0),
        outputs.entropy.nan_to_num(0.0),
    )


class _Walk:
    """The state of a replay: how far a rule has come in each completion, and what it has emitted so far."""

    def __init__(
        self,
        blocks: Blocks,
        policy: AcceptancePolicy,
        k: int,
        confidence: float,
        reach: float,
        cases: int,
        lookup: NGramDraft | None,
    ) -> None:
        self.blocks = blocks
        self.policy = policy
        self.k = k
        self.cases = cases
        self.lookup = lookup
        self.confidence, self.reach = confidence, reach
        self.begin, self.at_C = time.perf_counter(), blocks.begin_C.clone()
        count = len(blocks.recordings)
        self.rounds_C, self.drafted_C = (torch.zeros(count, dtype=torch.int64) for _ in range(2))
        self.accounts = Accounts(count)
        self.relaxed_at: list[list[int]] = [[] for _ in range(count)]
        self.drafts_K, self.kept_K = (torch.zeros(k, dtype=torch.int64) for _ in range(2))
        self.beyond = self.forwards = 0
        self.examples: list[RelaxedToken] = []
        self.indices = [Index(lookup.longest, lookup.shortest) for _ in range(count)] if lookup else []

    def take_round(self, row_B: Tensor) -> None:
        """Take one round of each completion in ``row_B``."""
        blocks = self.blocks
        at_B = self.at_C[row_B]
        columns_K = torch.arange(self.k)
        # Draft and verify.
        chain = blocks.chain(row_B, at_B, self.k, self.confidence, self.reach)
        relaxed_at = [self.relaxed_at[c] for c in row_B.tolist()]
        accepted_B, why_BK, costs = blocks.judge(self.policy, row_B, at_B, chain, self.accounts, relaxed_at)
        # Count the emitted tokens: no more than the text still has.
        emitted_B = (accepted_B + 1).minimum(blocks.end_C[row_B] - at_B)
        stands_BK = columns_K < accepted_B.minimum(emitted_B).unsqueeze(1)
        self.beyond += int((chain.beyond_BJ[:, :-1] & stands_BK).sum())
        self.drafts_K += (columns_K < chain.lengths_B.unsqueeze(1)).sum(0)
        self.kept_K += (columns_K < accepted_B.unsqueeze(1)).sum(0)
        # Charge the relaxed tokens to each row's budgets.
        if (relaxes_BK := why_BK & stands_BK).any():
            self._charge(row_B, at_B, chain, relaxes_BK, costs)
        if self.lookup is not None:  # count the forwards that the draft model still has to run
            for c, at, places, n in zip(row_B.tolist(), at_B.tolist(), chain.place_BJ, chain.lengths_B.tolist()):
                tokens, before = blocks.token_P[places[:n]].tolist(), blocks.texts[c][:at]
                self.forwards += lookup_forwards(self.indices[c], before, tokens, self.lookup.k)
        # Go on after the emitted tokens.
        self.drafted_C[row_B] += chain.lengths_B
        self.rounds_C[row_B] += 1
        self.at_C[row_B] += emitted_B

    def _charge(
        self, row_B: Tensor, at_B: Tensor, chain: _Chain, relaxes_BK: Tensor, costs: Mapping[str, Tensor]
    ) -> None:
        nats_BK = self.blocks.nats(chain.place_BJ[:, :-1])
        self.accounts.charge(row_B, relaxes_BK, nats_BK, costs)
        for b, j in relaxes_BK.nonzero().tolist():
            c = int(row_B[b])
            at = int(at_B[b])
            self.relaxed_at[c].append(at + j)
            if len(self.examples) >= self.cases:
                continue
            places = chain.place_BJ[b]
            drafted, choice = self.blocks.token_P[places].tolist(), int(self.blocks.target.ids[places[j], 0])
            before = [*self.blocks.texts[c][max(at - 12, 0) : at], *drafted[:j]]
            recording = self.blocks.recordings[c]
            problem, place = str(recording.about["problem"]), at - recording.prompt + j
            self.examples.append(RelaxedToken(problem, place, drafted[j], choice, before, float(nats_BK[b, j])))

    def result(self) -> Replay:
        """Return the figures of the whole walk."""
        blocks, seconds = self.blocks, time.perf_counter() - self.begin
        emitted_C = self.at_C - blocks.begin_C
        rounds, emitted = max(int(self.rounds_C.sum()), 1), max(int(emitted_C.sum()), 1)
        tau, drafted = blocks.by_problem(emitted_C.tolist(), self.rounds_C.tolist()), int(self.drafted_C.sum()) / rounds
        return Replay(
            policy=self.policy,
            k=self.k,
            confidence=self.confidence,
            reach=self.reach,
            completions=len(blocks.recordings),
            rounds=int(self.rounds_C.sum()),
            tau=tau,
            exact=sum(blocks.exact[0]) / max(sum(blocks.exact[1]), 1),
            drafted=drafted,
            relaxed=int(self.accounts.relaxed_C.sum()) / emitted,
            nats=1000 * float(self.accounts.nats_C.sum()) / emitted,
            beyond=self.beyond / emitted,
            curve=(self.kept_K / self.drafts_K.clamp_min(1)).tolist(),
            speed=blocks.speed(tau.value, drafted),
            seconds=seconds,
            tokens=self.examples[:: max(len(self.examples) // max(self.cases, 1), 1)][: self.cases],
            forwards=self.forwards / rounds if self.lookup is not None else None,
        )


def load_blocks(run: str | Path, costs: Costs | None = None) -> dict[tuple[str, str], Blocks]:
    """Return the recorded blocks of a run's folder, by task and way. ``costs`` replaces the costs that the run
    measured.

    Raises ``ValueError`` for a folder that is no run, or has no recorded blocks.
    """
    archive = Archive.read(run)
    completions = archive.records.completions
    recordings: dict[tuple[str, str], list[Recording]] = {}
    for key, record in completions.items():
        if "blocks" in record:
            path = archive.folder / record["blocks"]
            if not path.exists():
                raise ValueError(f"{path}, which records.jsonl names, is missing")
            recordings.setdefault((key.task, key.way), []).append(Recording.load(path))
    if not recordings:
        raise ValueError(f"{str(run)!r} has no recorded blocks: 'fly eval --record' keeps them")
    sizes = {each.about["vocabulary"] for way_recordings in recordings.values() for each in way_recordings}
    tokenizer = Tokenizer.load(resolve_checkpoint(archive.plan.model, weights=False))
    vocabularies = {size: Vocabulary(size) if tokenizer is None else tokenizer.vocabulary(size) for size in sizes}

    def of_way(task: str, way: str) -> list[dict[str, Any]]:
        return [record for key, record in completions.items() if (key.task, key.way) == (task, way)]

    return {
        (task, way): Blocks(
            way_recordings,
            vocabularies[way_recordings[0].about["vocabulary"]],
            costs or measured_costs(of_way(task, way), of_way(task, AUTOREGRESSIVE)),
        )
        for (task, way), way_recordings in recordings.items()
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
    """Compute what ``policy`` would have done in a recorded run, by task and recorded way. Arguments and errors are
    those of ``Blocks.replay`` and ``load_blocks``."""
    rule = load_policy(policy, trusted=True)
    return {name: blocks.replay(rule, k, confidence, reach, cases) for name, blocks in load_blocks(run, costs).items()}
