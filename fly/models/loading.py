"""Load checkpoints into models, and save models. The list of tensors is checked before any value is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from fly.devices import default_device, kind_of, on_host
from fly.models.checkpoint import Checkpoint, Cut, Stored, check_tensors
from fly.models.config import CheckpointError, LlamaConfig
from fly.models.llama import Llama, Replaced, replace_parameters, skeleton
from fly.models.opening import open_checkpoint

__all__ = [
    "DTYPES",
    "Loading",
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
_DEVICES = "auto, cpu, cuda, cuda:1, ..."


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint, and the rows of a parameter that the tensor or a ``cut`` of it fills."""

    key: str
    shape: tuple[int, ...]
    rows: slice
    cut: Cut = ()
    stored: bool = True  # False: fill with zeros, because another rank holds the values

    def length(self, dim: int) -> int:
        """Return the size of a dimension after the cut."""
        return self.cut[dim].stop - self.cut[dim].start if self.cut else self.shape[dim]


class ModelPart(Protocol):
    """The part of a model that this process holds; other processes hold the rest."""

    @property
    def pieces(self) -> Mapping[str, list[Piece]]:
        """Return, for each parameter, the checkpoint tensors that it consists of, in row order."""
        ...

    def build(self) -> Llama:
        """Build the module of this part without memory (on torch's meta device)."""
        ...


def layout(config: LlamaConfig, parameters: dict[str, nn.Parameter]) -> dict[str, list[Piece]]:
    """Return, for each parameter of ``Llama(config)``, the checkpoint tensors that it consists of, in row order."""
    plan: dict[str, list[Piece]] = {}
    for name, parameter in parameters.items():
        key = name if name.startswith("lm_head") else f"model.{name}"
        module = name.split(".")[-2]
        start, pieces = 0, []
        for part, rows in config.fused_rows.get(module, {module: parameter.shape[0]}).items():
            part_key = key.replace(f".{module}.", f".{part}.")
            pieces.append(Piece(part_key, (rows, *parameter.shape[1:]), slice(start, start + rows)))
            start += rows
        plan[name] = pieces
    return plan


def resolve_dtype(dtype: str | torch.dtype, raw: dict[str, Any]) -> torch.dtype:
    """Convert ``dtype`` to a torch dtype. ``"auto"`` means the dtype in the checkpoint's config, or else float32."""
    stated = raw.get("torch_dtype") or raw.get("dtype") or "float32" if dtype == "auto" else dtype
    name = str(stated).removeprefix("torch.")
    if (name := _ALIASES.get(name, name)) not in DTYPES:
        if dtype == "auto":
            raise CheckpointError(f"config.json: dtype {name!r} is not supported; choices: {[*DTYPES]}")
        raise ValueError(f"dtype {dtype!r} is not supported; choices: {['auto', *DTYPES, *_ALIASES]}")
    return DTYPES[name]


def resolve_device(device: str | torch.device) -> torch.device:
    """Convert ``device`` to a torch device. ``"auto"`` means the current CUDA device if there is one, else the CPU."""
    if device == "auto":
        return default_device()
    try:
        torch_device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown; choices: {_DEVICES}") from error
    if reason := kind_of(torch_device).why_missing(torch_device):
        raise ValueError(f"device {device!r} is not available here; choices: {_DEVICES} ({reason})")
    return torch_device


