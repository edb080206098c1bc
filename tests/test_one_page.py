"""The engine gives the tokens, and the reasons, of ``examples/one_page.py``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.drafts import SingleDraft
from fly.policies import parse_policy
from tests.toys import random_llama

PATH = Path(__file__).parent.parent / "examples" / "one_page.py"
# Two draws from the same family of weights agree often enough that every rule keeps and rejects tokens.
TARGET = random_llama(seed=3, vocab_size=11, hidden=16, layers=1, scale=0.2)
DRAFT = random_llama(seed=4, vocab_size=11, hidden=16, layers=1, scale=0.2)
RULES = [
    "exact",
    "block",
    "fly(theta=0.9, window=1, hold=0)",
    "exact | entropy(0.9) & after(3) & at_most(2)",
    "exact | margin(2.0)",
    "exact | regret(3.0, 1)",
    "typical",
]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_page", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TARGET, draft=SingleDraft(DRAFT, kernels="torch"), kernels="torch", k=5)


@given(
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=6),
    rule=st.sampled_from(RULES),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 2**31),
    k=st.integers(0, 5),
    most=st.integers(1, 14),
)
def test_the_engine_gives_the_tokens_of_the_page(
    page: ModuleType, llm: LLM, prompt: list[int], rule: str, temperature: float, seed: int, k: int, most: int
) -> None:
    policy = parse_policy(rule)
    expected = [*page.generate(TARGET, DRAFT, policy, prompt, most, k, temperature, seed)]
    params = SamplingParams(temperature=temperature, max_tokens=most, seed=seed, ignore_eos=True)
    [out] = llm.generate([prompt], params, policy=policy, k=k)
    assert [(token.id, token.why) for token in out.provenance] == expected


def test_the_page_runs_and_is_one_page() -> None:
    assert 60 <= len(PATH.read_text("utf-8").splitlines()) <= 85
    ran = subprocess.run([sys.executable, PATH, "exact"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "match" in ran.stdout
