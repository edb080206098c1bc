"""What differs between kinds of devices: where values are, what memory there is, how the host waits.

Outside of ``fly.backends``, no other module asks for a device's type. The rooms above the backends need these few
facts about tensors and memory. What a loaded model does on a device is asked of its executor
(``fly.runner.executor``). A new kind of device is a class here and an executor in ``fly.backends.choice``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DeviceKind", "Memory", "default_device", "kind_of", "on_host"]


class Memory(NamedTuple):
    """Bytes of a device's own memory."""

    free: int
    total: int


class DeviceKind:
    """A kind of device. This class answers for devices that PyTorch knows but fly has no code for."""

    page_tokens = 256  # tokens in a page of a cache
    pins = False  # whether a copy from pinned memory runs while the host goes on
    collectives = "gloo"  # the library of torch.distributed that connects such devices

    def why_missing(self, device: torch.device) -> str:
        """Return why ``device`` cannot be used here; empty if it can."""
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError, ImportError):  # torch's own text is a page
            return "PyTorch cannot allocate memory on it"
        return ""

    def count(self) -> int:
        """Return how many such devices this process sees."""
        return 1

    def at(self, number: int) -> torch.device:
        """Return the device with this number."""
        raise ValueError(f"there is no device number {number}: these devices have no numbers")

    def name(self, device: torch.device) -> str:
        """Return what its maker calls ``device``; empty if that is unknown."""
        return ""

    def memory(self, device: torch.device) -> Memory | None:
        """Return the device's own memory. None: its memory is the host's, or is unknown."""
        return None

    def release_memory(self) -> None:
        """Give back memory that PyTorch holds for tensors that are gone."""

    def largest_use(self) -> int:
        """Return the most bytes of their own memory that tensors took so far; 0 if unknown."""
        return 0

    def make_current(self, device: torch.device) -> None:
        """Let the calling thread use ``device`` where none is named."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until ``device`` has finished all its work."""

    def wait(self, device: torch.device) -> None:
        """Wait until ``device`` has finished what this thread has queued on its current stream."""

    def mark(self, device: torch.device) -> Callable[[], bool] | None:
        """Return a function that tells whether the work queued so far is done. None: nothing is queued, or the work is
        captured and not run."""
        return None


class _Host(DeviceKind):
    page_tokens = 4  # kernels read any block table, and with small pages a short text wastes little

    def why_missing(self, device: torch.device) -> str:
        return ""


class _Cuda(DeviceKind):
    pins = True
    collectives = "nccl"

    def why_missing(self, device: torch.device) -> str:
        return "" if torch.cuda.is_available() else "this build of torch sees no CUDA device"

    def count(self) -> int:
        return torch.cuda.device_count()

    def at(self, number: int) -> torch.device:
        return torch.device("cuda", number)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def memory(self, device: torch.device) -> Memory | None:
        return Memory(*torch.cuda.mem_get_info(device))

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def largest_use(self) -> int:
        return torch.cuda.max_memory_allocated()

    def make_current(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def wait(self, device: torch.device) -> None:
        if not (stream := torch.cuda.current_stream(device)).query():
            stream.synchronize()

    def mark(self, device: torch.device) -> Callable[[], bool] | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record()
        return event.query


_KINDS: dict[str, DeviceKind] = {"cpu": _Host(), "cuda": _Cuda()}
_OTHER = DeviceKind()


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the kind of a device."""
    return _KINDS.get(torch.device(device).type, _OTHER)


def on_host(place: torch.device | Tensor) -> bool:
    """Whether a device is the CPU, or a tensor is there: the host reads values without waiting, but allocates and
    searches memory slowly."""
    return (place if isinstance(place, torch.device) else place.device).type == "cpu"


def default_device() -> torch.device:
    """Return the device that ``"auto"`` means: the current CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
