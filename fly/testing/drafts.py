"""The conformance kit of draft strategies: checks that a strategy keeps its contract, without a trained model.

    from fly.testing import check_draft
    print(check_draft(MyDraft))              # raises ConformanceError naming the fault and a small counterexample

The strategy drafts for a toy target: a random model with the strategy's vocabulary. The checks call the strategy as an
engine does, and as a draft model does when the strategy drafts for it: with batches, rows that end, rejected drafts,
forks and full caches.

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
from fly.ops import depths
from fly.policies import Exact
from fly.runner.request import Row
from fly.testing.drawn import (
    check_claimed_distribution,
    check_independent_of_the_verdict,
    check_rounds_are_independent,
)
from fly.testing.report import ConformanceError, Finding, Report, require, run_checks, seeded
from fly.testing.setups import make_llm
from fly.testing.stage import DraftKit, Proposal, Stage, compare, reachable, split
from fly.types import SamplingParams

__all__ = ["DRAFT_CHECKS", "check_draft"]

_LONGEST = 4096  # no row fills a context longer than this
_EVENTS = {"keep none": 0, "keep two": 2, "keep all": 2**31, "give up": 0, "fork": 0}  # how many tokens each keeps


def check_draft(
    strategy: DraftStrategy | Callable[[], DraftStrategy],
    *,
    learns: bool | None = None,
    target: object = None,
    raises: bool = True,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Run every check of the kit on a draft strategy; ``advance`` is called after each.

    Args:
        strategy: a class or function that makes a fresh strategy, or an unused strategy, which is copied (the copies
            share its models). Models should be in float32: in coarser dtypes, rounding depends on the batch.
        learns: whether drafts may depend on past texts and other rows, because the strategy remembers these on purpose.
            The drafts must be valid all the same. None takes the strategy's attribute ``learns``.
        target: the target; None makes a random Llama of two layers with the strategy's vocabulary, or with the sizes
            that its draft head needs.

    Raises ``ConformanceError`` with the whole report if a check fails, unless ``raises`` is False.
    """
    kit = DraftKit.of(strategy, learns, target)
    report = Report(kit.name)
    with torch.inference_mode():
        if undeclared := _undeclared(kit):  # all other findings would follow from this one
            report.findings.append(Finding("vocabulary", False, undeclared))
        else:
            run_checks(report, DRAFT_CHECKS, kit, advance)
    return report.settle(raises)


def _undeclared(kit: DraftKit) -> str:
    """Return evidence that a strategy without ``vocab_size`` needs one; an empty text if there is none."""
    if kit.stage().strategy.vocab_size is not None or kit.learns:  # ``attach`` may set it
        return ""
    for rows, max_len in kit.batches():
        try:
            draft = kit.stage().draft(rows, max_len)
            width = kit.vocab if draft.probs_BKV is None else draft.probs_BKV.shape[-1]
            unseen = sorted({token for row, ids in zip(rows, draft.chains) for token in {*ids} - {*row.tokens}})
        except Exception:  # the checks will report it
            return ""
        is_wide = width != kit.vocab
        fault = f"claims distributions over {width} tokens" if is_wide else f"drafted {unseen[:5]}"
        if is_wide or unseen:
            return (
                f"{kit.name} states no vocab_size, so it may draft tokens of the row only, and it {fault}: set "
                "vocab_size to the number of ids it knows, as a class attribute or in attach, from setup.vocabulary"
            )
    return ""


def check_shapes_and_ranges(kit: DraftKit) -> str:
    """Drafts are no longer than asked, have the shapes and dtypes of ``Draft``, and hold only ids of the vocabulary,
    padding included."""
    proposals = [p for rows, max_len in kit.batches() for p in _valid(kit, kit.stage(), rows, max_len)]
    drafted = sum(len(p.tokens) for p in proposals)
    return f"{drafted} tokens drafted for {len(proposals)} rows" if drafted else "note: nothing was drafted for any row"


