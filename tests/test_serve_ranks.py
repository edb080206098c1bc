"""The server on two ranks: the same answers, an end that loses none, and a lost rank that is told to who waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import fly
from tests.serving import eventually

QUESTION = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."


@contextmanager
def two_ranks() -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--model", "fly-target", "--draft", "ngram", "--dtype", "float32", "--port", str(port)]
    root = str(Path(__file__).parent.parent)
    process = subprocess.Popen(
        [*torchrun, "-m", "fly.serve", *options],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        def ready() -> bool:
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            assert eventually(ready, 90)
            yield process, client
        finally:
            process.terminate()
            process.wait(60)


def second_rank(process: subprocess.Popen[bytes]) -> int:
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError("there is no second rank")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
def test_two_ranks_serve_end_in_order_and_say_who_is_lost() -> None:
    long = {"model": "fly-target", "prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    chat = {"model": "fly-target", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    llm = fly.LLM("fly-target", "ngram", dtype="float32")
    expected = llm.chat([{"role": "user", "content": QUESTION}], fly.SamplingParams(temperature=0)).text
    with two_ranks() as (process, client):
        told = client.post("/v1/chat/completions", json=chat).json()
        assert told["choices"][0]["message"]["content"] == expected
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(second_rank(process), signal.SIGKILL)
            start = time.monotonic()
            rest = "".join(lines)
        assert "rank 1" in rest and "ended without a word" in rest and "[DONE]" not in rest
        assert time.monotonic() - start < 30
        assert process.wait(60) != 0
    short = {**long, "max_tokens": 200}
    with two_ranks() as (process, client), client.stream("POST", "/v1/completions", json=short) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert "[DONE]" in "".join(lines)
