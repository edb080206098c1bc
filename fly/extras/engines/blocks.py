"""Rules of fly on the blocks of another engine, for all engines: rows of one rule are decided together, on the device.

An engine's adaptor does three things. It keeps a ``Row`` beside each request that names a rule, it turns what its
engine has at a step into ``Blocks``, and it writes the ``Decided`` tokens and counts back. Everything between happens
here. Nothing here makes the host wait for the device, unless the rule itself asks for the text so far
(``Row.past``). Knows nothing of any engine.

Shape legend: B rows, K longest draft, J = K + 1 places (place j is after j drafted tokens), V vocabulary, A entries of
an account: the number of relaxed tokens, their nats, and what each budget of the rule has spent.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fly.ops import Stream, argmax, one_hot, sent, uniforms, upload
from fly.policies import AcceptancePolicy, verify
from fly.policies.formulas import raw_log_probs
from fly.policies.reads import DRAFT_LOGITS
from fly.policies.registry import load_policy
from fly.runner.sampling import BatchSampling, ProcessedDistribution
from fly.types import Draft, Noise, SamplingParams, Target, Verdict, Why
from fly.vocabulary import Vocabulary

__all__ = [
    "Blocks",
    "Decided",
    "Row",
    "cut",
    "decide",
    "decide_rows",
    "multiply",
    "name_seed",
    "read_rule",
    "write_tokens",
]

_LONGEST = 2000  # most characters of a rule in a request
_LACKING = {DRAFT_LOGITS, "relaxed_at"}  # what a rule may read on fly's own engine only
_LARGEST = 2**25  # most logits that are decided at once: 128 MiB as float32, and a decision takes a few times that
_log = logging.getLogger("fly.engines")


def read_rule(argument: Any, size: int) -> AcceptancePolicy | None:
    """Read the rule that a request gives under the name ``fly``: its text, or ``{"policy": text}``; None is no rule.

    ``size`` is V. A request can never import code. Raises ``ValueError`` if the text is no rule or is longer than 2000
    characters, if the rule needs the text of tokens, the draft's logits or where relaxed tokens stand, which an
    engine's sampler lacks, or if it fails on a trial block (``AcceptancePolicy.refuse_failing``).
    """
    if argument is None:
        return None
    if isinstance(argument, Mapping):
        if argument.keys() != {"policy"}:
            raise ValueError(f"fly has the entries {sorted(map(str, argument))}; it takes one entry, 'policy'")
        argument = argument["policy"]
    if not isinstance(argument, str) or len(argument) > _LONGEST:
        raise ValueError(f"fly: the policy must be a text of at most {_LONGEST} characters, as in 'exact | regret(2)'")
    try:
        return _load_rule(argument, size)
    except (ValueError, TypeError) as error:
        raise ValueError(f"fly: {error}") from None
    except Exception as error:  # a user's rule may raise anything, and must not end the engine
        raise ValueError(f"fly: {type(error).__name__}: {error}") from error


@functools.lru_cache(1000)  # requests bring few texts, and finding out what a rule reads takes longer than a decision
def _load_rule(text: str, size: int) -> AcceptancePolicy:
    rule = load_policy(text).bind(Vocabulary(size))
    for greedy in (True, False):
        rule.refuse_failing(greedy)
    if lacking := sorted(rule.reads & _LACKING):
        raise ValueError(f"'{rule}' reads {lacking}, which an engine's sampler lacks")
    return rule


def name_seed(name: str) -> int:
    """Return a seed for a request without one, from its name: every rank has the same, int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


