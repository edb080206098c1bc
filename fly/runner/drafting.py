"""Drafting with a model: the request (``DraftSpec``), the result (``Drafted``), and the plain loop of one forward after
another. Knows no backend.

``Executor.extend`` calls ``draft_by_forwards``, unless the executor has a faster way. For chains, the loop repeats
three stages: choose each row's next token, stop the rows that are done, feed the others. A block drafter runs one
forward for all tokens, and then the same loop (``draft_chains``), which feeds nothing. If no token depends on another,
``draft_at_once`` chooses them all.

Shape legend: T packed tokens, N places, B rows, A rows that still draft, J positions of a row, K longest draft, W
candidates for a place, S cached tokens of a row, C features of a head, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import heapq
import itertools
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fly.cache import PagedBatch
from fly.ops import Stream, argmax, draw, nothing_left, top, uniforms, upload
from fly.runner.constraints import constrain
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling, ProcessedDistribution

__all__ = [
    "Batch",
    "Certainty",
    "DraftSpec",
    "DraftStart",
    "Drafted",
    "Follow",
    "Growth",
    "Lookup",
    "Marginals",
    "Place",
    "Scores",
    "Step",
    "draft_apart",
    "draft_at_once",
    "draft_by_forwards",
    "draft_chains",
    "draw_tokens",
    "ends_of",
    "pad_rows",
]


@dataclass(frozen=True)
class Batch:
    """The new tokens of several rows, packed without padding. ``kv`` holds the block tables: which cached tokens come
    before the new ones, where the new keys and values go, and in a tree which tokens each new token sees."""

    tokens: list[int]  # T tokens, one row after another
    positions: list[int]  # T, the position of each token in its row
    kv: PagedBatch

    @staticmethod
    def of(new: abc.Sequence[list[int]], kv: PagedBatch) -> Batch:
        """Pack the new tokens of each row, which follow its cached ones."""
        if len(new) == 1:
            return Batch(new[0], list(range(kv.starts[0], kv.starts[0] + len(new[0]))), kv)
        positions = [at for start, tokens in zip(kv.starts, new) for at in range(start, start + len(tokens))]
        return Batch([token for tokens in new for token in tokens], positions, kv)

    def rows(self, numbers: abc.Sequence[int]) -> Batch:
        """Return the batch of some rows only, given by their numbers in ascending order."""
        if len(numbers) == len(self.kv.counts):
            return self
        places, kv = self.places(numbers), self.kv
        masks = None if kv.masks is None else [kv.masks[b] for b in numbers]
        seqs = [kv.seqs[b] for b in numbers]
        starts, counts = ([column[b] for b in numbers] for column in (kv.starts, kv.counts))
        tokens, positions = ([column[t] for t in places] for column in (self.tokens, self.positions))
        return Batch(tokens, positions, kv.cache.batch(seqs, starts, counts, masks))

    def places(self, numbers: abc.Sequence[int]) -> list[int]:
        """Return the indices of some rows' tokens among the packed ones."""
        ends = list(itertools.accumulate(self.kv.counts))
        return [t for b in numbers for t in range(ends[b] - self.kv.counts[b], ends[b])]


class Scores(NamedTuple):
    """A model's output after some tokens of a batch."""

    logits_NV: Tensor  # float32
    argmax: list[int] | None = None  # the most likely tokens (a negative number: NaN), if the backend found them
    states_TF: Tensor | None = None  # hidden states of all tokens of the batch, if asked for


@dataclass(frozen=True)
class Lookup:
    """The parameters of prompt lookup (``fly.drafts.NGramDraft``)."""

    longest: int  # match, in tokens
    shortest: int  # match, in tokens
    k: int  # the most tokens to copy


@dataclass(frozen=True)
class Growth:
    """How a model grows a tree, level by level.

    Level 0 has the ``widths[0]`` most likely tokens after the row. In each level, the ``follow`` tokens with the most
    likely paths are followed: each gets the ``widths[i]`` most likely tokens after it, which form the next level i. In
    the end, the tree's ``nodes`` tokens with the most likely paths are proposed."""

    widths: tuple[int, ...]
    follow: int
    nodes: int

    @staticmethod
    def uniform(depth: int, width: int, nodes: int) -> Growth:
        """Return a growth of ``depth`` levels (fewer if there are fewer ``nodes``), all of one width."""
        depth = min(depth, nodes)
        return Growth((width,) * depth, width, min(nodes, width + (depth - 1) * width * width))

    @property
    def spare(self) -> int:
        """Slots that the tree needs after the row's tokens. The target's cache holds the whole tree, the draft model's
        holds the followed tokens; this is the larger number."""
        level = 1
        followed = 0
        for width in self.widths[:-1]:
            level = min(level * width, self.follow)
            followed += level
        return max(self.nodes, followed)


