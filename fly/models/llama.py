"""The decoder as a plain ``nn.Module``: a Llama, or another family if the configuration names one. Knows nothing of
caches, batching, policies or ranks.

Shape legend: T packed tokens, P positions, H query heads, G key/value heads, D head width, C hidden width, X gate and
up side by side, U the tokens of a trimmed head, V vocabulary.

The model reads one flat list of tokens with their positions. Tokens interact only in ``kv.attend(layer, q, k, v)``. The
``kv`` object knows which tokens form a sequence and what came before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fly.models.config import LlamaConfig
from fly.ops import spread

__all__ = ["KV", "DenseCausal", "LayerLoop", "LayerOps", "Llama", "allocate", "skeleton"]


class KV(Protocol):
    """The part of a KV cache that a forward uses."""

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store a layer's keys and values. Return the attention [T, H, D] of each packed token over its own sequence up
        to and including itself, or over the last ``window`` tokens of this. ``scale`` multiplies the products of
        queries and keys; None means D ** -0.5."""
        ...


class DenseCausal:
    """Attention over ``batch`` new sequences of ``length`` tokens each, without a cache, for training and reference
    checks."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length

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
        mask = None
        if window is not None and window < self.length:
            mask = torch.ones(self.length, self.length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)


def rotary_frequencies(config: LlamaConfig, which: int = 0) -> Tensor:
    """Return the angular frequencies [D/2] of one of ``config.ropes``, float32, in radians per position.

    ``linear`` divides all frequencies by the factor. ``llama3`` divides those with wavelengths beyond the original
    context, and blends those near it (Llama 3.1 release, ``rope_scaling``). ``yarn`` blends by the number of turns of a
    wave within the original context (arXiv 2309.00071, section 3.2). ``dynamic`` begins after the context, so it
    changes nothing here.
    """
    theta, scaling = config.ropes[which]
    # RoFormer (arXiv 2104.09864), section 3.2.2: wave i turns by theta^(-2i/D) radians per position.
    width = config.head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequency = 1.0 / (theta**exponent)
    if scaling.rope_type in ("default", "dynamic"):
        return frequency
    if scaling.rope_type == "linear":
        return frequency / scaling.factor
    if scaling.rope_type == "yarn":
        # Keep the frequency of waves with more than beta_fast turns, and divide it for fewer than beta_slow turns.

        def place(turns: float) -> float:  # index of the wave with this many turns in the original context
            length = scaling.original_max_position_embeddings / (2 * math.pi * turns)
            return width * math.log(length) / (2 * math.log(theta))

        low, high = place(scaling.beta_fast), place(scaling.beta_slow)
        low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        stretched = (torch.arange(width // 2).float() - low) / (high - low or 0.001)
        keep = 1 - stretched.clamp(0, 1)
    else:
        # llama3: the kept fraction is linear in the number of turns within the original context.
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    # Blend the original frequency with the divided one.
    return frequency * (keep + (1 - keep) / scaling.factor)


def rotary_tables(config: LlamaConfig) -> list[tuple[Tensor, Tensor]]:
    """Return the cosines and sines [P, D/2] of the angles of every position, float32, for each of ``config.ropes``."""
    tables = []
    for number, (_, scaling) in enumerate(config.ropes):
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angle = torch.outer(positions, rotary_frequencies(config, number))
        tables.append((angle.cos() * scaling.table_scale, angle.sin() * scaling.table_scale))
    return tables


def signed_tables(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the cosines and sines [P, 1, D] that ``rotate`` takes, for each of ``config.ropes``."""
    tables = []
    for cos, sin in rotary_tables(config):
        cos_P1D = torch.cat([cos, cos], -1).unsqueeze(1).to(device, dtype)
        sin_P1D = torch.cat([-sin, sin], -1).unsqueeze(1).to(device, dtype)
        tables.append((cos_P1D, sin_P1D))
    return tables


