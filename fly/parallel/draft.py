"""Place the draft: whole on every rank, or divided among all ranks like the target. Knows nothing of policies or
HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch

from fly.backends.choice import LoadExecutor
from fly.cache import PagedKVCache
from fly.config import Placement
from fly.drafts.base import DraftSetup, DraftStrategy, Loaded
from fly.parallel.plan import PlanError
from fly.parallel.ranks import Ranks
from fly.runner.executor import Batch, Executor, Head

__all__ = ["place_draft"]

_STEPS = 9  # number of decode steps to time for a placement


def place_draft(
    make: Callable[[], DraftStrategy | None],
    setup: DraftSetup,
    ranks: Ranks,
    load_part: LoadExecutor,
) -> DraftStrategy | None:
    """Make a strategy with ``make``, attach it to ``setup``, and return it, placed as ``ranks.draft_placement`` says:

    - ``replicated``: every rank has the whole draft and drafts for itself, without communication;
    - ``sharded``: its models are divided like the target (by ``load_part``), and all ranks draft together;
    - ``auto``: each model is loaded in both ways, replicated and sharded, and the one that decodes a token faster is
      kept. A model that cannot be divided is replicated.

    Raises:
        ValueError: an unknown placement, or one that is impossible for this strategy.
    """
    placement = ranks.draft_placement
    if placement not in get_args(Placement):
        raise ValueError(f"draft_placement {placement!r} is unknown; choices: {list(get_args(Placement))}")
    strategy = ranks.together(make, "the draft")
    if strategy is None:
        return None
    setup = setup.among_ranks(ranks.clock)  # a strategy that decides by time then decides the same on all ranks
    if placement == "replicated" or ranks.size == 1:
        return ranks.together(lambda: setup.attach(strategy), "the draft")

    load = setup.load_by

    def load_for_ranks(model: object, **options: Any) -> Loaded:
        if placement == "sharded":
            return load(model, by=load_part, **options)
        whole = ranks.together(lambda: load(model, **options), "the draft")
        if isinstance(model, Executor) or isinstance(whole.executor, Head):  # loaded already, or too small to divide
            return whole
        try:
            part = load(model, by=load_part, **options)
        except PlanError:
            return whole
        return part if ranks.share(_decode_seconds(part.executor) < _decode_seconds(whole.executor)) else whole

    return setup.among_ranks(ranks.clock, load_for_ranks).attach(strategy)


@torch.inference_mode()
def _decode_seconds(executor: Executor) -> float:
    """Return the median time that ``executor`` takes for one token, in seconds."""
    cache = PagedKVCache.for_model(executor, 1)
    cache.resize(0, 1)
    times = []
    for _ in range(_STEPS + 1):
        start = time.perf_counter()
        executor.score(Batch([0], [0], cache.batch([0], [0], [1]))).logits_NV[:, :1].tolist()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
