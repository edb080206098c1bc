"""What a head learns from: the target's hidden states and distributions on its own answers.

Shape legend: B rows of a batch, L tokens of a row, T packed tokens, N positions to learn, F hidden states side by side,
U draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fly.cache import PagedKVCache
from fly.extras.train.answers import Answer
from fly.runner.executor import Batch, Executor

__all__ = ["Lessons", "Reader"]

_SAMPLED = 8  # how many answers the target reads at a time before the training


class Lessons(NamedTuple):
    """A batch of answers with the target's outputs, padded to the longest answer.

    ``number_BL`` numbers the N positions to learn: those that a token of the answer follows. It is -1 elsewhere. At
    these positions, ``truth_NU`` are the target's probabilities of the draft vocabulary, and ``choice_N`` is the
    target's most likely token.
    """

    tokens_BL: Tensor
    states_BLF: Tensor
    number_BL: Tensor
    truth_NU: Tensor
    choice_N: Tensor


class Reader:
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
        rows = [self.cut(answer) for answer in answers]
        counts = [len(row) for row in rows]
        if self.cache is None or self.cache.allocator.num_free * self.cache.allocator.block_size < sum(counts):
            self.cache = PagedKVCache.for_model(self.executor, len(rows) * (self.length + 256))
        for number, count in enumerate(counts):
            self.cache.resize(number, count)
        # No token follows the last one of a complete answer, so there is nothing to learn at it.
        learned_spans = [
            (len(answer.prompt) - 1, min(len(answer.prompt) + len(answer.answer) - 1, self.length))
            for answer in answers
        ]
        starts = accumulate(counts, initial=0)
        places = [start + n for start, (first, end) in zip(starts, learned_spans) for n in range(first, end)]
        batch = Batch.of(rows, self.cache.batch(list(range(len(rows))), [0] * len(rows), counts))
        scores = self.executor.score(batch, places, states)
        logits_NV, states_TF = scores.logits_NV, scores.states_TF
        for number in range(len(rows)):
            self.cache.allocator.release(number)
        assert states_TF is not None
        return logits_NV.cpu(), states_TF.float().cpu(), places

    def survey(
        self, answers: abc.Sequence[Answer], enough: int, more: abc.Sequence[int] = ()
    ) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        """Yield what ``read`` returns for some answers at a time, until ``enough`` positions to learn are read. The
        hidden states after the layers ``more`` are the last columns. When all is taken, ``scale_F`` is the root mean
        square of the states read."""
        square_F = torch.zeros_like(self.scale_F)
        tokens = n_learned = 0
        for start in range(0, len(answers), _SAMPLED):
            if n_learned >= enough:
                break
            logits_NV, states_TF, places = self.read(answers[start : start + _SAMPLED], (*self.states, *more))
            square_F += states_TF[:, : len(square_F)].square().sum(0)
            tokens, n_learned = tokens + len(states_TF), n_learned + len(places)
            yield logits_NV, states_TF, places
        self.scale_F = (square_F / tokens).sqrt().clamp_min(1e-6)

    def lessons(self, answers: abc.Sequence[Answer], ids_U: Tensor) -> Lessons:
        """Return a batch of ``answers`` to learn from."""
        logits_NV, states_TF, places = self.read(answers, self.states)
        rows = [torch.tensor(self.cut(answer)) for answer in answers]
        counts = [len(row) for row in rows]
        number_T = torch.full((sum(counts),), -1)
        number_T[torch.tensor(places, dtype=torch.int64)] = torch.arange(len(places))
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return Lessons(
            pad(rows),
            pad(list((states_TF / self.scale_F).split(counts))),
            pad(list(number_T.split(counts)), padding_value=-1),
            logits_NV.softmax(-1)[:, ids_U],
            logits_NV.argmax(-1),
        )
