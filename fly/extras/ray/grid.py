"""``fly eval --ray`` and ``fly train-head --ray``: actors that hold the models make completions. Nothing is written
here; the caller writes the completions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from fly.extras.eval.decoder import Decoder, Finished
from fly.extras.eval.plan import Plan, Turn
from fly.extras.eval.records import Key
from fly.extras.ray.cluster import join, nodes, set_threads, share
from fly.extras.ray.pool import Pool
from fly.extras.train import Answer
from fly.extras.train.answers import generate_answers
from fly.llm import LLM
from fly.types import SamplingParams

__all__ = ["Grid"]

_PROMPTS = 64  # prompts in one piece of work


class _Actor:
    """The base class of a grid's actors."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def begin(self) -> None:
        """Use the threads that Ray gave and, if it exists here, the command's working directory."""
        set_threads()
        with suppress(OSError):
            os.chdir(self._folder)


class _DecodingActor(_Actor):
    """Decodes completions of a plan with models of its own."""

    def __init__(self, folder: str, plan: Plan, todo: Sequence[Turn]) -> None:
        super().__init__(folder)
        self._plan, self._todo = plan, todo

    def load(self) -> None:
        self.begin()
        self._name: str = ray.get_runtime_context().get_actor_id()[:8]
        self._decoder = Decoder(self._plan, [turn.way for turn in self._todo])

    def work(self, numbers: list[int], texts: Mapping[Key, str]) -> Iterator[Finished]:
        for finished in self._decoder.decode([self._todo[number] for number in numbers], texts):
            finished.record["actor"] = self._name
            yield finished


class _AnsweringActor(_Actor):
    """Answers prompts with a model of its own."""

    def __init__(self, folder: str, options: dict[str, Any], params: SamplingParams) -> None:
        super().__init__(folder)
        self._options, self._params = options, params

    def load(self) -> None:
        self.begin()
        self._llm = LLM(**self._options)

    def work(self, prompts: list[tuple[int, list[int]]], context: None) -> Iterator[tuple[int, Answer]]:
        for (number, _ids), answer in zip(prompts, generate_answers(self._llm, prompts, self._params)):
            yield number, answer


class Grid:
    """Actors on a Ray cluster.

    Args:
        address: the cluster's address; ``auto`` is the running one.
        actors: the number of actors; None means one per node, or one per GPU if there are any.

    Raises ``ValueError`` if there is no cluster.
    """

    def __init__(self, address: str, actors: int | None = None) -> None:
        join(address)
        cpus, gpus = share(actors, None, None)
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        resource, of_each = ("GPU", gpus) if gpus else ("CPU", cpus)
        self._pool = Pool(actors or max(int(sum(node.get(resource, 0) // of_each for node in nodes())), 1))

    @property
    def status(self) -> str:
        """How many actors work, and how many were lost, as a phrase."""
        return self._pool.status

    @property
    def lost(self) -> int:
        """How many actors were lost."""
        return self._pool.lost

    def _run(
        self,
        kind: type[_Actor],
        arguments: Sequence[Any],
        pieces: Mapping[str, Sequence[Any]],
        context: Callable[[list[Any]], Any] = lambda items: None,
    ) -> Iterator[Any]:
        """Let actors of a kind work on ``pieces``, and yield their results. All actors are made with the same
        ``arguments``, which are sent once."""
        shared, actor = [ray.put(each) for each in arguments], ray.remote(kind).options(**self._resources)
        return self._pool.run(lambda: actor.remote(os.getcwd(), *shared), pieces, context)

    def decode(self, plan: Plan, todo: Sequence[Turn], texts: Mapping[Key, str]) -> Iterator[Finished]:
        """Decode the completions ``todo`` of a plan. One actor decodes all completions of a problem in turns, so that
        their speeds can be compared; their records name it as ``actor``. ``texts`` are the answers made before.

        Raises ``ValueError`` as ``Decoder`` and ``Pool`` do.
        """
        pieces: dict[str, list[int]] = {}
        for number, turn in enumerate(todo):
            first = turn.number // plan.together * plan.together
            pieces.setdefault(f"{turn.key.task}, problems from number {first}", []).append(number)
        known_texts = dict(texts)

        def earlier(numbers: list[int]) -> dict[Key, str]:
            """Return the answers to earlier turns, which the turns of a piece follow."""
            keys = {todo[number].key for number in numbers}
            before = {key._replace(turn=n) for key in keys for n in range(key.turn)}
            return {key: known_texts[key] for key in before - keys}

        for finished in self._run(_DecodingActor, [plan, list(todo)], pieces, earlier):
            known_texts[Key.of(finished.record)] = finished.record["text"]
            yield finished

    def answer(
        self, options: dict[str, Any], params: SamplingParams, prompts: Sequence[tuple[int, list[int]]]
    ) -> Iterator[Answer]:
        """Yield the answers to numbered prompts, in order, as ``generate_answers`` does on one machine. ``options`` go
        to ``LLM``."""
        starts = range(0, len(prompts), _PROMPTS)
        pieces = {f"prompts from number {prompts[n][0]}": prompts[n : n + _PROMPTS] for n in starts}
        ready: dict[int, Answer] = {}
        order = iter([number for number, _ in prompts])
        following = next(order, None)
        for number, answer in self._run(_AnsweringActor, [options, params], pieces):
            ready[number] = answer
            while following in ready:
                yield ready.pop(following)
                following = next(order, None)
