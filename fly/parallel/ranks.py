"""Processes that run one program together: launch, the few collectives a forward needs, and agreement.

All ranks do the same things in the same order; what depends on chance or the clock comes from the first. Knows nothing
of models, policies or HTTP.
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

from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT
from fly.parallel.watch import PREPARING, CollectiveError, Progress, RankError, Watch

__all__ = ["Ranks", "Share", "follow", "launch", "launched", "lead", "memory_here"]

Share = TypeVar("Share")
_FOREVER = timedelta(days=365)  # a server may be idle for long; the watch notices what a timeout would
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of one tensor into one; where torch has the newer name, the older one warns.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as an int64
_LONGEST = 1 << 14  # tokens of a forward that a checksum has factors for from the start


class Checksum:
    """A checksum of whole numbers in their order, kept on their device: it grows by what is queued there, so that
    nothing waits for it, and a CUDA graph can hold it. ``host`` has its value once the host has waited for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.inference_mode(False):  # what is made inside of that mode can be changed only there
            self.value = torch.ones(1, dtype=torch.int64, device=device)
            self.host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._kept: list[Tensor] = []  # all factors so far: graphs go on reading those that they were captured with
        self._make_factors(_LONGEST)

    def _make_factors(self, count: int) -> None:
        self._factors = torch.arange(1, count + 1, device=self.device) * _ODD | 1  # odd: no number's bits are lost
        self._kept.append(self._factors)

    def add(self, numbers_T: Tensor) -> None:
        """Take in numbers of at least 0. Of more than ever before only while no graph is captured, which a run that
        warms it up sees to."""
        if len(numbers_T) > len(self._factors):
            self._make_factors(2 * len(numbers_T))
        self.value.mul_(_ODD).add_(((numbers_T + 1) * self._factors[: len(numbers_T)]).sum())

    def leave(self) -> None:
        """Queue the copy that ``host`` gets."""
        self.host.copy_(self.value, non_blocking=True)

    def read(self) -> int:
        """The value last left; waits only if the device is still at work."""
        if self.device.type == "cuda" and not (stream := torch.cuda.current_stream(self.device)).query():
            stream.synchronize()
        return int(self.host)


