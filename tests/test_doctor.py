"""``fly doctor``: it names versions and kernels, and gives a reason for everything that it does not use."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fly
from fly.backends.cpu.library import TORCH, available
from fly.cli import app

doctor = importlib.import_module("fly.cli.doctor")  # the package's own name is the command


def show(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def findings() -> dict[str, Any]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_it_shows_versions_and_kernels_without_a_path_or_a_user(tmp_path: Path) -> None:
    shown = show("--json", str(tmp_path / "doctor.json"))
    assert fly.__version__ in shown and torch.__version__.partition("+")[0] in shown
    written = json.loads((tmp_path / "doctor.json").read_text("utf-8"))
    assert {each["subject"] for each in written} == {*findings()}
    assert str(Path.home()) not in shown and str(Path(fly.__file__).parent) not in shown


@pytest.mark.parametrize("kernels", available())
def test_it_shows_the_kernels_that_the_variable_names(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLY_KERNELS", kernels)
    assert findings()["CPU kernels"].found.startswith(f"{kernels} (named by FLY_KERNELS)")


@pytest.mark.skipif(available() == [TORCH], reason="the library was not built")
def test_kernels_that_it_offers_are_accepted() -> None:
    offered = re.search(r"--kernels (.*) for fewer bits", findings()["CPU kernels"].found)
    assert offered is not None
    for kernels in offered[1].split(" or "):
        result = CliRunner().invoke(app, ["generate", "a", "--model", "fly-tiny", "--kernels", kernels, "--n", "1"])
        assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(app, ["generate", "a", "--model", "fly-tiny", "--kernels", "w5"])
    choices = ast.literal_eval(re.search(r"choices: (\[.*?\])", " ".join(refused.output.split()))[1])  # type: ignore[index]
    for kernels in {*choices} - {name for name in choices if name.endswith("stored")}:  # of GGUF files alone
        assert fly.LLM("fly-tiny", device="cpu", kernels=kernels).engine


@pytest.mark.skipif(available() == [TORCH], reason="the library was not built")
def test_kernels_for_drafts_are_not_what_targets_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLY_KERNELS", "w4")
    found = findings()["CPU kernels"]
    assert found.found == "w4" and "are for drafts" in found.unused


def test_kernels_that_are_not_to_be_had_are_not_used_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLY_KERNELS", "neon")
    found = findings()["CPU kernels"]
    assert found.found == "neon" and "FLY_KERNELS=neon" in found.unused


def test_without_compiled_code_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available", lambda: [TORCH])
    monkeypatch.setattr(doctor, "why_not", lambda: "no compiler was found")
    found = findings()
    assert found["compiled kernels"].unused == "no compiler was found"
    assert "PyTorch" in found["CPU attention"].found


def test_a_package_that_is_missing_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor._OPTIONAL, "no-such-package", "nothing at all")
    found = findings()["no-such-package"]
    assert found.found == "not installed" and found.unused == "only for nothing at all"


def test_cuda_is_named_or_its_absence_explained() -> None:
    found = findings()
    assert torch.cuda.is_available() or found["CUDA"].unused
    assert not torch.cuda.is_available() or torch.cuda.get_device_name(0) in found["cuda:0"].found
