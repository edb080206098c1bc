"""The conformance kit of draft strategies: holds any of them, on a laptop, to what ``DraftStrategy`` asks.

    from fly.testing import check_draft
    print(check_draft(MyDraft))              # raises ConformanceError naming the fault and a small counterexample

The strategy drafts for a toy target, a random model of its vocabulary, in the way the engine and a level above would
ask it to: batches, rows that end, rolled-back speculation, forks, caches without room.

Shape legend: B rows, K longest draft, V vocabulary, N samples, G groups of tokens.

That the tokens were drawn from the distribution that is claimed is tested over many seeds, by sums of squares over the
claimed distributions. The seeds are fixed, so a verdict repeats; the threshold is such that a right strategy fails in
one of a billion.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections import abc, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fly.backends import load
from fly.cache import OutOfBlocks, PagedKVCache
from fly.drafts.base import DraftStrategy
from fly.executor import Executor
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.ops import Stream, depths, uniforms
from fly.policies import Exact
from fly.request import Sequence
from fly.runner import Runner
from fly.testing import ConformanceError, Report, run_checks
from fly.types import Draft, SamplingParams

__all__ = ["DRAFT_CHECKS", "check_draft"]

_SEEDS = 4000  # at which a draft is drawn to compare it with the distribution it claims
_CHANCE = 1e-9  # of a right strategy to fail one comparison
_APART = 1e-3  # how far a claimed distribution may be from one that sums to 1, or from that of a fresh strategy
_VOCABULARY = 24  # of the toy target, for a strategy that has none of its own
_POSITIONS = 128  # of the toy target
_LONGEST = 4096  # tokens of a row to which a strategy's context is tried out
_PARAMS = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=3))
_ids = itertools.count(10**12)  # of rows: numbers that a strategy holds for no other reason


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
        strategy: a function (or class) that makes a fresh one, or one that nobody has used yet, which is copied (its
            models' weights are shared). Models should be in float32: what coarser numbers round differently in another
            batch cannot be told from what depends on the batch.
        learns: whether it remembers past texts and other rows on purpose, so that what it proposes may depend on them;
            it must be valid all the same. None is the strategy's own attribute ``learns``, or False.
        target: who it drafts for; None is a random Llama of two layers over the strategy's vocabulary.

    Raises ``ConformanceError`` with the whole report if a check fails, unless ``raises`` is False.
    """
    kit = _Kit.of(strategy, learns, target)
    report = Report(kit.name)
    with torch.inference_mode():
        run_checks(report, DRAFT_CHECKS, kit, advance)
    if raises and not report.passed:
        raise ConformanceError(str(report))
    return report


# ------------------------------------------------------------------------------------------- the stage and its rows


@dataclass(frozen=True)
class _Proposal:
    """One row's share of a draft."""

    tokens: list[int]
    distributions: Tensor | None  # [length, V]; None where the draft is deterministic
    parents: list[int] | None  # None is a chain

    @property
    def depths(self) -> list[int]:
        """How many tokens of the draft come before each on its path."""
        return list(range(len(self.tokens))) if self.parents is None else depths(self.parents)


def _split(draft: Draft) -> list[_Proposal]:
    """A draft row by row, without padding."""
    parents = None if draft.parents_BK is None else draft.parents_BK.tolist()
    return [
        _Proposal(
            tokens[:n],
            None if draft.probs_BKV is None else draft.probs_BKV[b, :n].float().cpu(),
            None if parents is None else parents[b][:n],
        )
        for b, (tokens, n) in enumerate(zip(draft.tokens_BK.tolist(), draft.lengths_B.tolist()))
    ]


