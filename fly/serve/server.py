"""Running the application: uvicorn, and a graceful end. Knows nothing of endpoints."""

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
_SPARING = Sparing()  # of what clients can cause at will
_SWITCH = 0.001  # seconds for which a thread keeps others from running Python; by default 0.005
_LAST = 2.0  # seconds for which a server without an engine still says so, to its clients and to probes


def _log_config() -> dict[str, Any]:
    """uvicorn's, with our own lines beside it: warnings, and those of the access log."""
    config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["formatters"]["default"]["()"] = Lines
    config["loggers"]["fly.serve"] = {"handlers": ["default"], "level": "INFO"}
    config["loggers"]["py.warnings"] = {"handlers": ["default"], "level": "INFO"}
    return config


class Server(uvicorn.Server):
    """Serves until a signal. After the first SIGTERM or SIGINT it refuses new requests (503), but finishes those it
    has; it ends when they have their answers, or after ``drain_timeout``. A second signal ends the process at once,
    with status 1 if requests were ``lost``, else 0. SIGHUP has it read the file of keys again.

    It also ends when its engine has stopped (``failed``), a moment after open requests got their errors: whoever runs
    it is to start it again."""

    def __init__(self, service: Service, log_level: str = "info") -> None:
        self.service, settings = service, service.settings
        self._deadline: float | None = None  # until when it drains
        self._reload = False  # the file of keys
        self.lost = 0  # requests that it did not wait for
        self.failed = False  # whether its engine has stopped
        limit, at_a_time = room_for(settings.max_connections)
        self.crowd, service.requests.total = Crowd(limit, settings.read_timeout), limit
        for name in ("asyncio", "uvicorn.error", "fly.serve.guard", "py.warnings"):
            logging.getLogger(name).addFilter(_SPARING)
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=functools.partial(Connection, self.crowd),  # type: ignore[arg-type]  # called, and nothing else
                backlog=at_a_time,
                loop="asyncio",
                ws="none",
                log_config=_log_config(),
                host=settings.host,
                port=settings.port,
                log_level=log_level,
                access_log=False,
                proxy_headers=False,  # unless the operator names proxies: see create_app
                timeout_keep_alive=75,  # longer than load balancers keep an unused connection
                timeout_graceful_shutdown=5,  # for what is left after draining: readers that do not read
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        gc.collect()
        gc.freeze()  # what is here stays: to look through it again takes 0.1 s, during which nothing else happens
        sys.setswitchinterval(_SWITCH)
        await super().startup(sockets)
        # asyncio accepts as many at a time as may queue, and few are to be accepted at a time; many may queue.
        for server in self.servers:
            for each in server.sockets:
                with each.dup() as listener:
                    listener.listen(2048)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.crowd.waiting):  # a connection without a request gets no answer
            connection.give_up()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            lost = self.lost + self.service.open
            # Nothing is waited for, threads that are busy least of all. (A log may be locked by what this interrupts.)
            os.write(2, f"fly: ended at once by a second signal; requests lost: {lost}\n".encode())
            os._exit(1 if lost else 0)
        self.service.draining = True

    def obey(self) -> None:
        """Heed signals from now on until the process ends, and not only while it serves."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        if self.service.settings.api_keys_file is not None:
            signal.signal(signal.SIGHUP, self.handle_reload)

    def handle_reload(self, sig: int, frame: FrameType | None) -> None:
        self._reload = True  # on the next tick: a log may be locked by what this interrupts

    async def on_tick(self, counter: int) -> bool:
        if self._reload:
            self._reload = False
            try:
                log.info("read the file of keys again: %d keys", await asyncio.to_thread(self.service.clients.reload))
            except (ValueError, OSError) as wrong:
                log.error("the keys are as before: %s", wrong)
        if (failure := self.service.llm.worker.failure) is not None and not (self.failed or self.should_exit):
            self.failed = True
            log.error("the engine has stopped; the server ends", exc_info=failure)
            asyncio.get_running_loop().call_later(_LAST, setattr, self, "should_exit", True)
        if self.service.draining:
            if self._deadline is None:
                self._deadline = time.monotonic() + self.service.settings.drain_timeout
            if time.monotonic() > self._deadline and not self.should_exit:
                self.lost += self.service.open
                error = RuntimeError("the server ends, and this request took too long to wait for")
                self.service.llm.worker.fail(error)
                self.should_exit = True
            elif not self.service.open:
                self.should_exit = True
        return await super().on_tick(counter)
