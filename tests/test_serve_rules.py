"""What a request may ask of speculation and of its answer's form, and what the operator allows."""

from __future__ import annotations

import ast
import json
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from fly import LLM, SamplingParams
from fly.engine.job import Job
from fly.models.bundled import CHECKPOINTS
from fly.policies import Exact, FLy
from fly.serve.rules import Rules
from tests.serving import CHAT, MODEL, running

FORM = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def test_an_answer_has_the_form_asked_for_or_the_request_is_refused(client: OpenAI) -> None:
    asked: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}}
    got = client.chat.completions.create(model=MODEL, messages=CHAT, response_format=asked)
    assert json.loads(got.choices[0].message.content or "")["a"] in (1, 2)
    plain = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, response_format={"type": "text"})
    assert plain.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="needs json_schema"):
        client.chat.completions.create(model=MODEL, messages=CHAT, response_format={"type": "json_schema"})  # type: ignore[call-overload]


def test_every_request_has_its_own_policy(client: OpenAI, alone: LLM) -> None:
    for asked, policy, k, guarantee in [
        ({}, Exact(), 6, "lossless"),
        ({"policy": "fly(theta=0.1)", "k": 9}, FLy(theta=0.1), 9, "heuristic"),
        ({"policy": {"name": "fly", "theta": 0.1}}, FLy(theta=0.1), 6, "heuristic"),
        ({"policy": "fly.paper"}, FLy.paper(), 6, "heuristic"),
        ({"off": True}, Exact(), 0, "lossless"),
        ({"k": 0}, Exact(), 0, "lossless"),
        ({"draft": "none"}, Exact(), 0, "lossless"),
        ({"draft": "ngram"}, Exact(), 6, "lossless"),
    ]:
        params = SamplingParams(temperature=0.0, max_tokens=60)
        [wanted] = alone.generate([alone.chat_prompt(CHAT)], params, policy=policy, k=k)
        got = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=60, extra_body={"speculation": asked}
        )
        assert got.choices[0].message.content == wanted.text
        said = got.model_extra["speculation"]  # type: ignore[index]
        assert (said["policy"], said["guarantee"], said["k"]) == (str(policy), guarantee, k)
        assert said["draft"] == ("ngram" if k else "none")
        told = got.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
        stats = wanted.stats
        assert (told["num_draft_tokens"], told["num_accepted_draft_tokens"]) == (stats.drafted, stats.accepted)
        histogram = told["acceptance_histogram"]
        assert sum(n * count for n, count in enumerate(histogram)) == stats.accepted
        assert sum(histogram) == told["num_spec_steps"] <= stats.rounds
        [request] = alone.requests([alone.chat_prompt(CHAT)], params, policy, k)
        alone.worker.run(Job([request]))
        stood = [n for _, n in request.row.drafts]  # round by round, however many of them the engine takes in a step
        assert histogram == [stood.count(n) for n in range(k + 1)]


def test_a_name_hides_the_paths_of_target_and_draft(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "fly-tiny", tmp_path / "inner-name")
    with running(f"ngram+model('{tmp_path}/inner-name', k=3)", name="outer-name") as server:
        told = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert (told["id"], told["speculation"]["draft"]) == ("outer-name", "draft")
        assert told["speculation"]["drafts"] == ["draft", "none"]
        asked: dict[str, Any] = {"model": "outer-name", "prompt": "a", "max_tokens": 3}
        for given, status in [
            ({}, 200),
            ({"speculation": {"draft": "draft", "provenance": True}}, 200),
            ({"stream": True}, 200),
            ({"speculation": {"draft": str(tmp_path)[::-1]}}, 400),
            ({"speculation": {"k": 1000}}, 400),
            ({"speculation": {"draft": "none", "k": 2}}, 400),
            ({"model": "another"}, 404),
            ({"prompt": [10**6]}, 400),
            ({"prompt": [1] * 10**4}, 400),
            ({"logit_bias": {"99999": 1}}, 400),
        ]:
            got = httpx.post(f"{server.url}/v1/completions", json={**asked, **given}, timeout=60)
            assert got.status_code == status, got.text
            assert not re.search(f"inner-name|{tmp_path}|{MODEL}", f"{got.headers} {got.text}")
        for path in ("metrics", "openapi.json", "health", "tokenizer_info", "", "nowhere"):
            got = httpx.get(f"{server.url}/{path}")
            assert not re.search(f"inner-name|{tmp_path}|{MODEL}", f"{got.headers} {got.text}")


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_is_explained_on_request(client: OpenAI, alone: LLM, stream: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=80, explain=True)
    [wanted] = alone.generate([alone.chat_prompt(CHAT)], params, policy=FLy(theta=0.1, window=2, hold=2), k=8)
    asked = {"speculation": {"policy": "fly(theta=0.1, window=2, hold=2)", "k": 8, "provenance": True}}
    got: Any = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=80, stream=stream, extra_body=asked
    )
    choices = [chunk.choices[0] for chunk in got] if stream else [got.choices[0]]
    told = [entry for choice in choices for entry in choice.model_extra.get("provenance", [])]
    assert [entry["id"] for entry in told] == wanted.token_ids
    assert [entry["reason"] for entry in told] == [token.why.name.lower() for token in wanted.provenance]
    assert [entry["clause"] for entry in told] == [token.clause for token in wanted.provenance]
    assert [entry["target_choice"]["id"] for entry in told] == [token.target_choice for token in wanted.provenance]
    for name, values in (("probability", "prob"), ("entropy", "entropy")):
        expected = [getattr(token, values) for token in wanted.provenance]
        assert [entry[name] for entry in told] == pytest.approx(expected, abs=1e-4)
    assert len({entry["block"] for entry in told}) == wanted.stats.rounds + 1
    assert "".join(entry["text"] for entry in told) == wanted.text
    assert {"match", "correction"} <= {entry["reason"] for entry in told}


