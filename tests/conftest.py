"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os

# Tiny tensors: a second thread only waits for the first, also in an engine's own thread and in processes of a test. Two
# test processes run side by side instead. OpenMP reads this once, when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from fly.backends.cpu import library

if TYPE_CHECKING:
    from openai import OpenAI

    from fly import LLM
    from tests.pool import Pool
    from tests.serving import Running

# Forwards of tiny models take milliseconds, but their time is no property: no deadline anywhere.
_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
# What ``pytest`` runs: the same examples every time, on every machine, two in five of what a property asks for.
# ``make check`` takes fewer. ``make explore``, where new examples are tried, takes all.
settings.register_profile(
    "fixed", deadline=None, max_examples=10, derandomize=True, print_blob=True, suppress_health_check=_QUIET
)
settings.register_profile("quick", parent=settings.get_profile("fixed"), max_examples=7)
# What ``make explore`` runs: other examples for each seed.
settings.register_profile("explore", parent=settings.get_profile("fixed"), max_examples=60, derandomize=False)
settings.load_profile("fixed")
# Hypothesis also draws the constants of our modules that were imported before an example, and xdist gives each process
# other tests: without this, the examples would depend on both. tests/test_examples.py holds it.
providers._get_local_constants = lambda: providers._local_constants

# ``make check`` leaves these files out: each takes over ten seconds, together four fifths of the whole suite's time.
SLOW = {
    f"test_{name}.py"
    for name in (
        "any_load", "audit", "block", "block_kernels", "check_draft", "cli", "compiled", "conformance", "cuda",
        "cuda_heads", "cuda_plain", "deterministic", "docs", "eagle", "engine", "eval", "exits", "kernel_choice",
        "kernel_drafts", "kernels", "loading", "nan", "parallel", "project", "ranks", "replay", "rounds", "serve",
        "serve_attacks", "serve_load", "serve_ranks", "spans", "tasks", "tiles", "translate", "vocabulary",
    )
}  # fmt: skip

# Of ``make sanitize``: compiled code is that of the build under a sanitizer, which takes many times as long.
SANITIZER = os.environ.get("FLY_SANITIZER", "")
if SANITIZER:
    from tests.sanitizers import BUILT, build

    if SANITIZER == "tiles":  # no sanitizer, but emulated tiles; ``make sanitize`` builds the others
        build(SANITIZER)
    library._file = lambda: BUILT / SANITIZER / "library.so"


def _examples(count: int) -> int:
    """Return how many of the ``count`` examples that a property asks for it gets: all of random ones, else the share of
    them that the profile takes of the 25 of a property that asks for nothing."""
    if SANITIZER:
        return count // 10 + 1
    default = settings.default
    return -(-count * default.max_examples // 25) if default.derandomize else count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where a CUDA device is; files that are not slow are marked ``quick``; of properties that
    ask for many examples, fixed ones are fewer, and under a sanitizer fewer still."""
    for item in items:
        if item.path.name not in SLOW:
            item.add_marker("quick")
    for test in {getattr(item, "obj", None) for item in items}:
        if (own := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
            count = _examples(own.max_examples)
            test._hypothesis_internal_use_settings = settings(own, max_examples=count)
    for machine in {getattr(item, "cls", None) for item in items}:  # a state machine's settings are of its class
        if isinstance(full := getattr(machine, "settings", None), settings):
            machine.settings = settings(full, max_examples=_examples(full.max_examples))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported stays: each full collection of garbage would go over all of it again."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check_draft`` draws fewer drafts, which is enough where it should find nothing."""
    from fly.testing import stage

    monkeypatch.setattr(stage, "SEEDS", 800)


# Fixtures of a server's tests. They import what they need when they run, so that other tests import none of it.


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    """A server of the smallest model, which must have forgotten all requests at the end."""
    from tests.serving import eventually, running

    with running() as server:
        yield server
        assert eventually(lambda: server.all_free and server.service.open == 0 and not server.service.llm.worker.jobs)


@pytest.fixture(scope="module")
def client(here: Running) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The same model, for what the answers should be."""
    from fly import LLM
    from fly.drafts import NGramDraft
    from tests.serving import MODEL

    return LLM(MODEL, draft=NGramDraft(), dtype="float32", k=6)
