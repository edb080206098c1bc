"""A target that stops early where more layers would not change what it says (SpecEE, arXiv 2504.08850), on PyTorch.

Each row of a batch leaves by itself, with all its new tokens at once. What it says then is what the layers so far say.
Of the layers that it skips, keys and values are made from its hidden state at the exit, so that later tokens find
some there (as in CALM, arXiv 2207.07061, section 3.4).

Shape legend: T packed tokens, N tokens of the rows that may still leave, E candidates a token, C hidden width,
V vocabulary, F hidden states side by side.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import torch
from torch import Tensor

from fly.backends.torch import TorchExecutor
from fly.cache import PagedBatch
from fly.executor import Batch, Executor, Scores, Wrapped
from fly.models import Llama
from fly.models.exits import Exits
from fly.models.llama import KV, Layer, Norm

__all__ = ["EarlyExit"]


class EarlyExit(Wrapped):
    """A Llama on PyTorch's kernels that leaves early by ``exits``.

    A row may leave where logits after all its new tokens are asked for, which are few then; a prompt goes through all
    layers. Candidates of a token are the likeliest of some frequent ones at the first look, and the token that was
    drafted after it. A row leaves where the predictors say so of each of its tokens, up to the first after which
    another candidate is likelier than the drafted one, and where of all the vocabulary the likeliest is a candidate
    there. Later tokens of a draft do not matter then; of a tree, all do.

    Raises ``ValueError`` for another model, other kernels, or exits for a target of other sizes.
    """

    leaves_early = True

    def __init__(self, inner: Executor, exits: Exits) -> None:
        if not isinstance(inner, TorchExecutor) or not isinstance(inner.model, Llama) or inner.model.rounded:
            raise ValueError(
                f"early exits take a Llama on PyTorch's kernels, kernels='torch', not {inner.model_name} on "
                f"{inner.kernels!r}"
            )
        exits.check(inner.config)
        super().__init__(inner)
        self.model, self.exits = inner.model, exits.to(inner.device)
        self.weight_UC = self.model.lm_head.weight.detach()[self.exits.ids_U].contiguous()

    def with_layers(self, layers: abc.Sequence[int]) -> Executor:
        return self.inner.with_layers(layers)

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        """``Scores.layers`` says how many layers each row went through."""
        forward = _Forward(self, batch, places, states)
        tokens_T = torch.tensor(batch.tokens, device=self.device)
        positions_T = torch.tensor(batch.positions, device=self.device)
        hidden_TC = self.model(tokens_T, positions_T, batch.kv, through=forward)
        wanted = list(range(len(batch.tokens)) if places is None else places)
        logits_NV = torch.empty(len(wanted), self.config.vocab_size, device=self.device)
        late = []
        for n, t in enumerate(wanted):
            if (early_V := forward.logits.get(t)) is None:
                late.append(n)
            else:
                logits_NV[n] = early_V
        if late:
            found_NV = self.model.logits(hidden_TC[[wanted[n] for n in late]])
            logits_NV = found_NV if len(late) == len(wanted) else logits_NV.index_copy_(0, self.numbers(late), found_NV)
        states_TF = torch.cat([forward.states[number] for number in states], -1) if states else None
        return Scores(logits_NV, None, states_TF, forward.layers)


class _Row(NamedTuple):
    number: int  # in the batch
    start: int  # of its tokens among all packed ones
    stop: int
    may_leave: bool
    chain: bool


class _Forward:
    """One forward, a ``fly.models.llama.Through``. It notes ``logits`` by token of those that left, ``layers`` by row,
    and the hidden ``states`` that are asked for."""

    def __init__(
        self, owner: EarlyExit, batch: Batch, places: abc.Sequence[int] | None, states: abc.Sequence[int]
    ) -> None:
        self.model, self.exits, self.weight_UC, self.tokens = owner.model, owner.exits, owner.weight_UC, batch.tokens
        self.kv: PagedBatch = batch.kv
        self.states: dict[int, Tensor] = dict.fromkeys(states, torch.empty(0))
        self.logits: dict[int, Tensor] = {}
        self.layers = [owner.config.num_hidden_layers] * len(batch.kv.counts)
        asked, at = None if places is None else set(places), 0
        self.rows: list[_Row] = []  # that are still on their way
        for number, count in enumerate(batch.kv.counts):
            may_leave = asked is None or asked.issuperset(range(at, at + count))
            chain = batch.kv.masks is None or batch.kv.masks[number] is None
            self.rows.append(_Row(number, at, at + count, may_leave, chain))
            at += count
        self.candidates: dict[int, Tensor] = {}  # by token [E], and how likely they were at the last look
        self.likely: dict[int, Tensor] = {}

    def __call__(
        self,
        layers: abc.Sequence[Layer],
        norm: Norm,
        x_TC: Tensor,
        rotary: abc.Sequence[tuple[Tensor, Tensor]],
        kv: KV,
    ) -> Tensor:
        looks = {passed: look for look, passed in enumerate(self.exits.config.layers)}
        all_TC = torch.empty_like(x_TC)  # the last hidden states of all tokens
        self.states = {number: torch.empty_like(x_TC) for number in self.states}
        going, at_T = self.kv, torch.arange(len(x_TC), device=x_TC.device)
        for passed, layer in enumerate(layers):
            if passed in self.states:
                self.states[passed][at_T] = x_TC
            look = looks.get(passed)
            if look is not None and (left := self._look(look, norm, x_TC)):
                inside_T = torch.zeros(len(x_TC), dtype=torch.bool, device=x_TC.device)
                end = 0
                for row in self.rows:
                    begin, end = end, end + row.stop - row.start
                    inside_T[begin:end] = row.number in left
                places = [place for place, row in enumerate(self.rows) if row.number in left]
                leaving, here_T = going.rows(places), at_T[inside_T]
                out_TC, turned = x_TC[inside_T], [(cos[inside_T], sin[inside_T]) for cos, sin in rotary]
                for later in layers[passed:]:
                    attention = later.self_attn
                    keys = attention.keys_and_values(later.input_layernorm(out_TC), *turned[later.rope])
                    leaving.store(attention.layer, *keys)
                all_TC[here_T] = out_TC
                for number, states_TC in self.states.items():
                    if number > passed:
                        states_TC[here_T] = out_TC
                for number in left:
                    self.layers[number] = passed
                going = going.rows([place for place in range(len(self.rows)) if place not in places])
                self.rows = [row for row in self.rows if row.number not in left]
                if not self.rows:
                    return norm(all_TC)
                x_TC, at_T = x_TC[~inside_T], at_T[~inside_T]
                rotary = [(cos[~inside_T], sin[~inside_T]) for cos, sin in rotary]
            x_TC = layer(x_TC, rotary, going)
        if len(layers) in self.states:
            self.states[len(layers)][at_T] = x_TC
        all_TC[at_T] = x_TC
        return norm(all_TC)

    def _look(self, look: int, norm: Norm, x_TC: Tensor) -> set[int]:
        """Numbers of the rows that leave; their logits are noted."""
        tokens, places, at = list[int](), list[int](), 0
        for row in self.rows:
            count = row.stop - row.start
            if row.may_leave:
                tokens += range(row.start, row.stop)
                places += range(at, at + count)
            at += count
        if not tokens:
            return set()
        hidden_NC = norm(x_TC if len(places) == len(x_TC) else x_TC[places])
        if look == 0:
            ids_NE, logits_NE = self._first(hidden_NC, tokens)
            before_NE: Tensor | None = None
        else:
            ids_NE = torch.stack([self.candidates[t] for t in tokens])
            logits_NE = (self.model.lm_head.weight[ids_NE] @ hidden_NC.unsqueeze(-1)).squeeze(-1).float()
            before_NE = torch.stack([self.likely[t] for t in tokens])
        features_NF, likely_NE = self.exits.features(logits_NE, before_NE)
        sure = (self.exits.chance(look, features_NF) >= self.exits.config.thresholds[look]).tolist()
        best = ids_NE.gather(1, logits_NE.argmax(-1, keepdim=True)).squeeze(1).tolist()
        self.candidates |= zip(tokens, ids_NE)
        self.likely |= zip(tokens, likely_NE)
        left, n = set(), 0
        for row in self.rows:
            if not row.may_leave:
                continue
            count = row.stop - row.start
            following = self.tokens[row.start + 1 : row.stop]
            parted = (j for j, (token, likeliest) in enumerate(zip(following, best[n:])) if token != likeliest)
            matter = next(parted, count - 1) + 1 if row.chain else count
            if all(sure[n : n + matter]):
                logits_JV = self.model.logits(hidden_NC[n : n + count])
                own_J1 = logits_JV[:matter].argmax(-1, keepdim=True)
                if bool((ids_NE[n : n + matter] == own_J1).any(-1).all()):
                    left.add(row.number)
                    self.logits |= zip(range(row.start, row.stop), logits_JV)
            n += count
        return left

    def _first(self, hidden_NC: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Candidates [N, E] and their logits."""
        found_NU = (hidden_NC @ self.weight_UC.T).float()
        logits_NE, at_NE = found_NU.topk(self.exits.config.candidates, -1)
        ids_NE = self.exits.ids_U[at_NE]
        after = {t: self.tokens[t + 1] for row in self.rows if row.chain for t in range(row.start, row.stop - 1)}
        drafted = [(n, after[t]) for n, t in enumerate(tokens) if t in after]
        if drafted:
            n_D, token_D = torch.tensor(drafted, device=ids_NE.device).unbind(1)
            own_D = (self.model.lm_head.weight[token_D] * hidden_NC[n_D]).sum(-1).float()
            missing_D = (ids_NE[n_D] != token_D.unsqueeze(1)).all(-1)
            ids_NE[n_D[missing_D], -1] = token_D[missing_D]
            logits_NE[n_D[missing_D], -1] = own_D[missing_D]
        return ids_NE, logits_NE
