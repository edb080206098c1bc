"""Free memory of a machine, the error when it runs out, and the size of caches."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from fly.cache import DEFAULT_BYTES
from fly.cache.paged import Cacheable
from fly.devices import kind_of
from fly.errors import shorten

__all__ = ["DEFAULT_SHARE", "CacheSize", "Room", "cache_size", "divide_device", "free_memory", "room_for"]

_log = logging.getLogger("fly")
DEFAULT_SHARE = 0.9  # of a device's own memory, for weights, work and caches together
_CONTEXTS = 8  # number of whole contexts that caches hold by default, if there is room
_BYTES = TypeAdapter(ByteSize)
_WITH_UNIT = re.compile(r"\s*(\d+|\d*\.\d+)\s*[A-Za-z]+\s*")  # pydantic takes more after it


@dataclass(frozen=True)
class CacheSize:
    """What the option ``cache`` says: one of the three is given, or none for the default.

    Attributes:
        tokens: how many tokens each cache holds over all requests.
        bytes: memory for the keys and values of target and draft together.
        share: the share of memory in (0, 1]: on the CPU of what is free after loading, for caches alone; on CUDA of the
            whole device, for weights, rounds, prompts and caches together.
    """

    tokens: int | None = None
    bytes: int | None = None
    share: float | None = None

    @staticmethod
    def parse(value: object) -> CacheSize:
        """Read an integer (tokens), a fraction (a share), or a text of either or of a size with its unit (``"8GiB"``).
        Raises ``ValueError``."""
        if value is None:
            return CacheSize()
        number: Any = value
        if isinstance(value, str):
            if _WITH_UNIT.fullmatch(value):
                with suppress(ValidationError):
                    if size := int(_BYTES.validate_python(value)):
                        return CacheSize(bytes=size)
            try:
                number = int(value) if value.strip().isdecimal() else float(value)
            except ValueError:
                number = None
        is_count = isinstance(number, Integral) and not isinstance(number, bool)
        if is_count and int(number) >= 1:
            return CacheSize(tokens=int(number))
        if isinstance(number, float) and 0 < number <= 1:
            return CacheSize(share=number)
        raise ValueError(
            f"cache {shorten(value)} must be a size ('8GiB'), a number of tokens of at least 1 (20000), or a share of "
            "memory in (0, 1] (0.5)"
        )


def free_memory(device: torch.device) -> int:
    """Return the free bytes of ``device``. If it has no memory of its own, these are the bytes that the system could
    give without swapping (cached files count as free), within the limits of this process and its control group."""
    if (device_memory := kind_of(device).memory(device)) is not None:
        return device_memory.free
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: assume that half of all memory is free
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(free, _free_in_group(), _free_in_process())


def _free_in_group(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes are left below the container's limit (cgroup v2), if it has one; cached files count as
    free."""
    try:
        limit = (root / "memory.max").read_text(encoding="utf-8").strip()
        used = int((root / "memory.current").read_text(encoding="utf-8"))
        facts = dict(line.split() for line in (root / "memory.stat").read_text(encoding="utf-8").splitlines())
        return sys.maxsize if limit == "max" else max(int(limit) - used + int(facts["inactive_file"]), 0)
    except (OSError, KeyError, ValueError):
        return sys.maxsize


