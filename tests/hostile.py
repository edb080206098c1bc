"""Attacks on a server, all that we know of: ``make hostile``, some minutes on a machine that does nothing else.

Each attack (``tests/attacks.py``) runs in a process of its own against a server as a user starts it, while this process
asks for /health and /metrics, and another client for its own. What a server has to hold: 50 probes of a median of 0.1
seconds and none above 0.5, another client's requests answered, memory in bounds, and peace when the attack is over.

``FLY_SERVE`` is the command that starts the server, by default this checkout's: with it the same attacks run on an
older one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import ATTACKS, CHAT, MODEL, Target, answer, exchange, request

COMMAND = shlex.split(os.environ.get("FLY_SERVE", f"{shlex.quote(sys.executable)} -m fly.serve"))
SERVED = ["--model", "fly-target", "--draft", "ngram", "--name", MODEL]
PROBES, MEDIAN, WORST = 50, 0.1, 0.5  # seconds
MALLORY, ALICE = "a-key-of-mallory", "a-key-of-alice"
ROWS: list[str] = []


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
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
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


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    head = f"{'attack':32} {'probes: median':>14} {'worst':>7} {'hi: worst':>10} {'completion':>10} {'MB':>6}  answers"
    print("\n\n" + "\n".join([head, *ROWS]), flush=True)


# --- load ------------------------------------------------------------------------------------------------

# The answers that an attack may get: what is right, and what says that this client has enough.
EXPECTED = {
    "wrong_entries": {400}, "small_entries": {200, 400}, "escapes": {400}, "tool_calls": {400},
    "tokenized": {200, 429, 503}, "detokenized": {200, 400, 429}, "echoes": {200, 429}, "forms": {200, 400, 429},
    "completions": {200, 429}, "large_answers": {200}, "large_streams": {200},
}  # fmt: skip
LOAD = [*((name, 1) for name in ATTACKS), ("tokenized", 3), ("forms", 3), ("small_entries", 3), ("completions", 3)]


@pytest.mark.parametrize(("name", "clients"), LOAD, ids=[f"{name}-{clients}" for name, clients in LOAD])
def test_others_are_answered(tmp_path: Path, name: str, clients: int) -> None:
    """While this goes on: probes, and the requests of another client."""
    keys = [f"{MALLORY}-{number}" for number in range(clients)]
    options = [word for key in (ALICE, *keys) for word in ("--api-key", key)]
    with served(tmp_path, *options) as server:
        alice = Target(server.address, ALICE)
        assert say_hi(alice)[1] == 200 == complete(alice)[1]
        context = multiprocessing.get_context("fork")
        seen = context.Array("L", 1000, lock=False)
        targets = [Target(server.address, key, f"127.0.0.{2 + n}", seen) for n, key in enumerate(keys)]
        attackers = [context.Process(target=ATTACKS[name], args=(target,), daemon=True) for target in targets]
        for attacker in attackers:
            attacker.start()
        try:
            time.sleep(1)
            probes, greeted, completed = [], [], []
            for number in range(PROBES):
                probes.append(timed(lambda: server.get("/health" if number % 2 else "/metrics")[0]))  # noqa: B023
                if number % 10 == 5:
                    greeted.append(say_hi(alice))
                    completed.append(complete(alice))
                time.sleep(0.1)
            if name.startswith("large"):  # until one of them was written
                while not sum(seen):
                    probes.append(timed(lambda: server.get("/health")[0]))
                    time.sleep(0.1)
        finally:
            for attacker in attackers:
                attacker.kill()
                attacker.join()
        answers = {status: count for status, count in enumerate(seen) if count}
        median, worst = statistics.median(seconds for seconds, _ in probes), max(seconds for seconds, _ in probes)
        hi, completion = (max(seconds for seconds, _ in each) for each in (greeted, completed))
        ROWS.append(
            f"{name + (f' x {clients}' if clients > 1 else ''):32} {median:14.3f} {worst:7.3f} {hi:10.3f} "
            f"{completion:10.3f} {server.megabytes:6.0f}  {answers}"
        )
        print(ROWS[-1], flush=True)
        assert {status for _, status in probes} == {200} and median <= MEDIAN and worst <= WORST
        assert {status for _, status in (*greeted, *completed)} == {200} and hi < 3 and completion < 10
        assert not answers.keys() - EXPECTED.get(name, set()) - {0}, answers
        assert server.megabytes < 2000
        # and then there is peace
        assert eventually(lambda: server.running == 0, 60)
        seconds, status = say_hi(alice)
        assert status == 200 and seconds < 1 and "Traceback" not in server.said()


def say_hi(who: Target) -> tuple[float, int]:
    return timed(lambda: answer(who, "/tokenize", {"prompt": "hi"})[0])


def complete(who: Target) -> tuple[float, int]:
    body = {"model": MODEL, "prompt": "Take", "max_tokens": 8, "temperature": 0}
    return timed(lambda: answer(who, "/v1/completions", body)[0])


def test_the_first_form_is_as_fast_as_the_second(tmp_path: Path) -> None:
    with served(tmp_path, "--api-key", ALICE) as server:
        alice = Target(server.address, ALICE)
        assert complete(alice)[1] == 200

        def ask(title: str) -> tuple[float, int]:
            schema = {"title": title, "type": "object", "properties": {"a": {"type": "integer"}}}
            body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "guided_json": schema}
            return timed(lambda: answer(alice, "/v1/completions", body)[0])

        first, second = ask("first"), ask("second")
        print(f"\nfirst form {first[0]:.3f} s, second {second[0]:.3f} s")
        assert first[1] == second[1] == 200 and first[0] < second[0] + 0.3


# --- who is who ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two clients, with an access log."""
    directory = tmp_path_factory.mktemp("keyed")
    keys = [word for key in (ALICE, MALLORY) for word in ("--api-key", key)]
    with served(directory, *keys, "--access-log", "--max-open", "2") as server:
        yield server
        assert server.get("/health")[0] == 200 and "Traceback" not in server.said()