@dataclass(frozen=True)
class DraftSpec:
    """How a model drafts: a chain of its most likely (or drawn) tokens, up to the first that it is not sure of; or a
    ``tree`` of its most likely tokens, which does not stop early.

    ``lookup`` saves forwards and changes no token: prompt lookup guesses the next tokens, one forward checks them all,
    and drafting goes on from the first wrong guess. (A head checks nothing, so beside one a lookup drafts itself.)
    """

    # Stop after a token if its chance to be kept is below this. The chance is the largest probability at its place, or
    # what a head for it says.
    confidence: float = 0.0
    # For each row: stop after a token if the product of these chances so far is below this. Empty: never.
    reach: tuple[float, ...] = ()
    lookup: Lookup | None = None
    with_logits: bool = False  # whether to return the logits at each token's place too
    tree: Growth | None = None

    @property
    def stops(self) -> bool:
        """Whether a draft may stop before it has its full length."""
        return self.confidence > 0 or any(self.reach)

    def rows(self, numbers: abc.Sequence[int]) -> DraftSpec:
        """Return what is asked for some rows only."""
        return replace(self, reach=tuple(self.reach[b] for b in numbers)) if self.reach else self


class Drafted(NamedTuple):
    """What a model drafted for each row.

    ``probs_BKV`` are the distributions that tokens were drawn from; None for greedy drafts. ``logits_BKV`` are the
    logits at each token's place, if they are asked for (``DraftSpec.with_logits``). Both are zeros after a row's last
    token. Trees have the ``parents`` of their tokens, as in ``Draft``, and no logits."""

    tokens: list[list[int]]
    probs_BKV: Tensor | None = None
    logits_BKV: Tensor | None = None
    parents: list[list[int]] | None = None


@dataclass
class Certainty:
    """Decides when a model stops drafting for a row."""

    spec: DraftSpec
    threshold: float  # stop when the estimated chance that all tokens so far are kept falls below this
    reached: float = 1.0

    @property
    def may_stop(self) -> bool:
        """Whether the draft may stop early."""
        return self.threshold > 0 or self.spec.confidence > 0

    def goes_on(self, chance_N: Tensor) -> list[bool]:
        """Return whether to go on after each of the next N tokens, given the chance that each is kept: the largest
        probability of its distribution, or the model's own estimate. Neither may depend on the token itself."""
        reached_N = self.reached * chance_N.cumprod(0)
        self.reached = float(reached_N[-1])
        sure: list[bool] = ((chance_N >= self.spec.confidence) & (reached_N >= self.threshold)).tolist()
        return sure


class DraftStart(NamedTuple):
    """Where drafting starts: after a forward over all tokens of the rows."""

    kv: PagedBatch  # the batch of that forward; the cache has room for the draft
    positions: list[int]  # the position of each row's next token
    logits_BV: Tensor  # after each row's last token
    x_BC: Tensor | None = None  # a head's features after the same tokens

    @staticmethod
    def after(batch: Batch, logits_BV: Tensor, x_BC: Tensor | None = None) -> DraftStart:
        """Return the start after the forward of ``batch``."""
        ends = ends_of(batch.kv)
        return DraftStart(batch.kv, [batch.positions[end] + 1 for end in ends], logits_BV, x_BC)


class Place(NamedTuple):
    """What a model says of the next token of each row."""

    logits_AV: Tensor
    chance_A: Tensor | None = None  # the model's own estimate of the chance that the token is kept; None: no estimate


# Returns what the model says after the latest tokens of some rows, given the rows' numbers and those tokens. First it
# is called with all rows and the last tokens of their texts, then with the rows that still draft, and their drafted
# tokens.
Follow = Callable[[list[int], list[int]], Place]


