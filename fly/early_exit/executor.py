"""A target that stops early where more layers would not change its choice (SpecEE, arXiv 2504.08850), on PyTorch.

Each row of a batch leaves by itself, with all its new tokens at once. Its logits are computed from the hidden states at
the exit. The keys and values of the layers that it skips are made from these too, so that later tokens find some there
(as in CALM, arXiv 2207.07061, section 3.4).

Shape legend: T packed tokens, N tokens of the rows that may still leave, U tokens looked through, X these and a drafted
one, E candidates a token, C hidden width, V vocabulary, F hidden states side by side.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.backends.torch import TorchExecutor
from fly.cache import PagedBatch
from fly.early_exit.predictors import Exits
from fly.models import Llama
from fly.models.llama import KV, Layer, Norm
from fly.runtime.executor import Batch, Executor, Scores, Wrapped

__all__ = ["EarlyExit"]


class EarlyExit(Wrapped):
    """A Llama on PyTorch's kernels that leaves early by ``exits``.

    A row may leave if logits are wanted after all its new tokens, which are few then; a prompt goes through all
    layers. The candidates after a token are the likeliest of some frequent tokens, and the token drafted there. A row
    leaves when both hold for each of its tokens: the predictor says that its choice is settled, and the likeliest token
    of the whole vocabulary is a candidate. Only tokens up to the first mismatch with the draft count; in a tree, all
    do.

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
        self.looked_through = frozenset(self.exits.ids_U.tolist())

    def embedding(self) -> Tensor:
        return self.inner.embedding()

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
    """One forward, a ``fly.models.llama.LayerLoop``. It notes ``logits`` by token of those that left, ``layers`` by
    row, and the hidden ``states`` that are wanted."""

    def __init__(
        self, owner: EarlyExit, batch: Batch, places: abc.Sequence[int] | None, states: abc.Sequence[int]
    ) -> None:
        self.model, self.exits, self.tokens = owner.model, owner.exits, batch.tokens
        self.weight_UC, self.looked_through = owner.weight_UC, owner.looked_through
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
        # By row, what the last look saw: logits of the tokens it looked through and of the drafted ones.
        self.earlier: dict[int, Tensor] = {}

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
        asked, places, at = list[_Row](), list[int](), 0
        for row in self.rows:
            count = row.stop - row.start
            if row.may_leave:
                asked.append(row)
                places += range(at, at + count)
            at += count
        if not asked:
            return set()
        hidden_NC = norm(x_TC if len(places) == len(x_TC) else x_TC[places])
        ids_NX, logits_NX = self._seen(hidden_NC, asked)
        logits_NE, at_NE = logits_NX.topk(self.exits.config.candidates, -1)
        ids_NE, earlier_NE = ids_NX.gather(1, at_NE), None
        if look:
            earlier_NE = torch.cat([self.earlier[row.number] for row in asked]).gather(1, at_NE)
        chance_N = self.exits.chance(look, self.exits.features(logits_NE, earlier_NE))
        sure, best = (chance_N >= self.exits.config.thresholds[look]).tolist(), ids_NE[:, 0].tolist()
        left, n = set(), 0
        for row in asked:
            count = row.stop - row.start
            self.earlier[row.number] = logits_NX[n : n + count]
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

    def _seen(self, hidden_NC: Tensor, rows: list[_Row]) -> tuple[Tensor, Tensor]:
        """Ids [N, U + 1] and logits of the tokens looked through, and last of the token drafted after each place; -inf
        if that is one of them."""
        ids_U, count = self.exits.ids_U, len(hidden_NC)
        logits_NX = F.pad((hidden_NC @ self.weight_UC.T).float(), (0, 1), value=-torch.inf)
        ids_NX = F.pad(ids_U.expand(count, -1), (0, 1))
        after = []
        for row in rows:
            following = self.tokens[row.start + 1 : row.stop] if row.chain else []
            after += following + [-1] * (row.stop - row.start - len(following))
        drafted = [(n, token) for n, token in enumerate(after) if token >= 0 and token not in self.looked_through]
        if drafted:
            n_D, token_D = torch.tensor(drafted, device=ids_U.device).unbind(1)
            ids_NX[n_D, -1] = token_D
            logits_NX[n_D, -1] = (self.model.lm_head.weight[token_D] * hidden_NC[n_D]).sum(-1).float()
        return ids_NX, logits_NX