def test_the_operator_says_what_may_be_asked_for() -> None:
    rules = Rules(Exact(), 5, "ngram", ("fly", "after", "exact | entropy(0.5)", "fly.reference"), max_k=9)
    for allowed in ("exact", "fly", "fly(theta=0.9) & after(3)", "exact|entropy( 0.5 )", "fly.reference"):
        assert rules.choose(allowed).k == 5
    assert rules.choose({"name": "fly", "theta": 0.9}).policy == FLy(theta=0.9)
    for refused in ("exact | entropy(0.6)", "fly & ~control", "lossy", {"name": "typical"}):
        with pytest.raises(ValueError, match=r"not enabled here; choices: \['exact', 'fly', 'after'"):
            rules.choose(refused)
    trusted = Rules(Exact(), 5, "ngram", ("fly.policies:FLy(theta=0.25)",))
    assert trusted.choose("fly.policies:FLy(theta=0.25)").policy == FLy(theta=0.25)
    with pytest.raises(ValueError, match="import code"):
        trusted.choose("fly.policies:FLy(theta=0.26)")
    with pytest.raises(ValueError, match="'flyy' is unknown"):
        Rules(Exact(), 5, "ngram", ("flyy",))


def test_policies_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 raises a SystemError now and then where two threads are in ``ast.parse``."""
    rules, parse, inside, most = Rules(Exact(), 5, "ngram"), ast.parse, threading.Semaphore(1), []

    def alone(*arguments: Any, **options: Any) -> Any:
        most.append(inside.acquire(blocking=False))
        try:
            time.sleep(0.002)
            return parse(*arguments, **options)
        finally:
            if most[-1]:
                inside.release()

    monkeypatch.setattr(ast, "parse", alone)
    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(lambda _: str(rules.choose("fly & after(2)").policy), range(12)))) == 1
    assert len(most) == 12 and all(most)


def test_a_lossless_server_refuses_the_rest() -> None:
    rules = Rules(Exact(), 5, "ngram", ("fly", "block", "fly.paper"), require_lossless=True)
    assert rules.choose("block").policy.guarantee.value == "lossless"
    for refused in ("fly", "fly.paper"):
        with pytest.raises(ValueError, match="requires lossless"):
            rules.choose(refused)
    with pytest.raises(ValueError, match="requires lossless"):
        Rules(FLy(), 5, "ngram", require_lossless=True)


def test_speculation_without_a_draft_is_refused() -> None:
    rules = Rules(Exact(), 0, "none")
    assert rules.choose().k == 0
    with pytest.raises(ValueError, match="without a draft"):
        rules.choose(k=4)


def test_a_request_names_one_of_the_drafts_that_are_loaded() -> None:
    with running("choose(copy=ngram, small=fly-tiny)") as server:
        [model] = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert (model["speculation"]["draft"], model["speculation"]["drafts"]) == ("copy", ["copy", "small", "none"])
        body = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 24}
        texts, drafted = set(), {}
        for name in (None, "copy", "small", "none"):
            asked = {} if name is None else {"speculation": {"draft": name}}
            got = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **asked}, timeout=60).json()
            assert got["speculation"]["draft"] == (name or "copy")
            texts.add(got["choices"][0]["message"]["content"])
            drafted[name] = got["usage"]["completion_tokens_details"]
        assert len(texts) == 1 and drafted[None] == drafted["copy"]
        assert drafted["small"]["rejected_prediction_tokens"] == 0 < drafted["copy"]["rejected_prediction_tokens"]
        assert drafted["none"]["accepted_prediction_tokens"] == 0 < drafted["small"]["accepted_prediction_tokens"]
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "speculation": {"draft": "big"}})
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400 and "'big'" in message and "['copy', 'small', 'none']" in message


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"structured_outputs": {"choice": ['a "b"', "c"]}}, r'a "b"|c'),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, r"\d{3}"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "x{2,3}"}, "xx|xxx"),
        ({"guided_json": '{"type": "integer", "minimum": 10, "maximum": 99}'}, r"\d\d"),
        ({"guided_grammar": 'root ::= "ab" [0-9]'}, r"ab\d"),
        ({"guided_grammar": 'start: "ab" /[0-9]/'}, r"ab\d"),
    ],
)  # fmt: skip
def test_forms_by_vllms_names(client: OpenAI, asked: dict[str, Any], form: str) -> None:
    got = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=40, extra_body=asked)
    assert re.fullmatch(form, got.choices[0].message.content or "") and got.choices[0].finish_reason == "stop"