class Row:
    """A request while it is generated: its rule, and what its relaxed tokens have cost so far.

    Args:
        rule: bound to the engine's vocabulary. size: V.
        params: how logits become the target's distribution: the request's temperature, and those of its filters that
            the engine has not applied to the logits of ``Blocks``.
        seed: of its coins. All ranks must give the same.
        stop_ids: the tokens that end its text; ``~control`` never excuses them.
    """

    def __init__(
        self,
        rule: AcceptancePolicy,
        size: int,
        params: SamplingParams,
        seed: int = 0,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.rule = rule
        self.params = params
        self.seed = (seed + 2**63) % 2**64 - 2**63  # int64, as a 64-bit engine has it
        self.control = tuple(sorted(token for token in stop_ids if 0 <= token < size))
        self.kind = rule.keyed, self.control  # rows of one kind are decided together
        self.past = rule.reads
        self.account_A: Tensor | None = None  # float64, on the device; None before the first block

    def resume(self, before: Row | None) -> Row:
        """Go on with the account of the same request ``before`` it was preempted, unless it has another rule now."""
        if before is not None and before.kind == self.kind:
            self.account_A = before.account_A
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the rule's budgets, in the order of its account."""
        return tuple(budget.label for budget in self.rule.budgets)

    @property
    def keeps_account(self) -> bool:
        """Whether the rule asks what its relaxed tokens have cost: then steps of one request depend on each other."""
        return not self.past.isdisjoint(("relaxed", "nats", "spent"))

    @property
    def reads_text(self) -> bool:
        """Whether the rule asks for the text so far, or how long it is."""
        return not self.past.isdisjoint(("history", "generated"))


@dataclass(frozen=True)
class Blocks:
    """What an engine has at a step, for rows of one rule: padded chains on one device.

    Nothing beyond a row's draft counts, neither tokens nor the places after the one that follows the draft.

    Args:
        logits_BJV: the target's logits, with penalties, biases and masks, before the temperature; what the engine has
            filtered is -inf. Any float type. An engine that has divided them gives ``multiply`` of them.
        tokens_BK: the drafts. -1 is a placeholder, which ends the draft.
        lengths_B: how many tokens were drafted.
        positions_B: int64, a number that no two blocks of a request share, such as its length. With the request's seed
            it gives the coins.
        draft_BKV: the distributions that the drafts were drawn from; None if drafts are deterministic.
        generated_B: int64, how many tokens each request has generated. It may be None if no row asks (``Row.past``).
        history: the tokens of each request before the block, its prompt included; None as before.
    """

    logits_BJV: Tensor
    tokens_BK: Tensor
    lengths_B: Tensor
    positions_B: Tensor
    draft_BKV: Tensor | None = None
    generated_B: Tensor | None = None
    history: list[list[int]] | None = None


class Decided(NamedTuple):
    """The decision on ``Blocks``, on their device."""

    tokens_BJ: Tensor  # int64: the accepted tokens, then the correction or the bonus, then -1
    counts_B: Tensor  # int64: how many of them; 0 where the engine's own decision stands
    account_BA: Tensor  # float64, the rows' accounts after the block; as before if the rule asks for none


def decide(rows: Sequence[Row], blocks: Blocks) -> Decided:
    """Decide on the blocks of rows that share a rule, by ``fly.policies.verify``.

    The engine's own decision stands (a count of 0) for a row without a draft, since a rule has nothing to decide there,
    and for a row where a NaN leaves open which token follows.
    """
    first = rows[0]
    longest = blocks.tokens_BK.shape[1]
    device = blocks.tokens_BK.device
    # A draft ends before its first placeholder.
    columns_K = torch.arange(longest, device=device)
    drafted_BK = (blocks.tokens_BK >= 0) & (columns_K < blocks.lengths_B.unsqueeze(1))
    lengths_B = drafted_BK.long().cumprod(1).sum(1)
    tokens_BK = blocks.tokens_BK.long().clamp_min(0)

    sampling = BatchSampling.of([row.params for row in rows], device)
    logits_BJV = blocks.logits_BJV.float()
    greedy = all(row.params.temperature == 0 for row in rows)
    account_BA = _stack_accounts(rows, device)
    target = Target(
        logits_BJV,
        None if greedy else _process(logits_BJV, sampling, rows),
        greedy_B=sampling.greedy_B if sampling.some_greedy and not greedy else None,
        control_V=_mark(first.control, logits_BJV.shape[-1], device),
        generated_B=blocks.generated_B,
        relaxed_B=lambda: account_BA[:, 0].long(),
        nats_B=lambda: account_BA[:, 1].float(),
        spent=lambda label: account_BA[:, 2 + first.labels.index(label)].float(),
        history=blocks.history,
    )
    # A draft of a greedy row counts as deterministic: its distribution is one-hot.
    draft_BKV = None if greedy else blocks.draft_BKV
    if draft_BKV is not None and sampling.some_greedy:
        draft_BKV = torch.where(sampling.greedy_B.view(-1, 1, 1), one_hot(draft_BKV, tokens_BK), draft_BKV)
    draft = Draft(tokens_BK, lengths_B, None if draft_BKV is None else draft_BKV.float())
    # A coin is a hash of the request's seed and the block's position, so all ranks flip the same.
    seeds_B = upload([row.seed for row in rows], device)
    positions_B = blocks.positions_B.long()
    accept_BK = uniforms(seeds_B, positions_B, Stream.ACCEPT, longest)
    sample_B = uniforms(seeds_B, positions_B, Stream.SAMPLE, 1).squeeze(1)
    verdict = verify(first.rule, target, draft, Noise(accept_BK, sample_B))

    # Write the accepted tokens, then the one that follows, then -1.
    decided_B = (verdict.next_token_B >= 0) & (lengths_B > 0)
    accepted_B1 = verdict.accepted_B.unsqueeze(1)
    places_J = torch.arange(longest + 1, device=device)
    padded_BJ = torch.nn.functional.pad(tokens_BK, (0, 1), value=-1)
    tokens_BJ = padded_BJ.where(places_J < accepted_B1, -1).scatter_(1, accepted_B1, verdict.next_token_B.unsqueeze(1))
    counts_B = torch.where(decided_B, verdict.accepted_B + 1, 0)
    if first.keeps_account:
        account_BA = account_BA + _find_costs(first, target, draft, verdict, decided_B)
    return Decided(tokens_BJ, counts_B, account_BA)


def _process(logits_BJV: Tensor, sampling: BatchSampling, rows: Sequence[Row]) -> Tensor | ProcessedDistribution:
    """Return the processed distribution. Without filters, a whole softmax is faster than the places that count."""
    if sampling.most_k or sampling.top_p:
        return sampling.on(logits_BJV)
    scaled_BJV = logits_BJV if _are_plain(rows) else logits_BJV / sampling.temperature_B.view(-1, 1, 1)
    probs_BJV = scaled_BJV.softmax(-1)
    if not sampling.some_greedy:
        return probs_BJV
    return torch.where(sampling.greedy_B.view(-1, 1, 1), one_hot(probs_BJV, argmax(logits_BJV)), probs_BJV)


def _are_plain(rows: Sequence[Row]) -> bool:
    """Return whether no temperature changes the logits of any row."""
    return all(row.params.temperature in (0, 1) for row in rows)


def _find_costs(row: Row, target: Target, draft: Draft, verdict: Verdict, decided_B: Tensor) -> Tensor:
    """Return what the tokens that the decision relaxed cost, float64 [B, A].

    Every place is computed, since listing the relaxed tokens would make the host wait.
    """
    count, longest = draft.shape
    device = decided_B.device
    relaxed_BK = (verdict.why_BK == int(Why.RELAXED)) & decided_B.unsqueeze(1)
    rows_N = torch.arange(count, device=device).repeat_interleave(longest)
    places_N = torch.arange(longest, device=device).repeat(count)
    costs = [torch.ones(count * longest, device=device)]
    costs.append(
        -raw_log_probs(target, draft, rows_N, places_N)[0] if "nats" in row.past else torch.zeros_like(costs[0])
    )
    for budget in row.rule.budgets:
        costs.append(budget.costs(target, draft, rows_N, places_N))
    costs_BKA = torch.stack([cost_N.double() for cost_N in costs], -1).view(count, longest, len(costs))
    return costs_BKA.where(relaxed_BK.unsqueeze(-1), 0.0).sum(1)


def _stack_accounts(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Return the rows' accounts, float64 [B, A]; zeros before a row's first block."""
    empty_A = torch.zeros(2 + len(rows[0].labels), dtype=torch.float64, device=device)
    if not rows[0].keeps_account:
        return empty_A.expand(len(rows), -1)
    return torch.stack([empty_A if row.account_A is None else row.account_A for row in rows])


@functools.lru_cache(64)
def _mark(tokens: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return where a token is one of ``tokens``, bool [V]."""
    mark_V = torch.zeros(size, dtype=torch.bool)
    mark_V[list(tokens)] = True
    return sent(mark_V, device)


def decide_rows(
    rows: Mapping[int, Row], places: int, size: int, read: Callable[[list[int]], Blocks]
) -> list[tuple[list[int], Decided]]:
    """Let each row's rule decide on its block. Return the decisions, each with the numbers of its rows.

    If a rule fails, the engine's log says so, and its rows are in no decision.

    Args:
        rows: the rows that have a rule, by their numbers in the engine's batch.
        places, size: J and V. They limit how many rows are decided at once.
        read: returns the blocks of some rows, all of one rule.
    """
    kinds: dict[Any, list[int]] = {}
    for b, row in rows.items():
        kinds.setdefault(row.kind, []).append(b)
    decisions = []
    for numbers in _in_parts(kinds.values(), max(1, _LARGEST // (places * size))):
        part_rows = [rows[b] for b in numbers]
        try:
            decided = decide(part_rows, read(numbers))
        except Exception:  # a user's rule may raise anything, and must not end the engine
            _log.exception("fly: %s failed; the engine's own decision stands for this block", part_rows[0].rule)
            continue
        decisions.append((numbers, decided))
        if part_rows[0].keeps_account:
            for row, account_A in zip(part_rows, decided.account_BA.unbind(0)):
                row.account_A = account_A
    return decisions


def _in_parts(groups: Iterable[list[int]], most: int) -> Iterator[list[int]]:
    for group in groups:
        for start in range(0, len(group), most):
            yield group[start : start + most]


# What adaptors share.


def multiply(logits_BJV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Undo a division by the rows' temperatures, float32 [B, J, V]. (At temperature 0 there was none.)"""
    if _are_plain(rows):
        return logits_BJV.float()
    temperature_B = BatchSampling.of([row.params for row in rows], logits_BJV.device).temperature_B
    return logits_BJV.float() * temperature_B.view(-1, 1, 1)


def cut(flat_NX: Tensor, starts_B: Tensor, lengths_B: Tensor, width: int) -> Tensor:
    """Take from each row of a flat batch the entries ``start``, ..., ``start + length - 1``, padded to ``width`` with
    any others, [B, width, ...]. The start of an empty row may be the end of the batch."""
    columns_BJ = torch.arange(width, device=flat_NX.device).minimum((lengths_B - 1).clamp_min(0).unsqueeze(1))
    entries_BJ = (starts_B.unsqueeze(1) + columns_BJ).clamp_max(len(flat_NX) - 1)
    # On CPUs indexing copies number by number. This copies whole entries.
    return flat_NX.index_select(0, entries_BJ.flatten()).view(*entries_BJ.shape, *flat_NX.shape[1:])


def write_tokens(output_RJ: Tensor, index_B: Tensor, decided: Decided) -> None:
    """Replace the rows ``index_B`` of an engine's tokens, where a rule has decided. What follows the tokens is -1."""
    width = output_RJ.shape[1]
    tokens_BJ = decided.tokens_BJ[:, :width]
    tokens_BJ = torch.nn.functional.pad(tokens_BJ, (0, width - tokens_BJ.shape[1]), value=-1)
    decided_B1 = (decided.counts_B > 0).unsqueeze(1)
    output_RJ[index_B] = torch.where(decided_B1, tokens_BJ.to(output_RJ.dtype), output_RJ[index_B])
