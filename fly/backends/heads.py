"""The reference executors of trained draft heads, on any device that PyTorch knows.

Shape legend: T packed tokens, B rows, K places of a block, S tokens that a place may see, C hidden width, R rank of a
Markov head, F hidden states side by side, U draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections import abc

import torch
from torch import Tensor

from fly.cache import PagedBatch
from fly.models.dflash import Corrected, DFlashConfig, DFlashHead
from fly.models.eagle import Eagle3Head
from fly.ops import upload
from fly.runner.drafting import Follow, Marginals, Place
from fly.runner.executor import Batch, BlockHead, DraftSpec, Executor, SerialHead

__all__ = ["TorchDFlashHead", "TorchHead", "TorchPEagleHead"]


class TorchHead(SerialHead):
    """Runs an EAGLE-3 head on PyTorch."""

    head: Eagle3Head

    def begin(self, batch: Batch, states_TF: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.step(batch, self.head.fuse(states_TF), places)

    def step(self, batch: Batch, x_TC: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens_T, positions_T = upload([*batch.tokens, *batch.positions], self.device).chunk(2)
        x_TC = self.head(tokens_T, x_TC, positions_T, batch.kv)
        if len(places) < len(batch.tokens):
            x_TC = x_TC[upload(places, self.device)]
        return self.head.logits(x_TC), x_TC


class TorchPEagleHead(BlockHead):
    """Runs a P-EAGLE head (arXiv 2602.01469) on PyTorch: one causal forward over the tokens that the target
    has read, and mask tokens after them. The last token read gives the first draft, each mask token one more."""

    head: Eagle3Head

    def room(self, drafts: int, spec: DraftSpec) -> int:
        return drafts - 1

    def feed(self, batch: Batch, states_TF: Tensor, places: abc.Sequence[int]) -> Tensor:
        """Feed the batch, each token with the hidden states before it. Return the logits [N, U] at ``places``."""
        tokens_T, positions_T = upload([*batch.tokens, *batch.positions], self.device).chunk(2)
        x_TC = self.head(tokens_T, self.head.fuse(states_TF), positions_T, batch.kv)
        return self.head.logits(x_TC[upload(places, self.device)])

    def read(self, batch: Batch, states_TF: Tensor) -> None:
        self.feed(batch, states_TF, ())

    def block(self, batch: Batch, states_TF: Tensor, anchors: abc.Sequence[int], max_len: abc.Sequence[int]) -> Follow:
        # Insert the mask tokens after each row's tokens.
        kv = batch.kv
        mask = self.head.config.mask_token_id
        assert mask is not None
        offset = 0
        counts = [count + n - 1 for count, n in zip(kv.counts, max_len)]
        tokens, numbers = list[int](), list[int]()  # the number of each token's hidden states; -1: ``mask_hidden``
        for count, n in zip(kv.counts, max_len):
            tokens += [*batch.tokens[offset : offset + count], *[mask] * (n - 1)]
            numbers += [*range(offset, offset + count), *[-1] * (n - 1)]
            offset += count
        block_batch = Batch.of(_split(tokens, counts), kv.cache.batch(kv.seqs, kv.starts, counts))
        states_TF = torch.cat([states_TF.to(self.device, self.dtype), self.head.mask_hidden.flatten(0, 1)])
        # Places of each row: its last token that was read, then its mask tokens. A shorter row repeats its last place.
        ends = itertools.accumulate(counts)
        places = [min(end - n + j, end - 1) for end, n in zip(ends, max_len) for j in range(max(max_len))]
        logits_NV = self.spread(self.feed(block_batch, states_TF[upload(numbers, self.device)], places))
        return Marginals(logits_NV.unflatten(0, (len(counts), -1)))


class TorchDFlashHead(BlockHead):
    """Runs a DFlash or DSpark head on PyTorch."""

    head: DFlashHead

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        self._logits = head.logits
        self._note_outputs()

    def _note_outputs(self) -> None:
        self.to_target_U = self.head.to_target_U
        self._whole = torch.equal(self.to_target_U.cpu(), torch.arange(self.config.vocab_size))

    def trim(self, kept: list[int]) -> None:
        self.head.trim(kept)
        self._note_outputs()

    def share(self, target: Executor) -> None:
        super().share(target)
        if self.head.lm_head is None:
            head_width, target_width = self.config.hidden_size, target.config.hidden_size
            if head_width != target_width:
                raise ValueError(
                    f"the head has no output matrix, and the target's is {target_width} wide, not {head_width}"
                )
            self._logits = lambda hidden_TC: target.logits(hidden_TC).to(self.device)[:, self.to_target_U]

    def room(self, drafts: int, spec: DraftSpec) -> int:
        return self.head.config.block_size  # all places of a block see one another, so none is left out

    def read(self, batch: Batch, states_TF: Tensor) -> None:
        # The slot of a token has the context of the token before it, at whose position it counts: a row's first token
        # has no slot, and its context is in slot 0.
        self.head.read(self.head.fuse(states_TF), upload(batch.positions, self.device), batch.kv)

    def block(self, batch: Batch, states_TF: Tensor, anchors: abc.Sequence[int], max_len: abc.Sequence[int]) -> Follow:
        """See ``BlockHead``. The keys and values of the block follow those of the context in the cache."""
        hidden_BKC, logits_BKU = self.places(batch, states_TF, anchors, max(max_len))
        if self.head.markov_head is None and self.head.confidence_head is None:
            return Marginals(self.spread(logits_BKU))
        return _Walk(self, hidden_BKC, logits_BKU)

    def places(self, batch: Batch, states_TF: Tensor, anchors: abc.Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Read the batch, and run one forward over the rows' blocks. Return the hidden states of all places, and the
        logits of the first ``count`` drafts, which no Markov head has corrected yet."""
        self.read(batch, states_TF)
        kv, config = batch.kv, self.head.config
        starts = [start + count for start, count in zip(kv.starts, kv.counts)]
        blocks = [[anchor, *[config.mask_token_id] * (config.block_size - 1)] for anchor in anchors]
        view = _Blocks(kv, starts, config)
        packed = Batch.of(blocks, view.batches[0])
        tokens_T, positions_T = upload([*packed.tokens, *packed.positions], self.device).chunk(2)
        hidden_BKC = self.head(tokens_T, positions_T, view).unflatten(0, (len(anchors), -1))
        first_place = 0 if config.anchor_first else 1
        used_BKC = hidden_BKC[:, first_place : first_place + count]
        return hidden_BKC, self.logits(used_BKC.flatten(0, 1)).unflatten(0, used_BKC.shape[:2])

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Return the logits [N, U] over the draft vocabulary, before any correction."""
        return self._logits(hidden_NC)

    def correct(self, logits_BU: Tensor, hidden_BC: Tensor, before_B: Tensor, state_BR: Tensor | None) -> Corrected:
        """Correct the logits of one place of each block (``DFlashHead.correct``)."""
        return self.head.correct(logits_BU, hidden_BC, before_B, state_BR)

    def spread(self, logits_NU: Tensor) -> Tensor:
        return logits_NU if self._whole else super().spread(logits_NU)


class _Blocks:
    """The cache as blocks see it (``fly.models.dflash.BlockKV``)."""

    def __init__(self, kv: PagedBatch, starts: list[int], config: DFlashConfig) -> None:
        kinds = list(zip(config.layer.windows, config.causal))
        size, device = config.block_size, kv.cache.device
        self.batches = []
        self.number = [[*dict.fromkeys(kinds)].index(kind) for kind in kinds]  # for each layer, of its batch
        for kind in dict.fromkeys(kinds):
            masks = []
            for start in starts:
                key_S = torch.arange(start + size, device=device)
                masks.append(config.sees(kinds.index(kind), key_S[start:].unsqueeze(1), key_S, start))
            self.batches.append(kv.cache.batch(kv.seqs, starts, [size] * len(starts), masks))

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        return self.batches[self.number[layer]].attend(layer, q_THD, k_TGD, v_TGD, None, scale)

    def store(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> object:
        return self.batches[0].store(layer, k_TGD, v_TGD)


class _Walk:
    """Walks over the places of a DSpark head's block (``Follow``), and corrects each by the token before it."""

    def __init__(self, runs: TorchDFlashHead, hidden_BKC: Tensor, logits_BKU: Tensor) -> None:
        self.runs = runs
        self.hidden_BKC, self.logits_BKU = hidden_BKC, logits_BKU
        self.first = 0 if runs.head.config.anchor_first else 1
        self.place = -1
        self.state_BR: Tensor | None = None

    def __call__(self, active: list[int], tokens: list[int]) -> Place:
        self.place += 1
        before_A, logits_AU = upload(tokens, self.logits_BKU.device), self.logits_BKU[active, self.place]
        if self.place == 0 and self.first:
            # The anchor's place predicts nothing here, but a recurrent Markov head begins there.
            self.state_BR = self.runs.correct(logits_AU, self.hidden_BKC[:, 0], before_A, None).state_BR
        state_AR = None if self.state_BR is None else self.state_BR[active]
        hidden_AC = self.hidden_BKC[active, self.first + self.place]
        corrected = self.runs.correct(logits_AU, hidden_AC, before_A, state_AR)
        if self.state_BR is None:
            self.state_BR = corrected.state_BR
        elif corrected.state_BR is not None:
            self.state_BR[active] = corrected.state_BR
        return Place(self.runs.spread(corrected.logits_BU), corrected.chance_B)


def _split(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """Split packed tokens into rows."""
    ends = itertools.accumulate(counts)
    return [tokens[end - count : end] for end, count in zip(ends, counts)]
