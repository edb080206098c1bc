"""The examples of hypothesis: the same in every process by default, others in ``make explore``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.explore import command

PROPERTY = """
from hypothesis import given, strategies as st

DRAWN = []

@given(st.tuples(st.integers(0, 10**6), st.floats(), st.text(), st.sampled_from("abc")))
def test_property(values):
    DRAWN.append(values)

def test_print():
    print("drawn:", hash(repr(DRAWN)))
"""
SESSIONS = """
import sys
import pytest

def draw(*options):
    sys.modules.pop("test_drawn", None)
    if pytest.main(["-s", "-q", "-p", "no:cacheprovider", *options, "test_drawn.py"]):
        raise SystemExit(1)

draw()
draw({first})
import fly.llm, fly.serve.app, fly.cli
draw("--hypothesis-profile", "fixed")  # pytest keeps the profile of the last session
draw({first})
draw({second})
"""


def test_examples_depend_on_the_test_and_the_seed_alone(tmp_path: Path) -> None:
    """Neither on the time nor on which of our modules were imported before. A seed gives other examples, each time the
    same."""
    first, second = (command(seed)[command(seed).index("--hypothesis-profile") :] for seed in (1, 2))
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n", encoding="utf-8")
    (tmp_path / "test_drawn.py").write_text(PROPERTY, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", SESSIONS.format(first=f"*{first}", second=f"*{second}")],
        env={"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONHASHSEED": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    drawn = [line for line in ran.stdout.splitlines() if "drawn:" in line]
    assert drawn[:2] == drawn[2:4]
    assert len({*drawn}) == 3 and len(drawn) == 5
