"""A target that skips its last layers where they would not change its choice (SpecEE, arXiv 2504.08850), on PyTorch.

Each row of a batch exits on its own, with all its new tokens at once. The hidden states at the exit give its logits.
They also give the keys and values of the layers that the row skips, because later tokens attend over these (as in CALM,
arXiv 2207.07061, section 3.4).

Shape legend: T packed tokens, N tokens of the rows that may still exit, J tokens of one row, U frequent tokens among
which a predictor looks for candidates, X = U + 1 with the drafted token, E candidates per token, D drafted tokens that
are not among the U, C hidden width, V vocabulary, F hidden states side by side.
"""

from __future__ import annotations

import math
from collections import Counter, abc
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.backends.torch import TorchExecutor
from fly.cache import PagedBatch
from fly.extras.early_exit.predictors import Exits
from fly.models import Llama
from fly.models.llama import KV, Layer, Norm
from fly.runner.executor import Batch, Executor, Scores, Wrapped

__all__ = ["EarlyExit"]


class EarlyExit(Wrapped):
    """A Llama on PyTorch's kernels that exits early by the predictors ``exits``.

    Only a row whose new tokens all need logits may exit, so a prompt goes through all layers. The candidates after a
    token are the likeliest among some frequent tokens and the token that was drafted there. A row exits if two things
    hold for each of its tokens: the predictor estimates that the choice is settled, and the likeliest token of the
    whole vocabulary is a candidate. In a chain, only the tokens up to the first mismatch with the draft must pass this
    test; in a tree, all tokens must.

    Attributes:
        passed: how many layers rows went through, so far: for each number of layers, in how many forwards. Forwards
            whose row could not exit do not count.

    Raises ``ValueError`` for another model, other kernels, or predictors for a target of other sizes.
    """

    def __init__(self, inner: Executor, exits: Exits) -> None:
        if not isinstance(inner, TorchExecutor) or not isinstance(inner.model, Llama) or inner.model.rounded:
            raise ValueError(
                f"early exits take a Llama on PyTorch's kernels, kernels='torch', not {inner.model_name} on "
                f"{inner.kernels!r}"
            )
        exits.check(inner.config)
        super().__init__(inner)
        self.keeps_guarantees = False  # the logits at an exit are not those of the whole target
        self.passed = Counter[int]()
        self.model, self.exits = inner.model, exits.to(inner.device)
        self.weight_UC = self.model.lm_head.weight.detach()[self.exits.ids_U].contiguous()
        self.looked_through = frozenset(self.exits.ids_U.tolist())

    @property
    def mean_layers(self) -> float:
        """The mean of ``passed``; NaN before the first forward."""
        forwards = self.passed.total()
        return sum(layers * count for layers, count in self.passed.items()) / forwards if forwards else math.nan

    def deterministic(self) -> Executor:
        """Raise ``ValueError``: where a token's row exits depends on the tokens that it is fed with."""
        raise ValueError("deterministic: a target that exits early computes other bits when fed other drafts")

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        scores, layers = self.score_rows(batch, places, states)
        self.passed.update(layers.values())
        return scores

    def score_rows(
        self, batch: Batch, places: abc.Sequence[int] | None, states: abc.Sequence[int]
    ) -> tuple[Scores, dict[int, int]]:
        """Do the same as ``score``, and also return how many layers each row that could exit went through, by the row's
        number in the batch."""
        forward = _Forward(self, batch, places, states)
        tokens_T = torch.tensor(batch.tokens, device=self.device)
        positions_T = torch.tensor(batch.positions, device=self.device)
        hidden_TC = self.model(tokens_T, positions_T, batch.kv, through=forward)
        # The rows that exited have logits already. Compute those of the other rows from the last layer.
        positions = range(len(batch.tokens)) if places is None else places
        remaining = [t for t in positions if t not in forward.logits]
        logits = dict(zip(remaining, self.model.logits(hidden_TC[remaining]))) if remaining else {}
        logits |= forward.logits
        logits_NV = torch.empty(0, self.config.vocab_size, device=self.device)
        if len(positions):
            logits_NV = torch.stack([logits[t] for t in positions])
        states_TF = torch.cat([forward.states[number] for number in states], -1) if states else None
        return Scores(logits_NV, None, states_TF), forward.layers


