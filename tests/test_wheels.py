"""What ``python -m tests.wheels`` says of a version, on small files. The tests on the wheels are in tests/wheels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.wheels.__main__ import SIGNATURES, compare_signatures

ROOT = Path(__file__).parent.parent
WHEELS = sorted((ROOT / "tests" / "wheels").glob("test_*.py"))


def write(folder: Path, changes: dict[str, str]) -> Path:
    """A project of SGLang's with the functions that the plug-in needs; ``changes`` are other parameters by name."""
    parts: dict[str, dict[str, list[str]]] = {}
    for path, name, wanted in SIGNATURES["sglang"]:
        parameters = changes.get(name, wanted.replace("...", "other=0")).split()
        *kinds, function = name.split(".")
        definition = f"def {function}({', '.join(parameters)}): ..."
        parts.setdefault(path, {}).setdefault("".join(kinds), []).append(definition)
    for path, kinds in parts.items():
        lines = []
        for kind, definitions in kinds.items():
            lines += [f"class {kind}:", *(f"    {line}" for line in definitions)] if kind else definitions
        file = folder / "sglang" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_a_version_that_fits_has_no_faults(tmp_path: Path) -> None:
    assert compare_signatures("sglang", write(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("SamplingParams.verify", "self", "SamplingParams.verify takes (self), not (self, vocab_size)"),
        ("SamplingParams.verify", "self vocab_size strict", "takes (self, vocab_size, strict)"),
        ("eagle_sample", "batch verify_input logits_output grammar_mask", "eagle_sample takes (batch, verify_input"),
    ],
)
def test_a_changed_signature_is_named(tmp_path: Path, name: str, parameters: str, said: str) -> None:
    (fault,) = compare_signatures("sglang", write(tmp_path, {name: parameters}))
    assert said in fault


def test_a_function_that_is_gone_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, {}) / "sglang" / "srt/speculative/eagle_utils.py"
    file.unlink()
    assert compare_signatures("sglang", tmp_path) == ["srt/speculative/eagle_utils.py has no eagle_sample"]


def test_the_page_names_every_trap_and_the_tests_exist() -> None:
    """Tests of traps on the engines' own code are named so; the page has them all, and no test that does not exist."""
    page = (ROOT / "docs" / "explanation" / "engine-hook.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page))
    tests = {
        (path, name)
        for path in {*(path for path, _ in named), *(f"tests/wheels/{file.name}" for file in WHEELS)}
        for name in re.findall(r"^def (test_\w+)", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert named <= tests
    assert {each for each in tests if "_trap_" in each[1]} <= named
