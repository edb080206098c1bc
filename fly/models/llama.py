"""Llama as a plain ``nn.Module``. Knows nothing of caches, batching, policies or ranks.

Shape legend: T packed tokens, H query heads, G key/value heads, D head width, C hidden width, V vocabulary.

The model sees one flat list of tokens with their positions; which tokens belong together, and what came
before them, is the business of the ``kv`` object, whose ``attend(layer, q, k, v)`` is the only way tokens mix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fly.models.config import LlamaConfig

__all__ = ["KV", "DenseCausal", "Llama", "allocate", "skeleton"]


class KV(Protocol):
    """What a forward needs of the cache: store this layer's keys and values, and attend over what is stored."""

    def attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Attention output [T, H, D] of each packed token over its own sequence up to itself."""
        ...


class DenseCausal:
    """``batch`` fresh sequences of ``length`` tokens each, no cache: what training and reference checks use."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length

    def attend(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.batch, self.length)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)


def rotary_frequencies(config: LlamaConfig) -> Tensor:
    """Angular frequencies [D/2] in radians a position, float32.

    ``linear`` divides all by the factor; ``llama3`` divides only wavelengths longer than the original context
    and blends in between (Llama 3.1 release, ``rope_scaling``).
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling.rope_type == "default":
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / scaling.factor)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary embedding (RoFormer) in the half-split layout of the published checkpoints.

    ``sin`` carries the sign: its first half is negated, so the swap of halves needs no negation of its own.
    """
    half = x_THD.shape[-1] // 2
    return torch.addcmul(x_THD * cos_T1D, x_THD.roll(half, -1), sin_T1D)


class Attention(nn.Module):
    """Grouped-query attention; query, key and value projections are one matrix (rows q, then k, then v)."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, bias = config.head_dim, config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * width, bias=bias)
        self.o_proj = nn.Linear(self.heads * width, config.hidden_size, bias=bias)

    def forward(self, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, kv: KV) -> Tensor:
        qkv = self.qkv_proj(x_TC).unflatten(-1, (-1, self.head_dim))
        rotated = self.heads + self.kv_heads
        qk = rotate(qkv[:, :rotated], cos_T1D, sin_T1D)
        out_THD = kv.attend(self.layer, qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:])
        return self.o_proj(out_THD.flatten(1))


class FeedForward(nn.Module):
    """SwiGLU; gate and up projections are one matrix (rows gate, then up)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TC: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_TC).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, kv: KV) -> Tensor:
        x_TC = x_TC + self.self_attn(self.input_layernorm(x_TC), cos_T1D, sin_T1D, kv)
        return x_TC + self.mlp(self.post_attention_layernorm(x_TC))


class Llama(nn.Module):
    """The decoder; parameter names are Hugging Face's, save for the fused ``qkv_proj`` and ``gate_up_proj``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._rotary: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def rotary(self) -> tuple[Tensor, Tensor]:
        """Tables ``(cos, sin)`` [positions, 1, D] in the model's dtype; built on first use, never saved."""
        table = self._rotary
        if table is None or table[0].dtype != self.dtype or table[0].device != self.device:
            positions = torch.arange(self.config.max_position_embeddings, dtype=torch.float32)
            angle = torch.outer(positions, rotary_frequencies(self.config))
            cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
            table = self._rotary = tuple(t.unsqueeze(1).to(self.device, self.dtype) for t in (cos, sin))  # type: ignore[assignment]
        return table  # type: ignore[return-value]

    def forward(self, tokens_T: Tensor, positions_T: Tensor, kv: KV, layers: Sequence[int] | None = None) -> Tensor:
        """Final hidden states [T, C] of packed ``tokens_T`` (int64 [T]) at ``positions_T`` (int64 [T]), through all
        layers or those numbered in ``layers`` only.

        Positions must be below ``config.max_position_embeddings``; the index error of the table is the guard.
        """
        cos, sin = self.rotary()
        cos_T1D, sin_T1D = cos[positions_T], sin[positions_T]
        x_TC = self.embed_tokens(tokens_T)
        for layer in self.layers if layers is None else [self.layers[number] for number in layers]:
            x_TC = layer(x_TC, cos_T1D, sin_T1D, kv)
        return self.norm(x_TC)

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] in float32 over the full vocabulary."""
        return self.lm_head(hidden_TC).float()


class _Uninitialised(TorchFunctionMode):
    """While it lasts, ``torch.nn.init`` does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def skeleton(config: LlamaConfig) -> Llama:
    """A module without memory, on torch's meta device. First values are not drawn either: there, drawing them would
    import torch's compiler, which takes longer than to load a small model."""
    with torch.device("meta"), _Uninitialised():
        return Llama(config)


def allocate(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a skeleton's parameters memory, with no values yet. One that has two names stays one parameter.

    ``Module.to_empty`` would import torch's compiler as well, and allocate before the type is known.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
            setattr(module, name, made[parameter])
