"""The executor on CUDA: it runs whole rounds as graphs where it can, and goes the plain way elsewhere.

The engine first tries ``takes`` and ``rounds``. These run whole rounds without a draft, or with drafts of prompt
lookup, a draft model, or a head's chain (rounds.py). Rows that ask for more take the plain way, as on any device: the
strategy drafts token by token, ``score`` runs the forwards, and the rules decide in tensors, operation by operation.
The log says once why.

Shape legend: T packed tokens, N places, B rows, R rows with padding, J positions of a row, C hidden width, F hidden
states side by side, V vocabulary.
"""

from __future__ import annotations

import itertools
import logging
from collections import abc
from contextlib import suppress
from functools import cache, partial, wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fly.backends.cuda.attention import PagedAttention, Slots, find_flash, find_trees, reads_pages, takes_pages
from fly.backends.cuda.device_round import Group
from fly.backends.cuda.footprint import measure_prompt, measure_round
from fly.backends.cuda.fused import fuse
from fly.backends.cuda.graphs import GraphPool
from fly.backends.cuda.int4 import Int4Linear
from fly.backends.cuda.ops import refuse_attention, refuse_layers, refuse_steps
from fly.backends.cuda.rounds import LONGEST, note_plain_way, take_rounds
from fly.backends.cuda.sampling import DeviceDistribution
from fly.backends.cuda.shapes import DeviceRounds, TooLarge, add_up
from fly.backends.cuda.table import FEW, PADDING, Column, Shape, count_pages, make_line, round_up
from fly.backends.heads import TorchHead
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache, block_size_for
from fly.models.compiled import CompiledLayers
from fly.models.llama import Llama, record_states
from fly.ops import upload
from fly.runner.executor import (
    WARM_ROWS,
    Batch,
    DraftSpec,
    Executor,
    RoundPlan,
    Rounds,
    Scores,
    TokenByToken,
    Workload,
    asks_between,
)
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling, ProcessedDistribution
from fly.types import Decision, Draft, Target

__all__ = ["CudaExecutor"]

_log = logging.getLogger("fly")
_FEW, _FEW_IN_ALL = 32, 512  # the most tokens of a row, and of a batch, that ``score`` runs as a graph


def _on_device(method: Any) -> Any:
    """Run a method with the executor's device as the current one, whichever thread calls it."""

    @wraps(method)
    def run(self: CudaExecutor, *args: Any, **options: Any) -> Any:
        with self.pool.current():
            return method(self, *args, **options)

    return run


