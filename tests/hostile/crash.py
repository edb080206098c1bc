"""A process that dies under load, and what becomes of its clients."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from tests.hostile.attacks import MODEL, Target, exchange, request
from tests.hostile.served import ALICE, COMMAND, NOTES, SERVED, SLACK, Served, complete, eventually, up

CRASHES = [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV]
CLIENTS = 24


def ask(server: Served, number: int, ends: list[tuple[float, bool]]) -> None:
    """A long request in its turn: streamed or whole, some with a form; when it ended, and whether with all of its
    answer."""
    body = {"model": MODEL, "prompt": "Take", "max_tokens": 8 if number % 4 == 0 else 900, "ignore_eos": True}
    body |= {"stream": number % 2 == 1, "n": 4}
    if number % 5 == 0:
        body |= {"guided_regex": f"[a-z]{{{900 + number}}}"}
    got = exchange(Target(server.address), request("POST", "/v1/completions", json.dumps(body).encode(), ALICE), 60)
    ends.append((time.perf_counter(), got.endswith((b"[DONE]\n\n\r\n0\r\n\r\n", b"}}}"))))


def crash(server: Served, how: signal.Signals, pid: Path) -> tuple[int, float, float]:
    """End the process while clients wait. How many lost their answers; seconds until the last of them knew, and until
    the next process was ready after that."""
    ends: list[tuple[float, bool]] = []
    threads = [threading.Thread(target=ask, args=[server, number, ends]) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: server.running >= 8)
    died = time.perf_counter()
    os.kill(int(pid.read_text(encoding="utf-8")), how)
    for thread in threads:
        thread.join(30)
    lost = [at - died for at, whole in ends if not whole]
    assert len(ends) == CLIENTS and lost
    assert eventually(lambda: up(server), 60)
    return len(lost), max(lost), time.perf_counter() - died


def test_a_crash_is_never_a_hang(tmp_path: Path) -> None:
    """A process that dies under load takes its connections with it, whatever a core file would take; who starts it
    again (here a loop of the shell) has it back in the time that loading takes. What was lost is counted."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server, pid = Served.__new__(Served), tmp_path / "pid"
    server.address = "127.0.0.1", port
    arguments = shlex.join([*COMMAND, *SERVED, "--port", str(port), "--api-key", ALICE])
    again = f"while :; do {arguments} & echo $! > {pid}; wait $!; done"
    cores = (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_CORE)[1])
    start = time.perf_counter()
    with (tmp_path / "log").open("wb") as log:
        shell = subprocess.Popen(
            ["sh", "-c", again],
            stderr=log,
            start_new_session=True,
            cwd=tmp_path,  # for cores
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, cores),
        )
    try:
        assert eventually(lambda: up(server), 60)
        loading = time.perf_counter() - start
        for how in CRASHES:
            lost, closed, back = crash(server, how, pid)
            NOTES.append(
                f"{how.name}: {lost} of {CLIENTS} requests lost, the last connection closed after {closed:.3f} s; "
                f"ready again after {back:.1f} s (loading took {loading:.1f} s)"
            )
            assert closed < SLACK and back < 2 * SLACK * loading + 2
            assert complete(Target(server.address, ALICE))[1] == 200
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