def _free_in_process() -> int:
    """Return how many bytes of addresses are left below this process's limit (``ulimit -v``), if it has one."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # of Unix alone

        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
            return max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0)
    return sys.maxsize


@contextmanager
def room_for(what: str, needed: int, device: torch.device, advice: str, mapped: int = 0) -> Iterator[None]:
    """Turn any library's error that memory ran out, within this context, into a ``MemoryError``. Its message has the
    bytes that ``what`` needs, the bytes that were free, and ``advice``.

    ``mapped`` is the size of files that are mapped within the context. They count if addresses are limited
    (``ulimit -v``).
    """
    free, limited = free_memory(device), _free_in_process() < sys.maxsize
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        text = str(error).lower()
        ran_out = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or getattr(error, "errno", 0) == errno.ENOMEM
        if not ran_out and "allocate memory" not in text and "enough memory" not in text:
            raise
        addresses = f" and {mapped / 1e9:.2f} GB of addresses for its file" if mapped and limited else ""
        needs = f"{what} needs {needed / 1e9:.2f} GB of memory{addresses}"
        raise MemoryError(f"{needs}, and {free / 1e9:.2f} GB were free on {device}: {advice}") from error


@dataclass(frozen=True)
class Room:
    """The memory that caches may take on a device with memory of its own: ``budget`` bytes, for at most ``tokens``
    tokens. ``reason`` says in words how the bytes were computed."""

    budget: int
    tokens: int
    reason: str


def divide_device(
    device: torch.device, share: float | None, reserve: Callable[[int], tuple[int, int]], context: int
) -> tuple[Room | None, int]:
    """Divide the memory of a device that has its own between work and caches, after the weights are loaded.

    Args:
        share: the share of the whole device's memory that weights, work and caches may take together (``cache=0.9``);
            None is 0.9.
        reserve: a function from the most bytes that work may take (a quarter of what the weights leave) to the bytes
            that it takes, and the number of rows that these are for (``Executor.reserve``).
        context: the most tokens of a row.

    Returns the room for caches (None if the memory is the host's), and the number of rows. Raises ``ValueError`` if
    nothing is left.
    """
    kind = kind_of(device)
    kind.release_memory()  # what loading has left
    if (memory := kind.memory(device)) is None:
        return None, reserve(sys.maxsize)[1]
    free, total = memory
    share = DEFAULT_SHARE if share is None else share
    budget = int(share * total) - (total - free)
    whole = f"{share:.0%} of the {total / 1e9:.1f} GB of {device}"
    if budget <= 0:
        raise ValueError(
            f"{whole}: {(total - free) / 1e9:.1f} GB are in use already, by the weights or by other programs"
        )
    work, rows = reserve(budget // 4)
    in_use = f"{(total - free) / 1e9:.1f} GB in use and {work / 1e9:.1f} GB for rounds and prompts"
    return Room(budget - work, rows * context, f"{whole}, less {in_use},"), rows


def cache_size(model: Cacheable, token_bytes: int, block_size: int, size: CacheSize, room: Room | None = None) -> int:
    """Return how many tokens the caches of a loaded model and its draft will hold.

    Args:
        token_bytes: bytes that a token takes in all caches together.
        size: what the user said; its ``share`` is of the free memory, unless there is a ``room``. By default, caches
            take ``room``, or else 4 GiB, or half of the free memory if that is less.
        room: what the device has room for; None if its memory is the host's.

    Raises ``ValueError`` if not even one page fits.
    """
    if size.tokens is not None:
        return size.tokens
    context, free = model.config.max_position_embeddings, free_memory(model.device)
    most = _CONTEXTS * context
    advice = "cache or max_context"
    if size.bytes is not None:
        budget = size.bytes
        most = sys.maxsize
        reason = f"cache {budget} bytes"
    elif room is not None:
        budget = room.budget
        most = room.tokens
        reason = room.reason
        advice = "cache, max_rows or max_context"
    elif size.share is not None:
        budget = int(size.share * free)
        most = sys.maxsize
        reason = f"cache {size.share:g} of the {free / 1e9:.1f} GB free"
    elif free // 2 >= DEFAULT_BYTES:
        budget = DEFAULT_BYTES
        reason = f"the default, {DEFAULT_BYTES} bytes,"
    else:
        budget = free // 2
        reason = f"half of the {free / 1e9:.1f} GB free"
    tokens = min(most, budget // token_bytes // block_size * block_size)
    if tokens < 1:
        raise ValueError(
            f"{reason} hold no page of {block_size} tokens at {token_bytes} bytes a token, target and draft together"
        )
    if tokens < context:
        _log.warning(
            f"texts can have at most {tokens} tokens, though the model's context is {context}: {reason} hold no more, "
            f"at {token_bytes} bytes a token; set {advice}"
        )
    return tokens
