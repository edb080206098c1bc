"""Which client sent a request, which client has its turn, and how untrusted JSON is read and written."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly.serve import Settings, jsons
from fly.serve.clients import Clients, Shares, read_keys, wrong_with_headers
from fly.serve.jsons import DEEPEST, TooMuch, Twice, loads, write_json
from fly.serve.logs import Lines, escaped
from fly.serve.turns import Busy, Turns
from tests.serving import MODEL, Running, eventually, running

HOST = (b"host", b"localhost")

# --- who ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["authorization", "host", "content-length", "content-type", "x-forwarded-for"])
def test_headers_that_matter_are_given_once(name: str) -> None:
    twice = [HOST, (name.encode(), b"0"), (b"x", b"y"), (name.encode(), b"0")]
    assert re.search(f"header {name} is given [23] times", str(wrong_with_headers("POST", "1.1", twice)))
    once = [HOST, (b"accept", b"a"), (b"accept", b"b"), (b"authorization", b"Bearer a"), (b"content-length", b"3")]
    assert wrong_with_headers("POST", "1.1", once) is None


@pytest.mark.parametrize(
    ("method", "version", "headers", "says"),
    [
        ("POST", "1.1", [HOST, (b"content-length", b"1"), (b"transfer-encoding", b"chunked")], "both given"),
        ("POST", "1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], "only chunked"),
        ("GET", "1.1", [HOST, (b"content-length", b"1")], "no body"),
        ("HEAD", "1.1", [HOST, (b"transfer-encoding", b"chunked")], "no body"),
        ("GET", "1.1", [HOST, (b"content-length", b"0")], None),
        ("GET", "1.1", [], "host is missing"),
        ("GET", "1.0", [], None),
        ("GET", "3.0", [HOST], "is not supported"),
        ("POST", "1.1", [HOST, (b"content-encoding", b"gzip")], "content-encoding 'gzip' is not read"),
        ("POST", "1.1", [HOST, (b"content-encoding", b"identity")], None),
    ],
)
def test_headers_that_leave_something_open(method: str, version: str, headers: Any, says: str | None) -> None:
    wrong = wrong_with_headers(method, version, headers)
    assert wrong is None if says is None else says in str(wrong)


def raw(server: Running, *lines: str, body: str = "") -> bytes:
    """All of an answer to a request that no client would write."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    data = "\r\n".join([*lines, "host: localhost", "connection: close", "", body]).encode("latin-1")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_two_keys_are_a_bad_request() -> None:
    """Wherever in the server they are looked at, one would be taken for two clients."""
    body = json.dumps({"prompt": "hi"})
    ask = ("POST /tokenize HTTP/1.1", "content-type: application/json", f"content-length: {len(body)}")
    with running(api_keys=("a", "b")) as server:
        for keys in itertools.product("abx", repeat=2):
            got = raw(server, *ask, *(f"authorization: Bearer {key}" for key in keys), body=body)
            assert got.startswith(b"HTTP/1.1 400 ") and b"given 2 times" in got
        assert raw(server, *ask, "authorization: Bearer a", body=body).startswith(b"HTTP/1.1 200 ")
        assert raw(server, *ask, "authorization: Bearer x", body=body).startswith(b"HTTP/1.1 401 ")


def test_only_a_trusted_proxy_says_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    found = Clients.identify
    monkeypatch.setattr(Clients, "identify", lambda *a: (client := found(*a), seen.append(client.name))[0])
    told = ["10.9.9.9", "8.8.8.8, 10.9.9.8", "2001:db8::7", "10.9.9.7:80"]
    for trusted, names in (
        ((), ["127.0.0.1"] * 4),
        (("10.0.0.0/8",), ["127.0.0.1"] * 4),
        (("127.0.0.1",), ["10.9.9.9", "10.9.9.8", "2001:db8::/64", "10.9.9.7"]),
    ):
        seen.clear()
        with running(trusted_proxies=trusted) as server:
            for each in told:
                assert httpx.get(f"{server.url}/health", headers={"x-forwarded-for": each}).status_code == 200
            assert seen == names
            bad = raw(server, "GET /health HTTP/1.1", "x-forwarded-for: a\tb")
            assert bad.startswith(b"HTTP/1.1 400 " if names[0] != "127.0.0.1" else b"HTTP/1.1 200 ")
    with pytest.raises(ValueError, match=r"trusted_proxies 'proxy\.example\.org' .*give an address or a network"):
        Settings(trusted_proxies=("proxy.example.org",))


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two  \n")
    assert read_keys(file) == ["one", "two"]
    clients = Clients(Settings(api_keys=("zero",), api_keys_file=file))
    known = [
        clients.identify("::1", {b"authorization": b"Bearer " + key}).key for key in (b"zero", b"one", b"two", b"three")
    ]
    assert len({*known}) == 4 and known[3] is None and not {*known} & {"one", "two"}
    for text, says in (("", "has no keys"), ("one\na b\n", "line 2: the key has a blank"), ("ä\n", "line 1")):
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            clients.reload()
        assert clients.identify("::1", {b"authorization": b"bearer one"}).key == known[1]  # as before
    file.write_text("three\n")
    assert clients.reload() == 2 and clients.identify("::1", {b"authorization": b"Bearer one"}).key is None


