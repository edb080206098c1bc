"""Hugging Face checkpoint directories in and out. Every tensor is accounted for before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from fly.models.config import CheckpointError, LlamaConfig
from fly.models.llama import Llama, allocate, skeleton

__all__ = [
    "DTYPES",
    "Part",
    "Piece",
    "checkpoint_tensors",
    "layout",
    "load_model",
    "resolve_device",
    "resolve_dtype",
    "save_model",
]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_INDEX = "model.safetensors.index.json"
# Derived tables that old exporters saved beside the weights; this model computes them itself.
_DERIVED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint and the rows of our parameter it fills, with all of it or with a ``cut``."""

    key: str
    shape: tuple[int, ...]
    rows: slice
    cut: tuple[slice, ...] = ()  # a slice for each dimension
    stored: bool = True  # False: zeros instead, where another part holds it

    def length(self, dim: int) -> int:
        """What is left of a dimension."""
        return self.cut[dim].stop - self.cut[dim].start if self.cut else self.shape[dim]

    def read(self, file: Any) -> torch.Tensor:
        """The tensor, or the cut of it, from an open safetensors file: memory-mapped, nothing else is touched."""
        return file.get_slice(self.key)[self.cut] if self.cut else file.get_tensor(self.key)


class Part(Protocol):
    """What is to be held of a model, where others hold the rest."""

    @property
    def pieces(self) -> Mapping[str, list[Piece]]:
        """For each parameter, the checkpoint tensors it is made of, in row order."""
        ...

    def build(self) -> Llama:
        """The module that holds it, without memory (on torch's meta device)."""
        ...


def layout(config: LlamaConfig, parameters: dict[str, nn.Parameter]) -> dict[str, list[Piece]]:
    """For each parameter of ``Llama(config)``, the checkpoint tensors it is made of, in row order."""
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    fused = {
        "qkv_proj": [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)],
        "gate_up_proj": [("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size)],
    }
    plan: dict[str, list[Piece]] = {}
    for name, parameter in parameters.items():
        key = name if name.startswith("lm_head") else f"model.{name}"
        module = name.split(".")[-2]
        start, pieces = 0, []
        for part, rows in fused.get(module, [(module, parameter.shape[0])]):
            part_key = key.replace(f".{module}.", f".{part}.")
            pieces.append(Piece(part_key, (rows, *parameter.shape[1:]), slice(start, start + rows)))
            start += rows
        plan[name] = pieces
    return plan


def resolve_dtype(dtype: str | torch.dtype, raw: dict[str, Any]) -> torch.dtype:
    """``dtype`` as a torch dtype; ``"auto"`` is what the checkpoint's config states (float32 if it states none)."""
    stated = raw.get("torch_dtype") or raw.get("dtype") or "float32" if dtype == "auto" else dtype
    name = str(stated).removeprefix("torch.")
    if (name := _ALIASES.get(name, name)) not in DTYPES:
        if dtype == "auto":
            raise CheckpointError(f"config.json: dtype {name!r} is not supported; choices: {[*DTYPES]}")
        raise ValueError(f"dtype {dtype!r} is not supported; choices: {['auto', *DTYPES, *_ALIASES]}")
    return DTYPES[name]


def resolve_device(device: str | torch.device) -> torch.device:
    """``"auto"`` is the current CUDA device where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown ({error})") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available here; this build of torch sees no CUDA device")
    return wanted


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            outside = [name for name in names if name in ("", "..") or Path(name).name != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
        if outside:
            raise CheckpointError(f"{index}: names files outside the directory: {outside}")
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    if missing := [path.name for path in files if not path.exists()]:
        raise CheckpointError(f"{directory}: weight files are missing: {missing}")
    return files


def _names(items: list[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def load_model(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    part: Callable[[LlamaConfig], Part] | None = None,
) -> Llama:
    """Load a Hugging Face Llama directory, memory-mapped, without gradients.

    Args:
        path: directory with ``config.json`` and ``model.safetensors`` (or an index and its shards).
        dtype: ``"auto"`` (as the config states), or one of bfloat16, float16, float32.
        device: ``"auto"``, or any torch device.
        part: gives what is to be held of a model, by its configuration; only that is read. None is all of it. What
            the parts say to one another is not this function's business.

    Raises:
        CheckpointError: unknown architecture or rope type; missing, surplus or misshapen tensors; broken files.
        ValueError: unknown dtype or device.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such checkpoint directory")
    config, raw = LlamaConfig.read(directory)
    wanted_dtype, wanted_device = resolve_dtype(dtype, raw), resolve_device(device)
    if part is None:
        model = skeleton(config)
        plan: Mapping[str, list[Piece]] = layout(config, dict(model.named_parameters()))
    else:
        held = part(config)
        model, plan = held.build(), held.pieces
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in _weight_files(directory):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error
            for key in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                if key in where:
                    raise CheckpointError(f"{file}: tensor {key} is stored twice")
                where[key] = handle
        tied_copy = config.tie_word_embeddings and "lm_head.weight" in where
        _check_tensors(directory, plan, where, allowed={"lm_head.weight"} if tied_copy else set())
        (embedding,) = plan["embed_tokens.weight"]
        copy = replace(embedding, key="lm_head.weight")
        if tied_copy and not torch.equal(copy.read(where[copy.key]), embedding.read(where[embedding.key])):
            raise CheckpointError(
                f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight"
            )
        allocate(model, wanted_dtype, wanted_device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                for piece in plan[name]:
                    if piece.stored:
                        parameter[piece.rows].copy_(piece.read(where[piece.key]))
                    else:
                        parameter[piece.rows].zero_()
    return model.eval().requires_grad_(False)


def _check_tensors(directory: Path, plan: Mapping[str, list[Piece]], where: dict[str, Any], allowed: set[str]) -> None:
    expected = {piece.key: piece.shape for pieces in plan.values() for piece in pieces}
    if missing := sorted(set(expected) - set(where)):
        raise CheckpointError(f"{directory}: tensors are missing: {_names(missing)}")
    surplus = sorted(key for key in set(where) - set(expected) - allowed if not key.endswith(_DERIVED))
    if surplus:
        raise CheckpointError(f"{directory}: tensors this configuration has no place for: {_names(surplus)}")
    for key, shape in expected.items():
        found = tuple(where[key].get_slice(key).get_shape())
        if found != shape:
            raise CheckpointError(f"{directory}: {key} has shape {list(found)}, the configuration asks {list(shape)}")


def checkpoint_tensors(model: Llama) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint of ``model`` by Hugging Face's names; a head shared with the embedding is among
    them under the embedding's name."""
    parameters = dict(model.named_parameters())
    for name, pieces in layout(model.config, parameters).items():
        for piece in pieces:
            yield piece.key, parameters[name].detach()[piece.rows]


def save_model(model: Llama, directory: str | Path, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> None:
    """Write ``config.json`` and ``model.safetensors`` in Hugging Face's layout; ``extra`` goes into the config."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.to("cpu", dtype).contiguous() for key, value in checkpoint_tensors(model)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_hf(dtype=str(dtype).removeprefix("torch."), **extra)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
