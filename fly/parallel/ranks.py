"""Processes that run one program together: launch, the few collectives that a forward needs, and agreement.

All ranks do the same things in the same order. The first rank gives the others all values that depend on chance or the
clock. Knows nothing of models, policies or HTTP.

Shape legend: T integers, W a rank's part of the last dimension, "..." any dimensions.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import resource
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fly.backends.choice import drop_graphs
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT, Placement
from fly.devices import default_device, kind_of, on_host
from fly.parallel.watch import PREPARING, CollectiveError, Progress, RankError, Watch

__all__ = ["Ranks", "Share", "launch", "memory_here"]

Share = TypeVar("Share")
_FOREVER = timedelta(days=365)  # no timeout, since a server may be idle for long; ``Watch`` finds ranks that are stuck
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Gathers one tensor from each rank into one. Torch versions with the newer name warn about the older.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as an int64
_LONGEST = 1 << 14  # a checksum begins with this many factors, one for each token of a forward


class Checksum:
    """A checksum of a series of integers, computed on their device. Nothing waits for the computation, and CUDA graphs
    can contain it. Once the host has waited for the device, ``host`` has the value.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.inference_mode(False):  # tensors made in inference mode cannot be changed outside it
            self.value = torch.ones(1, dtype=torch.int64, device=device)
            self.host = torch.zeros(1, dtype=torch.int64, pin_memory=kind_of(device).pins)
        self._factors: list[Tensor] = []  # the last entry is in use; captured graphs still read the earlier ones
        self._make_factors(_LONGEST)

    def _make_factors(self, count: int) -> None:
        self._factors.append(torch.arange(1, count + 1, device=self.device) * _ODD | 1)  # odd factors lose no bits

    def add(self, numbers_T: Tensor) -> None:
        """Add integers of at least 0. A call with more numbers than any before makes new factors. This must not happen
        while a graph is captured, so run the same work once before."""
        if len(numbers_T) > len(self._factors[-1]):
            self._make_factors(2 * len(numbers_T))
        self.value.mul_(_ODD).add_(((numbers_T + 1) * self._factors[-1][: len(numbers_T)]).sum())

    def leave(self) -> None:
        """Queue the copy of the value to ``host``."""
        self.host.copy_(self.value, non_blocking=True)

    def read(self) -> int:
        """Return the value that ``leave`` copied last. If the device is still busy, wait for it."""
        kind_of(self.device).wait(self.device)
        return int(self.host)


