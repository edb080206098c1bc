"""Try the forms of strangers: compile each in a process of its own, with limited time and memory, because the library's
own limits do not cover everything (``{"multipleOf": 999983}`` takes ten seconds and 400 MB), and because memory that a
process freed is not always given back. Knows nothing of requests.

A process that has read the vocabulary is forked for each form. It runs this file by itself, so that it needs neither
torch nor the rest of this package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any, NoReturn

__all__ = ["Trial"]

SECONDS, BYTES = 1.0, 256 << 20  # the processor time and the memory that one form may take
_PATIENCE = 30.0  # seconds after which a process that gives no answer is ended, even on a busy machine
_TOO_MUCH = f"compiling it takes more than {SECONDS:g} s of the processor or {BYTES >> 20} MiB; make it simpler"


class Trial:
    """Compiles forms in separate processes. The first one starts with the first form.

    Args:
        vocabulary: keyword arguments of ``llguidance.LLTokenizer``.
    """

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        self._vocabulary = json.dumps(dict(vocabulary))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, kind: str, source: str) -> None:
        """Raise ``ValueError`` with the reason if a form cannot be compiled, or takes too much. The arguments are those
        of ``fly.runner.forms.compile_form``."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._open()
            answer = self._answer(json.dumps([kind, source]))
            if answer is None:
                self._end()
        if (reason := _TOO_MUCH if answer is None else json.loads(answer)) is not None:
            raise ValueError(reason)

    def close(self) -> None:
        """End the processes, and any trial in them."""
        if (process := self._process) is not None:
            _kill(process)
        with self._lock:
            self._end()

    def _open(self) -> None:
        from fly.runner import forms  # not above, since the process runs this file too

        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, forms.__file__],  # -P: modules of this folder must not hide others
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            process_group=0,
        )
        if self._answer(self._vocabulary) is None:
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
        ready_streams, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        return (self._process.stdout.readline() or None) if ready_streams else None

    def _end(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            _kill(process)
            with contextlib.suppress(OSError):
                process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with its forks."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _serve(lines: IO[str], answers: IO[str], path: str) -> None:
    """Run the process: read the vocabulary, and then a form on each line. Answer null if it can be used, or the reason
    why not. The module ``fly.runner.forms`` is loaded from the file ``path``."""
    specification = importlib.util.spec_from_file_location("forms", path)
    assert specification is not None and specification.loader is not None
    forms = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(forms)
    vocabulary = forms.LLTokenizer(**json.loads(lines.readline()))
    os.nice(2)  # generation goes first
    print("null", file=answers, flush=True)
    for line in lines:
        fork = os.fork()
        if not fork:
            _try(partial(forms.compile_form, vocabulary, *json.loads(line)), answers)
        if os.waitpid(fork, 0)[1]:
            print(json.dumps(_TOO_MUCH), file=answers, flush=True)


def _try(compile_form: Callable[[], object], answers: IO[str]) -> NoReturn:
    """Compile a form, answer, and end this process. If the form takes too much, a signal or a failed allocation ends it
    before."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    _limit_memory()
    reason = None
    try:
        compile_form()
    except ValueError as error:
        reason = str(error)
    except MemoryError:
        os._exit(1)
    except BaseException as error:  # a panic of the library too
        reason = f"compiling it failed: {error!r}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(reason), file=answers, flush=True)
    os._exit(0)


def _limit_memory() -> None:
    """Limit memory to ``BYTES`` more than now, if the system can."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # of Unix alone

        with open("/proc/self/statm", encoding="ascii") as sizes:
            used_bytes = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + BYTES, used_bytes + BYTES))


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout, sys.argv[1])