TINY = json.dumps({"model": MODEL, "prompt": "Take", "max_tokens": 1}).encode()
LONG = json.dumps({"model": MODEL, "prompt": "Take", "max_tokens": 900, "ignore_eos": True}).encode()
TWICE = [
    f"authorization: Bearer {MALLORY}", "host: evil.example", "content-length: 3", "content-type: text/plain",
    "transfer-encoding: chunked", "origin: http://evil.example",
]  # fmt: skip


def head(got: bytes) -> bytes:
    return got.split(b"\r\n", 1)[0]


@pytest.mark.parametrize("second", TWICE)
def test_headers_that_matter_are_there_once(keyed: Served, second: str) -> None:
    who, more = Target(keyed.address), (second, "origin: http://localhost") if "origin" in second else (second,)
    for key in (ALICE, MALLORY):
        data = request("POST", "/v1/completions", TINY, key, *more)
        assert head(exchange(who, data)).startswith(b"HTTP/1.1 400 "), data
        first, _, rest = data.partition(b"\r\n")
        turned = b"\r\n".join([first, *reversed(rest.partition(b"\r\n\r\n")[0].split(b"\r\n"))])
        assert head(exchange(who, turned + b"\r\n\r\n" + TINY)).startswith(b"HTTP/1.1 400 ")


def test_one_key_is_one_client(keyed: Served) -> None:
    """However its requests are written, it has no more than it may have."""
    mallory, statuses = Target(keyed.address, MALLORY), Counter[int]()

    def ask(number: int) -> None:
        ways = [(f"authorization: Bearer wrong-{number}",), (f"x-forwarded-for: 10.0.0.{number}",), ()]
        data = request("POST", "/v1/completions", LONG, MALLORY, *ways[number % 3])
        if number % 6 == 0:  # before the right one
            data = data.replace(b"\r\nhost", b"\r\nauthorization: Bearer x\r\nhost")
        got = exchange(mallory, data)
        statuses[int(got.split()[1])] += 1

    threads = [threading.Thread(target=ask, args=[number]) for number in range(18)]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, keyed.running)
        time.sleep(0.01)
    assert most <= 2 and statuses[400] == 6 and statuses[200] >= 2 and set(statuses) <= {200, 400, 429}, statuses


