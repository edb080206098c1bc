"""Train a draft head by the training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2): from every token the head
predicts several tokens ahead. Each of these steps reads the head's own features from the step before, as in drafting.

Shape legend: B rows of a batch, L tokens of a row, T packed tokens, S steps, N positions to learn, M positions to learn
in one step, F hidden states side by side, C hidden width of the head, H query heads, G key/value heads, D head width, U
draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections import Counter, abc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fly.cache import PagedKVCache
from fly.extras.train.answers import Answer
from fly.models import LlamaConfig
from fly.models.eagle import Eagle3Head, HeadConfig, save_head
from fly.runner.executor import Batch, Executor

__all__ = ["Plan", "Training", "train_head"]

_STATE = "state.pt"
_MAY_CHANGE = "steps", "save_every"  # settings of a plan that may change when a training continues
_ALIKE = 32  # the answers of this many batches are drawn together and sorted by length
_SAMPLED = 8  # how many answers the target reads at a time before the training


@dataclass(frozen=True)
class Plan:
    """Sizes of a head, and how it is trained.

    Attributes:
        width: hidden width. None takes the target's width and shares its embedding; otherwise the head has its own
            embedding.
        intermediate: width of the feed-forward layer; None takes 8/3 of the width, rounded up to a multiple of 32.
        states: the head reads the target's hidden states after these layers; None takes the usual three.
        draft_vocabulary: how many tokens the head can draft, taking the most frequent ones; None takes at most 32,000.
        steps: optimiser steps.
        batch: rows per step.
        length: tokens per row; longer rows are cut.
        test_steps: steps of the training-time test, each on the head's own features.
        decay: weight of the loss of each of these steps, relative to the step before.
        learning_rate: peak learning rate of AdamW, after a warm-up; it then falls to a tenth along a cosine.
        held_out: one answer in this many is kept out of the training, to measure acceptance.
        precision: dtype of matrix products in training, bfloat16 or float32; weights stay float32 until they are saved.
        save_every: steps between two checkpoints.
        seed: seed of the initial weights and of the order of the answers.
    """

    width: int | None = None
    intermediate: int | None = None
    states: tuple[int, ...] | None = None
    draft_vocabulary: int | None = None
    steps: int = 1000
    batch: int = 16
    length: int = 512
    test_steps: int = 5
    decay: float = 0.8
    learning_rate: float = 1e-3
    held_out: int = 20
    precision: str = "bfloat16"
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch": 1, "length": 8, "test_steps": 1, "held_out": 2, "save_every": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} {getattr(self, name)} must be at least {value}")
        if self.precision not in ("bfloat16", "float32"):
            raise ValueError(f"precision {self.precision!r} is unknown; choices: ['bfloat16', 'float32']")
        if not 0 < self.decay <= 1 or not 0 < self.learning_rate < 1:
            raise ValueError(f"decay {self.decay} and learning_rate {self.learning_rate} must be in (0, 1]")

    def config(self, target: LlamaConfig, draft_vocabulary: int) -> HeadConfig:
        """Build the head's configuration for a target. Raises ``ValueError`` for sizes that do not fit together."""
        width = self.width or target.hidden_size
        head_dim = next((n for n in (min(target.head_dim, width // 2), 64, 32, 16, 8) if n and width % n == 0), 0)
        if not head_dim or head_dim % 2:
            raise ValueError(f"width {width} has no heads of an even width; take a multiple of 32")
        states, layers = self.states, target.num_hidden_layers
        if states is None:
            usual = [2, layers // 2, layers - 3] if layers >= 8 else [1, layers // 2, layers]
            states = tuple(sorted(set(usual)))
        layer = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=width,
            intermediate_size=self.intermediate or -(-width * 8 // 3 // 32) * 32,
            num_hidden_layers=1,
            num_attention_heads=width // head_dim,
            num_key_value_heads=width // head_dim,
            head_dim=head_dim,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
        )
        return HeadConfig(
            layer=layer, draft_vocab_size=draft_vocabulary, target_hidden_size=target.hidden_size, states=states
        )


class OwnSteps:
    """The keys and values that the head attends to in the training-time test. In every step a token attends to the
    first step of all tokens up to itself. In later steps it also attends to its own later steps so far."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.steps: list[tuple[Tensor, Tensor]] = []

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        q, k, v = (x.unflatten(0, (self.batch, self.length)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        self.steps.append((k, v))
        (first_k, first_v), *later = self.steps
        causal = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        scores = (q @ first_k.transpose(-1, -2)).masked_fill(~causal, -torch.inf)
        own = [(q * step_k).sum(-1, keepdim=True) for step_k, _ in later]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        weights = (torch.cat([scores, *own], -1) * scale).softmax(-1)
        out = weights[..., : self.length] @ first_v
        for n, (_, step_v) in enumerate(later):
            out = out + weights[..., self.length + n, None] * step_v
        return out.transpose(1, 2).flatten(0, 1)


@dataclass
class Training:
    """The record of a training.

    Attributes:
        losses: the loss of each optimiser step.
        held_out: for each depth, the share of positions where the head's most likely token is the target's, among
            those where this is so at every smaller depth.
        seconds: how long the training took.
    """

    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def step(self) -> int:
        return len(self.losses)


class _Lessons(NamedTuple):
    """A batch of answers with the target's outputs, padded to the longest answer.

    ``number_BL`` numbers the N positions to learn: those that a token of the answer follows. It is -1 elsewhere. At
    these positions, ``truth_NU`` is the target's distribution over the draft vocabulary, and ``choice_N`` is the
    target's most likely token.
    """

    tokens_BL: Tensor
    states_BLF: Tensor
    number_BL: Tensor
    truth_NU: Tensor
    choice_N: Tensor


class _Reader:
    """Runs the target on answers when they are needed, to get its hidden states and logits.

    Hidden states are divided by ``scale_F``: in a real model, a few channels are a thousand times larger than the
    others, and an optimiser with one learning rate needs channels of similar size.
    """

    def __init__(self, executor: Executor, states: tuple[int, ...], length: int) -> None:
        self.executor = executor
        self.states = states
        self.length = length
        self.scale_F = torch.ones(len(states) * executor.config.hidden_size)
        self.cache: PagedKVCache | None = None

    def cut(self, one: Answer) -> list[int]:
        """Return the tokens of a prompt and its answer, cut to length."""
        return [*one.prompt, *one.answer][: self.length]

    @torch.no_grad()
    def read(self, answers: abc.Sequence[Answer], states: abc.Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
        """Run the target on packed answers. Returns its logits [N, V] at the positions to learn (those that a token of
        the answer follows), its hidden states [T, F] at all positions, and the positions to learn."""
        rows = [self.cut(one) for one in answers]
        counts = [len(row) for row in rows]
        if self.cache is None or self.cache.allocator.num_free * self.cache.allocator.block_size < sum(counts):
            self.cache = PagedKVCache.for_model(self.executor, len(rows) * (self.length + 256))
        for number, count in enumerate(counts):
            self.cache.resize(number, count)
        # No token follows the last one of a complete answer, so there is nothing to learn at it.
        learned = [(len(one.prompt) - 1, min(len(one.prompt) + len(one.answer) - 1, self.length)) for one in answers]
        starts = accumulate(counts, initial=0)
        places = [start + n for start, (first, end) in zip(starts, learned) for n in range(first, end)]
        batch = Batch.of(rows, self.cache.batch(list(range(len(rows))), [0] * len(rows), counts))
        scores = self.executor.score(batch, places, states)
        logits_NV, states_TF = scores.logits_NV, scores.states_TF
        for number in range(len(rows)):
            self.cache.allocator.release(number)
        assert states_TF is not None
        return logits_NV.cpu(), states_TF.float().cpu(), places

    def lessons(self, answers: abc.Sequence[Answer], ids_U: Tensor) -> _Lessons:
        """Return a batch of ``answers`` to learn from."""
        logits_NV, states_TF, places = self.read(answers, self.states)
        rows = [torch.tensor(self.cut(one)) for one in answers]
        counts = [len(row) for row in rows]
        number_T = torch.full((sum(counts),), -1)
        number_T[torch.tensor(places, dtype=torch.int64)] = torch.arange(len(places))
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return _Lessons(
            pad(rows),
            pad(list((states_TF / self.scale_F).split(counts))),
            pad(list(number_T.split(counts)), padding_value=-1),
            logits_NV[:, ids_U].softmax(-1),
            logits_NV.argmax(-1),
        )


def train_head(
    executor: Executor,
    answers: abc.Sequence[Answer],
    plan: Plan,
    directory: Path,
    advance: Callable[[int, str], None] = lambda count, text: None,
) -> tuple[Eagle3Head, Training]:
    """Train a head for the target that ``executor`` runs, on the target's ``answers``, and write it to ``directory`` in
    the published layout. A training that was begun there with the same plan and answers continues from its last
    checkpoint. The number of steps may change; the learning rate then follows the new number.

    ``advance`` is called with the number of steps just taken, and a text about them.

    Raises ``ValueError`` if the target gives no hidden states, there are too few answers, or ``directory`` has a
    checkpoint of another plan.
    """
    # Hold some answers out, and train on the others.
    used = [one for one in answers if one.answer]
    tests = used[:: plan.held_out]
    taught = [one for n, one in enumerate(used) if n % plan.held_out]
    if not taught:
        raise ValueError(f"{len(used)} answers are too few to train on")
    head = _new_head(executor, taught, plan)
    reader = _Reader(executor, tuple(head.config.states or ()), plan.length)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    # Continue from a checkpoint of the same training, or begin near the target.
    directory.mkdir(parents=True, exist_ok=True)
    about = {**asdict(plan), "answers": len(used), "config": head.config.model_dump(mode="json")}
    checkpoint = _Checkpoint(directory / _STATE, about, head, optimiser, reader)
    if (training := checkpoint.load()) is None:
        training = Training()
        _begin_like_the_target(head, reader, taught)
    else:
        advance(training.step, "")

    # Each step learns from one batch; the loss of the head's own later steps counts less (EAGLE-3, section 3).
    # Norms have float32 weights and bfloat16 input; PyTorch warns that this is not the fastest way.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    lengths, begun = tuple(len(reader.cut(one)) for one in taught), time.monotonic() - training.seconds
    while training.step < plan.steps:
        for group in optimiser.param_groups:
            group["lr"] = plan.learning_rate * _rate(training.step, plan.steps)
        batch = [taught[n] for n in _order(lengths, training.step, plan.batch, plan.seed)]
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.precision == "bfloat16"):
            losses, _ = _test_time(head, reader.lessons(batch, head.to_target_U), plan.test_steps)
        optimiser.zero_grad()
        sum((plan.decay**n * loss for n, loss in enumerate(losses)), torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimiser.step()
        training.losses.append(float(losses[0].detach()))
        training.seconds = time.monotonic() - begun
        advance(1, f"loss {statistics.fmean(training.losses[-20:]):.3f}")
        if training.step % plan.save_every == 0 or training.step == plan.steps:
            checkpoint.save(training)

    # Measure acceptance on the held-out answers, and write the head.
    training.held_out = acceptance(head, reader, tests, plan)
    head.fc.weight.data /= reader.scale_F  # in drafting, hidden states are not scaled
    save_head(head, directory)
    return head.eval().requires_grad_(False), training


def _new_head(executor: Executor, taught: abc.Sequence[Answer], plan: Plan) -> Eagle3Head:
    """Make a head for the target with random weights. It can draft the most frequent tokens of the answers."""
    vocab = executor.config.vocab_size
    ids_U = frequent_tokens(taught, min(plan.draft_vocabulary or 32000, vocab), vocab)
    torch.manual_seed(plan.seed)
    config = plan.config(executor.config, len(ids_U))
    executor.check_states(config.states or ())
    head = Eagle3Head(config, embedding=plan.width not in (None, executor.config.hidden_size))
    for module in head.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5 if isinstance(module, nn.Linear) else 0.5)
    head.to_target_U.copy_(ids_U)
    if head.shares:
        head.share(executor.embedding().cpu())
    return head


class _Checkpoint:
    """The file from which a killed training continues."""

    def __init__(
        self, path: Path, about: dict[str, Any], head: Eagle3Head, optimiser: torch.optim.Optimizer, reader: _Reader
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
        kept = torch.load(self.path, weights_only=True)
        if different := [name for name in self.about if kept.get("settings", {}).get(name) != self.about[name]]:
            raise ValueError(
                f"{self.path} belongs to another training (its {different} differ); keep them, or use another directory"
            )
        self.head.load_state_dict({**self.head.state_dict(), **kept["head"]})
        self.optimiser.load_state_dict(kept["optimiser"])
        self.reader.scale_F = kept["scale"]
        return Training(**kept["training"])

    def save(self, training: Training) -> None:
        """Write the file completely or not at all, even if the process is killed."""
        weights = self.head.state_dict()
        kept = {
            "settings": self.about,
            "head": {name: weights[name] for name in weights if not (self.head.shares and "embed" in name)},
            "scale": self.reader.scale_F,
            "optimiser": self.optimiser.state_dict(),
            "training": asdict(training),
        }
        fresh = self.path.with_suffix(".new")
        torch.save(kept, fresh)
        fresh.replace(self.path)


@torch.no_grad()
def acceptance(head: Eagle3Head, reader: _Reader, tests: abc.Sequence[Answer], plan: Plan) -> list[float]:
    """Measure acceptance on held-out answers: for each depth, how often the head's most likely token is the target's,
    among the positions where this is so at every smaller depth."""
    right = asked = torch.zeros(plan.test_steps)
    for start in range(0, len(tests), plan.batch):
        lessons = reader.lessons(tests[start : start + plan.batch], head.to_target_U)
        _, (right_S, asked_S) = _test_time(head, lessons, plan.test_steps)
        right, asked = right + right_S, asked + asked_S
    return [round(float(share), 4) for share in right / asked.clamp_min(1)]


def _test_time(head: Eagle3Head, given: _Lessons, steps: int) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Return the loss of each step; and for each step, how many of the target's tokens the head predicted, and how many
    positions count."""
    tokens_BL, states_BLF, number_BL, truth_NU, choice_N = given
    batch, length = tokens_BL.shape
    kv, losses = OwnSteps(batch, length - 1), []
    right_S, asked_S = torch.zeros(steps), torch.zeros(steps)
    x_TC = head.fuse(states_BLF[:, :-1].flatten(0, 1))
    ids_U = head.to_target_U
    inside_N = torch.isin(choice_N, ids_U)
    standing_BL = torch.ones(batch, length - 1, dtype=torch.bool)
    for step in range(min(steps, length - 1)):
        # In this step, position i is fed token i + 1 + step, and predicts the token after it.
        fed_BL = F.pad(tokens_BL[:, 1 + step :], (0, step))
        positions_T = torch.arange(length - 1).repeat(batch) + step
        x_TC = head(fed_BL.flatten(), x_TC, positions_T, kv)
        # Compute the rest only at the M positions to learn.
        number_BM = number_BL[:, 1 + step :]
        at_M = tuple((number_BM >= 0).nonzero().unbind(1))
        number_M = number_BM[at_M]
        found_MU = head.logits(x_TC.unflatten(0, (batch, length - 1))[at_M])
        own_M, inside_M = choice_N[number_M], inside_N[number_M]
        cross_M = found_MU.logsumexp(-1) - torch.linalg.vecdot(truth_NU[number_M], found_MU)
        losses.append((cross_M * inside_M).sum() / inside_M.sum().clamp_min(1))
        stands_M = standing_BL[at_M]
        hit_M = (ids_U[found_MU.detach().argmax(-1)] == own_M) & stands_M
        right_S[step], asked_S[step] = hit_M.sum(), stands_M.sum()
        # In the next step, acceptance counts only where the head is fed the token that it has just drafted.
        next_M = F.pad(tokens_BL[:, 2 + step :], (0, 1))[at_M] == own_M
        standing_BL = torch.zeros_like(standing_BL).index_put(at_M, hit_M & next_M)
    return losses, (right_S, asked_S)


def frequent_tokens(answers: abc.Sequence[Answer], size: int, vocab: int) -> Tensor:
    """Return the ids [U] of the most frequent tokens in the answers, ascending. If the answers have too few different
    tokens, the first tokens of the vocabulary fill up the rest."""
    counts = Counter(token for one in answers for token in one.answer)
    most = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocab) if token not in counts)
    return torch.tensor(sorted([*most, *(next(rest) for _ in range(size - len(most)))]))


def _begin_like_the_target(head: Eagle3Head, reader: _Reader, taught: abc.Sequence[Answer]) -> None:
    """Set the scale of hidden states to their root mean square. A head of the target's width starts close to the
    target, which saves hundreds of steps: its feature is the target's last hidden state, and its output matrix
    approximates the target's. Executors do not expose their weights, so a least-squares fit of logits to normalised
    hidden states gives this matrix."""
    config, width = reader.executor.config, reader.executor.config.hidden_size
    square_F = torch.zeros(len(reader.scale_F))
    read = 0
    asked = 0
    gram_CC, product_CU = torch.zeros(width, width), torch.zeros(width, head.config.draft_vocab_size)
    states = (*reader.states, config.num_hidden_layers)
    for start in range(0, len(taught), _SAMPLED):
        if asked >= 4 * width:  # four equations per unknown weight
            break
        logits_NV, states_TF, places = reader.read(taught[start : start + _SAMPLED], states)
        square_F += states_TF[:, :-width].square().sum(0)
        read, asked = read + len(states_TF), asked + len(places)
        last_NC = states_TF[places, -width:]
        last_NC = F.rms_norm(last_NC, (width,), eps=config.rms_norm_eps)
        gram_CC += last_NC.T @ last_NC
        product_CU += last_NC.T @ logits_NV[:, head.to_target_U]
    reader.scale_F = (square_F / read).sqrt().clamp_min(1e-6)
    if head.config.layer.hidden_size == width:
        gram_CC += 1e-4 * gram_CC.diagonal().mean() * torch.eye(width)  # in case of too few answers
        head.lm_head.weight.data.copy_(torch.linalg.solve(gram_CC, product_CU).T)
        scale_C = reader.scale_F[-width:]
        head.fc.weight.data.mul_(0.3)[:, -width:] = torch.diag(scale_C / scale_C.median())


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
    found = []
    for start in range(0, len(order), _ALIKE * batch):
        some = sorted(order[start : start + _ALIKE * batch], key=lambda n: lengths[n])
        found += [some[at : at + batch] for at in range(0, len(some), batch)]
    random.shuffle(found)
    return found
