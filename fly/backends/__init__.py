"""What runs a model: one folder or file for each kind of device, and the choice among them, which ``fly.LLM`` makes."""

from fly.backends.choice import executor_of, load, load_executor, part_executor

__all__ = ["executor_of", "load", "load_executor", "part_executor"]