def _valid(kit: DraftKit, stage: Stage, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> list[Proposal]:
    """Let the strategy propose. Raises ``ConformanceError`` if the draft is not valid."""
    draft = stage.draft(rows, max_len)
    tokens = draft.tokens_BK
    lengths = draft.lengths_B
    probs = draft.probs_BKV
    longest = tokens.shape[-1]
    rows_text = "; ".join(Proposal(row, most, [], None, None).asked for row, most in zip(rows, max_len))
    # Check shapes, dtypes and ranges of the tensors.
    columns: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("lengths_B", lengths, (len(rows),)),
        ("tokens_BK", tokens, (len(rows), longest)),
        ("parents_BK", draft.parents_BK, tuple(tokens.shape)),
        ("probs_BKV", probs, (*tokens.shape, kit.vocab)),
    ]
    for name, tensor, shape in columns:
        if tensor is not None:
            actual_shape, is_floating = tuple(tensor.shape), tensor is probs
            require(actual_shape == shape, f"{name} has shape {actual_shape}, expected {shape}, for {rows_text}")
            has_dtype = tensor.is_floating_point() if is_floating else tensor.dtype == torch.int64
            dtype_name = "a floating one" if is_floating else "torch.int64"
            require(has_dtype, f"{name} has dtype {tensor.dtype}, expected {dtype_name}, for {rows_text}")
    for name, tensor, most in (("lengths_B", lengths, longest), ("tokens_BK", tokens, kit.vocab - 1)):
        is_inside = bool(((tensor >= 0) & (tensor <= most)).all())
        require(is_inside, f"{name} {tensor.tolist()} (padding included) are not all in 0..{most}, for {rows_text}")
    is_finite = probs is None or bool(torch.isfinite(probs).all())
    require(is_finite, f"probs_BKV (padding included) is not finite, for {rows_text}")
    # Check the proposal for each row.
    proposals = split(draft, rows, max_len)
    for p in proposals:
        proposal_text = f"{p.tokens} for {p.asked}"
        for node, parent in enumerate(p.follows):
            require(
                -1 <= parent < node, f"token {node} has parent {parent}, not one in -1..{node - 1}: {proposal_text}"
            )
        depth = 1 + max(depths(p.follows), default=-1)
        require(depth <= p.most, f"drafted {depth} tokens where at most {p.most} were asked: {proposal_text}")
        are_different = probs is not None or len(set(zip(p.follows, p.tokens))) == len(p.tokens)
        require(
            are_different, f"two siblings of a deterministic tree are the same, parents {p.parents}: {proposal_text}"
        )
        unseen = sorted(set(p.tokens) - set(p.row.tokens))
        is_allowed = stage.strategy.vocab_size is not None or kit.learns or not unseen
        require(is_allowed, f"drafted {unseen}, not seen in the row, and states no vocab_size: {proposal_text}")
    return proposals


def check_nothing_asked_nothing_drafted(kit: DraftKit) -> None:
    """A row with max_len 0 gets an empty draft, alone and beside rows with drafts."""
    for rows, max_len in kit.batches():
        for p in kit.fresh(rows, [0] * len(rows)) + kit.fresh(rows, [0, *max_len[1:]]):
            require(p.most > 0 or not p.tokens, f"drafted {p.tokens} for {p.asked}")


def check_nothing_after_an_end(kit: DraftKit) -> str:
    """No token is drafted after one that ends the row, since it could never be emitted."""
    ended = 0
    for rows, max_len in kit.batches():
        firsts = kit.fresh(rows, max_len)
        for others in ((), range(2, kit.vocab, 2)):  # the first drafted token is the only end, or one of many
            ends = [{"stop_token_ids": tuple(sorted({*p.tokens[:1], *others}))} for p in firsts]
            ending_rows = [
                kit.row(row.tokens, row.params.model_copy(update=end), row.seed) for row, end in zip(rows, ends)
            ]
            for p in kit.fresh(ending_rows, max_len):
                ended += bool(p.row.stop_ids & set(p.tokens))
                for token, parent_token in (
                    (p.tokens[n], p.tokens[parent]) for n, parent in enumerate(p.follows) if parent >= 0
                ):
                    fault = f"drafted {token} after {parent_token}, which ends the row: {p.tokens} for {p.asked}"
                    require(parent_token not in p.row.stop_ids, fault)
    return f"{ended} drafts with an end"


def check_rows_untouched(kit: DraftKit) -> None:
    """No call changes a row, or any field of one."""
    for rows, max_len in kit.batches():
        stage, limits = kit.stage(), list(max_len)
        row_fields = [copy.deepcopy(vars(row)) for row in rows]
        draft = stage.draft(rows, limits)
        calls: list[tuple[str, Callable[[], None]]] = [
            ("propose", lambda: None),
            ("observe", lambda: stage.observe(rows, draft)),  # noqa: B023
            ("commit", lambda: stage.commit(rows)),  # noqa: B023
            ("release", lambda: stage.release(rows)),  # noqa: B023
        ]
        for call, run in calls:
            run()
            for p, old, new in zip(split(draft, rows, max_len), row_fields, map(vars, rows)):
                names = [name for name in {**old, **new} if name not in old or old[name] != new.get(name)]
                changes = [f"{name} from {old.get(name)!r} to {new.get(name)!r}" for name in names]
                require(not names, f"{call} changed {', '.join(changes)}, for {p.asked}")
            require(limits == max_len, f"propose changed max_len from {max_len} to {limits}")


