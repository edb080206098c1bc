"""The documented recipe for Ray Data against a server: by Ray, and by a twin of Ray's stage where Ray is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fly import LLM, SamplingParams
from tests.serving import running
from tests.test_docs import DOCS, code

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
QUESTIONS = [f"Take the list {number} 9 5 7. Reverse the list." for number in range(6)]


def recipe(url: str, folder: Path) -> str:
    """The recipe of the page, with the address, the model and the files of this test."""
    (text,) = (block.text for block in code(DOCS / "how-to" / "beyond-one-machine.md") if block.file == "batch.py")
    changes = {
        "http://127.0.0.1:8000": url,
        "fly-target": "fly-tiny",
        "KEY": "secret",
        '"questions.jsonl"': repr(str(folder / "questions.jsonl")),
        '"answers"': repr(str(folder / "answers")),
        "concurrency=8": "concurrency=2",
    }
    for there, here in changes.items():
        assert text.count(there) == 1, there
        text = text.replace(there, here)
    return text


def twin() -> dict[str, Any]:
    """Modules with the names of Ray's, which read, ask and write rows one after another. As in Arrow's tables, every
    answer has the fields of all answers."""

    class Rows(list[dict[str, Any]]):
        def write_json(self, folder: str) -> None:
            Path(folder).mkdir()
            (Path(folder) / "rows.json").write_text("\n".join(map(json.dumps, self)))

    def build_processor(
        config: types.SimpleNamespace,
        preprocess: Callable[[dict[str, Any]], dict[str, Any]],
        postprocess: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> Callable[[Rows], Rows]:
        def process(rows: Rows) -> Rows:
            asked = [{**row, **preprocess(row)} for row in rows]
            answers = [
                httpx.post(config.url, headers=config.headers, json=row["payload"], timeout=60).json() for row in asked
            ]
            fields = dict.fromkeys(name for answer in answers for name in answer)
            return Rows(
                postprocess({**row, "http_response": {**fields, **answer}}) for row, answer in zip(asked, answers)
            )

        return process

    def read_json(file: str) -> Rows:
        return Rows(json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines())

    llm = types.SimpleNamespace(HttpRequestProcessorConfig=types.SimpleNamespace, build_processor=build_processor)
    data = types.SimpleNamespace(read_json=read_json, llm=llm)
    return {"ray": types.SimpleNamespace(data=data), "ray.data": data, "ray.data.llm": llm}


needs_ray = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("ray", "pyarrow"))), reason="make ray-test installs Ray Data"
)


@pytest.mark.parametrize("by", ["twin", pytest.param("ray", marks=needs_ray)])
def test_the_recipe_gives_each_row_its_answer(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row is too long for the model: its error is its answer, and the others are complete."""
    lines = [*QUESTIONS, "list " * 9000]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps({"question": line}) for line in lines))
    if by == "twin":
        for name, module in twin().items():
            monkeypatch.setitem(sys.modules, name, module)
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with running(api_keys_file=keys) as server:
        try:
            exec(compile(recipe(server.url, tmp_path), "batch.py", "exec"), {"__name__": "batch"})
        finally:
            if by == "ray":
                sys.modules["ray"].shutdown()
    rows = [json.loads(line) for file in (tmp_path / "answers").iterdir() for line in file.read_text().splitlines()]
    assert len(rows) == len(lines)
    (failed,) = (row for row in rows if row["error"] is not None)
    assert failed["text"] is None and "tokens" in failed["error"]

    llm = LLM("fly-tiny", draft="ngram", dtype="float32", k=6)
    params = SamplingParams(temperature=0, max_tokens=128)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    expected = [each.text for each in llm.chat(chats, params, policy="fly(theta=0.3)")]
    assert sorted(row["text"] for row in rows if row["error"] is None) == sorted(expected)
