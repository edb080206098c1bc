"""One client of a server beside others: none finds out what another said, and none waits for another's excess."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from fly import LLM, SamplingParams
from fly.engine.job import Job, Request
from fly.serve import Settings
from fly.serve.clients import Clients
from fly.serve.trial import Trial
from tests.serving import MODEL, Running, eventually, running

PROMPT = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."
ENDLESS = {"prompt": "Take", "max_tokens": 900, "ignore_eos": True, "temperature": 1}


def post(server: Running, body: dict[str, Any], key: str = "a") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, **body}, headers=headers, timeout=120)


def cached(server: Running, key: str = "a", **more: Any) -> int:
    """Tokens of ``PROMPT`` that were in the cache already."""
    answer = post(server, {"prompt": PROMPT, "max_tokens": 1, **more}, key)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


# --- what others said ------------------------------------------------------------------------------------


def test_prompts_are_shared_by_key() -> None:
    with running(api_keys=("a", "b")) as server:
        assert cached(server, "a") == 0 < cached(server, "a")
        assert cached(server, "b") == 0 < cached(server, "b")
        assert cached(server, "b", cache_salt="x") == 0 < cached(server, "b", cache_salt="x")
        assert cached(server, "a", cache_salt="x") == 0  # the same salt of another key is another


def test_choices_share_one_prompt_which_counts_once() -> None:
    with running() as server:
        assert cached(server, n=3) == 0
        again = cached(server)
        assert 0 < again == cached(server, n=3)
        assert cached(server, prompt=[PROMPT, "Take it all."], n=2) == again


def test_prompts_are_shared_wider_where_the_operator_says_so_or_gave_no_keys() -> None:
    with running(api_keys=("a", "b"), share_prefixes="all") as server:
        assert cached(server, "a") == 0 < cached(server, "b")
        assert cached(server, "a", cache_salt="x") == 0 < cached(server, "b", cache_salt="x")
    with running() as server:
        assert cached(server, "a") == 0 < cached(server, "b")


def test_in_a_program_prompts_are_shared_unless_a_request_says_otherwise() -> None:
    with LLM(MODEL, dtype="float32") as llm:

        def shared(salt: str) -> int:
            return llm.generate(PROMPT, SamplingParams(max_tokens=1, cache_salt=salt))[0].stats.cached

        assert shared("") == 0 < shared("") and shared("x") == 0 < shared("x")


# --- grammars --------------------------------------------------------------------------------------------


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "max_tokens": 1}


def test_others_generate_while_grammars_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(api_keys=("a", "b")) as server, ThreadPoolExecutor(32) as clients:
        held, started, go = [], threading.Semaphore(0), threading.Event()

        def vet(kind: str, source: str) -> None:
            held.append(source)
            started.release()
            assert go.wait(60)

        monkeypatch.setattr(Trial, "__call__", lambda _, kind, source: vet(kind, source))
        try:
            bodies = [{"prompt": "x", **schema_of({"title": str(number)})} for number in range(24)]
            bombs = [clients.submit(post, server, body) for body in bodies]
            assert started.acquire(timeout=60)
            for key in "ab":  # whose grammar holds the compiler up as well as others
                whole = post(server, {**ENDLESS, "max_tokens": 200}, key).json()
                assert whole["usage"]["completion_tokens"] == 200
            # another client's grammar finds a thread: of one client one is compiled at a time
            other = clients.submit(post, server, {"prompt": "x", **schema_of({"title": "b"})}, "b")
            assert started.acquire(timeout=60)
            assert not other.done() and not any(bomb.done() for bomb in bombs)
            assert len(held) == 2
        finally:
            go.set()
        assert {bomb.result().status_code for bomb in [*bombs, other]} == {200}
        assert len(held) == 25


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def trial(llm: LLM) -> Iterator[Trial]:
    with closing(Trial(llm.grammars.spelling)) as made:
        yield made


def requested(llm: LLM, vet: Trial | None, **structured: Any) -> Request:
    [request] = llm.requests(["x"], SamplingParams(structured=structured), vet=vet)  # type: ignore[arg-type]
    return request


def refused(llm: LLM, vet: Trial | None, **structured: Any) -> str:
    with pytest.raises(ValueError, match=r"cannot be used|at most") as error:
        requested(llm, vet, **structured)
    return str(error.value)


def test_a_grammar_that_takes_too_much_ends_its_trial_alone(llm: LLM, trial: Trial) -> None:
    requested(llm, trial, regex="no|yes")
    kept, process = len(llm.grammars._kept), trial._process
    for number in (999_983, 9_999_991):  # ten seconds and 400 MB; a hundred times that
        assert "takes more than 1 s" in refused(llm, trial, json_schema={"type": "integer", "multipleOf": number})
        assert len(llm.grammars._kept) == kept
    assert requested(llm, trial, json_schema={"type": "integer"}).row.matcher is not None
    requested(llm, trial, regex="yes|no")
    assert "300014 bytes; at most" in refused(llm, trial, json_schema={"enum": ["x" * 300_000]})
    # A process that is gone is replaced.
    assert process is not None and trial._process is process and process.poll() is None
    process.kill()
    process.wait()
    requested(llm, trial, regex="yes|maybe")


REFUSED: list[dict[str, Any]] = [
    {"regex": "a(b"},
    {"regex": "(a{1000}){1000}"},
    {"grammar": "start: nowhere"},
    {"json_schema": {"type": "strang"}},
    {"json_schema": {"type": "object", "minProperties": 3}},
    {"json_schema": {"const": "\ud83d"}},
]


@pytest.mark.parametrize("structured", REFUSED, ids=str)
def test_a_trial_refuses_with_the_words_of_a_program(llm: LLM, trial: Trial, structured: dict[str, Any]) -> None:
    assert refused(llm, trial, **structured) == refused(llm, None, **structured)


REFUSE_MANY = """
import os
from concurrent.futures import ThreadPoolExecutor
from fly import LLM, SamplingParams
from fly.serve.trial import Trial

