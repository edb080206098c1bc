"""DFlash draft heads (arXiv 2602.06036), which draft a whole block of tokens in one forward, and DSpark heads, which
also correct each token by the one before it. This module has their configuration, modules and checkpoints. Knows
nothing of caches, sampling or drafting.

A head sees the text through the target's hidden states alone: ``fuse`` reduces those of each token to a context
feature, and every layer computes keys and values from the same features (``read``). A block is the last token of the
text, the anchor, and mask tokens after it. ``forward`` computes all its places at once. Each place attends to the
context before the anchor and to the block.

Heads are published in three formats. z-lab's has the sizes at the top of ``config.json`` and the rest in
``dflash_config``; so has SpecForge's. DeepSpec's has all fields at the top. The package ``speculators`` keeps the
layers' configuration in ``transformer_layer_config``.

Shape legend: T packed tokens, B rows, K places of a block, F hidden states of the target side by side, C hidden width
of the head, R rank of the Markov head, U draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from collections import abc
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn

from fly.errors import explain
from fly.models.config import CheckpointError, LlamaConfig, json_object, read_json
from fly.models.families import FULL, SLIDING
from fly.models.heads import (
    DFLASH,
    MASK_IDS,
    TrainedHead,
    check_built,
    count_of,
    find_mask_id,
    flag_of,
    layer_config,
    read_tensors,
)
from fly.models.llama import KV, Layer, Norm
from fly.models.loading import resolve_dtype

__all__ = ["BlockKV", "Corrected", "DFlashConfig", "DFlashHead", "MarkovHead", "load_dflash_head", "save_dflash_head"]

Markov = Literal["vanilla", "gated", "rnn"]
# The fields that are read at the top or in ``dflash_config``, and those that are read at the top alone. A weight of a
# training (``confidence_head_alpha``) says whether there is a confidence head.
_READ = {
    "target_layer_ids",
    "num_target_layers",
    "block_size",
    "is_causal",
    "causal",
    "sample_from_anchor",
    "markov_rank",
}
_READ |= {"markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"}
_READ_AT_TOP = {*MASK_IDS, "aux_hidden_state_layer_ids", "sliding_window_non_causal"}
_FIELDS = {"dflash_config": {"mask_token_id", *_READ}, "": _READ | _READ_AT_TOP}
# Other names of tensors, as some checkpoints have them.
_RENAMED = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "",
}


class DFlashConfig(BaseModel):
    """Sizes and options of a DFlash or DSpark head.

    Args:
        layer: describes the head's layers, which are those of Qwen3; its ``vocab_size`` is the target's.
        target_layers: how many layers the target has, if the configuration states it.
        states: the target's layers after which the head takes hidden states (0 is the embedding); None means the
            default of ``states_of``.
        block_size: places of a block, the anchor included.
        mask_token_id: the token at all places but the anchor's.
        anchor_first: the output layout. True: place k predicts the token after it, so a block gives ``block_size``
            drafts. False: place k predicts its own token, and the anchor's place predicts nothing.
        causal: for each layer, whether a place of the block sees no place after it.
        anchored: whether the window of a sliding layer counts from the anchor: all places see the last tokens of the
            context, and the whole block (``speculators``). Otherwise it counts from each place, in both directions and
            with the place itself (z-lab's code, SpecForge).
        markov: the kind of DSpark's Markov head; None: there is none. ``markov_rank`` is its rank.
        confidence: whether there is a confidence head. ``confidence_with_markov``: it also reads the token before.

    Raises ``pydantic.ValidationError`` (a ``ValueError``) for sizes that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: LlamaConfig
    draft_vocab_size: int = Field(gt=0)
    target_hidden_size: int = Field(gt=0)
    target_layers: int | None = Field(default=None, gt=0)
    states: tuple[int, ...] | None = Field(default=None, min_length=1)
    block_size: int = Field(gt=0)
    mask_token_id: int = Field(ge=0)
    anchor_first: bool = False
    causal: tuple[bool, ...]
    anchored: bool = True
    markov: Markov | None = None
    markov_rank: int = Field(default=0, ge=0)
    confidence: bool = False
    confidence_with_markov: bool = False

    @model_validator(mode="after")
    def _fits(self) -> DFlashConfig:
        size = self.layer.vocab_size
        if self.draft_vocab_size > size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {size}")
        if self.mask_token_id >= size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside {size} tokens")
        if self.drafts < 1:
            raise ValueError(f"block_size {self.block_size} drafts no token: the anchor's place predicts nothing")
        if len(self.causal) != self.layer.num_hidden_layers:
            raise ValueError(f"causal lists {len(self.causal)} layers, the head has {self.layer.num_hidden_layers}")
        if (self.markov is not None) != (self.markov_rank > 0):
            raise ValueError(f"markov_head_type {self.markov!r} does not fit markov_rank {self.markov_rank}")
        if self.confidence_with_markov and self.markov is None:
            raise ValueError("confidence_head_with_markov needs a markov_rank above 0")
        return self

    @property
    def drafts(self) -> int:
        """The number of tokens that a block drafts."""
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def inputs(self) -> int:
        """The number of hidden states that the head takes from the target at each position."""
        return self.layer.num_hidden_layers if self.states is None else len(self.states)

    @property
    def some_layers(self) -> int:
        """A number of layers that a target may have."""
        usual = 4 + 3 * self.layer.num_hidden_layers if self.states is None else max(*self.states, 1)
        return self.target_layers or usual

    def states_of(self, layers: int) -> tuple[int, ...]:
        """Return the layers after which the head takes hidden states, for a target with ``layers`` layers. By default
        they are spread evenly, as in z-lab's code. Raises ``ValueError`` for a target of another depth."""
        if self.target_layers not in (None, layers):
            raise ValueError(
                f"the head is for a target of {self.target_layers} layers (num_target_layers), not {layers}"
            )
        if self.states is not None:
            return self.states
        count = self.layer.num_hidden_layers
        if count == 1:
            return (layers // 2 + 1,)
        usual = tuple(round(1 + i * (layers - 4) / (count - 1)) + 1 for i in range(count))
        if len(set(usual)) < count or min(usual) < 0:
            raise ValueError(
                f"the head does not say after which layers it takes hidden states (target_layer_ids), and the usual "
                f"{list(usual)} do not fit a target of {layers} layers"
            )
        return usual

    def sees(self, layer: int, place: Tensor, key: Tensor, anchor: Tensor | int) -> Tensor:
        """Return whether places of a block see tokens of the context, which are before its ``anchor``, or other places,
        in a layer. All are given by their positions."""
        seen = key <= place if self.causal[layer] else torch.ones_like(key <= place)
        if (window := self.layer.windows[layer]) is None:
            return seen
        return seen & (key >= anchor - window if self.anchored else (place - key).abs() < window)

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str = "config.json") -> DFlashConfig:
        """Read the dictionary of a head's ``config.json``, in any format. Raises ``CheckpointError``."""
        check_built(raw, (DFLASH,), _FIELDS, source)
        stated = {**raw, **json_object(raw, "dflash_config", source)}
        layer = layer_config(raw, source, "qwen3")
        packaged = "transformer_layer_config" in raw
        names = {*(raw.get("architectures") or [])}
        # DSpark's heads and all of DeepSpec's begin at the anchor. In ``speculators``, DSpark's have a Markov head
        # unless its rank is 0, and a confidence head. In SpecForge they have what they say.
        spark = raw.get("speculators_model_type") == "dspark" or bool(names & {"DSparkSpeculator", "DSparkDraftModel"})
        rank = count_of(stated, "markov_rank", 256 if spark and packaged else 0)
        trained = bool(stated.get("confidence_head_alpha"))
        confidence = flag_of(stated, "enable_confidence_head", (spark and packaged) or trained, source)
        if (mask := find_mask_id(raw)) is None:
            raise CheckpointError(f"{source}: mask_token_id is missing")
        try:
            return cls(
                layer=layer,
                draft_vocab_size=count_of(raw, "draft_vocab_size", layer.vocab_size),
                target_hidden_size=count_of(raw, "target_hidden_size", layer.hidden_size),
                target_layers=stated.get("num_target_layers"),
                states=_stated(stated, source),
                block_size=count_of(stated, "block_size", 8 if packaged else 16),
                mask_token_id=mask,
                anchor_first=flag_of(stated, "sample_from_anchor", spark or "Qwen3DSparkModel" in names, source),
                causal=_causal(stated, layer, packaged, source),
                anchored=packaged or not any(layer.windows),
                markov=stated.get("markov_head_type", "vanilla") if rank else None,
                markov_rank=rank,
                confidence=confidence,
                confidence_with_markov=confidence
                and flag_of(stated, "confidence_head_with_markov", spark and packaged, source),
            )
        except ValidationError as error:
            raise CheckpointError(f"{source}: {explain(error)}") from error

    def to_hf(self, dtype: str, **extra: Any) -> dict[str, Any]:
        """Return the ``config.json`` of the head in the format of ``speculators``, with ``extra`` added. Raises
        ``ValueError`` for a head that this format cannot describe."""
        if not self.anchored:
            raise ValueError("windows that count from each place have no form in config.json")
        kind = "dspark" if self.markov or self.confidence else "dflash"
        layer = {**self.layer.to_hf(dtype), "architectures": None, "tie_word_embeddings": False}
        raw: dict[str, Any] = {
            "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
            "speculators_model_type": kind,
            "transformer_layer_config": layer,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": self.anchor_first,
            "torch_dtype": dtype,
        }
        sliding = tuple(window is not None for window in self.layer.windows)
        if self.causal in (sliding, (False,) * len(sliding)):
            raw["sliding_window_non_causal"] = self.causal != sliding
        elif all(self.causal):
            raw["is_causal"] = True
        else:
            raise ValueError(f"causal {list(self.causal)} has no form in config.json")
        if self.target_layers is not None:
            raw["num_target_layers"] = self.target_layers
        if self.states is not None:
            raw["aux_hidden_state_layer_ids"] = list(self.states)
        if kind == "dspark":
            raw |= {"markov_rank": self.markov_rank, "markov_head_type": self.markov or "vanilla"}
            raw |= {"enable_confidence_head": self.confidence}
            raw |= {"confidence_head_with_markov": self.confidence_with_markov}
        return raw | extra


def _stated(stated: dict[str, Any], source: str) -> tuple[int, ...] | None:
    """Return the layers after which the configuration takes hidden states. ``speculators`` counts layers in this way.
    z-lab and DeepSpec number the layers from 0 on, and -1 is the embedding: add 1."""
    lists = dict[str, tuple[int, ...]]()
    for name, offset in (("aux_hidden_state_layer_ids", 0), ("target_layer_ids", 1)):
        if (ids := stated.get(name)) is None:
            continue
        if not isinstance(ids, list) or not all(type(number) is int and number + offset >= 0 for number in ids):
            raise CheckpointError(f"{source}: {name} must list numbers of layers, got {ids!r}")
        lists[name] = tuple(number + offset for number in ids)
    if len({*lists.values()}) > 1:
        counted, numbered = lists.values()
        raise CheckpointError(
            f"{source}: aux_hidden_state_layer_ids {list(counted)} and target_layer_ids "
            f"{[number - 1 for number in numbered]} disagree: each of the former is one more than the latter"
        )
    return next(iter(lists.values()), None)


def _causal(stated: dict[str, Any], layer: LlamaConfig, packaged: bool, source: str) -> tuple[bool, ...]:
    """Return for each layer whether places of the block see no place after them. ``is_causal`` decides for all layers,
    then ``causal`` does. Otherwise sliding layers are causal and full ones are not; ``speculators`` may say that
    sliding layers are not causal either."""
    for name in ("is_causal", "causal"):
        if stated.get(name) is not None:
            return (flag_of(stated, name, False, source),) * layer.num_hidden_layers
    sliding = not (packaged and flag_of(stated, "sliding_window_non_causal", False, source))
    return tuple(kind == SLIDING and sliding for kind in layer.layer_types or (FULL,) * layer.num_hidden_layers)


class BlockKV(KV, Protocol):
    """The part of a KV cache that a head uses. ``attend`` is called with the places of blocks; what each place sees is
    this object's to know (``DFlashConfig.sees``)."""

    def store(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> object:
        """Store keys and values of the context."""


class Corrected(NamedTuple):
    """What the heads of DSpark say of one place of each block."""

    logits_BU: Tensor  # float32, corrected by the token before
    chance_B: Tensor | None  # how likely the token is to be kept; None: there is no confidence head
    state_BR: Tensor | None  # the state after the place, of a recurrent Markov head


class MarkovHead(nn.Module):
    """Corrects the logits of a place by the token before it: adds ``W2 · W1[token]`` (DSpark). ``gated`` multiplies the
    token's row of W1 by a gate over the place's hidden state. ``rnn`` keeps a state over the places of a block."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.layer.hidden_size
        self.markov_w1 = nn.Embedding(config.layer.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if config.markov == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if config.markov == "rnn" else None

    def forward(self, hidden_BC: Tensor, before_BR: Tensor, state_BR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what to add to the logits [B, U], and the state after this place. ``before_BR`` are the rows of W1 for
        the tokens before it; ``state_BR`` is the state after the place before, None at the anchor's."""
        out_BR = before_BR
        if self.gate_proj is not None:
            out_BR = before_BR * self.gate_proj(torch.cat([hidden_BC, before_BR], -1)).sigmoid()
        elif self.joint_proj is not None:
            state_BR = torch.zeros_like(before_BR) if state_BR is None else state_BR
            joint = self.joint_proj(torch.cat([state_BR, before_BR, hidden_BC], -1))
            gate_BR, new_BR, out_BR = joint.chunk(3, -1)
            gate_BR, out_BR = gate_BR.sigmoid(), out_BR.tanh()
            state_BR = gate_BR * state_BR + (1 - gate_BR) * new_BR.tanh()
        return self.markov_w2(out_BR), state_BR


class ConfidenceHead(nn.Module):
    """Predicts how likely a place's token is to be kept, from its hidden state, and from the token before if
    ``confidence_with_markov`` (DSpark)."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.layer.hidden_size + config.confidence_with_markov * config.markov_rank, 1)

    def forward(self, hidden_BC: Tensor, before_BR: Tensor | None) -> Tensor:
        features = hidden_BC if before_BR is None else torch.cat([hidden_BC, before_BR], -1)
        chance_B: Tensor = self.proj(features).squeeze(-1).float().sigmoid()
        return chance_B


class DFlashHead(TrainedHead):
    """A DFlash or DSpark head. Parameters have the names of ``speculators``, except the fused ``qkv_proj`` and
    ``gate_up_proj``. A head without an embedding or output matrix of its own uses the target's.
    """

    corrections = "markov_head", "confidence_head"

    def __init__(self, config: DFlashConfig, embedding: bool = False, output: bool = False) -> None:
        layer = config.layer
        super().__init__(layer, config.draft_vocab_size, embedding)
        self.config, width = config, layer.hidden_size
        self.fc = nn.Linear(config.inputs * config.target_hidden_size, width, bias=False)
        self.hidden_norm = Norm(width, layer)
        self.layers = nn.ModuleList(Layer(layer, number) for number in range(layer.num_hidden_layers))
        self.norm = Norm(width, layer)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if output else None
        self.markov_head = MarkovHead(config) if config.markov else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def trim(self, kept: abc.Collection[int]) -> None:
        """Keep only the outputs for these ids of the target. Raises ``ValueError`` if there are none."""
        kept_ids = {*kept}
        outputs = [output for output, token in enumerate(self.to_target_U.tolist()) if token in kept_ids]
        if not outputs:
            raise ValueError(f"the head drafts none of the {len(kept)} tokens to keep")
        output_U = torch.tensor(outputs, device=self.device)
        linears: list[nn.Linear] = [] if self.lm_head is None else [self.lm_head]
        if self.markov_head is not None:
            linears.append(self.markov_head.markov_w2)
        for linear in linears:
            linear.weight = nn.Parameter(linear.weight.data[output_U], linear.weight.requires_grad)
            linear.out_features = len(outputs)
        self.to_target_U = self.to_target_U[output_U]
        self.config = self.config.model_copy(update={"draft_vocab_size": len(outputs)})

    def fuse(self, states_TF: Tensor) -> Tensor:
        """Reduce the target's hidden states to context features [T, C]."""
        context_TC: Tensor = self.hidden_norm(self.fc(states_TF.to(self.device, self.dtype)))
        return context_TC

    def read(self, context_TC: Tensor, positions_T: Tensor, kv: BlockKV) -> None:
        """Store the keys and values of context features. Every layer computes its own from the same features, without
        its input norm (arXiv 2602.06036)."""
        rotary = self.rotary(positions_T)
        layers: Any = self.layers
        for number, layer in enumerate(layers):
            kv.store(number, *layer.self_attn.keys_and_values(context_TC, *rotary))

    def forward(self, tokens_T: Tensor, positions_T: Tensor, kv: BlockKV) -> Tensor:
        """Return the hidden states [T, C] at all places of packed blocks: ``tokens_T`` (int64, the target's ids) are an
        anchor and mask tokens, at positions that follow the context."""
        rotary = [self.rotary(positions_T)]
        x_TC = self.embed(tokens_T)
        for layer in self.layers:
            x_TC = layer(x_TC, rotary, kv)
        normed_TC: Tensor = self.norm(x_TC)
        return normed_TC

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Return the logits [T, U] over the draft vocabulary, float32, before any correction. Raises ``ValueError`` if
        the output matrix is the target's."""
        if self.lm_head is None:
            raise ValueError("the head has no output matrix: the target's computes its logits")
        logits_TU: Tensor = self.lm_head(hidden_TC)
        return logits_TU.float()

    def correct(self, logits_BU: Tensor, hidden_BC: Tensor, before_B: Tensor, state_BR: Tensor | None) -> Corrected:
        """Correct the logits of one place of each block by the tokens before it. ``state_BR`` is the state after the
        place before."""
        before_BR = None if self.markov_head is None else self.markov_head.markov_w1(before_B)
        chance_B = None
        if self.confidence_head is not None:
            chance_B = self.confidence_head(hidden_BC, before_BR if self.config.confidence_with_markov else None)
        if self.markov_head is not None:
            bias_BU, state_BR = self.markov_head(hidden_BC, before_BR, state_BR)
            logits_BU = logits_BU + bias_BU.float()
        return Corrected(logits_BU, chance_B, state_BR)


def load_dflash_head(path: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> DFlashHead:
    """Load a head from a directory, without gradients. The directory has a ``config.json``, and ``model.safetensors``
    (or an index and its shards) or ``pytorch_model.bin``. If ``dtype`` is None, the configuration states it.

    Raises ``CheckpointError`` that names the tensors that are missing, surplus, misshapen or contradictory, and the
    fields of the configuration that are not supported.
    """
    raw, source = read_json(path / "config.json"), str(path / "config.json")
    config = DFlashConfig.from_hf(raw, source)
    if (path / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{path}: mask_embedding.pt is not supported; the embedding of the mask token must be used"
        )
    tensors = _renamed(read_tensors(path), config)
    # The list of layers may end with the target's last one, which only training reads.
    columns = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else 0
    if config.states is not None and columns == (config.inputs - 1) * config.target_hidden_size:
        config = config.model_copy(update={"states": config.states[:-1]})
    reduced = config.draft_vocab_size != config.layer.vocab_size
    head = DFlashHead(config, "embed_tokens.weight" in tensors, "lm_head.weight" in tensors or reduced)
    head.to(device, dtype or resolve_dtype("auto", {**json_object(raw, "transformer_layer_config", source), **raw}))
    head.fill(path, tensors)
    return head


def _renamed(tensors: dict[str, Tensor], config: DFlashConfig) -> dict[str, Tensor]:
    """Give tensors the names of ``speculators``, split fused matrices, and leave out copies of the target's tensors
    that only training reads."""
    renamed = dict[str, Tensor]()
    for key, tensor in tensors.items():
        key = key.removeprefix("model.")
        for old, new in _RENAMED.items():
            key = key.replace(old, new)
        module = (key.split(".")[-2:-1] or [""])[0]
        parts = config.layer.fused_rows.get(module, {})
        if parts and len(tensor) == sum(parts.values()):
            renamed |= {key.replace(module, part): rows for part, rows in zip(parts, tensor.split([*parts.values()]))}
        elif not key.startswith("verifier_"):
            renamed[key] = tensor
    return renamed


def save_dflash_head(
    head: DFlashHead, directory: str | Path, dtype: torch.dtype = torch.bfloat16, **extra: Any
) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the format of ``speculators``; ``extra`` is added to the
    configuration. What is shared with the target is left out."""
    head.save(directory, head.config.to_hf(str(dtype).removeprefix("torch."), **extra), dtype)
