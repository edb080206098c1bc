"""EAGLE-3 draft heads (arXiv 2503.01840): one decoder layer that drafts from the target's hidden states. This module
has their configuration, module and checkpoints. Knows nothing of caches, sampling or drafting.

Heads are published in two layouts. The paper's code has one flat configuration of architecture
``LlamaForCausalLMEagle3``, and calls the layer ``midlayer``. The package ``speculators`` keeps the layer's
configuration in ``transformer_layer_config``, and calls the layer ``layers.0``.

Shape legend: T packed tokens, F hidden states of the target side by side, C hidden width of the head, U draft
vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fly.errors import explain
from fly.models.checkpoint import check_tensors
from fly.models.config import CheckpointError, LlamaConfig, json_object, read_json
from fly.models.directory import Directory
from fly.models.families import FAMILIES
from fly.models.llama import KV, Attention, FeedForward, Norm, signed_tables
from fly.models.loading import resolve_dtype

__all__ = ["Eagle3Head", "HeadConfig", "HeadLayer", "is_head", "load_head", "save_head"]

# Architectures of heads. Configurations of ``speculators`` also state a type.
ARCHITECTURES = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"
_KIND = "eagle3"  # speculators_model_type
_FLAGS = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
_STATES = "eagle_aux_hidden_state_layer_ids"
# Values that a ``transformer_layer_config`` may leave out, because they are the defaults of transformers.
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "vocab_size": 32000, "intermediate_size": 11008},
    "qwen3": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32},
}


def is_head(path: Path) -> bool:
    """Whether the ``config.json`` in a directory describes a draft head."""
    try:
        return _names_a_head(read_json(path / "config.json"))
    except CheckpointError:
        return False  # loading it reports the error


def _names_a_head(raw: dict[str, Any]) -> bool:
    stated = raw.get("architectures")
    known = isinstance(stated, list) and any(name in ARCHITECTURES for name in stated)
    return known or raw.get("speculators_model_type") == _KIND


class HeadConfig(BaseModel):
    """Sizes and options of a head.

    ``layer`` describes the head's decoder layer; its ``vocab_size`` is the target's. ``states`` lists the target's
    layers after which the head takes hidden states; None means the default of ``states_of``. The flags are those of
    ``speculators``:

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
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @model_validator(mode="after")
    def _fits(self) -> HeadConfig:
        if self.draft_vocab_size > self.layer.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.layer.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; set at most one of them")
        return self

    @property
    def inputs(self) -> int:
        """The number of hidden states that the head takes from the target at each position."""
        return 3 if self.states is None else len(self.states)

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
        if not _names_a_head(raw):
            raise CheckpointError(
                f"{source}: architecture {raw.get('architectures') or 'missing'} is not a draft head; choices: "
                f"{[*ARCHITECTURES]}"
            )
        # ``speculators`` nests the layer's configuration and leaves out the defaults of transformers.
        own, kind = raw, raw["model_type"] if raw.get("model_type") in _DEFAULTS else "llama"
        if "transformer_layer_config" in raw:
            own = json_object(raw, "transformer_layer_config", source)
            kind = own.get("model_type", "qwen3")
            if kind not in _DEFAULTS:
                raise CheckpointError(
                    f"{source}: a head's layer of type {kind!r} is not supported; choices: {[*_DEFAULTS]}"
                )
            own = {**_DEFAULTS[kind], **own}
        own = {"num_hidden_layers": 1, **own}
        # A head has one layer. Read it as a model of its family.
        if (layers := own["num_hidden_layers"]) != 1:
            raise CheckpointError(f"{source}: a head of {layers} layers is not supported; it must have 1")
        layer = LlamaConfig.from_hf({**own, "architectures": [FAMILIES[kind].architecture]}, source)
        for name in _FLAGS:
            if not isinstance(raw.get(name, False), bool):
                raise CheckpointError(f"{source}: {name} {raw[name]!r} must be true or false")
        try:
            return cls(
                layer=layer,
                draft_vocab_size=raw.get("draft_vocab_size") or layer.vocab_size,
                target_hidden_size=raw.get("target_hidden_size") or layer.hidden_size,
                states=_stated(raw, source),
                **{name: raw.get(name, False) for name in _FLAGS},
            )
        except ValidationError as error:
            raise CheckpointError(f"{source}: {explain(error)}") from error

    def to_hf(self, dtype: str, **extra: Any) -> dict[str, Any]:
        """Return the flat ``config.json`` of the head, with ``extra`` added."""
        raw = {**self.layer.to_hf(dtype), "architectures": [ARCHITECTURES[0]], "tie_word_embeddings": False}
        raw |= {"draft_vocab_size": self.draft_vocab_size, "target_hidden_size": self.target_hidden_size}
        raw |= {name: True for name in _FLAGS if getattr(self, name)}
        return raw | ({} if self.states is None else {_STATES: list(self.states)}) | extra