class _Stage:
    """A fresh strategy with a target of its own, called in the order in which the engine calls it."""

    def __init__(self, strategy: DraftStrategy, model: Executor) -> None:
        self.strategy = strategy
        tokens = 64 * model.config.max_position_embeddings
        self.runner = Runner(model, PagedKVCache.for_model(model, tokens))
        strategy.attach(self.runner)

    def prime(self, rows: abc.Sequence[Sequence]) -> None:
        """Let the target have seen all but the last token of each row, as it has whenever the engine wants a draft."""
        self.runner.commit(rows)
        limit = self.runner.executor.config.max_position_embeddings
        new = [dataclasses.replace(row, tokens=row.tokens[:-1]) for row in rows if len(row.tokens) <= limit]
        if new := [row for row in new if self.runner.pending(row)]:
            self.runner.feed(new, [[]] * len(new))

    def draft(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        self.prime(rows)
        return self.strategy.propose(rows, max_len)

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> list[_Proposal]:
        return _split(self.draft(rows, max_len))

    def round(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int], kept: int, token: int) -> None:
        """Draft, have the target look at it, keep at most ``kept`` tokens of the first path and add ``token``."""
        draft = self.draft(rows, max_len)
        target, _ = self.runner.score(rows, draft)
        self.strategy.observe(rows, draft, target)
        for row, proposal in zip(rows, _split(draft)):
            row.tokens += [*_first_path(proposal)[:kept], token]
        self.commit(rows)

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.runner.commit(rows)
        self.strategy.commit(rows)

    def release(self, rows: abc.Sequence[Sequence]) -> None:
        for row in rows:
            self.runner.release(row)
            self.strategy.release(row)


def _first_path(proposal: _Proposal) -> list[int]:
    """The tokens of the path that is tried first: all of a chain."""
    path: list[int] = []
    at = -1
    for node, token in enumerate(proposal.tokens):
        if (node - 1 if proposal.parents is None else proposal.parents[node]) == at:
            path.append(token)
            at = node
    return path