def test_what_a_client_says_of_itself_is_not_believed_nor_written_down(keyed: Served, tmp_path: Path) -> None:
    """Except through a proxy that the operator trusts."""
    for lie in ("10.9.9.9", "10.9.9.9, 127.0.0.1", "x\x1b[31m", "a b c", "\xff"):
        assert (
            b" 200 "
            in head(exchange(Target(keyed.address), request("GET", "/health", b"", "", f"x-forwarded-for: {lie}")))
            or "\x1b" in lie
        )
    exchange(Target(keyed.address), request("GET", "/%0d%0aINFO:%20forged%1b%5b2J?secret", b"", ALICE))
    assert eventually(lambda: "forged" in keyed.said())
    said = keyed.said()
    assert "10.9.9.9" not in said and "\x1b" not in said and "secret" not in said and ALICE not in said
    assert all(line.startswith("127.0.0.1 key ") for line in re.findall(r"^INFO: +(\d.*)$", said, re.M))
    with served(tmp_path, "--access-log", "--trusted-proxies", "127.0.0.1", "--max-open", "1") as server:
        for told, status in (("10.9.9.9", 200), ("8.8.8.8, 10.9.9.8", 200), ("a\tb", 400), ("10.9.9.7:80", 200)):
            got = exchange(
                Target(server.address), request("POST", "/v1/completions", TINY, "", f"x-forwarded-for: {told}")
            )
            assert int(got.split()[1]) == status, got
        twice = request("GET", "/health", b"", "", "x-forwarded-for: 10.0.0.1", "x-forwarded-for: 10.0.0.2")
        assert b" 400 " in head(exchange(Target(server.address), twice))
        assert eventually(lambda: "10.9.9.7" in server.said())
        assert re.findall(r"^INFO: +(10\.\S+) key", server.said(), re.M)[:3] == ["10.9.9.9", "10.9.9.8", "10.9.9.7"]


def test_keys_of_a_file_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{ALICE}\n\n")
    with served(tmp_path, "--api-keys-file", str(file)) as server:
        alice, mallory = Target(server.address, ALICE), Target(server.address, MALLORY)
        command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert ALICE.encode() not in command
        assert (complete(alice)[1], complete(mallory)[1]) == (200, 401)
        for text, says, statuses in (
            (f"{MALLORY}\n", "1 keys", (401, 200)),
            ("", "no key in it", (401, 200)),
            (f"{ALICE}\ntwo words\n", "line 2", (401, 200)),
            (f"{ALICE}\n{MALLORY}\n", "2 keys", (200, 200)),
        ):
            file.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            assert eventually(lambda: says in server.said()), server.said()  # noqa: B023
            assert (complete(alice)[1], complete(mallory)[1]) == statuses
        file.unlink()
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "No such file" in server.said()) and complete(alice)[1] == 200


def test_no_key_learns_what_another_asked_for(keyed: Served) -> None:
    """By the time that a form takes: a known one takes a tenth."""
    some = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 9 + 1}}}x{n}$"} for n in range(400)}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "guided_json": {"type": "object", "properties": some}}

    def ask(key: str) -> float:
        seconds, (status, said) = timed(lambda: answer(Target(keyed.address, key), "/v1/completions", body))
        assert status == 200, said
        return seconds

    new, known, others = ask(ALICE), min(ask(ALICE) for _ in range(3)), ask(MALLORY)
    print(f"\na form: new {new:.3f} s, known {known:.3f} s, known to another key {others:.3f} s")
    assert known < new / 2 and others > new / 2


# --- what is no request ----------------------------------------------------------------------------------

POST = (
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer "
    + ALICE.encode()
    + b"\r\n"
)
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
ODD = {
    "a length and chunks": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    "a list of lengths": POST + b"content-length: 5, 5\r\n\r\nabcde",
    "a length with a sign": POST + b"content-length: +5\r\n\r\nabcde",
    "a length below nothing": POST + b"content-length: -5\r\n\r\nabcde",
    "a length in hexadecimal": POST + b"content-length: 0x5\r\n\r\nabcde",
    "a length that no integer holds": POST + b"content-length: 99999999999999999999999\r\n\r\nabcde",
    "chunks twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "another coding": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding after chunks": POST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "a coding with a tab": POST + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded header": POST + b"x: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "an end of line of one character": POST.replace(b"\r\n", b"\n") + b"content-length: 0\n\n",
    "a null": POST + b"x: a\x00b\r\n\r\n",
    "a size that is no number": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "a size below nothing": POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    "a chunk that is longer": POST + b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"host: evil.example\r\n\r\n",
    "a GET with a body": GET + b"content-length: 3\r\n\r\nabc",
    "a GET with chunks": GET + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "another version": b"GET /health HTTP/3.0\r\nhost: localhost\r\n\r\n",
    "an old version": b"GET /health\r\n\r\n",
    "a proxy's request": b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "codes in a path": b"GET /\x1b[31m HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a path that is none": b"GET health HTTP/1.1\r\nhost: localhost\r\n\r\n",
}
HIDDEN = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"  # what a second server might take for the next request


@pytest.mark.parametrize("odd", ODD)
def test_what_two_servers_may_read_differently_is_refused(keyed: Served, odd: str) -> None:
    """With one answer, after which the connection is closed: nothing behind it is a request."""
    got = exchange(Target(keyed.address), ODD[odd] + HIDDEN, 10)
    assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"HTTP/1.1 ") == 1, got


