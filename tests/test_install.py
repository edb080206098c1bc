"""What is installed: every file of the package, and types for those who use it. (That a wheel and a source distribution
work in an environment of their own is tried by hand: it takes minutes.)"""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MADE = {".py", ".pyc", ".so"}  # modules, and what is made of the package here


def test_every_file_of_the_package_is_installed() -> None:
    data = SETUP["tool"]["setuptools"]["package-data"]
    globs = [f"{package.replace('.', '/')}/{pattern}" for package, patterns in data.items() for pattern in patterns]
    globs += [f"fly/backends/cpu/src/*.{kind}" for kind in ("cpp", "h")]  # of setup.py's extension
    files = [path for path in (ROOT / "fly").rglob("*") if path.is_file() and path.suffix not in MADE]
    names = [path.relative_to(ROOT).as_posix() for path in files if path.name != "not_built.txt"]
    assert "fly/py.typed" in names and len(names) > 20
    assert not [name for name in names if not any(fnmatch(name, pattern) for pattern in globs)]
    assert not [pattern for pattern in globs if not any(fnmatch(name, pattern) for name in names)]


def test_every_room_is_a_package() -> None:
    """``packages.find`` takes folders with an ``__init__`` only."""
    folders = {path.parent for path in (ROOT / "fly").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_sources_of_the_kernels_are_those_that_are_built() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    for source in (ROOT / "fly/backends/cpu/src").glob("*.cpp"):
        assert f'"{source.stem}"' in text or f"/{source.name}" in text
