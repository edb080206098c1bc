"""Continuous batching: decide which requests run in which step. Knows nothing of texts, threads, HTTP or files.

Requests join and leave between steps. A request that decodes takes part in every step. Prompts are read in chunks, with
the tokens of a step that decoding leaves. If the caches run out of pages, the request that is last in order is
*preempted*: it frees its pages, waits, and later goes on from the tokens it has.

Clients share the engine equally, and none can make another wait by asking for much. Among requests of equal priority,
the next to join belongs to the client with the fewest running rows (among equals, to the one that was served the fewest
tokens). The first to be preempted is the latest request of the client with the most running rows. A client also loses a
row to a waiting client that has at least two rows fewer. A new client's count of served tokens starts at the lowest
count of the others (a virtual token counter: Sheng et al., arXiv 2401.00588).
"""

from __future__ import annotations

import itertools
import sys
import warnings
from bisect import insort
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fly.cache import BlockAllocator, OutOfBlocks
from fly.drafts.limits import check_rule
from fly.engine import Engine
from fly.runner.request import Row, Token, most_drafted

__all__ = ["Scheduler", "max_scored"]

_LOGITS = 2**25  # the most logits of scored prompts in a step: 128 MiB, and as much again to normalise them
# A step reads at least 32 prompt tokens, and at least an eighth of its tokens, however many rows decode.
_MIN_CHUNK, _MIN_PART = 32, 8


