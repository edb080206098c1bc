"""README and docs: Python blocks run, tutorials run as a whole, commands parse, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = sorted((DOCS / "results").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted({*DOCS.rglob("*.md")} - {*RESULTS})]
LINKED = [*PAGES, *RESULTS, ROOT / "CONTRIBUTING.md"]
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PROSE = {
    "docs/README.md",
    "docs/contributing.md",
    "docs/reference/commands.md",
    "docs/explanation/engine-hook.md",
    "docs/explanation/layout.md",
    "docs/explanation/words.md",
    "docs/how-to/beyond-one-machine.md",
    "docs/how-to/early-exit.md",
    "docs/how-to/engines.md",
}
PROSE |= {"docs/tutorials/evaluate.md"}  # pages without Python
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


class Code(NamedTuple):
    """A block of code: its language, its text, and the file that the sentence before it says to save it as."""

    kind: str
    text: str
    file: str | None


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code(page: Path) -> Iterator[Code]:
    text = page.read_text(encoding="utf-8")
    for block in FENCED.finditer(text):
        before = text[: block.start()].rstrip().rpartition("\n\n")[2].replace("\n", " ")
        saved = re.search(r"(?:Save|Add) this (?:as|to) `([\w.-]+)`:$", before)
        yield Code(block[2], textwrap.dedent(block[3]), saved and saved[1])


def blocks(page: Path, *kinds: str) -> list[str]:
    return [block.text for block in code(page) if block.kind in kinds]


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in addresses."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(text: str) -> list[list[str]]:
    """The words after ``fly``, of every such line of a shell block."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if re.search(r"(^|\s)fly\s", line)]
    before = ([], ["-m"], ["|"])
    return [
        line[at + 1 :] for line in words for at, word in enumerate(line) if word == "fly" and line[:at][-1:] in before
    ]


def benches(text: str) -> list[tuple[str, list[str]]]:
    """The benches of a checkout that a shell block runs, and the words after each."""
    found = re.findall(r"-m benchmarks\.(\w+)([^\n|>]*)", text.replace("\\\n", " "))
    return [(module, shlex.split(rest, comments=True)) for module, rest in found]


def save(block: Code) -> None:
    """Write a block into its file, after what the file holds already; a module must also import."""
    path = Path(str(block.file))
    before = path.read_text(encoding="utf-8") + "\n\n" if path.exists() else ""
    path.write_text(before + block.text, encoding="utf-8")
    sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()
    if path.suffix == ".py":
        importlib.import_module(path.stem)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's own folder, in which Python finds modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for module in ("my_rules", "my_drafts"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_the_guarantees_that_the_pages_name_are_those_of_the_code() -> None:
    from fly.policies import policy_types

    page = (DOCS / "explanation/losslessness.md").read_text(encoding="utf-8")
    kinds = "lossless", "bounded", "heuristic"
    rows = [
        line.split(" | ", 2) for line in page.splitlines() if line.startswith(tuple(f"| `{kind}` |" for kind in kinds))
    ]
    named = {rule: row[0].strip("|` ") for row in rows for rule in re.findall(r"`(\w+)`", row[2])}
    assert len(named) > 8 and named == {rule: policy_types()[rule]().guarantee.value for rule in named}


