"""The house: imports run one way, and no room asks a model what it can."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fly
from fly.backends import choice
from fly.drafts.registry import STRATEGIES
from fly.models.opening import FORMATS
from fly.policies.registry import CATALOGUE, GATES, PRESETS, RULES

ROOT = Path(__file__).parent.parent
FILES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "fly").rglob("*.py"))}

# A room imports only itself and rooms that stand before it, annotations included.
ROOMS = [
    "moved", "late", "errors", "expressions", "params", "devices", "ops", "contents", "vocabulary", "types", "policies",
    "cache", "models", "runner", "drafts", "output", "engine", "backends", "config", "parallel", "llm", "testing",
    "serve", "cli", "extras",
]  # fmt: skip
# Programs and bridges beside the core, each with the other extras that it may import.
EXTRAS: dict[str, set[str]] = {
    "eval": set(), "bench": {"eval"}, "train": {"eval"}, "early_exit": {"train"}, "ray": {"eval", "train"},
    "audit": set(), "engines": set(),
}  # fmt: skip
SHARED = {"client", "statistics"}  # modules of ``fly.extras`` that every extra may import
PACKAGE = {"__init__", "__main__"}  # may import any
# These know no backend: what a model can is asked of its executor alone.
BLIND = ROOMS[: ROOMS.index("backends")]


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


KNOWN = {module(each) for each in FILES}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


@cache
def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, wherever in it, or names as a place in a table (``fly.late.Places``)."""
    names = set(re.findall(r"[\"'](fly(?:\.\w+)+):[\w.]*[\"']", FILES[path]))
    for node in ast.walk(ast.parse(FILES[path])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name in KNOWN and name != "fly"}


def test_every_room_has_its_place() -> None:
    assert {room(module(path)) for path in FILES} <= {*ROOMS, *PACKAGE}


def test_the_page_of_the_layout_has_every_room_in_this_order() -> None:
    page = (ROOT / "docs" / "explanation" / "layout.md").read_text(encoding="utf-8")
    table = page.partition("## The rooms")[2].partition("\n## ")[0]
    places = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    assert re.findall(r"`fly/(\w+)(?:\.py|/)`", " ".join(places)) == ROOMS


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_room_imports_only_rooms_before_it(path: Path) -> None:
    own = room(module(path))
    if own in PACKAGE or path.name == "__main__.py":
        return
    later = {name for name in imported(path) if ROOMS.index(room(name)) > ROOMS.index(own)}
    if own == "cli":  # see test_the_core_imports_no_extra
        later = {name for name in later if not extra(name)}
    assert not later


@pytest.mark.parametrize("path", FILES, ids=module)
def test_a_text_file_has_an_encoding_of_its_own(path: Path) -> None:
    """Without one, the locale of the user would choose the encoding. Ruff has a rule for this, but it sees only calls
    on a plain ``Path(...)``."""
    for node in ast.walk(ast.parse(FILES[path])):
        if not isinstance(node, ast.Call):
            continue
        constants = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        binary = any(isinstance(value, str) and re.fullmatch(r"[rwax+]*b[rwax+]*", value) for value in constants)
        opens = isinstance(node.func, ast.Name) and node.func.id == "open" and not binary
        place = {"read_text": 0, "write_text": 1}.get(node.func.attr) if isinstance(node.func, ast.Attribute) else None
        if opens or (place is not None and len(node.args) <= place):
            assert "encoding" in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}"


def test_no_two_modules_import_each_other() -> None:
    """Nor go round in any larger circle; a package's own ``__init__`` aside."""
    needs = {
        module(path): {
            name
            for name in imported(path)
            if not (ROOT / Path(*name.split(".")) / "__init__.py").exists() and name != module(path)
        }
        for path in FILES
    }
    while free := {name for name, others in needs.items() if not others & needs.keys()}:
        for name in free:
            del needs[name]
    assert not needs


def extra(name: str) -> str:
    """The extra that a module belongs to; empty for a module of the core."""
    return name.removeprefix("fly.extras.").split(".")[0] if name.startswith("fly.extras.") else ""


