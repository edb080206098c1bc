"""README and guides: every Python block runs, every command of ours parses, every link leads somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import sys
import textwrap
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *sorted((ROOT / "docs").glob("*/**/*.md")), ROOT / "CONTRIBUTING.md"]
PROSE = {"docs/README.md", "docs/commands.md", "docs/early-exit.md", "docs/house.md"}  # pages without Python


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *kinds: str) -> list[str]:
    """The blocks of code of these kinds; those of a list are indented."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, kind, text in found if kind in kinds]


def prose(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in addresses."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[list[str]]:
    """The words behind ``fly``, of every such line in a shell block."""
    lines = "\n".join(blocks(page, "sh", "bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    before = ([], ["-m"], ["|"])
    return [
        line[at + 1 :] for line in words for at, word in enumerate(line) if word == "fly" and line[:at][-1:] in before
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, as a reader would type it."""
    found = blocks(page, "python")
    assert bool(found) != (name(page) in PROSE)
    module = types.ModuleType("my_rules")
    monkeypatch.setitem(sys.modules, "my_rules", module)
    for block in found:
        exec(compile(block, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_does_not_run_here_can_be_read(page: Path) -> None:
    """Python that needs a server or several processes, and files of settings."""
    for block in blocks(page, "py"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for block in blocks(page, "yaml"):
        assert list(yaml.safe_load_all(block))
    for block in blocks(page, "toml"):
        assert tomllib.loads(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_page_names_only_commands_and_options_that_exist(page: Path) -> None:
    from typer.main import get_command

    from fly.cli import app

    for words in commands(page):
        command: Any = get_command(app)
        while known := getattr(command, "commands", None):
            assert words and words[0] in known, f"{words}; known: {sorted(known)}"
            command, words = known[words[0]], words[1:]
        options = {"--help"}.union(*([*param.opts, *param.secondary_opts] for param in command.params))
        unknown = {word.partition("=")[0] for word in words if word.startswith("-")} - options
        assert not unknown or command.context_settings.get("ignore_unknown_options"), f"{command.name}: {unknown}"


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)}: {link}; there are {sorted(anchors(target))}"


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", prose(index))}
    assert {page.resolve() for page in PAGES} - {index} <= listed


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