def measure():
    processes = ["self", *([str(trial._process.pid)] if trial._process else [])]
    pages = sum(int(open(f"/proc/{each}/statm").read().split()[1]) for each in processes)
    return pages * os.sysconf("SC_PAGE_SIZE")

def refuse(number):
    try:
        llm.requests(["x"], SamplingParams(structured={"regex": f"(a{{{1000 + number}}}){{1000}}"}), vet=trial)
    except ValueError as error:
        return "too large to be followed" in str(error)

with LLM("fly-tiny", dtype="float32") as llm:
    trial = Trial(llm.grammars.spelling)
    llm.grammars.warm(trial)
    before = measure()
    with ThreadPoolExecutor(4) as clients:
        assert all(clients.map(refuse, range(4)))
    print(measure() - before >> 20)
    trial.close()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_goes_back_after_refused_patterns() -> None:
    """Compiled by the server's own threads, these four leave 60 to 80 MB in it."""
    answer = subprocess.run([sys.executable, "-c", REFUSE_MANY], capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 30  # MB


def test_nothing_is_kept_of_a_grammar_beyond_the_limits(llm: LLM, trial: Trial) -> None:
    """Neither of one that is refused at once, nor of one that proves to be one of those while it is followed."""
    grammars = llm.grammars
    kept, size = dict(grammars._kept), grammars._size
    for number in range(4):
        assert "it is too large" in refused(llm, trial, regex=f"(a{{{1000 + number}}}){{1000}}")
        params = SamplingParams(structured={"regex": f"[ab]{{20}}(a{{{1000 + number}}}){{1000}}"}, max_tokens=60)  # type: ignore[arg-type]
        requests = llm.requests(["x"], params, vet=trial)
        with pytest.raises(ValueError, match="cannot go on: it is too large to be followed"):
            llm.worker.run(Job(requests))
        assert requests[0].row.matcher is None  # its error, with what that has seen, may be held for long
    assert grammars._kept == kept and grammars._size == size


def test_grammars_are_kept_up_to_so_many_bytes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fly.runner.structured._KEPT", 3 * (33 << 20))
    for number in range(9):
        llm.requests(["x"], SamplingParams(structured={"regex": "a" * (number + 1)}))  # type: ignore[arg-type]
        assert len(llm.grammars._kept) <= 3 and llm.grammars._size <= 3 * (33 << 20)
    assert [form.regex for _, form in llm.grammars._kept] == ["a" * 7, "a" * 8, "a" * 9]


def test_bad_words_have_a_limit() -> None:
    with running() as server:
        answer = post(server, {"prompt": "x", "bad_words": ["ab" * 40_000]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "bad_words"
        assert "80000 characters; at most 65536" in answer.json()["error"]["message"]
        assert post(server, {"prompt": "x", "max_tokens": 9, "bad_words": ["ab"] * 1000}).status_code == 200


# --- turns -----------------------------------------------------------------------------------------------


def slow(server: Running) -> None:
    """Each step is one round and takes a while, so that requests do not end before others have come."""
    server.service.llm.engine.stretch = 0
    server.service.llm.worker.watch = lambda: time.sleep(0.02)


def test_a_newcomer_does_not_wait_for_one_who_asked_for_much() -> None:
    """In steps of the engine: the one under way when it comes, and two of its own."""
    with running(api_keys=("a", "b"), max_n=64, options={"max_rows": 24}) as server, ThreadPoolExecutor(8) as clients:
        slow(server)
        scheduler, steps, came, first = server.service.llm.scheduler, 0, [], []
        step, add = scheduler.step, scheduler.add

        def counted(seconds: float) -> Any:
            nonlocal steps
            steps += 1
            found = step(seconds)
            first.extend(steps for row in scheduler.running if row.client == mine and row.generated and not first)
            return found

        def noted(row: Any, *more: Any) -> None:
            if row.client == mine:
                came.append(steps)
            add(row, *more)

        mine = ""
        scheduler.step, scheduler.add = counted, noted  # type: ignore[method-assign]
        heavy = [clients.submit(post, server, {**ENDLESS, "n": 32, "seed": number}) for number in range(8)]
        assert eventually(lambda: server.service.llm.worker.load.waiting > 150)
        [other] = server.service.held
        mine = "not yet"
        body = {**ENDLESS, "prompt": PROMPT, "max_tokens": 30}
        mine = server.service.clients.identify("127.0.0.1", {b"authorization": b"Bearer b"}).name
        assert mine != other
        assert post(server, body, "b").status_code == 200
        assert first[0] - came[0] <= 2 and not any(each.done() for each in heavy)
        server.service.llm.worker.fail(RuntimeError("enough"))


def test_a_client_has_its_part_of_the_queue_and_no_more_than_the_operator_allows() -> None:
    options = {"max_rows": 2}
    with (
        running(api_keys=("a", "b"), max_waiting=8, max_open=12, options=options) as server,
        ThreadPoolExecutor(16) as clients,
    ):
        slow(server)
        heavy = [clients.submit(post, server, ENDLESS) for _ in range(10)]
        assert eventually(lambda: server.service.llm.worker.load.waiting == 8)
        full = post(server, ENDLESS)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        never = post(server, {**ENDLESS, "n": 13})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n") and "retry-after" not in never.headers
        too_many = post(server, {**ENDLESS, "n": 3})
        assert (too_many.status_code, too_many.json()["error"]["code"]) == (429, "client_limit")
        assert post(server, {**ENDLESS, "max_tokens": 5}, "b").status_code == 200  # within its part
        server.service.llm.worker.fail(RuntimeError("enough"))
        assert [each.result().status_code for each in heavy] == [500] * 10
        assert eventually(lambda: not server.service.held)


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("testclient", "testclient"),
    ],
)
def test_without_keys_a_client_is_its_address(host: str, client: str) -> None:
    assert Clients(Settings()).identify(host, {b"authorization": b"Bearer ignored"}).name == client


# --- streams ---------------------------------------------------------------------------------------------


def test_tokens_leave_after_the_interval_while_a_stream_is_open() -> None:
    with running(draft="none", stream_interval=0.004) as server:
        engine, plans = server.service.llm.engine, []
        if engine.runner.executor.kernels == "torch":
            pytest.skip("takes its rounds one by one")
        plan = engine.runner.plan

        def noted(*arguments: Any) -> Any:
            plans.append(plan(*arguments))
            return plans[-1]

        engine.runner.plan = noted  # type: ignore[method-assign]
        post(server, {**ENDLESS, "max_tokens": 100})
        whole, _ = {each.seconds for each in plans if each}, plans.clear()
        answer = post(server, {**ENDLESS, "max_tokens": 100, "stream": True})
        assert json.loads(answer.text.split("data: ")[-2])["choices"][0]["finish_reason"] == "length"
        assert whole == {engine.stretch} and {each.seconds for each in plans if each} == {0.004}
