"""The server under load: many at once, clients that leave or do not read, an end in the middle."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from fly import LLM, SamplingParams
from fly.drafts import NGramDraft
from fly.engine.job import Job, Request
from fly.engine.worker import Worker
from fly.policies import Exact, Promise, parse_policy
from fly.runner.request import Row, Token
from tests.serving import MODEL, eventually, running

ENDLESS = {"model": MODEL, "prompt": "Take", "max_tokens": 1000, "ignore_eos": True}

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


def alone() -> LLM:
    return LLM(MODEL, draft=NGramDraft(), dtype="float32", k=6)


def answers(llm: LLM, body: dict[str, Any]) -> list[str]:
    """What the request gives when nothing else runs."""
    sampled = ("max_tokens", "temperature", "seed", "stop", "n", "presence_penalty")
    params = SamplingParams(**{"temperature": 0.0, **{name: body[name] for name in sampled if name in body}})
    asked = body.get("speculation", {})
    policy = parse_policy(asked["policy"]) if "policy" in asked else None
    [output] = llm.generate([llm.chat_prompt(body["messages"])], params, policy=policy, k=asked.get("k"))
    return [output.text, *(other.text for other in output.others)]


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Chats of all sorts: sampled and greedy, by several policies and draft lengths."""
    draw = random.Random(seed)
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        numbers = " ".join(str(draw.randrange(10)) for _ in range(draw.randrange(3, 12)))
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Take the list {numbers}. Reverse the list."}],
            "max_tokens": draw.randrange(1, 60),
        }
        if number % 2:
            body |= {"temperature": 0.8, "seed": draw.randrange(1000), "n": 1 + number % 3}
        body |= draw.choice([{}, {"stop": ["5"]}, {"presence_penalty": 0.5}])
        policy = draw.choice([None, "fly(theta=0.2, window=2, hold=2)", "exact | entropy(0.5)", "block"])
        body["speculation"] = {"k": draw.choice([0, 3, 9])} | ({} if policy is None else {"policy": policy})
        bodies.append(body)
    return bodies


async def read(http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> list[str] | None:
    """The texts of a stream's choices, None if it was left after so many lines."""
    texts, ended = [""] * body.get("n", 1), False
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
            lines += 1
            if lines == leave_after:
                return None
    assert ended
    return texts


def test_many_streams_of_which_a_third_leaves() -> None:
    bodies, began = requests(150, seed=3), time.monotonic()
    bad = [{"temperature": -1}, {"speculation": {"policy": "flyy"}}, {"max_tokens": "x"}, {"messages": []}]

    async def all_at_once(url: str) -> list[list[str] | None]:
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

            async def wrong(change: dict[str, Any]) -> None:
                got = await http.post("/v1/chat/completions", json={**bodies[0], **change})
                assert got.status_code == 400

            streams = [read(http, body, 2 if number % 3 == 2 else None) for number, body in enumerate(bodies)]
            noise = [wrong(bad[number % len(bad)]) for number in range(40)]
            return (await asyncio.gather(*streams, *noise))[: len(bodies)]  # type: ignore[return-value]

    # Too few pages for all, so that some have to make room for others.
    with running(options={"cache": 4096, "max_rows": 48}, max_waiting=500) as server:
        got = asyncio.run(all_at_once(server.url))
        assert eventually(lambda: server.all_free and server.service.open == 0)
        assert httpx.get(f"{server.url}/health").status_code == 200
        llm, worker = server.service.llm, server.service.llm.worker
        assert not llm.scheduler and not worker._open and not worker._owners and not worker._wanted and not worker.jobs
        assert worker.submitted == worker.load.taken
    llm = alone()
    finished = [(body, texts) for body, texts in zip(bodies, got) if texts is not None]
    assert len(finished) >= 100
    assert [texts for _, texts in finished] == [answers(llm, body) for body, _ in finished]
    gc.collect()
    assert not [each for each in gc.get_objects() if issubclass(type(each), Job) and each.arrived > began]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_frees_everything(streamed: bool) -> None:
    with running() as server:
        server.service.llm.engine.stretch = 0  # so that there is a while in which to leave

        async def leave() -> None:
            asked = {**ENDLESS, "stream": streamed}
            http = httpx.AsyncClient(base_url=server.url, timeout=30)
            async with http, http.stream("POST", "/v1/completions", json=asked) as response:
                async for _ in response.aiter_lines():
                    return

        def leave_early() -> None:
            with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
                body = json.dumps({**ENDLESS, "n": 4}).encode()
                connection.sendall(HEAD % len(body) + body)
                assert eventually(lambda: not server.all_free)

        if streamed:
            asyncio.run(leave())
        else:
            leave_early()
        assert eventually(lambda: server.all_free and not server.service.llm.scheduler and not server.service.open)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'vllm:request_success_total{finished_reason="length",model_name="fly-tiny"} 0.0' in metrics


def test_a_reader_that_does_not_read_blocks_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with running(write_timeout=1.0) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(address)
            asked = {**ENDLESS, "stream": True, "n": 12, "logprobs": 20, "speculation": {"provenance": True}}
            body = json.dumps(asked).encode()
            connection.sendall(HEAD % len(body) + body)
            assert eventually(lambda: not server.all_free)
            [body] = requests(1, seed=5)
            got = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).json()
            assert [choice["message"]["content"] for choice in got["choices"]] == answers(alone(), body)
            # the engine goes on without it, and it is given up
            assert eventually(lambda: server.all_free and server.service.open == 0, 60)
            assert eventually(lambda: "a reader took nothing for 1 s" in caplog.text)