def check_no_hidden_randomness(kit: DraftKit) -> None:
    """The draft depends on the row and its seed alone: it is the same every time, under any id, and in every state of
    the global random generators.

    At temperature 0 the seed must not matter either. A strategy that learns may draft more or fewer tokens, but not
    different ones.
    """
    for rows, max_len in kit.batches():
        stage = kit.stage()
        first, second = seeded(1, lambda: [stage.propose(rows, max_len) for _ in range(2)])  # noqa: B023
        lengths = [min(len(one.tokens), len(other.tokens)) for one, other in zip(first, second)]
        if kit.learns:  # it may change the length of a draft, but not its tokens
            first, second = ([p.cut(n) for p, n in zip(proposals, lengths)] for proposals in (first, second))
        compare(second, first, "asked again it")
        copies = [kit.row(row.tokens, row.params, row.seed + 99 * row.greedy) for row in rows]
        again = seeded(2, lambda: kit.fresh(copies, max_len))  # noqa: B023
        if not kit.learns:
            compare(again, first, "under another id (and another seed, if at temperature 0) it")


def check_row_alone_equals_row_in_batch(kit: DraftKit) -> str:
    """A row's draft depends on that row alone: not on its neighbours, their number, or their order."""
    if kit.learns:
        return "not asked of a strategy that learns"
    for rows, max_len in kit.batches():
        lone_proposals = [kit.fresh([row], [most])[0] for row, most in zip(rows, max_len)]
        compare(kit.fresh(rows, max_len), lone_proposals, "a batch")
        compare(kit.fresh(rows[::-1], max_len[::-1]), lone_proposals[::-1], "a reversed batch")
    return ""


def check_rolled_back_equals_fresh(kit: DraftKit) -> str:
    """After any history of accepted and rejected drafts, forks and abandoned steps, the strategy proposes the same as a
    fresh one. A strategy that learns may propose any valid draft."""
    rng = random.Random(0)
    histories = [[event] for event in _EVENTS] + [rng.choices(list(_EVENTS), k=5) for _ in range(6)]
    for temperature, history in itertools.product((0.0, 1.0), histories):
        picked = [rng.choice(kit.texts(9)) for _ in range(1 if len(history) == 1 else 3)]
        rows = [kit.row(text, temperature, seed) for seed, text in enumerate(picked)]
        max_len = [rng.choice((2, 5)) for _ in rows]
        stage = kit.stage()
        for number, event in enumerate(history, start=1):
            _play(kit, stage, event, rows, max_len, rng)
            kit.compare_to_fresh(_valid(kit, stage, rows, max_len), f"after {history[:number]} it")
    return "valid; what it has learned may show" if kit.learns else f"{2 * len(histories)} histories"


def _play(kit: DraftKit, stage: Stage, event: str, rows: list[Row], max_len: list[int], rng: random.Random) -> None:
    """Apply one event to ``rows``."""
    if event == "give up":  # the engine gives a draft up when a step fails
        stage.draft(rows, max_len)
    elif event == "fork":  # a level above tries two continuations
        for _ in range(2):
            forks = [row.fork(Exact(), row.seed + 1) for row in rows]
            for fork in forks:
                fork.tokens += rng.choices(range(kit.vocab), k=3)
            stage.round(forks, max_len, 1, rng.randrange(kit.vocab))
    else:
        stage.round(rows, max_len, _EVENTS[event], rng.randrange(kit.vocab))
    stage.commit(rows)


def check_release_frees_all(kit: DraftKit) -> str:
    """A released row leaves nothing: its blocks are free, and no attribute holds its id. The other rows go on."""
    rows = [kit.row(text, (0.0, 1.0)[b % 2], b) for b, text in enumerate(kit.texts(6))]
    released = rows[:3]
    remaining = rows[3:]
    max_len = [4] * len(rows)
    stage = kit.stage()
    stage.release(rows[:1])  # it has not seen this row yet
    stage.round(rows, max_len, 2, 0)
    stage.draft(rows, max_len)
    stage.release(released)
    stage.commit(remaining)
    kit.compare_to_fresh(stage.propose(remaining, max_len[3:]), "after the release of others it")
    stage.release(remaining)
    for number, allocator in enumerate(stage.allocators):
        held_blocks, sequences = allocator.num_blocks - allocator.num_free, len(allocator.sequences())
        usage = f"{held_blocks} of {allocator.num_blocks} blocks and {sequences} sequences"
        require(
            not held_blocks and not sequences, f"allocator {number} still holds {usage} after all rows were released"
        )
    ids = {row.id for row in rows}
    for path, reached in reachable(stage.strategy):
        kind = "object" if isinstance(reached, Row) else "id" if type(reached) is int and reached in ids else ""
        require(not kind, f"{path} still holds the {kind} of a row after it was released")
    return f"{len(rows)} rows"