class CudaExecutor(TorchExecutor):
    """Runs a ``fly.models.Llama`` on a CUDA device.

    Args:
        compiles_layers: whether layers may be compiled; false once that failed.
        pool: the memory that its graphs share. If several processes run the model together, its contexts are entered
            around waits and preparations, and a call takes a fixed number of rounds, so that all processes take the
            same number.
    """

    # The first time on a machine, compiling takes some ten seconds for each number of tokens. It begins after so many
    # rounds, which take as long, so compiling at most doubles the time of short work.
    compiles_after = 2000
    captures = True

    def __init__(self, model: Any, compiles_layers: bool = True, pool: GraphPool | None = None) -> None:
        super().__init__(model)
        self.pool = pool or GraphPool(self.device)
        self.compiles_layers = compiles_layers
        if isinstance(model, Llama):
            fuse(model)
            if any(isinstance(part, Int4Linear) for part in model.modules()):
                self.kernels = "torch-int4"
        self.budget: int | None = None  # bytes for a cache's rounds (``DeviceRounds``), once counted
        self._plain = ""  # why the last rows take the plain way; empty: ``rounds`` decides
        self._compiled_layers = cache(CompiledLayers)  # made on first use, as this imports torch's compiler
        self._rounds: WeakKeyDictionary[PagedKVCache, DeviceRounds] = WeakKeyDictionary()

    @property
    def weight_bytes(self) -> float:
        return 0.53 if self.kernels == "torch-int4" else super().weight_bytes  # scales and zeros included

    @_on_device
    def reserve(self, work: Workload, most: int) -> tuple[int, int]:
        rows = work.rows
        while (needed := self._count(work, rows)) > most and rows > 1:
            rows = (rows + 1) // 2
        return needed, rows

    def _count(self, work: Workload, rows: int) -> int:
        """Count the bytes that rounds and prompts take for so many rows, all sampled with top-p. The bytes of rounds
        become their budget (``DeviceRounds``)."""
        drafter: Any = work.drafter if work.drafter is not None and self.joins(work.drafter) else None
        count, k = round_up(rows), round_up(min(work.k, LONGEST))
        pages = -(-(min(self.config.max_position_embeddings, FEW) + k + 2) // work.block_size)
        shape = Shape(
            count, count, k, pages, draft_pages=pages if drafter is not None else 0, stops=4, top_p=True,
            spec=DraftSpec() if drafter is None else DraftSpec(reach=(1.0,)),
            states=tuple(range(drafter.options.inputs)) if isinstance(drafter, TorchHead) else (),
        )  # fmt: skip
        needs = measure_round(shape, (Group(work.policy.keyed, True, count),), self, drafter, work.block_size)
        # Count all shapes that are warmed up, at temperature 0 and above, and as many again for other shapes that
        # requests need.
        others = 4 * sum(warmed <= rows for warmed in WARM_ROWS) - 1
        self.budget = add_up([needs, *[needs] * others])
        prompt = measure_prompt(self, work.block_size, work.step_tokens, rows, work.scored)
        return self.budget + max(prompt.peak - needs.peak, 0)

    @_on_device
    def describe(self) -> list[str]:
        phrases = [f"{self.device} ({torch.cuda.get_device_name(self.device)})"]
        kind = self.device, self.dtype, self.config.head_dim
        refused = refuse_attention(*kind, block_size_for(self.device))
        if refused is None:
            phrases.append("attention by our Triton kernels")
        else:
            flash = self.dtype != torch.float32 and find_flash(*kind) is not None
            way = "FlashAttention over pages" if flash else "PyTorch's attention over copies of pages"
            phrases.append(f"attention by {way} (not by our Triton kernels: {refused})")
        refused = refuse_layers(self.device, self.dtype)
        phrases.append("fused layers" if refused is None else f"layers operation by operation ({refused})")
        refused = refuse_steps(self.device)
        phrases.append("fused steps" if refused is None else f"steps of a round operation by operation ({refused})")
        shapes = sum(key[0] for rounds in self._rounds.values() for key in rounds.made)
        phrases.append(f"{len(self.pool.captured)} CUDA graphs for {shapes} shapes of rounds")
        return phrases

    @property
    def prepared(self) -> int:
        return self.pool.prepared

    def deterministic(self) -> Executor:
        """Never compile layers: which operations compute a token must not depend on how often other shapes were
        used."""
        return TokenByToken(CudaExecutor(self.model, False, self.pool))

    def joins(self, drafter: Executor) -> bool:
        return isinstance(drafter, (CudaExecutor, TorchHead)) and drafter.device == self.device

    def takes(self, rows: abc.Sequence[Row]) -> bool:
        """Whether ``rounds`` can run these rows."""
        self._plain = "the draft strategy is asked before each round, or a cache has no room for several rounds"
        if any(map(asks_between, rows)):
            self._plain = "penalties, bans, a form, log-probabilities or explanations are asked for"
            return False
        return True

    @_on_device
    def rounds(self, plan: RoundPlan) -> Rounds | None:
        self._plain = ""  # if it refuses rows, ``take_rounds`` says why
        return take_rounds(self, plan, self._find_rounds(plan.kv.cache))

    def decide(self, rows: abc.Sequence[Row], target: Target, draft: Draft) -> list[Decision]:
        if self._plain:  # not for a prompt's round, or one that ``rounds`` refused
            note_plain_way(self._plain)
        self._plain = ""
        return super().decide(rows, target, draft)

    def process(self, sampling: BatchSampling, logits_BJV: Tensor) -> ProcessedDistribution:
        return DeviceDistribution(sampling, logits_BJV)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        kv: Any,
        states: dict[int, Tensor] | None = None,
        compiled: bool = False,
    ) -> Tensor:
        """Return the final hidden states [T, C]. Each key of ``states`` is a number of layers, and gets the residual
        stream after them (``fly.models.llama.record_states``). ``compiled``: run compiled layers, unless these have
        failed."""
        states = {} if states is None else states
        model = cast(Llama, self.model)
        hidden_TC = None
        if compiled and self.compiles_layers:
            try:
                hidden_TC = model(tokens_T, positions_T, kv, through=partial(self._compiled_layers(), states=states))
            except Exception as error:  # e.g. no Triton or C compiler; another error comes again below
                self.compiles_layers, reason = False, f"{type(error).__name__}: {error}".splitlines()[0]
                _log.warning("layers are not compiled, and run operation by operation in CUDA graphs: %s", reason)
        if hidden_TC is None:
            hidden_TC = model(tokens_T, positions_T, kv, through=record_states(states))
        return hidden_TC

    def logits(self, hidden_TC: Tensor, exact: bool = True) -> Tensor:
        """Return the logits [T, V] in float32, or in the head's own dtype, which is enough to find the likeliest
        tokens."""
        model = cast(Llama, self.model)
        return model.logits(hidden_TC) if exact or model.kept is not None else model.lm_head(hidden_TC)

    @_on_device
    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """Score by a graph if each row has a few tokens. More tokens, and trees, take one forward that needs nothing
        from the host. If no attention kernel reads pages in place, trees and prompts are attended row by row, with
        waits (``PagedBatch.attend``)."""
        kv = batch.kv
        if any(mask is not None for mask in kv.masks or ()):
            if not takes_pages(kv.cache):
                return super().score(batch, places, states)
            return self._score_many(batch, places, states)
        if max(kv.counts) <= _FEW and len(kv.counts) * max(kv.counts) <= _FEW_IN_ALL:
            with suppress(TooLarge):  # one forward takes less: it computes only wanted logits
                return self._score_few(batch, places, tuple(states))
        if not reads_pages(kv.cache):
            return super().score(batch, places, states)
        return self._score_many(batch, places, states)

    def _score_few(self, batch: Batch, places: abc.Sequence[int] | None, states: tuple[int, ...]) -> Scores:
        """Score as in a round: the tokens after each row's first one are its draft."""
        kv = batch.kv
        ends = itertools.accumulate(kv.counts, initial=0)
        new = [batch.tokens[first:end] for first, end in itertools.pairwise(ends)]
        k, rows = round_up(max(kv.counts) - 1), round_up(len(new))
        shape = Shape(rows, 0, k, count_pages(kv, k), states=states)
        round_ = self._find_rounds(kv.cache).find(shape, (), self, kv.cache)
        lines = [
            make_line({Column.LAST: tokens[0], Column.LENGTH: start + 1, Column.LEFT: 1})
            for tokens, start in zip(new, kv.starts)
        ]
        empty = rows - len(new)
        round_.table.load(lines + [make_line(PADDING)] * empty, kv, None, [*range(len(new)), *[-1] * empty])
        round_.propose([tokens[1:] for tokens in new])
        round_.rounds += 1
        scored = round_.score()
        every = [b * (k + 1) + n for b, count in enumerate(kv.counts) for n in range(count)]
        wanted = every if places is None else [every[place] for place in places]
        logits_NV = scored.logits_RJV.flatten(0, 1)[upload(wanted, self.device)].float()
        if scored.states_RJF is None:
            return Scores(logits_NV)
        return Scores(logits_NV, states_TF=scored.states_RJF.flatten(0, 1)[upload(every, self.device)])

    def _score_many(self, batch: Batch, places: abc.Sequence[int] | None, states: abc.Sequence[int]) -> Scores:
        """Score by one forward. One copy uploads everything that it needs from the host."""
        kv = batch.kv
        tables = kv.tables()
        slots = list[int]()
        for seq, start, count in zip(kv.seqs, kv.starts, kv.counts):
            row_slots = kv.cache.slots(seq, start, start + count)
            slots += range(row_slots.start, row_slots.stop) if isinstance(row_slots, slice) else row_slots
        used = [start + count for start, count in zip(kv.starts, kv.counts)]
        ends, width = [*itertools.accumulate(kv.counts, initial=0)], max(map(len, tables))
        parts = [batch.tokens, batch.positions, slots, [] if places is None else list(places), used, ends]
        parts.append([page for table in tables for page in table + [0] * (width - len(table))])
        uploaded = upload([number for part in parts for number in part], self.device)
        tokens_T, positions_T, slots_T, places_N, *rest = uploaded.split([len(part) for part in parts])
        used_B, ends_B1, pages = (numbers.to(torch.int32) for numbers in rest)
        batch_slots = Slots(slots_T, used_B, ends_B1, pages.view(-1, width), max(kv.counts))
        attention = PagedAttention(kv.cache, batch_slots, find_trees(kv))
        taken = dict.fromkeys(states, positions_T)
        hidden_TC = self.hidden(tokens_T, positions_T, attention, taken)
        states_TF = torch.cat([taken[number] for number in states], -1) if states else None
        if places is not None and not len(places):
            return Scores(torch.zeros(0, self.config.vocab_size, device=self.device), None, states_TF)
        return Scores(self.logits(hidden_TC if places is None else hidden_TC[places_N]), None, states_TF)

    def _find_rounds(self, cache: PagedKVCache) -> DeviceRounds:
        return self._rounds.setdefault(cache, DeviceRounds(self.pool, self.budget))
