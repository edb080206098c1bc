"""The script of the sandbox's process: it reads jobs from standard input, and runs each in a process without rights.

``fly.extras.eval.sandbox`` starts this file in a bare interpreter, so it imports nothing from the package. A job names
its language:

- ``small`` is a subset of Python without imports, files or attributes. The syntax tree is checked, so such a program
  is harmless on any machine.
- ``python`` is all of Python. It runs only if the Linux kernel can first remove the process's rights. Landlock lets the
  process read Python's own files and write in the scratch folder; it forbids all other files, and TCP. A seccomp filter
  forbids sockets, new processes and programs, signals to other processes, and changes to the system. Neither needs
  privileges. Before the first such job, an isolated process tries some forbidden actions. If one succeeds, the job is
  refused.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
import time
import types
from collections.abc import Callable

_MAX_CODE_CHARS = 1_000_000
_MEGABYTE = 1 << 20
_MOST_WRITTEN = 64 * _MEGABYTE  # the limit for all files together; a single file may have 16

# --- the small language ----------------------------------------------------------------------------------

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


def refusal(tree: ast.AST) -> str:
    """Return the reason why the syntax tree is not in the small language; empty if it is."""
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            return f"{type(node).__name__} is not allowed"
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return "decorators are not allowed"
        if isinstance(node, ast.Attribute) and (node.attr not in _METHODS or not isinstance(node.ctx, ast.Load)):
            return f"attribute {node.attr} is not allowed"
        identifier = getattr(node, "id", None) or getattr(node, "name", None) or getattr(node, "arg", None)
        if isinstance(identifier, str) and identifier.startswith("__"):
            return f"name {identifier} is not allowed"
    return ""


def run_job(code: str, tests: list[str], language: str) -> tuple[bool, str]:
    """Run a program, then evaluate the expressions ``tests``, which must be True. Returns whether all of this went
    well, and if not, why."""
    import builtins

    small = language == "small"
    try:
        if len(code) > _MAX_CODE_CHARS:
            return False, "the program is too long"
        tree = ast.parse(code)
        if small and (refused := refusal(tree)):
            return False, refused
        program = types.ModuleType("program")
        space = program.__dict__
        if small:
            space["__builtins__"] = {
                **{name: getattr(builtins, name) for name in _BUILTINS},
                "print": lambda *args, **kwargs: None,
            }
        else:
            sys.modules["program"] = program  # dataclasses and pickle look for it here
        exec(compile(tree, "program", "exec"), space)
        for test in tests:
            expression = ast.parse(test, mode="eval")
            if small and (refused := refusal(expression)):
                return False, f"test: {refused}"
            if eval(compile(expression, "test", "eval"), space) is not True:
                return False, f"failed: {test}"[:300]
    except BaseException as error:  # the caller expects an answer, whatever the program does
        return False, f"{type(error).__name__}: {error}"[:300]
    return True, ""


# --- what the kernel forbids -----------------------------------------------------------------------------

# The numbers of the forbidden system calls on each machine: sockets, new programs and processes, other processes'
# memory, signals, mounts, modules, keys, clocks, shared memory, io_uring, bpf, priorities, identities, and owners,
# modes and times of files (which Landlock does not cover). Calls newer than _NEWEST fail as if they did not exist.
_NEWEST = 462
_FORBIDDEN = {
    "x86_64": (
        29, 30, 31, 41, 57, 58, 59, 64, 65, 66, 68, 69, 70, 71, 90, 91, 92, 93, 94, 101, 103, 105, 106, 113, 114, 116,
        117, 119, 122, 123, 126, 129, 132, 133, 134, 135, 141, 142, 144, 153, 154, 155, 159, 160, 161, 163, 164, 165,
        166, 167, 168, 169, 170, 171, 172, 173, 175, 176, 179, 188, 189, 190, 197, 198, 199, 200, 203, 212, 220, 227,
        235, 237, 238, 240, 241, 246, 248, 249, 250, 251, 256, 259, 260, 261, 268, 272, 279, 280, 297, 298, 300, 303,
        304, 305, 308, 310, 311, 312, 313, 314, 319, 320, 321, 322, 323, 424, 425, 426, 427, 428, 429, 430, 431, 432,
        433, 434, 438, 440, 442, 443, 447, 448, 452,
    ),
    "aarch64": (
        5, 6, 7, 14, 15, 16, 18, 30, 33, 39, 40, 41, 51, 52, 53, 54, 55, 58, 60, 88, 89, 91, 92, 97, 104, 105, 106,
        112, 116, 117, 118, 119, 122, 130, 138, 140, 142, 143, 144, 145, 146, 147, 149, 151, 152, 159, 161, 162, 164,
        170, 171, 180, 181, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196, 198, 217, 218, 219, 221, 224, 225,
        235, 237, 238, 239, 240, 241, 262, 264, 265, 266, 268, 270, 271, 272, 273, 274, 279, 280, 281, 282, 294, 424,
        425, 426, 427, 428, 429, 430, 431, 432, 433, 434, 438, 440, 442, 443, 447, 448, 452,
    ),
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE, _PRLIMIT, _KILL, _TGKILL = {"x86_64": (56, 302, 62, 234), "aarch64": (220, 261, 129, 131)}.get(
    platform.machine(), (0, 0, 0, 0)
)
_CLONE3 = 435
_CLONE_THREAD = 0x00010000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every machine
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute (needed to map a library), read a file, list a folder
_OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}  # by version; newer versions below
_DEVICE_CONTROL = 1 << 15


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def why_not() -> str:
    """Return the reason why programs in full Python cannot run here; empty if they can."""
    if sys.platform != "linux":
        return f"programs are isolated by the Linux kernel, and this is {platform.system()}"
    if platform.machine() not in _FORBIDDEN:
        return f"the filter of system calls is written for {' and '.join(_FORBIDDEN)}, not for {platform.machine()}"
    if _landlock_version() < 1:
        return "this kernel has no Landlock (Linux 5.13 and later have it, where it is enabled)"
    return ""


def _landlock_version() -> int:
    return int(_syscall(_LANDLOCK_CREATE, None, 0, 1))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(*arguments: object) -> int:
    libc = _libc()
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _python_paths() -> list[str]:
    """Return the paths from which Python and its libraries are read."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)}
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    files = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
    return sorted(path for path in {*paths, *system, *files} if os.path.exists(path))


