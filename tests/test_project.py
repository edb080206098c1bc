"""What surrounds the package: workflows, templates and hooks fit their schemas, and name only what exists."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def steps(workflow: Path) -> list[str]:
    """The commands that a workflow runs."""
    return [step["run"] for job in read(workflow)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", [path for path in TEMPLATES if path.stem != "config"]),
        ("github-issue-config", [path for path in TEMPLATES if path.stem == "config"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_a_file_fits_its_published_schema(schema: str, files: list[Path]) -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    result = subprocess.run(check, capture_output=True, text=True)
    assert files and result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_makes_only_what_the_makefile_has(workflow: Path) -> None:
    rules = {*re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)}
    rules = {rule.replace("$(VENV)", ".venv") for rule in rules}
    assert {target for step in steps(workflow) for target in re.findall(r"^make (\S+)", step)} <= rules


def test_workflows_cover_every_python_and_torch_that_the_package_takes() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    tried = {each["torch"] for each in matrix["include"]} | {*matrix["torch"]}
    (least,) = [each.partition(">=")[2] for each in PROJECT["project"]["dependencies"] if each.startswith("torch>")]
    assert min(tried, key=lambda version: [*map(int, version.split("."))]).startswith(f"{least}.")
    assert PROJECT["project"]["requires-python"] == f">={matrix['python'][0]}"


def test_what_a_reader_needs_first_is_what_the_package_needs() -> None:
    versions = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    least = PROJECT["project"]["requires-python"].removeprefix(">=")
    said = {page: (ROOT / page).read_text("utf-8") for page in ("README.md", "docs/how-to/install.md")}
    assert all(f"Python {least} or newer" in text for text in said.values())
    assert f"tests run on {versions[0]} to {versions[-1]}" in said["docs/how-to/install.md"]


def test_engines_find_the_plug_ins_by_their_entry_points() -> None:
    """There is none of ``vllm.logits_processors``: at that older interface vLLM's second model runner raises."""
    groups = PROJECT["project"]["entry-points"]
    assert {*groups} == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group, entries in groups.items():
        (plug_in,) = (EntryPoint(name, value, group).load() for name, value in entries.items())
        assert plug_in.__name__ == "register" and plug_in.__module__.startswith("fly.extras.engines.")


def test_a_plug_in_needs_nothing_that_its_engine_does_not_bring() -> None:
    """It is installed by ``pip install --no-deps``. Both engines bring PyTorch, NumPy and pydantic."""
    program = """
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name in MISSING:
                    raise ModuleNotFoundError(f"No module named {name!r}")

        sys.meta_path.insert(0, Missing())
        from fly.extras.engines.blocks import read_rule
        from fly.extras.engines.sglang import plugin
        from fly.extras.engines.vllm import first, plugin, second
        read_rule("exact | regret(1.2, 4) & at_most(20) & after(2)", 100)
        """
    brought = {"torch", "numpy", "pydantic", "pydantic-core", "typing-extensions"}
    needed = {re.split(r"[^\w-]", each)[0] for each in PROJECT["project"]["dependencies"]}
    missing = {{"pyyaml": "yaml"}.get(name, name.replace("-", "_")) for name in needed - brought}
    program = textwrap.dedent(program).replace("MISSING", repr(missing))
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_hooks_have_the_versions_of_the_constraints() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    pinned = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert {each for hook in hooks for each in hook["additional_dependencies"]} <= {*pinned}


def test_the_site_builds_without_a_network_and_has_every_page(tmp_path: Path) -> None:
    """In strict mode a link or an anchor that leads nowhere, or a page that the navigation lacks, is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    assert "AcceptancePolicy" in pages["reference/modules/fly.policies.html"]
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
    # Nothing is fetched by who reads it: scripts, styles and pictures are files of the site.
    fetched = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=[\"']?https?://([^/\"'>]+)")
    assert not {host for page in pages.values() for host in fetched.findall(page)}
