"""What runs a model: one folder or file for each kind of device, and how ``fly.LLM`` chooses among them."""

from fly.backends.choice import executor_of, load, load_executor, part_executor

__all__ = ["executor_of", "load", "load_executor", "part_executor"]
