"""Try a new grammar: compile it, and follow it for a few tokens. If other requests must not wait for that, a separate
process tries it first, with limited time and memory, because the library's own limits do not cover everything
(``{"multipleOf": 999983}`` takes ten seconds and 400 MB). Knows nothing of requests.

The process runs this file by itself, so that it needs neither torch nor the rest of this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Trial", "follow"]

SECONDS, BYTES = 1.0, 256 << 20  # the processor time and the memory that one grammar may take
_AHEAD = 3  # follow a new grammar for this many tokens: some grammars take long only there
_PATIENCE = 30.0  # seconds after which a process that gives no answer is ended, even on a busy machine


def follow(matcher: LLMatcher) -> bool:
    """Follow a grammar for a few tokens, or until it ends or fails; one that is too large usually fails here. Return
    whether it allows any first token."""
    begins = False
    for _ in range(_AHEAD):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        begins = True
        if (byte := next((at for at, bits in enumerate(mask) if bits), None)) is None:
            break
        matcher.consume_token(8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1)
        if matcher.is_error() or matcher.is_stopped():
            break
    return begins


class Trial:
    """Tries grammars in a separate process. It starts with the first grammar, and again after a grammar that ended it.

    Args:
        vocabulary: keyword arguments of ``llguidance.LLTokenizer``.
        limits: keyword arguments of ``llguidance.LLParserLimits``.
    """

    def __init__(self, vocabulary: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
        self._start = json.dumps({"vocabulary": dict(vocabulary), "limits": dict(limits)})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.started = 0  # processes so far

    def __call__(self, grammar: str) -> None:
        """Raise ``ValueError`` if a grammar takes too much to compile. Does not check whether it is valid."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._open()
            if self._answer(json.dumps(grammar)) is None:
                self._end()
                raise ValueError(
                    f"compiling it takes more than {SECONDS:g} s of the processor or {BYTES >> 20} MiB; make it simpler"
                )

    def close(self) -> None:
        """End the process, and any trial in it."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _open(self) -> None:
        self.started += 1
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # -P: modules of this folder must not hide others
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        if self._answer(self._start) is None:
            self._end()
            raise RuntimeError("the process that tries grammars does not start")

    def _answer(self, line: str) -> str | None:
        """Return the process's answer to a line; None if it has ended, or gives none."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            return None
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        return (self._process.stdout.readline() or None) if ready else None

    def _end(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()


def _serve(lines: IO[str], answers: IO[str]) -> None:
    """Run the process: read the vocabulary, then a grammar on each line, and answer each once it is compiled. If one
    takes too much, a signal or a failed allocation ends the process."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    start = json.loads(lines.readline())
    vocabulary, limits = LLTokenizer(**start["vocabulary"]), LLParserLimits(**start["limits"])
    os.nice(2)  # generation goes first
    _limit_memory()
    print("ready", file=answers, flush=True)
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        with contextlib.suppress(Exception):  # the caller compiles it again, and reports what is wrong with it
            matcher = LLMatcher(vocabulary, json.loads(line), log_level=0, limits=limits)
            follow(matcher)
            del matcher
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("done", file=answers, flush=True)


def _limit_memory() -> None:
    """Limit memory to ``BYTES`` more than now, if the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # of Unix alone

        with open("/proc/self/statm", encoding="ascii") as sizes:
            now = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, now + BYTES))


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
