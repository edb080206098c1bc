"""Settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

from fly.backends.cpu import library

if TYPE_CHECKING:
    from tests.pool import Pool

# Forwards of tiny models take milliseconds, but their time is no property: no deadline anywhere.
_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("local", deadline=None, max_examples=60, suppress_health_check=_QUIET)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.register_profile("quick", parent=settings.get_profile("local"), max_examples=20)
settings.load_profile("ci" if os.environ.get("CI", "").lower() in ("1", "true") else "local")

# ``make check`` leaves these files out: each takes over ten seconds, together four fifths of the whole suite's time.
SLOW = {
    f"test_{name}.py"
    for name in (
        "any_load", "audit", "check_draft", "cli", "compiled", "conformance", "cuda", "cuda_heads", "cuda_plain",
        "deterministic", "docs", "eagle", "engine", "eval", "exits", "kernel_choice", "kernel_drafts", "kernels",
        "loading", "nan", "parallel", "project", "ranks", "replay", "rounds", "serve", "serve_attacks", "serve_load",
        "serve_ranks", "spans", "tasks", "translate", "vocabulary",
    )
}  # fmt: skip

# Of ``make sanitize``: compiled code is that of the build under a sanitizer, which takes many times as long.
SANITIZER = os.environ.get("FLY_SANITIZER", "")
if SANITIZER:
    from tests.sanitizers import BUILT

    library._file = lambda: BUILT / SANITIZER / "library.so"

# Tiny tensors: a second thread only waits for the first. Two test processes run side by side instead.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where a CUDA device is; files that are not slow are marked ``quick``; under a sanitizer
    there are fewer examples."""
    for item in items:
        if item.path.name not in SLOW:
            item.add_marker("quick")
    for test in {getattr(item, "obj", None) for item in items} if SANITIZER else ():
        if (own := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
            test._hypothesis_internal_use_settings = settings(own, max_examples=own.max_examples // 10 + 1)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes that run what tests of several ranks give them."""
    from tests.pool import Pool

    made = Pool()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """No test depends on what ran before it."""
    torch.manual_seed(0)
