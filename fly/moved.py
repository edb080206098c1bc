"""Where modules went that stood at the top of the package before version 0.4."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["report_moves"]

MOVED = {
    "fly.bundled": "fly.models.bundled",
    "fly.calls": "fly.llm",
    "fly.backends.cuda.waits": "fly.policies.waits",
    "fly.audit": "fly.extras.audit",
    "fly.bench": "fly.extras.bench",
    "fly.early_exit": "fly.extras.early_exit",
    "fly.eval": "fly.extras.eval",
    "fly.ray": "fly.extras.ray",
    "fly.runtime": "fly.runner",
    "fly.train": "fly.extras.train",
    "fly.vllm": "fly.extras.engines.vllm",
}


class _Finder:
    """Finds no module, and refuses those that have moved."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in MOVED:
            raise ModuleNotFoundError(f"{name} is {MOVED[name]} since version 0.4", name=name)
        return None


def report_moves() -> None:
    """Make an import of a module that has moved an error that names the new place."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)  # before a folder that an older checkout has left is taken for it
