"""Layers in few kernels on the emulated device: how many a captured round holds, and what takes the plain way."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fly.backends.cuda import ops
from fly.backends.cuda.fused import FusedOps, Int8Linear, fuse
from fly.backends.int8 import with_int8_weights
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.engine import Engine
from fly.policies import parse_policy
from fly.runner.runner import Runner
from tests.emulator import FREE, Address, Gpu, only_looks
from tests.test_cuda import SIZES, VOCAB, decode, device, on_cpu, row_of, told
from tests.test_cuda import there as on_device
from tests.test_cuda_first import engine_on
from tests.toys import random_llama

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def count_kernels(gpu: Gpu) -> Counter[str]:
    """Kernels of all captured graphs, by operator. What only looks at memory in another way is none; attention by
    splits is two."""
    names = [name_of(func) for graph in gpu.alive for func, *_ in graph.steps if not only_looks(func)]
    found = Counter(name for name in names if name not in FREE)
    found["attend_pages"] *= 2
    return +found


def count_layer(way: str = "pages") -> Counter[str]:
    """Kernels that one layer more adds to a round of one row without a draft."""
    found = []
    for layers in (1, 2):
        model = random_llama(0, **{**SIZES, "layers": layers})
        with device(way) as gpu:
            executor = on_device(model)
            engine, row = Engine(Runner(executor, PagedKVCache.for_model(executor, 6000))), row_of([1, 2, 3])
            decode(engine, [row])
            found.append(count_kernels(gpu))
        want = row_of([1, 2, 3])
        decode(Engine(Runner(on_cpu(model), PagedKVCache.for_model(on_cpu(model), 6000))), [want])
        assert told(row) == told(want)
    return found[1] - found[0]


@needs_triton
def test_a_layer_is_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = count_layer()
    monkeypatch.setattr("fly.backends.cuda.fused.refuse_layers", lambda *_: "not now")
    apart, before = count_layer(), count_layer("flash")
    assert fused == {
        "linear": 4, "attend_pages": 2, "rms_norm": 1, "add_norm": 1, "rotate_store": 1, "gate": 1, "add": 1,
    }  # fmt: skip
    assert (before.total(), apart.total(), fused.total()) == (18, 17, 11)


WEIGHTS = {"linear", "embedding", "rms_norm", "add_norm", "rotate_store", "attend_pages", "index_copy_", "gate"}


def count_round(temperature: float, top_p: float, vocabulary: int, way: str = "pages") -> dict[str, tuple[int, int]]:
    """For the graphs of a round with a draft of K 8: the kernels outside of its layers, and the bytes of what they read
    and write, without weights and caches."""
    found = dict[str, list[tuple[int, int]]]()
    for layers in (1, 2):
        sizes = {**SIZES, "layers": layers, "vocab_size": vocabulary}
        with device(way) as gpu:
            target, drafter = (on_device(random_llama(seed, **sizes)) for seed in (0, 1))
            strategy = SingleDraft(drafter, cache_tokens=6000)
            engine, row = (
                Engine(Runner(target, PagedKVCache.for_model(target, 6000)), strategy),
                row_of([1, 2, 3], k=8, temperature=temperature, top_p=top_p, max_tokens=6),
            )
            decode(engine, [row])
            for graph in gpu.alive:
                steps = [step for step in graph.steps if not only_looks(step[0]) and name_of(step[0]) not in FREE]
                names = Counter(name_of(func) for func, *_ in steps)
                part = "draft" if names["linear"] > 20 else "target" if names["linear"] else "decision"
                moved = sum(bytes_of(step) for step in steps if name_of(step[0]) not in WEIGHTS)
                found.setdefault(part, []).append((len(steps), moved))
    return {part: (2 * one[0] - two[0], 2 * one[1] - two[1]) for part, (one, two) in found.items()}


def name_of(func: Any) -> str:
    return func._schema.name.partition("::")[2] if hasattr(func, "_schema") else func.run.__name__


def bytes_of(step: Any) -> int:
    """Of the tensors that a step reads and writes."""
    _, args, kwargs, made = step
    there = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, (Address, torch.Tensor))]
    return sum(math.prod(x.look[1] if isinstance(x, Address) else x.shape) * x.dtype.itemsize for x in there)


def test_the_rest_of_a_round_is_few_kernels_too() -> None:
    """Slots, positions, coins, what is kept of a distribution and what is drawn are one kernel each; nothing is
    sorted."""
    greedy, drawn = (count_round(temperature, top_p, 600) for temperature, top_p in ((0.0, 1.0), (0.8, 0.9)))
    assert {part: kernels for part, (kernels, _) in greedy.items()} == {"draft": 225, "target": 13, "decision": 63}
    assert {part: kernels for part, (kernels, _) in drawn.items()} == {"draft": 366, "target": 13, "decision": 145}


@pytest.mark.parametrize("tokens", [1, 16, 17])
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_products_of_few_tokens_are_our_own(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And have torchao's values."""
    model, asked = with_int8_weights(random_llama(0, **SIZES)), list[int]()
    own = ops.multiply_int8
    monkeypatch.setattr("fly.backends.cuda.fused.refuse_layers", lambda *_: None)
    monkeypatch.setattr("fly.backends.cuda.fused.multiply_int8", lambda *x: (asked.append(len(x[0])), own(*x))[1])
    mlp: Any = model.layers[0].mlp
    x_TC = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = mlp(x_TC)
        fuse(model)
        assert isinstance(mlp.down_proj, Int8Linear) and isinstance(mlp.ops, FusedOps)
        torch.testing.assert_close(mlp(x_TC), want, rtol=1e-4, atol=1e-5)
    assert asked == ([tokens, tokens] if tokens <= 16 else [])


