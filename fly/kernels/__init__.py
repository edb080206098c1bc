"""The compiled CPU path: plain C++ (``src/``), built with the package where there is a compiler, called by ctypes."""

from fly.kernels.library import available, chosen, why_not
from fly.kernels.llama import CompiledLlama, compiled

__all__ = ["CompiledLlama", "available", "chosen", "compiled", "why_not"]