class Norm(nn.RMSNorm):
    """Root mean square norm (arXiv 1910.07467). Its factors are ``offset`` plus the weights in the checkpoint.
    ``scale`` multiplies the result. The last norm uses it to scale the logits."""

    def __init__(self, width: int, config: LlamaConfig, scale: float = 1.0) -> None:
        super().__init__(width, eps=config.rms_norm_eps)
        self.offset, self.scale = config.traits.norm_offset, scale

    def factors(self) -> Tensor:
        """Return the factors that multiply the normalised values, float32 [C]."""
        factors = self.weight.float() + self.offset
        return factors if self.scale == 1 else factors * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset and self.scale == 1:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, self.factors(), self.eps).to(x.dtype)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Apply the rotary embedding (RoFormer) in the half-split layout of the published checkpoints.

    The first half of ``sin`` is negated, so that swapping the halves of ``x`` needs no negation.
    """
    half = x_THD.shape[-1] // 2
    return torch.addcmul(x_THD * cos_T1D, x_THD.roll(half, -1), sin_T1D)


class LayerOps:
    """The operations of a layer between its matrix products, one after the other. A backend that fuses several of them
    into one kernel replaces the layers' ``ops`` (``fly.backends.cuda.fused``)."""

    def attend(self, attention: Attention, kv: KV, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """Return the attention output [T, H * D] for a layer's normalised input."""
        return attention.attend(kv, *attention.project(x_TC, cos_T1D, sin_T1D))

    def add_norm(self, norm: Any, x_TC: Tensor, out_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of ``x`` and ``out``, and its norm."""
        x_TC = x_TC + out_TC
        return x_TC, norm(x_TC)

    def gate(self, both_TX: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up. Gate and up are the two halves of the last dimension."""
        gate, up = both_TX.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


class Attention(nn.Module):
    """Grouped-query attention. The query, key and value projections are one matrix (rows q, then k, then v).
    ``project`` applies it before the cache attends (``KV``). The output projection comes after."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.window, self.scale = config.windows[layer], config.attention_scale
        width, bias = config.head_dim, config.attention_bias
        outputs = (self.heads + 2 * self.kv_heads) * width
        self.qkv_proj = nn.Linear(config.hidden_size, outputs, bias=bias or config.traits.qkv_bias)
        self.o_proj = nn.Linear(self.heads * width, config.hidden_size, bias=bias)
        self.normalised = config.traits.query_norm != "none"
        self.over_all_heads = config.traits.query_norm == "whole"
        if self.normalised:
            head_counts = (self.heads, self.kv_heads) if self.over_all_heads else (1, 1)
            self.q_norm, self.k_norm = (Norm(count * width, config) for count in head_counts)

    def project(self, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [T, H, D], rotated keys [T, G, D] and values [T, G, D]."""
        qkv = self.qkv_proj(x_TC).unflatten(-1, (-1, self.head_dim))
        rotated = self.heads + self.kv_heads
        qk = qkv[:, :rotated]
        if self.normalised:
            qk = self._normalise(qk)
        qk = rotate(qk, cos_T1D, sin_T1D)
        return qk[:, : self.heads], qk[:, self.heads :], qkv[:, rotated:]

    def keys_and_values(self, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same keys and values as ``project``, [T, G, D] each, without computing queries."""
        first, linear = self.heads * self.head_dim, self.qkv_proj
        kv = F.linear(x_TC, linear.weight[first:], None if linear.bias is None else linear.bias[first:])
        k_TGD, v_TGD = kv.unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(1)
        if self.normalised:
            k_TGD = self._normed(self.k_norm, k_TGD)
        return rotate(k_TGD, cos_T1D, sin_T1D), v_TGD

    def _normalise(self, qk: Tensor) -> Tensor:
        """Normalise queries and keys, head by head or all heads at once, each with its own weights."""
        if self.over_all_heads or not torch.compiler.is_compiling():
            parts = qk[:, : self.heads], qk[:, self.heads :]
            return torch.cat([self._normed(norm, part) for norm, part in zip((self.q_norm, self.k_norm), parts)], 1)
        # When compiled, normalise queries and keys together, in one kernel instead of two, without rounding in between.
        query_H1 = (torch.arange(qk.shape[1], device=qk.device) < self.heads).unsqueeze(1)
        weight_HD = torch.where(query_H1, self.q_norm.weight, self.k_norm.weight).float() + self.q_norm.offset
        return (F.rms_norm(qk.float(), (self.head_dim,), eps=self.q_norm.eps) * weight_HD).to(qk.dtype)

    def _normed(self, norm: Norm, x_THD: Tensor) -> Tensor:
        return norm(x_THD.flatten(1)).view_as(x_THD) if self.over_all_heads else norm(x_THD)

    def attend(self, kv: KV, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Return the attention output [T, H * D] over all keys and values that ``kv`` stores for this layer."""
        return kv.attend(self.layer, q_THD, k_TGD, v_TGD, self.window, self.scale).flatten(1)


class FeedForward(nn.Module):
    """A gated linear unit with SiLU or GELU; the gate and up projections are one matrix (rows gate, then up)."""

    ops = LayerOps()

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = config.traits.activation

    def forward(self, x_TC: Tensor) -> Tensor:
        return self.down_proj(self.ops.gate(self.gate_up_proj(x_TC), self.activation))


class Layer(nn.Module):
    """Attention and feed-forward. A norm precedes each, unless the family has no ``input_norms``. With ``output_norms``
    a norm also follows each. Names are those of checkpoints, so ``post_attention_layernorm`` follows the attention if
    there are ``output_norms``, and otherwise precedes the feed-forward."""

    ops = LayerOps()

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.rope = int(len(config.ropes) > 1 and config.windows[layer] is not None)
        self.output_norms, self.residual = config.traits.output_norms, config.residual_multiplier
        before = config.traits.input_norms
        self.input_layernorm = Norm(width, config) if before else nn.Identity()
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(width, config)
        if self.output_norms:
            self.pre_feedforward_layernorm = Norm(width, config) if before else nn.Identity()
            self.post_feedforward_layernorm = Norm(width, config)
        self.mlp = FeedForward(config)

    def norms(self) -> list[Any]:
        """Return the norms before attention and feed-forward (identities without ``input_norms``), then the norms after
        attention and feed-forward, if the family has them."""
        if not self.output_norms:
            return [self.input_layernorm, self.post_attention_layernorm]
        after = [self.post_attention_layernorm, self.post_feedforward_layernorm]
        return [self.input_layernorm, self.pre_feedforward_layernorm, *after]

    def prepare_attention(self, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the attention: queries [T, H, D], keys and values [T, G, D]."""
        return self.self_attn.project(self.input_layernorm(x_TC), cos_T1D, sin_T1D)

    def finish(self, x_TC: Tensor, attended_TC: Tensor) -> Tensor:
        """Compute the rest of the layer from its input and the attention output (heads concatenated)."""
        _, before_mlp, *after = self.norms()
        out_TC = self.self_attn.o_proj(attended_TC)
        out_TC = self._scaled(after[0](out_TC) if after else out_TC)
        x_TC, normed_TC = self.ops.add_norm(before_mlp, x_TC, out_TC)
        out_TC = self.mlp(normed_TC)
        return x_TC + self._scaled(after[1](out_TC) if after else out_TC)

    def _scaled(self, out_TC: Tensor) -> Tensor:
        return out_TC if self.residual == 1 else out_TC * self.residual

    def forward(self, x_TC: Tensor, rotary: Sequence[tuple[Tensor, Tensor]], kv: KV) -> Tensor:
        attended_TC = self.ops.attend(self.self_attn, kv, self.input_layernorm(x_TC), *rotary[self.rope])
        return self.finish(x_TC, attended_TC)


# Runs all layers and the last norm on hidden states [T, C], with the tokens' rotary tables and the cache.
LayerLoop = Callable[[Sequence[Layer], Norm, Tensor, Sequence[tuple[Tensor, Tensor]], KV], Tensor]


def run_layers(
    layers: Sequence[Layer], norm: Norm, x_TC: Tensor, rotary: Sequence[tuple[Tensor, Tensor]], kv: KV
) -> Tensor:
    """Run the layers one by one, without compilation. This is the usual ``LayerLoop``."""
    for layer in layers:
        x_TC = layer(x_TC, rotary, kv)
    return norm(x_TC)


def record_states(states: dict[int, Tensor]) -> LayerLoop:
    """Return a ``LayerLoop`` that also stores hidden states: for each key n of ``states``, the residual stream [T, C]
    after n layers; 0 is the embedding."""

    def through(
        layers: Sequence[Layer], norm: Norm, x_TC: Tensor, rotary: Sequence[tuple[Tensor, Tensor]], kv: KV
    ) -> Tensor:
        for number, layer in enumerate(layers):
            if number in states:
                states[number] = x_TC
            x_TC = layer(x_TC, rotary, kv)
        if len(layers) in states:
            states[len(layers)] = x_TC
        return norm(x_TC)

    return through


def embedding_scale(config: LlamaConfig, dtype: torch.dtype) -> float:
    """Return the factor on the embeddings. If it is the square root of their width, it is rounded to the dtype of the
    weights."""
    if not config.traits.scaled_embedding:
        return config.embedding_multiplier
    return torch.tensor(config.hidden_size**0.5, dtype=dtype).item()


class Llama(nn.Module):
    """The decoder. Parameters have Hugging Face's names, except the fused ``qkv_proj`` and ``gate_up_proj``."""

    rounded = False  # whether its matrices are int8 weights (fly.backends.int8)
    kept: list[int] | None = None  # the tokens for which the head has rows (fly.models.trimmed); None: all

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config, 1 / config.logits_scaling)
        self.scales_embedding = config.traits.scaled_embedding or config.embedding_multiplier != 1
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._rotary: list[tuple[Tensor, Tensor]] = []
        self._kept_U: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def rotary(self) -> list[tuple[Tensor, Tensor]]:
        """Return tables ``(cos, sin)`` [P, 1, D] in the model's dtype, for each of ``config.ropes``. The first call
        builds them, and the first after a change of dtype or device. They are never saved."""
        tables = self._rotary
        if not tables or tables[0][0].dtype != self.dtype or tables[0][0].device != self.device:
            tables = self._rotary = signed_tables(self.config, self.dtype, self.device)
        return tables

    def forward(self, tokens_T: Tensor, positions_T: Tensor, kv: KV, through: LayerLoop = run_layers) -> Tensor:
        """Return the final hidden states [T, C] of packed ``tokens_T`` (int64 [T]) at ``positions_T`` (int64 [T]).
        ``through`` runs the layers; ``fly.models.compiled`` has a faster one.

        Positions must be below ``config.max_position_embeddings``. Otherwise the table lookup raises ``IndexError``.
        """
        rotary = [(cos[positions_T], sin[positions_T]) for cos, sin in self.rotary()]
        x_TC = self.embed_tokens(tokens_T)
        if self.scales_embedding:
            x_TC = x_TC * embedding_scale(self.config, self.dtype)
        layers: Any = self.layers
        return through(layers, self.norm, x_TC, rotary, kv)

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Return the logits [T, V] over the full vocabulary, float32; -inf for tokens that are not ``kept``."""
        logits_TU = self.lm_head(hidden_TC).float()
        return logits_TU if self.kept is None else self.spread(logits_TU)

    def spread(self, logits_TU: Tensor) -> Tensor:
        """Spread logits [T, U] of the ``kept`` tokens over the full vocabulary [T, V]."""
        if self._kept_U is None or self._kept_U.device != logits_TU.device:
            self._kept_U = torch.tensor(self.kept, device=logits_TU.device)
        return spread(logits_TU, self._kept_U, self.config.vocab_size)


class _Uninitialised(TorchFunctionMode):
    """Makes the functions of ``torch.nn.init`` do nothing while it is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def skeleton(config: LlamaConfig) -> Llama:
    """Build a model without memory, on torch's meta device. Draw no initial values: on the meta device, torch would
    import its compiler for this, which takes longer than loading a small model."""
    with torch.device("meta"), _Uninitialised():
        return Llama(config)


def weight_bytes(config: LlamaConfig, itemsize: int, narrow: bool = False) -> int:
    """Return the size of a model's weights in memory, in bytes. With ``narrow`` its matrices are rounded to 8 bits,
    except an embedding that is not also the head."""
    count = sum(parameter.numel() for parameter in skeleton(config).parameters())
    if not narrow:
        return count * itemsize
    return count + (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * (itemsize - 1))


Replaced = list[tuple[nn.Module, str, nn.Parameter]]  # a module, the name of its parameter, and the old parameter


def replace_parameters(model: nn.Module, values: Callable[[nn.Parameter], Tensor | None]) -> Replaced:
    """Replace each parameter by a new one with the values that ``values`` returns for it. None keeps the old parameter.
    A parameter with two names stays one parameter. Return the replaced parameters."""
    replacements: dict[nn.Parameter, Tensor | None] = {}
    replaced = []
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in replacements:
                new = values(parameter)
                replacements[parameter] = None if new is None else nn.Parameter(new, parameter.requires_grad)
            if replacements[parameter] is not None:
                replaced.append((module, name, parameter))
                setattr(module, name, replacements[parameter])
    return replaced


def allocate(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Allocate memory for a skeleton's parameters, without setting values. ``Module.to_empty`` would import torch's
    compiler, and allocate before the dtype is known."""
    replace_parameters(model, lambda parameter: torch.empty(parameter.shape, dtype=dtype, device=device))
