"""A server in this process, on a loopback port of its own. Imported by the tests of the server."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fly import LLM, SamplingParams
from fly.serve import Server, Service, Settings

__all__ = ["CHAT", "MODEL", "QUESTION", "Running", "Spawned", "eventually", "reference", "running", "spawned"]

MODEL = "fly-tiny"
QUESTION = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."
CHAT: list[Any] = [{"role": "user", "content": QUESTION}]


@dataclass
class Running:
    """A server that takes requests."""

    service: Service
    server: Server
    url: str

    @property
    def all_free(self) -> bool:
        """Whether no request holds a page of any cache."""
        return all(each.num_free == each.num_blocks for each in self.service.llm.scheduler.allocators)


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it comes true: other threads take their time."""
    end = time.monotonic() + seconds
    while not (true := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return true


@contextlib.contextmanager
def running(draft: str = "ngram", options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """A server of the smallest model; ``options`` are for the ``LLM``."""
    llm = LLM(MODEL, **{"draft": None if draft == "none" else draft, "dtype": "float32", "k": 6, **(options or {})})
    service = Service(llm, Settings(**settings), draft=draft, name=MODEL)
    server = Server(service, log_level="error")
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as where uvicorn listens itself: else 40 ms late
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert eventually(lambda: server.started)
    try:
        yield Running(service, server, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@dataclass
class Spawned:
    """A server as a user starts it: a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def said(self) -> str:
        """All that it has written."""
        return self.log.read_text("utf-8")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)


@contextlib.contextmanager
def spawned(*options: str, before: Callable[[], None] | None = None) -> Iterator[Spawned]:
    """A process that serves the smallest model; ``before`` is called in it first of all."""
    command = [sys.executable, "-m", "fly.serve", "--model", MODEL, "--draft", "ngram", "--port", "0", *options]
    with tempfile.TemporaryDirectory() as directory, open(log := Path(directory) / "log", "wb") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stderr=file, env=environment, preexec_fn=before)
        server = Spawned(process, log)
        try:
            assert eventually(lambda: "running on" in server.said() or process.poll() is not None, 60)
            found = re.search(r"running on (http://\S+)", server.said())
            assert found is not None, server.said()
            server.url = found[1]
            yield server
        finally:
            process.kill()
            process.wait()


def reference(llm: LLM, messages: list[Any] = CHAT, **params: Any) -> Any:
    """The answer of ``llm`` itself at temperature 0."""
    return llm.generate([llm.chat_prompt(messages)], SamplingParams(temperature=0.0, **params))[0]
