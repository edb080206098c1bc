"""The first hour on a GPU, in ten minutes: ``python -m benchmarks.gpu``, from the root of a checkout.

It needs a CUDA build of torch and what ``pyproject.toml`` lists, but no network and no checkpoint: models are the
bundled ones, or have published shapes and random weights. What is missing is installed from wheels in
``benchmarks/wheels``, if it is there (``docs/explanation/cuda.md`` says how to fill that folder).

First come checks (``gpu_checks.py``), then times (``gpu_times.py``). Each part is a process of its own with a limit of
its own, so what crashes or hangs does not hide the rest. ``gpu.json`` and the page ``gpu.md`` are written after each
part, beside a log of each.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Part", "Refused", "Setting", "main", "parts_of", "run"]

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / "benchmarks" / "wheels"


@dataclass(frozen=True)
class Setting:
    """What is run. The tests take small shapes, and an emulated device, which each process enters by ``around``."""

    target: str = "8b"  # shapes of ``gpu_times.SHAPES``
    draft: str = "1b"
    contexts: tuple[int, ...] = (512, 4096)
    rows: tuple[int, ...] = (1, 8, 32)
    k: int = 8
    tokens: int = 32  # of an answer that is checked
    repeats: int = 20  # of what is timed
    megabytes: int = 1024  # that are read to measure the bandwidth
    device: str = "cuda"
    start: str = "spawn"  # how processes begin
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Refused(Exception):
    """What a part needs is not here."""


@dataclass(frozen=True)
class Part:
    name: str
    function: str  # module and name, called with the setting
    limit: float  # seconds
    arguments: tuple[Any, ...] = ()


def parts_of(setting: Setting) -> list[Part]:
    """All parts, in their order. Their limits add up to less than ten minutes."""
    checks = {
        "machine": 45, "model": 50, "graphs": 50, "kernels": 65, "trees": 30, "heads": 30, "int8": 35, "int4": 35,
        "ranks": 50, "sanitizer": 50,
    }  # fmt: skip
    parts = [Part(name, f"gpu_checks.check_{name}", limit) for name, limit in checks.items()]
    parts.append(Part("times of kernels", "gpu_times.time_kernels", 45))
    return parts + [Part(f"rounds of {n}", "gpu_times.time_rounds", 37, (n,)) for n in setting.rows]


def run(parts: Sequence[Part], setting: Setting, folder: Path) -> dict[str, Any]:
    """Run every part, and write JSON and page after each. Returns what is in the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"parts": {}}
    for part in parts:
        record["parts"][part.name] = outcome = _run_part(part, setting, folder)
        print(f"{part.name}: {outcome['state']} after {outcome['seconds']:.0f} s {outcome.get('why', '')}", flush=True)
        (folder / "gpu.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        (folder / "gpu.md").write_text(write_page(record), encoding="utf-8")
    return record


def _run_part(part: Part, setting: Setting, folder: Path) -> dict[str, Any]:
    """What a part's process found. It is killed, with all that it began, when its limit is over."""
    log, found = (folder / f"{part.name.replace(' ', '-')}.{kind}" for kind in ("log", "found"))
    found.unlink(missing_ok=True)
    process: Any = multiprocessing.get_context(setting.start).Process(  # type: ignore[attr-defined]
        target=_work, args=(part, setting, log, found)
    )
    begin = time.monotonic()
    process.start()
    process.join(part.limit)
    late = process.is_alive()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill(), process.join()
    outcome: dict[str, Any] = {"state": "failed", "why": f"its process ended with code {process.exitcode}"}
    if found.exists():
        outcome = json.loads(found.read_text("utf-8"))
        found.unlink()
    if late:  # what was found before stays
        outcome |= {"state": "failed", "why": f"not over after {part.limit:g} s"}
    return outcome | {"seconds": time.monotonic() - begin, "log": log.name}


def _work(part: Part, setting: Setting, log: Path, found: Path) -> None:
    """A part, in a process of its own: what it prints goes into ``log``, what it finds into ``found``."""
    os.setsid()
    sys.stdout = sys.stderr = file = open(log, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)  # what it starts prints there, too
    module, _, name = part.function.partition(".")
    try:
        with setting.around():
            answer = getattr(importlib.import_module(f"benchmarks.{module}"), name)(setting, *part.arguments)
        outcome = {"state": "passed", "found": answer}
    except Refused as reason:
        outcome = {"state": "left out", "why": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"state": "failed", "why": f"{type(error).__name__}: {error}".splitlines()[0]}
    found.write_text(json.dumps(outcome), encoding="utf-8")


def write_page(record: dict[str, Any]) -> str:
    """The record as a page in Markdown."""
    parts = record["parts"]
    machine = parts.get("machine", {}).get("found") or {}
    lines = ["# On a GPU", "", *(f"- {name}: {value}" for name, value in machine.items())]
    lines += ["", "| part | state | seconds | what |", "|---|---|---|---|"]
    for name, outcome in parts.items():
        found = outcome.get("found") or {}
        told = (
            "above"
            if name == "machine"
            else "; ".join(f"{key} {_short(x)}" for key, x in found.items() if key != "rows")
        )
        lines.append(f"| {name} | **{outcome['state']}** | {outcome['seconds']:.0f} | {outcome.get('why') or told} |")
    timed = [row for outcome in parts.values() for row in (outcome.get("found") or {}).get("rows", ())]
    if timed:
        bandwidth = machine.get("bytes read a second")
        lines += ["", "| timed | µs | MB read | of the bandwidth |", "|---|---|---|---|"]
        for name, seconds, read in timed:
            share = f"{read / seconds / bandwidth:.0%}" if bandwidth else "–"
            lines.append(f"| {name} | {1e6 * seconds:,.1f} | {read / 1e6:,.1f} | {share} |")
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def install_wheels(wheels: Path, into: Path) -> list[str]:
    """Install what is not here from the wheels of a folder, without a network. Returns what is still missing."""

    def is_here(name: str) -> bool:
        with suppress(importlib.metadata.PackageNotFoundError):
            return bool(importlib.metadata.version(name))
        return False

    sys.path.append(str(into))
    if needed := [path for path in sorted(wheels.glob("*.whl")) if not is_here(path.name.partition("-")[0])]:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(into)]
        subprocess.run([*pip, *map(str, needed)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = [re.split(r"[^\w.-]", line)[0] for line in project["dependencies"]]
    return [name for name in names if not is_here(name)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m benchmarks.gpu", description="Checks and times of a CUDA device.")
    made.add_argument("--folder", type=Path, default=Path("gpu"), help="where JSON, page and logs are written")
    made.add_argument("--only", action="append", help="run this part alone; repeatable")
    return made


def main() -> None:
    options, setting = parser().parse_args(), Setting()
    if missing := install_wheels(WHEELS, ROOT / "build" / "wheels"):
        print(f"not installed: {', '.join(missing)}; wheels of them can be put into {WHEELS}", flush=True)
    parts = parts_of(setting)
    if unknown := [name for name in options.only or () if name not in {part.name for part in parts}]:
        raise SystemExit(f"--only {unknown[0]!r} is no part; choices: {[part.name for part in parts]}")
    record = run([part for part in parts if part.name in (options.only or [part.name])], setting, options.folder)
    failed = [name for name, outcome in record["parts"].items() if outcome["state"] == "failed"]
    print(f"{options.folder / 'gpu.md'}: {len(failed) or 'none'} failed", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
