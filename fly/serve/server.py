"""Runs the application in uvicorn, with a graceful shutdown. Knows nothing of endpoints."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn

from fly.serve.app import create_app
from fly.serve.connections import Connection, Crowd, room_for
from fly.serve.logs import Lines, Sparing
from fly.serve.service import Service

__all__ = ["Server"]


log = logging.getLogger(__name__)
_SPARING = Sparing()  # for warnings that clients can cause at will
_SWITCH = 0.001  # sys.setswitchinterval: seconds after which a thread lets others run Python (default 0.005)
_LAST = 2.0  # seconds for which the server still tells clients and probes that its engine has stopped


def _log_config() -> dict[str, Any]:
    """Return uvicorn's log configuration plus our own: warnings, and lines of the access log."""
    config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["formatters"]["default"]["()"] = Lines
    for name in ("fly", "py.warnings"):
        config["loggers"][name] = {"handlers": ["default"], "level": "INFO"}
    return config


class Server(uvicorn.Server):
    """Serves until a signal. After the first SIGTERM or SIGINT, it refuses new requests (503) and finishes the open
    ones. It exits when they are answered or ``drain_timeout`` is over. After a second signal it exits at once, with
    status 1 if requests were ``lost``, else 0. SIGHUP makes it read the file of keys again.

    It also exits when the engine has stopped (``failed``), so that a supervisor can start it again. Open requests get
    their errors a moment before."""

    def __init__(self, service: Service, log_level: str = "info") -> None:
        self.service, settings = service, service.settings
        self._deadline: float | None = None  # end of draining
        self._reload = False  # whether to read the file of keys again
        self.lost = 0  # requests that were not finished
        self.failed = False  # whether its engine has stopped
        limit, at_a_time = room_for(settings.max_connections)
        self.crowd = Crowd(limit, settings.read_timeout)
        service.requests.limit(limit)
        for name in ("asyncio", "uvicorn.error", "fly.serve.guard", "py.warnings"):
            logging.getLogger(name).addFilter(_SPARING)
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=functools.partial(Connection, self.crowd),  # type: ignore[arg-type]  # uvicorn only calls it
                backlog=at_a_time,
                loop="asyncio",
                ws="none",
                log_config=_log_config(),
                host=settings.host,
                port=settings.port,
                log_level=log_level,
                access_log=False,
                proxy_headers=False,  # create_app adds them if the operator names proxies
                timeout_keep_alive=75,  # longer than load balancers keep an unused connection
                timeout_graceful_shutdown=5,  # for clients that do not read their answers
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        gc.collect()
        gc.freeze()  # scanning these long-lived objects again would stop everything for 0.1 s
        sys.setswitchinterval(_SWITCH)
        await super().startup(sockets)
        # asyncio accepts as many connections at a time as its backlog. Few should be accepted at a time, but many may
        # queue, so set the two separately.
        for server in self.servers:
            for each in server.sockets:
                with each.dup() as listener:
                    listener.listen(2048)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.crowd.waiting):  # nobody waits for an answer there
            connection.give_up()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            lost = self.lost + self.service.open
            # Wait for nothing, least of all for busy threads. Do not log: the interrupted code may hold the log's lock.
            os.write(2, f"fly: ended at once by a second signal; requests lost: {lost}\n".encode())
            os._exit(1 if lost else 0)
        self.service.drain()

    def obey(self) -> None:
        """Handle signals from now until the process exits, not only while serving."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        if self.service.settings.api_keys_file is not None:
            signal.signal(signal.SIGHUP, self.handle_reload)

    def handle_reload(self, sig: int, frame: FrameType | None) -> None:
        self._reload = True  # done on the next tick: the interrupted code may hold the log's lock

    async def on_tick(self, counter: int) -> bool:
        worker, now = self.service.llm.worker, time.monotonic()
        # SIGHUP: read the file of keys again.
        if self._reload:
            self._reload = False
            try:
                log.info("read the file of keys again: %d keys", await asyncio.to_thread(self.service.clients.reload))
            except (ValueError, OSError) as wrong:
                log.error("the keys are as before: %s", wrong)
        # A stopped engine: report it for a moment, then exit.
        if worker.failure is not None and not (self.failed or self.should_exit):
            self.failed = True
            log.error("the engine has stopped; the server ends", exc_info=worker.failure)
            asyncio.get_running_loop().call_later(_LAST, setattr, self, "should_exit", True)
        # SIGTERM: exit when all requests are answered, or when drain_timeout is over.
        if self.service.draining and not self.should_exit:
            self._deadline = self._deadline or now + self.service.settings.drain_timeout
            if now > self._deadline:
                self.lost += self.service.open
                worker.fail(RuntimeError("the server ends, and this request took too long to wait for"))
            self.should_exit = now > self._deadline or not self.service.open
        return await super().on_tick(counter)
