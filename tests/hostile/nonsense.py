"""Attacks by what is no request, or asks for what cannot be: each gets an error that says so."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.attacks import CHAT, MODEL, Target, answer, exchange
from tests.hostile.served import ALICE, NOTES, SLACK, Served, complete, eventually, timed, up

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
    NOTES.append(f"noise: { {status.decode(): count for status, count in statuses.items()} }")
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
    assert status in (400, 404) and len(said) < 5000 and seconds < 5 * SLACK, (status, said[:500])
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
        assert status == 400 and len(said) < 2000 and seconds < 5 * SLACK, (status, said[:300])


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
