"""A Llama of which every rank holds a part: loading that part, and the communication around its modules.

Knows nothing of policies, caches or HTTP. The model is not changed; hooks on its modules exchange values among ranks,
as in torch's own tensor parallelism: a sum after every row-parallel projection, a join before and after those that
gather, the embedding as a sum, the logits as shards.

Shape legend: T packed tokens, C hidden width, W a rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fly.backends import load_executor, part_executor
from fly.backends.cpu import chosen
from fly.backends.cpu.library import TORCH
from fly.backends.cpu.packed import refusal
from fly.backends.int8 import rounded, rounds
from fly.models import Llama, LlamaConfig
from fly.models.checkpoint import Checkpoint
from fly.models.loading import Loading, resolve_device
from fly.parallel.compiled import CompiledPart, PartExecutor
from fly.parallel.logits import VocabularyShards
from fly.parallel.plan import LLAMA, Part, Rule
from fly.parallel.ranks import Ranks
from fly.runtime.executor import Executor

__all__ = ["load", "parallelise"]


def load(
    path: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    ranks: Ranks,
    plan: Sequence[Rule] = LLAMA,
    gather_logits: bool = False,
    kernels: str = "torch",
) -> Executor:
    """This rank's part of a checkpoint, ready to run with the others'; arguments and errors as of ``load_model``.

    The plan is checked before anything is read, and no rank goes on unless all have loaded the same checkpoint.

    Args:
        gather_logits: give plain logits, gathered at once, instead of ``VocabularyShards``.
        kernels: what runs it, as for ``fly.LLM``. A plan that gathers is run by PyTorch.

    Raises:
        PlanError: the model does not divide by the plan among so many ranks.
        RankError: some ranks could not load it, or have another checkpoint; it names them, or have other kernels.
        ValueError: kernels that are not available here, or not for this model.
    """
    if ranks.size == 1:
        return load_executor(path, dtype, device, kernels)
    parts: list[Part] = []
    name = path.path if isinstance(path, Checkpoint) else path

    def part(config: LlamaConfig) -> Part:
        parts.append(Part(config, ranks.rank, ranks.size, plan))
        return parts[-1]

    def read() -> Llama:
        narrow = rounds(kernels, resolve_device(device))
        loading = Loading(path, dtype, device, part=part)
        return rounded(loading) if narrow else loading.whole()

    model = ranks.together(read, f"loading {name}")
    ranks.together(lambda: _check_same(ranks, str(parts[0].config), name), f"loading {name}")
    if rounds(kernels, model.device):
        return part_executor(parallelise(model, parts[0], ranks, gather_logits), ranks.awaited, ranks.preparing)
    variant = ranks.together(lambda: _variant(model, kernels, plan), f"loading {name}")
    if TORCH in ranks.collect(variant) and kernels == "auto":
        variant = TORCH
    if variant != TORCH:
        return PartExecutor(CompiledPart(model, variant, parts[0], ranks, gather_logits))
    return part_executor(parallelise(model, parts[0], ranks, gather_logits), ranks.awaited, ranks.preparing)


def _variant(model: Llama, kernels: str, plan: Sequence[Rule]) -> str:
    """What can run the part here. Ranks may use different kernels, but these are compiled on all ranks or on none."""
    reason = "a plan that gathers is PyTorch's" if any(rule.style == "gather" for rule in plan) else refusal(model)
    variant = chosen(kernels)
    if variant != TORCH and reason is not None:
        if kernels != "auto":
            raise ValueError(f"kernels {kernels!r}: {reason}")
        variant = TORCH
    return variant


def _check_same(ranks: Ranks, config: str, path: str | Path) -> None:
    found = ranks.collect(config)
    if different := [rank for rank, theirs in enumerate(found) if theirs != found[0]]:
        raise ValueError(f"{path}: ranks {different} have another config.json than rank 0")


def parallelise(model: Llama, part: Part, ranks: Ranks, gather_logits: bool = False) -> Llama:
    """Make ``model``, which holds ``part``, run as one model with the parts on the other ranks. Returns it.

    Its ``logits`` are shards of the vocabulary (``VocabularyShards``), or plain if they are to be gathered. Before a
    forward, ranks note what they are about to compute (``Ranks.note``).
    """
    model.register_forward_pre_hook(lambda _, args: ranks.note(args[0], args[1]))
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        style = part.style(f"{name}.weight")
        if style == "row":
            module.register_forward_hook(lambda _, args, out_TC: ranks.sum_(out_TC))
        elif style == "gather":
            module.register_forward_pre_hook(lambda _, args: (ranks.join(args[0]),))
            module.register_forward_hook(lambda _, args, out: ranks.join(out))
        elif style == "vocabulary" and isinstance(module, nn.Embedding):
            _divide_embedding(module, part.slots("vocab_size").start, ranks)
        elif style == "vocabulary":
            module.register_forward_hook(
                lambda _, args, out_TW: ranks.join(out_TW) if gather_logits else VocabularyShards(out_TW, ranks)
            )
    return model


def _divide_embedding(module: nn.Embedding, start: int, ranks: Ranks) -> None:
    """A token's row comes from the rank that holds it, and zeros from the others: the sum is exact."""

    def forward(input: Tensor) -> Tensor:  # torch's name for the tokens [T]
        local_T = input - start
        elsewhere_T = (local_T < 0) | (local_T >= module.weight.shape[0])
        x_TC = F.embedding(local_T.masked_fill(elsewhere_T, 0), module.weight)
        return ranks.sum_(x_TC.masked_fill_(elsewhere_T.unsqueeze(-1), 0.0))

    module.forward = forward  # type: ignore[method-assign]
