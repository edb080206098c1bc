"""The exchange between host and device: one line a row goes up, and one line a row comes down.

The lines that go up hold what a round needs about each row (``make_line``, ``Table.load``). They go up once a call,
since each round updates the table by itself. The lines that come down hold each round's decision (``pack`` on the
device, ``unpack`` on the host).

Shape legend: R rows (padding included), B rows of a group, W pages of a row, C columns of the state, S tokens of the
longest text, K longest draft, J = K + 1 positions, N tokens of a row, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from fly.backends.cuda.attention import reads_pages
from fly.backends.cuda.graphs import upload_into
from fly.backends.cuda.sampling import DeviceDistribution
from fly.cache import PagedBatch
from fly.ops import common_prefix
from fly.runner.executor import DraftSpec
from fly.runner.sampling import BatchSampling
from fly.types import Decision, Draft, Mismatch, Verdict, Why

__all__ = ["FEW", "PADDING", "Column", "Shape", "Table", "count_pages", "make_line", "pack", "round_up", "unpack"]

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_ANY_SPEC = DraftSpec()
FEW = 8192  # every row's table has room for so many tokens


def round_up(n: int) -> int:
    """Round up to the next of a few sizes, so that few graphs serve all batches; 0 stays 0."""
    return next((size for size in _SIZES if size >= n), n) if n else 0


class Column(IntEnum):
    """The columns of a row's state, int64. Columns ``NATS`` to ``REACH`` hold the bits of a float64. Columns from
    ``STOPS`` on hold the token ids that end the row, padded with -1."""

    BEFORE = 0  # the last token but one
    LAST = 1
    LENGTH = 2  # tokens so far
    LEFT = 3  # tokens it may still emit; 0 is padding
    K = 4
    CONTEXT = 5  # of the drafter
    SEED = 6
    GENERATED = 7
    RELAXED = 8
    LACKS = 9  # tokens before the last that the drafter has not cached
    FIRST = 10  # number of the first token that a draft head has cached; 0 for a draft model
    TOP_K = 11
    NATS = 12  # cost of the relaxed tokens so far
    TEMPERATURE = 13
    TOP_P = 14
    MIN_P = 15
    REACH = 16  # where its draft stops (``DraftSpec.reach``)
    STOPS = 17


def make_line(values: Mapping[Column, float], stop_ids: Collection[int] = (), stops: int = 0) -> list[int]:
    """Return a row's state as integers. Columns that are not given are 0, except temperature and top-p, which are a
    neutral 1."""
    values = {Column.TEMPERATURE: 1.0, Column.TOP_P: 1.0, **values}
    numbers = [values.get(column, 0) for column in Column if column < Column.STOPS]
    floats = numbers[Column.NATS :]
    bits = struct.unpack(f"{len(floats)}q", struct.pack(f"{len(floats)}d", *floats))
    return [*map(int, numbers[: Column.NATS]), *bits, *stop_ids, *[-1] * (stops - len(stop_ids))]


PADDING = {Column.LENGTH: 2}  # the state of a line without a row: nothing is left to emit


@dataclass(frozen=True)
class Shape:
    """The sizes for which the memory and the graphs of a round are made. Batches of one shape share both."""

    rows: int  # padding included
    drawn: int  # those above temperature 0, which stand first
    k: int
    pages: int  # of a row in the target's cache
    draft_pages: int = 0
    stops: int = 0  # ids that end a row
    spec: DraftSpec = _ANY_SPEC  # its ``reach`` only says whether rows have one
    top_k: int = 0  # the largest top-k of a row; 0: none
    top_p: bool = False
    min_p: bool = False
    text: int = 0  # tokens of a row's text that the device has room for
    states: tuple[int, ...] = ()  # the target's hidden states that are wanted (``Executor.score``)
    compiled: bool = False  # whether layers are compiled

    @property
    def copies(self) -> int:
        """How many tokens prompt lookup copies for each forward of a drafter. The forward predicts the token after
        them."""
        return min(self.spec.lookup.k, self.k - 1) if self.spec.lookup is not None and self.draft_pages else 0

    @property
    def ends_early(self) -> bool:
        """Whether a draft may take fewer than K forwards."""
        return self.k > 1 and (self.spec.stops or self.copies > 0)


class Table:
    """The state of each row (``Column``), its pages in the target's and the drafter's cache, and its text if prompt
    lookup reads it."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.state_RC = torch.zeros(shape.rows, Column.STOPS + shape.stops, dtype=torch.int64, device=device)
        self.pages_RW = torch.zeros(shape.rows, shape.pages + shape.draft_pages, dtype=torch.int32, device=device)
        self.target_pages_RW, self.draft_pages_RW = self.pages_RW.split([shape.pages, shape.draft_pages], 1)
        self.text_RS = torch.zeros(shape.rows, shape.text, dtype=torch.int64, device=device)
        self._loaded_pages: list[list[int]] = []
        self._known_texts: list[list[int]] = [[] for _ in range(shape.rows)]

    def load(self, lines: list[list[int]], kv: PagedBatch, draft_kv: PagedBatch | None, order: list[int]) -> None:
        """Upload the state of each row, and the pages if they have changed. ``order`` is the number in ``kv`` of each
        line's row; -1 is padding."""
        upload_into(self.state_RC, torch.tensor(lines))
        pages: list[list[int]] = [[] for _ in order]
        for batch, width in ((kv, self.shape.pages), (draft_kv, self.shape.draft_pages)):
            if batch is not None:
                tables = [*batch.tables(), []]  # number -1, padding, has no pages
                for line, b in zip(pages, order):
                    line += tables[b] + [batch.cache.nobody] * (width - len(tables[b]))
        if pages != self._loaded_pages:
            upload_into(self.pages_RW, torch.tensor(pages, dtype=torch.int32))
            self._loaded_pages = pages

    def load_texts(self, texts: Sequence[list[int]]) -> None:
        """Upload the part of each line's text that the device does not know yet."""
        if not self.shape.text:
            return
        for text_S, text, known in zip(self.text_RS, texts, self._known_texts):
            if (start := common_prefix(known, text)) < len(text):
                upload_into(text_S[start : len(text)], torch.tensor(text[start:]))
        self.note_texts(texts)

    def note_texts(self, texts: Sequence[list[int]]) -> None:
        """Note that the device knows these texts, because rounds write what they emit."""
        self._known_texts = [list(text) for text in texts] if self.shape.text else []

    def write_text(self, start_R: Tensor, tokens_RN: Tensor) -> None:
        """Write tokens into the texts, from place ``start_R`` on."""
        if self.shape.text:
            at_RN = start_R.unsqueeze(1) + torch.arange(tokens_RN.shape[1], device=self.device)
            self.text_RS.scatter_(1, at_RN.clamp_max(self.shape.text - 1), tokens_RN)

    def column(self, which: Column) -> Tensor:
        """Return a column of the state [R], float64 from ``NATS`` on. Writing to it changes the state."""
        column_R = self.state_RC[:, which]
        return column_R.view(torch.float64) if which >= Column.NATS else column_R

    def is_end(self, tokens_RN: Tensor) -> Tensor:
        """Return whether each token ends its row, bool [R, N]."""
        return (tokens_RN.unsqueeze(2) == self.state_RC[:, Column.STOPS :].unsqueeze(1)).any(2)

    def process(self, rows: slice, logits_BJV: Tensor) -> DeviceDistribution:
        """Return the processed distribution of some rows above temperature 0."""
        columns = (Column.TEMPERATURE, Column.TOP_P, Column.MIN_P)
        temperature_B, top_p_B, min_p_B = (self.column(which)[rows].float() for which in columns)
        sampling = BatchSampling(
            temperature_B, self.column(Column.TOP_K)[rows], top_p_B, min_p_B,
            greedy_B=torch.zeros_like(temperature_B, dtype=torch.bool), some_greedy=False,
            most_k=self.shape.top_k, top_p=self.shape.top_p, min_p=self.shape.min_p,
        )  # fmt: skip
        return DeviceDistribution(sampling, logits_BJV)


