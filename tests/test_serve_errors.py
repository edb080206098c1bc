"""Errors of the server: each names the field and says what is wrong."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from fly import LLM
from fly.policies import Exact
from fly.serve import Service, Settings
from fly.serve.service import _param_of
from tests.serving import CHAT, MODEL, Running, eventually, running


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"mystery": 1}, "mystery", "'mystery'"),
        ({"functions": []}, "functions", "'functions' (did you mean 'tools'?); known"),
        (
            {"functions": [], "function_call": "auto"},
            "functions",
            "'functions' (did you mean 'tools'?), 'function_call' (did you mean 'tool_choice'?); known",
        ),
        ({"prompt": "a"}, "prompt", "'prompt' (of /v1/completions); known"),
        ({"echo": True, "best_of": 1}, "echo", "'echo', 'best_of' (of /v1/completions); known"),
        ({"extra_body": {"top_k": 1}}, "extra_body", "an argument of OpenAI's client"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"n": 33}, "n", "at most 32"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "outside the vocabulary"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", "valid number"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "1025 entries"),
        ({"stop_token_ids": [5000]}, "stop_token_ids", "outside the vocabulary"),
        ({"min_tokens": 5}, "min_tokens", "exceeds max_tokens 4"),
        ({"min_tokens": 2000, "max_tokens": 3000}, "min_tokens", "2000 exceeds the 996 tokens"),
        ({"stop": 5}, "stop", "valid string"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 items"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "x",
        ),
        ({"stop": [""]}, "stop", "empty stop string"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"extra": 1}}, "stream_options.extra", "'extra'"),
        ({"store": True}, "store", "False"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type", "'text'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages.0.content.0.type",
            "Input should be 'text', got 'image_url'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
            "messages.0.content.0.type",
            "Input should be 'text', got 'refusal'",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type", "'function', got 'custom'"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.type",
            "'function', got 'allowed_tools'",
        ),
        ({"response_format": {"type": "grammar", "grammar": "a"}}, "response_format.type", "got 'grammar'"),
        ({"response_format": {"type": 1, "schema": {}}}, "response_format.schema", "'schema'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function", "required"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages.0.tool_calls.0.function.name",
            "required",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages.0.tool_calls.0", "dictionary"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "x": 1}]}]}, "messages.0.content.0.x", "'x'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "unknown role tool"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "context of 1024"),
        ({"messages": [{"role": "user", "content": "half \ud83e a pair"}]}, "messages", "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "chat template"),
        ({"speculation": {"policy": "flyy"}}, "speculation.policy", "'flyy' is unknown"),
        ({"speculation": {"policy": ""}}, "speculation.policy", "at least 1 character"),
        ({"speculation": {"policy": "fly & phase('zzq', '<|end|>')"}}, "speculation.policy", "'zzq' is"),
        ({"speculation": {"policy": "os:system"}}, "speculation.policy", "import code"),
        ({"speculation": {"policy": {"name": "antigravity:fly"}}}, "speculation.policy", "import code"),
        ({"speculation": {"policy": "exact" + " | room" * 999}}, "speculation.policy", "at most 2000"),
        ({"speculation": {"k": 65}}, "speculation.k", "0..64"),
        ({"speculation": {"draft": "fly-target"}}, "speculation.draft", "['ngram', 'none']"),
        ({"speculation": {"off": True, "k": 3}}, "speculation.off", "k"),
        ({"speculation": {"speed": 9}}, "speculation.speed", "'speed'"),
        ({"model": "gpt-5"}, "model", "gpt-5"),
        ({"temprature": 1}, "temprature", "(did you mean 'temperature'?)"),
        ({"policy": "exact"}, "policy", """'policy' (write "speculation": {"policy": "exact"}); known"""),
        ({"policy": "fly", "k": 4}, "policy", """(write "speculation": {"policy": "fly", "k": 4})"""),
        ({"k": 4, "mystery": 1}, "k", "unknown or unsupported: 'k', 'mystery'; known"),
        ({"speculation": "fly"}, "speculation", """a rule stands in an object: {"policy": "fly"}"""),
        ({"speculation": "f" * 61}, "speculation", """{"policy": ...}"""),
        ({"max_new_tokens": 5}, "max_new_tokens", "(did you mean 'max_tokens'?)"),
        ({"top_p": 1.5}, "top_p", "got 1.5"),
        ({"temperature": "0"}, "temperature", "got '0'"),
        ({"messages": [{"role": "user"}]}, "messages.0", "'user' needs a content"),
        ({"messages": [*CHAT, {"role": "system", "content": None}]}, "messages.1", "'system' needs a content"),
    ],
)
def test_bad_requests_are_named(here: Running, change: dict[str, Any], param: str | None, says: str) -> None:
    body = json.dumps({"model": MODEL, "messages": CHAT, "max_tokens": 4, **change})
    got = httpx.post(f"{here.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = got.json()["error"]
    assert got.status_code == (404 if param == "model" else 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[1, 2], []]}, "prompt.1", "at least 1 item"),
        ({"prompt": [1, -2]}, "prompt.1", "greater than or equal to 0"),
        ({"prompt": ["a", 1]}, "prompt.1", "valid string"),
        ({"prompt": {"a": 1}}, "prompt", "valid string"),
        ({"prompt": [99999]}, "prompt", "outside the vocabulary"),
        ({"prompt": [1] * 1024}, "prompt", "context of 1024"),
        ({"prompt": ["a"] * 33}, "prompt", "33 completions; at most 32"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 items"),
        ({"prompt": ["a"] * 11, "n": 3}, "n", "33 completions; at most 32"),
        ({"best_of": 4}, "best_of", "4 must equal n (1)"),
        ({"n": 2, "best_of": 1}, "best_of", "1 must equal n (2)"),
        ({"response_format": "json_object"}, "response_format", "valid dictionary, got 'json_object'"),
        ({"suffix": "x"}, "suffix", "None"),
        ({"messages": []}, "messages", "'messages' (of /v1/chat/completions); known"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "whole answer"),
        ({"prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs needs a whole answer"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"logprobs": 21}, "logprobs", "20"),
    ],
)
def test_bad_completions_are_named(here: Running, change: dict[str, Any], param: str, says: str) -> None:
    got = httpx.post(f"{here.url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 2, **change})
    error = got.json()["error"]
    assert (got.status_code, error["param"]) == (400, param) and says in error["message"]


def test_an_error_is_of_no_field_where_it_is_of_several() -> None:
    assert _param_of("prompt has token ids [9]") == "prompt"
    assert _param_of("structured regex 'a' cannot be used") == "structured"
    assert _param_of("prompt 0: 9 tokens and max_tokens 9 do not fit the KV cache") is None
    assert _param_of("something else") is _param_of("") is None


def test_broken_bodies_are_400s_and_the_client_raises(here: Running, client: OpenAI) -> None:
    for content in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b"[" * 100_000,
        b'{"n":' + b"9" * 9999 + b"}",
    ):
        for headers in ({"content-type": "application/json"}, {"content-type": "text/plain"}):
            got = httpx.post(f"{here.url}/v1/completions", content=content, headers=headers)
            error = got.json()["error"]
            assert got.status_code == 400 and error["message"]
            assert error["param"] == ("model" if b"model" in content and "json" in headers["content-type"] else None)
    assert httpx.post(f"{here.url}/v1/completions").json()["error"]["message"] == "the body is missing"
    of_list = httpx.post(f"{here.url}/v1/completions", json=[1]).json()["error"]["message"]
    assert of_list == "the body must be a JSON object, not [1]"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)


@pytest.mark.parametrize(
    ("fields", "twice"),
    [
        ('"max_tokens": 1, "max_tokens": 2', "max_tokens"),
        ('"stop": null, "stop": null', "stop"),  # alike, but somebody slipped
        ('"speculation": {"k": 1, "policy": "exact", "k": 2}', "k"),
        ('"guided_json": {"type": "object", "properties": {"a": {}, "a": {}}}', "a"),
        ('"seed": 1, "\\u0073eed": 1', "seed"),
        ('"\\ud800": 1, "\\ud800": 1', "\ud800"),
    ],
)
def test_what_is_said_twice_is_an_error(here: Running, fields: str, twice: str) -> None:
    content = f'{{"model": "{MODEL}", "prompt": "Take", {fields}}}'
    got = httpx.post(f"{here.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    error = got.json()["error"]
    assert got.status_code == 400 and error["param"] == twice and error["code"] == "invalid_value"
    assert f"{twice!r} is given twice" in error["message"]


def test_a_million_wrong_entries_make_one_error(here: Running) -> None:
    for body in ({"prompt": [None] * 500_000}, {"prompt": "a", **{f"x{n}": 0 for n in range(200_000)}}):
        got = httpx.post(f"{here.url}/v1/completions", json={"model": MODEL, **body}, timeout=30)
        assert got.status_code == 400 and len(got.content) < 4000


def test_who_is_still_sending_a_body_that_is_too_long_gets_the_answer() -> None:
    with running(max_body=2000) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 80)) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\n")
            for _ in range(5):
                time.sleep(0.05)  # the refusal is long out: a connection closed now would be reset
                client.sendall(b" " * 10_000)
            assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_connection_outlives_an_error_of_ours(here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks, in a handler or in the rule of a stranger, the client's next request goes out on the same
    connection, and is answered."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    @dataclass(frozen=True)
    class Odd(Exact):
        @property
        def guarantee(self) -> Any:  # type: ignore[override]
            return broken()

    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    kind, address = {"content-type": "application/json"}, httpx.URL(here.url)
    for place, name, path in (
        (here.service, "check_model", f"/v1/models/{MODEL}"),
        (here.service, "prepare", "/v1/completions"),
        (here.service.metrics, "text", "/metrics"),
        (here.service.rules, "choose", "/v1/models"),
        (here.service.rules, "choose", "/v1/completions"),
    ):
        connection = http.client.HTTPConnection(address.host, address.port)
        connection.connect()
        connection.auto_open = 0  # else it would connect again, and hide what we look for
        with monkeypatch.context() as patch:
            asked = partial(replace, here.service.rules.choose(), policy=Odd())
            patch.setattr(place, name, asked if (name, path) == ("choose", "/v1/completions") else broken)
            for _ in range(2):
                post = path == "/v1/completions"
                connection.request("POST" if post else "GET", path, json.dumps(body) if post else None, kind)
                got = connection.getresponse()
                assert got.status == 500 and "error" in json.loads(got.read()), path
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_rule_that_fails_is_the_error_of_its_request(here: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names the rule and what it raised, and no folder of the server."""

    @dataclass(frozen=True)
    class Odd(Exact):
        def accept_probs(self, target: Any, draft: Any) -> Any:
            raise KeyError("odd")

    chosen = replace(here.service.rules.choose(), policy=Odd())
    monkeypatch.setattr(here.service.rules, "choose", lambda *_: chosen)
    got = httpx.post(f"{here.url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 2})
    told = (
        r"prompt 0: the rule 'Odd' fails on a trial block: KeyError: 'odd' \(test_serve_errors.py:\d+ in accept_probs\)"
    )
    assert got.status_code == 400 and re.fullmatch(told, got.json()["error"]["message"])


def test_keys_limits_and_body_sizes() -> None:
    with running(api_keys=("first", "second"), max_body=2000, max_tokens=8, read_timeout=0.5) as server:
        body = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
        with httpx.Client(base_url=server.url) as http:
            for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}):
                got = http.post("/v1/chat/completions", json=body, headers=headers)
                assert got.status_code == 401 and got.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/v1/models").status_code == 401
            assert http.get("/health").status_code == http.get("/metrics").status_code == 200
            http.headers["authorization"] = "Bearer second"
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            too_long = http.post("/v1/chat/completions", json={**body, "max_tokens": 9})
            assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "max_tokens"
            unsaid = http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT}).json()
            assert unsaid["usage"]["completion_tokens"] == 8
            assert http.post("/v1/chat/completions", json={**body, "user": "x" * 2000}).status_code == 413

            def slowly() -> Iterator[bytes]:
                yield b"{" + b" " * 1000
                yield b" " * 2000

            assert http.post("/v1/chat/completions", content=slowly()).status_code == 413

            async def never() -> int:
                async def part() -> Any:
                    yield b"{"
                    await asyncio.sleep(1)

                async with httpx.AsyncClient(base_url=server.url, headers=http.headers) as slow:
                    return (await slow.post("/v1/completions", content=part())).status_code

            assert asyncio.run(never()) == 408
        stranger = OpenAI(base_url=f"{server.url}/v1", api_key="third", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model=MODEL, messages=CHAT)
        stranger.close()


