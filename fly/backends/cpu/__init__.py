"""Compiled CPU kernels: plain C++ (``src/``), built with the package if there is a compiler, called by ctypes."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.backends.cpu.dflash import CpuDFlashHead
    from fly.backends.cpu.executor import CpuExecutor
    from fly.backends.cpu.head import CpuHead, CpuPEagleHead, head_refusal
    from fly.backends.cpu.library import available, chosen, why_not
    from fly.backends.cpu.packed import PackedLlama, computes_as_stored, int8_weights, refusal
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = [
    "CpuDFlashHead",
    "CpuExecutor",
    "CpuHead",
    "CpuPEagleHead",
    "PackedLlama",
    "available",
    "chosen",
    "computes_as_stored",
    "head_refusal",
    "int8_weights",
    "refusal",
    "why_not",
]
