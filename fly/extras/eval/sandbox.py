"""Run unknown programs and their tests in isolated processes (``fly.extras.eval.jail`` has the isolation).

The bundled tasks use a small language, which is safe anywhere. Programs in full Python run where the Linux kernel can
isolate them, and are refused elsewhere.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fly.extras.eval import jail

__all__ = ["Language", "Refused", "Result", "Sandbox"]

_MEMORY_BYTES = 1 << 30
_STARTUP_S = 20.0  # allowance for starting interpreters on a busy machine

Language = Literal["small", "python"]


class Refused(ValueError):
    """This machine cannot isolate programs."""


@dataclass(frozen=True)
class Result:
    """Whether all tests of a program passed, and if not, why."""

    ok: bool
    reason: str = ""


class Sandbox:
    """A process that runs each program in a new process with its own scratch folder. A context manager.

    Args:
        timeout_s: seconds for each program.
        memory: bytes of address space for each.
    """

    def __init__(self, timeout_s: float = 5.0, memory: int = _MEMORY_BYTES) -> None:
        self.timeout_s, self.memory = timeout_s, memory
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", jail.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},  # sets keep their order
            start_new_session=True,
        )
        self._buffer = b""
        if self._line(_STARTUP_S) is None:
            self.close()
            raise Refused("the sandbox's process did not start")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def run(self, code: str, tests: Sequence[str] = (), language: Language = "small") -> Result:
        """Run ``code``, then evaluate each expression of ``tests``; never raises on bad code.

        Raises ``Refused`` where ``language`` is ``python`` and this machine cannot isolate programs.
        """
        assert self._process.stdin is not None
        job = json.dumps([code, list(tests), language, self.timeout_s, self.memory])
        try:
            self._process.stdin.write(job.encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(self.timeout_s + _STARTUP_S)
        except BrokenPipeError:
            line = None
        if line is None:
            raise Refused("the sandbox's process died")
        ok, reason = json.loads(line)
        if ok is None:
            raise Refused(f"programs cannot be run here: {reason}")
        return Result(ok, reason)

    def _line(self, timeout_s: float) -> bytes | None:
        """Return the next line from the process; None if it ended or the time is over."""
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(descriptor, 65536) if ready else b""
            if not chunk:
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line