def test_an_upgrade_is_not_heard(keyed: Served) -> None:
    """A request that would rather speak another protocol is answered in this one, its body included."""
    body = b'{"prompt": "hi"}'
    data = (
        POST
        + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
        + GET
        + b"connection: close\r\n\r\n"
    )
    got = exchange(Target(keyed.address), data)
    assert got.count(b"HTTP/1.1 200 ") == 2 and b'"tokens"' in got


def test_trailers_are_no_headers(keyed: Served) -> None:
    data = (
        POST.replace(b"authorization", b"x-authorization") + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    data += b"0\r\nauthorization: Bearer " + ALICE.encode() + b"\r\n\r\n"
    assert exchange(Target(keyed.address), data).startswith(b"HTTP/1.1 401 ")


def test_noise(keyed: Served) -> None:
    """Requests with bytes changed, left out and doubled: each is answered or its connection is closed, none is the
    server's fault."""
    draw = random.Random(7)
    whole = [
        POST + b"content-length: 16\r\nconnection: close\r\n\r\n" + b'{"prompt": "hi"}',
        GET + b"connection: close\r\n\r\n",
    ]
    whole.append(
        POST + b'transfer-encoding: chunked\r\nconnection: close\r\n\r\n8\r\n{"prompt\r\n8\r\n": "hi"}\r\n0\r\n\r\n'
    )
    statuses = Counter[bytes]()
    for _ in range(1500):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(3)] = draw.choice(
                [b"", b"\r\n", b"\n", b"\x00", b":", b" ", bytes([draw.randrange(256)])]
            )
        with contextlib.suppress(OSError), Target(keyed.address).connect(10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            got = connection.recv(4096)
            statuses[got.split()[1] if got else b"closed"] += 1
    print(f"\nnoise: {dict(statuses)}")
    assert not [status for status in statuses if status.startswith(b"5")]
    assert keyed.get("/health")[0] == 200


# --- errors ----------------------------------------------------------------------------------------------


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required", **more}


def deep(count: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * count + "1" + closing * count


BAD: dict[str, Any] = {
    "arguments nested deep": {
        "messages": [
            *CHAT,
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": deep(100_000)}}]},
        ]
    },
    "arguments in lists": {
        "messages": [
            *CHAT,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"arguments": deep(100_000, "[", "]")}}],
            },
        ]
    },
    "a schema nested deep": {"guided_json": deep(100_000)},
    "a schema nested a little deep": {"guided_json": deep(150)},
    "a schema in lists": {"guided_json": deep(900, "[", "]")},
    "a grammar nested deep": {"guided_grammar": "start: " + "(" * 120_000 + '"a"' + ")" * 120_000},
    "an expression nested deep": {"guided_regex": "(" * 120_000 + "a" + ")" * 120_000},
    "an expression that looks behind": {"guided_regex": "(?<=a)b"},
    "a grammar too long": {"guided_grammar": "start: " + '"a" ' * 100_000},
    "choices too long": {"guided_choice": ["a" * 1000] * 1000},
    "100,000 biases": {"logit_bias": {str(n): 1 for n in range(50_000)}},
    "many stops": {"stop": ["a"] * 17},
    "a long stop": {"stop": "a" * 100_000},
    "many bad words": {"bad_words": ["a"] * 100_000},
    "a number beyond all": {"seed": 10**400},
    "no number": {"temperature": float("nan")},
    "an endless number": {"temperature": float("inf")},
    "an endless bias": {"logit_bias": {"1": float("-inf")}},
    "half a pair": {"messages": [{"role": "user", "content": "\ud800"}]},
    "half a pair in a schema": {"guided_json": {"type": "object", "properties": {"\ud800": {}}}},
    "half a pair in a form": {"guided_regex": "\udfff"},
    "many functions": tool({}) | {"tools": tool({})["tools"] * 1025},
    "a model with a long name": {"model": "a" * 1_000_000},
    "a policy of brackets": {"speculation": {"policy": "(" * 1999}},
    "a field with a long name": {"a" * 1_000_000: 1},
    "a template's variable nested deep": {"chat_template_kwargs": {"a": json.loads(deep(150))}},
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_is_the_clients_fault(keyed: Served, bad: str) -> None:
    alice = Target(keyed.address, ALICE)
    seconds, (status, said) = timed(
        lambda: answer(alice, "/v1/chat/completions", {"model": MODEL, "messages": CHAT, "max_tokens": 4, **BAD[bad]})
    )
    assert status in (400, 404) and len(said) < 5000 and seconds < 5, (status, said[:500])
    assert json.loads(said)["error"]["message"]


