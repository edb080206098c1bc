"""The conformance kit of draft strategies: holds any of them, on a laptop, to what ``DraftStrategy`` asks.

    from fly.testing import check_draft
    print(check_draft(MyDraft))              # raises ConformanceError naming the fault and a small counterexample

The strategy drafts for a toy target, a random model of its vocabulary, in the way the engine and a level above would
ask it to: batches, rows that end, rolled-back speculation, forks, caches without room.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import abc
from collections.abc import Callable

import torch
from torch import Tensor

from fly.cache import OutOfBlocks
from fly.drafts.base import DraftStrategy
from fly.policies import Exact
from fly.request import Sequence
from fly.testing.drawn import (
    check_claimed_distribution,
    check_independent_of_the_verdict,
    check_rounds_are_independent,
)
from fly.testing.report import ConformanceError, Report, global_seed, require, run_checks
from fly.testing.stage import DraftKit, Proposal, Stage, compare, reachable, show, split
from fly.testing.toys import Model, make_llm
from fly.types import Draft, SamplingParams, depths

__all__ = ["DRAFT_CHECKS", "check_draft"]

_LONGEST = 4096  # tokens of a row to which a strategy's context is tried out
_EVENTS = ("keep none", "keep two", "keep all", "give up", "fork")


def check_draft(
    strategy: DraftStrategy | Callable[[], DraftStrategy],
    *,
    learns: bool | None = None,
    target: Model | None = None,
    raises: bool = True,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Run every check of the kit on a draft strategy; ``advance`` is called after each.

    Args:
        strategy: a function (or class) that makes a fresh one, or one that nobody has used yet, which is copied (its
            models' weights are shared). Models should be in float32: what coarser numbers round differently in another
            batch cannot be told from what depends on the batch.
        learns: whether it remembers past texts and other rows on purpose, so that what it proposes may depend on them;
            it must be valid all the same. None is the strategy's own attribute ``learns``.
        target: who it drafts for; None is a random Llama of two layers over the strategy's vocabulary.

    Raises ``ConformanceError`` with the whole report if a check fails, unless ``raises`` is False.
    """
    kit = DraftKit.of(strategy, learns, target)
    report = Report(kit.name)
    with torch.inference_mode():
        run_checks(report, DRAFT_CHECKS, kit, advance)
    if raises:
        report.raise_if_failed()
    return report


def check_shapes_and_ranges(kit: DraftKit) -> str:
    """Lengths within what was asked, shapes and dtypes as in ``Draft``, ids of the vocabulary, padding included."""
    drafted = total = 0
    for rows, max_len in kit.batches():
        stage = kit.stage()
        draft = stage.draft(rows, max_len)
        _check_format(kit, stage, draft, rows, max_len)
        total += len(rows)
        drafted += int(draft.lengths_B.sum())
    return f"{drafted} tokens drafted for {total} rows" if drafted else "note: nothing was drafted for any row"


def _check_format(
    kit: DraftKit, stage: Stage, draft: Draft, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]
) -> None:
    """Raise ``ConformanceError`` for a draft that is none."""
    tokens, lengths, probs = draft.tokens_BK, draft.lengths_B, draft.probs_BKV
    asked = "; ".join(show(row, most) for row, most in zip(rows, max_len))
    columns: list[tuple[str, Tensor | None, tuple[int, ...], bool]] = [
        ("lengths_B", lengths, (len(rows),), False),
        ("tokens_BK", tokens, (len(rows), tokens.shape[-1]), False),
        ("parents_BK", draft.parents_BK, tuple(tokens.shape), False),
        ("probs_BKV", probs, (*tokens.shape, kit.vocab), True),
    ]
    for name, tensor, shape, real in columns:
        if tensor is not None:
            found = tuple(tensor.shape)
            require(found == shape, f"{name} has shape {found}, expected {shape}, for {asked}")
            right = tensor.is_floating_point() if real else tensor.dtype == torch.int64
            wanted = "a floating one" if real else "torch.int64"
            require(right, f"{name} has dtype {tensor.dtype}, expected {wanted}, for {asked}")
    longest = tokens.shape[1]
    fit = bool(((lengths >= 0) & (lengths <= longest)).all())
    require(fit, f"lengths_B {lengths.tolist()} are not in 0..{longest}, for {asked}")
    padded = f"tokens_BK {tokens.tolist()} (padding included) are not all in 0..{kit.vocab - 1}, for {asked}"
    require(bool(((tokens >= 0) & (tokens < kit.vocab)).all()), padded)
    finite = probs is None or bool(torch.isfinite(probs).all())
    require(finite, f"probs_BKV (padding included) is not finite, for {asked}")
    for row, most, proposal in zip(rows, max_len, split(draft)):
        what = f"{proposal.tokens} for {show(row, most)}"
        for node, parent in enumerate(proposal.follows):
            message = f"token {node} has parent {parent}, expected one in -1..{node - 1}: {what}"
            require(-1 <= parent < node, message)
        deepest = 1 + max(depths(proposal.follows), default=-1)
        require(deepest <= most, f"drafted {deepest} tokens where at most {most} were asked: {what}")
        branches = set(zip(proposal.follows, proposal.tokens))
        require(
            proposal.distributions is not None or len(branches) == len(proposal.tokens),
            f"two siblings of a deterministic tree are the same, parents {proposal.parents}: {what}",
        )
        unseen = set(proposal.tokens) - set(row.tokens)
        require(
            stage.strategy.vocab_size is not None or kit.learns or not unseen,
            f"drafted {sorted(unseen)}, not seen in the row, and states no vocab_size: {what}",
        )


