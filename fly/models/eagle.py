"""EAGLE-3 draft heads (arXiv 2503.01840), which draft token after token from the target's hidden states, and P-EAGLE
heads (arXiv 2602.01469), which draft a block in one forward. This module has their configuration, module and
checkpoints. Knows nothing of caches, sampling or drafting.

Heads are published in two layouts. The paper's code has one flat configuration of architecture
``LlamaForCausalLMEagle3``, and calls the first layer ``midlayer``. The package ``speculators`` keeps the layers'
configuration in ``transformer_layer_config``, and calls the first layer ``layers.0``.

Shape legend: T packed tokens, F hidden states of the target side by side, C hidden width of the head, U draft
vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from fly.errors import explain
from fly.models.config import CheckpointError, LlamaConfig, json_object, read_json
from fly.models.heads import (
    EAGLE3,
    LAYER,
    MASK_IDS,
    PEAGLE,
    TrainedHead,
    check_built,
    count_of,
    find_mask_id,
    flag_of,
    kind_of,
    layer_config,
    read_tensors,
)
from fly.models.llama import KV, Attention, FeedForward, Layer, Norm
from fly.models.loading import resolve_dtype

__all__ = ["Eagle3Head", "HeadConfig", "HeadLayer", "load_head", "save_head"]

_FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
_STATES = "eagle_aux_hidden_state_layer_ids"
_FIELDS = {
    "": {*_FLAGS, *MASK_IDS, _STATES, "mlp_bias"},
    LAYER: {"mlp_bias"},
    "eagle_config": {_STATES, "parallel_draft_heads_num_layers"},
}


class HeadConfig(BaseModel):
    """Sizes and options of a head.

    ``layer`` describes the head's decoder layers; its ``vocab_size`` is the target's. An EAGLE-3 head has one layer. A
    P-EAGLE head may have more, and has a ``mask_token_id``, which stands for tokens not known yet. It was trained to
    draft ``drafts`` tokens at once, if that is known. ``states`` lists the target's layers after which the head takes
    hidden states; None means the default of ``states_of``. The flags are those of ``speculators``:

    - ``norm_before_residual``: the residual stream begins with the normalised feature.
    - ``norm_before_fc``, ``fc_norm``: the hidden states are normalised before ``fc``, all at once or each separately.
    - ``norm_output``: the feature for the next step is normalised.

    Raises ``pydantic.ValidationError`` (a ``ValueError``) for sizes that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: LlamaConfig
    draft_vocab_size: int = Field(gt=0)
    target_hidden_size: int = Field(gt=0)
    states: tuple[int, ...] | None = Field(default=None, min_length=1)
    mask_token_id: int | None = Field(default=None, ge=0)
    drafts: int | None = Field(default=None, gt=0)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @model_validator(mode="after")
    def _fits(self) -> HeadConfig:
        if self.draft_vocab_size > self.layer.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.layer.vocab_size}")
        if self.mask_token_id is None and self.layer.num_hidden_layers != 1:
            raise ValueError(f"a head of {self.layer.num_hidden_layers} layers is not supported; it must have 1")
        if self.mask_token_id is not None and self.mask_token_id >= self.layer.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside {self.layer.vocab_size} tokens")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; set at most one of them")
        return self

    @property
    def inputs(self) -> int:
        """The number of hidden states that the head takes from the target at each position."""
        return 3 if self.states is None else len(self.states)

    @property
    def some_layers(self) -> int:
        """A number of layers that a target may have."""
        return 8 if self.states is None else max(*self.states, 1)

    def states_of(self, layers: int) -> tuple[int, ...]:
        """Return the layers after which the head takes hidden states, for a target with ``layers`` layers. If the head
        does not state them, they are the layers that the paper's code uses. Raises ``ValueError`` if the target has too
        few layers for these."""
        usual = 2, layers // 2, layers - 3
        if self.states is None and (min(usual) < 0 or len(set(usual)) < 3):
            raise ValueError(
                f"the head does not say after which layers it takes hidden states ({_STATES}), and the usual "
                f"{list(usual)} do not fit a target of {layers} layers"
            )
        return usual if self.states is None else self.states

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str = "config.json") -> HeadConfig:
        """Read the dictionary of a head's ``config.json``, in either layout. Raises ``CheckpointError``."""
        check_built(raw, (EAGLE3, PEAGLE), _FIELDS, source)
        layer = layer_config(raw, source)
        mask = find_mask_id(raw)
        if kind_of(raw) == PEAGLE and mask is None:
            raise CheckpointError(f"{source}: mask_token_id is missing, which a P-EAGLE head needs")
        try:
            return cls(
                layer=layer,
                draft_vocab_size=count_of(raw, "draft_vocab_size", layer.vocab_size),
                target_hidden_size=count_of(raw, "target_hidden_size", layer.hidden_size),
                states=_stated(raw, source),
                mask_token_id=mask,
                drafts=None if mask is None else _drafts(raw, source),
                **{name: flag_of(raw, name, False, source) for name in _FLAGS},
            )
        except ValidationError as error:
            raise CheckpointError(f"{source}: {explain(error)}") from error

    def to_hf(self, dtype: str, **extra: Any) -> dict[str, Any]:
        """Return the flat ``config.json`` of the head, with ``extra`` added."""
        raw = {**self.layer.to_hf(dtype), "architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
        raw |= {"draft_vocab_size": self.draft_vocab_size, "target_hidden_size": self.target_hidden_size}
        raw |= {name: True for name in _FLAGS if getattr(self, name)}
        raw |= {} if self.mask_token_id is None else {"mask_token_id": self.mask_token_id}
        raw |= {} if self.drafts is None else {"num_speculative_tokens": self.drafts}
        return raw | ({} if self.states is None else {_STATES: list(self.states)}) | extra


def _stated(raw: dict[str, Any], source: str) -> tuple[int, ...] | None:
    """Return the layers after which the configuration takes hidden states. Layers in ``eagle_config`` count from 0, so
    add 1 to them."""
    lists = dict[int, list[int]]()  # by what is added to each number
    for offset, part in ((0, raw), (1, json_object(raw, "eagle_config", source))):
        if (layers := part.get(_STATES)) is None:
            continue
        if not isinstance(layers, list) or not all(type(number) is int and number >= 0 for number in layers):
            raise CheckpointError(f"{source}: {_STATES} must list numbers of layers, got {layers!r}")
        lists[offset] = [number + offset for number in layers]
    if len(lists) == 2 and lists[0] != lists[1]:
        raise CheckpointError(
            f"{source}: {_STATES} {lists[0]} and that of eagle_config, which counts from 0, disagree: the latter are "
            f"{lists[1]} here"
        )
    return next(map(tuple, lists.values()), None)


def _drafts(raw: dict[str, Any], source: str) -> int | None:
    """Return how many tokens the configuration says to draft, if it does."""
    for proposal in json_object(raw, "speculators_config", source).get("proposal_methods") or ():
        if isinstance(proposal, dict) and "speculative_tokens" in proposal:
            return int(proposal["speculative_tokens"])
    return raw.get("num_speculative_tokens")


class HeadLayer(nn.Module):
    """The first layer, which computes queries, keys and values from the concatenated embedding and feature."""

    rope = 0  # the number of its rotary tables

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        layer = config.layer
        width = layer.hidden_size
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm, self.input_layernorm = Norm(width, layer), Norm(width, layer)
        self.self_attn = Attention(layer, 0)
        qkv = self.self_attn.qkv_proj
        self.self_attn.qkv_proj = nn.Linear(2 * width, qkv.out_features, bias=qkv.bias is not None)
        self.post_attention_layernorm = Norm(width, layer)
        self.mlp = FeedForward(layer)

    def norms(self) -> list[Norm]:
        """Return the norms of the embedding and before feed-forward."""
        return [self.input_layernorm, self.post_attention_layernorm]

    def forward(self, embedded_TC: Tensor, x_TC: Tensor, rotary: tuple[Tensor, Tensor], kv: KV) -> Tensor:
        normed_TC = self.hidden_norm(x_TC)
        x_TC = normed_TC if self.norm_before_residual else x_TC
        inputs_TC = torch.cat([self.input_layernorm(embedded_TC), normed_TC], -1)
        attended_TC = self.self_attn.attend(kv, *self.self_attn.project(inputs_TC, *rotary))
        x_TC = x_TC + self.self_attn.o_proj(attended_TC)
        return x_TC + self.mlp(self.post_attention_layernorm(x_TC))


class Eagle3Head(TrainedHead):
    """The head. Parameters have the names of ``speculators``, except the fused ``qkv_proj`` and ``gate_up_proj``.

    With the token at position i, the head reads the target's hidden states at position i - 1 (``fuse``), or its own
    feature at i - 1 if those are not known yet. It computes the feature at position i. The ``logits`` of this feature
    predict the next token.

    A P-EAGLE head never reads its own features. The tokens not known yet are mask tokens, each with ``mask_hidden`` in
    place of hidden states.
    """

    mask_hidden: Tensor

    def __init__(self, config: HeadConfig, embedding: bool = True) -> None:
        layer = config.layer
        super().__init__(layer, config.draft_vocab_size, embedding)
        self.config, width = config, layer.hidden_size
        input_width = config.inputs * config.target_hidden_size
        self.input_norm = Norm(input_width, layer) if config.norm_before_fc else None
        norms = (Norm(config.target_hidden_size, layer) for _ in range(config.inputs))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(input_width, width, bias=False)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, input_width))
        plain = (Layer(layer, number) for number in range(1, layer.num_hidden_layers))
        self.layers = nn.ModuleList([HeadLayer(config), *plain])
        self.norm = Norm(width, layer)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)

    def fuse(self, states_TF: Tensor) -> Tensor:
        """Reduce the target's hidden states to features [T, C]."""
        states_TF = states_TF.to(self.device, self.dtype)
        if self.input_norm is not None:
            states_TF = self.input_norm(states_TF)
        if self.fc_norm is not None:
            # Normalise each state by its own norm. ``chunk`` would not do: on the tensors without values by which the
            # memory of CUDA rounds is measured, it raises an error in inference mode.
            parts = states_TF.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            states_TF = torch.cat([norm(part_TC) for norm, part_TC in zip(self.fc_norm, parts)], -1)
        fused_TC: Tensor = self.fc(states_TF)
        return fused_TC

    def forward(self, tokens_T: Tensor, x_TC: Tensor, positions_T: Tensor, kv: KV) -> Tensor:
        """Return the features [T, C] at packed ``tokens_T`` (int64, the target's ids), from the features ``x_TC`` at
        the token before each."""
        rotary = self.rotary(positions_T)
        first, *later_layers = self.layers
        x_TC = first(self.embed(tokens_T), x_TC, rotary, kv)
        for layer in later_layers:
            x_TC = layer(x_TC, [rotary], kv)
        return self.norm(x_TC) if self.config.norm_output else x_TC

    def logits(self, x_TC: Tensor) -> Tensor:
        """Return the logits [T, U] over the draft vocabulary, float32."""
        logits_TU: Tensor = self.lm_head(x_TC if self.config.norm_output else self.norm(x_TC))
        return logits_TU.float()


