"""Choose the backend that runs a model. A new backend is added here; no other file knows of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from fly.backends import cpu, cuda
from fly.backends.cpu.library import NARROW, TORCH, available, chosen, leaves_kernels_open, split, why_not
from fly.backends.int8 import INT8, wants_int8, with_int8_weights
from fly.backends.torch import Model, TorchExecutor
from fly.drafts.base import Loaded
from fly.errors import shorten
from fly.late import Places
from fly.models import Llama
from fly.models.bundled import open_model
from fly.models.checkpoint import Checkpoint
from fly.models.directory import Directory
from fly.models.heads import DFLASH, EAGLE3, PEAGLE, head_kind
from fly.models.llama import weight_bytes
from fly.models.loading import Loading, resolve_device, resolve_dtype
from fly.models.tokenizer import Tokenizer, read_eos_ids
from fly.models.trimmed import TrimmedHead, kept_tokens
from fly.runner.executor import Executor, Wrapped
from fly.runner.memory import room_for

__all__ = [
    "LoadExecutor",
    "drop_graphs",
    "executor_of",
    "load",
    "load_executor",
    "max_stored_bytes",
    "part_executor",
    "uses_blocks",
    "why_not_compiled",
]

LoadExecutor = Callable[..., Executor]  # a function like ``load_executor``

_log = logging.getLogger("fly")
_NON_CPU = ["auto", TORCH, "int8", "int4"]  # kernels on other devices; int4 needs CUDA
INT4 = "torch-int4"
# For each kind of trained head, what loads one: path, dtype, device, kernels.
_HEADS = Places(
    {
        EAGLE3: "fly.backends.trained:load_eagle3",
        PEAGLE: "fly.backends.trained:load_peagle",
        DFLASH: "fly.backends.trained:load_dflash",
    }
)
_LARGE = 1 << 29  # bytes in bfloat16 of a draft that runs in four bits: more than caches hold


def wants_int4(kernels: str, device: torch.device) -> bool:
    """Whether ``kernels`` asks for int4 weights on CUDA (``fly.backends.cuda.int4``)."""
    return kernels in ("int4", INT4) and device.type == "cuda"


def executor_of(model: Any, kernels: str = "auto") -> Executor:
    """Return an executor that runs ``model`` with ``kernels`` (``fly.backends.cpu.chosen``). A ``Llama``, loaded or
    being loaded, runs on compiled kernels or on PyTorch; any other model runs on PyTorch. An executor is returned
    unchanged. On devices other than the CPU, ``"int8"`` runs PyTorch with weights that torchao rounds
    (``fly.backends.int8``). On CUDA, ``"int4"`` rounds weights to 4 bits.

    ``"auto"`` chooses PyTorch if there is no compiled code for the device, the dtype or the kind of model. On the CPU
    this is logged, once for each reason.

    Raises ``ValueError`` for kernels that are unknown, not available here, or not for this model.
    """
    narrow = INT4 if wants_int4(kernels, model.device) else INT8 if wants_int8(kernels, model.device) else ""
    variant = narrow or chosen(kernels)
    if isinstance(model, Executor):
        if kernels != "auto" and variant != model.kernels:
            raise ValueError(f"kernels {kernels!r}: this model was loaded for {model.kernels!r}")
        return model
    decoder: Any = model.model if isinstance(model, Loading) else model
    if narrow:
        if not isinstance(decoder, Llama):
            raise ValueError(f"kernels {kernels!r}: a {type(decoder).__name__} is run as it is")
        if narrow == INT8:
            return _on_torch(with_int8_weights(model))
        return _on_torch(cuda.with_int4_weights(model))
    if variant != TORCH:
        if model.device.type != "cpu":
            reason: str | None = f"compiled kernels run on the CPU, not on {model.device}; choices there: {_NON_CPU}"
        else:
            kind = type(decoder).__name__
            reason = cpu.refusal(decoder) if isinstance(decoder, Llama) else f"there is no compiled code for {kind}"
        if reason is None:
            loading = model if isinstance(model, Loading) else None
            if loading is not None and uses_blocks(loading.checkpoint, model.device, kernels):
                variant = f"{variant}-stored"
            return cpu.CpuExecutor(cpu.PackedLlama(decoder, variant, loading))
        if kernels != "auto":
            raise ValueError(f"kernels {kernels!r}: {reason}")
    else:
        reason = why_not() if kernels == "auto" else None
    if reason and model.device.type == "cpu" and isinstance(decoder, Llama):
        _log_once(reason)
    return _on_torch(model)


def uses_blocks(checkpoint: Checkpoint, device: torch.device, kernels: str = "auto") -> bool:
    """Whether ``device`` computes with the blocks of a file as they are."""
    compiled = device.type == "cpu" and available() != [TORCH]
    return compiled and leaves_kernels_open(kernels) and cpu.computes_as_stored(checkpoint)


def why_not_compiled(executor: Executor) -> str:
    """Return why no compiled kernels are here for an executor that runs on PyTorch's; empty if it could have some, or
    is on a device that has none."""
    return (why_not() or "") if executor.kernels == TORCH and executor.device.type == "cpu" else ""


def drop_graphs() -> None:
    """Drop what any backend of this process has captured. Graphs that hold collectives must go before their group."""
    if (graphs := sys.modules.get("fly.backends.cuda.graphs")) is not None:
        graphs.drop_graphs()


def max_stored_bytes(checkpoint: Checkpoint) -> int:
    """Return the most bytes that weights take as a file stores them."""
    return checkpoint.nbytes * 17 // 11  # Q5_0 grows most, from 5.5 bits a weight to 8.5


@cache
def _log_once(reason: str) -> None:
    _log.warning("PyTorch's own kernels run the model, and are slower than compiled ones: %s", reason)


def _on_torch(model: Model | Loading) -> Executor:
    """Return the executor that runs ``model`` on PyTorch's kernels."""
    if isinstance(model, Loading):
        model = model.load_all()
    if model.device.type == "cuda" and isinstance(model, Llama):
        return cuda.CudaExecutor(model)
    return TorchExecutor(model)


