"""Each sanitizer finds what is planted for it (``tests/faults.cpp``), and a wrong layout of an arena is an error.
Run by ``make sanitize``, on the library that its other tests run on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import SANITIZER
from tests.sanitizers import BUILT, environment

pytestmark = pytest.mark.skipif(not SANITIZER, reason="the library is not under a sanitizer")

FAULTS = {
    "fly_fault_overflow(5)": ("address", "use-after-poison"),  # by one value, into the gap before the next piece
    "fly_fault_overflow(16)": ("address", "use-after-poison"),
    "fly_fault_handed(ctypes.c_void_p((a := array.array('i', [0] * 5)).buffer_info()[0]), 5)": (
        "address",
        "heap-buffer-overflow",
    ),
    "fly_fault_freed(5)": ("address", "heap-use-after-free"),
    "fly_fault_undefined(5)": ("address", "signed integer overflow"),
    "fly_fault_tile(31)": ("address", "heap-buffer-overflow"),  # one row too many, as emulated tiles read them
    "fly_fault_race(2)": ("thread", "data race"),
}


def call(text: str) -> subprocess.CompletedProcess[str]:
    """What a process does that loads the library and makes this call of it."""
    program = f"import array, ctypes\nprint(ctypes.CDLL({str(BUILT / SANITIZER / 'library.so')!r}).{text})"
    return subprocess.run([sys.executable, "-c", program], env=environment(SANITIZER), capture_output=True, text=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    sanitizer, report = FAULTS[fault]
    ran = call(fault)
    if sanitizer == SANITIZER:
        assert ran.returncode and report in ran.stderr and "fly_fault" in ran.stderr, ran.stderr
    elif SANITIZER == "thread":
        assert "WARNING: ThreadSanitizer" not in ran.stderr


def test_an_arena_that_was_counted_short_is_an_error_and_no_memory() -> None:
    ran = call("fly_fault_layout(100)")
    assert (ran.returncode, ran.stdout.strip()) == (0, "-13"), ran.stderr