@pytest.mark.usefixtures("few_seeds")
@pytest.mark.parametrize("page", sorted({*PAGES} - {*TUTORIALS}), ids=name)
def test_the_page_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, as a reader would type it."""
    found = [block for block in code(page) if block.kind == "python"]
    assert bool(found) != (name(page) in PROSE)
    module = types.ModuleType("my_rules")
    if not any(block.file for block in found):
        monkeypatch.setitem(sys.modules, "my_rules", module)
    for block in found:
        if block.file:
            save(block)
        else:
            exec(compile(block.text, str(page), "exec"), module.__dict__)
    sys.modules.pop("my_rules", None)


@pytest.mark.usefixtures("few_seeds")
@pytest.mark.parametrize("page", TUTORIALS, ids=name)
def test_the_tutorial_runs_as_a_whole(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are saved, commands typed and Python entered, in the order of the page. A server runs beside it."""
    from fly.cli import app
    from tests.serving import running

    module = types.ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)
    with running("ngram") as server:
        server.service.name = "fly-target"
        for block in code(page):
            text = block.text.replace(ADDRESS, server.url)
            if block.file:
                save(block)
            elif block.kind == "python":
                exec(compile(text, str(page), "exec"), module.__dict__)
            elif block.kind == "sh" and text.startswith("curl"):
                if shutil.which("curl"):
                    answer = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
                    assert '"choices"' in answer.stdout, answer.stdout
            elif block.kind == "sh":
                for words in commands(text):
                    if words[0] != "serve":
                        result = CliRunner().invoke(app, words)
                        assert result.exit_code == 0, f"fly {shlex.join(words)}\n{result.output}"
    for module_name in ("my_rules", "my_drafts"):
        sys.modules.pop(module_name, None)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_does_not_run_here_can_be_read(page: Path) -> None:
    """Python that needs a server or several processes, and files of settings."""
    for block in blocks(page, "py"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for block in blocks(page, "yaml"):
        assert list(yaml.safe_load_all(block))
    for block in blocks(page, "toml"):
        assert tomllib.loads(block)


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=name)
def test_the_page_names_only_commands_and_options_that_exist(page: Path) -> None:
    from tests.commands import commands_of_fly

    for words in commands("\n".join(blocks(page, "sh", "bash"))):
        command: Any = types.SimpleNamespace(commands=commands_of_fly())
        while all_of_them := getattr(command, "commands", None):
            known = {name: each for name, each in all_of_them.items() if not each.hidden}
            assert words and words[0] in known, f"{words}; known: {sorted(known)}"
            command, words = known[words[0]], words[1:]
        options = {"--help"}.union(*([*param.opts, *param.secondary_opts] for param in command.params))
        unknown = {word.partition("=")[0] for word in words if word.startswith("-")} - options
        assert not unknown or command.context_settings.get("ignore_unknown_options"), f"{command.name}: {unknown}"


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=name)
def test_the_page_names_only_benches_and_options_that_exist(page: Path) -> None:
    from typer.main import get_command

    for module, words in benches("\n".join(blocks(page, "sh", "bash"))):
        assert (ROOT / "benchmarks" / f"{module}.py").exists(), module
        if module not in ("start", "costs"):  # scripts without options
            bench = importlib.import_module(f"benchmarks.{module}")
            if module == "gpu":  # which needs no typer
                options = {*bench.parser()._option_string_actions}
            else:
                options = {option for param in get_command(bench.app).params for option in param.opts}
            assert {word for word in words if word.startswith("-")} <= options, f"{module}: {words}"


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


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_the_page_names_only_files_and_functions_that_exist(page: Path) -> None:
    """Paths from the root, as `fly/llm.py` or `tests/test_x.py::test_y`; and names before one, as `LLM._row`
    (`fly/llm.py`)."""
    text = prose(page)
    for path, _, test in re.findall(
        r"`((?:fly|tests|benchmarks|examples|tools|configs)/[\w./-]+\.\w+)(::(\w+))?`", text
    ):
        assert (ROOT / path).exists(), path
        assert test in (ROOT / path).read_text(encoding="utf-8"), f"{test} in {path}"
    for names, path in re.findall(r"((?:`[\w.]+`(?:, | and )?)+) \(`(fly/[\w/]+\.(?:py|h|cpp))`", text):
        for dotted in re.findall(r"`([\w.]+)`", names):
            word = dotted.rpartition(".")[2]
            assert re.search(rf"\b{word}\b", (ROOT / path).read_text(encoding="utf-8")), f"{dotted} in {path}"


@pytest.mark.parametrize(("index", "pages"), [(DOCS / "README.md", PAGES), (DOCS / "results" / "README.md", RESULTS)])
def test_the_index_lists_every_page(index: Path, pages: list[Path]) -> None:
    listed = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", prose(index))}
    assert {page.resolve() for page in pages} - {index} <= listed


def test_no_docstring_reads_as_a_link_definition() -> None:
    """Markdown leaves out a line such as ``[B, K]: ...``, and so would the reference."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    left_out = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "fly").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented)
        for line in (ast.get_docstring(node) or "").splitlines()
        if re.match(r" {0,3}\[[^]]+\]:", line)
    ]
    assert not left_out


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_example_of_deployment_starts_the_server_again() -> None:
    """The server has no supervisor of its own: each that runs it must restart it, and leave it time to load."""
    page = DOCS / "how-to" / "deploy.md"
    blocks = {each.kind: each.text for each in code(page)}
    assert re.search(r"docker run (?:.|\n)*? --restart always ", blocks["sh"])
    pod = yaml.safe_load(blocks["yaml"])
    startup = pod["containers"][0]["startupProbe"]
    assert pod["restartPolicy"] == "Always" and pod["containers"][0]["livenessProbe"]["httpGet"]["path"] == "/health"
    assert startup["httpGet"]["path"] == "/ready" and startup["periodSeconds"] * startup["failureThreshold"] >= 300
    lines = blocks["ini"].splitlines()
    assert {"Restart=always", "StartLimitIntervalSec=0", "ExecReload=/bin/kill -HUP $MAINPID"} <= {*lines}
    image = (ROOT / "Dockerfile").read_text("utf-8")
    assert 'ENTRYPOINT ["fly", "serve"' in image and "/health" in image  # the first process: its end ends the container
