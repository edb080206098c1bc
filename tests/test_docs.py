"""Every Python block of the guides and the README runs, in order, as a reader would type it."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert blocks, f"{page.name} has no Python to run"
    module = types.ModuleType("my_rules")
    monkeypatch.setitem(sys.modules, "my_rules", module)
    for block in blocks:
        exec(compile(block, str(page), "exec"), module.__dict__)


def test_the_pages_name_only_commands_that_exist() -> None:
    from typer.main import get_command

    from fly.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    for page in PAGES:
        used = set(re.findall(r"^fly ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert used <= known, f"{page.name} names {sorted(used - known)}; known: {sorted(known)}"
