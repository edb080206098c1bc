"""What a recording holds of each block: it is what the executor saw, and rules read it like full logits.

Shape legend: B rows, K longest draft, J places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fly import LLM, SamplingParams
from fly.backends.torch import TorchExecutor
from fly.drafts import NGramDraft, SingleDraft
from fly.drafts.ngram import Index, lookup_forwards
from fly.extras.eval import Plan, check_folder, decode_run, recording, remaining, score_run
from fly.extras.eval.known import Known, Unknown
from fly.extras.eval.recording import Outputs, Recorder, Recording
from fly.extras.eval.records import read_records
from fly.extras.eval.replay import Blocks, load_blocks
from fly.ops import argmax, entropy, log_mass, pick, top
from fly.policies import (
    Exact,
    gate_distribution,
)
from fly.runner.executor import Scores
from fly.types import Decision, Draft, Target
from tests.commands import run as command
from tests.commands import words
from tests.test_drafts import make_row
from tests.toys import random_llama, ready

RULES = [
    "exact",
    "fly",
    "fly.paper",
    "fly(theta=0.1, window=2, hold=2)",
    "fly(window=1, hold=1) & after(5) & budget(0.2)",
    "exact | margin(2.3) & window(2)",
    "exact | margin(4) & at_most(3)",
    "exact | margin(6) & nats(5)",
    "exact | mars(0.9) & ~token(digits)",
    "lossy(lenience=4)",
    "typical",
    "topn(n=5, delta=0.7)",
    "bild(r=2)",
    "thresholds(threshold_single=0.3)",
    "fuzzy(divergence=tv, threshold=0.8)",
    "cascade(alpha=0.4)",
    "slack(eps=0.3)",
]


# --- logits of which little is known ----------------------------------------------------------------------


# What people write of logits [..., V]: the likeliest tokens, and the entropy
AS_WRITTEN: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.topk(2, dim=-1).indices[..., 1],
    lambda x: torch.topk(x.softmax(-1), 2).values,
    lambda x: x.max(-1).values,
    lambda x: x.argmax(dim=-1),
    lambda x: Target(x).top_probs(2),  # at temperature 0
    lambda x: gate_distribution(Target(x)).max(dim=-1).values,
    lambda x: entropy(gate_distribution(Target(x))),
    lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
    lambda x: -(x.softmax(-1).clamp_min(1e-9).log() * x.softmax(-1)).sum(dim=-1),
    lambda x: torch.special.entr(torch.softmax(x, -1)).sum(-1),
    lambda x: -torch.xlogy(x.softmax(-1), x.softmax(-1)).sum(-1),
]
# And of a token at each place [...]
OF_TOKENS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, tokens: x.softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1),
    lambda x, tokens: (x > x.gather(-1, tokens.unsqueeze(-1))).sum(-1).clamp_max(2),
    lambda x, tokens: Target(x).probs_BKV.gather(-1, tokens.unsqueeze(-1)),
]


@given(st.integers(0, 2**31), st.integers(2, 9), st.integers(10, 60))
def test_what_is_known_is_said_as_a_dense_tensor_says_it(seed: int, n: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_BJV = 4 * torch.randn(2, 3, size, generator=generator)
    outputs = Outputs.of(logits_BJV.flatten(0, 1), n)
    token_BJ = torch.randint(size, (2, 3), generator=generator)
    own_BJ = pick(logits_BJV, token_BJ)
    known = Known.of(
        size,
        torch.cat([outputs.ids.long().view(2, 3, n), token_BJ.unsqueeze(-1)], -1),
        torch.cat([outputs.logits.view(2, 3, n), own_BJ.unsqueeze(-1)], -1),
        outputs.mass.view(2, 3),
        outputs.entropy.view(2, 3),
    )
    rows, places = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    for sparse, dense in (
        (argmax(known), argmax(logits_BJV)),
        (pick(known, token_BJ), own_BJ),
        (pick(known[:, :-1], argmax(known[:, :-1])), logits_BJV[:, :-1].amax(-1)),
        (known[rows, places, token_BJ[rows, places]], own_BJ[rows, places]),
        (top(known, 2).values, top(logits_BJV, 2).values),
        (top(known[rows, places], n).indices, top(logits_BJV[rows, places], n).indices),
        (log_mass(known.flatten(0, 1), own_BJ.flatten()), log_mass(logits_BJV.flatten(0, 1), own_BJ.flatten())),
        (entropy(known.softmax(-1)), entropy(logits_BJV.softmax(-1))),
        (pick(known[rows, places].log_softmax(-1), token_BJ[rows, places]),
         pick(logits_BJV[rows, places].log_softmax(-1), token_BJ[rows, places])),
        (pick(known.softmax(-1), token_BJ), pick(logits_BJV.softmax(-1), token_BJ)),
        (known.softmax(-1).amax(-1), logits_BJV.softmax(-1).amax(-1)),
        *((write(known), write(logits_BJV)) for write in AS_WRITTEN),
        *((write(known, token_BJ), write(logits_BJV, token_BJ)) for write in OF_TOKENS),
    ):  # fmt: skip
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)
    everything = sum(pick(known.softmax(-1), torch.full((2, 3), v)) for v in range(size))
    assert (everything <= 1 + 1e-4).all()  # what nobody recorded has what is left, or less
    with pytest.raises(Unknown, match=f"{n + 1} most likely"):
        top(known, n + 1)
    for whole in (lambda: known.sum(-1), lambda: known.softmax(-1).clamp_min(0.1), lambda: known.topk(2, largest=False),
                  lambda: known * known, lambda: known[..., :2], lambda: torch.zeros_like(known)):  # fmt: skip
        with pytest.raises(Unknown, match="whole distribution"):
            whole()


def test_of_equals_the_lowest_token_comes_first_and_a_ban_is_no_news() -> None:
    logits_JV = torch.zeros(1, 300)
    logits_JV[0, [250, 7, 90]] = 2.0
    logits_JV[0, 100:200] = -torch.inf
    outputs = Outputs.of(logits_JV, 4)
    assert outputs.ids[0, :3].tolist() == [7, 90, 250]
    torch.testing.assert_close(outputs.entropy, entropy(logits_JV.softmax(-1)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.mass, log_mass(logits_JV, torch.tensor([2.0])))


# --- a run, and all that the engine saw in it -----------------------------------------------------------------


Seen = tuple[Tensor, list[int], int, Tensor | None]  # logits [J, V], drafted, tokens before, the draft's logits


class Watching(Recorder):
    """Keeps full logits beside the recording."""

    seen: ClassVar[list[Seen]] = []

    def decide_group(self, policy: Any, target: Target, draft: Draft, *rest: Any) -> list[Decision]:
        decisions = super().decide_group(policy, target, draft, *rest)
        outputs = None if draft.logits_BKV is None else draft.logits_BKV[0].clone()
        Watching.seen.append((target.logits_BKV[0].clone(), draft.chains[0], rest[1][0], outputs))
        return decisions


PLAN = {
    "drafts": "model(fly-draft)",
    "k": [7, 3],
    "policies": RULES[9],  # Python decides
    "tasks": "bundled-middle",
    "limit": 4,
    "max_tokens": 90,
    "record": True,
}


def finish(plan: Plan, folder: Path, stop: int = 10**9) -> None:
    """Decode what is left of a plan, up to a kill after ``stop`` completions."""
    check_folder(plan, folder)
    records, done = read_records(folder), 0

    def advance(record: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if done == stop:
            raise KeyboardInterrupt

    decode_run(plan, folder, remaining(plan, records), records, advance)
    score_run(plan, folder)


# --- drafts that say how they came about ------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("draft", ["model(fly-draft)", "ngram+model(fly-draft)"])
def test_greedy_drafts_come_with_the_logits_of_their_model(kernels: str, draft: str) -> None:
    llm = LLM("fly-target", draft, k=5, kernels=kernels, dtype="float32")
    alone = LLM("fly-draft", kernels=kernels, dtype="float32")
    prompt = llm.tokenizer.encode("Take the list 4 9 5 7. Sort it, then take the list 4 9 5 7.")  # type: ignore[union-attr]
    Watching.seen.clear()
    held = recording.Recorder
    recording.Recorder = Watching  # type: ignore[misc]
    try:
        with recording.recorded(llm):
            (out,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    finally:
        recording.Recorder = held  # type: ignore[misc]
    text, asked = [*prompt, *out.token_ids], 0
    for _, drafted, start, said_KV in Watching.seen:
        if not drafted:
            continue
        assert said_KV is not None and said_KV[: len(drafted)].argmax(-1).tolist() == drafted
        context = [*text[:start], *drafted[:-1]]
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
        (outputs,) = alone.generate([context], params)
        own = float(said_KV[len(drafted) - 1].log_softmax(-1).amax())
        assert outputs.logprobs[0][drafted[-1]] == pytest.approx(own, abs=1e-3)
        asked += 1
    assert asked >= 3
    Watching.seen.clear()


def test_a_folder_that_was_begun_before_there_were_recordings_goes_on(tmp_path: Path) -> None:
    plan = Plan.of({**PLAN, "record": False})
    check_folder(plan, tmp_path)
    path = tmp_path / "plan.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "record" not in line))
    check_folder(plan, tmp_path)
    with pytest.raises(ValueError, match="record: False then, True now"):
        check_folder(Plan.of(PLAN), tmp_path)


def test_a_tree_cannot_be_recorded(tmp_path: Path) -> None:
    plan = Plan.of({**PLAN, "k": 4, "limit": 1, "drafts": "tree(fly-draft)", "policies": "exact"})
    with pytest.raises(ValueError, match="trees cannot be recorded"):
        finish(plan, tmp_path)


def test_what_is_no_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run"):
        load_blocks(tmp_path)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="holds no recorded blocks"):
        Recording.load(path)
    with pytest.raises(ValueError, match="temperature 0"):
        Plan.of({"record": True, "temperatures": [0.7]})
    with pytest.raises(ValueError, match="no recorded blocks"):
        Blocks([])


class Counting(TorchExecutor):
    """Counts its forwards."""

    forwards = 0

    def score(self, *arguments: Any, **options: Any) -> Scores:
        self.forwards += 1
        return super().score(*arguments, **options)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 12), st.integers(1, 6))
def test_forwards_below_which_prompt_lookup_drafts_are_counted_as_a_draft_takes_them(
    text: list[int], k: int, most: int
) -> None:
    executor = Counting(random_llama(1, 4, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=64))
    draft = ready(SingleDraft(executor, NGramDraft(k=most)))
    (drafted,) = draft.propose([make_row(text)], [k]).chains
    assert len(drafted) == k and lookup_forwards(Index(4, 1), text, drafted, most) == executor.forwards


def test_a_draft_without_a_model_is_recorded_without_its_view(tmp_path: Path) -> None:
    plan = Plan.of({"model": "fly-tiny", "drafts": "ngram", "k": 4, "policies": "exact", "tasks": "bundled-heldout",
                    "limit": 1, "max_tokens": 40, "record": True})  # fmt: skip
    finish(plan, tmp_path)
    result = command("bench", "plan", "--recorded", str(tmp_path))
    assert result.exit_code == 2 and "without a draft model" in words(result.output)
    (known,) = load_blocks(tmp_path).values()
    assert known.draft is None and known.replay(Exact()).tau.value == known.exact[0][0] / known.exact[1][0]
