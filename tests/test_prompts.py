"""Prompts to train a head on (tools/prompts.py): none that is held out is trained on, and examples are right."""

import ast
import json
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fly.extras.eval.task import load_task
from tools import prompts
from tools.prompts import Asked, drawn, library, small


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=9), st.integers(1, 20), st.integers(1, 5), st.integers())
def test_what_is_held_out_is_about_something_else(about: list[int], count: int, held_out: int, seed: int) -> None:
    some = [Asked("kind", str(one), f"{n}") for n, one in enumerate(about)]
    train, apart = drawn(some, count, held_out, Random(seed))
    assert not {one.about for one in train} & {one.about for one in apart}
    assert len(train) <= count and 1 <= len(apart) <= held_out and len({*train}) == len(train)


def test_examples_of_small_functions_are_right() -> None:
    asked = {one.about: one.prompt for one in small() if one.kind == "small-0"}
    assert len(asked) == 144
    for name, expected in (
        ("sum_of_even", lambda numbers: sum(n for n in numbers if n % 2 == 0)),
        ("last_digits_of_negative", lambda numbers: [-n % 10 for n in numbers if n < 0]),
        ("distinct_of_repeated", lambda numbers: sorted({n for n in numbers if numbers.count(n) > 1})),
    ):
        lines = [line.strip() for line in asked[name].splitlines()]
        calls = [n for n, line in enumerate(lines) if line.startswith(">>>")]
        assert calls
        for n in calls:
            numbers = ast.literal_eval(lines[n].removeprefix(f">>> {name}(").removesuffix(")"))
            assert ast.literal_eval(lines[n + 1]) == expected(numbers)


def test_documented_functions_of_a_folder_and_what_is_written(tmp_path: Path) -> None:
    source, doc = tmp_path / "library", "Return the sum of two whole numbers, which may be negative."
    (source / "test").mkdir(parents=True)
    body = f'def add(a, b):\n    """{doc}"""\n    c = a + b\n    c = c + 0\n    c = c * 1\n    return c\n'
    (source / "test" / "no.py").write_text(body)
    (source / "bare.py").write_text("def bare(a):\n    return a\n")
    for name in ("one", "two"):
        (source / f"{name}.py").write_text(body)
    found = list(library(source))
    assert {one.about for one in found} == {"one", "two"}
    complete = next(one.prompt for one in found if one.kind == "complete-0")
    assert doc in complete and "c = a + b" not in complete
    assert all("c = c * 1" in one.prompt for one in found if one.kind.startswith("read"))

    told = [str(tmp_path / "out"), "--count", "40", "--held-out", "3", "--library", str(source)]
    assert CliRunner().invoke(prompts.app, told).exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert {one["kind"].split("-")[0] for one in lines} == {"complete", "read", "small", "instruction"}
    assert len(load_task(str(tmp_path / "out" / "held-out-instruction.yaml")).problems) == 3