def test_every_extra_says_what_it_is_for() -> None:
    assert {extra(module(path)) for path in FILES} - {""} == EXTRAS.keys() | SHARED
    for name, others in EXTRAS.items():
        page = (ROOT / "fly" / "extras" / name / "README.md").read_text(encoding="utf-8")
        assert len(page.splitlines()) <= 15
        for word in ("## What for", "## How to run", "## What it may import"):
            assert word in page, (name, word)
        for other in others:
            assert f"`fly.extras.{other}`" in page


@pytest.mark.parametrize("path", [path for path in FILES if extra(module(path))], ids=module)
def test_an_extra_imports_only_the_extras_that_the_table_names(path: Path) -> None:
    name = extra(module(path))
    assert {extra(other) for other in imported(path)} - {"", name} <= EXTRAS.get(name, set()) | SHARED


def test_the_core_imports_no_extra() -> None:
    """Except the command, within its functions: a command that is not run imports none of what it needs."""
    for path, text in FILES.items():
        if extra(module(path)):
            continue
        if any(extra(name) for name in imported(path)):
            assert room(module(path)) == "cli", path
            for node in ast.parse(text).body:
                assert not (isinstance(node, (ast.Import, ast.ImportFrom)) and "fly.extras" in ast.unparse(node)), path


def test_an_old_place_names_the_new_one() -> None:
    for name in ("eval", "bench", "train", "ray", "audit", "early_exit"):
        with pytest.raises(ImportError, match=f"fly.extras.{name}"):
            importlib.import_module(f"fly.{name}")
    with pytest.raises(ImportError, match=r"fly\.extras\.eval"):
        importlib.import_module("fly.eval.scorers")
    with pytest.raises(ImportError, match=r"fly\.extras\.engines\.vllm"):
        importlib.import_module("fly.vllm")
    with pytest.raises(AttributeError, match=r"fly\.extras\.audit"):
        fly.audit  # noqa: B018


def test_few_modules_stand_at_the_top() -> None:
    assert len([path for path in FILES if path.parent.name == "fly" and path.stem not in PACKAGE]) <= 12


@pytest.mark.parametrize("name", BLIND)
def test_no_room_above_the_backends_knows_one(name: str) -> None:
    for path, text in FILES.items():
        if room(module(path)) == name and module(path) != "fly.runner.structured":
            assert not any(each.startswith("fly.backends") for each in imported(path)), path
            assert not re.search(r"ctypes|fly_\w+\(|CpuExecutor|TorchExecutor", text), path


@pytest.mark.parametrize(
    "name",
    ["types", "runner.sampling", "runner.executor", "runner.runner", "drafts", "engine.step", "engine.account"],
)
def test_no_module_probes_what_a_model_can_do(name: str) -> None:
    for path, text in FILES.items():
        if f"{module(path)}.".startswith(f"fly.{name}."):
            assert not re.search(r"\bhasattr\(|\bgetattr\((?!self\b)", text), path


# Whose attributes are set from outside: records that are filled as they pass, what a module keeps for itself, and
# objects of libraries. Names are a parameter's annotation, or "self", and attributes of it.
FILLED = {
    "Row", "abc.Sequence[Row]", "self.row", "Job.key", "self._job.loop", "Batch.kv",
    "self._clients", "self._held", "self._round", "self._row", "self.progress",
    "Choice", "self.choices", "type[LLM]", "nn.Embedding", "asyncio.Transport", "self.transport", "logging.LogRecord",
}  # fmt: skip