def load_head(path: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Eagle3Head:
    """Load a head from a directory, without gradients. The directory has a ``config.json``, and ``model.safetensors``
    (or an index and its shards) or ``pytorch_model.bin``. If ``dtype`` is None, the configuration states it.

    Raises ``CheckpointError`` that names the tensors that are missing, surplus, misshapen or contradictory.
    """
    raw = read_json(path / "config.json")
    config, tensors = HeadConfig.from_hf(raw, str(path / "config.json")), read_tensors(path)
    head = Eagle3Head(config, embedding="embed_tokens.weight" in tensors)
    head.to(device, dtype or resolve_dtype("auto", raw))
    if (
        mask := tensors.get("mask_hidden")
    ) is not None and mask.ndim < 3:  # engines also store it with fewer dimensions
        tensors["mask_hidden"] = mask.reshape(1, 1, -1)
    head.fill(path, tensors, "midlayer." if any(key.startswith("midlayer.") for key in tensors) else "layers.0.")
    return head


def save_head(head: Eagle3Head, directory: str | Path, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the layout of the paper's code; ``extra`` is added to the
    configuration. An embedding shared with the target is left out."""
    config = head.config.to_hf(str(dtype).removeprefix("torch."), **extra)
    head.save(directory, config, dtype, "midlayer.")
