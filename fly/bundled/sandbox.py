"""Run small untrusted Python programs on test expressions in a restricted process.

A program is refused unless its syntax tree holds only allowed node types, names and methods.  What passes
is run by a separate interpreter (isolated, without site packages) with an empty environment, an empty
temporary working directory, few builtins and hard limits on CPU time, memory, file size, open files and
processes.  This file is also what that process runs, so it imports nothing of the package.
"""

from __future__ import annotations

import ast
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Result", "run_many", "run_python"]

_MEMORY_BYTES = 512 * 1024 * 1024
_MAX_CODE_CHARS = 100_000
_STARTUP_S = 10.0  # allowance for starting the interpreter on a busy machine

_BUILTINS = (
    "abs", "all", "any", "bool", "chr", "dict", "divmod", "enumerate", "filter", "float", "frozenset", "int",
    "isinstance", "iter", "len", "list", "map", "max", "min", "next", "ord", "pow", "range", "repr",
    "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip",
    "ArithmeticError", "Exception", "IndexError", "KeyError", "TypeError", "ValueError", "ZeroDivisionError",
)  # fmt: skip

# str.format reads attributes named in its format string, which the syntax tree does not show.
_METHODS = frozenset(
    name
    for kind in (str, list, tuple, dict, set, frozenset, int, float)
    for name in dir(kind)
    if not name.startswith("_") and name not in ("format", "format_map")
)

# No imports, classes, try (could swallow the limits' exceptions), with, async, global, delete or decorators.
_NODES = (
    ast.Module, ast.Expression, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign,
    ast.AnnAssign, ast.For, ast.While, ast.If, ast.Break, ast.Continue, ast.Pass, ast.Expr, ast.Assert, ast.Raise,
    ast.BoolOp, ast.NamedExpr, ast.BinOp, ast.UnaryOp, ast.Lambda, ast.IfExp, ast.Dict, ast.Set, ast.List,
    ast.Tuple, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension, ast.Compare,
    ast.Call, ast.keyword, ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.Attribute, ast.Subscript,
    ast.Starred, ast.Name, ast.Slice, ast.Yield, ast.YieldFrom,
    ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Whether all tests held, and if not, why."""

    ok: bool
    reason: str = ""


def run_python(code: str, tests: Sequence[str], timeout_s: float = 5.0) -> Result:
    """Run ``code``, then evaluate each expression of ``tests``; never raises on bad code."""
    return run_many([(code, tests)], timeout_s)[0]


def run_many(jobs: Sequence[tuple[str, Sequence[str]]], timeout_s: float = 5.0) -> list[Result]:
    """Check several (code, tests) pairs with one process; ``timeout_s`` holds for each pair.

    A pair that times out or takes the process down fails, and a new process goes on after it.
    """
    results: list[Result] = []
    while len(results) < len(jobs):
        results.extend(_run_batch(jobs[len(results) :], timeout_s))
    return results


def _run_batch(jobs: Sequence[tuple[str, Sequence[str]]], timeout_s: float) -> list[Result]:
    """Results of the leading jobs, at least one: all, or up to and with the first that broke the process."""
    results: list[Result] = []
    cpu_s = int(timeout_s * len(jobs) + _STARTUP_S) + 1
    payload = "".join(json.dumps([code, list(tests)]) + "\n" for code, tests in jobs).encode()
    with tempfile.TemporaryDirectory(prefix="fly-sandbox-") as folder, tempfile.TemporaryFile() as source:
        source.write(payload)
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(cpu_s)],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd=folder,
            start_new_session=True,
        )
        try:
            lines = _Lines(process)
            if lines.read(_STARTUP_S) is None:  # the process says "ready" once its limits are set
                return [Result(False, "the sandbox process did not start")] * len(jobs)
            for _ in jobs:
                line = lines.read(timeout_s)
                if line is None:
                    timed_out = process.poll() is None and not lines.ended
                    results.append(Result(False, "timed out" if timed_out else "the process died"))
                    break
                ok, reason = json.loads(line)
                results.append(Result(ok, reason))
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return results


class _Lines:
    """Lines from a process's standard output, each awaited with a time limit."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._fd = process.stdout.fileno()
        self._buffer = b""
        self.ended = False

    def read(self, timeout_s: float) -> bytes | None:
        """The next line, or None if the output ended or the time is over."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self._fd, 65536)
            if not chunk:
                self.ended = True
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line


def _refusal(tree: ast.AST) -> str:
    """Why the syntax tree is not allowed, or an empty string."""
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            return f"{type(node).__name__} is not allowed"
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return "decorators are not allowed"
        if isinstance(node, ast.Attribute) and (node.attr not in _METHODS or not isinstance(node.ctx, ast.Load)):
            return f"attribute {node.attr} is not allowed"
        named = getattr(node, "id", None) or getattr(node, "name", None) or getattr(node, "arg", None)
        if isinstance(named, str) and named.startswith("__"):
            return f"name {named} is not allowed"
    return ""


def _run_job(code: str, tests: list[str]) -> tuple[bool, str]:
    import builtins

    try:
        if len(code) > _MAX_CODE_CHARS:
            return False, "the program is too long"
        tree = ast.parse(code)
        refusal = _refusal(tree)
        if refusal:
            return False, refusal
        scope: dict[str, object] = {name: getattr(builtins, name) for name in _BUILTINS}
        scope["print"] = lambda *args, **kwargs: None
        space: dict[str, object] = {"__builtins__": scope, "__name__": "program"}
        exec(compile(tree, "program", "exec"), space)
        for test in tests:
            expression = ast.parse(test, mode="eval")
            refusal = _refusal(expression)
            if refusal:
                return False, f"test: {refusal}"
            if eval(compile(expression, "test", "eval"), space) is not True:
                return False, f"failed: {test}"
    except BaseException as error:  # whatever the program does must not stop the jobs after it
        return False, f"{type(error).__name__}: {error}"[:300]
    return True, ""


def _serve(cpu_s: int) -> None:
    import resource

    jobs = [json.loads(line) for line in sys.stdin]
    # The three standard streams are open already; with this limit no further file can be.
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    print("ready", flush=True)
    for code, tests in jobs:
        print(json.dumps(_run_job(code, tests)), flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