@dataclass
class _Kit:
    """How to make the strategy, and who it drafts for."""

    make: Callable[[], DraftStrategy]
    name: str
    learns: bool
    model: Executor
    samples: dict[tuple[int, int], list[_Proposal]] = field(default_factory=dict)

    @staticmethod
    def of(strategy: DraftStrategy | Callable[[], DraftStrategy], learns: bool | None, target: object) -> _Kit:
        first = strategy if isinstance(strategy, DraftStrategy) else strategy()
        if not isinstance(first, DraftStrategy):
            raise ValueError(f"{strategy!r} makes {first!r}, which is no DraftStrategy")
        first.resolve(load)
        make = _copier(strategy) if isinstance(strategy, DraftStrategy) else _resolved(strategy)
        if learns is None:
            learns = bool(getattr(first, "learns", False))
        executor = load(target or _toy_target(first.vocab_size or _VOCABULARY)).executor
        return _Kit(make, type(first).__name__, learns, executor)

    @property
    def vocab(self) -> int:
        return self.model.config.vocab_size

    def stage(self) -> _Stage:
        return _Stage(self.make(), self.model)

    def row(self, tokens: list[int], params: SamplingParams | float = 0.0, seed: int = 0) -> Sequence:
        """A request that has emitted all of ``tokens`` but the first; a number is a temperature."""
        if not isinstance(params, SamplingParams):
            params = SamplingParams(temperature=params)
        return Sequence(list(tokens), 1, params, Exact(), seed, 8, frozenset(params.stop_token_ids), next(_ids))

    def texts(self, count: int) -> list[list[int]]:
        """Texts of 1 to 13 tokens, short ones first: a few words of the vocabulary, repeated until cut off."""
        rng = random.Random(count)
        found = []
        for number in range(count):
            motif = [rng.randrange(self.vocab) for _ in range(1 + number % 5)]
            found.append((motif * 13)[: 1 + 12 * number // max(count - 1, 1)])
        return found

    def batches(self) -> Iterator[tuple[list[Sequence], list[int]]]:
        """Rows and how much may be drafted for them, small batches first: greedy ones, sampled ones, both."""
        rng = random.Random(0)
        for number, size in enumerate((1, 1, 1, 2, 2, 3, 4, 5)):
            texts = self.texts(9)
            picked = [texts[rng.randrange(9)] for _ in range(size)]
            temperatures = [(0.0, 1.0, (0.0, 0.7)[b % 2])[number % 3] for b in range(size)]
            rows = [self.row(text, t, seed) for seed, (text, t) in enumerate(zip(picked, temperatures))]
            yield rows, [rng.choice((1, 2, 5, 8)) for _ in range(size)]

    def drawn(self, params: int, more: int = 0) -> list[_Proposal]:
        """Drafts of up to 3 tokens for one text under ``_PARAMS[params]``, one for each of ``_SEEDS`` seeds.

        ``more`` gives another text, the same with so many tokens behind it.
        """
        if (params, more) not in self.samples:
            text = [*self.texts(9)[5], *(token % self.vocab for token in range(3, 3 + more))]
            stage, found = self.stage(), list[_Proposal]()
            # As many rows at once as all caches hold.
            room = [a.num_blocks // a.blocks_for(len(text) + 4) for a in stage.strategy.allocators()]
            size = max(1, min([64, *room]))
            for start in range(0, _SEEDS, size):
                seeds = range(start, min(start + size, _SEEDS))
                rows = [self.row(text, _PARAMS[params], seed) for seed in seeds]
                found += stage.propose(rows, [3] * len(rows))
                stage.release(rows)
            self.samples[params, more] = found
        return self.samples[params, more]


def _toy_target(vocab_size: int) -> Llama:
    """A random Llama of width 16 and two layers, float32 on the CPU; the same each time."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=_POSITIONS,
    )
    model = Llama(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3, generator=generator)
    return model.eval().requires_grad_(False)


def _resolved(make: Callable[[], DraftStrategy]) -> Callable[[], DraftStrategy]:
    def made() -> DraftStrategy:
        strategy = make()
        strategy.resolve(load)
        return strategy

    return made


def _copier(strategy: DraftStrategy) -> Callable[[], DraftStrategy]:
    """A function that copies ``strategy`` and all it holds but the models."""
    shared = {id(found): found for _, found in _reachable(strategy) if isinstance(found, (torch.nn.Module, Executor))}
    return lambda: copy.deepcopy(strategy, dict(shared))


def _reachable(start: object) -> Iterator[tuple[str, object]]:
    """Everything that ``start`` holds in attributes and containers, keys included, with where it is."""
    pending: list[tuple[str, object]] = [("self", start)]
    seen: set[int] = set()
    while pending:
        where, found = pending.pop()
        yield where, found
        if isinstance(found, (torch.nn.Module, Executor, Tensor, str, int, float, type)) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            pending += [(where, part) for pair in found.items() for part in pair]
        elif isinstance(found, (list, tuple, set, frozenset, deque)):
            pending += [(where, part) for part in found]
        else:
            pending += [(f"{where}.{name}", part) for name, part in getattr(found, "__dict__", {}).items()]


def _show(row: Sequence, most: int) -> str:
    """A row and what was asked for it, in one line."""
    ends = f", ends {sorted(row.stop_ids)}" if row.stop_ids else ""
    return f"row {row.tokens}, temperature {row.params.temperature}, seed {row.seed}{ends}, max_len {most}"


def _same(row: Sequence, one: _Proposal, other: _Proposal) -> bool:
    """Whether two proposals for ``row`` are the same tokens by the same distributions (at temperature 0: the same
    tokens)."""
    if (one.tokens, one.parents) != (other.tokens, other.parents):
        return False
    if row.greedy or not one.tokens or (one.distributions is None and other.distributions is None):
        return True
    distributions = [
        _one_hot(p.tokens, part) if p.distributions is None else p.distributions
        for p, part in ((one, other.distributions), (other, one.distributions))
    ]
    return torch.allclose(distributions[0], distributions[1], atol=_APART)


def _one_hot(tokens: list[int], like: Tensor | None) -> Tensor:
    """[length, V]: the distributions of tokens that are certain."""
    assert like is not None
    return torch.zeros_like(like).scatter_(1, torch.tensor(tokens).unsqueeze(1), 1.0)


def _compare(
    rows: abc.Sequence[Sequence],
    max_len: abc.Sequence[int],
    found: abc.Sequence[_Proposal],
    fresh: abc.Sequence[_Proposal],
    how: str,
) -> None:
    """Raise ``ConformanceError`` at the first row whose proposal differs from the one it should be; ``how`` it came."""
    for row, most, one, other in zip(rows, max_len, found, fresh):
        if not _same(row, one, other):
            what = "the same tokens by other distributions" if one.tokens == other.tokens else f"{one.tokens}"
            raise ConformanceError(f"{how} drafts {what}, not {other.tokens}, for {_show(row, most)}")


def _to_one_length(one: _Proposal, other: _Proposal) -> tuple[_Proposal, _Proposal]:
    """Both as far as the shorter goes, if they are chains."""
    if one.parents is not None or other.parents is not None:
        return one, other
    n = min(len(one.tokens), len(other.tokens))
    first, second = (
        _Proposal(p.tokens[:n], None if p.distributions is None else p.distributions[:n], None) for p in (one, other)
    )
    return first, second


# ------------------------------------------------------------------------------------------------------------ checks


def check_shapes_and_ranges(kit: _Kit) -> str:
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
    kit: _Kit, stage: _Stage, draft: Draft, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]
) -> None:
    """Raise ``ConformanceError`` for a draft that is none."""
    tokens, lengths, distributions, parents = draft.tokens_BK, draft.lengths_B, draft.probs_BKV, draft.parents_BK
    asked = "; ".join(_show(row, most) for row, most in zip(rows, max_len))
    columns: list[tuple[str, Tensor | None, tuple[int, ...], bool]] = [
        ("lengths_B", lengths, (len(rows),), False),
        ("tokens_BK", tokens, (len(rows), tokens.shape[-1]), False),
        ("parents_BK", parents, tuple(tokens.shape), False),
        ("probs_BKV", distributions, (*tokens.shape, kit.vocab), True),
    ]
    for name, tensor, shape, real in columns:
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ConformanceError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}, for {asked}")
        if not (tensor.is_floating_point() if real else tensor.dtype == torch.int64):
            wanted = "a floating one" if real else "torch.int64"
            raise ConformanceError(f"{name} has dtype {tensor.dtype}, expected {wanted}, for {asked}")
    if not bool(((lengths >= 0) & (lengths <= tokens.shape[1])).all()):
        raise ConformanceError(f"lengths_B {lengths.tolist()} are not in 0..{tokens.shape[1]}, for {asked}")
    if not bool(((tokens >= 0) & (tokens < kit.vocab)).all()):
        raise ConformanceError(
            f"tokens_BK {tokens.tolist()} (padding included) are not all in 0..{kit.vocab - 1}, for {asked}"
        )
    if distributions is not None and not bool(torch.isfinite(distributions).all()):
        raise ConformanceError(f"probs_BKV (padding included) is not finite, for {asked}")
    for row, most, proposal in zip(rows, max_len, _split(draft)):
        told = f"{proposal.tokens} for {_show(row, most)}"
        for node, parent in enumerate(proposal.parents or ()):
            if not -1 <= parent < node:
                raise ConformanceError(f"token {node} has parent {parent}, expected one in -1..{node - 1}: {told}")
        if (longest := 1 + max(proposal.depths, default=-1)) > most:
            raise ConformanceError(f"drafted {longest} tokens where at most {most} were asked: {told}")
        pairs = list(zip(proposal.parents or (), proposal.tokens))
        if proposal.distributions is None and len(set(pairs)) < len(pairs):
            raise ConformanceError(
                f"two siblings of a deterministic tree are the same, parents {proposal.parents}: {told}"
            )
        unseen = set(proposal.tokens) - set(row.tokens)
        if stage.strategy.vocab_size is None and not kit.learns and unseen:
            raise ConformanceError(f"drafted {sorted(unseen)}, not seen in the row, and states no vocab_size: {told}")


def check_nothing_asked_nothing_drafted(kit: _Kit) -> str:
    """A row with max_len 0 gets an empty draft, alone and beside rows that get one."""
    for rows, max_len in kit.batches():
        for limits in ([0] * len(rows), [0, *max_len[1:]]):
            for row, most, proposal in zip(rows, limits, kit.stage().propose(rows, limits)):
                if not most and proposal.tokens:
                    raise ConformanceError(f"drafted {proposal.tokens} for {_show(row, 0)}")
    return ""


def check_nothing_after_an_end(kit: _Kit) -> str:
    """No token is drafted to follow one that ends the row: it could never be emitted."""
    ended = 0
    for rows, max_len in kit.batches():
        firsts = [proposal.tokens[:1] for proposal in kit.stage().propose(rows, max_len)]
        for others in (0, 2):  # what was drafted first as the only end, and as one of many
            again = []
            for row, first in zip(rows, firsts):
                stops = {*first, *range(others, kit.vocab if others else 0, 2)}
                params = row.params.model_copy(update={"stop_token_ids": tuple(sorted(stops))})
                again.append(kit.row(row.tokens, params, row.seed))
            for row, most, proposal in zip(again, max_len, kit.stage().propose(again, max_len)):
                for node, token in enumerate(proposal.tokens):
                    parent = node - 1 if proposal.parents is None else proposal.parents[node]
                    if parent >= 0 and proposal.tokens[parent] in row.stop_ids:
                        raise ConformanceError(
                            f"drafted {token} after {proposal.tokens[parent]}, which ends the row: {proposal.tokens} "
                            f"for {_show(row, most)}"
                        )
                ended += bool(row.stop_ids & set(proposal.tokens))
    return f"{ended} drafts with an end"


def check_rows_untouched(kit: _Kit) -> str:
    """No call changes a row, or any field of one."""
    for rows, max_len in kit.batches():
        stage = kit.stage()
        before = [copy.deepcopy(vars(row)) for row in rows]
        limits = list(max_len)

        def compare(call: str) -> None:
            for row, most, old in zip(rows, max_len, before):  # noqa: B023
                now = vars(row)
                if changed := [name for name in {**old, **now} if name not in old or old[name] != now.get(name)]:
                    name = changed[0]
                    raise ConformanceError(
                        f"{call} changed {name} from {old.get(name)!r} to {now.get(name)!r}, for {_show(row, most)}"
                    )

        draft = stage.draft(rows, limits)
        compare("propose")
        if limits != max_len:
            raise ConformanceError(f"propose changed max_len from {max_len} to {limits}")
        target, _ = stage.runner.score(rows, draft)
        stage.strategy.observe(rows, draft, target)
        compare("observe")
        stage.commit(rows)
        compare("commit")
        stage.release(rows)
        compare("release")
    return ""


def check_no_hidden_randomness(kit: _Kit) -> str:
    """The same row and seed give the same draft: whatever the global generators, the row's id, and how often asked.

    At temperature 0 the seed does not matter either. One that learns may propose more or fewer of the same tokens.
    """
    state, python_state = torch.get_rng_state(), random.getstate()
    try:
        for rows, max_len in kit.batches():
            torch.manual_seed(1)
            random.seed(1)
            stage = kit.stage()
            first = stage.propose(rows, max_len)
            second = stage.propose(rows, max_len)
            if kit.learns:  # of speed, say: it may propose more or less, but not other tokens
                pairs = [_to_one_length(one, other) for one, other in zip(second, first)]
                _compare(rows, max_len, [a for a, _ in pairs], [b for _, b in pairs], "asked again it")
            else:
                _compare(rows, max_len, second, first, "asked again it")
            torch.manual_seed(2)
            random.seed(2)
            copies = [kit.row(row.tokens, row.params, row.seed + 99 * row.greedy) for row in rows]
            again = kit.stage().propose(copies, max_len)
            if not kit.learns:
                _compare(rows, max_len, again, first, "under another id (and another seed, if at temperature 0) it")
    finally:
        torch.set_rng_state(state)
        random.setstate(python_state)
    return ""


def check_row_alone_equals_row_in_batch(kit: _Kit) -> str:
    """A row's draft depends on that row alone: not on its neighbours, their number, or their order."""
    if kit.learns:
        return "not asked of a strategy that learns"
    for rows, max_len in kit.batches():
        alone = [kit.stage().propose([row], [most])[0] for row, most in zip(rows, max_len)]
        _compare(rows, max_len, kit.stage().propose(rows, max_len), alone, "a batch")
        turned = kit.stage().propose(rows[::-1], max_len[::-1])
        _compare(rows, max_len, turned[::-1], alone, "a reversed batch")
    return ""


_EVENTS = ("keep none", "keep two", "keep all", "give up", "fork")


def check_rolled_back_equals_fresh(kit: _Kit) -> str:
    """After any history of accepted and rejected drafts, steps given up, and forks, it proposes what a fresh strategy
    would. One that learns may propose anything, if it is a draft."""
    rng = random.Random(0)
    histories = [[event] for event in _EVENTS] + [rng.choices(_EVENTS, k=5) for _ in range(6)]
    for temperature, history in itertools.product((0.0, 1.0), histories):
        texts = kit.texts(9)
        rows = [kit.row(rng.choice(texts), temperature, seed) for seed in range(1 if len(history) == 1 else 3)]
        max_len = [rng.choice((2, 5)) for _ in rows]
        stage = kit.stage()
        for number, event in enumerate(history, start=1):
            _play(kit, stage, event, rows, max_len, rng)
            draft = stage.draft(rows, max_len)
            if kit.learns:
                _check_format(kit, stage, draft, rows, max_len)
            else:
                fresh = kit.stage().propose(rows, max_len)
                _compare(rows, max_len, _split(draft), fresh, f"after {history[:number]} it")
    return "valid; what it has learned may show" if kit.learns else f"{2 * len(histories)} histories"


def _play(kit: _Kit, stage: _Stage, event: str, rows: list[Sequence], max_len: list[int], rng: random.Random) -> None:
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


def check_release_frees_all(kit: _Kit) -> str:
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
    if not kit.learns:
        fresh = kit.stage().propose(rows[3:], max_len[3:])
        _compare(rows[3:], max_len[3:], left, fresh, "after the release of others it")
    stage.release(rows[3:])
    ids = {row.id for row in rows}
    for number, allocator in enumerate(stage.strategy.allocators()):
        if allocator.num_free < allocator.num_blocks or allocator.sequences():
            held = allocator.num_blocks - allocator.num_free
            raise ConformanceError(
                f"allocator {number} still holds {held} of {allocator.num_blocks} blocks and "
                f"{len(allocator.sequences())} sequences after all rows were released"
            )
    for where, found in _reachable(stage.strategy):
        if isinstance(found, Sequence) or (type(found) is int and found in ids):
            raise ConformanceError(f"{where} still holds the {_kind(found)} of a row after it was released")
    return f"{len(rows)} rows"


def _kind(found: object) -> str:
    return "id" if isinstance(found, int) else "object"


def check_context_limit(kit: _Kit) -> str:
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
            told = f"rows of {near} tokens in a context of {context}: {type(error).__name__}: {error}"
            raise ConformanceError(told) from error
        for row, proposal in zip(rows, found):
            if len(row.tokens) >= context and proposal.tokens:
                raise ConformanceError(
                    f"drafted {len(proposal.tokens)} tokens for a row of {len(row.tokens)} in a context of {context}"
                )
        stage.commit(rows)
        stage.release(rows)
    return f"{context} tokens"


def check_full_caches(kit: _Kit) -> str:
    """Without room it raises ``OutOfBlocks`` and nothing else; after that and a commit all is as before."""
    caches = len(kit.stage().strategy.allocators())
    refused = 0
    for number, free in itertools.product(range(caches), (0, 1, 2)):
        stage = kit.stage()
        rows = [kit.row(text) for text in kit.texts(9)[-2:]]
        stage.prime(rows)
        allocator = stage.strategy.allocators()[number]
        allocator.resize("others", max(0, allocator.num_free - free) * allocator.block_size)
        before = [(a.num_free, set(a.sequences())) for a in stage.strategy.allocators()]
        told = f"with {free} free blocks in allocator {number}"
        try:
            stage.strategy.propose(rows, [20, 20])
        except OutOfBlocks:
            refused += 1
            stage.commit(rows)
            after = [(a.num_free, set(a.sequences())) for a in stage.strategy.allocators()]
            known = {row.id for row in rows}
            for (was, old), (now, new) in zip(before, after):
                if not new <= old | known or (now != was and new == old):
                    raise ConformanceError(f"{told} a refused draft left {was - now} more blocks taken") from None
        stage.commit(rows)
        allocator.release("others")
        again, fresh = stage.propose(rows, [5, 5]), kit.stage().propose(rows, [5, 5])
        if not kit.learns:
            _compare(rows, [5, 5], again, fresh, f"after it had to draft {told} it")
        stage.release(rows)
        if any(a.num_free < a.num_blocks for a in stage.strategy.allocators()):
            raise ConformanceError(f"{told} a draft leaves blocks that release does not free")
    return f"{refused} of {3 * caches} times refused" if caches else "no caches of its own"


def check_claimed_distribution(kit: _Kit) -> str:
    """Claimed distributions are distributions, drafted tokens have mass in them, and over many seeds are drawn from
    them.

    What is drawn at random must claim its distribution; how much is drafted must not depend on what was drawn.
    """
    for rows, max_len in kit.batches():
        for row, most, proposal in zip(rows, max_len, kit.stage().propose(rows, max_len)):
            for j, (token, probs_V) in enumerate(
                zip(proposal.tokens, () if proposal.distributions is None else proposal.distributions)
            ):
                total = float(probs_V.double().sum())
                if float(probs_V.min()) < 0 or abs(total - 1) > _APART:
                    least = f"sums to {total:.4f} with a least entry of {float(probs_V.min()):.2g}"
                    raise ConformanceError(f"the distribution of drafted token {j} {least}, for {_show(row, most)}")
                if not float(probs_V[token]):
                    raise ConformanceError(
                        f"token {token} at {j} was drafted, and its distribution excludes it, for {_show(row, most)}"
                    )
    chances = []
    for number, params in enumerate(_PARAMS):
        proposals = kit.drawn(number)
        told = f"{_SEEDS} seeds at temperature {params.temperature}, top_k {params.top_k}"
        row = kit.row(kit.texts(9)[5], params)
        certain = {tuple(p.tokens) for p in proposals if p.distributions is None}
        if len(certain) > 1 and not kit.learns:
            few = [list(tokens) for tokens in sorted(certain)[:2]]
            raise ConformanceError(
                f"drafts {few} by the seed, but claims no distribution (probs_BKV), for {_show(row, 3)}"
            )
        lengths = {len(p.tokens) for p in proposals if p.parents is None}
        if len(lengths) > 1 and not kit.learns:
            raise ConformanceError(f"the seed decides how much is drafted, {sorted(lengths)} tokens: {_show(row, 3)}")
        for j in range(3):
            tokens_N, probs_NV, _ = _drawn_at(proposals, j)
            if not len(tokens_N):
                continue
            expected_V = probs_NV.sum(0)
            observed_V = torch.bincount(tokens_N, minlength=kit.vocab).double()
            if (chance := _chance(observed_V, expected_V)) < _CHANCE:
                worst = int((observed_V - expected_V).abs().argmax())
                share, claimed = (float(counts[worst]) / len(tokens_N) for counts in (observed_V, expected_V))
                raise ConformanceError(
                    f"token {j} of the draft is {worst} in {share:.3f} of {told}; it claims {claimed:.3f} "
                    f"(chance {chance:.0e}), for {_show(row, 3)}"
                )
            chances.append(chance)
    return (
        f"least chance of what was drawn {min(chances):.2g}" if chances else "nothing is drawn: all drafts are certain"
    )


def check_rounds_are_independent(kit: _Kit) -> str:
    """What is drawn with one seed at two positions is independent: no round repeats the randomness of another."""
    here, there = kit.drawn(0), kit.drawn(0, more=2)
    first, second = _drawn_at(here, 0), _drawn_at(here, 1)
    later = _drawn_at(there, 0)
    chances = []
    for told, one, other in (
        ("one round and the first of a later round", first, later),
        ("a round and the second of the same round", first, second),
    ):
        both, at_one, at_other = _common(one[2], other[2])
        if not len(both):
            continue
        groups_V = _groups(one[1][at_one].sum(0))
        chance = _dependence(groups_V[one[0][at_one]], other[0][at_other], other[1][at_other])
        if chance < _CHANCE:
            raise ConformanceError(
                f"over {len(both)} seeds the first token of {told} depend on each other more than they claim "
                f"(chance {chance:.0e}): the same randomness is used twice"
            )
        chances.append(chance)
    return f"least chance {min(chances):.2g}" if chances else "nothing is drawn"


def check_independent_of_the_verdict(kit: _Kit) -> str:
    """What is drawn is independent of the coins and the draw that the verdict on it will use."""
    proposals, position = kit.drawn(0), len(kit.texts(9)[5])
    seeds_N = torch.arange(len(proposals))
    coins = uniforms(seeds_N, torch.full_like(seeds_N, position), Stream.ACCEPT, 2)
    draws = uniforms(seeds_N, torch.full_like(seeds_N, position), Stream.SAMPLE, 1)
    chances = []
    for told, j, noise_N in (("coin 0", 0, coins[:, 0]), ("coin 1", 1, coins[:, 1]), ("the draw", 0, draws[:, 0])):
        tokens_N, probs_NV, at_N = _drawn_at(proposals, j)
        if not len(tokens_N):
            continue
        chance = _dependence((noise_N[at_N] * 6).long(), tokens_N, probs_NV)
        if chance < _CHANCE:
            raise ConformanceError(
                f"token {j} of the draft depends on {told} of its own verdict (chance {chance:.0e}): draw with a seed "
                "of your own, fly.sampling.derive(row.seed, len(row.tokens))"
            )
        chances.append(chance)
    return f"least chance {min(chances):.2g}" if chances else "nothing is drawn"


def _drawn_at(proposals: abc.Sequence[_Proposal], j: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [N], claimed distributions [N, V] float64 and numbers [N] of the proposals that drew a token ``j``.

    Of a tree that is its first token alone: how the others came about, their distributions do not say.
    """
    at = [
        i
        for i, p in enumerate(proposals)
        if len(p.tokens) > j and p.distributions is not None and (p.parents is None or j == 0)
    ]
    if not at:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0), torch.zeros(0, dtype=torch.int64)
    distributions = torch.stack(
        [distributions[j] for i in at if (distributions := proposals[i].distributions) is not None]
    ).double()
    return (
        torch.tensor([proposals[i].tokens[j] for i in at]),
        distributions / distributions.sum(-1, keepdim=True),
        torch.tensor(at),
    )


def _common(one_N: Tensor, other_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers that stand in both, and where they stand in each."""
    both = one_N[torch.isin(one_N, other_N)]
    return both, torch.searchsorted(one_N, both), torch.searchsorted(other_N, both)


def _groups(mass_V: Tensor) -> Tensor:
    """[V] int64: up to six groups of neighbouring tokens with about the same mass each."""
    before_V = mass_V.cumsum(0) - mass_V / 2
    return (before_V / mass_V.sum() * 6).long().clamp(0, 5)


def _dependence(bins_N: Tensor, tokens_N: Tensor, probs_NV: Tensor) -> float:
    """The chance that tokens drawn from their distributions, whatever their bins (0 to 5), fall on the bins as these
    did."""
    groups_V = _groups(probs_NV.sum(0))
    probs_NG = torch.zeros(len(tokens_N), 6, dtype=probs_NV.dtype).index_add_(1, groups_V, probs_NV)
    expected_GG = torch.zeros(6, 6, dtype=probs_NV.dtype).index_add_(0, bins_N, probs_NG)
    observed_GG = torch.bincount(bins_N * 6 + groups_V[tokens_N], minlength=36).double()
    return _chance(observed_GG, expected_GG.flatten())


def _chance(observed_G: Tensor, expected_G: Tensor) -> float:
    """Chance of counts at least as far from the expected ones, by Pearson's chi-square; rare outcomes count together.

    The expected counts may be sums over draws with different distributions, which makes the true chance larger only.
    """
    order = expected_G.argsort()
    observed, expected = observed_G[order], expected_G[order]
    if bool(((expected == 0) & (observed > 0)).any()):
        return 0.0
    # Cells of at least 25 expected counts: below, the tail of the chi-square is too thin for chances this small.
    cell = torch.where(expected >= 25, torch.arange(len(expected)), -1)
    rare = cell < 0
    cell[rare] = -1 - (expected[rare].cumsum(0) / 25).long()
    _, cell = cell.unique(return_inverse=True)
    width = int(cell.max()) + 1
    found, wanted = (torch.zeros(width, dtype=torch.float64).index_add_(0, cell, x) for x in (observed, expected))
    enough = wanted >= 5
    square = ((found - wanted)[enough] ** 2 / wanted[enough]).sum()
    freedom = int(enough.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), square / 2)) if freedom > 0 else 1.0


def check_speculation_equals_autoregression(kit: _Kit) -> str:
    """With the exact rule the greedy texts of a batch are the target's own, and sampled ones do not depend on it."""
    prompts = kit.texts(6)
    llm = LLM(kit.model, kit.make(), k=5)
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    ks = [1 + number % 6 for number in range(len(prompts))]
    plain = llm.generate(prompts, greedy, k=0)
    ends = [greedy.model_copy(update={"stop_token_ids": (out.token_ids[-1],)}) for out in plain]
    for params, wanted in ((greedy, plain), (ends, llm.generate(prompts, ends, k=0))):
        found = llm.generate(prompts, params, k=ks)
        for prompt, k, one, other in zip(prompts, ks, found, wanted):
            if one.token_ids != other.token_ids:
                raise ConformanceError(f"prompt {prompt}, k {k}: emits {one.token_ids}, the target {other.token_ids}")
    drafted, accepted = (sum(getattr(out.stats, name) for out in found) for name in ("drafted", "accepted"))
    if not kit.learns:
        sampled = [SamplingParams(max_tokens=16, seed=seed) for seed in range(len(prompts))]
        for prompt, params, k, one in zip(prompts, sampled, ks, llm.generate(prompts, sampled, k=ks)):
            (alone,) = LLM(kit.model, kit.make()).generate([prompt], params, k=k)
            if one.token_ids != alone.token_ids:
                raise ConformanceError(
                    f"prompt {prompt}, seed {params.seed}, k {k}: emits {alone.token_ids} alone, and in a batch "
                    f"{one.token_ids}"
                )
    return f"{accepted} of {drafted} drafted tokens stood before a random target"


DRAFT_CHECKS: tuple[Callable[[_Kit], str], ...] = (
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
