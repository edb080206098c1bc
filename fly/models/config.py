"""A decoder's sizes and options, read from a Hugging Face ``config.json``. Knows nothing of tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fly.errors import explain
from fly.models.families import FAMILIES, FULL, OPTIONS, SLIDING, Family, family_of

__all__ = ["EXPERTS", "CheckpointError", "LlamaConfig", "RopeScaling"]

# For each rope type: the settings that it needs, and the optional ones.
ROPE_TYPES: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {"original_max_position_embeddings"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": ({"factor"}, {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}),
}
# Settings that reveal a mixture of experts.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file, the bad value and the choices."""


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; return an empty one if there is no such file. Raises ``CheckpointError``."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


class RopeScaling(BaseModel):
    """Settings that stretch rotary frequencies beyond the trained context (``rope_scaling``/``rope_parameters``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = Field(default=1.0, ge=1.0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_position_embeddings: int = Field(default=8192, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _bands_do_not_overlap(self) -> RopeScaling:
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )
        if self.rope_type == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must not be below beta_slow {self.beta_slow}")
        return self

    @property
    def table_scale(self) -> float:
        """The factor on the cosines and sines, which is YaRN's attention factor (arXiv 2309.00071, equation 22)."""
        if self.rope_type != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0

    def to_hf(self) -> dict[str, Any] | None:
        """Return the settings of this rope type in the form of ``config.json``; None if nothing is scaled."""
        if self.rope_type == "default":
            return None
        needed, optional = ROPE_TYPES[self.rope_type]
        values = self.model_dump(include={"rope_type", *needed, *optional})
        return {name: value for name, value in values.items() if value is not None}


# Far above any model's sizes. Beyond these, the number of a matrix's bytes would have more than 64 bits.
_MOST_WIDTH, _MOST_HEADS = 2**24, 2**16


