"""Executors: a folder or file for each kind of device, and how one is chosen (choice.py)."""

from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from fly.backends.choice import executor_of, load, load_executor, part_executor
else:
    __getattr__, __dir__ = find_late(__name__)

__all__ = ["executor_of", "load", "load_executor", "part_executor"]
