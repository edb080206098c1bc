"""The thread that owns an engine. Calls from any thread or event loop join its batch. Knows nothing of HTTP or files.

Jobs and cancellations go to the thread through an inbox, and results come back through each job's queue. The thread
sleeps while there is nothing to do. It then refers to nothing but its inbox, so that an unused engine is freed.

If ranks share a model, each has such a thread, and this thread runs all collectives. Before every step the first rank
announces which jobs it admits and cancels, and the others do the same. There are two ways to call ranks. Either all
ranks make the same calls: they then know jobs by number, and take a step only while a call waits for one, so that the
caller's own collectives stay in order. Or only the first rank is called (``lead``), and the others ``follow``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import weakref
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from fly.devices import kind_of
from fly.engine.job import Entry, Job, Request
from fly.engine.scheduler import Scheduler

__all__ = ["Load", "Stopped", "Worker"]

log = logging.getLogger(__name__)
_PATIENCE = 5.0  # seconds to wait for a running step when the program ends
_WAKE, _END = "wake", "end"


class Stopped(RuntimeError):
    """The engine takes no more jobs, because it was closed or has failed."""


class Group(Protocol):
    """The part of ``fly.parallel.Ranks`` that a worker needs."""

    @property
    def leads(self) -> bool: ...

    def share(self, value: Any, wait: bool = False) -> Any: ...

    def agree(self, value: object = None, /) -> None: ...

    def await_blame(self, error: BaseException) -> None: ...


@dataclass(frozen=True)
class Load:
    """How full an engine is."""

    running: int = 0  # rows
    waiting: int = 0  # rows
    caches: tuple[float, ...] = ()  # the fraction of pages in use in each cache, the target's first
    taken: int = 0  # requests that the engine has taken in since the start


@dataclass
class _Cancel:
    job: Job
    waits: bool  # whether the caller waits until the engine holds nothing of the job


@dataclass
class _Want:
    """A call has read ``taken`` entries of a job, and waits for the next."""

    job: Job
    taken: int


class Worker:
    """Runs jobs on a scheduler, which belongs to the worker's thread from the first job on.

    Args:
        scheduler: with its engine.
        group: the ranks that share the model; None is this process alone.

    ``submit``, ``cancel``, ``fail`` and ``close`` may be called from any thread. ``load`` is the load after the last
    turn, ``submitted`` counts requests, ``jobs`` are the unfinished jobs, and ``failure`` is why it takes no more jobs.
    ``watch`` is called on the worker's thread after every step.
    """

    def __init__(self, scheduler: Scheduler, group: Group | None = None) -> None:
        self.scheduler = scheduler
        self._group = group
        self._engine = scheduler.engine
        self.load = Load()
        self.jobs: set[Job] = set()
        self.failure: BaseException | None = None
        self.submitted = 0
        self.watch: Callable[[], None] = lambda: None
        self._called_alone = False  # whether no other rank is called (``lead``)
        self._keys = itertools.count()
        self._connect()
        # From here on: used by the worker's thread only.
        self._read_requests: Callable[[Any], list[Request]] | None = None  # set on a rank that follows
        self._owners: dict[int, tuple[Job, int]] = {}  # job and request number, by id of each running or waiting row
        self._open: dict[int, Job] = {}  # by key
        self._new: dict[int, Job] = {}  # not admitted yet
        self._leaving: dict[int, Job] = {}  # to be cancelled
        self._wanted: set[int] = set()  # keys of jobs that a call waits for
        _workers.add(self)

    def _connect(self) -> None:
        self._lock = threading.RLock()  # reentrant: a stream may be garbage-collected while the lock is held
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._entered = False

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self.failure is None

    def submit(self, job: Job) -> None:
        """Let a job take part in the steps from now on. Raises ``Stopped`` if the worker takes no more jobs."""
        with self._lock:
            if self.failure is not None:
                closed = isinstance(self.failure, Stopped)
                raise Stopped(str(self.failure) if closed else f"the engine has stopped: {self.failure!r}")
            job.key = next(self._keys)
            self.jobs.add(job)
            self.submitted += len(job.requests)
            self._send(job)

    def cancel(self, job: Job, wait: bool = False) -> None:
        """End a job. Its pages are free after the current round; with ``wait``, this returns only then."""
        with self._lock:
            if job not in self.jobs:
                return
            self._send(_Cancel(job, wait))
        if wait and threading.current_thread() is not self._thread:
            job.gone.get()

    def want(self, job: Job, taken: int) -> None:
        """Note that a call has read ``taken`` entries of ``job``, and waits for the next. Ranks that make the same
        calls take steps only while a call waits."""
        if self._calls_are_alike:
            self._inbox.put(_Want(job, taken))

    def run(self, job: Job) -> None:
        """Submit a job, and wait for its end in this thread. Raises the error that ended it, if any."""
        try:
            self.submit(job)
            entry = job.queue.get()
        except BaseException:
            self.cancel(job)
            raise
        job.check(entry)

    async def arun(self, job: Job) -> None:
        """Do what ``run`` does, for a coroutine. The job's ``loop`` is the coroutine's event loop."""
        try:
            self.submit(job)
            entry = await job.queue.get()
        except BaseException:
            self.cancel(job)
            raise
        job.check(entry)

    def lead(self) -> None:
        """Make this, the first rank, the only one that is called from now on. The others ``follow``."""
        self._called_alone = True
        with self._lock:
            self._send(_WAKE)

    def follow(self, read: Callable[[Any], list[Request]]) -> None:
        """Do on this rank, which is not the first, what the first one does, until it is closed. ``read`` makes requests
        from the values that describe a job. Raises the engine's error, if it fails."""
        job = Job([])
        self._read_requests = read
        with self._lock:
            self.jobs.add(job)
            self._send(_WAKE)
        entry = job.queue.get()
        if not isinstance(entry, Stopped):
            job.check(entry)

    def fail(self, error: BaseException) -> None:
        """End all open jobs with ``error``, and take no more. Does not wait for the thread."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            lost, self.jobs = self.jobs, set()
            if self._thread is not None:
                self._send(_WAKE)
        self._deliver([(job, error) for job in lost])

    def close(self, patience: float | None = None) -> None:
        """End the thread, and wait for it, at most ``patience`` seconds if given. Waiting calls get ``Stopped``."""
        self.fail(Stopped("the engine is closed"))
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join(patience)

    def _send(self, item: Any) -> None:
        """Put an item into the inbox, and let the running step end soon. The caller holds the lock."""
        if self._thread is None:
            self._start()
        self._inbox.put(item)
        if self._group is None:  # ranks must all take the same rounds, so none may hurry
            self._engine.hurry(True)

    def _start(self) -> None:
        # When the worker is garbage-collected, None in the inbox ends the thread.
        weakref.finalize(self, self._inbox.put, None).atexit = False
        arguments = self._inbox, weakref.ref(self), self._engine.runner.executor.device
        self._thread = threading.Thread(target=_run, args=arguments, name="fly-engine", daemon=True)
        self._thread.start()

    def _forked(self) -> None:
        """Start anew in a child process, which lacks its parent's threads."""
        lost, self.jobs = self.jobs, set()
        self._connect()
        if lost:
            self.failure = RuntimeError("the process was forked while requests ran; load another LLM in the child")
        for job in lost:
            job.queue, job.loop = SimpleQueue(), None
            job.queue.put(self.failure)

    # From here on: methods that run on the worker's thread.

    @property
    def _calls_are_alike(self) -> bool:
        """Whether all ranks make the same calls."""
        return self._group is not None and not self._called_alone and self._read_requests is None

    def _work(self, item: Any) -> bool:
        """Take turns until there is nothing to do. Return whether the thread then waits for more jobs."""
        sound = True
        try:
            if not self._entered:
                self._entered = True
                self._engine.enter_thread()
            self._receive(item)
            while self.failure is None:
                with self._lock:
                    self._engine.hurry(False)
                    while not self._inbox.empty():
                        self._receive(self._inbox.get())
                if self.failure is None:
                    if not self._has_work():
                        return True
                    self._turn()
        except BaseException as error:  # an error of the engine; a request's own error goes to its job
            sound = False
            if not isinstance(error, Stopped):
                log.exception("the engine has failed and takes no more requests")
            if self._group is not None:
                self._group.await_blame(error)
            self._end()  # before ``fail``, so that the pages are free when callers see the error
            self.fail(error)
        if sound and self._called_alone and self._group is not None:
            with contextlib.suppress(Exception):  # another rank may be lost
                self._group.share(_END, wait=True)
        self._end()
        return False

    def _end(self) -> None:
        """Free everything that jobs hold, and wake calls that wait for a cancelled job."""
        with self._lock:
            while not self._inbox.empty():
                self._receive(self._inbox.get())
        for job in (*self._open.values(), *self._new.values(), *self._leaving.values()):
            try:
                self._remove(job)
            except Exception:
                log.exception("a request's pages could not be freed")
            job.gone.put(None)
        self._engine.hurry(False)

    def _receive(self, item: Any) -> None:
        """Note an item from the inbox."""
        if isinstance(item, Job):
            self._new[item.key] = item
            self._wanted.add(item.key)
        elif isinstance(item, _Want):
            if item.job.entries == item.taken and item.job.key in (*self._open, *self._new):
                self._wanted.add(item.job.key)
        elif isinstance(item, _Cancel):
            if item.job.key in (*self._open, *self._new):
                self._leaving[item.job.key] = item.job
                if item.waits:
                    self._wanted.add(item.job.key)
            else:
                item.job.gone.put(None)

    def _has_work(self) -> bool:
        """Whether to take another turn."""
        if self._read_requests is not None:
            return True
        if self._calls_are_alike:
            return bool(self._wanted)
        return bool(self._new or self._leaving or self.scheduler)

    def _turn(self) -> None:
        """Admit new jobs, take a step, deliver the results."""
        # Admit and cancel the same jobs on all ranks.
        new, leaving = self._agree_on_jobs()
        for job in new:
            self._admit(job)
        if self._group is not None and new:
            rows = [request.row for job in new for request in job.requests]
            self._group.agree([(row.tokens, row.seed, row.k) for row in rows])
        for job in leaving:
            if job.key in self._open:
                job.cancelled()
                self._remove(job)
        # Take a step. ``touched`` holds the open jobs that are new or got tokens, in order.
        touched = {job: None for job in new if job.key in self._open}
        if self.scheduler:
            # For an open stream the step is short, so that its reader gets tokens soon.
            intervals = [job.interval for job in self._open.values() if job.stepwise and self._group is None]
            emitted = self.scheduler.step(min(intervals, default=sys.maxsize))
            if self._group is not None:  # check that ranks agree before anything is delivered
                self._group.agree([[token.id for token in tokens] for tokens in emitted.values()])
            for id_, tokens in emitted.items():
                if (owner := self._owners.get(id_)) is not None:  # None: the row was given to the scheduler directly
                    job, index = owner
                    job.note(index, tokens)
                    touched[job] = None
            self.watch()
        # Deliver an entry to each job that is over, and to each stepwise job that is new or got tokens.
        finished = [job for job in touched if job.error is not None or not job.left]
        for job in finished:
            self._remove(job)
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        shares = tuple(1 - each.num_free / each.num_blocks for each in self.scheduler.allocators)
        with self._lock:
            taken = self.load.taken + sum(len(job.requests) for job in new)
            self.load = Load(running, waiting, shares, taken)
            informed = [job for job in touched if job in self.jobs and (job.stepwise or job in finished)]
            self.jobs.difference_update(finished, leaving)
        self._wanted.difference_update(job.key for job in informed if job.key not in self._leaving)
        # A call that still waits for a cancelled job gets its last entry.
        informed += [job for job in leaving if job.stepwise]
        self._deliver((job, job.entry()) for job in informed)
        for job in (*finished, *leaving):
            job.gone.put(None)

    def _agree_on_jobs(self) -> tuple[list[Job], list[Job]]:
        """Return the jobs to admit and to cancel before the next step, the same on all ranks."""
        if self._group is None or self._group.leads:
            (new, self._new), (leaving, self._leaving) = (self._new, {}), (self._leaving, {})
            if self._group is not None:
                values = [(key, _describe(job) if self._called_alone else None) for key, job in new.items()]
                self._group.share((values, list(leaving)), wait=True)
            return list(new.values()), list(leaving.values())
        shared = self._group.share(None, wait=True)
        if shared == _END:
            raise Stopped("the engine is closed")
        admitted, cancelled = shared
        jobs = []
        for key, values in admitted:
            if self._read_requests is not None:
                job = Job(self._read_requests(values))
                job.key = key
                self.jobs.add(job)
                jobs.append(job)
                continue
            while key not in self._new:  # this rank will soon make the same call
                self._receive(self._inbox.get())
                if self.failure is not None:
                    raise self.failure
            jobs.append(self._new.pop(key))
        jobs_by_key = {**self._open, **{job.key: job for job in jobs}}
        for key in cancelled:
            self._leaving.pop(key, None)
        return jobs, [jobs_by_key[key] for key in cancelled if key in jobs_by_key]

    def _admit(self, job: Job) -> None:
        """Hand a job's requests to the scheduler."""
        self._open[job.key] = job
        job.admitted()
        for index, request in enumerate(job.requests):
            if request.row.finish_reason:  # it was over before it began
                job.note(index, [])
            else:
                self._owners[request.row.id] = job, index
                if request.text is not None:
                    request.row.on_token = request.decode
                self.scheduler.add(request.row)

    def _remove(self, job: Job) -> None:
        """Forget a job, and take its unfinished requests from the scheduler."""
        self._open.pop(job.key, None)
        self._leaving.pop(job.key, None)
        self._wanted.discard(job.key)
        for request in job.requests:
            if self._owners.pop(request.row.id, None) is not None:
                self.scheduler.cancel(request.row)

    def _deliver(self, entries: abc.Iterable[tuple[Job, Entry]]) -> None:
        """Put each entry into its job's queue. An event loop is called once for all its entries."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Job, Entry]]] = {}
        for job, entry in entries:
            if job.loop is None:
                job.queue.put(entry)
            else:
                loops.setdefault(job.loop, []).append((job, entry))
        for loop, batch in loops.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # the loop was closed, so no call waits any more
                for job, _ in batch:
                    self.cancel(job)


def _put_all(batch: list[tuple[Job, Entry]]) -> None:
    for job, entry in batch:
        job.queue.put_nowait(entry)


def _describe(job: Job) -> Any:
    """Return the arguments with which another rank calls ``LLM.requests`` to make the same requests."""
    rows = [request.row for request in job.requests if request.row.parent is None]
    return (
        [row.tokens for row in rows],
        [row.params.model_copy(update={"seed": row.seed}) for row in rows],
        [row.policy for row in rows],
        [row.k for row in rows],
        rows[0].priority if rows else 0,
        [row.draft for row in rows],
        rows[0].client if rows else "",
    )


def _run(inbox: SimpleQueue[Any], owner: weakref.ref[Worker], device: torch.device) -> None:
    """Run the worker's thread. While it sleeps, it refers to nothing but its inbox. None in the inbox means that the
    worker was garbage-collected."""
    kind_of(device).make_current(device)  # CUDA's current device is set for each thread
    goes_on = False
    while (item := inbox.get()) is not None:
        if (worker := owner()) is not None:
            goes_on = worker._work(item)
        del worker, item
        if not goes_on:
            return


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all workers: a thread in the middle of a step would crash an interpreter that ends."""
    for worker in list(_workers):
        worker.close(_PATIENCE)


def _forked() -> None:
    for worker in list(_workers):
        worker._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
