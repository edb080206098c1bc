"""How much memory a machine has free, what an error says when it runs out, and the default size of caches."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from fly.cache import DEFAULT_BYTES
from fly.cache.paged import Cacheable

__all__ = ["cache_size", "free_memory", "room_for"]

_log = logging.getLogger("fly")
_CONTEXTS = 8  # number of whole contexts that caches hold by default, if there is room


def free_memory(device: torch.device) -> int:
    """Return the free bytes of ``device``. On the CPU this is what the system could give without swapping, cached files
    included, within the limits of this process and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: assume that half of all memory is free
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(free, _free_in_group(), _free_in_process())


def _free_in_group(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes below the limit of a container, if there is one (cgroup v2); cached files count as free."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        facts = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return sys.maxsize if limit == "max" else max(int(limit) - used + int(facts["inactive_file"]), 0)
    except (OSError, KeyError, ValueError):
        return sys.maxsize


def _free_in_process() -> int:
    """Return the bytes of addresses below this process's own limit (``ulimit -v``), if it has one."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # of Unix alone

        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            return max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0)
    return sys.maxsize


@contextmanager
def room_for(what: str, needed: int, device: torch.device, advice: str, mapped: int = 0) -> Iterator[None]:
    """Within this context, any library's error that memory ran out becomes a ``MemoryError``, which says how many bytes
    ``what`` needs, how many were free, and what to do.

    ``mapped`` is the size of files that are mapped meanwhile. They count where addresses are limited (``ulimit -v``).
    """
    free, limited = free_memory(device), _free_in_process() < sys.maxsize
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        text = str(error).lower()
        ran_out = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or getattr(error, "errno", 0) == errno.ENOMEM
        if not ran_out and "allocate memory" not in text and "enough memory" not in text:
            raise
        beside = f" and {mapped / 1e9:.2f} GB of addresses for its file" if mapped and limited else ""
        needs = f"{what} needs {needed / 1e9:.2f} GB of memory{beside}"
        raise MemoryError(f"{needs}, and {free / 1e9:.2f} GB were free on {device}: {advice}") from error


def cache_size(model: Cacheable, each: int, block_size: int, given: int | None, share: float | None) -> int:
    """Return how many tokens the caches of a loaded model and its draft will hold.

    Args:
        each: bytes that a token takes in all of them.
        given: bytes that they may take; None is 4 GiB, or half of the free memory if that is less.
        share: instead of ``given``, the share of the free memory.

    Raises ``ValueError`` for a share outside (0, 1], and if not even one page fits.
    """
    context, free = model.config.max_position_embeddings, free_memory(model.device)
    most = _CONTEXTS * context
    if share is not None:
        if not 0 < share <= 1:
            raise ValueError(f"cache_share {share} must be in (0, 1]")
        budget, most, reason = int(share * free), sys.maxsize, f"cache_share {share} of the {free / 1e9:.1f} GB free"
    elif given is not None:
        budget, reason = given, f"cache_bytes {given}"
    elif free // 2 >= DEFAULT_BYTES:
        budget, reason = DEFAULT_BYTES, f"the default cache_bytes {DEFAULT_BYTES}"
    else:
        budget, reason = free // 2, f"half of the {free / 1e9:.1f} GB free"
    tokens = min(most, budget // each // block_size * block_size)
    if tokens < 1:
        raise ValueError(
            f"{reason} hold no page of {block_size} tokens at {each} bytes a token, target and draft together"
        )
    if tokens < context:
        _log.warning(
            f"texts can have at most {tokens} tokens, though the model's context is {context}: {reason} hold no more, "
            f"at {each} bytes a token; set cache_bytes, cache_share or max_context"
        )
    return tokens
