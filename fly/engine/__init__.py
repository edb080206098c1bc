"""The step and what calls it: the scheduler, the thread that owns the engine, and the streams that callers read."""

from fly.engine.step import Engine

__all__ = ["Engine"]
