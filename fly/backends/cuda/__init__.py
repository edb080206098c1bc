"""CUDA: whole rounds as captured graphs, one wait of the host a round.

Torch's attention kernels load slowly, and only a CUDA device needs them.
"""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.backends.cuda.executor import CudaExecutor
    from fly.backends.cuda.graphs import GraphPool
    from fly.backends.cuda.int4 import with_int4_weights
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = ["CudaExecutor", "GraphPool", "with_int4_weights"]
