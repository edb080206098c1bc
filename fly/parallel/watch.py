"""A group of processes that lives and dies together: one that is killed, stopped or stuck ends all, with one message.

Every rank has a thread that says through the rendezvous store that it lives and how far it has come, and looks at
what the others say. A collective that waits for a lost rank cannot be interrupted, so the thread ends the process;
torchrun sees that, and starts the group again if it was asked to. Knows nothing of models or tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PREPARING", "CollectiveError", "Progress", "RankError", "Watch"]

PREPARING = 10  # times as long as usual ranks wait for one another while new code is compiled
_LEAVE = 2.0  # seconds in which ranks that end for the same reason are expected to end


class RankError(RuntimeError):
    """Ranks disagree, or one could not do its part; the message names it. All ranks raise it."""


class CollectiveError(RuntimeError):
    """A collective failed on this rank, most often because another is gone."""


class Progress:
    """How many collectives a rank has entered, since when it has been inside the last (None: it is not), and whether
    what it left to a device is ``over``, where entering one only queues it there (None: nothing was left to one).

    ``lengths`` is a checksum of what it computes with, which the host knows without waiting."""

    def __init__(self) -> None:
        self.entered, self.lengths = 0, 0
        self.since: float | None = None
        self.over: Callable[[], bool] | None = None
        self.preparing = False  # whether ranks may come late: see ``Ranks.preparing``


class Watch:
    """Watches the group from a thread of its own.

    Args:
        store: torch's, on a connection of its own: a store answers one thread at a time.
        rank, size: this process among the group's.
        progress: what the collectives of this rank note.
        heartbeat_timeout: seconds without a sign of life after which a rank counts as lost.
        collective_timeout: seconds after which a rank that waits in a collective blames those that have not come to it.
        on_fault: called with the message before the process ends, in the watching thread: time to answer requests.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        progress: Progress,
        heartbeat_timeout: float,
        collective_timeout: float,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self.rank, self.size, self.progress = store, rank, size, progress
        self.heartbeat_timeout, self.collective_timeout = heartbeat_timeout, collective_timeout
        self.on_fault = on_fault
        self.interval = min(heartbeat_timeout / 5, 0.5)
        self._store.set(_key("who", rank), json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **_place()}))
        self._who = [json.loads(self._store.get(_key("who", other))) for other in range(size)]
        self._handles = self._open_handles()
        self._left: set[int] = set()
        self._queued = self._complete = (0, 0.0)  # the last collective, and since when it is seen so
        self._errors = 0
        self._stop = threading.Event()
        self._declared = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fly-watch", daemon=True)
        self._thread.start()

    def leave(self, error: BaseException | None = None) -> None:
        """Wait until every rank has left, then stop watching. A rank that leaves with an ``error`` which the others do
        not share ends them all: that call does not return."""
        with contextlib.suppress(Exception):
            self._store.set(_key("left", self.rank), repr(error) if error else "")
        # A failed collective is another rank's fault, which the thread is about to name.
        wait = 2 * self.heartbeat_timeout + _LEAVE if isinstance(error, CollectiveError) else _LEAVE
        self._wait(lambda: len(self._left) == self.size - 1, wait, error)
        self._stop.set()
        self._thread.join()
        for handle in self._handles.values():
            os.close(handle)

    def agree_on(self, error: Exception) -> None:
        """Wait until every rank has an error of this type. If others have none, this does not return."""
        self._errors += 1
        key = _key("error", self._errors, type(error).__name__)
        self._store.add(key, 1)
        self._wait(lambda: self._store.add(key, 0) == self.size, self.heartbeat_timeout, error)

    def _wait(self, over: Callable[[], bool], seconds: float, error: BaseException | None) -> None:
        """Wait until all work is ``over``. If it is not after so many seconds and there is an ``error``, this rank is
        to blame."""
        started = time.monotonic()
        while not over() and not self._stop.is_set():
            if error is not None and time.monotonic() - started > seconds:
                if not isinstance(error, MemoryError) and "OutOfMemory" not in type(error).__name__:
                    traceback.print_exception(error)
                self.declare(self.rank, f"failed: {type(error).__name__}: {' '.join(str(error).split())}")
            time.sleep(0.005)

    def declare(self, rank: int, reason: str) -> None:
        """End the group because of ``rank``. Does not return."""
        with self._declared:
            who = self._who[rank]
            message = f"rank {rank} (process {who['pid']} on {who['host']}) {reason}; all {self.size} ranks end"
            with contextlib.suppress(Exception):
                if self._store.add(_key("faults"), 1) == 1:  # only the first to notice says so
                    self._store.set(_key("fault"), message)
                    print(f"fly: {message}", file=sys.stderr, flush=True)
                else:
                    message = self._store.get(_key("fault")).decode()
            self._end(message, rank)

    def _end(self, message: str, rank: int | None = None) -> None:
        if self.on_fault is not None:
            with contextlib.suppress(Exception):
                self.on_fault(message)
        if rank in self._handles:  # else torchrun would wait half a minute for a stopped process to end by itself
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)
        if self.rank == 0:  # the store may live in this process, and the others are to read the message in it
            time.sleep(2 * self.interval)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    def _open_handles(self) -> dict[int, int]:
        """For each other rank whose process this one can see (same machine, same process ids), a handle that shows its
        end."""
        handles: dict[int, int] = {}
        if hasattr(os, "pidfd_open"):
            for other, who in enumerate(self._who):
                if other != self.rank and all(who.get(name) == value for name, value in _place().items()):
                    with contextlib.suppress(OSError):
                        handles[other] = os.pidfd_open(who["pid"])
        return handles

    def _run(self) -> None:
        poll = select.poll()
        ranks_of = {handle: other for other, handle in self._handles.items()}
        for handle in ranks_of:
            poll.register(handle, select.POLLIN)
        others = [other for other in range(self.size) if other != self.rank]
        said = dict.fromkeys(others, b"")
        heard = dict.fromkeys(others, time.monotonic())
        last = time.monotonic()
        while not self._stop.is_set():
            try:
                progress = self.progress
                self._store.set(_key("beat", self.rank), f"{time.monotonic()} {progress.entered} {progress.lengths}")
                if self._store.check([_key("fault")]):
                    self._end(self._store.get(_key("fault")).decode())
                now = time.monotonic()
                if now - last > self.heartbeat_timeout / 2:  # it is this process that was asleep
                    heard = dict.fromkeys(others, now)
                last = now
                for other in others:
                    if other not in self._left and self._store.check([_key("left", other)]):
                        self._left.add(other)
                    if not self._store.check([_key("beat", other)]):
                        continue
                    if (beat := self._store.get(_key("beat", other))) != said[other]:
                        said[other], heard[other] = beat, now
                    elif other not in self._left and now - heard[other] > self.heartbeat_timeout:
                        self.declare(
                            other, f"has given no sign of life for {self.heartbeat_timeout:g} s (stopped, or cut off)"
                        )
                self._look_for_stuck(said, now)
                for handle, _ in poll.poll(self.interval * 1000):
                    other = ranks_of[handle]
                    poll.unregister(handle)
                    if not self._store.check([_key("left", other)]):
                        self.declare(other, "ended without a word (killed, perhaps for want of memory)")
                    self._left.add(other)
            except Exception as error:  # the store's, whatever torch calls it
                if not self._stop.is_set():
                    message = f"rank {self.rank} lost the rendezvous store: its host ended or is cut off ({error})"
                    print(f"fly: {message}", file=sys.stderr, flush=True)
                    self._end(message)

    def _waiting(self, now: float) -> tuple[int, float] | None:
        """The last collective, and since when this rank waits for it: inside of it, or for a device that it was left
        to, with nothing after it."""
        entered, since, over = self.progress.entered, self.progress.since, self.progress.over
        if since is not None:
            return entered, since
        with contextlib.suppress(RuntimeError):  # a device that has failed; the ranks that wait for it report it
            if over is None or over():
                self._queued = (0, 0.0)
                return None
        if self._queued[0] != entered:
            self._queued = (entered, now)
        return self._queued

    def _look_for_stuck(self, said: dict[int, bytes], now: float) -> None:
        """Whether this rank has waited too long in a collective: for ranks that have not come to it, or, if all have
        come, for its end."""
        timeout = self.collective_timeout * (PREPARING if self.progress.preparing else 1)
        if (waiting := self._waiting(now)) is None or now - waiting[1] < timeout:
            return
        entered, since = waiting
        beats = {other: beat.split() for other, beat in said.items() if beat}
        counts = {int(beat[1]): other for other, beat in reversed(beats.items())}
        if counts and (least := min(counts)) < entered:
            other = counts[least]
            if other in self._left and now - since < timeout + 2 * _LEAVE:
                return  # it is about to say why
            self.declare(other, f"hangs: for {timeout:g} s it has not come to collective {least + 1}")
        if len(beats) < self.size - 1 or self._left:
            return
        if self._complete[0] != entered:
            self._complete = (entered, now)
        if now - self._complete[1] < timeout:
            return
        strange = [other for other, beat in beats.items() if int(beat[2]) != self.progress.lengths]
        if strange:
            self.declare(strange[0], f"has other tokens than rank {self.rank}, so that collective {entered} cannot end")
        self.declare(
            self.rank,
            f"waits for collective {entered}, which all ranks have come to but which does not end (is their link cut?)",
        )


def _key(*parts: object) -> str:
    return "/".join(map(str, ("fly", *parts)))


def _place() -> dict[str, str]:
    """A value that two processes share if they can see each other by their process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        return {"boot": boot, "space": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"space": f"unknown to {os.getpid()}"}
