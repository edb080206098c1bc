"""The server on two ranks: the same answers, a lost rank that is told to who waits, a new start after it, and an end
that loses no answer."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import fly
from fly import cli
from fly.parallel import start_ranks
from tests.serving import eventually

QUESTION = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def two_ranks() -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A server that torchrun starts again once."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--model", "fly-target", "--draft", "ngram", "--dtype", "float32", "--port", str(port)]
    options += ["--heartbeat-timeout", "30"]  # a busy machine is no fault; a death is noticed at once
    root = str(Path(__file__).parent.parent)
    process = subprocess.Popen(
        [*torchrun, "--max-restarts", "1", "-m", "fly.serve", *options],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        try:
            assert eventually(lambda: is_ready(client), 90)
            yield process, client
        finally:
            process.terminate()
            process.wait(60)


def second_rank(process: subprocess.Popen[bytes]) -> int:
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split():
        if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError("there is no second rank")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
def test_two_ranks_say_who_is_lost_start_again_and_end_in_order() -> None:
    long = {"model": "fly-target", "prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    chat = {"model": "fly-target", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    llm = fly.LLM("fly-target", "ngram", dtype="float32")
    expected = llm.chat([{"role": "user", "content": QUESTION}], fly.SamplingParams(temperature=0)).text
    with two_ranks() as (process, client):

        def answer() -> str:
            return str(client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"])

        assert answer() == expected
        metrics = client.get("/metrics").text
        peaks = re.findall(
            r'^fly:rank_load_peak_bytes{model_name="fly-target",rank="(\d)"} (\S+)$', metrics, re.MULTILINE
        )
        assert [rank for rank, _ in peaks] == ["0", "1"] and all(float(peak) > 1e7 for _, peak in peaks)
        lost = second_rank(process)
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(lost, signal.SIGKILL)
            start = time.monotonic()
            rest = "".join(lines)
        assert f"rank 1 (process {lost}" in rest and "ended without a word" in rest and "[DONE]" not in rest
        assert time.monotonic() - start < 30

        # torchrun starts both again, on the same port
        assert eventually(lambda: is_ready(client), 90)
        assert process.poll() is None and second_rank(process) != lost
        assert answer() == expected
        with client.stream("POST", "/v1/completions", json={**long, "max_tokens": 200}) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert "[DONE]" in "".join(lines)


def test_ranks_that_fly_starts_end_in_order(tmp_path: Path) -> None:
    """As one process does: the request that runs is finished, the status is 0, and there is no traceback."""
    long = {"model": "fly-tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    command = [sys.executable, "-m", "fly.serve", "--ranks", "2", "--model", "fly-tiny", "--port", "0"]
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            assert eventually(lambda: "running on" in (tmp_path / "log").read_text("utf-8"), 90)
            said = (tmp_path / "log").read_text("utf-8")
            url = said.partition("running on ")[2].partition(" ")[0]
            with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=60) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                assert "[DONE]" in "".join(lines)
            assert process.wait(60) == 0
        finally:
            process.kill()
    said = (tmp_path / "log").read_text("utf-8")
    assert "fly: 2 ranks" in said and "Traceback" not in said and "ended without a word" not in said


def test_statuses_of_ranks_are_those_of_the_whole() -> None:
    """As shells say: of the first that fails, and 128 and its number after a signal. Others do not go on for ever."""
    for code, status in [
        ("pass", 0),
        ("raise SystemExit(3 * (os.environ['RANK'] == '1'))", 3),
        ("os.kill(os.getpid(), 9)", 137),
        ("assert os.environ['WORLD_SIZE'] == '2' and os.environ['MASTER_ADDR'] == '127.0.0.1'", 0),
        ("time.sleep(60 * int(os.environ['RANK'])); raise SystemExit(4)", 4),
    ]:
        assert start_ranks(2, [sys.executable, "-c", f"import os, time; {code}"], grace=0.2) == status, code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_ranks_and_says_how(number: signal.Signals, tmp_path: Path) -> None:
    obedient = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))"
    for setup, status in [(obedient, 0), ("", 143)]:
        ready = [tmp_path / f"{status} {rank}" for rank in range(2)]
        code = f"import os, pathlib, signal, sys, time; {setup}\n"
        code += "pathlib.Path(f'{sys.argv[1]} {os.environ[\"RANK\"]}').touch(); time.sleep(60)"
        command = [sys.executable, "-c", code, str(tmp_path / str(status))]

        def send(ready: list[Path] = ready) -> None:
            assert eventually(lambda: all(file.exists() for file in ready))
            os.kill(os.getpid(), number)

        (sender := threading.Thread(target=send)).start()
        if status and number == signal.SIGINT:  # what ends a command with "interrupted"
            with pytest.raises(KeyboardInterrupt):
                start_ranks(2, command)
        else:
            assert start_ranks(2, command) == status
        sender.join()


def test_options_of_ray_reach_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the modules that import Ray, which is optional."""
    given: dict[str, Any] = {}

    def run(deployed: Any, address: str | None = None) -> int:
        given.update(vars(deployed))
        return 1  # a request was lost

    monkeypatch.setitem(sys.modules, "fly.extras.ray", SimpleNamespace(Deployed=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "fly.extras.ray.running", SimpleNamespace(run=run))
    asked = ["serve", "--ray", "--replicas", "1-8", "--ranks", "2", "--cpus", "4", "--port", "8123"]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 1, result.output
    assert (given["replicas"], given["ranks"], given["cpus"], given["gpus"]) == ("1-8", 2, 4.0, None)
    assert given["settings"].port == 8123 and given["setup"].model == "fly-target"