class Marginals:
    """What a model says of several places at once, whatever is drafted at the places before (``Follow``)."""

    def __init__(self, logits_BKV: Tensor) -> None:
        self.logits_BKV = logits_BKV
        self.place = -1

    def __call__(self, active: list[int], tokens: list[int]) -> Place:
        self.place += 1
        return Place(self.logits_BKV[active, self.place])


# Runs one forward over drafted tokens, each with a head's features before it. Returns logits [T, V], features [T, C].
Step = Callable[[Batch, Tensor | None], tuple[Tensor, Tensor | None]]


class Computing(Protocol):
    """The parts of an ``Executor`` that the loop needs besides forwards."""

    def numbers(self, values: abc.Sequence[int] | Tensor) -> Tensor: ...
    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution: ...


def ends_of(kv: PagedBatch) -> list[int]:
    """Return the index of each row's last token among the packed ones."""
    return [end - 1 for end in itertools.accumulate(kv.counts)]


def draft_by_forwards(
    model: Computing,
    start: DraftStart,
    step: Step,
    spec: DraftSpec,
    rows: abc.Sequence[Row],
    max_len: abc.Sequence[int],
    sampling: BatchSampling | None = None,
    seeds: abc.Sequence[int] = (),
) -> Drafted:
    """Draft as ``Executor.extend`` describes, with one forward for each token, or for each level of a tree.

    Args:
        start: the forward after which drafting starts.
        step: runs each further forward.
        spec, rows, max_len, sampling, seeds: as for ``Executor.extend``.
    """
    if spec.tree is not None:
        return _draft_trees(model, start, step, spec.tree, rows, max_len)
    return draft_chains(model, _Forwards(start, step), spec, rows, max_len, sampling, seeds)


class _Forwards:
    """Feeds each drafted token (``Follow``)."""

    def __init__(self, start: DraftStart, step: Step) -> None:
        self.start = start
        self.step = step
        self.rows = list(range(len(start.positions)))  # of the features
        self.x_AC = start.x_BC
        self.fed = -1  # drafted tokens of each row

    def __call__(self, active: list[int], tokens: list[int]) -> Place:
        self.fed += 1
        if not self.fed:
            return Place(self.start.logits_BV)
        # One forward over the drafted tokens, which are cached after their row.
        if self.x_AC is not None and len(active) < len(self.rows):
            self.x_AC = self.x_AC[[self.rows.index(b) for b in active]]
        self.rows = active
        batch = _next_batch(self.start, active, [self.fed - 1] * len(active), [[token] for token in tokens])
        logits_AV, self.x_AC = self.step(batch, self.x_AC)
        return Place(logits_AV)


def draw_tokens(probs_NV: Tensor, seeds: abc.Sequence[int], lengths: abc.Sequence[int]) -> list[int]:
    """Draw one token from each distribution [N, V]. Its uniform number depends on the seed and the length of its row
    alone, given as ``seeds`` and ``lengths``."""
    seed_N, length_N = upload([*seeds, *lengths], probs_NV.device).chunk(2)
    tokens: list[int] = draw(probs_NV, uniforms(seed_N, length_N, Stream.SAMPLE, 1).squeeze(1)).tolist()
    return tokens


