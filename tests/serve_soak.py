"""A longer test of the server under load, by hand: ``python -m tests.serve_soak --rounds 10 --streams 300``.

Every round opens so many streams at once, leaves a third of them midway and mixes in bad requests. Printed are the
server's memory and the pages that are held after each round; at the end every finished answer is compared with the same
request run alone, and SIGTERM comes in the middle of a last round, of which no answer that was begun may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from fly import LLM
from fly.policies import base
from tests.serving import MODEL
from tests.test_serve_load import alone, answers, read, requests


def memory(process: int) -> float:
    """Resident megabytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def one_round(http: httpx.AsyncClient, bodies: list[dict[str, Any]], leave: bool) -> list[Any]:
    async def wrong() -> None:
        assert (await http.post("/v1/chat/completions", json={**bodies[0], "top_p": 2})).status_code == 400

    streams = [read(http, body, 2 if leave and number % 3 == 2 else None) for number, body in enumerate(bodies)]
    noise = [wrong() for _ in range(len(bodies) // 4 if leave else 0)]
    return (await asyncio.gather(*streams, *noise, return_exceptions=not leave))[: len(bodies)]


async def idle(http: httpx.AsyncClient) -> dict[str, float]:
    """The gauges, once nothing runs."""
    while True:
        text = (await http.get("/metrics")).text
        gauges = dict(re.findall(r"^((?:vllm|fly):\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
        if float(gauges["vllm:num_requests_running"]) == 0:
            return {name: float(value) for name, value in gauges.items()}
        await asyncio.sleep(0.1)


async def soak(process: subprocess.Popen[bytes], port: int, rounds: int, streams: int) -> list[tuple[Any, Any]]:
    limits = httpx.Limits(max_connections=2 * streams)
    finished: list[tuple[Any, Any]] = []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as http:
        while True:
            try:
                await http.get("/ready")
                break
            except httpx.TransportError:
                assert process.poll() is None
                await asyncio.sleep(0.1)
        for number in range(rounds):
            bodies = requests(streams, seed=number)
            start = time.perf_counter()
            got = await one_round(http, bodies, leave=True)
            gauges = await idle(http)
            finished += [(body, texts) for body, texts in zip(bodies, got) if texts is not None]
            print(
                f"round {number}: {len(finished)} finished so far, {time.perf_counter() - start:.1f} s, "
                f"{memory(process.pid):.0f} MB, pages held {gauges['vllm:kv_cache_usage_perc']:.1%}",
                flush=True,
            )
        bodies = requests(streams, seed=rounds)
        last = asyncio.create_task(one_round(http, bodies, leave=False))
        before = gauges["vllm:request_queue_time_seconds_count"]
        while (await read_count(http)) < before + streams / 2:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        got = await last
    refused = [each for each in got if isinstance(each, BaseException)]
    others = [each for each in refused if "shutting_down" not in str(each) and not isinstance(each, httpx.ConnectError)]
    print(f"SIGTERM: {len(got) - len(refused)} finished, {len(refused)} refused, {len(others)} lost {others[:3]}")
    assert process.wait(60) == 0 and not others
    return finished + [(body, texts) for body, texts in zip(bodies, got) if isinstance(texts, list)]


async def read_count(http: httpx.AsyncClient) -> float:
    text = (await http.get("/metrics")).text
    return float(re.findall(r"^vllm:request_queue_time_seconds_count\{[^}]*\} (\S+)$", text, re.MULTILINE)[0])


def closest_draw(llm: LLM, body: dict[str, Any]) -> float:
    """How near a draw of this request came to giving another token: the least distance to an end of its interval."""
    draw, margins = base.draw, [1.0]

    def watched(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
        tokens_B = draw(probs_BV, uniform_B)
        ends_BV = probs_BV.double().cumsum(-1)
        ends_BV = torch.nn.functional.pad(ends_BV / ends_BV[:, -1:], (1, 0))
        for token, uniform, ends_V in zip(tokens_B.tolist(), uniform_B.tolist(), ends_BV.tolist()):
            margins.append(min(uniform - ends_V[token], ends_V[token + 1] - uniform))
        return tokens_B

    base.draw = watched
    try:
        answers(llm, body)
    finally:
        base.draw = draw
    return min(margins)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "fly.serve",
        "--model",
        MODEL,
        "--draft",
        "ngram",
        "--k",
        "6",
        "--dtype",
        "float32",
    ]
    limits = ["--max-waiting", str(4 * options.streams), "--port", str(options.port)]
    process = subprocess.Popen([*command, *limits])
    try:
        finished = asyncio.run(soak(process, options.port, options.rounds, options.streams))
    finally:
        process.kill()
    llm = alone()
    wrong = [body for body, texts in finished if answers(llm, body) != texts]
    print(f"{len(finished)} answers, {len(wrong)} differ from the same request alone")
    # Sums in another order round otherwise, which shows where a draw falls between two tokens to the last digit.
    margins = [closest_draw(llm, body) for body in wrong]
    print(f"closest draw of each of those: {margins}")
    assert all(margin < 1e-6 for margin in margins)


if __name__ == "__main__":
    main()
