"""Watch a group of processes: if one is killed, stopped or stuck, all end, with one message.

Every rank has a watching thread. Again and again it writes to the rendezvous store how many collectives the rank has
entered, and reads what the others wrote. A collective that waits for a lost rank cannot be interrupted, so the thread
ends the process. torchrun sees that, and starts the group again if it was asked to. Knows nothing of models or tensors.
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

PREPARING = 10  # factor by which ranks wait longer for one another while new code is compiled
_LEAVE = 2.0  # if ranks end for the same reason, all should have ended within these seconds


class RankError(RuntimeError):
    """Ranks have different tokens, or one failed; the message names it. All ranks raise this error."""


class CollectiveError(RuntimeError):
    """A collective failed on this rank, most often because another rank is gone."""


class Progress:
    """How far a rank has come."""

    def __init__(self) -> None:
        self.entered = 0  # the number of collectives it has entered
        self.since: float | None = None  # when it entered the present collective; None: it is in none
        # On CUDA a collective is only queued. This tells whether the device has finished the last one; None: there is
        # none.
        self.is_done: Callable[[], bool] | None = None
        self.lengths = 0  # a checksum of the lengths of its forwards
        self.preparing = False  # whether ranks may come late: see ``Ranks.preparing``


class Watch:
    """Watches the group from a separate thread.

    Args:
        store: torch's rendezvous store, on a connection that nothing else uses: it answers one thread at a time.
        rank, size: the number of this process, and of all processes.
        progress: how far this rank has come; its collectives update it.
        heartbeat_timeout: seconds without a sign of life after which a rank counts as lost.
        collective_timeout: seconds after which a rank that waits in a collective blames those that have not come to it.
        on_fault: called with the message, in the watching thread, before the process ends; it may answer requests.
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
        self._store = store
        self.rank = rank
        self.size = size
        self.progress = progress
        self.heartbeat_timeout, self.collective_timeout = heartbeat_timeout, collective_timeout
        self.on_fault = on_fault
        self.interval = min(heartbeat_timeout / 5, 0.5)
        self._store.set(_key("who", rank), json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **_place()}))
        self._who = [json.loads(self._store.get(_key("who", other))) for other in range(size)]
        self._handles = self._open_handles()
        self._left: set[int] = set()
        # The last collective seen waiting in the device's queue, and the last that all ranks have entered: its number,
        # and when it was first seen so.
        self._queued = self._complete = (0, 0.0)
        self._beats = {other: b"" for other in range(size) if other != rank}  # what each last wrote, and when
        self._heard, self._last = dict.fromkeys(self._beats, time.monotonic()), time.monotonic()
        self._poll = select.poll()
        for handle in self._handles.values():
            self._poll.register(handle, select.POLLIN)
        self._errors = 0
        self._stop = threading.Event()
        self._declared = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fly-watch", daemon=True)
        self._thread.start()

    def leave(self, error: BaseException | None = None) -> None:
        """Wait until every rank has left, then stop watching. If one rank leaves with an ``error`` that the others do
        not have, all ranks end, and this does not return."""
        with contextlib.suppress(Exception):
            self._store.set(_key("left", self.rank), repr(error) if error else "")
        # After a failed collective, give the watching thread time to name the rank that caused it.
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

    def _wait(self, is_over: Callable[[], bool], seconds: float, error: BaseException | None) -> None:
        """Wait until ``is_over`` returns True. If there is an ``error``, blame this rank after ``seconds``."""
        started = time.monotonic()
        while not is_over() and not self._stop.is_set():
            if error is not None and time.monotonic() - started > seconds:
                if not isinstance(error, MemoryError) and "OutOfMemory" not in type(error).__name__:
                    traceback.print_exception(error)
                self.declare(self.rank, f"failed: {type(error).__name__}: {' '.join(str(error).split())}")
            time.sleep(0.005)

    def declare(self, rank: int, reason: str) -> None:
        """Blame ``rank`` and end the group. Does not return."""
        with self._declared:
            process = self._who[rank]
            message = f"rank {rank} (process {process['pid']} on {process['host']}) {reason}; all {self.size} ranks end"
            with contextlib.suppress(Exception):
                if self._store.add(_key("faults"), 1) == 1:  # only the rank that notices first prints the message
                    self._store.set(_key("fault"), message)
                    print(f"fly: {message}", file=sys.stderr, flush=True)
                else:
                    message = self._store.get(_key("fault")).decode()
            self._end(message, rank)

    def _end(self, message: str, rank: int | None = None) -> None:
        if self.on_fault is not None:
            with contextlib.suppress(Exception):
                self.on_fault(message)
        if rank in self._handles:  # kill a stopped process: torchrun would wait half a minute for it
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)
        if self.rank == 0:  # this process may hold the store, in which the others still have to read the message
            time.sleep(2 * self.interval)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)

    def _open_handles(self) -> dict[int, int]:
        """Open a process handle for each other rank on the same machine and in the same namespace of process ids. The
        handle shows when the process ends."""
        handles: dict[int, int] = {}
        if hasattr(os, "pidfd_open"):
            for other, process in enumerate(self._who):
                if other != self.rank and all(process.get(name) == value for name, value in _place().items()):
                    with contextlib.suppress(OSError):
                        handles[other] = os.pidfd_open(process["pid"])
        return handles

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except Exception as error:  # the store is gone; its errors have no common type
                if not self._stop.is_set():
                    message = f"rank {self.rank} lost the rendezvous store: its host ended or is cut off ({error})"
                    print(f"fly: {message}", file=sys.stderr, flush=True)
                    self._end(message)

    def _look(self) -> None:
        """Give a sign of life, look for signs of the others, and sleep for the interval."""
        progress = self.progress
        self._store.set(_key("beat", self.rank), f"{time.monotonic()} {progress.entered} {progress.lengths}")
        if self._store.check([_key("fault")]):
            self._end(self._store.get(_key("fault")).decode())
        now = time.monotonic()
        if now - self._last > self.heartbeat_timeout / 2:  # this process itself was asleep, so start waiting anew
            self._heard = dict.fromkeys(self._beats, now)
        self._last = now
        for other, last_beat in self._beats.items():
            if other not in self._left and self._store.check([_key("left", other)]):
                self._left.add(other)
            if not self._store.check([_key("beat", other)]):
                continue
            if (beat := self._store.get(_key("beat", other))) != last_beat:
                self._beats[other], self._heard[other] = beat, now
            elif other not in self._left and now - self._heard[other] > self.heartbeat_timeout:
                self.declare(other, f"has given no sign of life for {self.heartbeat_timeout:g} s (stopped, or cut off)")
        self._look_for_stuck(now)
        for handle, _ in self._poll.poll(self.interval * 1000):
            self._poll.unregister(handle)
            (other,) = (other for other, other_handle in self._handles.items() if other_handle == handle)
            if not self._store.check([_key("left", other)]):
                self.declare(other, "ended without a word (killed, perhaps for want of memory)")
            self._left.add(other)

    def _waiting(self, now: float) -> tuple[int, float] | None:
        """Return the number of the collective that this rank (or its device) waits for, and since when; None if it does
        not wait."""
        entered = self.progress.entered
        since = self.progress.since
        is_done = self.progress.is_done
        if since is not None:
            return entered, since
        with contextlib.suppress(RuntimeError):  # the device has failed; whoever waits for it reports that
            if is_done is None or is_done():
                self._queued = (0, 0.0)
                return None
        if self._queued[0] != entered:
            self._queued = (entered, now)
        return self._queued

    def _look_for_stuck(self, now: float) -> None:
        """If this rank has waited too long in a collective, blame a rank that has not entered it. If all have entered
        it, blame a rank with other tokens, or else this rank."""
        timeout = self.collective_timeout * (PREPARING if self.progress.preparing else 1)
        if (waiting := self._waiting(now)) is None or now - waiting[1] < timeout:
            return
        entered, since = waiting
        beats = {other: beat.split() for other, beat in self._beats.items() if beat}
        counts = {int(beat[1]): other for other, beat in reversed(beats.items())}
        if counts and (least := min(counts)) < entered:
            other = counts[least]
            if other in self._left and now - since < timeout + 2 * _LEAVE:
                return  # it has left and is about to report its own error
            self.declare(other, f"hangs: for {timeout:g} s it has not come to collective {least + 1}")
        if len(beats) < self.size - 1 or self._left:
            return
        if self._complete[0] != entered:
            self._complete = (entered, now)
        if now - self._complete[1] < timeout:
            return
        differs = [other for other, beat in beats.items() if int(beat[2]) != self.progress.lengths]
        if differs:
            self.declare(differs[0], f"has other tokens than rank {self.rank}, so that collective {entered} cannot end")
        self.declare(
            self.rank,
            f"waits for collective {entered}, which all ranks have come to but which does not end (is their link cut?)",
        )


def _key(*parts: object) -> str:
    return "/".join(map(str, ("fly", *parts)))


def _place() -> dict[str, str]:
    """Return values that are equal for two processes that can see each other's process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        return {"boot": boot, "space": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"space": f"unknown to {os.getpid()}"}