def test_what_the_device_refuses_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with device() as gpu:
        monkeypatch.setattr(ops, "_compare_layers", lambda *_: "gate differs from the reference")
        ops.refuse_layers.cache_clear()
        try:
            models = [on_device(random_llama(0, **SIZES)).model for _ in range(2)]  # type: ignore[attr-defined]
        finally:
            ops.refuse_layers.cache_clear()
        assert not any(isinstance(model.layers[0].ops, FusedOps) for model in models) and not gpu.graphs
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert (len(said) == 1 and "differs" in said[0]) or importlib.util.find_spec("triton") is None


@pytest.mark.parametrize(("temperature", "policy"), [(0.0, "exact"), (0.0, "fly"), (0.8, "exact")])
def test_greedy_rounds_write_no_float32_logits(temperature: float, policy: str) -> None:
    """By an exact rule, in bfloat16, with a draft model. Other rules read more than the likeliest tokens."""
    with device() as gpu:
        engine, row = (
            engine_on("cuda", torch.bfloat16),
            row_of([1, 2, 3], parse_policy(policy), temperature=temperature),
        )
        decode(engine, [row])
        results = [x for graph in gpu.alive for *_, made in graph.steps for x in made]
        made = [(tuple(x.look[1] if isinstance(x, Address) else x.shape)[-1:], x.dtype) for x in results]
        assert ((VOCAB,), torch.bfloat16) in made
        exact = ((VOCAB,), torch.float32) in made
    assert row.generated == 40 and exact == ((temperature, policy) != (0.0, "exact"))


def main() -> None:
    """The counts of docs/results/kernels.md: ``python -m tests.test_cuda_fused``."""
    for temperature, top_p in ((0.0, 1.0), (0.8, 0.9)):
        print(f"temperature {temperature}: kernels and bytes outside of layers")
        for part, (kernels, moved) in count_round(temperature, top_p, 600).items():
            print(f"  {part:10}{kernels:6}{moved:10,}")


if __name__ == "__main__":
    main()
