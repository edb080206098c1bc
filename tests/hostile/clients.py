"""Attacks on who is who: one key is one client, and learns nothing of another."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.hostile.attacks import MODEL, Target, answer, exchange, request
from tests.hostile.served import ALICE, MALLORY, NOTES, Served, complete, eventually, served, timed

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
            ("", "has no keys", (401, 200)),
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
    NOTES.append(f"a form: new {new:.3f} s, known {known:.3f} s, known to another key {others:.3f} s")
    assert known < new / 2 and others > 2 * known
