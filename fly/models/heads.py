"""What all trained draft heads share: which configurations describe one, their layers' configuration, the module that
they extend, and their checkpoints. Knows nothing of caches, sampling or drafting.

Shape legend: T packed tokens, C hidden width of the head, U draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections import abc
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fly.models.checkpoint import check_tensors
from fly.models.config import EXPERTS, CheckpointError, LlamaConfig, json_object, read_json
from fly.models.directory import Directory
from fly.models.families import FAMILIES, OPTIONS, SLIDING
from fly.models.llama import signed_tables

__all__ = ["DFLASH", "EAGLE3", "LAYER", "PEAGLE", "TrainedHead", "find_mask_id", "head_kind"]

# The kinds of heads: EAGLE-3 drafts token after token. DFlash, DSpark and P-EAGLE draft a block in one forward.
EAGLE3, DFLASH, PEAGLE = "eagle3", "dflash", "peagle"
# Architectures by kind, and types of the package ``speculators`` (``speculators_model_type``) by kind.
_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": EAGLE3, "Eagle3LlamaForCausalLM": EAGLE3, "Eagle3Speculator": EAGLE3,
    "Eagle3DraftModel": EAGLE3, "PEagleDraftModel": PEAGLE, "PEagleSpeculator": PEAGLE,
    "DFlashDraftModel": DFLASH, "DFlashSpeculator": DFLASH, "DSparkDraftModel": DFLASH, "DSparkSpeculator": DFLASH,
    "Qwen3DSparkModel": DFLASH,
}  # fmt: skip
_TYPES = {"eagle3": EAGLE3, "peagle": PEAGLE, "dflash": DFLASH, "dspark": DFLASH}
_NOT_BUILT_TYPES = {
    "dflash2": "its convolutions and its selector of candidates are not built",
    "mtp": "layers that predict the next tokens one after another (MTP) are not built",
}
# What is not built in any head: the name of a field, and the values that ask for nothing.
_NOT_BUILT: dict[str, tuple[object, ...]] = {
    "use_swa": (False,),
    "swa_window_size": (),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "logit_scale": (1,),
    "final_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "conv_kernel_size": (),
    "conv_group_size": (),
    "selector_rank": (0,),
    "selector_top_k": (0,),
    "projector_type": ("dflash", "dspark"),
    "attention_mode": ("gqa", "mha"),
    "dflash_query_causal": (False,),
    "log_snr_conditioning": (False,),
    "enable_qwen35_gated_q_proj": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
}
# Fields that change nothing of what a head computes: what transformers writes, what is left over from the target, and
# what only training reads.
_IDLE = {
    "add_cross_attention", "attention_dropout", "auto_map", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_sparse_step", "decoder_start_token_id",
    "diversity_penalty", "dtype", "embed_requires_grad", "encoder_no_repeat_ngram_size", "eos_token_id",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "initializer_range", "label2id",
    "length_penalty", "max_length", "max_window_layers", "min_length", "name_or_path", "no_repeat_ngram_size",
    "norm_topk_prob", "num_anchors", "num_beam_groups", "num_beams", "num_experts_per_tok", "num_return_sequences",
    "num_speculative_tokens", "output_router_logits", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "repetition_penalty", "return_dict", "router_aux_loss_coef", "sep_token_id", "speculators_config",
    "speculators_version", "suppress_tokens", "target_model_type", "task_specific_params", "temperature",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "transformers_version", "typical_p", "unk_token_id",
    "use_cache",
}  # fmt: skip
LAYER = "transformer_layer_config"
_LAYER_FIELDS = _IDLE | FAMILIES["qwen3"].options
_LAYER_FIELDS |= LlamaConfig.model_fields.keys() - OPTIONS - {"family"}
_LAYER_FIELDS |= {"architectures", "hidden_act", "model_type", "partial_rotary_factor", "rope_parameters"}
_LAYER_FIELDS |= {"quantization_config", "use_sliding_window", *EXPERTS}
_TOP_FIELDS = _IDLE | {
    "architectures",
    "draft_vocab_size",
    "model_type",
    "quantization_config",
    "speculators_model_type",
}
_TOP_FIELDS |= {"target_hidden_size", "tie_word_embeddings"}
MASK_IDS = "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"
# Values that a ``transformer_layer_config`` may leave out, because they are the defaults of transformers.
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "vocab_size": 32000, "intermediate_size": 11008},
    "qwen3": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32},
}


def head_kind(path: Path) -> str | None:
    """Return the kind of the head that the ``config.json`` in a directory describes, or None."""
    try:
        return kind_of(read_json(path / "config.json"))
    except CheckpointError:
        return None  # loading it reports the error


def kind_of(raw: abc.Mapping[str, Any]) -> str | None:
    """Return the kind of head that a ``config.json`` describes; None if it describes none. A head that is not built
    has a kind too, and loading it says what is missing."""
    if (stated := raw.get("speculators_model_type")) is not None:
        kind = _TYPES.get(str(stated), DFLASH)
    else:
        names = raw.get("architectures")
        kinds = [_kind_by_name(name) for name in names] if isinstance(names, list) else []
        kind = next(filter(None, kinds), "")
    # An EAGLE-3 head with a mask token drafts in one forward.
    return PEAGLE if kind == EAGLE3 and find_mask_id(raw) is not None else kind or None


def _kind_by_name(name: object) -> str | None:
    return DFLASH if str(name).startswith("DFlash2") else _ARCHITECTURES.get(str(name))


def check_built(
    raw: dict[str, Any], kinds: abc.Sequence[str], fields: abc.Mapping[str, abc.Collection[str]], source: str
) -> None:
    """Raise ``CheckpointError`` unless a ``config.json`` describes a head of one of these ``kinds``, and asks for
    nothing that is not built. ``fields`` are those that such heads read, by the name of the object that has them ("":
    at the top), beside the fields of all heads.

    If a head should compute something else, its drafts are merely worse, and nobody sees why. So a field that is not
    known is an error too, unless its value asks for nothing. EAGLE-3 heads are published with whole configurations of
    their targets, so theirs may have any field at the top.
    """
    stated = raw.get("speculators_model_type")
    names = raw.get("architectures") or []
    if any(str(name).startswith("DFlash2") for name in names):
        stated = "dflash2"
    if stated is not None and str(stated) not in _TYPES:
        reason = _NOT_BUILT_TYPES.get(str(stated), f"choices: {[*_TYPES]}")
        raise CheckpointError(f"{source}: a head of type {stated!r} is not supported: {reason}")
    if (kind := kind_of(raw)) not in kinds:
        choices = [name for name, each in _ARCHITECTURES.items() if each in kinds]
        raise CheckpointError(f"{source}: architecture {names or 'missing'} is not a draft head; choices: {choices}")
    parts = {name: json_object(raw, name, source) for name in ("dflash_config", "eagle_config", LAYER)}
    known = {"": {*parts, *_TOP_FIELDS, *(() if LAYER in raw else _LAYER_FIELDS)}, LAYER: _LAYER_FIELDS}
    known = {name: {*known.get(name, ()), *fields.get(name, ())} for name in ("", *parts)}
    for where, part in {"": raw, **parts}.items():
        strict = kind != EAGLE3 or where == "eagle_config"
        for name, value in part.items():
            neutral = _NOT_BUILT.get(name)
            said = f"{source}: {where and where + '.'}{name} {value!r} is not supported"
            if neutral is not None and value is not None and value not in neutral:
                raise CheckpointError(f"{said}; it must be absent")
            if neutral is None and strict and value and name not in known[where] and not name.startswith("_"):
                raise CheckpointError(
                    f"{said}: nothing is known of it, so it may change what the head computes; remove it if it does not"
                )


def count_of(raw: abc.Mapping[str, Any], name: str, usual: int) -> int:
    """Return the number that a configuration states, or the ``usual`` one."""
    value: int | None = raw.get(name)
    return usual if value is None else value


def flag_of(raw: abc.Mapping[str, Any], name: str, usual: bool, source: str) -> bool:
    """Return whether a configuration says so, or the ``usual`` answer. Raises ``CheckpointError`` unless it is true or
    false."""
    if (value := raw.get(name)) is None:
        return usual
    if not isinstance(value, bool):
        raise CheckpointError(f"{source}: {name} {value!r} must be true or false")
    return value


def find_mask_id(raw: abc.Mapping[str, Any]) -> int | None:
    """Return the id of the token that stands at each place to fill in; None if the configuration states none."""
    nested = raw.get("dflash_config") or {}
    stated = [nested.get("mask_token_id") if isinstance(nested, dict) else None, *map(raw.get, MASK_IDS)]
    return next((each for each in stated if each is not None), None)


def layer_config(raw: dict[str, Any], source: str, family: str | None = None) -> LlamaConfig:
    """Read the configuration of a head's layers, as a model of ``family`` (None: of the family that it states).
    ``speculators`` nests it in ``transformer_layer_config``, and leaves out the defaults of transformers. Raises
    ``CheckpointError``."""
    nested = LAYER in raw
    layer_settings = raw
    if nested:  # weights are quantised as the whole head's configuration says
        layer_settings = {"quantization_config": raw.get("quantization_config"), **json_object(raw, LAYER, source)}
    kind = layer_settings.get("model_type") or ("qwen3" if nested else family or "llama")
    if kind not in _DEFAULTS:
        if nested or family is not None:
            raise CheckpointError(
                f"{source}: a head's layer of type {kind!r} is not supported; choices: {[*_DEFAULTS]}"
            )
        kind = "llama"  # the paper's code writes the target's type, and has a Llama's layer
    layer_settings = {**_DEFAULTS[kind], **layer_settings} if nested else layer_settings
    if kind == "llama" and family not in (None, "llama"):  # the other family has another default
        width, heads = layer_settings.get("hidden_size"), layer_settings.get("num_attention_heads")
        if layer_settings.get("head_dim") is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
            layer_settings = {**layer_settings, "head_dim": width // heads}
    if SLIDING in json_object(layer_settings, "rope_parameters", source):
        raise CheckpointError(f"{source}: rope_parameters for each kind of layer are not supported in a draft head")
    layer_settings, structure = {"num_hidden_layers": 1, **layer_settings}, FAMILIES[family or kind]
    if SLIDING in (layer_settings.get("layer_types") or ()):
        if "layer_types" not in structure.options:
            raise CheckpointError(f"{source}: sliding layers are not supported in a head of type {structure.name!r}")
        # transformers drops the window of a Qwen3 then, and engines differ in what they make of it.
        if layer_settings.get("use_sliding_window") is not True:
            raise CheckpointError(f"{source}: layer_types has sliding layers, but use_sliding_window is not true")
    return LlamaConfig.from_hf({**layer_settings, "architectures": [structure.architecture]}, source)


class TrainedHead(nn.Module):
    """A head's vocabulary, embedding and rotary tables. Subclasses add the layers.

    ``to_target_U`` maps the draft vocabulary to the target's ids. A head without an embedding needs the target's
    (``share``).
    """

    to_target_U: Tensor
    corrections: tuple[str, ...] = ()  # the names of modules that come after the logits

    def __init__(self, layer: LlamaConfig, draft_vocab_size: int, embedding: bool) -> None:
        super().__init__()
        self.layer = layer
        self.shares = not embedding  # whether it uses the target's embedding
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size) if embedding else None
        self.register_buffer("to_target_U", torch.arange(draft_vocab_size), persistent=False)
        self._rotary: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return self.to_target_U.device

    def share(self, weight_VC: Tensor) -> None:
        """Use the target's embedding, without training it. Raises ``ValueError`` if its shape is wrong."""
        layer = self.layer
        if weight_VC.shape != (layer.vocab_size, layer.hidden_size):
            raise ValueError(
                f"the head has no embedding of its own, and the target's is {list(weight_VC.shape)}, not "
                f"{[layer.vocab_size, layer.hidden_size]}"
            )
        weight = nn.Parameter(weight_VC.to(self.device, self.dtype), requires_grad=False)
        self.embed_tokens = nn.Embedding(*weight_VC.shape, _weight=weight, _freeze=True)

    def without_layers(self) -> Self:
        """Return a head that shares the modules which correct logits, and has no others."""
        head = copy.copy(self)
        head._modules = {name: module for name, module in self._modules.items() if name in self.corrections}
        return head

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the embeddings [T, C] of ``tokens_T``, which are the target's ids. Raises ``ValueError`` if the head
        has no embedding."""
        if self.embed_tokens is None:
            raise ValueError("the head has no embedding: call share() with the target's")
        embedded_TC: Tensor = self.embed_tokens(tokens_T)
        return embedded_TC

    def rotary(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines [T, 1, D] that ``rotate`` takes at these positions."""
        if self._rotary is None or self._rotary[0].dtype != self.dtype or self._rotary[0].device != self.device:
            (self._rotary,) = signed_tables(self.layer, self.dtype, self.device)
        cos, sin = self._rotary
        return cos[positions_T], sin[positions_T]

    def stored(self) -> dict[str, Tensor]:
        """Return the head's tensors by the names that ``speculators`` gives them. Fused matrices are split, and the
        target's embedding is left out."""
        tensors = {}
        for name, parameter in self.named_parameters():
            if self.shares and name.startswith("embed_tokens."):
                continue
            module = (name.split(".")[-2:-1] or [""])[0]
            parts = self.layer.fused_rows.get(module, {module: len(parameter)})
            for part, rows in zip(parts, parameter.data.split([*parts.values()])):
                tensors[name.replace(f".{module}.", f".{part}.")] = rows
        return tensors

    def fill(self, path: Path, tensors: dict[str, Tensor], first: str = "layers.0.") -> None:
        """Copy a checkpoint's tensors to the parameters and to ``to_target_U``, without gradients from now on. The
        names of the first layer's tensors begin with ``first``.

        Raises ``CheckpointError`` that names the tensors that are missing, surplus, misshapen or contradictory.
        """
        values = {key.replace("layers.0.", first, 1): value for key, value in self.stored().items()}
        expected, size = {key: tuple(value.shape) for key, value in values.items()}, len(self.to_target_U)
        mappings = {"d2t": (size,), "t2d": (self.layer.vocab_size,)}
        if size != self.layer.vocab_size:
            expected["d2t"] = mappings["d2t"]
        check_tensors(path, {key: tuple(value.shape) for key, value in tensors.items()}, expected, mappings)
        for key, value in values.items():
            value.copy_(tensors[key])
        self.to_target_U.copy_(_mapping(path, size, self.layer.vocab_size, tensors))
        self.eval().requires_grad_(False)

    def save(self, directory: str | Path, config: dict[str, Any], dtype: torch.dtype, first: str = "layers.0.") -> None:
        """Write ``config.json`` and ``model.safetensors``, with names as for ``fill``."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            key.replace("layers.0.", first, 1): value.to("cpu", dtype).contiguous()
            for key, value in self.stored().items()
        }
        ids_U = self.to_target_U.cpu()
        tensors["d2t"] = ids_U - torch.arange(len(ids_U))
        tensors["t2d"] = torch.zeros(self.layer.vocab_size, dtype=torch.bool).index_fill_(0, ids_U, True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _mapping(path: Path, size: int, vocab_size: int, tensors: dict[str, Tensor]) -> Tensor:
    """Return the target's id u + ``d2t[u]`` for each draft id u, [U]. ``t2d`` must mark the same ids."""
    ids_U = torch.arange(size)
    if (offsets_U := tensors.get("d2t")) is not None:
        ids_U = ids_U + offsets_U.long()
    if bad := ids_U[(ids_U < 0) | (ids_U >= vocab_size)].tolist():
        raise CheckpointError(f"{path}: d2t maps to the ids {bad[:4]}, outside {vocab_size} tokens")
    if len(ids_U.unique()) < len(ids_U):
        raise CheckpointError(f"{path}: d2t maps several draft tokens to one id")
    if (marked_V := tensors.get("t2d")) is not None:
        marked = set(marked_V.bool().nonzero().flatten().tolist())
        if different := sorted(marked ^ set(ids_U.tolist())):
            raise CheckpointError(f"{path}: d2t and t2d disagree on the draft vocabulary, at the ids {different[:4]}")
    return ids_U


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a head in a directory: from ``model.safetensors``, or an index and its shards, or
    ``pytorch_model.bin``. Raises ``CheckpointError``."""
    if (binary := path / "pytorch_model.bin").exists() and not (path / "model.safetensors").exists():
        try:
            loaded = torch.load(binary, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds of errors here
            raise CheckpointError(f"{binary}: not a readable file of tensors ({error})") from error
        return dict(loaded)
    tensors: dict[str, Tensor] = {}
    for file in Directory(path).weight_files():
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error
    return tensors