def changed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The attributes that a function sets of objects that it was given, or that stand in attributes of its own."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    known = {each.arg: ast.unparse(each.annotation) if each.annotation else each.arg for each in arguments}

    def owner(node: ast.expr) -> str | None:
        """Who holds the value, as ``FILLED`` has it; None for a local value."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            return None if (above := owner(node.value)) is None else f"{above}.{node.attr}"
        inner = node.value if isinstance(node, ast.Subscript) else node.func if isinstance(node, ast.Call) else None
        return None if inner is None else owner(inner)

    for node in ast.walk(function):
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple):
                same = isinstance(node.value, ast.Tuple)
                pairs = list(zip(target.elts, node.value.elts if same else [node.value] * len(target.elts)))
            for to, value in pairs:
                if isinstance(to, ast.Name) and isinstance(value, (ast.Attribute, ast.Subscript)):
                    known |= {to.id: alias} if (alias := owner(value)) is not None else {}
                if isinstance(to, ast.Attribute) and (whole := owner(to)) is not None and whole.count("."):
                    yield whole


@pytest.mark.parametrize("name", ["runner", "drafts", "engine", "parallel", "llm", "serve"])
def test_an_object_is_changed_by_its_own_methods(name: str) -> None:
    """It gets what it needs when it is made, or as an argument."""
    for path, text in FILES.items():
        assert room(module(path)) != name or "vars(self).update(" not in text, path
        for node in ast.walk(ast.parse(text)) if room(module(path)) == name else ():
            for attribute in changed(node) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ():
                own = attribute.startswith("self.") and attribute.count(".") == 1
                assert own or any(f"{attribute}.".startswith(f"{each}.") for each in FILLED), (path, attribute)


# Words of code that ask what kind a device is, or that only one kind knows.
_ASKS = re.compile(r"device\)?\.type\b|\.is_(cuda|cpu|mps|xpu)\b|torch\.(cuda|mps|xpu)\b|[!=]= [\"'](cpu|cuda)")
# Beside the backends, the module of devices' kinds; and what asks for a word that another program's user has said.
_MAY_ASK = {
    "fly.devices", "fly.extras.eval.harness", "fly.extras.engines.sglang.requests", "fly.extras.engines.vllm.plugin",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=module)
def test_only_backends_ask_what_kind_a_device_is(path: Path) -> None:
    """Others ask the executor what it can, or ``fly.devices``."""
    name = module(path)
    if room(name) != "backends" and name not in _MAY_ASK:
        assert not _ASKS.findall(FILES[path])


def test_from_the_step_to_a_forward_there_are_two_files() -> None:
    """The engine calls the runner, the runner its executor."""
    engine, runner = (FILES[ROOT / "fly" / name] for name in ("engine/step.py", "runner/runner.py"))
    assert "self.runner.score(" in engine and "self.executor.score(" in runner


LATE = [module(path) for path, text in FILES.items() if "find_late(__name__)" in text]
TABLES = [RULES.ours, PRESETS, CATALOGUE, GATES, STRATEGIES.ours, FORMATS, choice._HEADS]


@pytest.mark.parametrize("name", LATE)
def test_a_package_lists_the_names_that_it_finds_late(name: str) -> None:
    """That each is where the package says, mypy checks: they are imports to it."""
    package = importlib.import_module(name)
    assert {*package.__all__} <= {*dir(package)}
    getattr(package, package.__all__[0])
    for absent in ("absent", "_absent", "__wrapped__"):
        assert not hasattr(package, absent)


def test_every_place_of_a_table_is_there() -> None:
    for table in TABLES:
        for name, found in table.items():
            assert callable(found), name
    assert all(rule.name == name for name, rule in RULES.ours.items())


# One after another: a line, and modules that are still not imported after it. Few requests choose them, and the kit of
# rules needs no engine.
SPARED = {
    "import fly": "fly.llm fly.types",
    "from fly.testing import check_policy": """
        fly.llm fly.backends.choice fly.engine fly.drafts fly.cache fly.serve fly.parallel fly.models.tokenizer
        fly.runner.executor fly.policies.rules fly.policies.gates fly.policies.loosened""",
    "from fly import LLM": """
        fly.backends.cpu.packed fly.backends.cpu.rounds fly.backends.cuda.executor fly.backends.heads
        fly.backends.trained fly.parallel.ranks fly.parallel.model fly.models.gguf fly.models.eagle
        fly.models.dflash fly.models.chat fly.drafts.model fly.drafts.ngram fly.drafts.adaptive
        fly.drafts.trained fly.drafts.translate fly.policies.rules fly.policies.gates fly.policies.loosened
        fly.runner.structured fly.runner.forms""",
}


def test_what_is_not_chosen_is_not_imported() -> None:
    lines = [f"{line}; print(sorted({{*{names.split()}}} & {{*sys.modules}}))" for line, names in SPARED.items()]
    code = "\n".join(["import sys", *lines])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, env=environment)
    assert run.stdout.split() == ["[]"] * len(SPARED)
    assert {name for names in SPARED.values() for name in names.split()} <= KNOWN  # none has moved