def draft_chains(
    model: Computing,
    follow: Follow,
    spec: DraftSpec,
    rows: abc.Sequence[Row],
    max_len: abc.Sequence[int],
    sampling: BatchSampling | None,
    seeds: abc.Sequence[int],
) -> Drafted:
    """Draft chains as ``Executor.extend`` describes, token by token. ``follow`` returns what the model says after each
    token."""
    scratch = [row.fork(row.policy, row.seed) for row in rows]
    probs: list[list[Tensor]] = [[] for _ in rows]  # each token's distribution
    logits: list[list[Tensor]] = [[] for _ in rows]
    certainty = [Certainty(spec, reach) for reach in spec.reach or (0.0,) * len(rows)]
    active = list(range(len(rows)))
    tokens = [row.tokens[-1] for row in rows]
    while True:
        place = follow(active, tokens)
        # Choose: each row's next token is the most likely one that the row allows, or is drawn.
        going = [scratch[b] for b in active]
        logits_NV = _allowed(model, place.logits_AV, going)
        probs_NV = None
        if sampling is None:
            tokens = argmax(logits_NV).tolist()
        else:
            row_sampling = BatchSampling.of([row.params for row in going], logits_NV.device)
            probs_NV = model.process(row_sampling, logits_NV.unsqueeze(1)).dense().squeeze(1)
            tokens = draw_tokens(probs_NV, [seeds[b] for b in active], [len(row.tokens) for row in going])
        for collected, values_NV in ((probs, probs_NV), (logits, logits_NV if spec.with_logits else None)):
            for b, values_V in zip(active, () if values_NV is None else values_NV):
                collected[b].append(values_V)
        # Stop after the first token that the model is not sure of, after one that ends the row, or at full length.
        goes_on = []
        for n, (b, row, token) in enumerate(zip(active, going, tokens)):
            row.tokens.append(token)
            sure = True
            if certainty[b].may_stop:
                if (chance_N := place.chance_A) is not None:
                    chance_1 = chance_N[n : n + 1]
                elif probs_NV is None or row.greedy:
                    chance_1 = logits_NV[n : n + 1].softmax(-1).amax(-1)
                else:
                    chance_1 = probs_NV[n : n + 1].amax(-1)
                (sure,) = certainty[b].goes_on(chance_1)
            if sure and len(row.tokens) - len(rows[b].tokens) < max_len[b] and token not in row.stop_ids:
                goes_on.append(n)
        if not goes_on:
            break
        active = [active[n] for n in goes_on]
        tokens = [tokens[n] for n in goes_on]
    chains = [fork.tokens[len(row.tokens) :] for fork, row in zip(scratch, rows)]
    return Drafted(chains, pad_rows(probs), pad_rows(logits))


def pad_rows(rows: abc.Sequence[list[Tensor]]) -> Tensor | None:
    """Stack the values [V] of each token of each row to [B, K, V], with zeros after a row's last token. None if there
    are no values."""
    if not (longest := max(map(len, rows), default=0)):
        return None
    first_V = next(values[0] for values in rows if values)
    stacked_BKV = first_V.new_zeros(len(rows), longest, len(first_V))
    for b, values in enumerate(rows):
        if values:
            stacked_BKV[b, : len(values)] = torch.stack(values)
    return stacked_BKV


# Drafts chains for some rows: takes their numbers, and then what ``Runner.extend`` takes.
Way = Callable[
    [list[int], abc.Sequence[Row], DraftSpec, abc.Sequence[int], BatchSampling | None, abc.Sequence[int]], Drafted
]


def draft_apart(
    is_first: abc.Sequence[bool],
    first: Way,
    second: Way,
    rows: abc.Sequence[Row],
    spec: DraftSpec,
    max_len: abc.Sequence[int],
    sampling: BatchSampling | None,
    seeds: abc.Sequence[int],
) -> Drafted:
    """Draft chains in the ``first`` way for the rows where ``is_first``, and in the ``second`` way for the others. So a
    row's way does not depend on the rows beside it. Return the drafts in the order of the rows."""
    if all(is_first):
        return first([*range(len(rows))], rows, spec, max_len, sampling, seeds)
    if not any(is_first):
        return second([*range(len(rows))], rows, spec, max_len, sampling, seeds)
    part_of = dict[int, tuple[Drafted, int]]()  # for each row, the draft that it is in, and its number there
    for kind, way in ((True, first), (False, second)):
        numbers = [b for b, each in enumerate(is_first) if each is kind]
        some_rows = [rows[b] for b in numbers]
        lengths = [max_len[b] for b in numbers]
        some_seeds = [seeds[b] for b in numbers] if seeds else ()
        some_sampling = None if sampling is None else BatchSampling.of([row.params for row in some_rows])
        part = way(numbers, some_rows, spec.rows(numbers), lengths, some_sampling, some_seeds)
        part_of |= {b: (part, at) for at, b in enumerate(numbers)}
    chains = list[list[int]]()
    probs = list[list[Tensor]]()
    logits = list[list[Tensor]]()
    for b in range(len(rows)):
        part, at = part_of[b]
        chain = part.tokens[at]
        chains.append(chain)
        for joined, values_BKV in ((probs, part.probs_BKV), (logits, part.logits_BKV)):
            joined.append([] if values_BKV is None else list(values_BKV[at, : len(chain)]))
    return Drafted(chains, pad_rows(probs), pad_rows(logits))


