"""The environment of these tests: set it up, and make it known to a process that runs in it."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest

__all__ = ["ROOT", "STATE", "VERSIONS", "enter", "install", "unpack"]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "engines"
STATE = "FLY_WHEELS"  # the environment variable that says where the wheels are
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
PYTHON = BUILD / "venv" / "bin" / "python"
STUBS = (
    *("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"),
    *("sgl_kernel", "sgl_kernel.speculative"),
)


def install() -> Path:
    """Make the environment, once: what the caller's Python has (torch, triton, transformers, pytest), and the packages
    of requirements.txt. Return its Python."""
    done = BUILD / "installed"
    wanted = Path(__file__).with_name("requirements.txt")
    if not done.exists() or done.stat().st_mtime < wanted.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "venv", BUILD / "venv"], check=True)
        here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
        (there,) = (BUILD / "venv").glob("lib/python*/site-packages")
        (there / "callers.pth").write_text(f"{here}\n{ROOT}\n", encoding="utf-8")
        pip = (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r")
        subprocess.run([*pip, wanted], check=True)
        done.touch()
    return PYTHON


def unpack(project: str, version: str) -> Path:
    """Download a project's wheel and unpack its Python, once. Return the folder."""
    folder = BUILD / f"{project}-{version}"
    if not folder.exists():
        pip = (PYTHON, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
        subprocess.run([*pip, "--dest", BUILD / "wheels", f"{project}=={version}"], check=True)
        (wheel,) = (BUILD / "wheels").glob(f"{project}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder.with_suffix(".part"), [n for n in archive.namelist() if not n.endswith(".so")])
        folder.with_suffix(".part").rename(folder)
        wheel.unlink()
    return folder


def enter(project: str) -> None:
    """Make a project's wheel importable here. Skip the test file outside ``make engines-test``."""
    folders = dict(entry.split("=", 1) for entry in os.environ.get(STATE, "").split(os.pathsep) if entry)
    if project not in folders:
        pytest.skip(f"needs the wheel of {project}: make engines-test", allow_module_level=True)
    sys.path.insert(0, folders[project])
    import transformers  # noqa: F401  # before a stub of torchvision, which it would look at

    # Packages of CUDA or of pictures, which nothing here calls.
    for name in STUBS:
        if name not in sys.modules:
            stub = MagicMock(name=name)
            stub.__spec__, stub.__path__ = importlib.machinery.ModuleSpec(name, None), []
            sys.modules[name] = stub
