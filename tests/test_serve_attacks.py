"""The server under attack: what strangers send, from where, how slowly, how much. Limits are counts and ratios."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from fly import cli
from fly.models import tokenizer as tokenizers
from fly.policies import Exact, parse_policy
from fly.serve import Settings
from fly.serve.connections import Connection, room_for
from fly.serve.logs import Sparing
from fly.serve.origins import Origins
from fly.serve.rules import Rules
from tests.serving import MODEL, Running, Spawned, eventually, running, spawned

KEY = "a-key-of-ours"


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running() as server:
        yield server
        assert eventually(lambda: server.all_free and server.service.open == 0 and not server.service.llm.worker.jobs)


def complain(got: httpx.Response) -> tuple[int, str]:
    return got.status_code, got.json()["error"]["message"]


def exchange(url: str, data: bytes) -> bytes:
    """What the server answers to these bytes before it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


# 1. Texts that take long.


def test_special_tokens_in_a_message_take_linear_time(here: Running) -> None:
    tokenizer = here.service.tokenizer

    def seconds(count: int) -> float:
        start = time.process_time()
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "<|end|>" * count}])
        assert len(ids) > 5 * count and not tokenizer.control_ids.intersection(ids[2:-2])
        return time.process_time() - start

    seconds(100)
    one, two = (min(seconds(count) for _ in range(3)) for count in (8_000, 32_000))
    assert two < 8 * one  # it was sixteen times


@pytest.mark.parametrize("chat", [False, True])
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    here: Running, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = tokenizers._encoded

    def counted(raw: Any, texts: list[str], *rest: Any, **options: Any) -> Any:
        encoded.append(sum(map(len, texts)))
        return encode(raw, texts, *rest, **options)

    monkeypatch.setattr(tokenizers, "_encoded", counted)
    text = "<|end|> a " * 350_000
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    path = "chat/completions" if chat else "completions"
    got = httpx.post(f"{here.url}/v1/{path}", json={"model": MODEL, **body}, timeout=60)
    status, message = complain(got)
    assert status == 400 and got.json()["error"]["code"] == "context_length_exceeded"
    assert "context of 1024 tokens" in message and "at most 1023 fit" in message
    assert sum(encoded) == 0
    body = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    assert httpx.post(f"{here.url}/v1/{path}", json={"model": MODEL, "max_tokens": 1, **body}).status_code == 200
    assert sum(encoded) > 0


def test_texts_that_are_only_encoded_have_a_limit(here: Running) -> None:
    for size, status in ((2**20, 200), (2**20 + 1, 400)):
        got = httpx.post(f"{here.url}/tokenize", json={"prompt": " " * size}, timeout=60)
        assert got.status_code == status
    parts = [{"type": "text", "text": " " * 1100}] * 1000
    got = httpx.post(f"{here.url}/tokenize", json={"messages": [{"role": "user", "content": parts}]})
    assert got.json()["error"]["param"] == "messages" and "1048576" in complain(got)[1]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_work_of_a_client_that_has_left_is_never_begun(path: str) -> None:
    with running() as server:
        service, begun, go = server.service, [], threading.Event()
        encode = service.tokenizer.encode

        def slow(text: str, *rest: Any) -> list[int]:
            begun.append(text)
            assert text != "busy" or go.wait(60)
            return encode(text, *rest)

        service.tokenizer.encode = slow  # type: ignore[method-assign]
        busy = {"model": MODEL, "prompt": "busy", **({} if path == "/tokenize" else {"max_tokens": 1})}
        threads = [
            threading.Thread(target=httpx.post, args=[server.url + path], kwargs={"json": busy, "timeout": 60})
            for _ in "abcdefgh"
        ]
        for thread in threads:
            thread.start()
        assert eventually(lambda: service.open == 8)
        for _ in range(5):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + path, json={**busy, "prompt": "Take"}, timeout=httpx.Timeout(5, read=0.1))
        assert eventually(lambda: service.open == 8)
        assert httpx.get(f"{server.url}/health").status_code == 200
        go.set()
        assert httpx.post(server.url + path, json={**busy, "prompt": "Take"}, timeout=60).status_code == 200
        for thread in threads:
            thread.join()
        assert begun.count("Take") == 1