def draft_at_once(
    model: Computing,
    logits_BKV: Tensor,
    spec: DraftSpec,
    rows: abc.Sequence[Row],
    max_len: abc.Sequence[int],
    sampling: BatchSampling | None,
    seeds: abc.Sequence[int],
) -> Drafted:
    """Draft the same as ``draft_chains`` from ``Marginals(logits_BKV)``, with one wait for the device. No row may have
    penalties, bans or a form, since these depend on the tokens before a place."""
    count, longest = len(rows), max(max_len)
    logits_BKV = logits_BKV[:, :longest]
    probs_BKV = None
    # Choose: every place's token is its most likely one, or is drawn.
    if sampling is None:
        tokens_BK = argmax(logits_BKV)
    else:
        row_sampling = BatchSampling.of([row.params for row in rows], logits_BKV.device)
        probs_BKV = model.process(row_sampling, logits_BKV).dense()
        at = [len(row.tokens) + place for row in rows for place in range(longest)]
        seed_N, at_N = upload([*(seed for seed in seeds for _ in range(longest)), *at], logits_BKV.device).chunk(2)
        coin_N = uniforms(seed_N, at_N, Stream.SAMPLE, 1).squeeze(1)
        tokens_BK = draw(probs_BKV.flatten(0, 1), coin_N).unflatten(0, (count, longest))
    if spec.stops:
        peak_BK = logits_BKV.softmax(-1).amax(-1)
        if probs_BKV is not None:
            greedy_B = upload([row.greedy for row in rows], logits_BKV.device).bool()
            peak_BK = torch.where(greedy_B.unsqueeze(1), peak_BK, probs_BKV.amax(-1))
        tokens_BK, peak_BK = torch.stack([tokens_BK.double(), peak_BK.double()]).cpu()
        peak_BK = peak_BK.float()
    # Stop where ``draft_chains`` does.
    chains = []
    for b, (row, drawn) in enumerate(zip(rows, tokens_BK.long().tolist())):
        certainty = Certainty(spec, spec.reach[b] if spec.reach else 0.0)
        sure = certainty.goes_on(peak_BK[b]) if certainty.may_stop else [True] * longest
        ends = (n for n, token in enumerate(drawn, start=1) if not sure[n - 1] or token in row.stop_ids)
        chains.append(drawn[: min(next(ends, longest), max_len[b])])
    if probs_BKV is None and not spec.with_logits:
        return Drafted(chains)
    lengths_B1 = upload(list(map(len, chains)), logits_BKV.device).unsqueeze(1)
    beyond_BK1 = (torch.arange(longest, device=logits_BKV.device) >= lengths_B1).unsqueeze(-1)

    def cut(values_BKV: Tensor | None) -> Tensor | None:
        return None if values_BKV is None else values_BKV.masked_fill(beyond_BK1, 0.0)[:, : max(map(len, chains))]

    return Drafted(chains, cut(probs_BKV), cut(logits_BKV if spec.with_logits else None))


def _allowed(model: Computing, logits_NV: Tensor, rows: list[Row]) -> Tensor:
    """Apply each row's penalties, bans and form to the logits. If they leave no token, the row's logits stay as they
    are; the target will reject the draft."""
    allowed_N1V = constrain(raw_N1V := logits_NV.unsqueeze(1), rows, [[]] * len(rows), None, model.numbers)
    if allowed_N1V is raw_N1V:
        return logits_NV
    return torch.where(nothing_left(allowed_N1V), raw_N1V, allowed_N1V).squeeze(1)


def _next_batch(
    start: DraftStart,
    active: list[int],
    fed: list[int],
    new: list[list[int]],
    depth: int | None = None,
    masks: list[Tensor | None] | None = None,
) -> Batch:
    """Make the batch of the next forward: ``new`` tokens of the ``active`` rows, each row's after its ``fed`` drafted
    tokens in the cache. Their positions are consecutive, or all at one ``depth`` of a tree."""
    kv = start.kv
    counts = list(map(len, new))
    starts = [kv.starts[b] + kv.counts[b] + n for b, n in zip(active, fed)]
    depths = fed if depth is None else [depth] * len(active)
    positions = [start.positions[b] + at for b, at, count in zip(active, depths, counts) for _ in range(count)]
    batch = kv.cache.batch([kv.seqs[b] for b in active], starts, counts, masks)
    return Batch([token for tokens in new for token in tokens], positions, batch)


