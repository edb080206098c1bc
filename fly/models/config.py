"""The Llama architecture as data, read from a Hugging Face ``config.json``. Knows nothing of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fly.errors import explain

__all__ = ["CheckpointError", "LlamaConfig", "RopeScaling"]

ARCHITECTURES = ("LlamaForCausalLM",)
ROPE_TYPES = ("default", "linear", "llama3")


class CheckpointError(ValueError):
    """A checkpoint directory cannot be used; the message names the file, the bad value and the choices."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises ``CheckpointError``."""
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
    """How rotary frequencies are stretched beyond the trained context (``rope_scaling``/``rope_parameters``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = Field(default=1.0, ge=1.0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_position_embeddings: int = Field(default=8192, gt=0)

    @model_validator(mode="after")
    def _bands_do_not_overlap(self) -> RopeScaling:
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )
        return self


class LlamaConfig(BaseModel):
    """Sizes and options of a Llama; field names are those of Hugging Face's ``config.json``.

    Raises ``pydantic.ValidationError`` (a ``ValueError``) for sizes that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    max_position_embeddings: int = Field(default=2048, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        derived = {"num_key_value_heads": heads}
        # Sizes that are no positive integers are left for the fields to refuse.
        if values.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            if hidden % heads:
                raise ValueError(
                    f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and head_dim is not given"
                )
            derived["head_dim"] = hidden // heads
        return values | {name: value for name, value in derived.items() if values.get(name) is None}

    @model_validator(mode="after")
    def _sizes_fit(self) -> LlamaConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary embeddings")
        return self

    @classmethod
    def from_hf(cls, raw: dict[str, Any], source: str = "config.json") -> LlamaConfig:
        """Read the dictionary of a ``config.json`` (both the ``rope_scaling`` and ``rope_parameters`` layouts).

        Raises ``CheckpointError`` for an architecture, activation or rope type this module does not compute.
        """
        architectures = raw.get("architectures") or []
        if not any(name in ARCHITECTURES for name in architectures):
            raise CheckpointError(
                f"{source}: architecture {architectures or 'missing'} is not supported; choices: {list(ARCHITECTURES)}"
            )
        if (activation := raw.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"{source}: hidden_act {activation!r} is not supported; choices: ['silu']")
        rope: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            if not isinstance(stated := raw.get(name) or {}, dict):
                raise CheckpointError(f"{source}: {name} must be an object, got {stated!r}")
            rope |= stated
        old_type, theta = rope.pop("type", None), rope.pop("rope_theta", None)  # older names and places
        rope_type = rope.pop("rope_type", None) or old_type or "default"
        theta = raw.get("rope_theta") if theta is None else theta
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"{source}: partial_rotary_factor is not supported; every head is rotated whole")
        if rope_type not in ROPE_TYPES:
            raise CheckpointError(f"{source}: rope type {rope_type!r} is not supported; choices: {list(ROPE_TYPES)}")
        required = {"linear": {"factor"}, "llama3": set(RopeScaling.model_fields) - {"rope_type"}}.get(rope_type, set())
        if missing := sorted(required - set(rope)):
            raise CheckpointError(f"{source}: rope type {rope_type!r} needs {missing}")
        if unknown := sorted(set(rope) - set(RopeScaling.model_fields)):
            raise CheckpointError(f"{source}: rope settings {unknown} are not supported")
        values = {name: raw[name] for name in cls.model_fields if name in raw and not name.startswith("rope")}
        try:
            scaling = RopeScaling.model_validate({"rope_type": rope_type, **rope})
            return cls(**values, rope_theta=10000.0 if theta is None else theta, rope_scaling=scaling)
        except ValidationError as error:
            raise CheckpointError(f"{source}: {explain(error)}") from error

    def to_hf(self, dtype: str = "bfloat16", **extra: Any) -> dict[str, Any]:
        """The same facts as a ``config.json`` dictionary that transformers also reads."""
        scaling = self.rope_scaling
        return {
            "architectures": [ARCHITECTURES[0]],
            "model_type": "llama",
            "hidden_act": "silu",
            **self.model_dump(exclude={"rope_scaling"}),
            "rope_scaling": None if scaling.rope_type == "default" else scaling.model_dump(),
            "torch_dtype": dtype,
            **extra,
        }

    @classmethod
    def read(cls, directory: Path) -> tuple[LlamaConfig, dict[str, Any]]:
        """``(config, raw dictionary)`` of ``directory/config.json``. Raises ``CheckpointError``."""
        path = Path(directory) / "config.json"
        if not path.exists():
            raise CheckpointError(f"{path}: not found; a checkpoint directory needs a config.json")
        raw = read_json(path)
        return cls.from_hf(raw, str(path)), raw
