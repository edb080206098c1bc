"""Executors: a folder or file for each kind of device, and how one is chosen (choice.py)."""

from fly.backends.choice import executor_of, load, load_executor, part_executor

__all__ = ["executor_of", "load", "load_executor", "part_executor"]