def test_a_second_signal_ends_at_once() -> None:
    """Though a thread is at a text that takes it seconds, and the client waits for it."""
    with spawned() as server:
        busy = [threading.Thread(target=_ask, args=(server, {"prompt": "a 9 " * 260_000})) for _ in range(6)]
        for thread in busy:
            thread.start()
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(2) == 1, server.said()
        assert "requests lost: " in server.said() and "Traceback" not in server.said()
        assert f"{MODEL} · draft ngram · policy exact · k 15 · context 1024 · kernels " in server.said()
        for thread in busy:
            thread.join()


def test_a_second_signal_that_loses_nothing_is_no_failure() -> None:
    with spawned() as server:
        with pytest.raises(httpx.ReadTimeout):  # this client has left, its text is still being read
            httpx.post(f"{server.url}/tokenize", json={"prompt": "a 9 " * 260_000}, timeout=httpx.Timeout(5, read=0.3))
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2) == 0 and "Traceback" not in server.said()


def _ask(server: Spawned, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with contextlib.suppress(OSError), socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(head % len(data) + data)
        connection.recv(1)


# 4. Keys.


@pytest.mark.parametrize("key", ["", " ", "two words", " before", "after\n", "\t", "schlüssel", "nul\x01"])
@pytest.mark.parametrize("by", ["variable", "option"])
def test_what_is_no_key_is_an_error_that_says_where(key: str, by: str) -> None:
    arguments = ["serve", "--model", MODEL, *(["--api-key", "fine", "--api-key", key] if by == "option" else [])]
    got = CliRunner().invoke(cli.app, arguments, env={"FLY_API_KEY": key if by == "variable" else "good"})
    assert got.exit_code == 2
    assert ("FLY_API_KEY" if by == "variable" else "--api-key") in got.output and "without keys" in got.output
    assert not key.strip() or key.strip() not in got.output
    with pytest.raises(ValueError, match="api_keys 1"):
        Settings(api_keys=("fine", key))


# 5. Names and pages.


@pytest.mark.parametrize(
    ("bound", "allowed", "keys", "good", "bad"),
    [
        ("127.0.0.1", (), False, "localhost 127.0.0.1 127.9.9.9 [::1] LOCALHOST localhost.", "10.0.0.1 0.0.0.0"),
        ("localhost", (), True, "localhost 127.0.0.1 [::1]", "fly.example.org 192.0.2.7"),
        ("::1", ("fly.example.org",), False, "localhost fly.example.org [::1]", "example.org a.fly.example.org"),
        ("127.0.0.1", ("*.example.org",), False, "a.example.org a.b.example.org", "example.org xexample.org"),
        ("0.0.0.0", (), False, f"10.0.0.1 [fe80::1] localhost {socket.gethostname()}", "fly.example.org a"),
        ("0.0.0.0", (), True, "10.0.0.1 whatever.example.org", ""),
        ("0.0.0.0", ("fly.example.org",), True, "fly.example.org 10.0.0.1 localhost", "other.example.org"),
        ("127.0.0.1", ("*",), False, "whatever.example.org", ""),
    ],
)
def test_a_server_answers_to_its_own_names(
    bound: str, allowed: tuple[str, ...], keys: bool, good: str, bad: str
) -> None:
    origins = Origins(bound, allowed, (), keys)
    for port in ("", ":8000", ":"):
        for name in good.split():
            assert origins.refuse("GET", {b"host": f"{name}{port}".encode()}) is None, name
        for name in [*bad.split(), *(["evil.example", "localhost.evil.example", "u@localhost", ""] if bad else [])]:
            assert "--allowed-host" in (origins.refuse("GET", {b"host": f"{name}{port}".encode()}) or ""), name
    assert origins.refuse("GET", {}) is None  # HTTP/1.0: no browser


def test_pages_of_strangers_may_not_send() -> None:
    origins = Origins("127.0.0.1", (), ("https://friend.example",), False)
    host = {b"host": b"localhost:8000"}
    for origin in (b"http://localhost:8000", b"https://friend.example", b"HTTPS://Friend.example"):
        assert origins.refuse("POST", {**host, b"origin": origin}) is None
    for origin in (
        b"http://localhost:9000",
        b"http://evil.example",
        b"null",
        b"",
        b"https://friend.example:1",
        b"http://[",
    ):
        assert "--cors-origin" in (origins.refuse("POST", {**host, b"origin": origin}) or ""), origin
        assert origins.refuse("GET", {**host, b"origin": origin}) is None
    assert Origins("127.0.0.1", (), ("*",), False).refuse("POST", {**host, b"origin": b"null"}) is None


@pytest.mark.parametrize(
    "wrong",
    [{"allowed_hosts": ("http://a",)}, {"allowed_hosts": ("a:80",)}, {"allowed_hosts": ("",)}]
    + [{"cors_origins": (origin,)} for origin in ("example.org", "https://example.org/", "null", "https://a b")],
)
def test_names_and_origins_are_whole(wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


def test_rebinding_framing_and_cross_origin_requests() -> None:
    body = {"model": MODEL, "prompt": "Take", "max_tokens": 2}
    with running(
        cors_origins=("https://friend.example",), api_keys=(KEY,), allowed_hosts=("fly.example.org",)
    ) as server:
        http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"})
        for path in ("/", "/v1/models", "/health", "/metrics"):
            status, message = complain(http.get(path, headers={"host": "evil.example:80"}))
            assert status == 403 and "evil.example" in message
        assert http.get("/v1/models", headers={"host": "fly.example.org"}).status_code == 200
        for origin, status in ((server.url, 200), ("https://friend.example", 200), ("https://evil.example", 403)):
            got = http.post("/v1/completions", json=body, headers={"origin": origin})
            assert got.status_code == status
            assert got.headers.get("access-control-allow-origin") == (origin if "friend" in origin else None)
        asks = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-stainless-os",
        }
        bare = httpx.Client(base_url=server.url)  # a preflight bears no key
        for origin, status in (("https://friend.example", 200), ("https://evil.example", 400)):
            assert bare.options("/v1/completions", headers={"origin": origin, **asks}).status_code == status
        refused = bare.post("/v1/completions", json=body, headers={"origin": "https://friend.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://friend.example"
        page = http.get("/").headers
        assert "frame-ancestors 'none'" in page["content-security-policy"] and page["x-frame-options"] == "DENY"
        assert page["x-content-type-options"] == "nosniff"
    with running() as server:
        assert "access-control-allow-origin" not in httpx.get(server.url, headers={"origin": "https://a.b"}).headers


# 6. Connections.


def test_silent_and_slow_connections_leave_room() -> None:
    """Twice as many as there are file descriptors, of every idle kind; the rest goes on, and so does the log."""
    most = 160

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    begun = [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: 1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",  # answered, and kept
        b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n",  # answered before its body
    ]
    with spawned(before=few) as server:
        connections = []
        try:
            for number in range(2 * most):
                connections.append(socket.create_connection(server.address, timeout=20))
                connections[-1].sendall(begun[number % len(begun)])
                if number % 32 == 0:
                    assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
                    assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < most
            body = {"model": MODEL, "prompt": "Take", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200
            assert len(server.said()) < 4_000
        finally:
            for connection in connections:
                connection.close()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_a_request_has_its_time_to_come_in() -> None:
    with running(read_timeout=0.3) as server:
        assert exchange(server.url, b"") == b""  # said nothing, and is told nothing
        for data in (b"GET", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: y"):
            assert exchange(server.url, data).startswith(b"HTTP/1.1 408 ")
        start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for data in (b"content-length: 9\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"):
            assert exchange(server.url, start + data).startswith(b"HTTP/1.1 408 ")
        # the next one on the same connection, and one whose body nobody waits for
        whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert exchange(server.url, whole + b"GET /hea").count(b"HTTP/1.1 ") == 2
        unread = b"POST /nowhere HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 100\r\n\r\n"
        assert exchange(server.url, unread).startswith(b"HTTP/1.1 403 ")
        assert eventually(lambda: not server.server.crowd.open and not server.server.crowd.waiting)


def test_dripping_headers_are_not_waited_for() -> None:
    with running(read_timeout=0.5) as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
            dripped = 0
            try:
                while dripped < 400:
                    connection.sendall(b"a: b\r\n")
                    dripped += 1
                    time.sleep(0.02)
            except OSError:
                pass
        assert dripped < 400


def test_a_busy_server_answers_503_and_health_goes_on() -> None:
    stream = {"model": MODEL, "prompt": "Take", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with running("none", max_connections=16) as server:  # without a draft, a stream has 900 steps of 20 ms
        server.service.llm.engine.stretch = 0
        server.service.llm.worker.watch = lambda: time.sleep(0.02)
        with httpx.Client(base_url=server.url, timeout=30, limits=httpx.Limits(max_connections=None)) as http:
            streams = [
                http.send(http.build_request("POST", "/v1/completions", json=stream), stream=True) for _ in range(8)
            ]
            assert [got.status_code for got in streams] == [200] * 8
            refused = http.post("/v1/completions", json={**stream, "stream": False, "max_tokens": 1})
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            for _ in range(30):  # each by a connection of its own
                assert httpx.get(f"{server.url}/health", headers={"connection": "close"}).status_code == 200
            for got in streams:
                got.close()
        assert eventually(lambda: server.service.open == 0)


def test_bodies_take_so_much_memory_and_no_more() -> None:
    size = 40_000
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    body = {"prompt": "a " * (size // 2 - 100)}
    with running(max_body=size, read_timeout=20) as server:
        host, port = server.url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port)), timeout=20) for _ in range(66)]
        for connection in slow:
            connection.sendall(head % size + b" " * (size - 1))
        guard: Any = server.server.config.loaded_app
        assert eventually(lambda: guard.bodies.sum > 0.7 * guard.bodies.total)
        got = httpx.post(f"{server.url}/tokenize", json=body)
        assert got.status_code == 503 and got.headers["retry-after"] == "1"
        assert httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}).status_code == 200
        for connection in slow:
            connection.close()
        assert eventually(lambda: guard.bodies.sum == 0)
        assert httpx.post(f"{server.url}/tokenize", json=body).status_code == 200


def test_too_few_file_descriptors_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    with pytest.raises(ValueError, match="ulimit -n"):
        room_for(1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    limit, at_a_time = room_for(1000)
    assert 500 < limit < 1000 and at_a_time == 64 and room_for(100)[0] == 100


def test_a_log_that_clients_can_fill_is_spared() -> None:
    import logging

    now, spare = [0.0], Sparing(most=3, seconds=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])

        def records(count: int, text: str = "bad %s") -> list[str]:
            made = [logging.LogRecord("x", logging.WARNING, "", 0, text, (n,), None) for n in range(count)]
            return [record.getMessage() for record in made if spare.filter(record)]

        assert records(1000) == ["bad 0", "bad 1", "bad 2"]
        assert records(1, "other %s") == ["other 0"]
        now[0] = 11
        assert records(2) == ["bad 0 (997 more like this in the last 11 s)", "bad 1"]


# 9. Small.


@pytest.mark.parametrize(
    "policy",
    ["fly & after(18446744073709551616)", "exact | phase(18446744073709551616, 5)", "fly(window=9223372036854775808)"]
    + [{"name": "fly", "hold": 2**64}, {"name": "thresholds", "theta": 10**400}, f"exact & after({'9' * 1900})"],
)
def test_integers_that_no_tensor_holds_are_errors(here: Running, policy: Any) -> None:
    body = {"model": MODEL, "prompt": "Take", "max_tokens": 4, "speculation": {"policy": policy}}
    got = httpx.post(f"{here.url}/v1/completions", json=body)
    assert complain(got)[0] == 400 and got.json()["error"]["param"] == "speculation.policy"


def test_integers_of_policies_and_drafts_have_a_range() -> None:
    from fly.drafts.registry import parse_draft

    for policy in ("fly & after(2147483648)", "exact | phase(-2147483648, 5)"):
        with pytest.raises(ValueError, match="between -2147483647 and 2147483647"):
            parse_policy(policy)
    with pytest.raises(ValueError, match="between -2147483647 and 2147483647"):
        parse_draft("suffix(depth=18446744073709551616)")
    assert parse_policy("fly & after(2147483647)")


def test_the_most_that_may_be_drafted_is_kept() -> None:
    with pytest.raises(ValueError, match=r"k 15 .* above max_k 4"):
        Rules(Exact(), 15, "ngram", max_k=4)
    assert Rules(Exact(), 4, "ngram", max_k=4).max_k == 4
    assert Rules(Exact(), 15, "ngram").max_k == 64 and Rules(Exact(), 100, "ngram").max_k == 100
    got = CliRunner().invoke(cli.app, ["serve", "--model", MODEL, "--draft", "ngram", "--max-k", "4", "--port", "0"])
    assert got.exit_code == 2 and "max_k 4" in got.output


def test_paths_methods_and_content_types(here: Running) -> None:
    http = httpx.Client(base_url=here.url)
    for path in ("/v1/completions/", "/health/", "/v1/models/"):
        assert http.get(path).status_code in (404, 405)  # and no redirect
    for path in ("/", "/health", "/ready", "/metrics", "/version", "/v1/models"):
        head, got = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"") and got.content
        assert head.headers["content-type"] == got.headers["content-type"]
    assert http.head("/v1/completions").status_code == 405
    body = json.dumps({"model": MODEL, "prompt": "Take", "max_tokens": 1})
    for headers, says in (({}, "content-type is missing"), ({"content-type": "text/plain"}, "'text/plain'")):
        status, message = complain(http.post("/v1/completions", content=body, headers=headers))
        assert status == 400 and says in message and "application/json" in message


def test_every_request_has_a_line_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fly.serve")
    with running(access_log=True, api_keys=(KEY,)) as server:
        http = httpx.Client(base_url=server.url)
        known = {"authorization": f"Bearer {KEY}"}
        ids = [
            http.get("/v1/models", headers=known).headers["x-request-id"],
            http.get("/v1/models?secret=1", headers={"authorization": "Bearer wrong"}).headers["x-request-id"],
            http.get("/v1/%0aGET%20/fake", headers=known).headers["x-request-id"],
        ]
    lines = [each.getMessage() for each in caplog.records if each.name == "fly.serve.guard"]  # all, as the server ended
    assert len(lines) == 3 and all(f"id {name}" in line for name, line in zip(ids, lines))
    assert [
        f'{method}" {status}' in line for line, method, status in zip(lines, ["models"] * 2 + ["fake"], (200, 401, 404))
    ]
    keys = [line.split()[2] for line in lines]
    assert keys[0] == keys[2] != "-" == keys[1] and len(keys[0]) == 12
    assert all(KEY not in line and "secret" not in line and "\n" not in line for line in lines)
    with running() as server:
        caplog.clear()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert not [record for record in caplog.records if record.name == "fly.serve.guard"]


# What an attack of our own found besides.


@pytest.mark.parametrize(
    "field",
    [
        '"bad_words": ["\\ud800"]',
        '"stop": "\\ud800"',
        '"\\ud800": 1',
        '"logit_bias": {"\\udfff": 1}',
        '"prompt": "\\ud800"',
    ]
    + ['"metadata": {"\\ud800": 1}', '"user": "' + "[" * 100 + '\\ud800", "seed": 1e999'],
)
def test_half_a_surrogate_pair_is_the_clients_fault(here: Running, field: str) -> None:
    content = f'{{"model": "{MODEL}", "prompt": "Take", "max_tokens": 1, {field}}}'
    got = httpx.post(f"{here.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert complain(got)[0] == 400


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"seed":' + b"9" * 5000 + b"}", "digits"),
        (b'"\xe9"', "decode"),
        (b"\x1f\x8b", "decode"),
    ],
)
def test_a_body_that_is_not_json_gets_the_reason(here: Running, content: bytes, says: str) -> None:
    got = httpx.post(f"{here.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    status, message = complain(got)
    assert status == 400 and says in message and "JSON" in message


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000,
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"a" * 200_000,
    ],
)
def test_what_is_no_http_is_a_400(here: Running, data: bytes) -> None:
    assert exchange(here.url, data).startswith(b"HTTP/1.1 431 " if len(data) > 2**16 else b"HTTP/1.1 400 ")
    assert httpx.get(f"{here.url}/health").status_code == 200


