"""A replica: the HTTP application of ``fly serve`` in an actor, which runs its model alone or as the first of several
ranks."""

from __future__ import annotations

import asyncio
import os
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import ray
from ray import serve
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from starlette.types import Message, Scope

from fly.config import Config
from fly.extras.ray.cluster import set_threads
from fly.llm import LLM
from fly.parallel import Ranks, launch
from fly.serve import Service, Settings, create_app

__all__ = ["Replica"]


def _launched(stack: ExitStack, setup: Config, rank: int, size: int, address: str, port: int) -> Ranks:
    """Join the ranks of this replica, as if torchrun had started this actor. If one rank is lost, all of them end."""
    # Ray shows an actor only its own devices, so every rank uses the first one.
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    sharing = {name: getattr(setup, name) for name in Config.of_ranks}
    return stack.enter_context(launch(**sharing))


class Rank:
    """An actor that is one of a replica's ranks, but not the first."""

    def follow(self, setup: Config, rank: int, size: int, address: str, port: int) -> None:
        """Follow the first rank's commands until it ends."""
        set_threads()
        with ExitStack() as stack:
            LLM.from_config(setup, _launched(stack, setup, rank, size, address, port)).follow()


class Replica:
    """The application of ``fly serve`` behind a gateway.

    Args:
        setup: the model, its draft and its policy.
        settings: the server's settings.
        ranks: how many processes share the model; this actor starts the others in its placement group.
    """

    def __init__(self, setup: Config, settings: Settings, ranks: int = 1) -> None:
        set_threads()
        warnings.simplefilter("always")  # otherwise Python would remember each warning for ever
        self._stack, self._others = ExitStack(), list[Any]()
        llm = LLM.from_config(setup) if ranks == 1 else self._lead(setup, ranks)
        self.service = Service(llm, settings, draft=setup.draft, name=setup.model)
        llm.warm()
        self.service.warm()
        self._app = create_app(self.service)
        self._keys = _changed(settings)
        self.id: str = serve.get_replica_context().replica_id.unique_id

    def _lead(self, setup: Config, size: int) -> LLM:
        """Start the other ranks, each in a bundle of this replica's placement group, and load the model with them."""
        group, address = get_current_placement_group(), ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        bundles = group.bundle_specs
        for rank in range(1, size):
            actor = ray.remote(Rank).options(
                num_cpus=bundles[rank]["CPU"],
                num_gpus=bundles[rank].get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            self._others.append(rank_actor := actor.remote())  # Ray ends them with this actor
            rank_actor.follow.remote(setup, rank, size, address, port)
        llm = LLM.from_config(setup, _launched(self._stack, setup, 0, size, address, port))
        llm.lead()
        return llm

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """Answer a request. Yield lists of ASGI messages, each with all messages that are ready. If the gateway stops
        reading, its client has left."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(64)
        disconnected, bodies = asyncio.Event(), [body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({"asgi": {"version": "3.0"}, "type": "http", **scope}, receive, messages.put)
            finally:
                if not disconnected.is_set():
                    await messages.put(None)

        running = asyncio.create_task(run())
        try:
            ended = False
            while not ended:
                pending = [await messages.get()]
                while not messages.empty():
                    pending.append(messages.get_nowait())
                ended = pending[-1] is None
                if ready := [message for message in pending if message is not None]:
                    yield ready
            await running  # raises the application's error, if any
        finally:
            disconnected.set()
            if not running.done():
                running.cancel()

    def metrics(self) -> tuple[str, bytes]:
        """Return this replica's name, and its metrics as Prometheus reads them."""
        return self.id, self.service.metrics.text(self.service.llm.worker.load)

    def check_health(self) -> None:
        """Raise an error if the engine has stopped. Ray calls this every few seconds, and replaces a replica that
        raises. If the file of keys has changed, read it again."""
        if not (worker := self.service.llm.worker).alive:
            raise RuntimeError(f"the engine has stopped: {worker.failure!r}")
        if (keys := _changed(self.service.settings)) != self._keys:
            self._keys = keys
            try:
                self.service.clients.reload()
            except (ValueError, OSError) as wrong:
                warnings.warn(f"the keys are as before: {wrong}", stacklevel=1)

    def __del__(self) -> None:
        """Close the service: Ray has let the open requests end, or their time is up."""
        if hasattr(self, "service"):
            self.service.close()
            self._stack.close()


def _changed(settings: Settings) -> float:
    """Return when the file of keys was last written; 0 if there is none."""
    try:
        return settings.api_keys_file.stat().st_mtime if settings.api_keys_file is not None else 0.0
    except OSError:
        return 0.0