def check_nothing_asked_nothing_drafted(kit: DraftKit) -> str:
    """A row with max_len 0 gets an empty draft, alone and beside rows that get one."""
    for rows, max_len in kit.batches():
        for limits in ([0] * len(rows), [0, *max_len[1:]]):
            for row, most, proposal in zip(rows, limits, kit.fresh(rows, limits)):
                require(bool(most) or not proposal.tokens, f"drafted {proposal.tokens} for {show(row, 0)}")
    return ""


def check_nothing_after_an_end(kit: DraftKit) -> str:
    """No token is drafted to follow one that ends the row: it could never be emitted."""
    ended = 0
    for rows, max_len in kit.batches():
        firsts = [proposal.tokens[:1] for proposal in kit.fresh(rows, max_len)]
        for others in ((), range(2, kit.vocab, 2)):  # what was drafted first as the only end, and as one of many
            again = []
            for row, first in zip(rows, firsts):
                params = row.params.model_copy(update={"stop_token_ids": tuple(sorted({*first, *others}))})
                again.append(kit.row(row.tokens, params, row.seed))
            for row, most, proposal in zip(again, max_len, kit.fresh(again, max_len)):
                for token, parent in zip(proposal.tokens, proposal.follows):
                    before = proposal.tokens[parent]
                    message = f"drafted {token} after {before}, which ends the row: {proposal.tokens} for "
                    require(parent < 0 or before not in row.stop_ids, message + show(row, most))
                ended += bool(row.stop_ids & set(proposal.tokens))
    return f"{ended} drafts with an end"


def check_rows_untouched(kit: DraftKit) -> str:
    """No call changes a row, or any field of one."""
    for rows, max_len in kit.batches():
        stage, limits = kit.stage(), list(max_len)
        before = [copy.deepcopy(vars(row)) for row in rows]
        stage.prime(rows)
        draft = stage.strategy.propose(rows, limits)
        calls: list[tuple[str, Callable[[], None]]] = [
            ("propose", lambda: None),
            ("observe", lambda: stage.observe(rows, draft)),  # noqa: B023
            ("commit", lambda: stage.commit(rows)),  # noqa: B023
            ("release", lambda: stage.release(rows)),  # noqa: B023
        ]
        for call, run in calls:
            run()
            for row, most, old in zip(rows, max_len, before):
                now = vars(row)
                for name in {**old, **now}:
                    same = name in old and old[name] == now.get(name)
                    message = f"{call} changed {name} from {old.get(name)!r} to {now.get(name)!r}, for "
                    require(same, message + show(row, most))
            require(limits == max_len, f"propose changed max_len from {max_len} to {limits}")
    return ""


def check_no_hidden_randomness(kit: DraftKit) -> str:
    """The same row and seed give the same draft: whatever the global generators, the row's id, and how often asked.

    At temperature 0 the seed does not matter either. One that learns may propose more or fewer of the same tokens.
    """
    for rows, max_len in kit.batches():
        with global_seed(1):
            stage = kit.stage()
            first, second = stage.propose(rows, max_len), stage.propose(rows, max_len)
        if kit.learns:  # of speed, say: it may propose more or less, but not other tokens
            lengths = [min(len(one.tokens), len(other.tokens)) for one, other in zip(first, second)]
            pairs = [(one.cut(n), other.cut(n)) for one, other, n in zip(first, second, lengths)]
            compare(rows, max_len, [b for _, b in pairs], [a for a, _ in pairs], "asked again it")
        else:
            compare(rows, max_len, second, first, "asked again it")
            copies = [kit.row(row.tokens, row.params, row.seed + 99 * row.greedy) for row in rows]
            with global_seed(2):
                again = kit.fresh(copies, max_len)
            compare(rows, max_len, again, first, "under another id (and another seed, if at temperature 0) it")
    return ""


