"""Training of DFlash and DSpark heads: what is learned is what is drafted later.

Shape legend: B rows, L tokens of a row, A anchors of a row, D drafts of a block, N positions to learn, F hidden states
of the target side by side, U draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fly.backends.cpu import available
from fly.backends.heads import TorchDFlashHead
from fly.backends.torch import TorchExecutor
from fly.cli import app
from fly.drafts import BlockDraft
from fly.extras.train import Answer, Plan, Training, card, train_head
from fly.extras.train.block import BlockCourse, draft_blocks
from fly.extras.train.lessons import Lessons, Reader
from fly.llm import LLM
from fly.models.dflash import DFlashHead, load_dflash_head
from fly.params import SamplingParams
from fly.runner.executor import Executor, Wrapped
from fly.testing.toys import toy_target
from tests.test_dflash import KINDS, VOCABULARY, blocks, make_head, naive_block, naive_logits
from tests.test_eagle import TARGET, answers_of, check_goes_on, target_on

COMPILED = available()[0]
PLAN = Plan(
    kind="dspark", width=64, steps=12, batch=6, length=32, block_size=4, anchors=5, markov_rank=8, save_every=4,
    held_out=4, precision="float32",
)  # fmt: skip


# The forward of a training


def text_of(seed: int, rows: int, length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [B, L] and hidden states [B, L, F]."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    return tokens_BL, torch.randn(rows, length, width, dtype=torch.float64, generator=generator)


def drafted_after(head: DFlashHead, tokens: list[int], start: int) -> list[int]:
    """The text's tokens after an anchor, one for each draft; zeros after its end."""
    own = tokens[start + 1 : start + 1 + head.config.drafts]
    return own + [0] * (head.config.drafts - len(own))


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(KINDS)), st.integers(0, 9), st.lists(st.integers(1, 11), min_size=1, max_size=4))
def test_all_blocks_of_a_batch_say_what_the_naive_twin_says(kind: str, seed: int, starts: list[int]) -> None:
    """The twin knows the paper's description alone, and sees one block and the context before it at a time. Anchors may
    be the same, next to each other, or so near the end that a block goes on after the text."""
    head = make_head(seed, **KINDS[kind])
    tokens_BL, states_BLF = text_of(seed, 2, 12, 96)
    start_BA = torch.tensor([starts, starts[::-1]])
    found = draft_blocks(head, tokens_BL, states_BLF, start_BA)
    for b, row in enumerate(start_BA.tolist()):
        for a, start in enumerate(row):
            anchor, drafted = int(tokens_BL[b, start]), drafted_after(head, tokens_BL[b].tolist(), start)
            hidden_KC = naive_block(head, states_BLF[b, :start], anchor)
            logits_DU, chances_D = naive_logits(head, hidden_KC, anchor, drafted)
            known = min(head.config.drafts, 12 - start) if head.config.markov else head.config.drafts
            logits_found = found.logits_BADU[b, a, :known].double()
            torch.testing.assert_close(logits_found, logits_DU[:known], atol=2e-5, rtol=2e-5)
            if chances_D is not None:
                assert found.chance_BAD is not None
                chances = found.chance_BAD[b, a, :known].double()
                torch.testing.assert_close(chances, chances_D[:known], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_in_training_is_a_block_of_the_drafter(kind: str) -> None:
    """The executor that drafts reads the same context, in two calls, and walks over the same places."""
    head = make_head(3, **KINDS[kind])
    tokens_BL, states_BLF = text_of(3, 2, 12, 96)
    starts = [6, 4]
    found = draft_blocks(head, tokens_BL, states_BLF, torch.tensor(starts).unsqueeze(1))
    anchors = [int(tokens_BL[b, start]) for b, start in enumerate(starts)]
    drafted = [drafted_after(head, tokens_BL[b].tolist(), start) for b, start in enumerate(starts)]
    parts = [[states_BLF[b, :2], states_BLF[b, 2:start]] for b, start in enumerate(starts)]
    for b, places in enumerate(blocks(head, parts, anchors, drafted)):
        logits_DV = torch.stack([logits_V for logits_V, _ in places])
        logits_DU = logits_DV[:, head.to_target_U]
        torch.testing.assert_close(found.logits_BADU[b, 0].double(), logits_DU.double(), atol=2e-5, rtol=2e-5)
        if found.chance_BAD is not None:
            chances_D = torch.stack([chance for _, chance in places])
            torch.testing.assert_close(found.chance_BAD[b, 0], chances_D, atol=1e-5, rtol=1e-5)


# What is asked of a head


def course_of(kind: str, answers: list[Answer], size: int = 24, **options: Any) -> tuple[BlockCourse, Lessons]:
    """A random head in training, and a batch of answers to learn from."""
    executor, settings = target_on("torch"), {"markov_rank": 8} if kind == "dspark" else {"markov_rank": None}
    ids_U = torch.arange(24)[:: 24 // size]
    course = BlockCourse(executor, replace(PLAN, **{**vars(PLAN), "kind": kind, **settings, **options}), ids_U, answers)
    torch.manual_seed(5)
    for parameter in course.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    course.head.to_target_U.copy_(ids_U)
    reader = Reader(executor, course.states, course.head.config.layer.max_position_embeddings)
    return course, reader.lessons(answers, ids_U)


class Strict(Wrapped):
    """An executor that shows its output matrix by its logits alone, and takes hidden states of its own type only, as
    products on an accelerator do."""

    def logits(self, hidden_NC: torch.Tensor) -> torch.Tensor:
        assert (hidden_NC.dtype, hidden_NC.device) == (self.dtype, self.device)
        return super().logits(hidden_NC)

    def output(self) -> torch.Tensor:
        return Executor.output(self)


@pytest.mark.parametrize("size", [24, 12])
def test_the_output_matrix_is_taken_as_the_executor_gives_it(size: int) -> None:
    """Of a target in bfloat16: the values are those of its weights, and the head computes with them in float32."""
    model = toy_target(24, TARGET).to(torch.bfloat16)
    ids_U, plan = torch.arange(24)[:: 24 // size], replace(PLAN, width=None)
    course = BlockCourse(Strict(TorchExecutor(model)), plan, ids_U, [Answer([1, 2], [3, 4])])
    head = course.head.lm_head
    matrix_UC = course.matrix_UC if head is None else head.weight
    assert matrix_UC is not None and matrix_UC.dtype == torch.float32
    assert torch.equal(matrix_UC, model.lm_head.weight[ids_U].float())


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(["dflash", "dspark"]), st.sampled_from([24, 12]), st.integers(0, 5), st.integers(1, 9))
def test_the_loss_is_that_of_one_draft_after_another(kind: str, size: int, seed: int, anchors: int) -> None:
    """Each draft is held to the token that the answer has there, and to the target's distribution there: those of
    prompts, and after the end of an answer, count nothing."""
    answers = answers_of(target_on("torch"), 4)
    answers[1] = Answer([*answers[1].prompt, *answers[1].answer[:5]], answers[1].answer[5:7])  # ends within a block
    course, lessons = course_of(kind, answers, size, anchors=anchors)
    asked = course._place_blocks(lessons, str(seed))
    found = draft_blocks(course.head, lessons.tokens_BL, lessons.states_BLF, asked.start_BA)
    ids = course.head.to_target_U.tolist()
    cross, weight, varied, weights = [], [], [], []
    for b, one in enumerate(answers):
        text, first = [*one.prompt, *one.answer], len(one.prompt)
        starts = asked.start_BA[b][: min(anchors, len(text) - first)].tolist()
        assert len({*starts}) == len(starts) and all(first - 1 <= start < len(text) - 1 for start in starts)
        for a, start in enumerate(starts):
            for j in range(course.head.config.drafts):
                if (at := start + 1 + j) >= len(text):
                    break
                # By definition: cross-entropy and total variation against the target's forward over the whole text.
                q_U, share = found.logits_BADU[b, a, j].softmax(-1), math.exp(-j / PLAN.gamma)  # type: ignore[operator]
                p_U = lessons.truth_NU[lessons.number_BL[b, at - 1]]
                if text[at] in ids:
                    cross.append(-share * q_U[ids.index(text[at])].log())
                    weight.append(share)
                assert found.chance_BAD is not None or kind == "dflash"
                apart, chance = (q_U - p_U).abs().sum() + 1 - p_U.sum(), found.chance_BAD
                judged = torch.zeros(())
                if chance is not None:
                    kept, said = 1 - apart / 2, chance[b, a, j]
                    judged = -(kept * said.log() + (1 - kept) * (1 - said).log())
                varied.append(share * (0.9 * apart + judged))
                weights.append(share)
    expected = torch.stack(cross).sum() / sum(weight)
    loss, reported = course.learn(lessons, str(seed))
    torch.testing.assert_close(reported, expected, atol=1e-4, rtol=1e-4)
    if kind == "dspark":
        expected = 0.1 * expected + torch.stack(varied).sum() / sum(weights)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(["dflash", "dspark"]), st.integers(0, 9))
def test_acceptance_by_depth_is_that_of_greedy_drafts(kind: str, seed: int) -> None:
    """Drafted token by token from each anchor by the naive twin, and compared with the answer, which is the target's
    own. Drafts near the end of an answer count as far as the answer goes."""
    answers = answers_of(target_on("torch"), 3)
    course, lessons = course_of(kind, answers, 12, anchors=4)
    head = course.head
    optimiser = torch.optim.Adam(head.parameters(), 0.02)
    for step in range(10):  # until it is often right
        optimiser.zero_grad()
        course.learn(lessons, f"{seed}/{step}")[0].backward()
        optimiser.step()
    head.requires_grad_(False)
    right, counted = [0] * course.depths, [0] * course.depths
    for b, one in enumerate(answers):
        text = [*one.prompt, *one.answer]
        for start in course._place_blocks(lessons, str(seed)).start_BA[b].tolist():
            hidden_KC, drafted = naive_block(head, lessons.states_BLF[b, :start], text[start]), list[int]()
            for j in range(min(course.depths, len(text) - 1 - start)):
                before = [*drafted, *[0] * (course.depths - j)]
                logits_DU, _ = naive_logits(head, hidden_KC, text[start], before)
                drafted.append(int(head.to_target_U[logits_DU[j].argmax()]))
                counted[j] += 1
                if drafted[j] != text[start + 1 + j]:
                    break
                right[j] += 1
    right_D, counted_D = course.measure(lessons, str(seed))
    assert right[0] and right_D.tolist() == right and counted_D.tolist() == counted


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_answers_without_anything_to_learn(kind: str) -> None:
    """A prompt that fills the length, an answer of one token, and a text without context before its anchor."""
    long, short, bare = Answer([*range(20)] * 4, [5, 6]), Answer([7, 8], [3]), Answer([7], [3, 4])
    for answers, counted in (([long], 0), ([short], 1), ([long, short, bare], 3)):
        course, _ = course_of(kind, [bare], anchors=4)
        lessons = Reader(target_on("torch"), course.states, 64).lessons(answers, course.head.to_target_U)
        loss, _ = course.learn(lessons, "0")
        loss.backward()
        gradients = [parameter.grad for parameter in course.head.parameters() if parameter.grad is not None]
        assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
        assert course.measure(lessons, "0")[1][0] == counted


def test_the_targets_distribution_is_that_of_the_token_before_a_draft() -> None:
    """By a forward of the target over the text alone."""
    answers = answers_of(target_on("torch"), 3)
    _, lessons = course_of("dspark", answers, 12)
    model: Any = target_on("torch")
    for b, one in enumerate(answers):
        text = [*one.prompt, *one.answer]
        for at in range(len(one.prompt), len(text)):
            number = lessons.number_BL[b, at - 1]
            logits_NV, _, _ = Reader(model, (1,), 64).read([Answer(text[:at], [0])], (1,))
            torch.testing.assert_close(lessons.truth_NU[number], logits_NV.softmax(-1)[0, ::2], atol=1e-5, rtol=1e-4)
            assert int(lessons.choice_N[number]) == int(logits_NV.argmax())
        assert (lessons.number_BL[b, : len(one.prompt) - 1] == -1).all()
        assert (lessons.number_BL[b, len(text) - 1 :] == -1).all()


# Trainings


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_training_that_was_killed_goes_on_as_if_it_was_not(kind: str, tmp_path: Path) -> None:
    plan = replace(PLAN, kind=kind, markov_rank=8 if kind == "dspark" else None)
    check_goes_on(plan, replace(plan, anchors=4), "['anchors']", tmp_path)


@pytest.mark.parametrize(
    ("kind", "width", "vocabulary"), [("dflash", None, None), ("dspark", None, 12), ("dspark", 64, None)]
)
def test_what_is_trained_drafts_better(kind: str, width: int | None, vocabulary: int | None, tmp_path: Path) -> None:
    """The loss falls, and more of its drafts stand. A head of the target's width has the target's embedding, and its
    output matrix too unless it leaves tokens out; neither is trained."""
    executor = target_on("torch")
    answers = answers_of(executor)
    plan = replace(PLAN, kind=kind, markov_rank=8 if kind == "dspark" else None, width=width, steps=50,
                   learning_rate=0.01, draft_vocabulary=vocabulary)  # fmt: skip
    head, training = train_head(executor, answers, plan, tmp_path)
    assert sum(training.losses[-10:]) < 0.85 * sum(training.losses[:10])
    stored = load_dflash_head(tmp_path, torch.float32)
    assert stored.config == head.config  # type: ignore[attr-defined]
    assert stored.shares == (width is None) and (stored.lm_head is None) == (width is None and vocabulary is None)
    if width is None and vocabulary is not None:
        assert stored.lm_head is not None
        matrix_UC = executor.logits(torch.eye(32)).T[stored.to_target_U]
        torch.testing.assert_close(stored.lm_head.weight, matrix_UC, atol=0.01, rtol=0.01)  # stored in bfloat16
    tau = []
    for path in (None, tmp_path):
        own = load_dflash_head(tmp_path, torch.float32)
        if path is None:
            for name, parameter in own.named_parameters():
                if "norm" not in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        llm = LLM(executor, BlockDraft(TorchDFlashHead(own)), k=4)
        outputs = llm.generate([a.prompt for a in answers], SamplingParams(temperature=0.0, max_tokens=12))
        tau.append(sum(out.stats.accepted for out in outputs) / sum(out.stats.rounds for out in outputs))
    assert tau[1] > 1.3 * tau[0]


def test_a_step_reads_no_token_after_a_draft() -> None:
    """A block is given the anchor and, for DSpark's corrections, the tokens before each draft: changing later tokens
    and states changes nothing."""
    head = make_head(4, **KINDS["confident"])
    tokens_BL, states_BLF = text_of(4, 1, 12, 96)
    start_BA = torch.tensor([[5]])
    found = draft_blocks(head, tokens_BL, states_BLF, start_BA)
    other_BL, other_BLF = tokens_BL.clone(), states_BLF.clone()
    other_BL[:, 8:] += 1
    other_BLF[:, 5:] += 1
    changed = draft_blocks(head, other_BL % VOCABULARY, other_BLF, start_BA)
    same = (found.logits_BADU == changed.logits_BADU).all(-1)[0, 0].tolist()
    assert same == [True, True, True, False, False]  # the fourth draft follows token 8


def test_settings_of_another_kind_are_refused() -> None:
    with pytest.raises(
        ValueError, match="block_size 8 is a setting of dflash and dspark heads, and the kind is eagle3"
    ):
        Plan(block_size=8)
    with pytest.raises(ValueError, match="markov_rank 8 is a setting of dspark heads, and the kind is dflash"):
        Plan(kind="dflash", markov_rank=8)
    with pytest.raises(ValueError, match="test_steps 5 is a setting of eagle3 heads"):
        Plan(kind="dspark", test_steps=5)
    with pytest.raises(ValueError, match=r"kind 'medusa' is unknown; choices: \['eagle3', 'dflash', 'dspark'\]"):
        Plan(kind="medusa")
    for name, value in {"layers": 0, "block_size": 1, "anchors": 0, "markov_rank": 0, "gamma": 0.0}.items():
        with pytest.raises(ValueError, match=f"{name} {value} must be"):
            Plan(**{"kind": "dspark", name: value})  # type: ignore[arg-type]
    assert Plan().test_steps == 5 and Plan(kind="dspark").markov_rank == 64


def test_tau_is_the_expected_length_of_a_round() -> None:
    """Drafts of two that are kept with chances 1/2 and 1/4: 1, 2 and 3 tokens with chances 1/2, 3/8 and 1/8."""
    assert Training(held_out=[0.5, 0.25]).tau == [1.5, 0.5 + 2 * 3 / 8 + 3 / 8]


def test_the_command_trains_a_block_drafter_and_goes_on(tmp_path: Path) -> None:
    words = (
        "train-head --kind dspark --model fly-tiny --task arithmetic --count 12 --max-tokens 24 --width 32 --batch 2 "
        "--block-size 4 --layers 1 --draft-vocabulary 100 --markov-rank 8 --save-every 1 --states 0,1 --length 64"
    )
    out = tmp_path / "head"
    first = CliRunner().invoke(app, [*words.split(), "--steps", "2", str(out)])
    assert first.exit_code == 0, first.output
    again = CliRunner().invoke(app, [*words.split(), "--steps", "3", str(out)])
    assert again.exit_code == 0, again.output
    text = (out / "README.md").read_text()
    assert "| depth | 1 | 2 | 3 | 4 |" in text and "A DSpark block drafter" in text and "3 steps of 2 answers" in text
    assert "12 prompts of the bundled task `arithmetic`" in text and "| τ | 1." in text
    assert "0.0 minutes. The cross-entropy fell from" in " ".join(text.split())
    stats = LLM("fly-tiny", str(out)).generate(["Sam has 4"], temperature=0, max_tokens=8)[0].stats
    assert stats.drafted
    other = CliRunner().invoke(app, [*words.replace("dspark", "eagle3").split(), str(tmp_path / "bad")])
    assert other.exit_code == 2 and "is a setting of dflash and dspark heads" in " ".join(other.output.split())
    assert not (tmp_path / "bad").exists()


def test_the_card_of_each_kind_says_what_it_is() -> None:
    head = make_head(0, torch.float32)
    said = card("mine", "target", "One prompt.", 7, head, Plan(kind="dflash"), Training([2.0], [0.5], 60))
    assert "A DFlash block drafter" in said and "the anchor's predicts nothing, so it drafts 4 tokens" in said
    assert "| accepted | 50.0% |" in said and "| τ | 1.50 |" in said and "1.0 minutes" in " ".join(said.split())