class Loading:
    """A checkpoint that is being loaded into a model. The model is built on torch's meta device, and gets its values
    all at once or module by module. The list of tensors is checked before any value is read. Arguments and errors are
    those of ``load_model``."""

    def __init__(
        self,
        checkpoint: str | Path | Checkpoint,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        *,
        part: Callable[[LlamaConfig], ModelPart] | None = None,
    ) -> None:
        self.checkpoint = checkpoint = open_checkpoint(checkpoint)
        config = checkpoint.config
        self.dtype, self.device = resolve_dtype(dtype, checkpoint.raw), resolve_device(device)
        if part is None:
            self.model = skeleton(config)
            self._plan: Mapping[str, list[Piece]] = layout(config, dict(self.model.named_parameters()))
        else:
            model_part = part(config)
            self.model, self._plan = model_part.build(), model_part.pieces
        self.model.to(self.dtype).requires_grad_(False)
        self._names = {parameter: name for name, parameter in self.model.named_parameters()}
        # Compare the list of tensors with what the model needs. A head that is tied to the embedding may be in the file
        # as well.
        tensors, head = checkpoint.tensors, "lm_head.weight"
        expected = {piece.key: piece.shape for pieces in self._plan.values() for piece in pieces}
        (embedding,) = self._plan["embed_tokens.weight"]
        tied = {head: embedding.shape} if config.tie_word_embeddings else {}
        check_tensors(checkpoint.path, {key: stored.shape for key, stored in tensors.items()}, expected, tied)
        tied_tensors = [tensors[key].read(embedding.cut) for key in (head, embedding.key) if tied and head in tensors]
        if tied_tensors and not torch.equal(*tied_tensors):
            raise CheckpointError(
                f"{checkpoint.path}: tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight"
            )

    def load_all(self, finish: Callable[[nn.Module], None] | None = None) -> Llama:
        """Return the loaded model, without gradients. If ``finish`` is given, it is called with each layer as soon as
        the layer has its values, and with a head that is not the embedding. It may change this module before the next
        one is loaded."""
        model = self.model
        if finish is not None:
            for module in (*model.layers, *([] if model.config.tie_word_embeddings else [model.lm_head])):
                self._fill(module, borrow=False)
                finish(module)
        self._fill(model, borrow=False)
        return model.eval().requires_grad_(False)

    @contextmanager
    def filled(self, module: nn.Module, but: frozenset[nn.Parameter] = frozenset()) -> Iterator[None]:
        """Give a module of the model its values while this context is active, except the parameters ``but``. On the
        CPU, values that need no conversion are read from the mapped file, without a copy."""
        before = self._fill(module, borrow=on_host(self.device), but=but)
        try:
            yield
        finally:
            for owner, name, parameter in before:
                setattr(owner, name, parameter)

    def stored(self, parameter: nn.Parameter) -> list[Stored]:
        """Return the checkpoint tensors that a parameter consists of, in row order.

        Raises ``ValueError`` if this is a part of a model that holds only some of their rows.
        """
        pieces = self._plan[self._names[parameter]]
        if any(piece.cut or not piece.stored for piece in pieces):
            raise ValueError("a part of a model does not hold whole tensors")
        return [self.checkpoint.tensors[piece.key] for piece in pieces]

    def _fill(self, module: nn.Module, borrow: bool, but: frozenset[nn.Parameter] = frozenset()) -> Replaced:
        """Give values to the parameters of a module that have none."""

        def values(parameter: nn.Parameter) -> torch.Tensor | None:
            if parameter not in self._names or parameter in but:
                return None
            return self._values(self._plan[self._names[parameter]], parameter.shape, borrow)

        return replace_parameters(module, values)

    def _values(self, pieces: list[Piece], shape: torch.Size, borrow: bool) -> torch.Tensor:
        """Read the values of a parameter."""
        tensors = self.checkpoint.tensors
        if borrow and len(pieces) == 1 and pieces[0].stored and tensors[pieces[0].key].dtype == self.dtype:
            return tensors[pieces[0].key].read(pieces[0].cut)
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        for piece in pieces:
            if piece.stored:
                tensors[piece.key].copy_to(values[piece.rows], piece.cut)
            else:
                values[piece.rows].zero_()
        return values


def load_model(
    path: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    part: Callable[[LlamaConfig], ModelPart] | None = None,
) -> Llama:
    """Load a checkpoint, memory-mapped, without gradients.

    Args:
        path: a Hugging Face directory (``config.json`` and ``model.safetensors``, or an index and its shards), a GGUF
            file, or an open ``Checkpoint``.
        dtype: bfloat16, float16, float32, or ``"auto"``. ``"auto"`` means the dtype in the config, and bfloat16 for a
            GGUF file that is not all float32.
        device: ``"auto"``, or any torch device.
        part: a function from the configuration to the part of the model to load; nothing else is read. None loads the
            whole model.

    Raises:
        CheckpointError: unknown architecture or rope type; missing, surplus or misshapen tensors; broken files.
        ValueError: unknown dtype or device.
    """
    return Loading(path, dtype, device, part=part).load_all()


def checkpoint_tensors(model: Llama) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``model`` under Hugging Face's names, for a checkpoint. Leave out a head that is the
    embedding."""
    parameters = dict(model.named_parameters())
    for name, pieces in layout(model.config, parameters).items():
        if model.config.traits.fused and len(pieces) > 1:
            yield f"model.{name}", parameters[name].detach()
            continue
        for piece in pieces:
            yield piece.key, parameters[name].detach()[piece.rows]


def save_model(model: Llama, directory: str | Path, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> None:
    """Write ``config.json`` and ``model.safetensors`` to ``directory``, in Hugging Face's layout and with weights in
    ``dtype``. ``extra`` is added to the config."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.to("cpu", dtype).contiguous() for key, value in checkpoint_tensors(model)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_hf(dtype=str(dtype).removeprefix("torch."), **extra)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