def test_a_body_in_chunks_of_a_byte_is_read_a_little_at_a_time(here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts go through Python: what is read at once must be little, or all others wait."""
    sizes: list[int] = []
    parsed = Connection._feed
    monkeypatch.setattr(Connection, "_feed", lambda self, data: (sizes.append(len(data)), parsed(self, data)))
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    body = json.dumps({"prompt": "Take"}).encode()
    parts = [body[at : at + 8] for at in range(0, len(body), 8)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [b" " * 8] * 10_000 + parts) + b"0\r\n\r\n"
    assert exchange(here.url, head + b"transfer-encoding: chunked\r\n\r\n" + chunks).startswith(b"HTTP/1.1 200 ")
    assert sum(sizes) > 120_000 and max(sizes) <= 2**12
    sizes.clear()
    got = exchange(here.url, head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000)
    assert got.startswith(b"HTTP/1.1 431 ")
    assert eventually(lambda: sum(sizes) > 5000) and sum(sizes) < 20_000


def test_no_read_brings_many_requests(here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its time. A body in one piece is read fast, but not what may come behind it."""
    sizes: list[int] = []
    parsed = Connection._feed
    monkeypatch.setattr(Connection, "_feed", lambda self, data: (sizes.append(len(data)), parsed(self, data)))
    many = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
    body = json.dumps({"prompt": "a" * 200_000}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert exchange(here.url, many + last).count(b"HTTP/1.1 200 ") == 501 and max(sizes) <= 1024
    sizes.clear()
    assert exchange(here.url, head % len(body) + body + many + last).count(b"HTTP/1.1 200 ") == 502
    read = 0
    for size in sizes:
        assert size <= max(1024, len(body) - read + 200)
        read += size
    assert max(sizes) > 10_000


def test_what_comes_after_a_refusal_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor read soon. The answer is there even so, and a connection that is wanted does not wait for it."""
    sizes: list[int] = []
    parsed = Connection._feed
    monkeypatch.setattr(Connection, "_feed", lambda self, data: (sizes.append(len(data)), parsed(self, data)))
    with running(api_keys=(KEY,)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            start = time.monotonic()
            connection.sendall(head + b"5\r\naaaaa\r\n" * 100_000)
            assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
            assert httpx.get(f"{server.url}/health").status_code == 200
            while connection.recv(4096):
                pass
            assert time.monotonic() - start > 1 and sum(sizes) < 10_000
        assert eventually(lambda: not server.server.crowd.open)


def test_no_endpoint_speaks_websocket(here: Running) -> None:
    upgrade = (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n"
        b"sec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n"
    )
    exchange(here.url, upgrade.replace(b"upgrade, close", b"close"))
    before = len(here.server.crowd.open)
    host, port = here.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(upgrade)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    assert eventually(lambda: len(here.server.crowd.open) <= before)
