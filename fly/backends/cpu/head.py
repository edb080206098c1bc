"""A draft head on compiled kernels. It drafts a chain in one call, shares calls of several rounds with its target, and
grows a tree level by level.

Shape legend: T packed tokens, N places, F the target's hidden states side by side, C hidden width, U draft vocabulary,
V the target's vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import abc
from typing import cast

import torch
from torch import Tensor

from fly.backends.cpu.drafting import CompiledHead
from fly.backends.cpu.library import chosen, load
from fly.backends.cpu.packed import FUSE, HEAD, TYPES, PackedLlama, float_weights, layer_refusal, new_model, shape_of
from fly.models.dflash import DFlashConfig, DFlashHead
from fly.models.eagle import Eagle3Head, HeadLayer
from fly.models.llama import rotary_tables
from fly.runner.executor import Batch, Executor, SerialHead

__all__ = ["CpuHead", "PackedHead", "head_refusal"]

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
    if flags := [name for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name, False)]:
        return f"there is no compiled code for {flags}"
    return None


class PackedHead(PackedLlama):
    """A loaded head, its weights packed for one kind of processor (``PackedLlama``)."""

    _loading = None

    def __init__(self, head: Eagle3Head, variant: str) -> None:
        config = self.config = head.config.layer
        self.dtype = head.dtype
        self.device = torch.device("cpu")
        self.kernels = chosen(variant)
        self._narrow = ""
        self.weight_bytes = head.dtype.itemsize
        self.library = load()
        self.vocab = head.config.draft_vocab_size
        assert head.embed_tokens is not None
        self._embedding = head.embed_tokens.weight.detach().contiguous()
        kind = TYPES[self.dtype]
        shape = shape_of(
            config.resized(1),
            vocab=self.vocab,
            weights=kind,
            hidden=kind,
            ropes=1,
            features=head.fc.in_features,
            normed=head.config.norm_before_residual,
            eps=config.rms_norm_eps,
            embedding=1.0,
        )
        norm, ((cos, sin),) = float_weights(head.norm), rotary_tables(config)
        self.handle = new_model(self, variant, shape, norm, cos.contiguous(), sin.contiguous(), self._embedding)
        self._target_U = head.to_target_U.contiguous()
        self.library.fly_draft_for(self.handle, config.vocab_size, self._target_U)
        layer = cast(HeadLayer, head.layers[0])
        attention, mlp = layer.self_attn, layer.mlp
        norms = {0: layer.input_layernorm, 1: layer.post_attention_layernorm, 6: layer.hidden_norm}
        if attention.normalised:
            norms |= {4: attention.q_norm, 5: attention.k_norm}
        self._set_layer(0, norms, attention.window, 0)
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        for which, linear in (*enumerate(linears), (HEAD, head.lm_head), (FUSE, head.fc)):
            self._pack(0, which, linear)
        self._prepare_calls()


class CpuHead(CompiledHead, SerialHead):
    """Runs an EAGLE-3 head. Its weights are packed once its embedding is known."""

    head: Eagle3Head

    def __init__(self, head: Eagle3Head, variant: str) -> None:
        super().__init__(head)
        self.kernels = variant
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
        return self._step(batch, states_TF.to(self.dtype).contiguous(), None, places)

    def step(self, batch: Batch, x_TC: Tensor, places: abc.Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._step(batch, None, x_TC.float().contiguous(), places)

    def _step(
        self, batch: Batch, states_TF: Tensor | None, x_TC: Tensor | None, places: abc.Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        packed = self.packed
        count = len(batch.tokens)
        kept = array("i", places)
        call = packed.batch(array("q", batch.tokens), array("q", batch.positions), batch.kv)
        logits_NU = torch.empty(len(kept), packed.vocab)
        after_TC = torch.empty(count, self.config.hidden_size)  # float32, as a draft in one call carries them
        packed.library.fly_step(packed.handle, ctypes.byref(call), states_TF, x_TC, kept, logits_NU, after_TC)
        return logits_NU, after_TC if len(kept) == count else after_TC[list(places)]
