"""Compiled CPU kernels: plain C++ (``src/``), built with the package if there is a compiler, called by ctypes."""

from fly.backends.cpu.executor import CpuExecutor
from fly.backends.cpu.library import available, chosen, why_not
from fly.backends.cpu.packed import PackedLlama, int8_weights

__all__ = ["CpuExecutor", "PackedLlama", "available", "chosen", "int8_weights", "why_not"]
