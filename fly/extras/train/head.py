"""Train a draft head on the target's answers: the steps of the optimiser, in an order that a restart repeats, and the
checkpoints from which it continues. ``fly.extras.train.course`` says what a head of each kind learns in a step.

Shape legend: S depths, U draft vocabulary.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from fly.extras.train.answers import Answer
from fly.extras.train.block import BlockCourse
from fly.extras.train.course import Course
from fly.extras.train.eagle3 import Eagle3Course
from fly.extras.train.lessons import Reader
from fly.extras.train.plan import Plan, Training
from fly.models.heads import TrainedHead
from fly.runner.executor import Executor

__all__ = ["train_head"]

_STATE = "state.pt"
_MAY_CHANGE = "steps", "save_every"  # settings of a plan that may change when a training continues
_ALIKE = 32  # the answers of this many batches are drawn together and sorted by length
_COURSES: dict[str, type[BlockCourse] | type[Eagle3Course]] = {
    "eagle3": Eagle3Course, "dflash": BlockCourse, "dspark": BlockCourse
}  # fmt: skip


def train_head(
    executor: Executor,
    answers: abc.Sequence[Answer],
    plan: Plan,
    directory: Path,
    advance: Callable[[int, str], None] = lambda count, text: None,
) -> tuple[TrainedHead, Training]:
    """Train a head for the target that ``executor`` runs, on the target's ``answers``, and write it to ``directory`` in
    a published layout. A training that was begun there with the same plan and answers continues from its last
    checkpoint. The number of steps may change; the learning rate then follows the new number.

    ``advance`` is called with the number of steps just taken, and a text about them.

    Raises ``ValueError`` if the target gives no hidden states, there are too few answers, or ``directory`` has a
    checkpoint of another plan.
    """
    # Hold some answers out, and train on the others.
    answered = [answer for answer in answers if answer.answer]
    tests = answered[:: plan.held_out]
    taught = [answer for n, answer in enumerate(answered) if n % plan.held_out]
    if not taught:
        raise ValueError(f"{len(answered)} answers are too few to train on")
    course = _begin(executor, taught, plan)
    head, reader = course.head, Reader(executor, course.states, plan.length)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    # Continue from a checkpoint of the same training, or begin near the target.
    directory.mkdir(parents=True, exist_ok=True)
    about = {**asdict(plan), "answers": len(answered), "config": head.config.model_dump(mode="json")}
    checkpoint = _Checkpoint(directory / _STATE, about, head, optimiser, reader)
    if (training := checkpoint.load()) is None:
        training = Training()
        course.begin(reader, taught)
    else:
        advance(training.step, "")

    # Each step learns from one batch.
    # Norms have float32 weights and bfloat16 input; PyTorch warns that this is not the fastest way.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    lengths, begun = tuple(len(reader.cut(answer)) for answer in taught), time.monotonic() - training.seconds
    while training.step < plan.steps:
        for group in optimiser.param_groups:
            group["lr"] = plan.learning_rate * _rate(training.step, plan.steps)
        batch = [taught[n] for n in _order(lengths, training.step, plan.batch, plan.seed)]
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.precision == "bfloat16"):
            loss, cross = course.learn(reader.lessons(batch, head.to_target_U), f"{plan.seed}/{training.step}")
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 0.5)
        optimiser.step()
        training.losses.append(float(cross.detach()))
        training.seconds = time.monotonic() - begun
        advance(1, f"loss {statistics.fmean(training.losses[-20:]):.3f}")
        if training.step % plan.save_every == 0 or training.step == plan.steps:
            checkpoint.save(training)

    # Measure acceptance on the held-out answers, and write the head.
    training.held_out = acceptance(course, reader, tests, plan)
    head.fc.weight.data /= reader.scale_F  # in drafting, hidden states are not scaled
    course.save(directory)
    return head.eval().requires_grad_(False), training


def _begin(executor: Executor, taught: abc.Sequence[Answer], plan: Plan) -> Course:
    """Make a head for the target with random weights. It can draft the most frequent tokens of the answers."""
    vocab = executor.config.vocab_size
    ids_U = frequent_tokens(taught, min(plan.draft_vocabulary or 32000, vocab), vocab)
    torch.manual_seed(plan.seed)
    course = _COURSES[plan.kind](executor, plan, ids_U, taught)
    executor.check_states(course.states)
    head = course.head
    for module in head.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.requires_grad:
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5 if isinstance(module, nn.Linear) else 0.5)
    head.to_target_U.copy_(ids_U)
    if head.shares:
        head.share(executor.embedding().cpu())
    return course


class _Checkpoint:
    """The file from which a killed training continues."""

    def __init__(
        self, path: Path, about: dict[str, Any], head: TrainedHead, optimiser: torch.optim.Optimizer, reader: Reader
    ) -> None:
        self.path = path
        self.head = head
        self.optimiser = optimiser
        self.reader = reader
        self.about = json.loads(json.dumps({name: value for name, value in about.items() if name not in _MAY_CHANGE}))

    def load(self) -> Training | None:
        """Continue from the file; None if there is none. Raises ``ValueError`` if it belongs to another training."""
        if not self.path.exists():
            return None
        checkpoint = torch.load(self.path, weights_only=True)
        if differences := [name for name in self.about if checkpoint.get("settings", {}).get(name) != self.about[name]]:
            raise ValueError(
                f"{self.path} belongs to another training (its {differences} differ); keep them, or use another "
                "directory"
            )
        self.head.load_state_dict({**self.head.state_dict(), **checkpoint["head"]})
        self.optimiser.load_state_dict(checkpoint["optimiser"])
        self.reader.scale_F = checkpoint["scale"]
        return Training(**checkpoint["training"])

    def save(self, training: Training) -> None:
        """Write the file completely or not at all, even if the process is killed."""
        weights = self.head.state_dict()
        checkpoint = {
            "settings": self.about,
            "head": {name: weights[name] for name in weights if not (self.head.shares and "embed" in name)},
            "scale": self.reader.scale_F,
            "optimiser": self.optimiser.state_dict(),
            "training": asdict(training),
        }
        fresh = self.path.with_suffix(".new")
        torch.save(checkpoint, fresh)
        fresh.replace(self.path)


@torch.no_grad()
def acceptance(course: Course, reader: Reader, tests: abc.Sequence[Answer], plan: Plan) -> list[float]:
    """Measure acceptance on held-out answers: for each depth, how often the head's most likely token is the target's,
    among the positions where this is so at every smaller depth."""
    right = counted = torch.zeros(course.depths)
    for start in range(0, len(tests), plan.batch):
        lessons = reader.lessons(tests[start : start + plan.batch], course.head.to_target_U)
        right_S, counted_S = course.measure(lessons, f"{plan.seed}/held out/{start}")
        right, counted = right + right_S, counted + counted_S
    return [round(float(share), 4) for share in right / counted.clamp_min(1)]


def frequent_tokens(answers: abc.Sequence[Answer], size: int, vocab: int) -> Tensor:
    """Return the ids [U] of the most frequent tokens in the answers, ascending. If the answers have too few different
    tokens, the first tokens of the vocabulary fill up the rest."""
    counts = Counter(token for answer in answers for token in answer.answer)
    most = [token for token, _ in counts.most_common(size)]
    unseen = (token for token in range(vocab) if token not in counts)
    return torch.tensor(sorted([*most, *(next(unseen) for _ in range(size - len(most)))]))


def _rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, relative to the peak: it rises linearly, then falls to a tenth along a
    cosine."""
    warm = max(1, min(100, steps // 20))
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))


def _order(lengths: tuple[int, ...], step: int, batch: int, seed: int) -> list[int]:
    """Return the indices of the answers for a step. Each epoch goes through all answers in a new order, and leaves out
    those that do not fill a batch."""
    turn, place = divmod(step, max(1, len(lengths) // batch))
    return _turn(lengths, batch, f"{seed}/{turn}")[place]


@lru_cache(maxsize=1)
def _turn(lengths: tuple[int, ...], batch: int, seed: str) -> list[list[int]]:
    """Make the batches of one epoch. The answers of a batch have similar lengths, so that there is little padding: some
    hundred answers at a time are drawn and sorted by length, and the batches are shuffled."""
    random, order = Random(seed), list(range(len(lengths)))
    random.shuffle(order)
    order = order[: max(len(order) // batch, 1) * batch]
    batches = []
    for start in range(0, len(order), _ALIKE * batch):
        alike = sorted(order[start : start + _ALIKE * batch], key=lambda n: lengths[n])
        batches += [alike[at : at + batch] for at in range(0, len(alike), batch)]
    random.shuffle(batches)
    return batches
