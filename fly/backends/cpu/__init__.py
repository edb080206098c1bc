"""The compiled CPU path: plain C++ (``src/``), built with the package where there is a compiler, called by ctypes."""

from fly.backends.cpu.library import available, chosen, why_not
from fly.backends.cpu.model import CompiledLlama, compiled, int8_weights

__all__ = ["CompiledLlama", "available", "chosen", "compiled", "int8_weights", "why_not"]