def test_a_body_nested_deep(keyed: Served) -> None:
    alice = Target(keyed.address, ALICE)
    for body in (
        b"[" * 4_000_000,
        b"[" * 100_000,
        b'{"a":' * 700_000,
        b'"' * 4_000_000,
        b'["' + b'\\"' * 2_000_000,
        b"\\" * 4_000_000,
        b"{" * 101 + b"}" * 101,
    ):
        seconds, (status, said) = timed(lambda: answer(alice, "/v1/completions", body))  # noqa: B023
        assert status == 400 and len(said) < 2000 and seconds < 5, (status, said[:300])


def test_an_expression_goes_on_with_what_its_masks_allowed(keyed: Served) -> None:
    body = {
        "model": MODEL,
        "prompt": "Write: ",
        "max_tokens": 300,
        "guided_regex": r"(\d{1,9}[a-z]{0,30}[A-Z]{0,30}){20}",
    }
    for temperature in (0, 1, 2):
        status, said = answer(
            Target(keyed.address, ALICE), "/v1/completions", {**body, "temperature": temperature, "seed": 1}
        )
        assert status == 200, said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system without a full disk")
def test_a_full_disk_under_the_log_stops_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with open("/dev/full", "wb") as full:
        server = Served(tmp_path, "--access-log", port=port, stderr=full)
        server.address = "127.0.0.1", port
        try:
            assert eventually(lambda: up(server), 60)
            assert complete(Target(server.address))[1] == 200
            assert exchange(Target(server.address), b"no request\r\n\r\n").startswith(b"HTTP/1.1 400 ")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
        finally:
            server.end()


def up(server: Served) -> bool:
    with contextlib.suppress(OSError):
        return server.get("/ready")[0] == 200
    return False


# --- the end ---------------------------------------------------------------------------------------------

CRASHES = [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV]


def test_a_crash_is_never_a_hang(tmp_path: Path) -> None:
    """A process that dies under load takes its connections with it, whatever a core file would take; who starts it
    again (here a loop of the shell) has it back in the time that loading takes. What was lost is counted."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = shlex.join([*COMMAND, *SERVED, "--port", str(port), "--api-key", ALICE])
    log = (tmp_path / "log").open("wb")
    again = f"while :; do {arguments} & echo $! > {tmp_path}/pid; wait $!; done"
    cores = (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_CORE)[1])
    start = time.perf_counter()
    shell = subprocess.Popen(
        ["sh", "-c", again],
        stderr=log,
        start_new_session=True,
        cwd=tmp_path,  # for cores
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, cores),
    )
    server = Served.__new__(Served)
    server.address = "127.0.0.1", port
    alice = Target(server.address, ALICE)
    try:
        assert eventually(lambda: up(server), 60)
        loading = time.perf_counter() - start
        for crash in CRASHES:
            died, ends = [0.0], list[tuple[float, bool]]()

            def ask(number: int) -> None:
                body = {
                    "model": MODEL,
                    "prompt": "Take",
                    "max_tokens": 8 if number % 4 == 0 else 900,
                    "ignore_eos": True,
                }
                body |= {"stream": number % 2 == 1, "n": 4}
                if number % 5 == 0:
                    body |= {"guided_regex": f"[a-z]{{{900 + number}}}"}
                got = exchange(alice, request("POST", "/v1/completions", json.dumps(body).encode(), ALICE), 60)
                whole = got.endswith((b"[DONE]\n\n\r\n0\r\n\r\n", b"}}}"))
                ends.append((time.perf_counter() - died[0], whole))  # noqa: B023

            threads = [threading.Thread(target=ask, args=[number]) for number in range(24)]
            for thread in threads:
                thread.start()
            assert eventually(lambda: server.running >= 8)
            died[0] = time.perf_counter()
            os.kill(int((tmp_path / "pid").read_text()), crash)
            for thread in threads:
                thread.join(30)
            lost = [seconds for seconds, whole in ends if not whole]
            assert len(ends) == 24 and lost
            gone = time.perf_counter()
            assert eventually(lambda: up(server), 60)
            back = time.perf_counter() - gone
            print(
                f"\n{crash.name}: {len(lost)} of 24 requests lost, the last connection closed after {max(lost):.3f} s; "
                f"ready again after {back:.1f} s (loading took {loading:.1f} s)"
            )
            assert max(lost) < 1 and back < 2 * loading + 2
            assert complete(alice)[1] == 200
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        log.close()