def test_keys_are_read_again_at_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    with running(api_keys_file=file) as server:

        def status(key: str) -> int:
            return httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        assert (status("one"), status("two")) == (200, 401)
        file.write_text("two\n")
        server.server.handle_reload(1, None)
        assert eventually(lambda: (status("one"), status("two")) == (401, 200))


@given(st.text())
def test_no_line_of_a_log_looks_like_another(text: str) -> None:
    assert escaped(text).isprintable() and (escaped(text) == text) == text.isprintable()
    record = logging.LogRecord("fly", logging.INFO, "", 0, "%s", (text,), None)
    assert "\n" not in Lines("%(levelprefix)s %(message)s", use_colors=False).format(record)


def test_an_error_in_the_log_is_indented() -> None:
    try:
        raise ValueError("a\nINFO: forged \x1b[2J")
    except ValueError:
        record = logging.LogRecord("fly", logging.ERROR, "", 0, "wrong", (), sys.exc_info())
    first, *rest = Lines("%(message)s", use_colors=False).format(record).split("\n")
    assert first == "wrong" and all(line.startswith("  ") for line in rest) and "\x1b" not in str(rest)


@given(st.integers(4, 100), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=60))
def test_nobody_has_all_there_is(total: int, asked: list[tuple[str, int]]) -> None:
    shares = Shares(total)
    for client, amount in asked:
        if shares.has_room(client, amount):
            shares.take(client, amount)
    if {*shares.held} == {"a"}:
        assert shares.sum <= 3 * total // 4
    assert shares.sum == sum(shares.held.values()) <= total
    for client, amount in list(shares.held.items()):
        shares.take(client, -amount)
    assert shares.sum == 0 and not shares.held


# --- turns ------------------------------------------------------------------------------------------------


def test_who_asked_for_little_does_not_wait_for_who_asked_for_much() -> None:
    """All but the first four of one client's twenty wait for two other clients: in the order of arrival they would wait
    for ever."""

    async def run() -> None:
        turns, served = Turns("test", 2, 100), {name: threading.Event() for name in "bc"}

        def work(number: int) -> None:
            assert number < 4 or all(event.wait(20) for event in served.values())

        much = [asyncio.create_task(turns.run("a", lambda n=n: work(n))) for n in range(20)]  # type: ignore[misc]
        await asyncio.sleep(0)
        little = [asyncio.create_task(turns.run(name, event.set)) for name, event in served.items()]
        await asyncio.gather(*much, *little)
        turns.close()
        assert not (turns._waiting or turns._used or +turns._working)

    asyncio.run(run())


def test_no_client_has_every_thread_nor_waits_without_end() -> None:
    async def run() -> None:
        turns, go, begun = Turns("test", 3, 5), threading.Event(), list[int]()
        tasks = [
            asyncio.create_task(turns.run("a", lambda n=n: (begun.append(n), go.wait(20))))  # type: ignore[misc]
            for n in range(7)
        ]
        while len(begun) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert begun == [0, 1]  # of three threads
        with pytest.raises(Busy):
            await turns.run("a", lambda: None)
        assert await turns.run("b", lambda: 7) == 7
        tasks[3].cancel()  # before its turn
        with pytest.raises(ZeroDivisionError):
            await turns.run("b", lambda: 1 / 0)
        go.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[3], asyncio.CancelledError) and sorted(begun) == [0, 1, 2, 4, 5, 6]
        turns.close()

    asyncio.run(run())