def check_context_limit(kit: DraftKit) -> str:
    """Rows of ``context`` or more tokens get no draft and no error, whatever their neighbours are."""
    context = kit.stage().strategy.context
    if context is None:
        return "no limit of its own"
    lengths = [context + beyond for beyond in ((-1, 0, 1, 9) if context <= _LONGEST else (0, 1, 9))]
    motif = kit.texts(9)[4]
    for temperature, near in itertools.product((0.0, 1.0), (lengths[-3:], lengths)):
        stage, where = kit.stage(), f"in a context of {context}"
        rows = [kit.row((motif * n)[:n], temperature) for n in near if n > 0]
        try:
            proposals = stage.propose(rows, [4] * len(rows))
        except Exception as error:
            raise ConformanceError(f"rows of {near} tokens {where}: {type(error).__name__}: {error}") from error
        for p in proposals:
            length = len(p.row.tokens)
            require(length < context or not p.tokens, f"drafted {len(p.tokens)} tokens for a row of {length} {where}")
        stage.commit(rows)
        stage.release(rows)
    return f"{context} tokens"


def check_full_caches(kit: DraftKit) -> str:
    """If its caches are full, the strategy raises ``OutOfBlocks`` and no other error. After a commit, everything is as
    before."""
    caches = len(kit.stage().allocators)
    refused = 0
    for number, free in itertools.product(range(caches), (0, 1, 2)):
        stage, where = kit.stage(), f"with {free} free blocks in allocator {number}"
        rows = [kit.row(text) for text in kit.texts(9)[-2:]]
        stage.prime(rows)
        full_allocator = stage.allocators[number]
        full_allocator.resize("others", max(0, full_allocator.num_free - free) * full_allocator.block_size)
        old_states = [(a.num_free, set(a.sequences())) for a in stage.allocators]
        try:
            stage.strategy.propose(rows, [20, 20])
        except OutOfBlocks:
            refused += 1
            stage.commit(rows)
            for (free_before, old_ids), current in zip(old_states, stage.allocators):
                new_ids, taken_blocks = set(current.sequences()), free_before - current.num_free
                is_whole = new_ids <= old_ids | {row.id for row in rows} and (not taken_blocks or new_ids != old_ids)
                require(is_whole, f"{where} a refused draft left {taken_blocks} more blocks taken")
        stage.commit(rows)
        full_allocator.release("others")
        kit.compare_to_fresh(stage.propose(rows, [5, 5]), f"after it had to draft {where} it")
        stage.release(rows)
        free_again = all(a.num_free >= a.num_blocks for a in stage.allocators)
        require(free_again, f"{where} a draft leaves blocks that release does not free")
    return f"{refused} of {3 * caches} times refused" if caches else "no caches of its own"


def check_speculation_equals_autoregression(kit: DraftKit) -> str:
    """With the exact rule, greedy texts are the target's own, and sampled texts do not depend on the batch."""
    prompts = kit.texts(6)
    llm, ks = make_llm(kit.model, kit.make()), [1 + number % 6 for number in range(len(prompts))]
    # At temperature 0 the texts equal those of autoregressive decoding, also where they end early.
    greedy_params = SamplingParams(temperature=0.0, max_tokens=24)
    lasts = [out.token_ids[-1] for out in llm.generate(prompts, greedy_params, k=0)]
    for params in (greedy_params, [greedy_params.model_copy(update={"stop_token_ids": (last,)}) for last in lasts]):
        plain_outputs, outputs = llm.generate(prompts, params, k=0), llm.generate(prompts, params, k=ks)
        for prompt, k, output, plain_output in zip(prompts, ks, outputs, plain_outputs):
            fault = f"prompt {prompt}, k {k}: emits {output.token_ids}, the target {plain_output.token_ids}"
            require(output.token_ids == plain_output.token_ids, fault)
    drafted, accepted = sum(out.stats.drafted for out in outputs), sum(out.stats.accepted for out in outputs)
    # Above temperature 0, rows emit the same tokens alone and in a batch.
    sampled = [SamplingParams(max_tokens=16, seed=seed) for seed in range(len(prompts))]
    for prompt, row_params, k, output in zip(
        prompts, sampled, ks, [] if kit.learns else llm.generate(prompts, sampled, k=ks)
    ):
        (lone_output,) = make_llm(kit.model, kit.make()).generate([prompt], row_params, k=k)
        fault = (
            f"prompt {prompt}, seed {row_params.seed}, k {k}: emits {lone_output.token_ids} alone, "
            f"{output.token_ids} in a batch"
        )
        require(output.token_ids == lone_output.token_ids, fault)
    return f"{accepted} of {drafted} drafted tokens stood before a random target"


DRAFT_CHECKS: tuple[Callable[[DraftKit], str | None], ...] = (
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
