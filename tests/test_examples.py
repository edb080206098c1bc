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


def drawn(folder: Path, imports: str, *options: str) -> str:
    """Return what stands for the examples that a process draws that has made these imports."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n", encoding="utf-8")
    (folder / "test_drawn.py").write_text(PROPERTY.format(imports=imports), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", *options, str(folder)],
        env={"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONHASHSEED": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return next(line for line in ran.stdout.splitlines() if "drawn:" in line)


def test_examples_depend_on_the_test_and_the_seed_alone(tmp_path: Path) -> None:
    """Neither on the time nor on which of our modules were imported before. A seed gives other examples, each time the
    same."""
    fixed = drawn(tmp_path, "")
    assert fixed == drawn(tmp_path, "import fly.llm, fly.serve.app, fly.cli")
    options = command(1)[command(1).index("--hypothesis-profile") :]
    once = drawn(tmp_path, "", *options)
    assert once == drawn(tmp_path, "", *options)
    assert once not in (fixed, drawn(tmp_path, "", *options[:-1], "2"))