def test_work_in_pieces_ends_when_its_client_leaves() -> None:
    async def run() -> None:
        turns, left = Turns("test", 2, 5), False

        def made() -> Iterator[bytes]:
            nonlocal left
            for number in itertools.count():
                left = number > 1000
                yield b"a"

        assert len(b"".join(await turns.collect("a", made(), lambda: left))) > 1000
        parts = await turns.collect("a", iter([b"a", b"b", b"c"]), lambda: False)
        assert b"".join(parts) == b"abc"
        turns.close()

    asyncio.run(run())


# --- JSON -------------------------------------------------------------------------------------------------

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_json_is_read_as_by_anybody(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert loads(text) == loads(text.encode("utf-8", "surrogatepass") if ascii_only else text) == value


def entries(value: Any) -> tuple[int, int]:
    """Of all lists, and of all objects, counted one by one."""
    inner = [entries(each) for each in (value.values() if isinstance(value, dict) else value)] if _long(value) else []
    own = (len(value), 0) if isinstance(value, list) else (0, len(value) if isinstance(value, dict) else 0)
    return own[0] + sum(each[0] for each in inner), own[1] + sum(each[1] for each in inner)


def _long(value: Any) -> bool:
    return isinstance(value, (dict, list))


@given(VALUES)
def test_no_entry_is_missed_where_they_are_counted(value: Any) -> None:
    """Nor are those that look like some within texts, where there may be too many."""
    text, (lists, members) = json.dumps(value), entries(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsons, "ENTRIES", 1)
        patch.setattr(jsons, "MEMBERS", 1)
        found = jsons._counted(text)
        assert found[0] >= min(lists, 2) and (found[1] >= min(members, 2) or found[0] > 1)
        if lists > 1 or members > 1:
            with pytest.raises(TooMuch, match="more than 1 entries"):
                loads(text)
    assert jsons._counted(text)[1] >= members


def test_json_has_limits() -> None:
    many, few = ",".join(["1"] * jsons.ENTRIES), ",".join(f'"{n}":1' for n in range(jsons.MEMBERS))
    assert len(loads(f"{{{few}}}")) == jsons.MEMBERS
    for text in (f"[{many},1,1]", f'{{{few},"a":1}}', "[" * 1000, "[" * 10**6, '{"a":' * 10**5):
        with pytest.raises(ValueError, match=r"more than|Expecting|nested"):
            loads(text)
    assert loads(json.dumps("," * 10**6)) == "," * 10**6  # one text
    deep = "[" * DEEPEST + "]" * DEEPEST
    assert json.dumps(loads(deep)) == deep
    with pytest.raises(TooMuch, match=f"more than {DEEPEST} deep"):
        loads(f"[{deep}]")
    with pytest.raises(Twice, match=r"^a$"):
        loads('{"b": {"a": 1, "a": 2}}')
    assert loads('{"a": 1, "a": 2}', once=False) == {"a": 2}
    with pytest.raises(ValueError, match="utf-8"):
        loads(json.dumps([1]).encode("utf-16"))


@given(VALUES)
def test_json_is_written_as_by_anybody(value: Any) -> None:
    """Whatever stands in it as an iterator."""

    def lazy(each: Any) -> Any:
        if isinstance(each, dict):
            return {name: lazy(inner) for name, inner in each.items()}
        return iter(each) if isinstance(each, list) else each

    assert b"".join(write_json(lazy(value))).decode() == json.dumps(value, separators=(",", ":"))
    assert b"".join(write_json(value)).decode() == json.dumps(value, separators=(",", ":"))


def test_a_long_list_is_written_in_pieces() -> None:
    parts = list(write_json({"a": iter(range(10**4)), "b": "\u4e2d" * 10**6}))
    assert max(map(len, parts)) < 500_000 and len(parts) > 150
    assert json.loads(b"".join(parts)) == {"a": list(range(10**4)), "b": "\u4e2d" * 10**6}


def test_a_body_says_what_is_wrong_with_it() -> None:
    with running() as server:
        body = {"model": MODEL, "prompt": "a", "metadata": {f"{n:x}": 1 for n in range(60_000)}}
        got = httpx.post(f"{server.url}/v1/completions", json=body)
        assert got.status_code == 400 and got.json()["error"]["param"] == "metadata", got.text
        assert re.search("60000 entries; at most 1024", got.text)