def part_executor(
    model: Llama,
    awaited: Callable[[], AbstractContextManager[Any]],
    preparing: Callable[[], AbstractContextManager[Any]],
) -> Executor:
    """Return an executor that runs this process's part of a model on PyTorch. It enters ``awaited`` around each wait
    for other processes, and ``preparing`` around the first runs of new code."""
    if model.device.type == "cuda":
        return cuda.CudaExecutor(model, pool=cuda.GraphPool(model.device, awaited, preparing))
    return TorchExecutor(model)


def load_executor(
    checkpoint: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    kept: list[int] | None = None,
) -> Executor:
    """Load a checkpoint. Arguments and errors are those of ``fly.models.load_model`` and ``executor_of``. ``kept`` are
    the tokens that its head keeps (``fly.models.trimmed``); None: all."""
    loading_device = resolve_device(device)
    if not wants_int4(kernels, loading_device) and not wants_int8(kernels, loading_device):
        chosen(kernels)  # raise an error for bad kernels before anything is read
    part = None if kept is None else partial(TrimmedHead, kept=kept)
    return executor_of(Loading(checkpoint, dtype, device, part=part), kernels)


def load(
    model: object,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    by: LoadExecutor = load_executor,
    context: int | None = None,
    like: Executor | None = None,
    vocabulary: int | str | Path | Collection[int] | None = None,
) -> Loaded:
    """Load a model or a draft head: from an open checkpoint, or by its path or name
    (``fly.models.bundled.find_checkpoint``). A loaded model is used as it is; it runs on PyTorch unless it is an
    executor.

    Args:
        dtype, device, kernels: as for ``load_executor``.
        by: the function that loads a checkpoint.
        context: the most positions to use, if the model has more. Ignored for a loaded model.
        like: the model that this one drafts for; ``"auto"`` means its dtype, device and kernels.
        vocabulary: the tokens that a draft model's head keeps (``fly.models.trimmed.kept_tokens``), besides its control
            tokens; None: all.

    Raises ``ValueError`` (``CheckpointError``) for a checkpoint that cannot be used.
    """
    if vocabulary is not None and not isinstance(model, (str, Path, Checkpoint)):
        raise ValueError("vocabulary trims a head while it is loaded; this model is loaded already")
    if isinstance(model, Loaded):
        return model
    if isinstance(model, Executor):
        return Loaded(model)
    if not isinstance(model, (str, Path, Checkpoint)):
        if not isinstance(model, Model):
            raise ValueError(f"model {shorten(model)} is no name, path, open checkpoint or loaded model")
        return Loaded(executor_of(model, TORCH))
    checkpoint = open_model(model)
    if like is not None:
        dtype, device = (like.dtype if dtype == "auto" else dtype), (like.device if device == "auto" else device)
        kernels = _kernels_like(like, device, checkpoint) if kernels == "auto" else kernels
    if (kind := head_kind(checkpoint.path)) is not None:
        if vocabulary is not None:
            raise ValueError(f"vocabulary trims a model; {checkpoint.path} is a draft head, which has one of its own")
        head_device, head_dtype = resolve_device(device), None if dtype == "auto" else resolve_dtype(dtype, {})
        head_kernels = chosen(kernels) if head_device.type == "cpu" else TORCH
        return Loaded(_HEADS[kind](checkpoint.path, head_dtype, head_device, head_kernels))
    checkpoint.limit(context)
    tokenizer, size = Tokenizer.load(checkpoint), checkpoint.config.vocab_size
    control_ids = read_eos_ids(checkpoint, size) | (tokenizer.control_ids if tokenizer else frozenset())
    trim_options: dict[str, Any] = {}
    if vocabulary is not None:
        trim_options["kept"] = kept_tokens(vocabulary, size, control_ids)
    with _room_for(checkpoint, resolve_dtype(dtype, checkpoint.raw), resolve_device(device), kernels):
        executor = by(checkpoint, dtype, device, kernels=kernels, **trim_options)
    return Loaded(executor, tokenizer, control_ids, checkpoint)