@dataclass
class _Tree:
    """The tree of a row while it grows."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # for each node, ln of the probability of its path
    fed: list[int] = field(default_factory=list)  # the nodes that were fed, in the order of their slots in the cache

    def add(self, token: int, parent: int, log_prob: float) -> int:
        """Add a node, and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(log_prob + (self.scores[parent] if parent >= 0 else 0.0))
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Return a node and its ancestors, the node first."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path

    def likeliest(self, count: int) -> tuple[list[int], list[int]]:
        """Return the tokens and parents of the ``count`` most likely nodes. No node is more likely than its parent, so
        these nodes include the parents."""
        chosen = sorted(sorted(range(len(self.tokens)), key=lambda node: -self.scores[node])[:count])
        number = {node: i for i, node in enumerate(chosen)} | {-1: -1}
        return [self.tokens[node] for node in chosen], [number[self.parents[node]] for node in chosen]

    def feed(self, nodes: list[int], text: int) -> Tensor:
        """Note that ``nodes`` are fed next. Return their mask [N, S]: a node sees the text, its ancestors and itself.
        ``text`` is the number of the text's tokens."""
        self.fed += nodes
        place = {node: text + at for at, node in enumerate(self.fed)}
        mask_NS = torch.zeros(len(nodes), text + len(self.fed), dtype=torch.bool)
        mask_NS[:, :text] = True
        for n, node in enumerate(nodes):
            mask_NS[n, [place[above] for above in self.path(node)]] = True
        return mask_NS


def _draft_trees(
    model: Computing,
    start: DraftStart,
    step: Step,
    growth: Growth,
    rows: abc.Sequence[Row],
    max_len: abc.Sequence[int],
) -> Drafted:
    kv = start.kv
    trees = [_Tree() for _ in rows]
    frontier = [(b, -1) for b in range(len(rows))]  # the row and the node that each line of logits follows
    logits_NV = start.logits_BV
    x_NC = start.x_BC
    for level, width in enumerate(growth.widths):
        # Grow: each followed token gets its likeliest successors.
        paths = [rows[b].fork(rows[b].policy, 0) for b, _ in frontier]
        for scratch, (b, node) in zip(paths, frontier):
            scratch.tokens += [trees[b].tokens[above] for above in reversed(trees[b].path(node))]
        logits_N1V = constrain(logits_NV.unsqueeze(1), paths, [[]] * len(paths), None, model.numbers)
        best_NW = top(logits_N1V.squeeze(1).log_softmax(-1), width)
        grown: list[list[tuple[int, int]]] = [[] for _ in rows]  # new nodes of each row, and the line that they follow
        for line, ((b, node), ids, log_probs) in enumerate(
            zip(frontier, best_NW.indices.tolist(), best_NW.values.tolist())
        ):
            for token, log_prob in zip(ids, log_probs):
                if log_prob > -torch.inf:  # a banned token can never be kept
                    grown[b].append((trees[b].add(token, node, log_prob), line))
        # Select: the likeliest new tokens are followed, unless they end their row.
        follow: dict[int, list[tuple[int, int]]] = {}
        for b, (row, tree) in enumerate(zip(rows, trees)):
            going = [each for each in grown[b] if tree.tokens[each[0]] not in row.stop_ids and max_len[b] > level + 1]
            if going:
                follow[b] = heapq.nlargest(growth.follow, going, key=lambda each: tree.scores[each[0]])
        if not follow or level + 1 == len(growth.widths):
            break
        # Go on: one forward over the followed tokens. Each sees its own path.
        nodes = {b: [node for node, _ in each] for b, each in follow.items()}
        fed = [len(trees[b].fed) for b in follow]
        masks: list[Tensor | None] = [trees[b].feed(new, kv.starts[b] + kv.counts[b]) for b, new in nodes.items()]
        new = [[trees[b].tokens[node] for node in each] for b, each in nodes.items()]
        before_NC = None if x_NC is None else x_NC[[line for each in follow.values() for _, line in each]]
        logits_NV, x_NC = step(_next_batch(start, list(follow), fed, new, level, masks), before_NC)
        frontier = [(b, node) for b, each in nodes.items() for node in each]
    subtrees = [tree.likeliest(growth.nodes) for tree in trees]
    return Drafted([tokens for tokens, _ in subtrees], parents=[parents for _, parents in subtrees])
