"""GGUF files for tests, written by the ``gguf`` library, and what values their tensors then stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from fly.models import Llama
from fly.models.loading import checkpoint_tensors

__all__ = ["ARCHITECTURES", "add_field", "write_gguf", "write_tokenizer"]

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
# Where blocks of K-quants, which the library reads but does not write, hold numbers of 16 bits.
_HALVES = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def blocks(values: np.ndarray[Any, Any], kind: Kind, seed: int) -> np.ndarray[Any, Any]:
    """Values as ``kind`` stores them; of K-quants, drawn blocks in their place."""
    if kind.name not in _HALVES:
        return gguf.quantize(values, kind)
    per, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(seed).integers(0, 256, (*values.shape[:-1], values.shape[-1] // per, size), np.uint8)
    for at in _HALVES[kind.name]:
        drawn[..., at : at + 2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
    return drawn.reshape(*values.shape[:-1], -1)


def write_gguf(
    model: Llama,
    path: Path,
    kind: Kind,
    fields: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Write ``model`` with its matrices stored as ``kind`` (or by the name of their module as one of ``kinds``), and
    further fields, or tensors where they are arrays. Gives what the tensors are by Hugging Face's names, in float32."""
    config, arch = model.config, ARCHITECTURES[model.config.family]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    for key, value in (fields or {}).items():
        add_field(writer, key, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    made = {}
    for seed, (key, tensor) in enumerate(checkpoint_tensors(model)):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name, values = names.get_name(key, try_suffixes=(".weight", ".bias")), tensor.float().numpy()
        heads = values.shape[0] // config.head_dim
        paired = arch == "llama" and (".q_proj." in key or ".k_proj." in key)
        if paired:  # the halves of each head alternate there
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        shifted = arch == "gemma3" and "norm" in key
        if shifted:
            values = values + np.float32(1)
        own = (kinds or {}).get(key.split(".")[-2], kind.name)
        of = Kind[own] if values.ndim == 2 else Kind.F32
        data = blocks(np.ascontiguousarray(values), of, seed)
        writer.add_tensor(name, data, raw_dtype=of)
        values = gguf.dequantize(data.view(np.uint8) if of == Kind.BF16 else data, of).reshape(values.shape)
        if paired:
            values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        made[key] = torch.from_numpy(values - np.float32(1) if shifted else values.copy())
    _finish(writer)
    return made


def write_tokenizer(path: Path, **fields: Any) -> None:
    """A file of a vocabulary alone; ``fields`` by what comes after ``tokenizer.ggml.``"""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        add_field(writer, f"tokenizer.ggml.{key}", value)
    _finish(writer)


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """Add metadata of the type that ``value`` has, or a tensor if it is an array. It replaces a value of this name."""
    writer.kv_data[0].pop(name, None)
    if isinstance(value, np.ndarray):
        writer.add_tensor(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