def _room_for(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: str
) -> AbstractContextManager[None]:
    """Return a context for loading a checkpoint. If memory runs out there, the error says how much is needed, and what
    to do."""
    narrow = kernels.rpartition("-")[2] in (*NARROW, "int8", "int4")
    needed, rounded = (weight_bytes(checkpoint.config, dtype.itemsize, small) for small in (narrow, True))
    if kernels.endswith("stored") or uses_blocks(checkpoint, device, kernels):
        needed = max_stored_bytes(checkpoint)
    eight_bits = "w8a8" if device.type == "cpu" else "int8"
    rounding = "" if narrow else f"kernels={eight_bits!r} needs {rounded / 1e9:.2f} GB; otherwise "
    advice = f"{rounding}close other programs, raise the limit (ulimit -v, the container's), or take a smaller model"
    files = checkpoint.weight_files() if isinstance(checkpoint, Directory) else []
    mapped = max((file.stat().st_size for file in files), default=0)  # a file is mapped while its header is read
    return room_for(f"loading {checkpoint.path}", needed, device, advice, mapped)


def _kernels_like(target: Executor, device: str | torch.device, draft: Checkpoint) -> str:
    """Return the kernels of a draft on ``device``, by default those of its target. They are ``"auto"`` if the draft is
    on another kind of device, or if only PyTorch can run the target. On compiled kernels a large draft computes in four
    bits, since time goes into reading its weights, and any other draft from a GGUF file with the file's blocks.
    A small draft computes in its own dtype if the target computes with blocks of a file."""
    inner: Any = target
    while isinstance(inner, Wrapped):
        inner = inner.inner
    model = getattr(inner, "model", None)
    if resolve_device(device).type != target.device.type:
        return "auto"
    if target.kernels == TORCH and (not isinstance(model, Llama) or cpu.refusal(model) is not None):
        return "auto"
    variant, narrow = split(target.kernels)
    kind = head_kind(draft.path)
    if variant in available()[:-1] and kind != EAGLE3:
        if (_file_bytes(draft.path) if kind else weight_bytes(draft.config, 2)) >= _LARGE:
            return f"{variant}-w4"
        if kind is None and cpu.computes_as_stored(draft):
            # "auto" uses the file's blocks too. Several processes cannot, and then "auto" decodes the file.
            return "auto" if variant == available()[0] else f"{variant}-stored"
    return variant if narrow == "stored" else target.kernels


def _file_bytes(directory: Path) -> int:
    """Return the size of the weight files of a head."""
    return sum(file.stat().st_size for ending in ("safetensors", "bin") for file in directory.glob(f"*.{ending}"))