class _Row(NamedTuple):
    number: int  # its index in the batch
    tokens: range  # the indices of its tokens among all packed tokens
    may_leave: bool
    chain: bool


class _Forward:
    """Runs the layers of one forward, as a ``fly.models.llama.LayerLoop``. Its results are the ``logits`` of each token
    that exited, the number of ``layers`` that each row that could exit went through, and the requested hidden
    ``states``."""

    def __init__(
        self, owner: EarlyExit, batch: Batch, places: abc.Sequence[int] | None, states: abc.Sequence[int]
    ) -> None:
        self.model = owner.model
        self.exits = owner.exits
        self.tokens = batch.tokens
        self.weight_UC = owner.weight_UC
        self.looked_through = owner.looked_through
        self.kv = batch.kv
        self.states = dict.fromkeys(states, torch.empty(0))
        self.logits: dict[int, Tensor] = {}
        self.rows: list[_Row] = []  # the rows that have not exited
        begin = 0
        for number, count in enumerate(batch.kv.counts):
            tokens = range(begin, begin := begin + count)
            chain = batch.kv.masks is None or batch.kv.masks[number] is None
            self.rows.append(_Row(number, tokens, places is None or set(places).issuperset(tokens), chain))
        self.layers = {row.number: owner.config.num_hidden_layers for row in self.rows if row.may_leave}
        self.earlier: dict[int, Tensor] = {}  # the logits [J, X] of each row at the last look

    def __call__(
        self, layers: abc.Sequence[Layer], norm: Norm, x_TC: Tensor, rotary: abc.Sequence[tuple[Tensor, Tensor]], kv: KV
    ) -> Tensor:
        looks = {passed: look for look, passed in enumerate(self.exits.config.layers)}
        last_TC = torch.empty_like(x_TC)  # each token's hidden state at its exit, or after the last layer
        self.states = {number: torch.empty_like(x_TC) for number in self.states}
        # Keep track of the tokens that have not exited: their part of the batch, and their indices among all packed
        # tokens. ``x_TC`` and ``rotary`` shrink with them.
        going, at_T = self.kv, torch.arange(len(x_TC), device=x_TC.device)
        for passed, layer in enumerate(layers):
            if passed in self.states:
                self.states[passed][at_T] = x_TC
            look = looks.get(passed)
            if look is not None and (leavers := self._look(look, norm, x_TC, at_T)):
                # Fill the cache of the skipped layers with keys and values computed from the hidden states at the exit.
                leaves_T = _belongs(at_T, leavers)
                out_TC, turned = x_TC[leaves_T], [(cos[leaves_T], sin[leaves_T]) for cos, sin in rotary]
                leaving = _select(going, [b for b, row in enumerate(self.rows) if row in leavers])
                for later in layers[passed:]:
                    attention = later.self_attn
                    keys = attention.keys_and_values(later.input_layernorm(out_TC), *turned[later.rope])
                    leaving.store(attention.layer, *keys)
                # Where hidden states after skipped layers are requested, give the hidden states at the exit.
                for number, states_TC in self.states.items():
                    if number > passed:
                        states_TC[at_T[leaves_T]] = out_TC
                last_TC[at_T[leaves_T]] = out_TC
                for row in leavers:
                    self.layers[row.number] = passed
                # Go on with the other rows.
                going = _select(going, [b for b, row in enumerate(self.rows) if row not in leavers])
                self.rows = [row for row in self.rows if row not in leavers]
                if not self.rows:
                    return norm(last_TC)
                x_TC, at_T = x_TC[~leaves_T], at_T[~leaves_T]
                rotary = [(cos[~leaves_T], sin[~leaves_T]) for cos, sin in rotary]
            x_TC = layer(x_TC, rotary, going)
        if len(layers) in self.states:
            self.states[len(layers)][at_T] = x_TC
        last_TC[at_T] = x_TC
        return norm(last_TC)

    def _look(self, look: int, norm: Norm, x_TC: Tensor, at_T: Tensor) -> list[_Row]:
        """Store the logits of the rows that exit at this look, and return these rows."""
        looking_rows = [row for row in self.rows if row.may_leave]
        if not looking_rows:
            return []
        # The predictor reads the candidates' logits, now and at the last look.
        hidden_NC = norm(x_TC[_belongs(at_T, looking_rows)])
        ids_NX, logits_NX = self._look_through(hidden_NC, looking_rows)
        logits_NE, at_NE = logits_NX.topk(self.exits.config.candidates, -1)
        ids_NE, earlier_NE = ids_NX.gather(1, at_NE), None
        if look:
            earlier_NE = torch.cat([self.earlier[row.number] for row in looking_rows]).gather(1, at_NE)
        chance_N = self.exits.chance(look, self.exits.features(logits_NE, earlier_NE))
        settled, best = (chance_N >= self.exits.config.thresholds[look]).tolist(), ids_NE[:, 0].tolist()
        leavers, n = [], 0
        for row in looking_rows:
            count = len(row.tokens)
            self.earlier[row.number] = logits_NX[n : n + count]
            # In a chain, tokens after the first mismatch with the draft do not count, since they are rejected anyway.
            following = self.tokens[row.tokens[1] : row.tokens.stop] if row.chain and count > 1 else []
            mismatches = (j for j, (token, likeliest) in enumerate(zip(following, best[n:])) if token != likeliest)
            matter = next(mismatches, count - 1) + 1
            # If all choices are settled, compute all logits. The likeliest tokens must be candidates.
            if all(settled[n : n + matter]):
                logits_JV = self.model.logits(hidden_NC[n : n + count])
                likeliest_J1 = logits_JV[:matter].argmax(-1, keepdim=True)
                if bool((ids_NE[n : n + matter] == likeliest_J1).any(-1).all()):
                    leavers.append(row)
                    self.logits |= zip(row.tokens, logits_JV)
            n += count
        return leavers

    def _look_through(self, hidden_NC: Tensor, rows: list[_Row]) -> tuple[Tensor, Tensor]:
        """Return ids and logits [N, X] of the tokens that may be candidates. The last column is the drafted token. Its
        logit is -inf if no token was drafted there, or if it is one of the other columns too."""
        ids_U = self.exits.ids_U
        logits_NX = F.pad((hidden_NC @ self.weight_UC.T).float(), (0, 1), value=-torch.inf)
        ids_NX = F.pad(ids_U.expand(len(hidden_NC), -1), (0, 1))
        drafted, n = [], 0
        for row in rows:
            if row.chain:
                drafted += [(n + j, self.tokens[t]) for j, t in enumerate(row.tokens[1:])]
            n += len(row.tokens)
        drafted = [(n, token) for n, token in drafted if token not in self.looked_through]
        if drafted:
            n_D, token_D = torch.tensor(drafted, device=ids_U.device).unbind(1)
            ids_NX[n_D, -1] = token_D
            logits_NX[n_D, -1] = (self.model.lm_head.weight[token_D] * hidden_NC[n_D]).sum(-1).float()
        return ids_NX, logits_NX


def _select(kv: PagedBatch, numbers: abc.Sequence[int]) -> PagedBatch:
    """Return a batch of only the rows with these numbers."""
    seqs = [kv.seqs[b] for b in numbers]
    starts = [kv.starts[b] for b in numbers]
    counts = [kv.counts[b] for b in numbers]
    masks = None if kv.masks is None else [kv.masks[b] for b in numbers]
    return PagedBatch(kv.cache, seqs, starts, counts, masks)


def _belongs(at_T: Tensor, rows: abc.Sequence[_Row]) -> Tensor:
    """Return which of the tokens with the indices ``at_T`` belong to ``rows``, bool [T]."""
    return torch.isin(at_T, torch.tensor([t for row in rows for t in row.tokens], device=at_T.device))
