"""Runs every property of the suite on random examples: ``make explore``, or ``python -m tests.explore --rounds 20``.

``make test`` takes the same examples every time, so that it says the same on every machine. Faults that other examples
show are found here. Each round has a seed of its own; a test that fails is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time

# In the lines that pytest's ``-rfE`` prints at the end: the test, up to the reason after it.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


def command(seed: int, *choice: str) -> list[str]:
    """Return the command that runs the properties among ``choice`` (files or tests; none is all) from ``seed``."""
    options = ["--hypothesis-profile", "explore", "--hypothesis-seed", str(seed)]
    return [sys.executable, "-m", "pytest", "-m", "hypothesis", *options, *choice]


def explore(seed: int, processes: str, choice: list[str]) -> tuple[bool, list[str]]:
    """Run one round in ``processes`` processes, and show what pytest prints. Return whether it passed, and the tests
    that failed."""
    run = subprocess.Popen(
        [*command(seed, *choice), "-n", processes, "-rfE", "--color=no"], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return run.wait() == 0, _FAILED.findall("".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1, help="how many seeds to try (default: 1)")
    parser.add_argument("--first", type=int, help="the seed of the first round; the others follow it (default: random)")
    parser.add_argument("--processes", default="auto", help="as pytest's -n (default: one for each core)")
    parser.add_argument("choice", nargs="*", help="files or tests (default: all)")
    asked = parser.parse_args()
    first = random.randrange(10**6) if asked.first is None else asked.first
    repeat: list[str] = []
    for seed in range(first, first + asked.rounds):
        began = time.monotonic()
        print(f"== round {seed - first + 1} of {asked.rounds}, seed {seed}", flush=True)
        passed, tests = explore(seed, asked.processes, asked.choice)
        print(f"== seed {seed}: {'passed' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
        if not passed:
            repeat += [" ".join(command(seed, f"'{test}'")) for test in tests] or [" ".join(command(seed))]
    if repeat:
        print("to repeat what failed:", *repeat, sep="\n  ")
    return 1 if repeat else 0


if __name__ == "__main__":
    sys.exit(main())