def _stated(raw: dict[str, Any], source: str) -> tuple[int, ...] | None:
    """Return the layers after which the configuration takes hidden states. Layers in ``eagle_config`` count from 0, so
    add 1 to them."""
    own, nested = raw.get(_STATES), json_object(raw, "eagle_config", source).get(_STATES)
    if own is None and nested is not None:
        own = [number + 1 for number in nested] if isinstance(nested, list) else nested
    if own is None:
        return None
    if not isinstance(own, list) or not all(type(number) is int and number >= 0 for number in own):
        raise CheckpointError(f"{source}: {_STATES} must list numbers of layers, got {own!r}")
    return tuple(own)


class HeadLayer(nn.Module):
    """A decoder layer that computes queries, keys and values from the concatenated embedding and feature."""

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

    def forward(self, embedded_TC: Tensor, x_TC: Tensor, rotary: tuple[Tensor, Tensor], kv: KV) -> Tensor:
        normed_TC = self.hidden_norm(x_TC)
        x_TC = normed_TC if self.norm_before_residual else x_TC
        both = torch.cat([self.input_layernorm(embedded_TC), normed_TC], -1)
        attended_TC = self.self_attn.attend(kv, *self.self_attn.project(both, *rotary))
        x_TC = x_TC + self.self_attn.o_proj(attended_TC)
        return x_TC + self.mlp(self.post_attention_layernorm(x_TC))


class Eagle3Head(nn.Module):
    """The head. Parameters have the names of ``speculators``, except the fused ``qkv_proj`` and ``gate_up_proj``.

    With the token at position i, the head reads the target's hidden states at position i - 1 (``fuse``), or its own
    feature at i - 1 if those are not known yet. It computes the feature at position i. The ``logits`` of this feature
    predict the next token.

    ``to_target_U`` maps the draft vocabulary to the target's ids. A head without an embedding needs the target's
    (``share``).
    """

    to_target_U: Tensor

    def __init__(self, config: HeadConfig, embedding: bool = True) -> None:
        super().__init__()
        self.config, layer = config, config.layer
        width, self.shares = layer.hidden_size, not embedding  # whether it uses the target's embedding
        self.embed_tokens = nn.Embedding(layer.vocab_size, width) if embedding else None
        given = config.inputs * config.target_hidden_size
        self.input_norm = Norm(given, layer) if config.norm_before_fc else None
        norms = (Norm(config.target_hidden_size, layer) for _ in range(config.inputs))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(given, width, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config)])
        self.norm = Norm(width, layer)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("to_target_U", torch.arange(config.draft_vocab_size), persistent=False)
        self._rotary: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def share(self, weight_VC: Tensor) -> None:
        """Use the target's embedding, without training it. Raises ``ValueError`` if its shape is wrong."""
        layer = self.config.layer
        if weight_VC.shape != (layer.vocab_size, layer.hidden_size):
            raise ValueError(
                f"the head has no embedding of its own, and the target's is {list(weight_VC.shape)}, not "
                f"{[layer.vocab_size, layer.hidden_size]}"
            )
        weight = nn.Parameter(weight_VC.to(self.device, self.dtype), requires_grad=False)
        self.embed_tokens = nn.Embedding(*weight_VC.shape, _weight=weight, _freeze=True)

    def fuse(self, states_TF: Tensor) -> Tensor:
        """Reduce the target's hidden states to features [T, C]."""
        states_TF = states_TF.to(self.device, self.dtype)
        if self.input_norm is not None:
            states_TF = self.input_norm(states_TF)
        if self.fc_norm is not None:
            # Each state has a norm of its own. (``chunk`` fails in inference mode on tensors of a class of their own,
            # and the memory of CUDA rounds is measured by such.)
            parts = states_TF.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            states_TF = torch.cat([norm(part_TC) for norm, part_TC in zip(self.fc_norm, parts)], -1)
        fused_TC: Tensor = self.fc(states_TF)
        return fused_TC

    def forward(self, tokens_T: Tensor, x_TC: Tensor, positions_T: Tensor, kv: KV) -> Tensor:
        """Return the features [T, C] at packed ``tokens_T`` (int64, the target's ids), from the features ``x_TC`` at
        the token before each."""
        if self.embed_tokens is None:
            raise ValueError("the head has no embedding: call share() with the target's")
        if self._rotary is None or self._rotary[0].dtype != self.dtype or self._rotary[0].device != self.device:
            (self._rotary,) = signed_tables(self.config.layer, self.dtype, self.device)
        cos, sin = self._rotary
        x_TC = self.layers[0](self.embed_tokens(tokens_T), x_TC, (cos[positions_T], sin[positions_T]), kv)
        return self.norm(x_TC) if self.config.norm_output else x_TC

    def logits(self, x_TC: Tensor) -> Tensor:
        """Return the logits [T, U] over the draft vocabulary, float32."""
        logits_TU: Tensor = self.lm_head(x_TC if self.config.norm_output else self.norm(x_TC))
        return logits_TU.float()