def _landlock(scratch: str) -> None:
    """Restrict this process: it can only read what Python needs and write in ``scratch``, without TCP connections."""
    version = _landlock_version()
    rights = _RIGHTS.get(version, _RIGHTS[4] | _DEVICE_CONTROL)
    handled = [rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0]  # files; TCP; abstract sockets and signals
    handled = handled[: 1 if version < 4 else 2 if version < 6 else 3]
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    ruleset = _checked("Landlock", _syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0))
    allowed = [(path, _READ | (2 if path == "/dev/null" else 0)) for path in _python_paths()] + [(scratch, rights)]
    for path, access in allowed:
        if not os.path.isdir(path):
            access &= _OF_FILES
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", access & rights, descriptor)
        _checked(f"Landlock, {path}", _syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(descriptor)
    _checked("no_new_privs", _libc().prctl(38, 1, 0, 0, 0))
    _checked("Landlock", _syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _seccomp() -> None:
    """Make all forbidden system calls of this process fail with EPERM from now on."""
    load, equal, at_least, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF: ld abs, jeq, jge, jset, ret
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x00050000
    forbidden, missing = fail | 1, fail | 38  # EPERM, ENOSYS
    machine, process = platform.machine(), os.getpid()
    argument = [16 + 8 * n for n in range(6)]  # the offset of the low half of each argument
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, _AUDIT_ARCH[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 0, 1, _NEWEST + 1),
        (give, 0, 0, missing),
        (equal, 0, 1, _CLONE3),  # a filter cannot see clone3's flags; without clone3, libraries use clone
        (give, 0, 0, missing),
    ]
    for number in _FORBIDDEN[machine]:
        steps += [(equal, 0, 1, number), (give, 0, 0, forbidden)]
    # clone may start threads, but no processes.
    clone = [(load, 0, 0, argument[0]), (bits, 1, 0, _CLONE_THREAD), (give, 0, 0, forbidden), (give, 0, 0, allow)]
    steps += [(equal, 0, len(clone), _CLONE), *clone]
    # The process may read its limits, but not set them.
    limit_steps = [
        *((load, 0, 0, argument[2]), (equal, 1, 0, 0), (give, 0, 0, forbidden)),
        *((load, 0, 0, argument[2] + 4), (equal, 1, 0, 0), (give, 0, 0, forbidden)),
        (give, 0, 0, allow),
    ]
    steps += [(equal, 0, len(limit_steps), _PRLIMIT), *limit_steps]
    # The process may send signals to itself, since abort() does.
    for number in (_KILL, _TGKILL):
        signals = [(load, 0, 0, argument[0]), (equal, 1, 0, process), (give, 0, 0, forbidden), (give, 0, 0, allow)]
        steps += [(equal, 0, len(signals), number), *signals]
    steps.append((give, 0, 0, allow))
    table = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), table)
    _checked("no_new_privs", _libc().prctl(38, 1, 0, 0, 0))
    _checked("seccomp", _libc().prctl(22, 2, ctypes.byref(program), 0, 0))


