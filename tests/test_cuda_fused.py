"""Layers in few kernels on the emulated device: how many a captured round holds, and what takes the plain way."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from typing import Any

import pytest
import torch

from fly.backends.cuda import ops
from fly.backends.cuda.fused import FusedOps, Int8Linear, fuse
from fly.backends.int8 import with_int8_weights
from fly.cache import PagedKVCache
from fly.engine import Engine
from fly.policies import parse_policy
from fly.runtime.runner import Runner
from tests.emulator import FREE, Address, Gpu
from tests.test_cuda import SIZES, VOCAB, decode, device, on_cpu, row_of, told
from tests.test_cuda import there as on_device
from tests.test_cuda_first import engine_on
from tests.toys import random_llama

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def count_kernels(gpu: Gpu) -> Counter[str]:
    """Kernels of all captured graphs, by operator. What only looks at memory in another way is none; attention by
    splits is two."""
    names = [
        func._schema.name.partition("::")[2] if hasattr(func, "_schema") else func.run.__name__
        for graph in gpu.alive
        for func, *_ in graph.steps
        if not gpu.looks(func)
    ]
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
