"""Actors that work through pieces of work. What a lost actor leaves undone goes to another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

__all__ = ["Pool"]

_TRIES = 3  # give up after this many actors were lost with the same piece


@dataclass
class _Piece:
    name: str
    items: list[Any]  # what is still to be done
    lost: int = 0  # actors that were lost while they worked on it


class Pool:
    """Up to ``count`` actors. A lost one is replaced if the cluster has room for another.

    An actor has two methods: ``load()`` makes it ready, and ``work(items, context)`` is a generator that yields the
    result of each item, in order.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.ready = self.lost = self._barren = 0  # barren: actors lost since the last result

    @property
    def status(self) -> str:
        """How many actors work, and how many were lost, as a phrase."""
        lost = f", {self.lost} lost" if self.lost else ""
        return f"{self.ready} of {self.count} actor{'s' * (self.count != 1)}{lost}"

    def run(
        self, make: Callable[[], Any], pieces: Mapping[str, Sequence[Any]], context: Callable[[list[Any]], Any]
    ) -> Iterator[Any]:
        """Yield the results of all items of ``pieces``, in order within a piece. ``make`` creates an actor. A piece
        stays with one actor as long as the actor lives. ``context(items)`` is called when an actor gets these items.

        Raises ``ValueError`` for an error in an actor's own code, and if actors are lost again and again.
        """
        queue = deque(_Piece(name, list(items)) for name, items in pieces.items())
        # What each busy actor will report next: that it is loaded (no piece), or the results of its piece.
        reports: dict[Any, tuple[Any, _Piece | None]] = {}
        idle: list[Any] = []

        def start() -> None:
            actor = make()
            reports[actor.load.remote()] = actor, None

        for _ in range(min(self.count, len(queue))):
            start()
        try:
            while queue or any(piece for _, piece in reports.values()):
                # Give the next pieces to actors that wait for work.
                while queue and idle:
                    actor, next_piece = idle.pop(), queue.popleft()
                    results = actor.work.options(num_returns="streaming").remote(
                        next_piece.items, context(next_piece.items)
                    )
                    reports[results] = actor, next_piece
                # Wait for whichever reports first.
                (report, *_), _ = ray.wait(list(reports), num_returns=1)
                actor, piece = reports.pop(report)
                try:
                    result = ray.get(report if piece is None else next(report))
                except StopIteration:  # the piece is done
                    idle.append(actor)
                    continue
                except RayTaskError as error:
                    raise ValueError(f"{piece.name if piece else 'an actor'}: {error.cause}") from None
                except RayError as error:
                    ray.kill(actor)
                    self._lose(piece, error)
                    if piece is not None:
                        queue.appendleft(piece)
                    start()
                    continue
                if piece is None:
                    self.ready += 1
                    idle.append(actor)
                    continue
                reports[report] = actor, piece
                del piece.items[0]
                self._barren = 0
                yield result
        finally:
            for actor in [*idle, *(actor for actor, _ in reports.values())]:
                ray.kill(actor)

    def _lose(self, piece: _Piece | None, error: RayError) -> None:
        """Count a lost actor. Raises ``ValueError`` if too many are lost."""
        self.lost += 1
        self._barren += 1
        if piece is not None:
            self.ready -= 1
            piece.lost += 1
            if piece.lost >= _TRIES:
                raise ValueError(f"{piece.name}: {_TRIES} actors were lost with it, the last by {error}") from None
        if self._barren > _TRIES * self.count:
            raise ValueError(f"{self._barren} actors were lost without any result, the last by {error}") from None
