"""The thread that owns the engine, and how the event loop talks to it. Knows nothing of HTTP.

Everything here but ``_run`` and what it calls belongs to the event loop. Jobs go to the thread through an inbox; what
becomes of them comes back to each job's own queue, so nobody waits for anybody's reader. The thread sleeps while there
is nothing to do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field

from fly.policies import AcceptancePolicy
from fly.serve.metrics import Metrics
from fly.serve.turns import Answer, Cancel, Event, Load, Message, News, Submit
from fly.types import SamplingParams

__all__ = ["Busy", "Job", "Stopped", "Worker"]

log = logging.getLogger(__name__)


class Busy(Exception):
    """Too many wait already; ``retry_after`` seconds from now there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is at its limit of waiting requests; try again in {retry_after} s")
        self.retry_after = retry_after


class Stopped(Exception):
    """The engine has failed, and takes no more jobs."""


@dataclass(eq=False)
class Job:
    """One request's completions. Its queue holds events in order; None means that it was cancelled or lost.

    A job that is not ``streamed`` gets all its events at once when it is over.
    """

    key: int
    completions: int
    streamed: bool
    arrived: float
    queue: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    done: bool = False  # nothing more will come
    # the thread's own:
    left: int = 0
    held: list[Event] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)


class Worker:
    """Runs ``turn`` in a thread while there is work.

    Args:
        turn: takes messages, gives events (``Turns``, or ``fly.parallel.lead`` of it).
        load: what the engine holds after a turn; read in the thread.
        metrics: is told of everything.
        max_waiting: completions that may wait for their turn.
        max_rows: completions that can run at once.
        hurry: told that somebody waits for the turn under way to be over, and that nobody does (``Engine.hurry``).
    """

    def __init__(
        self,
        turn: Callable[[abc.Sequence[Message]], list[Event]],
        load: Callable[[], Load],
        metrics: Metrics,
        max_waiting: int,
        max_rows: int,
        hurry: Callable[[bool], None] = lambda now: None,
    ) -> None:
        self._hurry = hurry
        self._turn, self._load, self._metrics = turn, load, metrics
        self._max_waiting, self._max_rows = max_waiting, max_rows
        self._condition = threading.Condition()
        # guarded by the condition:
        self._inbox: list[tuple[Message, Job | None]] = []
        self._pending = 0  # completions that the engine has not said anything about
        self.load = Load()
        self._ending = False
        self.failure: Exception | None = None
        # the event loop's:
        self._keys = itertools.count()
        self.jobs: set[Job] = set()
        self._seconds = 1.0  # that a job took lately
        # the thread's:
        self._open: dict[int, Job] = {}
        self._thread = threading.Thread(target=self._run, name="fly-engine", daemon=True)

    def start(self) -> None:
        """Begin. Call it in the event loop that will submit jobs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; jobs that are open are lost."""
        with self._condition:
            self._ending = True
            self._condition.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    def submit(
        self, prompts: list[list[int]], params: SamplingParams, policy: AcceptancePolicy, k: int, streamed: bool
    ) -> Job:
        """Have these prompts completed. Raises ``Busy`` or ``Stopped``."""
        completions = len(prompts) * params.n
        job = Job(next(self._keys), completions, streamed, time.monotonic(), left=completions)
        with self._condition:
            if self.failure is not None or self._ending:
                raise Stopped(f"the engine has stopped: {self.failure!r}")
            free = max(0, self._max_rows - self.load.running)
            waiting = self.load.waiting + max(0, self._pending + completions - free)
            if waiting > self._max_waiting:
                rounds = waiting / max(1, self.load.running)
                raise Busy(max(1, min(60, round(self._seconds * rounds))))
            self._pending += completions
            self._inbox.append((Submit(job.key, prompts, params, policy, k), job))
            self._hurry(True)
            self._condition.notify()
        self.jobs.add(job)
        return job

    def fail(self, error: Exception) -> None:
        """Give up all that is open, and take nothing more in; from any thread."""
        with self._condition:
            if self.failure is not None:
                return
            self.failure = error
            lost = [*self._open.values(), *(job for _, job in self._inbox if job is not None)]
            self._open, self._inbox = {}, []
        told: list[tuple[Job, Event | None]] = [(job, Answer(job.key, error)) for job in lost]
        self._loop.call_soon_threadsafe(self._deliver, told, lost)

    def cancel(self, job: Job) -> None:
        """End a job, if it goes on: its pages are free after the step that is under way, and its queue ends now."""
        if job.done:
            return
        self._finish(job)
        job.queue.put_nowait(None)
        with self._condition:
            self._inbox.append((Cancel(job.key), None))
            self._hurry(self.failure is None)
            self._condition.notify()

    def _finish(self, job: Job) -> None:
        job.done = True
        self.jobs.discard(job)

    def _deliver(self, told: list[tuple[Job, Event | None]], ended: list[Job]) -> None:
        for job, event in told:
            if not job.done:
                job.queue.put_nowait(event)
        for job in ended:
            if not job.done:
                self._seconds += 0.1 * (time.monotonic() - job.arrived - self._seconds)
                self._finish(job)

    # From here on: the thread.

    def _run(self) -> None:
        try:
            while True:
                with self._condition:
                    while not (self._inbox or self._open or self._ending):
                        self._condition.wait()
                    if self._ending:
                        return
                    taken, self._inbox = self._inbox, []
                    self._hurry(False)
                self._take_turn(taken)
        except Exception as error:  # an error of one request is an event of it; this is one of the engine
            log.exception("the engine has failed; nothing more is taken in")
            self.fail(error)
        finally:
            self._hurry(False)

    def _take_turn(self, taken: list[tuple[Message, Job | None]]) -> None:
        now = time.monotonic()
        for message, job in taken:
            if job is not None:
                self._open[message.key] = job
                self._metrics.queue.observe(now - job.arrived)
            elif (cancelled := self._open.pop(message.key, None)) is not None:
                for _ in range(cancelled.left):
                    self._metrics.ended("abort", None)
        events = self._turn([message for message, _ in taken])
        load = self._load()
        with self._condition:
            self.load = load
            self._pending -= sum(job.completions for _, job in taken if job is not None)
        self._metrics.load(load)
        told: list[tuple[Job, Event | None]] = []
        ended: list[Job] = []
        now = time.monotonic()
        for event in events:
            if (job := self._open.get(event.key)) is None:
                continue
            if isinstance(event, News):
                self._note(job, event, now)
            over = job.left == 0 or event.error is not None
            if job.streamed or isinstance(event, Answer):
                told.append((job, event))
            else:
                job.held.append(event)
            if over:
                told += [(job, held) for held in job.held]
                ended.append(self._open.pop(event.key))
        if told:
            self._loop.call_soon_threadsafe(self._deliver, told, ended)

    def _note(self, job: Job, news: News, now: float) -> None:
        metrics, index = self._metrics, news.index
        if news.pieces:
            metrics.step([token for token, _ in news.pieces], news.drafts)
            if index in job.last:
                metrics.between.observe(now - job.last[index])
            else:
                job.first[index] = now
                metrics.first.observe(now - job.arrived)
            job.last[index] = now
            job.tokens[index] = job.tokens.get(index, 0) + len(news.pieces)
        if news.over:
            job.left -= 1
            output = news.output
            metrics.ended("error" if output is None else output.finish_reason, None if output is None else output.stats)
            metrics.whole.observe(now - job.arrived)
            if (count := job.tokens.get(index, 0)) > 1:
                metrics.each.observe((now - job.first[index]) / (count - 1))
