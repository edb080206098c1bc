"""Load a rank's part of a Llama, and add the exchange with other ranks to its modules.

Hooks on the modules run the collectives, as in torch's own tensor parallelism: a sum after every row-parallel
projection and after the embedding, a join before and after projections that gather. The logits stay divided. Knows
nothing of policies, caches or HTTP.

Shape legend: T packed tokens, C hidden width, W a rank's part of the vocabulary.
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
from fly.backends.int8 import wants_int8, with_int8_weights
from fly.models import Llama, LlamaConfig
from fly.models.checkpoint import Checkpoint
from fly.models.loading import Loading, resolve_device
from fly.parallel.compiled import CompiledPart, PartExecutor
from fly.parallel.logits import VocabularyShards
from fly.parallel.plan import LLAMA, Part, PlanError, Rule
from fly.parallel.ranks import Ranks
from fly.runner.executor import Executor

__all__ = ["load", "parallelise"]


def load(
    path: str | Path | Checkpoint,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    ranks: Ranks,
    plan: Sequence[Rule] = LLAMA,
    kernels: str = "torch",
    kept: list[int] | None = None,
) -> Executor:
    """Load this rank's part of a checkpoint. Arguments and errors are those of ``load_model``.

    The plan is checked before anything is read, and no rank goes on unless all have loaded the same checkpoint.

    Args:
        kernels: what computes the part, as for ``fly.LLM``. Only PyTorch runs plans that gather.
        kept: the tokens that its head keeps (``fly.models.trimmed``), which one process alone can.

    Raises:
        PlanError: the plan cannot divide the model among this number of ranks.
        RankError: some ranks could not load the checkpoint, or have another one; the message names them.
        ValueError: kernels that are not available here, or not for this model.
    """
    if ranks.size == 1:
        return load_executor(path, dtype, device, kernels, kept)
    if kept is not None:
        raise PlanError(
            f"a head that keeps {len(kept)} tokens is not divided among ranks: draft_placement 'replicated'"
        )
    parts: list[Part] = []
    name = path.path if isinstance(path, Checkpoint) else path

    def part(config: LlamaConfig) -> Part:
        parts.append(Part(config, ranks.rank, ranks.size, plan))
        return parts[-1]

    def read() -> Llama:
        if not (int8 := wants_int8(kernels, resolve_device(device))):
            chosen(kernels)  # raise an error for bad kernels before anything is read
        loading = Loading(path, dtype, device, part=part)
        return with_int8_weights(loading) if int8 else loading.load_all()

    model = ranks.together(read, f"loading {name}")
    configs = ranks.collect(str(parts[0].config))
    if different := [rank for rank, rank_config in enumerate(configs) if rank_config != configs[0]]:
        raise ValueError(f"{name}: ranks {different} have another config.json than rank 0")
    if not model.rounded:
        variant = ranks.together(lambda: _variant(model, kernels, plan), f"loading {name}")
        if TORCH not in ranks.collect(variant):  # kernels may differ among ranks, but all are compiled or none is
            return PartExecutor(CompiledPart(model, variant, parts[0], ranks))
    return part_executor(parallelise(model, parts[0], ranks), ranks.awaited, ranks.preparing)


def _variant(model: Llama, kernels: str, plan: Sequence[Rule]) -> str:
    """Return the kernels that this rank would choose by itself."""
    reason = "only PyTorch runs a plan that gathers" if any(rule.style == "gather" for rule in plan) else refusal(model)
    variant = chosen(kernels)
    if variant != TORCH and reason is not None:
        if kernels != "auto":
            raise ValueError(f"kernels {kernels!r}: {reason}")
        variant = TORCH
    return variant


def parallelise(model: Llama, part: Part, ranks: Ranks) -> Llama:
    """Add hooks to ``model``, which holds ``part``, so that all ranks' parts run as one model. Return it.

    Its ``logits`` are ``VocabularyShards``. Before each forward, its tokens and positions are added to the rank's
    checksum (``Ranks.note``).
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
            module.register_forward_hook(lambda _, args, out_TW: VocabularyShards(out_TW, ranks))
    return model


def _divide_embedding(module: nn.Embedding, start: int, ranks: Ranks) -> None:
    """Make an embedding sum over ranks. The rank that holds a token adds its row, the others add zeros, so the sum is
    exact."""

    def forward(input: Tensor) -> Tensor:  # torch's name for the tokens [T]
        local_T = input - start
        elsewhere_T = (local_T < 0) | (local_T >= module.weight.shape[0])
        x_TC = F.embedding(local_T.masked_fill(elsewhere_T, 0), module.weight)
        return ranks.sum_(x_TC.masked_fill_(elsewhere_T.unsqueeze(-1), 0.0))

    module.forward = forward  # type: ignore[method-assign]