def test_a_full_queue_says_when_to_come_back() -> None:
    with running("none", options={"max_rows": 1}, max_waiting=1) as server:
        worker = server.service.llm.worker
        server.service.llm.engine.stretch = 0
        # Each step takes 20 ms or more, and each token a step. So the first request still runs when the third comes, on
        # any machine.
        worker.watch = lambda: time.sleep(0.02)

        async def crowd() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
                async with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
                    assert response.status_code == 200
                    second = asyncio.create_task(http.post("/v1/completions", json={**ENDLESS, "max_tokens": 4}))
                    while not worker.load.waiting:
                        await asyncio.sleep(0.01)
                    refused = await http.post("/v1/completions", json={**ENDLESS, "max_tokens": 4})
                    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                    assert refused.json()["error"]["type"] == "rate_limit_error"
                assert (await second).status_code == 200  # once the first has left
                assert (await http.post("/v1/completions", json={**ENDLESS, "max_tokens": 4})).status_code == 200

        asyncio.run(crowd())


def test_a_client_that_comes_or_leaves_hurries_only_the_current_turn() -> None:
    hurried = False
    begun: list[tuple[list[str], bool]] = []
    waited: list[bool] = []

    class Toy:
        """Takes one job, whose first step lasts until somebody waits for its end; the second is its last."""

        engine = property(lambda self: self)
        runner = SimpleNamespace(executor=SimpleNamespace(device=torch.device("cpu")))
        running, waiting, allocators, rows, came = (), (), (), 0, ()

        def enter_thread(self) -> None:
            pass

        def hurry(self, now: bool) -> None:
            nonlocal hurried
            hurried = now

        def __bool__(self) -> bool:
            return self.rows > 0

        def add(self, row: Row) -> None:
            self.rows, self.came = self.rows + 1, (*self.came, "submit")

        def cancel(self, row: Row) -> None:
            self.rows, self.came = self.rows - 1, (*self.came, "cancel")
            begun.append((list(self.came), hurried))

        def step(self, seconds: float) -> dict[int, list[Token]]:
            begun.append((list(self.came), hurried))
            self.came = ()
            waited.append(eventually(lambda: hurried))  # until somebody waits for this turn to be over
            return {}

    toy: Any = Toy()
    worker = Worker(toy)
    row = Row([1], 1, SamplingParams(), Exact(), 0, 0)
    job = Job([Request(row, Promise.of(row.policy))])
    worker.submit(job)
    assert eventually(lambda: len(begun) == 1)
    worker.cancel(job, wait=True)
    worker.close()
    assert waited == [True] and not hurried
    assert [kind for kinds, _ in begun for kind in kinds] == ["submit", "cancel"]
    assert not any(now for _, now in begun)


def test_an_idle_engine_sleeps() -> None:
    with running() as server:
        turns, worker = [], server.service.llm.worker
        turn = worker._turn
        worker._turn = lambda: (turns.append(1), turn())[1]  # type: ignore[method-assign]
        assert httpx.post(f"{server.url}/v1/completions", json={**ENDLESS, "max_tokens": 5}).status_code == 200
        assert eventually(lambda: not worker._open)
        taken = len(turns)
        assert taken
        assert not eventually(lambda: len(turns) > taken + 1, 0.3)  # one more may tell of the client's leave


def test_a_terminated_server_finishes_what_it_has() -> None:
    """SIGTERM under load: no more requests, every answer to its end, exit status 0."""
    bodies = [body for body in requests(40, seed=11) if body["max_tokens"] > 20]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
    process = subprocess.Popen(
        [*command, "--port", str(port)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    log: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: log.extend(process.stderr))  # type: ignore[arg-type]
    reader.start()
    try:

        def up() -> bool:
            with httpx.Client() as http:
                try:
                    return http.get(f"http://127.0.0.1:{port}/ready").status_code == 200
                except httpx.TransportError:
                    return process.poll() is not None

        assert eventually(up, 60) and process.poll() is None, log

        async def load() -> list[Any]:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                running = [asyncio.create_task(read(http, body)) for body in bodies]
                # one that runs for long, so that there is a while in which the server only finishes
                endless = asyncio.create_task(http.post("/v1/completions", json={**ENDLESS, "max_tokens": 600, "n": 4}))
                begun = f'vllm:request_queue_time_seconds_count{{model_name="{MODEL}"}} {len(bodies) + 1}.0'
                while begun not in (await http.get("/metrics")).text:
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                while (await http.get("/ready")).status_code == 200:
                    await asyncio.sleep(0.01)
                refused = await http.post("/v1/chat/completions", json=bodies[0])
                assert refused.status_code == 503 and refused.headers["retry-after"]
                last = await endless
                assert last.status_code == 200 and last.json()["usage"]["completion_tokens"] == 4 * 600
                return list(await asyncio.gather(*running))

        got = asyncio.run(load())
        assert process.wait(30) == 0, log
    finally:
        process.kill()
        reader.join()
    llm = alone()
    assert got == [answers(llm, body) for body in bodies]
