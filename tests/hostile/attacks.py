"""What attackers of a server do, each in a process of its own: functions of ``load.py``.

An attack gets the server's address, an API key and the address that it comes from, and repeats itself until it is
ended. It uses plain sockets, so that it costs the machine little besides what the server makes of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ATTACKS", "Target", "answer", "exchange", "request"]

MODEL = "attacked"
CHAT = [{"role": "user", "content": "Take the list 4 9 5 7. Reverse the list."}]


@dataclass(frozen=True)
class Target:
    """The server, and who attacks it. ``seen`` counts answers by their status."""

    address: tuple[str, int]
    key: str = ""
    source: str = "127.0.0.1"
    seen: Any = None

    def connect(self, timeout: float = 60.0) -> socket.socket:
        """A connection of its own."""
        return socket.create_connection(self.address, timeout, (self.source, 0))


def request(method: str, path: str, body: bytes = b"", key: str = "", *headers: str) -> bytes:
    """A request as bytes; the connection is to be closed after it."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    if key:
        lines.append(f"authorization: Bearer {key}")
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def exchange(target: Target, data: bytes, timeout: float = 60.0) -> bytes:
    """All that the server answers before it closes the connection; what it does not read any more is not sent."""
    with target.connect(timeout) as connection:
        parts = []
        with contextlib.suppress(OSError):
            connection.sendall(data)
        with contextlib.suppress(OSError):
            while part := connection.recv(1 << 20):
                parts.append(part)
        return b"".join(parts)


