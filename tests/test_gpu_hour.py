"""``benchmarks/gpu.py`` on emulated devices: every part runs, and what breaks one part hides no other."""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu, gpu_checks
from benchmarks.gpu import Part, Refused, Setting
from fly.backends.cuda import ops
from tests.emulator import emulated, exchanged


@contextmanager
def around() -> Iterator[None]:
    """Two emulated devices, whose processes exchange by Gloo."""
    begin = dist.init_process_group
    torch.set_num_threads(1)

    def join(kind: str, device_id: Any = None, **how: Any) -> None:
        begin("gloo", **how)

    with emulated() as device, exchanged(device), mock.patch.object(dist, "init_process_group", join):
        yield


TINY = Setting(
    "tiny", "tiny", contexts=(300,), rows=(1, 2), k=3, tokens=9, repeats=2, megabytes=1, start="fork", around=around
)


def test_the_first_hour_runs_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong, and what a sanitizer finds, are reported; all others pass."""
    own = ops.multiply_int4

    def wrong(x_TK: torch.Tensor, *rest: Any) -> torch.Tensor:
        return own(x_TK, *rest) * (1.1 if x_TK.device.type == "cuda" else 1)

    monkeypatch.setattr(ops, "multiply_int4", wrong)
    monkeypatch.setattr(ops, "_compare_layers", lambda *_: None)  # it would refuse all kernels of layers
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho Invalid write; exit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    record = gpu.run(gpu.parts_of(TINY), TINY, tmp_path)
    why = {name: outcome.get("why", outcome["state"]) for name, outcome in record["parts"].items()}
    assert why.pop("kernels").startswith("AssertionError: int4 product")
    assert why.pop("sanitizer") == "AssertionError: it ended with code 9; the log has what it found"
    assert (tmp_path / "sanitizer.log").read_text().startswith("Invalid write")
    assert why == dict.fromkeys(why, "passed")
    assert json.loads((tmp_path / "gpu.json").read_text("utf-8")) == json.loads(json.dumps(record))
    page = (tmp_path / "gpu.md").read_text("utf-8")
    assert "| trees | **passed** |" in page and "| kernels | **failed** |" in page
    for timed in ("attention, 2 × 4 tokens over 300", "int8 product 256 → 512, 4 tokens", "tiny alone, 2 × 300",
                  "tiny with tiny draft, K 3, 1 × 300", "tiny with head, K 3, 2 × 300"):  # fmt: skip
        assert f"| {timed} | " in page, timed


def crash(setting: Setting) -> None:
    os.kill(os.getpid(), 9)


def hang(setting: Setting) -> None:
    time.sleep(60)


def refuse(setting: Setting) -> None:
    raise Refused("there is one device")


def count(setting: Setting, number: int) -> dict[str, Any]:
    print("counted")
    return {"number": number, "rows": [("a product", 2e-6, 3_000_000)]}


def test_what_breaks_first_does_not_hide_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (crash, hang, refuse, count):
        monkeypatch.setattr(gpu_checks, function.__name__, function, raising=False)
    names = {"crash": 30, "hang": 0.5, "refuse": 30, "missing": 30}
    parts = [Part(name, f"gpu_checks.{name}", limit) for name, limit in names.items()]
    parts.append(Part("count", "gpu_checks.count", 30, (7,)))
    record = gpu.run(parts, Setting(start="fork"), tmp_path)["parts"]
    assert [outcome["state"] for outcome in record.values()] == ["failed", "failed", "left out", "failed", "passed"]
    assert record["crash"]["why"] == "its process ended with code -9"
    assert record["hang"]["why"] == "not over after 0.5 s" and record["hang"]["seconds"] < 20
    assert record["refuse"]["why"] == "there is one device"
    assert record["missing"]["why"] == "AttributeError: module 'benchmarks.gpu_checks' has no attribute 'missing'"
    assert record["count"]["found"]["number"] == 7 and (tmp_path / "count.log").read_text() == "counted\n"
    assert "| a product | 2.0 | 3.0 | – |" in (tmp_path / "gpu.md").read_text("utf-8")


def test_all_parts_fit_into_ten_minutes() -> None:
    assert sum(part.limit for part in gpu.parts_of(Setting())) < 600


def test_what_is_missing_comes_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: flown\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(tmp_path / "flown-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flown.py", "SPEED = 3\n")
        for name, text in {**info, "RECORD": ""}.items():
            wheel.writestr(f"flown-1.0.dist-info/{name}", text)
    (tmp_path / "torch-9.0-py3-none-any.whl").write_bytes(b"no wheel, and torch is here already")
    assert gpu.install_wheels(tmp_path, tmp_path / "there") == []
    assert [path.name for path in (tmp_path / "there").glob("*.py")] == ["flown.py"]
    import flown  # type: ignore[import-not-found]

    assert flown.SPEED == 3 and gpu.install_wheels(tmp_path, tmp_path / "there") == []