class Ranks:
    """This process among those that share a model.

    Args:
        group: of torch.distributed, for tensors on the device (NCCL or Gloo); None is every process.
        control: a Gloo group of the same processes, for messages between hosts; None takes ``group``.
        check_every: steps (and forwards) between two comparisons of what ranks compute with (0 never compares).

    ``random`` draws the same unpredictable numbers on every rank, from a key of the first rank.

    Work on tensors of the device (``sum_``, ``max_``, ``gather``, ``join``, ``spread``, ``note``) needs nothing from
    the host that a graph could not hold: torch.compile traces it, and CUDA graphs capture it (with
    ``capture_error_mode="thread_local"``, since another thread asks the device how far it is). A caller that replays
    such a graph waits for its result inside ``awaited``."""

    def __init__(self, group: Any = None, control: Any = None, check_every: int = 1) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.control = self.group if control is None else control
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.first = dist.get_global_rank(self.group, 0)  # type: ignore[arg-type]
        self.progress = Progress()
        self.watch: Watch | None = None
        self.check_every, self._steps, self._forwards, self._said = check_every, 0, 0, 0
        self._checksums: dict[torch.device, Checksum] = {}
        # Ranks that bring other lengths wait for one another on CUDA; Gloo ends the process by force.
        self.compares_forwards = dist.get_backend(self.group) == "gloo"
        self.random = random.Random(self.share(secrets.randbits(256)))

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which talks to the world."""
        return self.rank == 0

    def sum_(self, x: Tensor) -> Tensor:
        """``x``, summed over ranks in place: the same bits on every rank."""
        if self.size > 1:
            x = x.contiguous()
            self._run(dist.all_reduce, x)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """``x``, the largest over ranks, in place."""
        if self.size > 1:
            self._run(dist.all_reduce, x, op=dist.ReduceOp.MAX)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The ``x`` of every rank, all of one shape: [ranks, ...]."""
        found = x.new_empty(self.size, *x.shape)
        self._run(_all_gather, found, x.contiguous().unsqueeze(0))
        return found

    def join(self, x: Tensor) -> Tensor:
        """The last dimensions [..., W] of all ranks, side by side: [..., ranks * W]."""
        return x if self.size == 1 else torch.cat(self.gather(x).unbind(0), dim=-1)

    def spread(self, x: Tensor) -> Tensor:
        """``x`` of the first rank, written into that of the others, which has its shape and type."""
        if self.size > 1:
            x = x.contiguous()
            self._run(dist.broadcast, x, src=self.first)
        return x

    def share(self, value: Share | None, wait: bool = False) -> Share:
        """The first rank's value, on every rank. ``wait``: it may take long, which is not an error."""
        box = [value if self.rank == 0 else None]
        if self.size > 1:
            with self.awaited(count=not wait):
                dist.broadcast_object_list(box, src=self.first, group=self.control)
        return box[0]  # type: ignore[return-value]

    def collect(self, value: Share) -> list[Share]:
        """Every rank's value, on every rank; taking long is not an error."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            with self.awaited(count=False):
                dist.all_gather_object(found, value, group=self.control)
        return found

    def clock(self) -> float:
        """Seconds by the first rank's clock, so that decisions that depend on time are the same on all ranks."""
        now = torch.tensor(time.perf_counter(), dtype=torch.float64)
        if self.size > 1:
            with self.awaited():
                dist.broadcast(now, src=self.first, group=self.control)
        return float(now)

    def together(self, work: Callable[[], Share], what: str) -> Share:
        """The result of ``work`` here, once it is done on every rank.

        Raises, on every rank, the error that all have in common, or else ``RankError`` naming the ranks that failed.
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
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
            raise RankError(f"{what} failed on some ranks: {said}") from error
        return result

    def agree_on(self, error: Exception) -> None:
        """Return if every rank has an error of this type now, as is so when a request is to blame.

        Raises the error again if it is about the group itself. If only one rank has an error (out of memory, say), the
        others wait for it in a collective: the whole group ends, and this does not return.
        """
        if isinstance(error, (CollectiveError, RankError)):
            raise error
        if self.size > 1 and self.watch is not None:
            self.watch.agree_on(error)

    def await_blame(self, error: BaseException) -> None:
        """After a failed collective, wait for the watch: it knows which rank is to blame, reports it, and ends this
        process."""
        if isinstance(error, CollectiveError) and self.watch is not None:
            time.sleep(2 * self.watch.heartbeat_timeout)

    def note(self, *tensors_T: Tensor) -> None:
        """Take in what this rank is about to compute with, whole numbers of at least 0, for the next ``agree``. Neither
        waits nor sends, save on Gloo, where ranks compare it at once.

        Raises ``RankError`` as ``agree``.
        """
        if self.size == 1 or not self.check_every:
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
        if self.compares_forwards and not self._forwards % self.check_every:
            self._compare()

    def agree(self, said: object = None) -> None:
        """On every ``check_every``-th call, compare among ranks what they have computed with since they began, and the
        plain values that each has ``said``. The host must have waited for the device before.

        Raises ``RankError`` on every rank, naming those that differ from the first.
        """
        if self.size == 1 or not self.check_every:
            return
        self._steps += 1
        self._said = zlib.crc32(repr(said).encode(), self._said)
        if not self._steps % self.check_every:
            self._compare()

    def _compare(self) -> None:
        computed = zlib.crc32(repr([checksum.read() for checksum in self._checksums.values()]).encode(), self._said)
        mine = torch.tensor([self._forwards, computed])
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.awaited():
            dist.all_gather(found, mine, group=self.control)
        if different := [rank for rank, theirs in enumerate(found) if not torch.equal(theirs, found[0])]:
            count, self._forwards, self._said, self._checksums = self._forwards, 0, 0, {}  # it is said once
            raise RankError(
                f"ranks diverged: up to forward {count}, {'ranks' if len(different) > 1 else 'rank'} "
                f"{', '.join(map(str, different))} had other tokens than rank 0"
            )

    def _run(self, collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
        """A collective of the device's group. On CUDA it is only queued when this returns."""
        if torch.compiler.is_compiling():  # what a graph does is noted where it is waited for
            collective(*tensors, group=self.group, **options)
            return
        with self.awaited():
            collective(*tensors, group=self.group, **options)
        if tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing():
            with torch.cuda.device(tensors[0].device):
                event = torch.cuda.Event()
                event.record()
            self.progress.over = event.query

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Entered by all ranks around work that takes one of them longer than others: the first run of new code, which
        is compiled then. While it lasts, ranks wait ten times as long before they blame one."""
        self.progress.preparing = True
        try:
            yield
        finally:
            self.progress.preparing = False

    @contextmanager
    def awaited(self, count: bool = True) -> Iterator[None]:
        """Entered by all ranks around a wait for the others: a collective, or the result of a graph that holds some.
        A rank that does not come in time is to blame; a ``RuntimeError`` becomes a ``CollectiveError``."""
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
    """Bytes this process has of its own now (``own``), the most it ever had resident, mapped files included (``peak``),
    and the most it ever took of its accelerator (``device``); 0 if unknown."""
    said: dict[str, str] = {}
    with contextlib.suppress(OSError):
        said = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text("ascii"), re.MULTILINE))
    # getrusage would also count the process before it became this program, and its unit differs among systems
    unit = 1 if sys.platform == "darwin" else 1024
    peak = int(said["VmHWM"]) if "VmHWM" in said else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 1024
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"own": int(said.get("RssAnon", 0)) * 1024, "peak": peak * 1024, "device": device}


def launched() -> bool:
    """Whether this process was started by torchrun, or with the variables that torchrun sets."""
    return all(name in os.environ for name in _VARIABLES)


@contextmanager
def launch(
    *,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    collective_timeout: float = COLLECTIVE_TIMEOUT,
    on_fault: Callable[[str], None] | None = None,
    check_every: int = 1,
) -> Iterator[Ranks]:
    """Join the processes that torchrun started, until the block ends::

        with fly.parallel.launch() as ranks:
            llm = fly.LLM("checkpoints/large", draft="checkpoints/small", ranks=ranks)

    CUDA devices are used with NCCL, one a process by its local rank; without any, the CPU with Gloo. Within the block
    a rank that is killed, stopped, stuck or fails alone ends all of them within seconds, with one message.

    Args:
        heartbeat_timeout: seconds without a sign of life after which a rank counts as lost.
        collective_timeout: seconds for which a rank waits in a collective before it blames those that do not come.
        on_fault: is given the message before the process ends (in a thread of its own).
        check_every: steps between two comparisons of the tokens that ranks compute with.

    Raises:
        ValueError: this process was not started by torchrun, or a timeout is no number of seconds.
    """
    timeouts = {"heartbeat_timeout": heartbeat_timeout, "collective_timeout": collective_timeout}
    for name, seconds in timeouts.items():
        if not 0 < seconds < math.inf:
            raise ValueError(f"{name} {seconds} must be a number of seconds above 0")
    if missing := [name for name in _VARIABLES if name not in os.environ]:
        raise ValueError(f"{missing} not set: ranks are started by torchrun --nproc-per-node N ...")
    store, rank, size = next(iter(dist.rendezvous("env://")))
    # torchrun keeps its store when it starts the ranks again, and what was said in it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    device = None
    if cuda := torch.cuda.is_available():
        torch.cuda.set_device(device := _own_device(rank))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore(f"group/{attempt}", store),
        rank=rank,
        world_size=size,
        # The watch speaks first; what it cannot end, NCCL does. Gloo's would also end servers that are idle.
        timeout=timedelta(seconds=2 * PREPARING * collective_timeout) if cuda else _FOREVER,
        device_id=device,
    )
    # Watched from the first collective on: the others may be gone before it.
    progress = Progress()
    watch_store = dist.PrefixStore(f"watch/{attempt}", store.clone())
    watch = Watch(watch_store, rank, size, progress, heartbeat_timeout, collective_timeout, on_fault)
    try:
        ranks = Ranks(control=dist.new_group(backend="gloo", timeout=_FOREVER), check_every=check_every)
        ranks.progress, ranks.watch = progress, watch
        yield ranks
    except BaseException as error:
        watch.leave(error)
        raise
    else:
        watch.leave()
    finally:
        # NCCL waits for graphs that hold its collectives before it ends.
        if (graphs := sys.modules.get("fly.backends.cuda.graphs")) is not None:
            graphs.drop_graphs()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _own_device(rank: int) -> torch.device:
    """This process's CUDA device: by its number on this machine, or the only one that it sees, where whoever started
    it gave each process its own (Slurm, ``CUDA_VISIBLE_DEVICES``).

    Raises ``ValueError`` if there are more processes on this machine than devices that they see.
    """
    count = torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", rank % count))
    if local >= count > 1:
        raise ValueError(
            f"LOCAL_RANK {local}: this process sees {count} CUDA devices; start at most {count} processes here, or let "
            "each see one device of its own (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda", local if count > 1 else 0)


_END = "end"


class lead:
    """The first rank of a group that takes requests: ``lead(ranks, handle)(message)`` has every rank do
    ``handle(message)`` and gives the first one's result; the others are in ``follow(ranks, handle)`` until ``close``.

    ``handle`` must do the same for the same messages in the same order. An error that all ranks raise is the message's
    own, and raised here; any other ends the group (``RankError``).
    """

    def __init__(self, ranks: Ranks, handle: Callable[[Any], Any]) -> None:
        if not ranks.leads:
            raise ValueError(f"rank {ranks.rank} cannot lead; rank 0 does, and the others follow")
        self.ranks, self.handle = ranks, handle

    def __call__(self, message: Any) -> Any:
        try:
            self.ranks.share((message,), wait=True)
            return self.ranks.together(lambda: self.handle(message), "a request")
        except CollectiveError as error:
            self.ranks.await_blame(error)
            raise

    def close(self) -> None:
        """Let the others go."""
        self.ranks.share(_END, wait=True)


def follow(ranks: Ranks, handle: Callable[[Any], Any]) -> None:
    """Do what the first rank says, until it ends (see ``lead``)."""
    while True:
        said: Any = ranks.share(None, wait=True)
        if said == _END:
            return
        (message,) = said
        try:
            ranks.together(lambda message=message: handle(message), "a request")  # type: ignore[misc]
        except (CollectiveError, RankError):
            raise
        except Exception:  # about the message: the first rank gives it to the caller
            continue