def _pieces(head: Eagle3Head, layer: str) -> dict[str, Tensor]:
    """Return a head's tensors by their names in checkpoints, where its layer is called ``layer``. Fused matrices are
    split."""
    found = {}
    for name, parameter in head.named_parameters():
        module = name.split(".")[-2]
        parts = head.config.layer.fused_rows.get(module, {module: len(parameter)})
        for part, rows in zip(parts, parameter.data.split([*parts.values()])):
            found[name.replace(f".{module}.", f".{part}.").replace("layers.0.", layer, 1)] = rows
    return found


def load_head(path: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Eagle3Head:
    """Load a head from a directory, without gradients. The directory has a ``config.json``, and ``model.safetensors``
    (or an index and its shards) or ``pytorch_model.bin``. If ``dtype`` is None, the configuration states it.

    Raises ``CheckpointError`` that names the tensors that are missing, surplus, misshapen or contradictory.
    """
    raw = read_json(path / "config.json")
    config = HeadConfig.from_hf(raw, str(path / "config.json"))
    tensors = _read(path)
    head = Eagle3Head(config, embedding="embed_tokens.weight" in tensors)
    head.to(device, dtype or resolve_dtype("auto", raw))
    # Check that the file has every tensor that the head needs, with the right shape, and no others.
    values = _pieces(head, "midlayer." if any(key.startswith("midlayer.") for key in tensors) else "layers.0.")
    expected = {key: tuple(value.shape) for key, value in values.items()}
    mappings = {"d2t": (config.draft_vocab_size,), "t2d": (config.layer.vocab_size,)}
    if config.draft_vocab_size != config.layer.vocab_size:
        expected["d2t"] = mappings["d2t"]
    check_tensors(path, {key: tuple(value.shape) for key, value in tensors.items()}, expected, mappings)
    for key, value in values.items():
        value.copy_(tensors[key])
    head.to_target_U.copy_(_mapping(path, config, tensors))
    return head.eval().requires_grad_(False)


def _mapping(path: Path, config: HeadConfig, tensors: dict[str, Tensor]) -> Tensor:
    """Return the target's id u + ``d2t[u]`` for each draft id u, [U]. ``t2d`` must mark the same ids."""
    ids_U = torch.arange(config.draft_vocab_size)
    if (offsets_U := tensors.get("d2t")) is not None:
        ids_U = ids_U + offsets_U.long()
    if bad := ids_U[(ids_U < 0) | (ids_U >= config.layer.vocab_size)].tolist():
        raise CheckpointError(f"{path}: d2t maps to the ids {bad[:4]}, outside {config.layer.vocab_size} tokens")
    if len(ids_U.unique()) < len(ids_U):
        raise CheckpointError(f"{path}: d2t maps several draft tokens to one id")
    if (marked_V := tensors.get("t2d")) is not None:
        marked = set(marked_V.bool().nonzero().flatten().tolist())
        if different := sorted(marked ^ set(ids_U.tolist())):
            raise CheckpointError(f"{path}: d2t and t2d disagree on the draft vocabulary, at the ids {different[:4]}")
    return ids_U


def _read(path: Path) -> dict[str, Tensor]:
    if (binary := path / "pytorch_model.bin").exists() and not (path / "model.safetensors").exists():
        try:
            found = torch.load(binary, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds of errors here
            raise CheckpointError(f"{binary}: not a readable file of tensors ({error})") from error
        return dict(found)
    tensors: dict[str, Tensor] = {}
    for file in Directory(path).weight_files():
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error
    return tensors


def save_head(head: Eagle3Head, directory: str | Path, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the layout of the paper's code; ``extra`` is added to the
    configuration. An embedding shared with the target is left out."""
    directory, layer = Path(directory), head.config.layer
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.to("cpu", dtype).contiguous() for key, value in _pieces(head, "midlayer.").items()}
    if head.shares:
        tensors.pop("embed_tokens.weight", None)
    ids_U = head.to_target_U.cpu()
    tensors["d2t"] = ids_U - torch.arange(len(ids_U))
    tensors["t2d"] = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill_(0, ids_U, True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = head.config.to_hf(str(dtype).removeprefix("torch."), **extra)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
