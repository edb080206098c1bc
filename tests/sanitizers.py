"""The library under sanitizers: ``make sanitize``, or ``python -m tests.sanitizers``.

It is built once more for each sanitizer, with the planted faults of ``tests/faults.cpp``, and loaded into an ordinary
Python whose first library is the sanitizer's runtime (``environment``). Each sanitizer first has to find the faults
that are planted for it, or nothing else would count. Then the tests of compiled code run on that library: those of
memory and of undefined behaviour with a tenth of their examples, and ``tests/test_any_load.py`` on every kernel set;
the thread sanitizer ``tests/test_threads.py``. The first report ends the process that it is about.

In each of these libraries ``tests/tiles.h`` emulates tiles, so the kernels ``amx`` run on any processor that runs
``avx512bf16``. A library without a sanitizer, ``"tiles"``, is built for ``tests/test_tiles.py``.

Python and torch are not instrumented: their own memory and threads are not looked at. ``OPTIONS`` says why
each option of a runtime is there. There is no list of reports to be ignored.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["BUILT", "OPTIONS", "build", "environment"]

ROOT = Path(__file__).parent.parent
BUILT = ROOT / "build" / "sanitizers"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = {
    # the first report ends the process, also one of undefined behaviour
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
    "tiles": [],
}
# The last of each: what torch throws must be known to the first.
RUNTIMES = {"address": ["libasan", "libubsan", "libstdc++"], "thread": ["libtsan", "libstdc++"], "tiles": []}
# Emulated tiles would be far slower with the other flags.
EMULATED = ["-DFLY_EMULATED_TILES", f"-I{ROOT / 'tests'}", "-O3"]
OPTIONS = {
    "ASAN_OPTIONS": {
        "detect_leaks": 0,  # Python frees little of what it holds at its end, and torch nothing
        "detect_stack_use_after_return": 0,  # GCC before 14 aligns such stacks too little for vectors of AVX-512
    },
    "UBSAN_OPTIONS": {"print_stacktrace": 1},
    "TSAN_OPTIONS": {
        # what Python and torch write through functions of the C library is not looked at, as what orders it (their
        # atomics) is not seen; their locks still count as order
        "ignore_noninstrumented_modules": 1,
        "halt_on_error": 1,
    },
}
TESTS = {
    "address": ["test_sanitizers", "test_any_load", "test_kernels", "test_kernel_drafts", "test_kernel_choice"]
    + [
        "test_decide",
        "test_rounds",
        "test_spans",
        "test_blocks",
        "test_trimmed",
        "test_sketch",
        "test_tiles",
        "test_eagle",
        "test_block_kernels",
        "test_neighbours",
    ],
    "thread": ["test_sanitizers", "test_threads"],
}
NOT_HERE = (
    "test_a_process_holds_weights_cache_and_workspace_and_little_else"  # counts memory, of which a runtime takes some
)


def runtimes(kind: str) -> list[str]:
    """The paths of the libraries that have to be loaded first. Raises ``SystemExit`` where one is missing."""
    found = []
    for name in RUNTIMES[kind]:
        said = subprocess.run([COMPILER, f"-print-file-name={name}.so"], capture_output=True, text=True, check=True)
        path = Path(said.stdout.strip())
        if not path.is_absolute() or not path.exists():
            raise SystemExit(f"{COMPILER} has no {name}.so: install its sanitizers' runtimes (in Debian libgcc-N-dev)")
        found.append(str(path.resolve()))
    return found


def build(kind: str) -> Path:
    """The library under a sanitizer, built if any source is newer."""
    runtimes(kind)
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="sources")
    sources = {ROOT / source: flags for source, flags in setup["SOURCES"].items()}
    sources[ROOT / "tests" / "faults.cpp"] = [f"-I{ROOT / setup['SRC']}"]
    sources[ROOT / setup["SRC"] / "amx.cpp"] = EMULATED
    library = BUILT / kind / "library.so"
    read = [*sources, *(ROOT / header for header in setup["HEADERS"]), ROOT / "tests" / "tiles.h"]
    read += [ROOT / "setup.py", Path(__file__)]
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:  # test processes side by side build it once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() or library.stat().st_mtime <= max(path.stat().st_mtime for path in read):
            _compile(kind, setup, sources, library)
    return library


def _compile(kind: str, setup: dict[str, Any], sources: dict[Path, list[str]], library: Path) -> None:
    flags = [flag for flag in setup["FLAGS"] if flag not in ("-O3", "-g0")]
    flags += ["-O1", "-g1", "-fno-omit-frame-pointer", *FLAGS[kind]]

    def compiled(source: Path) -> str:
        target = str(library.with_name(f"{source.stem}.o"))
        subprocess.run([COMPILER, *flags, *sources[source], "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the longest first
        objects = list(pool.map(compiled, sorted(sources, key=lambda source: -len(sources[source]))))
    subprocess.run([COMPILER, "-shared", *FLAGS[kind], *objects, "-o", str(library), "-pthread"], check=True)


def environment(kind: str) -> dict[str, str]:
    """The variables of a process that loads the library under a sanitizer (tests/conftest.py)."""
    options = {name: ":".join(f"{key}={value}" for key, value in each.items()) for name, each in OPTIONS.items()}
    own = {"FLY_SANITIZER": kind, "LD_PRELOAD": " ".join(runtimes(kind)), "PYTHONMALLOC": "malloc"}
    return {**os.environ, **options, **own, "OMP_NUM_THREADS": "1"}


def main() -> None:
    failed = []
    for kind, names in TESTS.items():
        start = time.monotonic()
        print(f"{kind} sanitizer: {build(kind).relative_to(ROOT)} ({time.monotonic() - start:.0f} s)", flush=True)
        # pytest's own handler of faults would take the place of the sanitizer's
        # some tests take minutes: a process that is done takes over what another has not begun
        command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-p", "no:faulthandler"]
        command += ["-k", f"not {NOT_HERE}"]
        command += [f"tests/{name}.py" for name in names]
        if subprocess.run(command, cwd=ROOT, env=environment(kind)).returncode:
            failed.append(kind)
        print(f"{kind} sanitizer: {time.monotonic() - start:.0f} s in all", flush=True)
    raise SystemExit(f"failed under the sanitizer of: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