def answer(target: Target, path: str, body: dict[str, Any] | bytes, timeout: float = 60.0) -> tuple[int, bytes]:
    """Status and body of what a POST gets; 0 where it gets nothing."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head, _, rest = exchange(target, request("POST", path, data, target.key), timeout).partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    if target.seen is not None:
        target.seen[status] += 1
    return status, rest


def again(work: Callable[[], object]) -> None:
    """The same for ever; a moment later where the server lets nobody in."""
    while True:
        try:
            work()
        except OSError:
            time.sleep(0.05)


def many(count: int, work: Callable[[int], object]) -> None:
    """The same in so many threads, each for ever."""
    for number in range(count):
        threading.Thread(target=lambda number=number: again(lambda: work(number)), daemon=True).start()
    threading.Event().wait()


def body_of(size: int, entry: Callable[[int], str], head: str, tail: str, between: str = ",") -> bytes:
    """A body of about so many bytes."""
    parts, total = [], len(head) + len(tail)
    for number in itertools.count():
        parts.append(entry(number))
        total += len(parts[-1]) + 1
        if total > size:
            return (head + between.join(parts) + tail).encode()
    raise AssertionError


FOUR = 4 * 2**20 - 4096
START = f'{{"model": "{MODEL}", "prompt": "Take", "max_tokens": 1, '


# --- bodies ----------------------------------------------------------------------------------------------


def wrong_entries(target: Target) -> None:
    """Four megabytes of metadata, none of them a text."""
    body = body_of(FOUR, lambda n: f'"{n:x}":1', START + '"metadata": {', "}}")
    many(2, lambda _: answer(target, "/v1/completions", body))


def small_entries(target: Target) -> None:
    """Four megabytes of the smallest entries there are, of each kind, in fields of every kind."""
    bodies = [
        body_of(FOUR, lambda n: "1", START + '"stop_token_ids": [', "]}"),
        body_of(FOUR, lambda n: "[]", START + '"guided_json": {"enum": [', "]}}"),
        body_of(FOUR, lambda n: '{"a":1}', START + '"guided_json": {"enum": [', "]}}"),
        body_of(FOUR, lambda n: f'"{n:x}":1', START + '"guided_json": {', "}}"),
        body_of(FOUR, lambda n: "1.5", START + '"logit_bias": {"a": [', "]}}"),
        body_of(FOUR, lambda n: '""', START + '"bad_words": [', "]}"),
        body_of(FOUR, lambda n: "7", '{"tokens": [', "]}"),
        body_of(FOUR, lambda n: '{"role":"user","content":"a"}', f'{{"model": "{MODEL}", "messages": [', "]}"),
    ]
    turn = itertools.cycle(bodies)
    many(3, lambda _: answer(target, "/detokenize" if (body := next(turn)) is bodies[6] else "/v1/completions", body))


def escapes(target: Target) -> None:
    """Four megabytes of a text in which every character is escaped."""
    bodies = [
        body_of(FOUR, lambda n, text=text: text, START.replace('"Take"', '"'), '"}', "").replace(
            b', "max_tokens": 1, ', b""
        )
        for text in ("\\n", "\\u4e2d", '\\"', "<|", ",")
    ]
    turn = itertools.cycle(bodies)
    many(3, lambda _: answer(target, "/v1/completions", next(turn)))


def tool_calls(target: Target) -> None:
    """A message with 60,000 calls."""
    call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
    some = ",".join([call] * 1000)
    message = f'{{"role":"assistant","tool_calls":[{some}]}}'
    body = f'{{"model":"{MODEL}","messages":[{",".join([message] * 60)}]}}'.encode()
    assert len(body) < 4 * 2**20 + 200_000
    body = body[:FOUR] if len(body) > FOUR else body
    many(2, lambda _: answer(target, "/v1/chat/completions", body))


# --- connections -----------------------------------------------------------------------------------------


def chunks_of_a_byte(target: Target, method: str = "POST", count: int = 100, chunk: bytes = b"1\r\na\r\n") -> None:
    """Bodies in chunks of one byte, without a key."""
    head = request(method, "/tokenize" if method == "POST" else "/health", b"", "", "transfer-encoding: chunked")
    data = head + chunk * (2**20 // len(chunk))

    def send(_: int) -> None:
        with target.connect() as connection:
            connection.sendall(data)
            connection.recv(1000)

    many(count, send)


def chunks_of_few_bytes(target: Target) -> None:
    """The same of the smallest that are read to their end."""
    chunks_of_a_byte(target, chunk=b"5\r\naaaaa\r\n")


def chunks_of_a_get(target: Target) -> None:
    """The same of GET requests, which need no body."""
    chunks_of_a_byte(target, "GET")


def headers(target: Target) -> None:
    """Headers, extensions of chunks and trailers without end."""
    many_headers = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 12_000 + b"\r\n"
    chunked = request("POST", "/tokenize", b"", "", "transfer-encoding: chunked")
    extended, trailers = chunked + b"1;" + b"a" * 300_000 + b"\r\na\r\n", chunked + b"0\r\n" + b"a:b\r\n" * 60_000
    turn = itertools.cycle([many_headers, extended, trailers])
    many(30, lambda _: exchange(target, next(turn)))


def pipelined(target: Target) -> None:
    """Requests that do not wait for their answers."""
    data = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000

    def send(_: int) -> None:
        with target.connect() as connection:
            connection.sendall(data)
            while connection.recv(1 << 20):
                pass

    many(10, send)


def scrapes(target: Target) -> None:
    """What needs no key, again and again."""
    turn = itertools.cycle(["/metrics", "/openapi.json", "/", "/v1/models"])
    many(30, lambda _: exchange(target, request("GET", next(turn))))


def held_connections(target: Target) -> None:
    """As many requests at once as one client gets; none ends soon."""
    body = json.dumps({"model": MODEL, "prompt": "a " * 2000, "max_tokens": 1}).encode()
    slow = request("POST", "/v1/completions", body, target.key).replace(b"connection: close\r\n", b"")
    held = []
    for _ in range(1200):
        try:
            held.append(target.connect())
            held[-1].sendall(slow[:-1])
        except OSError:
            time.sleep(0.01)
    threading.Event().wait()


def readers_that_do_not_read(target: Target) -> None:
    """Streams of much text that nobody reads."""
    body = {"model": MODEL, "prompt": "Take", "max_tokens": 800, "ignore_eos": True, "n": 8, "stream": True}
    body |= {"logprobs": 5, "speculation": {"provenance": True}}
    data = request("POST", "/v1/completions", json.dumps(body).encode(), target.key)
    held = []
    for _ in range(20):
        with_little_room = socket.socket()
        with_little_room.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with_little_room.bind((target.source, 0))
        with_little_room.connect(target.address)
        with_little_room.sendall(data)
        held.append(with_little_room)
    threading.Event().wait()


# --- answers ---------------------------------------------------------------------------------------------


def large(stream: bool) -> dict[str, Any]:
    return {
        "model": MODEL, "messages": CHAT, "max_tokens": 700, "ignore_eos": True, "n": 32, "logprobs": True,
        "top_logprobs": 20, "temperature": 1, "speculation": {"provenance": True}, "stream": stream,
    }  # fmt: skip


def large_answers(target: Target) -> None:
    """Answers of 32 choices, with 20 log-probabilities and the reason for each token."""
    many(1, lambda _: answer(target, "/v1/chat/completions", large(stream=False), 300))


def large_streams(target: Target) -> None:
    """The same, streamed."""
    many(2, lambda _: answer(target, "/v1/chat/completions", large(stream=True), 300))


# --- what takes time --------------------------------------------------------------------------------------


def tokenized(target: Target) -> None:
    """Thirty megabytes to be tokenized, and again."""
    body = json.dumps({"model": MODEL, "prompt": "a 9 " * 2**18}).encode()
    many(30, lambda _: answer(target, "/tokenize", body, 300))


def detokenized(target: Target) -> None:
    """Token ids to be made a text, as many as a body holds."""
    draw = random.Random(0)
    body = json.dumps({"tokens": [draw.randrange(3, 1000) for _ in range(250_000)]}).encode()
    many(10, lambda _: answer(target, "/detokenize", body, 300))


def echoes(target: Target) -> None:
    """Prompts that are repeated in the answer, each token with ten likely ones."""
    body = {"model": MODEL, "prompt": ["a 9 " * 250] * 16, "max_tokens": 0, "echo": True, "logprobs": 10}
    many(10, lambda _: answer(target, "/v1/completions", body, 300))


def forms(target: Target) -> None:
    """Forms that nobody has asked for before: large ones, and some that take too much."""
    count = itertools.count(random.randrange(10**9))

    def form(_: int) -> None:
        number = next(count)
        if number % 4 == 0:
            form: dict[str, Any] = {"type": "integer", "multipleOf": 999_983 + number % 1000}
        elif number % 4 == 1:  # it proves to be too large when it has been followed for a while
            form = {"type": "string", "pattern": f"^[a-z]{{{5 + number % 20}}}{number}(a{{1000}}){{1000}}$"}
        else:
            some = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 9 + 1}}}{number}$"} for n in range(300)}
            form = {"type": "object", "properties": some}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 30, "guided_json": form}
        answer(target, "/v1/completions", body, 300)

    many(16, form)


def completions(target: Target) -> None:
    """Many completions of many choices each."""
    body = {"model": MODEL, "prompt": "Take", "max_tokens": 700, "ignore_eos": True, "n": 32, "temperature": 1}
    many(8, lambda _: answer(target, "/v1/completions", body, 300))


ATTACKS: dict[str, Callable[[Target], None]] = {
    each.__name__: each
    for each in (
        wrong_entries, small_entries, escapes, tool_calls, chunks_of_a_byte, chunks_of_few_bytes, chunks_of_a_get,
        headers, pipelined, scrapes, held_connections, readers_that_do_not_read, large_answers, large_streams,
        tokenized, detokenized, echoes, forms, completions,
    )
}  # fmt: skip
