"""Compiled code under any load: requests of all kinds join, leave, fork and are rolled back, one to hundreds at once,
by every draft on every kernel set, while pages run out.

What is asserted is little: texts of temperature 0 are those of the target alone, and nothing stays held. The point is
that nothing else happens meanwhile, which a sanitizer sees (``make sanitize``); without one, examples are few.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from fly import LLM, SamplingParams
from fly.backends.cpu import available, why_not
from fly.runner.request import Row
from fly.types import Guarantee
from tests.conftest import SANITIZER

VARIANTS = [name for name in available() if name != "torch"]
KERNELS = [*VARIANTS, *(f"{name}-{narrow}" for narrow in ("w8a8", "w4a8", "w4") for name in VARIANTS)]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")

# A bare name drafts as well as it can: with prompt lookup below it, and stopping by itself.
DRAFTS = [
    "none", "ngram", "suffix", "fly-tiny", "model(fly-tiny)", "ngram+fly-tiny", "ngram+fly-tiny+fly-tiny",
    "tree(fly-tiny, nodes=9, depth=4, width=3)", "suffix+fly-tiny", "adaptive(fly-tiny)",
    "adaptive(tree(fly-tiny, nodes=6, depth=3, width=2))", "choose(small=fly-tiny, copy=ngram)",
    "eagle3(fly-eagle3)", "eagle3(fly-eagle3, nodes=12, depth=4, width=3)",
]  # fmt: skip
RULES = [
    "exact", "exact", "block", "lossy(lenience=3)", "fly(theta=0.2, window=2, hold=2)",
    "exact | entropy(0.4) & ~control",
]  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"regex": "[0-9]{1,3}( [0-9]{1,3}){0,4}"}, {"json_object": True}, {"grammar": 'start: "4 9" | "7"'},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]  # fmt: skip


def target_of(draft: str) -> str:
    return "fly-target" if "eagle3" in draft else "fly-draft"


@cache
def loaded(model: str, kernels: str) -> LLM:
    """The model alone, decoding token by token. (``w4`` is for drafts.)"""
    return LLM(model, None, kernels=f"{kernels}a8" if kernels.endswith("w4") else kernels, cache=2048)


@st.composite
def some_params(draw: st.DrawFn) -> SamplingParams:
    chosen: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0, 0, 0.7, 1.0, 1.5])),
        "max_tokens": draw(st.integers(1, 20)),
        "seed": draw(st.integers(0, 2**62)),
        "n": draw(st.sampled_from([1, 1, 1, 2, 5, 32])),
        "ignore_eos": draw(st.booleans()),
    }
    for name, values in {
        "top_k": [1, 5, 2000],
        "top_p": [0.5, 0.9],
        "min_p": [0.1],
        "presence_penalty": [0.5],
        "frequency_penalty": [-0.5],
        "repetition_penalty": [1.2],
        "logit_bias": [{5: 3.0, 1000: -100.0}],
        "bad_words_ids": [((7,), (8, 9))],
        "stop_token_ids": [(11, 12, 13)],
        "stop": [("5",)],
        "structured": FORMS,
        "logprobs": [0, 2],
        "prompt_logprobs": [1],
        "explain": [True],
    }.items():
        if draw(st.integers(0, 11)) == 0:
            chosen[name] = draw(st.sampled_from(values))
    return SamplingParams(**chosen)


class Load(RuleBasedStateMachine):
    """A scheduler whose steps are taken here, one by one, with requests that come and go between two of them."""

    draft: str
    kernels: list[str]
    crowd: bool  # whether hundreds come at once, else one or some

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.kernel = data.draw(st.sampled_from(self.kernels))
        self.llm = LLM(
            loaded(target_of(self.draft), self.kernel),
            self.draft,
            kernels=self.kernel,
            cache=data.draw(st.sampled_from([1 << 16, 4096] if self.crowd else [192, 1024])),
            block_size=data.draw(st.sampled_from([1, 4, 7])),
            step_tokens=data.draw(st.sampled_from([64, 2048])),
            prefix_reuse=data.draw(st.booleans()),
        )
        self.llm.engine.stretch = data.draw(st.sampled_from([0, 1e-9, 0.01, 0.01]))
        self.rows: list[Row] = []
        # some that stay for a while
        size, k = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([9, 4]))
        for temperature in [0, *data.draw(st.sampled_from([[1.0], []]))]:
            params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, seed=size, n=2)
            self.join(size, data.draw(st.integers(5, 20)), params, "exact", k, size)
        self.step(2)

    @rule(
        size=st.integers(0, 2),
        length=st.integers(1, 40),
        params=some_params(),
        policy=st.sampled_from(RULES),
        k=st.sampled_from([9, 4, 1, 0]),
        seed=st.integers(0, 99),
    )
    def join(self, size: int, length: int, params: SamplingParams, policy: str, k: int, seed: int) -> None:
        """Requests of one kind: every other has the same prompt."""
        same = [(seed * 7 + 13 * at) % 1000 + 20 for at in range(length)]
        most = 60 if target_of(self.draft) == "fly-target" else 256  # rows: the larger model takes its time
        count = ([most // 2, most, most // 4] if self.crowd else [1, 2, 5])[size]
        count = max(1, min(count, most - len(self.rows)) // params.n)
        prompts = [[20 + number, *same[1:]] if number % 2 else same for number in range(count)]
        try:
            made = self.llm.requests(prompts, params, policy, k)
        except ValueError as error:
            assert "do not fit the KV cache" in str(error)
            return
        for request in made:
            self.llm.scheduler.add(request.row)
        self.rows += [request.row for request in made]

    @precondition(lambda self: self.rows)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.llm.scheduler.step()
        for row in [row for row in self.rows if row.finish_reason]:
            self.rows.remove(row)
            self.check(row)

    @precondition(lambda self: self.rows)
    @rule(every=st.integers(1, 3), first=st.integers(0, 2))
    def leave(self, every: int, first: int) -> None:
        for row in self.rows[first::every]:
            self.llm.scheduler.cancel(row)
        self.rows = [row for row in self.rows if not row.finish_reason]

    def check(self, row: Row) -> None:
        assert row.error is None
        said = row.tokens[row.prompt_length :]
        assert all(0 <= token < 1024 for token in said) and len(said) <= row.params.max_tokens
        if row.greedy and row.policy.guarantee is Guarantee.LOSSLESS and not row.params.structured and self.checks:
            self.checks -= 1
            params = row.params.model_copy(update={"n": 1, "logprobs": None, "prompt_logprobs": None})
            alone = loaded(target_of(self.draft), self.kernel)
            assert said == alone.generate([row.tokens[: row.prompt_length]], params)[0].token_ids

    checks = 3  # texts of an example that are compared, as that takes most of the time

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        for row in self.rows[3:]:
            self.llm.scheduler.cancel(row)
        while self.llm.scheduler:
            self.llm.scheduler.step()
        assert all(each.num_free == each.num_blocks for each in self.llm.scheduler.allocators)


# Under a sanitizer each draft on three kernel sets, so that all of them come up; else on any.
CASES = [
    (draft, kernels) for at, draft in enumerate(DRAFTS)
    for kernels in ({KERNELS[(at + step) % len(KERNELS)]: 0 for step in (0, 3, 7)} if SANITIZER else ["any"])
]  # fmt: skip


@pytest.mark.parametrize(("draft", "kernels"), CASES if VARIANTS else [])
def test_requests_come_and_go(draft: str, kernels: str) -> None:
    # Without a sanitizer every other draft meets hundreds at once, and the others one or some.
    for crowd in (False, True) if SANITIZER else (DRAFTS.index(draft) % 2 == 1,):
        own = {"draft": draft, "kernels": KERNELS if kernels == "any" else [kernels], "crowd": crowd}
        run_state_machine_as_test(
            type("Load", (Load,), own), settings=settings(max_examples=3 if SANITIZER else 2, stateful_step_count=10)
        )
