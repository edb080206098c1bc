"""A server as a user starts it, and what is asked of it.

``FLY_SERVE`` is the command that starts it, by default this checkout's: with it the same attacks run on an older one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.attacks import MODEL, Target, answer, exchange, request

COMMAND = shlex.split(os.environ.get("FLY_SERVE", f"{shlex.quote(sys.executable)} -m fly.serve"))
SERVED = ["--model", "fly-target", "--draft", "ngram", "--name", MODEL]
MALLORY, ALICE = "a-key-of-mallory", "a-key-of-alice"
# Limits of time hold on a machine that does nothing else. In CI, where nobody promises that, they are thrice as long.
SLACK = 3 if os.environ.get("CI", "").lower() in ("1", "true") else 1
ROWS: list[str] = []  # of attacks that take time, to be printed
NOTES: list[str] = []  # of others


class Served:
    """A server's process."""

    def __init__(self, directory: Path, *options: str, port: int = 0, **more: Any) -> None:
        self.log = directory / f"log-{time.monotonic_ns()}"
        with self.log.open("wb") as log:
            command = [*COMMAND, *SERVED, "--port", str(port), *options]
            self.process = subprocess.Popen(command, **{"stderr": log, **more})

    def wait(self, seconds: float = 60) -> Served:
        end = time.monotonic() + seconds
        while (found := re.search(r"running on http://([\d.]+):(\d+)", self.said())) is None:
            assert self.process.poll() is None and time.monotonic() < end, self.said()
            time.sleep(0.02)
        self.address = found[1], int(found[2])
        return self

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def get(self, path: str, seconds: float = 30.0) -> tuple[int, bytes]:
        got = exchange(Target(self.address), request("GET", path), seconds)
        head, _, body = got.partition(b"\r\n\r\n")
        return (int(head.split()[1]), body) if head else (0, b"")

    @property
    def megabytes(self) -> float:
        """Resident."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def running(self) -> int:
        """Completions."""
        text = self.get("/metrics")[1].decode()
        return sum(
            int(float(n)) for n in re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.M)
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def served(directory: Path, *options: str, **more: Any) -> Iterator[Served]:
    server = Served(directory, *options, **more)
    try:
        yield server.wait()
    finally:
        server.end()


def timed(work: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def eventually(holds: Any, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not (true := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return true


def say_hi(who: Target) -> tuple[float, int]:
    return timed(lambda: answer(who, "/tokenize", {"prompt": "hi"})[0])


def complete(who: Target, **more: Any) -> tuple[float, int]:
    body = {"model": MODEL, "prompt": "Take", "max_tokens": 8, "temperature": 0, **more}
    return timed(lambda: answer(who, "/v1/completions", body)[0])


def up(server: Served) -> bool:
    with contextlib.suppress(OSError):
        return server.get("/ready")[0] == 200
    return False
