"""A DFlash or DSpark head on compiled kernels. It drafts a block in one call, and shares calls of several rounds with
its target.

Shape legend: T packed tokens, B rows, K places of a block, F the target's hidden states side by side, C hidden width,
U draft vocabulary.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections import abc
from typing import Any

import torch
from torch import Tensor, nn

from fly.backends.cpu.drafting import CompiledBlockHead
from fly.backends.cpu.library import CBatch, chosen, load, split
from fly.backends.cpu.packed import (
    CORRECT,
    FUSE,
    HEAD,
    JOINT,
    TYPES,
    PackedLlama,
    float_weights,
    new_model,
    shape_of,
)
from fly.backends.heads import TorchDFlashHead
from fly.models.dflash import Corrected, DFlashHead
from fly.models.llama import rotary_tables
from fly.runner.executor import Batch, Executor

__all__ = ["CpuDFlashHead", "PackedDFlash"]

_MARKOV = [None, "vanilla", "gated", "rnn"]  # src/interface.h: Markov


class PackedDFlash(PackedLlama):
    """A loaded head, its weights packed for one kind of processor (``PackedLlama``).

    Args:
        head: a head that has an embedding.
        output_UC: its output matrix.
        variant: the name of a variant that runs here, maybe with an ending.
    """

    _loading = None

    def __init__(self, head: DFlashHead, output_UC: Tensor, variant: str) -> None:
        config, options = head.config.layer, head.config
        self.config = config
        self.dtype = head.dtype
        self.device = torch.device("cpu")
        self.kernels, self.library = chosen(variant), load()
        variant, self._narrow = split(self.kernels)
        self.vocab = len(output_UC)
        self.kept = head.to_target_U.tolist() if self.vocab < config.vocab_size else None
        assert head.embed_tokens is not None
        self._embedding = head.embed_tokens.weight.detach().contiguous()
        markov, confidence = head.markov_head, head.confidence_head
        shape = shape_of(
            config,
            vocab=self.vocab,
            weights=self._weights,
            hidden=TYPES[self.dtype],
            ropes=1,
            features=head.fc.in_features,
            block=options.block_size,
            first=0 if options.anchor_first else 1,
            mask=options.mask_token_id,
            markov=_MARKOV.index(options.markov),
            rank=options.markov_rank,
            confidence=0 if confidence is None else confidence.proj.in_features,
            eps=config.rms_norm_eps,
            embedding=1.0,
        )
        norm, ((cos, sin),) = float_weights(head.norm), rotary_tables(config)
        self.handle = new_model(self, variant, shape, norm, cos.contiguous(), sin.contiguous(), self._embedding)
        self._target_U = head.to_target_U.contiguous()
        self.library.fly_draft_for(self.handle, config.vocab_size, self._target_U)
        others = {HEAD: _linear(output_UC), FUSE: head.fc}
        self._before = None if markov is None else markov.markov_w1.weight.detach().contiguous()
        if markov is not None:
            others[CORRECT] = markov.markov_w2
            if (joint := markov.gate_proj or markov.joint_proj) is not None:
                others[JOINT] = joint
        if markov is not None or confidence is not None:
            proj = None if confidence is None else confidence.proj
            weights = None if proj is None else torch.cat([proj.weight.flatten(), proj.bias]).detach().float()
            self.library.fly_set_markov(self.handle, self._before, weights)
        layers: Any = head.layers
        self._pack_all(others, layers)
        for number, (layer, causal) in enumerate(zip(layers, options.causal)):
            norms = {6: head.hidden_norm}  # src/fly.h: FEATURE
            self._set_layer(number, norms, layer.self_attn.window, 0, causal, options.anchored)
        self._note_weight_bytes(others[HEAD], layers)
        self._prepare_calls()


def _linear(weight_UC: Tensor) -> nn.Linear:
    """Return a module with this matrix."""
    outputs, inputs = weight_UC.shape
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight_UC, requires_grad=False)
    return linear


class CpuDFlashHead(CompiledBlockHead, TorchDFlashHead):
    """Runs a DFlash or DSpark head."""

    def pack(self, target: Executor) -> PackedDFlash:
        lm_head = self.head.lm_head
        output_UC = target.output() if lm_head is None else lm_head.weight.detach()
        if lm_head is None and not self._whole:
            output_UC = output_UC[self.to_target_U]
        return PackedDFlash(self.head, output_UC.to(self.dtype), self.kernels)

    def read(self, batch: Batch, states_TF: Tensor) -> None:
        call = self._call(batch)
        self.packed.library.fly_read(self.packed.handle, ctypes.byref(call), states_TF.to(self.dtype).contiguous())

    def places(self, batch: Batch, states_TF: Tensor, anchors: abc.Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        packed, options = self.packed, self.head.config
        tokens = [*batch.tokens]
        for end, anchor in zip(itertools.accumulate(batch.kv.counts), anchors):
            tokens[end - 1] = anchor
        call = self._call(Batch(tokens, batch.positions, batch.kv))
        count = min(count, options.drafts)
        hidden_BKC = torch.empty(len(anchors), options.block_size, self.config.hidden_size, dtype=self.dtype)
        logits_BKU = torch.empty(len(anchors), count, packed.vocab)
        states_TF = states_TF.to(self.dtype).contiguous()
        packed.library.fly_block(packed.handle, ctypes.byref(call), count, states_TF, hidden_BKC, logits_BKU)
        return hidden_BKC, logits_BKU

    def correct(self, logits_BU: Tensor, hidden_BC: Tensor, before_B: Tensor, state_BR: Tensor | None) -> Corrected:
        # One block after another: PyTorch adds up a product in an order that depends on the number of rows.
        columns = (logits_BU, hidden_BC, before_B), () if state_BR is None else (state_BR,)
        blocks = zip(*(column.split(1) for part in columns for column in part))
        each = [self.head.correct(*block, *([None] if state_BR is None else [])) for block in blocks]
        logits, chances, states = zip(*each)
        return Corrected(
            torch.cat(logits),
            None if chances[0] is None else torch.cat(chances),
            None if states[0] is None else torch.cat(states),
        )

    def _call(self, batch: Batch) -> CBatch:
        return self.packed.batch(array("q", batch.tokens), array("q", batch.positions), batch.kv)
