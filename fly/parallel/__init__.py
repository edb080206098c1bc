"""One model on many processes: the sharding plan as data, launch, collectives, agreement, faults."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.parallel.draft import place_draft
    from fly.parallel.model import load, parallelise
    from fly.parallel.plan import LLAMA, LLAMA_WHOLE_SUMS, Part, PlanError, Rule
    from fly.parallel.ranks import Ranks, launch, memory_here
    from fly.parallel.start import start_ranks
    from fly.parallel.watch import CollectiveError, RankError
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = [
    "LLAMA",
    "LLAMA_WHOLE_SUMS",
    "CollectiveError",
    "Part",
    "PlanError",
    "RankError",
    "Ranks",
    "Rule",
    "launch",
    "load",
    "memory_here",
    "parallelise",
    "place_draft",
    "start_ranks",
]
