"""Divides memory after a model is loaded: how many tokens the caches hold, and how many rows a step may have."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

from fly.drafts.base import DraftSetup
from fly.runner.executor import Executor, Workload
from fly.runner.memory import CacheSize, Room, cache_size, divide_device, room_for
from fly.runner.runner import Runner

__all__ = ["find_room", "make_caches"]

_log = logging.getLogger("fly")


class Ranks(Protocol):
    """The part of ``fly.parallel.Ranks`` that is needed here."""

    def collect(self, value: Any) -> list[Any]: ...


def find_room(executor: Executor, work: Workload, size: CacheSize, ranks: Ranks | None) -> tuple[Room | None, int]:
    """Return the memory that caches may take on a device with memory of its own (else None), and how many rows a step
    may have.

    Args:
        executor: the target.
        work: the most work that the engine will give it.
        size: what the user said of the caches; its ``share`` is of the device's memory.
        ranks: the processes that share the model; None is this process alone.

    Raises ``ValueError`` if the weights leave nothing.
    """
    context = executor.config.max_position_embeddings
    # Who gives a size for caches has divided the device.
    share = size.share if size.tokens is None and size.bytes is None else 1.0
    room, rows = divide_device(executor.device, share, partial(executor.reserve, work), context)
    if ranks is not None:  # their devices may have less free
        rows = min(ranks.collect(rows))
    if rows < work.rows:
        _log.warning(
            f"max_rows is {rows}, not {work.rows}: rounds of more rows with k {work.k} would take more than a quarter "
            "of the memory that the weights leave"
        )
    return room, rows


def make_caches(
    target: Runner,
    setup: DraftSetup,
    size: CacheSize,
    block_size: int,
    room: Room | None,
    ranks: Ranks | None,
) -> None:
    """Make the caches of the target and of the draft's models.

    Args:
        target, setup: the target, and the setup that the draft was attached to.
        size, room: how much the caches hold, and what the device has room for (``fly.runner.memory.cache_size``).
        block_size: tokens in a page of the target's cache.
        ranks: the processes that share the models; all of their caches get the smallest size.

    Raises ``ValueError`` if not even one page fits, and ``MemoryError`` if memory runs out.
    """
    executor = target.executor
    token_bytes = target.bytes_per_token + setup.bytes_per_token
    tokens = cache_size(executor, token_bytes, block_size, size, room)
    if ranks is not None:  # free memory may differ between ranks, but all must admit the same requests
        tokens = min(ranks.collect(tokens))
    advice = "cache or max_context makes it smaller"
    with room_for(f"a cache of {tokens} tokens", token_bytes * tokens, executor.device, advice):
        target.reserve(tokens, block_size)
        setup.reserve(tokens)