def count_pages(kv: PagedBatch, k: int) -> int:
    """Return how many pages a row's table has room for. Padding may lie beyond them.

    If pages are read in place, unused ones cost little, so there is room for 8,192 tokens, or for the whole context if
    that is shorter. Longer texts, and pages that are copied, get as many as are reserved, rounded up to a power of two.
    """
    allocator, longest = kv.cache.allocator, max(map(kv.cache.allocator.length, kv.seqs))
    if reads_pages(kv.cache) and longest <= (few := min(kv.cache.context, FEW)):
        return allocator.blocks_for(few + k + 2)
    return 1 << (allocator.blocks_for(longest + k + 2) - 1).bit_length()


def pack(
    draft: Draft, choices_RJ: Tensor, verdict: Verdict, cost_RK: Tensor | None, costs: Sequence[Tensor] = ()
) -> Tensor:
    """Pack decisions into [R, columns] int32, so that one download brings them all.

    A line holds the number of drafted tokens, the number of accepted ones, and the token after them; then the K drafted
    tokens; then the target's J likeliest tokens. If the rule excuses mismatches, five things follow for each drafted
    token: why it is kept, whether conditions were asked about it, the cost of keeping it (float32), whether each
    condition held, and its cost by each budget of the rule (float32).

    Args:
        cost_RK: -ln target(token), or None for a rule that excuses nothing.
        costs: by each budget of the rule, float32 [R, K].
    """
    columns = [draft.lengths_B.unsqueeze(1), verdict.accepted_B.unsqueeze(1), verdict.next_token_B.unsqueeze(1)]
    columns += [draft.tokens_BK, choices_RJ]
    if cost_RK is not None:
        columns += [verdict.why_BK, verdict.asked_BK, cost_RK.view(torch.int32), *verdict.clauses.values()]
        columns += [each_RK.view(torch.int32) for each_RK in costs]
    return torch.cat([column.to(torch.int32) for column in columns], dim=1)


def _read_float(bits: int) -> float:
    """Return the float32 that an int32 holds."""
    (value,) = struct.unpack("f", struct.pack("i", bits))
    return float(value)


def unpack(line: Sequence[int], k: int, relaxes: bool, conditions: Sequence[str], budgets: Sequence[str]) -> Decision:
    """Return the decision about one row from its ``line``. ``conditions`` and ``budgets`` are the names of its rule's
    conditions and budgets."""
    count, accepted, next_token, *rest = line
    drafted = rest[:count]
    choices = rest[k : k + count + 1]
    rest = rest[2 * k + 1 :]
    mismatches = list[Mismatch]()
    if relaxes:
        why, was_asked, cost, *more = (rest[n * k : n * k + count] for n in range(3 + len(conditions) + len(budgets)))
        for node in range(count):
            stands = node < accepted and why[node] == Why.RELAXED
            if stands or (conditions and was_asked[node]):
                answers = {name: bool(column[node]) for name, column in zip(conditions, more)}
                if not stands:
                    mismatches.append(Mismatch(node, stands, answers, 0.0))
                    continue
                paid = {name: _read_float(column[node]) for name, column in zip(budgets, more[len(conditions) :])}
                mismatches.append(Mismatch(node, stands, answers, _read_float(cost[node]), paid))
    return Decision(drafted, range(accepted), next_token, accepted == count, choices, mismatches)
