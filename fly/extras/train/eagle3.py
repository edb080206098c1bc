"""EAGLE-3 heads, trained by the training-time test (arXiv 2503.01840, section 3.2): from every token the head predicts
several tokens ahead. Each of these steps reads the head's own features from the step before, as in drafting.

Shape legend: B rows of a batch, L tokens of a row, T packed tokens, S steps, N positions to learn, M positions to learn
in one step, F hidden states side by side, C hidden width of the head, H query heads, G key/value heads, D head width, U
draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from collections import abc
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.extras.train.answers import Answer
from fly.extras.train.course import Course
from fly.extras.train.lessons import Lessons, Reader
from fly.extras.train.plan import Plan
from fly.models.eagle import Eagle3Head, HeadConfig, save_head
from fly.runner.executor import Executor

__all__ = ["Eagle3Course", "OwnSteps"]


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
        step_scores = [(q * step_k).sum(-1, keepdim=True) for step_k, _ in later]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        weights = (torch.cat([scores, *step_scores], -1) * scale).softmax(-1)
        out = weights[..., : self.length] @ first_v
        for n, (_, step_v) in enumerate(later):
            out = out + weights[..., self.length + n, None] * step_v
        return out.transpose(1, 2).flatten(0, 1)


class Eagle3Course(Course):
    """Trains an EAGLE-3 head."""

    head: Eagle3Head

    def __init__(self, executor: Executor, plan: Plan, ids_U: Tensor, taught: abc.Sequence[Answer]) -> None:
        assert plan.test_steps is not None and plan.decay is not None
        self.depths, self.decay = plan.test_steps, plan.decay
        self.states = plan.states_of(executor.config.num_hidden_layers)
        config = HeadConfig(
            layer=plan.layer(executor.config, "llama", 1),
            draft_vocab_size=len(ids_U),
            target_hidden_size=executor.config.hidden_size,
            states=self.states,
        )
        self.head = Eagle3Head(config, embedding=plan.width not in (None, executor.config.hidden_size))

    def begin(self, reader: Reader, taught: abc.Sequence[Answer]) -> None:
        """See ``Course``. A head of the target's width starts close to the target, which saves hundreds of steps: its
        feature is the target's last hidden state, and its output matrix approximates the target's. Executors do not
        expose the factors of their last norm, so a least-squares fit of logits to normalised hidden states gives this
        matrix."""
        config = reader.executor.config
        width = config.hidden_size
        head = self.head
        gram_CC, product_CU = torch.zeros(width, width), torch.zeros(width, head.config.draft_vocab_size)
        # Four equations for each unknown weight.
        for logits_NV, states_TF, places in reader.survey(taught, 4 * width, [config.num_hidden_layers]):
            last_NC = F.rms_norm(states_TF[places, -width:], (width,), eps=config.rms_norm_eps)
            gram_CC += last_NC.T @ last_NC
            product_CU += last_NC.T @ logits_NV[:, head.to_target_U]
        if head.config.layer.hidden_size == width:
            gram_CC += 1e-4 * gram_CC.diagonal().mean() * torch.eye(width)  # in case of too few answers
            head.lm_head.weight.data.copy_(torch.linalg.solve(gram_CC, product_CU).T)
            scale_C = reader.scale_F[-width:]
            head.fc.weight.data.mul_(0.3)[:, -width:] = torch.diag(scale_C / scale_C.median())

    def learn(self, lessons: Lessons, seed: str) -> tuple[Tensor, Tensor]:
        """See ``Course``. The loss of the head's own later steps counts less (EAGLE-3, section 3)."""
        losses, _ = _test_time(self.head, lessons, self.depths)
        return sum((self.decay**n * loss for n, loss in enumerate(losses)), torch.zeros(())), losses[0]

    def measure(self, lessons: Lessons, seed: str) -> tuple[Tensor, Tensor]:
        _, counts = _test_time(self.head, lessons, self.depths)
        return counts

    def save(self, directory: Path) -> None:
        save_head(self.head, directory)


def _test_time(head: Eagle3Head, lessons: Lessons, steps: int) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Return the loss of each step; and for each step, how many of the target's tokens the head predicted, and how many
    positions count."""
    tokens_BL, states_BLF, number_BL, truth_NU, choice_N = lessons
    batch, length = tokens_BL.shape
    kv, losses = OwnSteps(batch, length - 1), []
    right_S, counted_S = torch.zeros(steps), torch.zeros(steps)
    x_TC = head.fuse(states_BLF[:, :-1].flatten(0, 1))
    ids_U = head.to_target_U
    inside_N = torch.isin(choice_N, ids_U)
    truth_NU = truth_NU / truth_NU.sum(-1, keepdim=True).clamp_min(1e-30)  # among the draft vocabulary
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
        logits_MU = head.logits(x_TC.unflatten(0, (batch, length - 1))[at_M])
        choice_M, inside_M = choice_N[number_M], inside_N[number_M]
        cross_M = logits_MU.logsumexp(-1) - torch.linalg.vecdot(truth_NU[number_M], logits_MU)
        losses.append((cross_M * inside_M).sum() / inside_M.sum().clamp_min(1))
        stands_M = standing_BL[at_M]
        hit_M = (ids_U[logits_MU.detach().argmax(-1)] == choice_M) & stands_M
        right_S[step], counted_S[step] = hit_M.sum(), stands_M.sum()
        # In the next step, acceptance counts only where the head is fed the token that it has just drafted.
        next_M = F.pad(tokens_BL[:, 2 + step :], (0, 1))[at_M] == choice_M
        standing_BL = torch.zeros_like(standing_BL).index_put(at_M, hit_M & next_M)
    return losses, (right_S, counted_S)