def isolate(scratch: str, language: str, cpu_s: int, memory: int) -> None:
    """Give up the rights that a job must not have. For the small language, resource limits are enough."""
    small = language == "small"
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0 if small else 16 * _MEGABYTE,
        resource.RLIMIT_NOFILE: 4 if small else 64,  # the standard streams and the pipe for the answer are already open
        resource.RLIMIT_CORE: 0,
    }
    if not small:
        _landlock(scratch)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if small:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if not small:
        _seccomp()


def _escapes() -> list[str]:
    """Return the names of the forbidden actions that succeed in this process."""

    def listed() -> object:
        return os.listdir("/")

    def read() -> object:
        return open("/etc/passwd", encoding="utf-8").read()

    def wrote() -> object:
        return os.open("/tmp/fly-sandbox-escape", os.O_CREAT | os.O_WRONLY)

    def connected() -> object:
        return socket.socket()

    def forked() -> object:
        if not (child := os.fork()):
            os._exit(0)
        return os.waitpid(child, 0)

    def raised() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def signalled() -> None:
        os.kill(os.getppid(), 0)

    attempts: list[Callable[[], object]] = [listed, read, wrote, connected, forked, raised, signalled]
    escaped = []
    for attempt in attempts:
        try:
            attempt()
        except (OSError, ValueError):
            continue
        escaped.append(attempt.__name__)
    return escaped


# --- the process -----------------------------------------------------------------------------------------


def _written(folder: str) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


_Result = tuple[bool | None, str]  # whether the job succeeded (None: it was refused), and if not, why


def _in_a_child(act: Callable[[], _Result], scratch: str, language: str, timeout_s: float, memory: int) -> _Result:
    """Run ``act()`` in a new process, which isolates itself first. Returns its result, or that the process took too
    long, wrote too much or died."""
    answer, out = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            os.chdir(scratch)
            os.environ.update(HOME=scratch, TMPDIR=scratch, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            os.dup2(out, 3)
            os.closerange(4, 64)
            try:
                isolate(scratch, language, int(timeout_s) + 2, memory)
            except (OSError, ValueError) as error:
                result: _Result = None, f"a process cannot be isolated: {error}"
            else:
                result = act()
            os.write(3, json.dumps(result).encode()[:4000])
            code = 0
        finally:
            os._exit(code)
    os.close(out)
    try:
        deadline = time.monotonic() + timeout_s
        while not select.select([answer], [], [], min(0.1, max(0.0, deadline - time.monotonic())))[0]:
            if time.monotonic() >= deadline:
                return False, "timed out"
            if _written(scratch) > _MOST_WRITTEN:
                return False, "wrote too much"
        line = os.read(answer, 4096)
        if not line:
            return False, "the process died"
        ok, reason = json.loads(line)
        return ok, reason
    finally:
        os.close(answer)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _probe() -> tuple[bool, str]:
    escapes = _escapes()
    return not escapes, f"an isolated process could still do what it must not: {escapes}" if escapes else ""


def serve() -> None:
    """Read jobs, each one line of JSON, and answer them until there are no more."""
    sys.dont_write_bytecode = True
    import collections, heapq, itertools, math, random, re, string, typing  # noqa: E401, F401, I001

    refused: str | None = None  # why full Python is refused; None before the first such job
    print("ready", flush=True)
    for line in sys.stdin:
        code, tests, language, timeout_s, memory = json.loads(line)
        scratch = tempfile.mkdtemp(prefix="fly-sandbox-")
        try:
            if language != "small" and refused is None:
                refused = why_not()
                if not refused:
                    _, refused = _in_a_child(_probe, scratch, language, 10.0, memory)
            if language != "small" and refused:
                result: _Result = (None, refused)
            else:
                job = functools.partial(run_job, code, tests, language)
                result = _in_a_child(job, scratch, language, timeout_s, memory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    serve()
