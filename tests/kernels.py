"""Helpers of tests of compiled kernels: variants, texts in pages, drafts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fly import SamplingParams
from fly.backends.cpu import CpuExecutor, PackedLlama, available, why_not
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.models import Llama, LlamaConfig
from fly.policies import Exact
from fly.runner.executor import Batch, DraftSpec, Executor, Lookup
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling

VARIANTS = [name for name in available() if name != "torch"]
W8A8, W4A8, W4 = ([f"{name}-{kind}" for name in VARIANTS] for kind in ("w8a8", "w4a8", "w4"))
GROUPED = [*W4A8, *W4]
NARROW = [*W8A8, *GROUPED]
built = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")
DTYPES = [torch.float32, torch.bfloat16]

# Widths that are no multiple of a vector or a panel, and more of each than one block holds.
WIDE = LlamaConfig(
    vocab_size=101,
    hidden_size=72,
    intermediate_size=90,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=40,
    max_position_embeddings=640,
    attention_bias=True,
    mlp_bias=True,
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def paged(
    model: Llama | PackedLlama,
    rows: list[Tensor],
    cuts: list[list[int]],
    *,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 4,
    scatter: int = 0,
) -> list[Tensor]:
    """Logits of each row's every token, fed side by side: the n-th call takes ``cuts[b][n]`` tokens of row b, as far as
    it has as many cuts. ``scatter`` mixes up the pages."""
    total = sum(-(-len(row) // block_size) + 1 for row in rows)
    cache = PagedKVCache(model.config, 2 * total + scatter, block_size, cache_dtype or model.dtype)
    for hole in range(scatter):  # every other page is somebody else's
        cache.resize(f"hole {hole}", block_size)
    for hole in range(0, scatter, 2):
        cache.allocator.release(f"hole {hole}")
    at = [0] * len(rows)
    parts: list[list[Tensor]] = [[] for _ in rows]
    for n in range(max(map(len, cuts))):
        live = [b for b in range(len(rows)) if n < len(cuts[b])]
        counts = [cuts[b][n] for b in live]
        for b, count in zip(live, counts):
            cache.resize(b, at[b] + count)
        kv = cache.batch(live, [at[b] for b in live], counts)
        tokens_T = torch.cat([rows[b][at[b] : at[b] + count] for b, count in zip(live, counts)])
        positions_T = torch.cat([torch.arange(at[b], at[b] + count) for b, count in zip(live, counts)])
        logits_TV = model.logits(model(tokens_T, positions_T, kv))
        for b, part in zip(live, logits_TV.split(counts)):
            parts[b].append(part)
            at[b] += len(part)
    return [torch.cat(part) for part in parts]


@st.composite
def cut(draw: st.DrawFn, length: int, most: int = 40) -> list[int]:
    """A length as a sum of parts."""
    parts = []
    while length:
        parts.append(draw(st.integers(1, min(length, most))))
        length -= parts[-1]
    return parts


def text(length: int, seed: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


GREEDY = SamplingParams(temperature=0.0)

sampled = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.5, 1e-30, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.87, 0.53, 0.01]),  # no sum of equal shares, which rounding would decide
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)


def make_row(
    tokens: list[int], stop_ids: frozenset[int] = frozenset(), params: SamplingParams = GREEDY, seed: int = 0
) -> Row:
    return Row(tokens, len(tokens), params, Exact(), seed=seed, k=8, stop_ids=stop_ids)


def stepwise(model: CpuExecutor) -> Executor:
    """The same model without the call that drafts at once."""
    return TorchExecutor(model.packed)


def fresh_cache(model: PackedLlama, prompts: list[list[int]], starts: list[int], room: int) -> PagedKVCache:
    """With the first ``starts[b]`` tokens of each prompt stored, and room for so many more than the prompts."""
    cache = PagedKVCache(model.config, sum((len(p) + room) // 4 + 1 for p in prompts), 4, model.dtype)
    for b, (prompt, start) in enumerate(zip(prompts, starts)):
        cache.resize(b, start)
        if start:
            model(torch.tensor(prompt[:start]), torch.arange(start), cache.batch([b], [0], [start]))
        cache.resize(b, len(prompt) + room)
    return cache


def drafted_by(
    executor: CpuExecutor,
    prompts: list[list[int]],
    starts: list[int],
    most: list[int],
    lookup: Lookup | None,
    stops: list[frozenset[int]] | None = None,
    sampling: BatchSampling | None = None,
    seeds: list[int] | None = None,
) -> tuple[list[list[int]], Tensor | None, list[Tensor]]:
    """What ``extend`` says of prompts whose first tokens are cached, and all keys and values cached then."""
    ids, cache = list(range(len(prompts))), fresh_cache(executor.packed, prompts, starts, max(most))
    new = [prompt[start:] for prompt, start in zip(prompts, starts)]
    batch = Batch.of(new, cache.batch(ids, starts, list(map(len, new))))
    rows = [make_row(prompt, ends) for prompt, ends in zip(prompts, stops or [frozenset()] * len(prompts))]
    drafted, probs_BKV, *_ = executor.extend(batch, DraftSpec(lookup=lookup), rows, most, sampling, seeds or [])
    stored = []
    for b, (prompt, tokens) in enumerate(zip(prompts, drafted)):
        slots = cache.slots(b, 0, len(prompt) + len(tokens) - 1)
        stored += [cache.keys[:, slots], cache.values[:, slots]]
    return drafted, probs_BKV, stored
