"""The examples of hypothesis: the same in every process by default, others in ``make explore``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.explore import command

PROPERTY = """
import sys
{imports}
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
for options in {sessions}:
    sys.modules.pop("test_drawn", None)
    if pytest.main(["-s", "-q", "-p", "no:cacheprovider", *options, "test_drawn.py"]):
        raise SystemExit(1)
"""


def drawn(folder: Path, imports: str, *sessions: list[str]) -> list[str]:
    """Return what stands for the examples that each session of pytest draws, by its options, in one process that has
    made these imports."""
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.conftest import *\n", encoding="utf-8")
    (folder / "test_drawn.py").write_text(PROPERTY.format(imports=imports), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-c", SESSIONS.format(sessions=sessions)],
        env={"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONHASHSEED": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [line for line in ran.stdout.splitlines() if "drawn:" in line]


def test_examples_depend_on_the_test_and_the_seed_alone(tmp_path: Path) -> None:
    """Neither on the time nor on which of our modules were imported before. A seed gives other examples, each time the
    same."""
    options = command(1)[command(1).index("--hypothesis-profile") :]
    fixed, once = drawn(tmp_path / "bare", "", [], options)
    again = drawn(tmp_path / "full", "import fly.llm, fly.serve.app, fly.cli", [], options, [*options[:-1], "2"])
    assert again[:2] == [fixed, once]
    assert len({*again}) == 3