class Ranks:
    """One of the processes that share a model, and its collectives with the others.

    Args:
        group: the torch.distributed group for tensors on the device (NCCL or Gloo); None is every process.
        control: a Gloo group of the same processes, for messages between hosts; None takes ``group``.
        draft_placement, whole_sums: how models are divided among them (``fly.config.OfRanks``).

    ``random`` draws the same unpredictable numbers on every rank; its seed comes from the first rank.

    torch.compile can trace the collectives on tensors of the device (``sum_``, ``max_``, ``gather``, ``join``,
    ``note``), and CUDA graphs can capture them. Capture with ``capture_error_mode="thread_local"``, since another
    thread queries the device. Wait for the result of such a graph inside ``awaited``."""

    def __init__(
        self, group: Any = None, control: Any = None, draft_placement: Placement = "auto", whole_sums: bool = False
    ) -> None:
        self.draft_placement: Placement = draft_placement
        self.whole_sums = whole_sums
        self.group = dist.group.WORLD if group is None else group
        self.control = self.group if control is None else control
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.first = dist.get_global_rank(self.group, 0)  # type: ignore[arg-type]
        self.progress = Progress()
        self.watch: Watch | None = None
        self._forwards, self._agreed = 0, 0
        self._checksums: dict[torch.device, Checksum] = {}
        # Ranks that diverged send tensors of different lengths. NCCL then waits for ever, which ``Watch`` finds, but
        # Gloo aborts the process. So on Gloo, ranks are compared before each forward too.
        self.compares_forwards = dist.get_backend(self.group) == "gloo"
        self.random = random.Random(self.share(secrets.randbits(256)))

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def sum_(self, x: Tensor) -> Tensor:
        """Sum ``x`` over ranks in place. The result has the same bits on every rank."""
        if self.size > 1:
            x = x.contiguous()
            self._run(dist.all_reduce, x)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its largest value over ranks, element by element, in place."""
        if self.size > 1:
            self._run(dist.all_reduce, x, op=dist.ReduceOp.MAX)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the ``x`` of every rank, [ranks, ...]. All must have the same shape."""
        gathered = x.new_empty(self.size, *x.shape)
        self._run(_all_gather, gathered, x.contiguous().unsqueeze(0))
        return gathered

    def join(self, x: Tensor) -> Tensor:
        """Concatenate the ``x`` [..., W] of all ranks along the last dimension: [..., ranks * W]."""
        return x if self.size == 1 else torch.cat(self.gather(x).unbind(0), dim=-1)

    def share(self, value: Share | None, wait: bool = False) -> Share:
        """Return the first rank's value, on every rank. With ``wait``, no rank is blamed if it takes long."""
        box: list[Any] = [value]
        if self.size > 1:
            with self.awaited(count=not wait):
                dist.broadcast_object_list(box, src=self.first, group=self.control)
        return box[0]

    def collect(self, value: Share) -> list[Share]:
        """Return every rank's value, on every rank. No rank is blamed if it takes long."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with self.awaited(count=False):
                dist.all_gather_object(values, value, group=self.control)
        return values

    def clock(self) -> float:
        """Return the first rank's time in seconds, so that decisions that depend on time are the same on all ranks."""
        now = torch.tensor(time.perf_counter(), dtype=torch.float64)
        if self.size > 1:
            with self.awaited():
                dist.broadcast(now, src=self.first, group=self.control)
        return float(now)

    def together(self, work: Callable[[], Share], what: str) -> Share:
        """Return the result of ``work``, once it is done on every rank.

        Every rank raises the same error: the one that all ranks had, or else ``RankError`` with the ranks that failed.
        """
        result: Any = None
        error: Exception | None = None
        try:
            result = work()
        except CollectiveError:
            raise
        except Exception as caught:
            error = caught
        failures = self.collect(None if error is None else f"{type(error).__name__}: {error}")
        if any(failures):
            if error is not None and len(set(failures)) == 1:
                raise error
            summary = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
            raise RankError(f"{what} failed on some ranks: {summary}") from error
        return result

    def agree_on(self, error: Exception) -> None:
        """Return if every rank now has an error of this type: then a request caused it.

        Raises the error again if it concerns the group itself. If the other ranks have no error, for instance because
        only this one ran out of memory, they wait for it in a collective. The group then ends, and this does not
        return.
        """
        if isinstance(error, (CollectiveError, RankError)):
            raise error
        if self.size > 1 and self.watch is not None:
            self.watch.agree_on(error)

    def await_blame(self, error: BaseException) -> None:
        """After a failed collective, wait for the watch: it finds the rank to blame, reports it and ends this
        process."""
        if isinstance(error, CollectiveError) and self.watch is not None:
            time.sleep(2 * self.watch.heartbeat_timeout)

    def note(self, *tensors_T: Tensor) -> None:
        """Add the tokens and positions of this rank's next forward (integers of at least 0) to its checksum, for
        ``agree`` to compare. This neither waits nor sends, except on Gloo: there ranks compare their checksums at once.

        Raises ``RankError`` as ``agree`` does.
        """
        if self.size == 1 or tensors_T[0].is_meta:
            return
        self._forwards += 1
        lengths = repr([len(tensor_T) for tensor_T in tensors_T])
        self.progress.lengths = zlib.crc32(lengths.encode(), self.progress.lengths)
        (device,) = {tensor.device for tensor in tensors_T}
        if device not in self._checksums:
            self._checksums[device] = Checksum(device)
        checksum = self._checksums[device]
        for tensor_T in tensors_T:
            checksum.add(tensor_T)
        checksum.leave()
        if self.compares_forwards:
            self._compare()

    def agree(self, value: object = None) -> None:
        """Compare the ranks' checksums of everything that ``note`` and ``agree`` were called with so far, this plain
        ``value`` included. The host must have waited for the device before.

        Raises ``RankError`` on every rank, with the ranks that differ from the first.
        """
        if self.size > 1:
            self._agreed = zlib.crc32(repr(value).encode(), self._agreed)
            self._compare()

    def _compare(self) -> None:
        computed = zlib.crc32(repr([checksum.read() for checksum in self._checksums.values()]).encode(), self._agreed)
        own_state = torch.tensor([self._forwards, computed])
        states = [torch.empty_like(own_state) for _ in range(self.size)]
        with self.awaited():
            dist.all_gather(states, own_state, group=self.control)
        if different := [str(rank) for rank, state in enumerate(states) if not torch.equal(state, states[0])]:
            count = self._forwards
            self._forwards = 0  # report it once
            self._agreed = 0
            self._checksums = {}
            rank_names = ("rank " if len(different) == 1 else "ranks ") + ", ".join(different)
            raise RankError(f"ranks diverged: up to forward {count}, {rank_names} had other tokens than rank 0")

    def _run(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
        """Run a collective of the device's group. On CUDA this only queues it. Tensors without values are not
        exchanged."""
        if tensors[0].is_meta:
            return
        if torch.compiler.is_compiling():  # the caller waits for the whole graph inside ``awaited``
            collective(*tensors, group=self.group, **options)
            return
        with self.awaited():
            collective(*tensors, group=self.group, **options)
        device = tensors[0].device
        if (is_done := kind_of(device).mark(device)) is not None:
            self.progress.is_done = is_done

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Enter a context for work that may take one rank much longer than the others, such as compiling code; all
        ranks enter it. Meanwhile ranks wait ten times as long before they blame one."""
        self.progress.preparing = True
        try:
            yield
        finally:
            self.progress.preparing = False

    @contextmanager
    def awaited(self, count: bool = True) -> Iterator[None]:
        """Enter a context for a wait for the other ranks: a collective, or the result of a graph that contains
        collectives. All ranks enter it, and a rank that does not in time is blamed. A ``RuntimeError`` becomes a
        ``CollectiveError``."""
        if count:
            self.progress.entered += 1
            self.progress.since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(f"a collective failed: {error}") from error
        finally:
            self.progress.since = None


def memory_here() -> dict[str, int]:
    """Return bytes of memory: this process's own now (``own``), its largest resident size so far, mapped files included
    (``peak``), and its largest use of the accelerator (``device``). 0 means unknown."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError):  # not Linux
        status = Path("/proc/self/status").read_text("ascii")
        sizes = {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
    # getrusage would also count the process before it became this program, and its unit differs among systems
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    device = kind_of(default_device()).largest_use()
    return {"own": sizes.get("RssAnon", 0), "peak": sizes.get("VmHWM", peak), "device": device}


@contextmanager
def launch(
    *,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    collective_timeout: float = COLLECTIVE_TIMEOUT,
    draft_placement: Placement = "auto",
    whole_sums: bool = False,
    on_fault: Callable[[str], None] | None = None,
) -> Iterator[Ranks]:
    """Join the processes that torchrun or ``start_ranks`` started, until the block ends::

        with fly.parallel.launch() as ranks:
            llm = fly.LLM("checkpoints/large", draft="checkpoints/small", ranks=ranks)

    With CUDA devices, each process takes the one of its local rank, and NCCL connects them. Without, processes run on
    the CPU, and Gloo connects them. If within the block one rank is killed, stopped or stuck, or fails alone, all ranks
    end within seconds, with one message.

    Args:
        heartbeat_timeout: seconds without a sign of life after which a rank counts as lost.
        collective_timeout: seconds for which a rank waits in a collective before it blames those that do not come.
        draft_placement: where a draft given as text runs (``place_draft``).
        whole_sums: split no sum among ranks, so that their number does not change rounding (``LLAMA_WHOLE_SUMS``).
            Ranks then exchange more data.
        on_fault: called with the message before the process ends, in another thread.

    Raises:
        ValueError: this process was not started so, or a timeout is not above 0 and finite.
    """
    for name, seconds in (("heartbeat_timeout", heartbeat_timeout), ("collective_timeout", collective_timeout)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"{name} {seconds} must be a number of seconds above 0")
    # When torchrun starts the ranks again, its store still has the old keys. So each attempt has its own prefix.
    store, attempt = _connect(collective_timeout)
    # Start the watch before the first collective, since another rank may be gone by then.
    progress = Progress()
    rank = dist.get_rank()
    size = dist.get_world_size()
    watch_store = dist.PrefixStore(f"watch/{attempt}", store.clone())
    watch = Watch(watch_store, rank, size, progress, heartbeat_timeout, collective_timeout, on_fault)
    try:
        ranks = Ranks(None, dist.new_group(backend="gloo", timeout=_FOREVER), draft_placement, whole_sums)
        ranks.progress, ranks.watch = progress, watch
        yield ranks
    except BaseException as error:
        watch.leave(error)
        raise
    else:
        watch.leave()
    finally:
        drop_graphs()  # before it ends, NCCL waits for graphs that contain its collectives
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _connect(collective_timeout: float) -> tuple[Any, str]:
    """Join the group of the processes that torchrun started. Return torchrun's store, and how often it has started them
    again."""
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        raise ValueError(f"{missing} not set: ranks are started by start_ranks, or by torchrun --nproc-per-node N ...")
    store, rank, size = next(iter(dist.rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    device = _own_device(rank)
    kind = kind_of(device)
    kind.make_current(device)
    dist.init_process_group(
        kind.collectives,
        store=dist.PrefixStore(f"group/{attempt}", store),
        rank=rank,
        world_size=size,
        # The watch ends stuck ranks before NCCL does. Gloo's timeout would also end servers that are idle.
        timeout=timedelta(seconds=2 * PREPARING * collective_timeout) if kind.collectives != "gloo" else _FOREVER,
        device_id=None if on_host(device) else device,
    )
    return store, attempt


def _own_device(rank: int) -> torch.device:
    """Return this process's device: the one with its local rank's number, or the only one that it sees (Slurm or
    ``CUDA_VISIBLE_DEVICES`` may show each process its own). Without CUDA devices, all processes share the CPU.

    Raises ``ValueError`` if there are more processes on this machine than devices that they see.
    """
    device = default_device()
    if on_host(device):
        return device
    kind = kind_of(device)
    count = kind.count()
    local = int(os.environ.get("LOCAL_RANK", rank % count))
    if local >= count > 1:
        raise ValueError(
            f"LOCAL_RANK {local}: this process sees {count} CUDA devices; start at most {count} processes here, or let "
            "each see one device of its own (CUDA_VISIBLE_DEVICES)"
        )
    return kind.at(local if count > 1 else 0)