class LlamaConfig(BaseModel):
    """Sizes and options of a decoder. Field names are those of Hugging Face's ``config.json``.

    ``family`` names one of ``fly.models.families.FAMILIES``, which describes the other differences from a Llama.
    Options that the family does not have keep their defaults.

    Raises ``pydantic.ValidationError`` (a ``ValueError``) for sizes that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str = "llama"
    vocab_size: int = Field(gt=0, le=_MOST_WIDTH)
    hidden_size: int = Field(gt=0, le=_MOST_WIDTH)
    intermediate_size: int = Field(gt=0, le=_MOST_WIDTH)
    num_hidden_layers: int = Field(gt=0, le=_MOST_HEADS)
    num_attention_heads: int = Field(gt=0, le=_MOST_HEADS)
    num_key_value_heads: int = Field(gt=0, le=_MOST_HEADS)
    head_dim: int = Field(gt=0, le=_MOST_HEADS)
    max_position_embeddings: int = Field(default=2048, gt=0, le=2**31)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = Field(default=None, gt=0)  # number of last tokens that a sliding layer attends over
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None  # None: all full
    query_pre_attn_scalar: int | None = Field(default=None, gt=0)  # None: head_dim
    rope_local_base_freq: float | None = Field(default=None, gt=0)  # rope_theta of sliding layers; None: rope_theta
    embedding_multiplier: float = Field(default=1.0, gt=0)
    attention_multiplier: float | None = Field(default=None, gt=0)  # None: head_dim ** -0.5
    residual_multiplier: float = Field(default=1.0, gt=0)  # factor on the outputs of attention and feed-forward
    logits_scaling: float = Field(default=1.0, gt=0)  # divides the logits

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        derived = {"num_key_value_heads": heads}
        # Leave values that are not positive integers alone: the fields refuse them.
        if values.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            if hidden % heads:
                raise ValueError(
                    f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given"
                )
            derived["head_dim"] = hidden // heads
        return values | {name: value for name, value in derived.items() if values.get(name) is None}

    @model_validator(mode="after")
    def _sizes_fit(self) -> LlamaConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary embeddings")
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r} is unknown; choices: {list(FAMILIES)}")
        for name in sorted(OPTIONS - self.traits.options):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name} {value!r}: models of family {self.family!r} have no such option")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types lists {len(self.layer_types)} layers, the model has {self.num_hidden_layers}"
            )
        if SLIDING in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError("layer_types has sliding layers, but sliding_window is not given")
        return self

    @property
    def traits(self) -> Family:
        """How the family differs from Llama."""
        return FAMILIES[self.family]

    @property
    def windows(self) -> list[int | None]:
        """For each layer, the number of last tokens that it attends over; None means all."""
        types = self.layer_types or (FULL,) * self.num_hidden_layers
        return [self.sliding_window if kind == SLIDING else None for kind in types]

    @property
    def fused_rows(self) -> dict[str, dict[str, int]]:
        """For each fused matrix of the decoder, the matrices that it joins and their numbers of rows, in order."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            "gate_up_proj": {"gate_proj": self.intermediate_size, "up_proj": self.intermediate_size},
        }

    @property
    def ropes(self) -> list[tuple[float, RopeScaling]]:
        """The base and scaling of each rotary embedding: the usual one, and that of sliding layers if it differs."""
        usual = self.rope_theta, self.rope_scaling
        return [usual] if self.rope_local_base_freq is None else [usual, (self.rope_local_base_freq, RopeScaling())]

    @property
    def attention_scale(self) -> float:
        """The factor on the products of queries and keys."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def resized(self, layers: int, **sizes: Any) -> LlamaConfig:
        """Return a copy with ``layers`` layers and other ``sizes``. The kinds of its layers repeat this model's."""
        types = self.layer_types and [self.layer_types[i % self.num_hidden_layers] for i in range(layers)]
        changes = {"num_hidden_layers": layers, "layer_types": types, **sizes}
        return LlamaConfig.model_validate(self.model_dump() | changes)

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str = "config.json") -> LlamaConfig:
        """Read the dictionary of a ``config.json``, with ``rope_scaling`` or ``rope_parameters``.

        With YaRN the context is the stretched one, even if ``max_position_embeddings`` states the trained one. Dynamic
        scaling changes nothing, since it begins after the context and no text is longer than the context.

        Raises ``CheckpointError`` for an architecture, quantisation, activation or rope type that is not supported.
        """
        # Give absent fields the defaults of transformers. Refuse settings that the family does not support.
        family = _supported(raw, source)
        stated = {**family.defaults, **raw}
        if (activation := stated.get(family.activation_key, family.activation_name)) != family.activation_name:
            raise CheckpointError(
                f"{source}: {family.activation_key} {activation!r} is not supported; choices: "
                f"[{family.activation_name!r}]"
            )
        for name in family.refused:
            if stated.get(name):
                raise CheckpointError(f"{source}: {name} {stated[name]!r} is not supported; it must be null")
        # Collect the fields of this class, and the options of the family.
        options = {name: stated[name] for name in family.options if name in stated}
        fields = set(cls.model_fields) - OPTIONS - {"family", "rope_theta", "rope_scaling"}
        values = {name: stated[name] for name in fields if name in stated}
        try:
            theta, scaling, local = _rope(stated, source)
            if "rope_local_base_freq" in family.options:
                options["rope_local_base_freq"] = local or options.get("rope_local_base_freq")
            if "layer_types" in family.options:
                options |= _layers(stated, family)
            # YaRN stretches the context.
            if scaling.rope_type == "yarn":
                longest = int(scaling.factor * scaling.original_max_position_embeddings)
                values["max_position_embeddings"] = max(values.get("max_position_embeddings", 2048), longest)
            return cls(family=family.name, **values, **options, rope_theta=theta, rope_scaling=scaling)
        except ValidationError as error:
            raise CheckpointError(f"{source}: {explain(error)}") from error

    def to_hf(self, dtype: str = "bfloat16", **extra: Any) -> dict[str, Any]:
        """Return the dictionary of a ``config.json``, in a form that transformers can read too."""
        family = self.traits
        unused = {"family", "rope_scaling", "layer_types", *(OPTIONS - family.options)}
        types = list(self.layer_types or (FULL,) * self.num_hidden_layers)
        raw = {
            "architectures": [family.architecture],
            "model_type": family.name,
            family.activation_key: family.activation_name,
            **self.model_dump(mode="json", exclude=unused),
            "rope_scaling": self.rope_scaling.to_hf(),
            "torch_dtype": dtype,
        }
        if "use_sliding_window" in family.defaults:
            raw["use_sliding_window"] = SLIDING in types
        if types != family.layer_types({**family.defaults, **raw}, self.num_hidden_layers):
            raw["layer_types"] = types
        return raw | extra


