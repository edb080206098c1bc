"""Packages whose names are found late (``fly.late``)."""

from __future__ import annotations

import compileall
import importlib
import sys
from pathlib import Path

import pytest

PACKAGE = """
from importlib.metadata import version
from typing import TYPE_CHECKING

from fly.late import find_late

if TYPE_CHECKING:
    from collections import Counter
    from late_package import inside
    from late_package.inside import (
        first,
        second as second,
    )
else:
    __getattr__, __dir__ = find_late(__name__)
"""


@pytest.mark.parametrize("sources", [True, False])
def test_names_are_found_with_sources_and_without(
    sources: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation of byte code alone (``compileall -b``) has no sources to read."""
    folder = tmp_path / "late_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "inside.py").write_text("first, second = 1, 2\n")
    if not sources:
        assert compileall.compile_dir(folder, quiet=1, legacy=True)
        for path in folder.glob("*.py"):
            path.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for name in ("late_package", "late_package.inside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    package = importlib.import_module("late_package")
    assert (package.first, package.second, package.inside.second) == (1, 2, 2)
    assert package.Counter is importlib.import_module("collections").Counter
    assert {"Counter", "first", "inside", "second"} <= {*dir(package)} and not hasattr(package, "third")
