"""What is installed: every file of the package, and types for those who use it. (That a wheel and a source distribution
work in an environment of their own is tried by hand: it takes minutes.)"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions, version
from pathlib import Path

import fly

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


def test_what_is_imported_is_declared() -> None:
    """Nothing comes along only because a library of ours needs it. (``pytest`` is for the kits; an engine that loads a
    plug-in is there already.)"""
    project = SETUP["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    declared = {plain(re.split(r"[^\w.-]", each)[0]) for each in wanted}
    found: set[str] = set()
    for path in (ROOT / "fly").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    outside = found - sys.stdlib_module_names - {"fly", "_typeshed", "vllm", "sglang"}
    owners = packages_distributions()
    assert {"torch", "httptools", "starlette", "httpx2"} <= outside
    assert not [name for name in sorted(outside) if not declared & {plain(each) for each in owners.get(name, [name])}]


def plain(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_package_says_its_version() -> None:
    assert fly.__version__ == version("flyspec")