def check_row_alone_equals_row_in_batch(kit: DraftKit) -> str:
    """A row's draft depends on that row alone: not on its neighbours, their number, or their order."""
    if kit.learns:
        return "not asked of a strategy that learns"
    for rows, max_len in kit.batches():
        alone = [kit.fresh([row], [most])[0] for row, most in zip(rows, max_len)]
        compare(rows, max_len, kit.fresh(rows, max_len), alone, "a batch")
        compare(rows, max_len, kit.fresh(rows[::-1], max_len[::-1])[::-1], alone, "a reversed batch")
    return ""


def check_rolled_back_equals_fresh(kit: DraftKit) -> str:
    """After any history of accepted and rejected drafts, steps given up, and forks, it proposes what a fresh strategy
    would. One that learns may propose anything, if it is a draft."""
    rng = random.Random(0)
    histories = [[event] for event in _EVENTS] + [rng.choices(_EVENTS, k=5) for _ in range(6)]
    texts = kit.texts(9)
    for temperature, history in itertools.product((0.0, 1.0), histories):
        rows = [kit.row(rng.choice(texts), temperature, seed) for seed in range(1 if len(history) == 1 else 3)]
        max_len = [rng.choice((2, 5)) for _ in rows]
        stage = kit.stage()
        for number, event in enumerate(history, start=1):
            _play(kit, stage, event, rows, max_len, rng)
            draft = stage.draft(rows, max_len)
            if kit.learns:
                _check_format(kit, stage, draft, rows, max_len)
            else:
                _compare_with_fresh(kit, rows, max_len, split(draft), f"after {history[:number]} it")
    return "valid; what it has learned may show" if kit.learns else f"{2 * len(histories)} histories"


def _compare_with_fresh(
    kit: DraftKit,
    rows: abc.Sequence[Sequence],
    max_len: abc.Sequence[int],
    found: abc.Sequence[Proposal],
    how: str,
) -> None:
    """Raise ``ConformanceError`` where a strategy that does not learn proposes what a fresh one would not."""
    if not kit.learns:
        compare(rows, max_len, found, kit.fresh(rows, max_len), how)


def _play(
    kit: DraftKit, stage: Stage, event: str, rows: list[Sequence], max_len: list[int], rng: random.Random
) -> None:
    """One event in the life of ``rows``."""
    if event.startswith("keep"):
        kept = {"keep none": 0, "keep two": 2, "keep all": max(max_len)}[event]
        stage.round(rows, max_len, kept, rng.randrange(kit.vocab))
        return
    if event == "fork":  # as a level above does that tries two ways on
        for _ in range(2):
            forks = [row.fork(Exact(), row.seed + 1) for row in rows]
            for fork in forks:
                fork.tokens += [rng.randrange(kit.vocab) for _ in range(3)]
            stage.round(forks, max_len, 1, rng.randrange(kit.vocab))
    else:  # as the engine does when a step fails
        stage.draft(rows, max_len)
    stage.commit(rows)


def check_release_frees_all(kit: DraftKit) -> str:
    """A released row leaves nothing: caches are whole again, no attribute holds its id, and its neighbours go on."""
    rows = [kit.row(text, (0.0, 1.0)[b % 2], b) for b, text in enumerate(kit.texts(6))]
    max_len = [4] * len(rows)
    stage = kit.stage()
    stage.release(rows[:1])  # a row that it never saw
    stage.round(rows, max_len, 2, 0)
    stage.draft(rows, max_len)
    stage.release(rows[:3])
    stage.commit(rows[3:])
    left = stage.propose(rows[3:], max_len[3:])
    _compare_with_fresh(kit, rows[3:], max_len[3:], left, "after the release of others it")
    stage.release(rows[3:])
    for number, allocator in enumerate(stage.strategy.allocators()):
        held, sequences = allocator.num_blocks - allocator.num_free, len(allocator.sequences())
        require(
            not held and not sequences,
            f"allocator {number} still holds {held} of {allocator.num_blocks} blocks and {sequences} sequences after "
            f"all rows were released",
        )
    ids = {row.id for row in rows}
    for where, found in reachable(stage.strategy):
        is_row, is_id = isinstance(found, Sequence), type(found) is int and found in ids
        what = "object" if is_row else "id"
        require(not is_row and not is_id, f"{where} still holds the {what} of a row after it was released")
    return f"{len(rows)} rows"