def json_object(raw: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return the object ``raw[name]``, empty if there is none. Raises ``CheckpointError`` for any other value."""
    if not isinstance(value := raw.get(name) or {}, dict):
        raise CheckpointError(f"{source}: {name} must be an object, got {value!r}")
    return value


def _supported(raw: dict[str, Any], source: str) -> Family:
    """Return the family of a configuration. Raises ``CheckpointError`` for an architecture that no family has."""
    architectures = raw.get("architectures") or []
    if (quantised := raw.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{source}: weights quantised by {method!r} are not supported; take the unquantised checkpoint (kernels="
            "'w8a8', or 'int8' or 'int4' on CUDA, round it as it is loaded), or a GGUF file"
        )
    experts = any(raw.get(name) for name in EXPERTS)
    if (family := family_of(architectures)) is not None and not experts:
        return family
    kind = " (a mixture of experts)" if experts else ""
    kind = " (a draft head, which drafts for a model)" if "draft_vocab_size" in raw else kind
    raise CheckpointError(
        f"{source}: architecture {architectures or 'missing'}{kind} is not supported; choices: "
        f"{[family.architecture for family in FAMILIES.values()]}"
    )


def _layers(stated: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the kinds of the layers. If no layer has sliding attention, kinds and window are None."""
    all_full = {"layer_types": None, "sliding_window": None}
    count, types = stated.get("num_hidden_layers"), stated.get("layer_types")
    if stated.get("sliding_window") is None or not isinstance(count, int):
        return all_full if set(types or ()) <= {FULL} else {"layer_types": types}
    types = list(types or family.layer_types(stated, count))
    return all_full if types == [FULL] * count else {"layer_types": types}  # the field refuses unknown values


def _rope(stated: dict[str, Any], source: str) -> tuple[float, RopeScaling, float | None]:
    """Return the base and scaling of the rotary embedding, and the base of sliding layers if they have their own."""
    # Newer configurations have rope_parameters, perhaps with settings per kind of layer. Older ones have rope_scaling.
    rope = json_object(stated, "rope_scaling", source) | json_object(stated, "rope_parameters", source)
    rope, local = rope | json_object(rope, FULL, source), json_object(rope, SLIDING, source)
    rope = {name: value for name, value in rope.items() if value is not None and name not in (FULL, SLIDING)}
    if local.get("rope_type", "default") != "default":
        raise CheckpointError(f"{source}: rope settings of sliding layers must be the default ones")
    old_type, theta = rope.pop("type", None), rope.pop("rope_theta", None)  # older names and places
    rope_type = rope.pop("rope_type", None) or old_type or "default"
    theta = stated.get("rope_theta") if theta is None else theta
    partial = rope.pop("partial_rotary_factor", None), stated.get("partial_rotary_factor")
    if any(factor not in (None, 1.0) for factor in partial):
        raise CheckpointError(f"{source}: partial_rotary_factor is not supported; the whole of every head is rotated")
    # Check that the settings are those of the rope type.
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"{source}: rope type {rope_type!r} is not supported; choices: {list(ROPE_TYPES)}")
    needed, optional = ROPE_TYPES[rope_type]
    if missing := sorted(needed - set(rope)):
        raise CheckpointError(f"{source}: rope type {rope_type!r} needs {missing}")
    if unknown := sorted(set(rope) - (needed | optional if rope_type != "default" else set(RopeScaling.model_fields))):
        raise CheckpointError(f"{source}: rope settings {unknown} are not supported")
    if rope_type == "yarn":
        rope.setdefault("original_max_position_embeddings", stated.get("max_position_embeddings", 2048))
    scaling = RopeScaling.model_validate({"rope_type": rope_type, **rope})
    return 10000.0 if theta is None else theta, scaling, local.get("rope_theta")
