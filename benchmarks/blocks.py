"""What a block of a DFlash head costs, in forwards of its target: ``python -m benchmarks.blocks 4B w8a8 w4``.

Weights are random, in the published shapes of Qwen3-4B and 8B and of their heads (z-lab's, blocks of 16). The target
has a sixth of its layers, which are timed without the output matrix and count six times. Times are the best of
several, in turns, after a context of 512 tokens; a draft also reads 4 confirmed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Annotated, Any

import torch
import typer
from torch import nn

from fly.backends.cpu import CpuExecutor, PackedLlama
from fly.backends.cpu.dflash import CpuDFlashHead
from fly.cache import PagedKVCache
from fly.models import LlamaConfig
from fly.models.dflash import DFlashConfig, DFlashHead
from fly.models.llama import Layer, skeleton
from fly.params import SamplingParams
from fly.policies import Exact
from fly.runner.drafting import Batch, DraftSpec
from fly.runner.request import Row

SIZES = {"4B": (2560, 9728), "8B": (4096, 12288)}
LAYERS, CONTEXT, BLOCK, CONFIRMED, TIMES = 36, 512, 16, 4, 6


def make_config(size: str, layers: int) -> LlamaConfig:
    width, inner = SIZES[size]
    return LlamaConfig(
        family="qwen3", vocab_size=151936, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, rope_theta=1e6,
    )  # fmt: skip


def fill(module: nn.Module) -> None:
    """Give random values to the parameters of a skeleton, in bfloat16."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            values = torch.ones(parameter.shape, dtype=torch.bfloat16)
            if parameter.ndim > 1:
                values.normal_(0, parameter.shape[-1] ** -0.5)
            setattr(part, name, nn.Parameter(values, requires_grad=False))


def make_target(size: str, kernels: str) -> CpuExecutor:
    """A target with a sixth of its layers. All are packed from one layer's values."""
    model = skeleton(make_config(size, LAYERS // TIMES))
    model.layers = nn.ModuleList(repeat(model.layers[0], LAYERS // TIMES))
    fill(model)
    return CpuExecutor(PackedLlama(model, kernels))


def make_head(size: str) -> DFlashHead:
    config = DFlashConfig(
        layer=make_config(size, 5), draft_vocab_size=151936, target_hidden_size=SIZES[size][0],
        states=(1, 3, 5, 7, 9), block_size=BLOCK, mask_token_id=151669, causal=(False,) * 5,
    )  # fmt: skip
    with torch.device("meta"):
        head = DFlashHead(config)
    layers: Any = head.layers
    layer: Layer = layers[0]
    head.layers = nn.ModuleList(repeat(layer, 5))
    fill(head)
    head.register_buffer("to_target_U", torch.arange(151936), persistent=False)
    return head


def best(*calls: Callable[[], object], turns: int = 7) -> list[float]:
    """The shortest time of each call, in turns."""
    found = [float("inf")] * len(calls)
    for _ in range(turns):
        for n, call in enumerate(calls):
            start = time.perf_counter()
            call()
            found[n] = min(found[n], time.perf_counter() - start)
    return found


def main(
    size: Annotated[str, typer.Argument(help="4B or 8B")],
    target_kernels: Annotated[str, typer.Argument(help="of the target, such as w8a8")],
    head_kernels: Annotated[list[str], typer.Argument(help="of the head, such as w8a8 or w4; several in turns")],
    vocabulary: Annotated[int, typer.Option(help="how many tokens a trimmed head keeps; 0: all")] = 0,
) -> None:
    target = make_target(size, target_kernels)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 150000, (CONTEXT + BLOCK + 1,), generator=generator).tolist()
    cache = PagedKVCache.for_model(target, 1024)
    cache.resize(0, CONTEXT + BLOCK)
    target.score(Batch.of([tokens[:CONTEXT]], cache.batch([0], [0], [CONTEXT])), [])

    def layers_of(count: int) -> Callable[[], object]:
        batch = Batch.of([tokens[CONTEXT : CONTEXT + count]], cache.batch([0], [CONTEXT], [count]))
        tokens_T, positions_T = torch.tensor(batch.tokens), torch.tensor(batch.positions)
        return lambda: target.packed(tokens_T, positions_T, batch.kv)

    hidden_TC = torch.randn(BLOCK, SIZES[size][0], generator=generator).bfloat16()
    calls = [layers_of(1), layers_of(BLOCK), lambda: target.logits(hidden_TC[:1]), lambda: target.logits(hidden_TC)]
    for kernels in head_kernels:
        head = CpuDFlashHead(make_head(size), kernels)
        if vocabulary:
            head.trim(list(range(vocabulary)))
        head.share(target)
        own = PagedKVCache.for_model(head, 1024)
        own.resize(0, CONTEXT + CONFIRMED + BLOCK)
        states_TF = torch.randn(CONTEXT, 5 * SIZES[size][0], generator=generator).bfloat16()
        head.read(Batch.of([tokens[:CONTEXT]], own.batch([0], [0], [CONTEXT])), states_TF)
        new, row = (
            tokens[CONTEXT : CONTEXT + CONFIRMED],
            Row(tokens, 1, SamplingParams(temperature=0.0), Exact(), 0, 64),
        )
        batch = Batch.of([new], own.batch([0], [CONTEXT], [CONFIRMED]))
        read_TF = states_TF[:CONFIRMED].contiguous()
        draft = partial(head.draft, batch, read_TF, DraftSpec(), [row], [BLOCK - 1])
        layers, block, logits, logits_of_block, drafted = best(*calls, draft)
        one, many = TIMES * layers + logits, TIMES * block + logits_of_block
        print(
            f"{size} {target.kernels}, head {head.kernels}{f' of {vocabulary} tokens' if vocabulary else ''}: "
            f"{1e3 * one:.0f} ms for a token, {many / one:.2f} forwards for {BLOCK} tokens; "
            f"a block {1e3 * drafted:.0f} ms, {drafted / one:.3f} forwards of a token, {drafted / many:.3f} of {BLOCK}",
            flush=True,
        )
        del head, draft


if __name__ == "__main__":
    typer.run(main)
