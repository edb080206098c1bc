"""EAGLE-3 and P-EAGLE heads on compiled kernels. They draft a chain in one call, and share calls of several rounds with
their target. EAGLE-3 heads grow a tree level by level.

Shape legend: T packed tokens, N places, F the target's hidden states side by side, C hidden width, U draft vocabulary,
V the target's vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import abc
from typing import Any, cast

import torch
from torch import Tensor

from fly.backends.cpu.drafting import CompiledBlockHead, CompiledHead
from fly.backends.cpu.library import chosen, load, split
from fly.backends.cpu.packed import FUSE, HEAD, TYPES, PackedLlama, float_weights, layer_refusal, new_model, shape_of
from fly.backends.heads import TorchPEagleHead
from fly.models.dflash import DFlashConfig, DFlashHead
from fly.models.eagle import Eagle3Head
from fly.models.llama import rotary_tables
from fly.runner.executor import Batch, Executor, SerialHead

__all__ = ["CpuHead", "CpuPEagleHead", "PackedHead", "head_refusal"]

_LARGEST_BLOCK = 256  # src/fly.h: MAX_TILE


def head_refusal(head: Eagle3Head | DFlashHead) -> str | None:
    """Return why there is no compiled code for ``head``; None if there is."""
    config, layer = head.config, head.config.layer
    if head.device.type != "cpu":
        return f"compiled kernels run on the CPU, not on {head.device}"
    if head.dtype not in TYPES:
        return f"compiled kernels take {[str(dtype).removeprefix('torch.') for dtype in TYPES]}, not {head.dtype}"
    if layer.hidden_size % 32:
        return f"compiled kernels take heads of a multiple of 32 values, not {layer.hidden_size}"
    if (reason := layer_refusal(layer)) is not None:
        return reason
    if isinstance(config, DFlashConfig) and config.block_size > _LARGEST_BLOCK:
        return f"compiled kernels take blocks of up to {_LARGEST_BLOCK} places, not {config.block_size}"
    flags = [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name, False)]
    if "norm_output" in flags and getattr(config, "mask_token_id", None) is not None:
        flags.remove("norm_output")  # no feature of a P-EAGLE head is read again
    if flags:
        return f"there is no compiled code for {flags}"
    return None


class PackedHead(PackedLlama):
    """A loaded head, its weights packed for one kind of processor (``PackedLlama``)."""

    _loading = None

    def __init__(self, head: Eagle3Head, variant: str) -> None:
        config, options = head.config.layer, head.config
        self.config = config
        self.dtype = head.dtype
        self.device = torch.device("cpu")
        self.kernels, self.library = chosen(variant), load()
        variant, self._narrow = split(self.kernels)
        self.vocab = options.draft_vocab_size
        self.kept = head.to_target_U.tolist() if self.vocab < config.vocab_size else None
        assert head.embed_tokens is not None
        self._embedding = head.embed_tokens.weight.detach().contiguous()
        shape = shape_of(
            config,
            vocab=self.vocab,
            weights=self._weights,
            hidden=TYPES[self.dtype],
            ropes=1,
            features=head.fc.in_features,
            normed=options.norm_before_residual,
            parallel=options.mask_token_id is not None,
            mask=options.mask_token_id or 0,
            eps=config.rms_norm_eps,
            embedding=1.0,
        )
        norm, ((cos, sin),) = float_weights(head.norm), rotary_tables(config)
        self.handle = new_model(self, variant, shape, norm, cos.contiguous(), sin.contiguous(), self._embedding)
        self._target_U = head.to_target_U.contiguous()
        self.library.fly_draft_for(self.handle, config.vocab_size, self._target_U)
        if options.mask_token_id is not None:
            self._masked = head.mask_hidden.detach().flatten().contiguous()
            self.library.fly_set_masked(self.handle, self._masked)
        layers: Any = head.layers
        self._pack_all({HEAD: head.lm_head, FUSE: head.fc}, layers)
        self._set_layer(0, {6: layers[0].hidden_norm}, layers[0].self_attn.window, 0)  # src/fly.h: FEATURE
        self._note_weight_bytes(head.lm_head, *layers)
        self._prepare_calls()

    def step(
        self, batch: Batch, states_TF: Tensor | None, x_TC: Tensor | None, places: abc.Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Feed the batch, each token with the target's hidden states ``states_TF`` or with the head's feature ``x_TC``
        before it. Return the logits [N, U] at ``places``, and the features [T, C] after all tokens, float32."""
        kept = array("i", places)
        call = self.batch(array("q", batch.tokens), array("q", batch.positions), batch.kv)
        logits_NU = torch.empty(len(kept), self.vocab)
        after_TC = torch.empty(len(batch.tokens), self.config.hidden_size)
        if states_TF is not None:
            states_TF = states_TF.to(self.dtype).contiguous()
        self.library.fly_step(self.handle, ctypes.byref(call), states_TF, x_TC, kept, logits_NU, after_TC)
        return logits_NU, after_TC


class CpuHead(CompiledHead, SerialHead):
    """Runs an EAGLE-3 head. Its weights are packed once its embedding is known."""

    head: Eagle3Head

    def __init__(self, head: Eagle3Head, variant: str) -> None:
        super().__init__(head)
        self.kernels = variant  # without an ending: its few weights stay as they are
        self._packed: PackedHead | None = None

    def share(self, target: Executor) -> None:
        super().share(target)
        if self.head.shares:
            self._packed = None  # it has the embedding of another target, or none

    @property
    def packed(self) -> PackedHead:
        """The packed head, with the target's embedding if the two share it."""
        if self._packed is None:
            self._packed = PackedHead(self.head, self.kernels)
        return self._packed

    def begin(self, batch: Batch, states_TF: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._step(batch, states_TF, None, places)

    def step(self, batch: Batch, x_TC: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._step(batch, None, x_TC.float().contiguous(), places)

    def _step(
        self, batch: Batch, states_TF: Tensor | None, x_TC: Tensor | None, places: abc.Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        logits_NU, after_TC = self.packed.step(batch, states_TF, x_TC, places)
        return logits_NU, after_TC if len(places) == len(after_TC) else after_TC[list(places)]


class CpuPEagleHead(CompiledBlockHead, TorchPEagleHead):
    """Runs a P-EAGLE head."""

    def pack(self, target: Executor) -> PackedHead:
        return PackedHead(self.head, self.kernels)

    def feed(self, batch: Batch, states_TF: Tensor, places: abc.Sequence[int]) -> Tensor:
        packed = cast(PackedHead, self.packed)
        return packed.step(batch, states_TF, None, places)[0]