def test_a_request_has_its_time() -> None:
    with running(timeout=0.05) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        step = server.service.llm.scheduler.step

        def slow(seconds: float) -> Any:
            time.sleep(0.01)  # on a busy machine the answer may be there before anybody looks at the clock
            return step(seconds)

        server.service.llm.scheduler.step = slow  # type: ignore[method-assign]
        long: Any = {"model": MODEL, "prompt": "a", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.InternalServerError, match="not finished within"):
            client.completions.create(**long)
        with pytest.raises(openai.APIError, match="not finished within"):
            list(client.completions.create(**long, stream=True))
        assert eventually(lambda: server.all_free)


def test_an_engine_that_fails_says_so() -> None:
    with running() as server, OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:

        def broken(seconds: float) -> None:
            raise RuntimeError("out of order")

        server.service.llm.scheduler.step = broken  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError, match="out of order"):
            client.completions.create(model=MODEL, prompt="a")
        assert eventually(lambda: not server.service.llm.worker.alive)
        assert httpx.get(f"{server.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="has stopped"):
            client.completions.create(model=MODEL, prompt="a")
        assert eventually(lambda: server.server.should_exit) and server.server.failed  # and is started again


def test_a_model_without_a_tokenizer_is_refused(alone: LLM) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        Service(LLM(alone.engine.runner.executor), Settings(), "none", "toy")


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "one form"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice", "response_format"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "'structural_tag'"),
        ({"guided_regex": "("}, "guided_regex", "guided_regex: regex '(' cannot be used"),
        (
            {"structured_outputs": {"regex": "("}},
            "structured_outputs",
            "structured_outputs: regex '(' cannot be used",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "null"}}}}},
            "response_format",
            "response_format: json_schema",
        ),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "guided_grammar"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"priority": 1.5}, "priority", "integer"),
        ({"priority": -1}, "priority", "greater than or equal to 0"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "not with"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": ""}]}, "messages", "no text"),
    ],
)
def test_bad_values_of_vllms_fields_are_named(here: Running, asked: dict[str, Any], param: str, says: str) -> None:
    got = httpx.post(f"{here.url}/v1/chat/completions", json={"model": MODEL, "messages": CHAT, **asked})
    assert got.status_code == 400, got.text
    assert got.json()["error"]["param"] == param and says in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "said"), [("responses", "/v1/chat/completions"), ("embeddings", "no embeddings"), ("images", "paths: ")]
)
def test_what_is_not_there_is_said(here: Running, path: str, said: str) -> None:
    got = httpx.post(f"{here.url}/v1/{path}", json={"model": MODEL, "input": "a"})
    assert got.status_code == 404 and said in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"), ("/api/v1/completions", "/v1/completions"),
        ("/v1/engines/x/completions", "/v1/completions"), ("/models", "/v1/models"), ("/v1/health", "/health"),
        ("/v1/moderations", None), ("/v1", None),
    ],
)  # fmt: skip
def test_a_path_that_ends_like_another_names_it(here: Running, path: str, meant: str | None) -> None:
    got = httpx.post(f"{here.url}{path}", json={"model": MODEL})
    message = got.json()["error"]["message"]
    assert got.status_code == 404 and (f"(did you mean {meant!r}?)" if meant else f"at {path!r}; paths") in message