def check_context_limit(kit: DraftKit) -> str:
    """Rows of ``context`` tokens and more get no draft, and no error, whatever their neighbours."""
    context = kit.stage().strategy.context
    if context is None:
        return "no limit of its own"
    lengths = [context + beyond for beyond in ((-1, 0, 1, 9) if context <= _LONGEST else (0, 1, 9))]
    motif = kit.texts(9)[4]
    for temperature, near in itertools.product((0.0, 1.0), (lengths[-3:], lengths)):
        stage = kit.stage()
        rows = [kit.row((motif * n)[:n], temperature) for n in near if n > 0]
        try:
            found = stage.propose(rows, [4] * len(rows))
        except Exception as error:
            what = f"rows of {near} tokens in a context of {context}: {type(error).__name__}: {error}"
            raise ConformanceError(what) from error
        for row, proposal in zip(rows, found):
            message = f"drafted {len(proposal.tokens)} tokens for a row of {len(row.tokens)} in a context of {context}"
            require(len(row.tokens) < context or not proposal.tokens, message)
        stage.commit(rows)
        stage.release(rows)
    return f"{context} tokens"


def check_full_caches(kit: DraftKit) -> str:
    """Without room it raises ``OutOfBlocks`` and nothing else; after that and a commit all is as before."""
    caches = len(kit.stage().strategy.allocators())
    refused = 0
    for number, free in itertools.product(range(caches), (0, 1, 2)):
        stage = kit.stage()
        rows = [kit.row(text) for text in kit.texts(9)[-2:]]
        known = {row.id for row in rows}
        stage.prime(rows)
        allocators = stage.strategy.allocators()
        full = allocators[number]
        full.resize("others", max(0, full.num_free - free) * full.block_size)
        before = [(a.num_free, set(a.sequences())) for a in allocators]
        where = f"with {free} free blocks in allocator {number}"
        try:
            stage.strategy.propose(rows, [20, 20])
        except OutOfBlocks:
            refused += 1
            stage.commit(rows)
            for (was, old), now in zip(before, stage.strategy.allocators()):
                new, taken = set(now.sequences()), was - now.num_free
                whole = new <= old | known and (not taken or new != old)
                require(whole, f"{where} a refused draft left {taken} more blocks taken")
        stage.commit(rows)
        full.release("others")
        again = stage.propose(rows, [5, 5])
        _compare_with_fresh(kit, rows, [5, 5], again, f"after it had to draft {where} it")
        stage.release(rows)
        whole = all(a.num_free >= a.num_blocks for a in stage.strategy.allocators())
        require(whole, f"{where} a draft leaves blocks that release does not free")
    return f"{refused} of {3 * caches} times refused" if caches else "no caches of its own"


def check_speculation_equals_autoregression(kit: DraftKit) -> str:
    """With the exact rule the greedy texts of a batch are the target's own, and sampled ones do not depend on it."""
    prompts = kit.texts(6)
    llm = make_llm(kit.model, kit.make())
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    ks = [1 + number % 6 for number in range(len(prompts))]
    plain = llm.generate(prompts, greedy, k=0)
    ends = [greedy.model_copy(update={"stop_token_ids": (out.token_ids[-1],)}) for out in plain]
    for params, wanted in ((greedy, plain), (ends, llm.generate(prompts, ends, k=0))):
        found = llm.generate(prompts, params, k=ks)
        for prompt, k, one, other in zip(prompts, ks, found, wanted):
            message = f"prompt {prompt}, k {k}: emits {one.token_ids}, the target {other.token_ids}"
            require(one.token_ids == other.token_ids, message)
    drafted, accepted = sum(out.stats.drafted for out in found), sum(out.stats.accepted for out in found)
    if not kit.learns:
        sampled = [SamplingParams(max_tokens=16, seed=seed) for seed in range(len(prompts))]
        for prompt, own, k, one in zip(prompts, sampled, ks, llm.generate(prompts, sampled, k=ks)):
            (alone,) = make_llm(kit.model, kit.make()).generate([prompt], own, k=k)
            message = f"prompt {prompt}, seed {own.seed}, k {k}: emits {alone.token_ids} alone, and in a batch "
            require(one.token_ids == alone.token_ids, f"{message}{one.token_ids}")
    return f"{accepted} of {drafted} drafted tokens stood before a random target"


DRAFT_CHECKS: tuple[Callable[[DraftKit], str], ...] = (
    check_shapes_and_ranges,
    check_nothing_asked_nothing_drafted,
    check_nothing_after_an_end,
    check_rows_untouched,
    check_no_hidden_randomness,
    check_row_alone_equals_row_in_batch,
    check_rolled_back_equals_fresh,
    check_release_frees_all,
    check_context_limit,
    check_full_caches,
    check_claimed_distribution,
    check_rounds_are_independent,
    check_independent_of_the_verdict,
    check_speculation_equals_autoregression,
)