def max_scored(max_rows: int, vocab_size: int) -> int:
    """Return the most prompt tokens whose log-probabilities are computed in one step."""
    return max(max_rows, _LOGITS // vocab_size)


@dataclass
class _Step:
    """The input of one step: ``rows`` that emit; and others, each with the number of tokens of its prompt (or of its
    text, after a preemption) that are cached after the step."""

    rows: list[Row] = field(default_factory=list)
    prefill: list[tuple[Row, int]] = field(default_factory=list)


class _Cache(NamedTuple):
    """A cache that limits which requests run: the target's, or a drafter's, which rows without drafts do not use."""

    allocator: BlockAllocator
    longest: int  # the most tokens that it holds of a row
    of_drafter: bool


@dataclass
class _Client:
    """A client with unfinished requests: its number of running rows, and its waiting ones in order."""

    served: int  # the count that it started from, plus the tokens that were fed or emitted for it
    rows: int = 0
    waiting: list[Row] = field(default_factory=list)


class Scheduler:
    """Runs requests on an engine, as many at once as its caches hold.

    Args:
        engine: the target with its draft strategy.
        max_rows: the most requests in one step.
        step_tokens: about how many tokens one step feeds to the target. Requests that decode are always fed, and
            prompts get the rest. With a smaller number, decoding is more even while long prompts are read.
        failed: called with each error of a step before the error is handled. It raises those that concern all requests.

    A request is a ``Row``. It is over when its ``finish_reason`` is set; if that is ``"error"``, its ``error``
    is what ended it. An error of one request (for example in its policy) ends that request alone. ``allocators`` are
    those of all caches, the target's first.
    """

    def __init__(
        self,
        engine: Engine,
        max_rows: int = 256,
        step_tokens: int = 2048,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        if max_rows < 1 or step_tokens < 1:
            raise ValueError(f"max_rows {max_rows} and step_tokens {step_tokens} must be at least 1")
        self.engine = engine
        self.max_rows = max_rows
        self.step_tokens = step_tokens
        self._failed = failed
        self.running: list[Row] = []  # by priority, then by arrival
        self._clients: dict[str, _Client] = {}  # clients with unfinished requests
        self._reported: dict[int, int] = {}  # tokens of each row that a step has returned
        self._arrivals: dict[int, int] = {}  # the order of arrival, which is the same on all ranks; ids are not
        # The most prompt tokens scored in one step: their logits must fit into memory, and each row needs one token.
        self._max_scored = max_scored(max_rows, engine.runner.executor.config.vocab_size)
        self._next_arrival = itertools.count()
        # Trees need cache slots beyond a row's longest path.
        self._spare = 0 if engine.strategy is None else engine.strategy.spare
        self._caches = [_Cache(engine.runner.cache.allocator, engine.context + self._spare, False)]
        for drafter in engine.setup.drafters:
            self._caches.append(_Cache(drafter.allocator, drafter.context + self._spare, True))
        self.allocators = [cache.allocator for cache in self._caches]
        self._stepping = False
        self._stuck: Row | None = None  # a row that did not fit; None once pages are freed

    def __bool__(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._clients)

    @property
    def waiting(self) -> list[Row]:
        """The waiting requests, client by client, each client's in order."""
        return [row for client in self._clients.values() for row in client.waiting]

    def forget(self) -> None:
        """Empty the prompt cache, so that the next prompts are computed and not found."""
        for allocator in self.allocators:
            allocator.forget()

    def check(self, row: Row) -> None:
        """Raise ``ValueError`` if the caches cannot hold ``row`` up to its end, even if it runs alone, or if its rule
        fails, or reads what its drafts lack."""
        if row.k and self.engine.strategy is not None:
            check_rule(row.policy, self.engine.strategy, row.draft, row.greedy)
        end = row.prompt_length + row.params.max_tokens + self._spare
        for allocator, longest, _ in self._caches:
            if allocator.blocks_for(min(end, longest)) > allocator.num_blocks:
                raise ValueError(
                    f"{row.prompt_length} tokens and max_tokens {row.params.max_tokens} do not fit the KV cache; give "
                    "fewer, or a larger cache"
                )

    def add(self, row: Row) -> None:
        """Add ``row`` to the waiting rows. Raises ``ValueError`` as ``check`` does."""
        self.check(row)
        self._reported[row.id] = row.generated
        self._arrivals[row.id] = next(self._next_arrival)
        if (client := self._clients.get(row.client)) is None:
            least = min((other.served for other in self._clients.values()), default=0)
            client = self._clients[row.client] = _Client(least)
        insort(client.waiting, row, key=self._order)

    def cancel(self, row: Row) -> None:
        """End ``row`` at once and free its pages. A row that is over keeps its finish reason. If this is called within
        a step (by a row's ``on_token``), the row ends with that step."""
        if row.id in self._reported:
            row.finish_reason = row.finish_reason or "cancelled"
            if not self._stepping:
                self._retire(row)

    def step(self, seconds: float = sys.maxsize) -> dict[int, list[Token]]:
        """Take one step of the engine, which begins no further round after ``seconds``. Return new tokens by row
        ``id``, for rows that got some or ended."""
        # Plan which rows join, and what the step feeds. Preempt rows until it fits.
        self._admit()
        step = self._plan()
        while len(self.running) > 1 and not self._has_room(step):
            self._preempt(self._next_to_preempt())
            step = self._plan()
        # Run the step.
        before = [*self.running]
        for row in step.rows:
            self._clients[row.client].served += self._count_unfed(row)
        for row, end in step.prefill:
            self._clients[row.client].served += end - self.engine.runner.cached(row)
        self._stepping = True
        try:
            if before:
                self._run(step, seconds)
        finally:
            self._stepping = False
        # Report the new tokens, and free rows that are over.
        emitted = {}
        for row in self.waiting:
            if row.finish_reason:  # cancelled while the step ran
                self._retire(row)
        for row in before:
            if row.id not in self._reported:
                continue
            new = row.provenance[self._reported[row.id] :]
            if new or row.finish_reason:
                emitted[row.id] = new
                self._reported[row.id] += len(new)
                self._clients[row.client].served += len(new)
            if row.finish_reason:
                self._retire(row)
        return emitted

    def _run(self, step: _Step, seconds: float) -> None:
        """Run a step. If it fails, run each request alone: an error then ends the request that caused it."""
        try:
            self.engine.step(step.rows, step.prefill, seconds)
        except Exception as error:
            self._failed(error)
            # The failed step emitted nothing, so it can be taken again in parts. If its forward has read the chunks
            # before the error, each reads one token more, since a step reads something.
            parts = [_Step([row]) for row in step.rows]
            for row, end in step.prefill:
                parts.append(_Step([], [(row, max(end, self.engine.runner.cached(row) + 1))]))
            if len(parts) > 1:
                if not isinstance(error, OutOfBlocks):
                    warnings.warn(
                        f"a step failed and is taken again for each of its {len(parts)} requests alone: {error!r}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                for part in parts:
                    if not self._is_over(part):
                        self._run(part, seconds)
                return
            (row,) = step.rows or [row for row, _ in step.prefill]
            if isinstance(error, OutOfBlocks) and len(self.running) > 1:  # drafts took more pages than was planned
                self._preempt(self._next_to_preempt())
                return
            row.finish_reason = "error"
            row.error = error

    def _is_over(self, step: _Step) -> bool:
        """Whether the only row of ``step`` has ended or was preempted since the step was planned."""
        (row,) = step.rows or [row for row, _ in step.prefill]
        return bool(row.finish_reason) or row not in self.running

    def _order(self, row: Row) -> tuple[int, int]:
        """Return the sort key of one client's requests: priority, then arrival."""
        return row.priority, self._arrivals[row.id]

    def _waiting_in_turn(self) -> Iterator[Row]:
        """Yield waiting requests in the order in which they join. The next one depends on who has joined by then."""
        queues = {name: client.waiting[::-1] for name, client in self._clients.items() if client.waiting}

        def turn(name: str) -> tuple[int, int, int, int]:
            """Return the sort key of the client's first waiting request."""
            row = queues[name][-1]
            client = self._clients[name]
            return row.priority, client.rows, client.served, self._arrivals[row.id]

        while queues:
            name = min(queues, key=turn)
            row = queues[name].pop()
            if not queues[name]:
                del queues[name]
            yield row

    def _next_to_preempt(self) -> Row:
        """Return the running request that is preempted first."""
        return max(self.running, key=lambda row: (row.priority, self._clients[row.client].rows, self._arrivals[row.id]))

    def _find_preemptible(self, row: Row) -> Row | None:
        """Return the running request to preempt for ``row``, if there is one."""
        if not self.running:
            return None
        last = self._next_to_preempt()
        ahead = self._clients[last.client].rows - self._clients[row.client].rows
        return last if (last.priority, ahead) > (row.priority, 1) else None

    def _retire(self, row: Row) -> None:
        """Free everything that is held for a row that is over, and forget it."""
        client = self._clients[row.client]
        if row in self.running:
            self.running.remove(row)
            client.rows -= 1
        else:
            client.waiting.remove(row)
        if not client.rows and not client.waiting:
            del self._clients[row.client]
        self.engine.release(row)
        if row.matcher is not None:  # closed now, because an error's traceback may keep the row alive for long
            row.matcher.close()
            row.matcher = None
        row.on_token = None
        del self._reported[row.id], self._arrivals[row.id]
        self._stuck = None

    def _preempt(self, row: Row) -> None:
        """Free the pages of ``row`` and let it wait again."""
        client = self._clients[row.client]
        self.running.remove(row)
        client.rows -= 1
        self.engine.release(row)
        row.stats.preempted += 1
        insort(client.waiting, row, key=self._order)
        self._stuck = None

    def _admit(self) -> None:
        """Let waiting requests join in order, as long as all running ones still have room to go on."""
        runner = self.engine.runner
        filling = {self._next_page_key(row) for row in self.running if self._count_unfed(row)}
        for row in self._waiting_in_turn():
            if row is self._stuck:
                return
            parent = row.parent
            if parent is not None and not parent.generated and not parent.finish_reason:
                continue  # its parent is still reading their prompt, which it will share
            if parent is not None and not parent.scores:
                row.prompt_logprobs = parent.prompt_logprobs
            if parent in self.running and not row.generated:
                runner.fork(parent, row)
            cached = len(runner.begin(row))
            if self._next_page_key(row) in filling:  # another row is reading this page; wait and share it
                runner.release(row)
                continue
            while not (joins := self._may_join(row)) and (last := self._find_preemptible(row)) is not None:
                self._preempt(last)
            if not joins:
                runner.release(row)
                self._stuck = row
                return
            if not row.generated:
                row.stats.cached = min(cached, row.prompt_length)
            client = self._clients[row.client]
            client.waiting.remove(row)
            client.rows += 1
            insort(self.running, row, key=self._order)
            if self._count_unfed(row):
                filling.add(self._next_page_key(row))

    def _next_page_key(self, row: Row) -> object:
        """Return a key of the next page of ``row``: equal for rows that could share the page, else the row's id."""
        allocator = self.engine.runner.cache.allocator
        return (
            self.engine.runner.share and allocator.next_key(row.id, row.tokens[: row.shareable], row.params.cache_salt)
        ) or row.id

    def _count_unfed(self, row: Row) -> int:
        """Return how many tokens of ``row`` must be fed before it decodes: its prompt, or after a preemption its text.
        The last token of a text is fed when the row decodes; if the row only scores its prompt, it is never fed."""
        unfed = len(row.tokens) - self.engine.runner.cached(row)
        return unfed - 1 if row.generated or not row.params.max_tokens else unfed

    def _plan(self) -> _Step:
        """Plan a step: all rows that decode, and chunks of prompts with the remaining tokens. Each client gets an equal
        share of these. Its prompts divide the share equally, so that long prompts do not hold up short ones."""
        # Rows that decode come first. ``filling`` has the others by client, each with how many tokens to feed.
        step = _Step()
        filling = dict[str, dict[Row, int]]()
        remaining = self.step_tokens
        for row in self.running:
            if unfed := self._count_unfed(row):
                filling.setdefault(row.client, {})[row] = unfed
            else:
                step.rows.append(row)
                remaining -= 1 + self._max_drafted(row)
        if not filling:
            return step
        # Divide the remaining tokens of the step among the prompts, and the tokens to score among the scored prompts.
        remaining = max(remaining, _MIN_CHUNK, self.step_tokens // _MIN_PART)
        cached = self.engine.runner.cached
        unfed_of = {}
        unscored_of = {}
        for name, prompts in filling.items():
            unfed_of[name] = sum(prompts.values())
            unscored_of[name] = sum(len(row.scored(cached(row), unfed)) for row, unfed in prompts.items())
        shares = _divide(remaining, unfed_of)
        scores = _divide(self._max_scored, unscored_of)
        for name, prompts in filling.items():
            for row, fed in _divide(shares[name], prompts).items():
                start = cached(row)
                if len(scored := row.scored(start, fed)) > scores[name]:
                    scored = scored[: scores[name]]
                    fed = scored.stop - 1 - start
                scores[name] -= len(scored)
                if fed == prompts[row] and not row.generated and row.params.max_tokens:
                    step.rows.append(row)  # the prompt's last token gives the first new one
                elif fed:
                    step.prefill.append((row, start + fed))
        return step

    def _may_join(self, row: Row) -> bool:
        """Whether there is room for the next round of ``row`` and of all running rows. Each running row must also have
        room for one more page, so that the new row is not preempted at once."""
        return len(self.running) < self.max_rows and self._has_room(_Step([*self.running, row]), len(self.running))

    def _has_room(self, step: _Step, slack: int = 0) -> bool:
        """Whether every cache has the pages for ``step``, and ``slack`` pages more."""
        ends = []
        for row in step.rows:
            ahead = self._max_drafted(row)
            ends.append((row, len(row.tokens) + ahead + (self._spare if ahead else 0)))
        ends += step.prefill
        for allocator, longest, of_drafter in self._caches:
            missing = slack
            for row, end in ends:
                if row.k or not of_drafter:
                    missing += allocator.missing(row.id, min(end, longest))
            if missing > allocator.num_free:
                return False
        return True

    def _max_drafted(self, row: Row) -> int:
        """Return the most tokens that may be drafted for ``row`` in its next round."""
        return 0 if self.engine.strategy is None else most_drafted(row.k, self.engine.left(row))


_Claimant = TypeVar("_Claimant", bound=abc.Hashable)


def _divide(amount: int, wanted: dict[_Claimant, int]) -> dict[_Claimant, int]:
    """Divide ``amount`` into equal parts. A part is at most what is ``wanted``, and the others get what it leaves.
    Parts are rounded up: if there are fewer tokens than parts, the first parts get one token each."""
    parts = {}
    for number, who in enumerate(sorted(wanted, key=wanted.__getitem__)):
        parts[who] = min(wanted[who], -(-amount // (len(wanted) - number)))
        amount -= parts[who]
    return parts
