"""Int4 weights on an emulated CUDA device: rounding to the nearest, texts of the widened model, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from fly.backends import load_executor
from fly.backends.cuda import int4, ops
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.engine import Engine
from fly.models import load_model
from fly.models.config import CheckpointError
from fly.models.loading import save_model
from fly.runner.executor import Executor
from fly.runner.runner import Runner
from tests.test_cuda import decode, device, row_of
from tests.toys import random_llama

SIZES = {
    "vocab_size": 23,
    "hidden": 32,
    "intermediate": 96,
    "heads": 2,
    "kv_heads": 1,
    "layers": 2,
    "max_positions": 300,
}


@given(st.sampled_from([32, 64, 96, 256]), st.integers(1, 5), st.sampled_from([0.0, 0.3, 5.0]), st.integers(0, 99))
def test_weights_are_rounded_to_the_nearest(inputs: int, outputs: int, shift: float, seed: int) -> None:
    """Within half a step. Groups of one sign, whose zero is a border, and of zeros are among them."""
    weight_NK = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) + shift
    weight_NK[0] = 0.0
    pairs_NP, scale_NG, zero_NG = int4.round_int4(weight_NK)
    assert pairs_NP.shape == (outputs, inputs // 2) and zero_NG.max() <= 15
    wide_NK = ops.widen_int4(pairs_NP, scale_NG, zero_NG, torch.float32)
    step_NK = scale_NG.repeat_interleave(inputs // scale_NG.shape[1], 1)
    # A zero is rounded, too: at either end of the range a weight may be one more half step away.
    assert ((wide_NK - weight_NK).abs() <= 1.001 * step_NK + 1e-6).all()
    assert wide_NK[0].eq(0).all()


def widened(path: Path) -> Executor:
    """The same model with its rounded weights in float32, on the CPU."""
    model = load_model(path)
    for layer in model.layers:
        for linear in layer.modules():
            if isinstance(linear, torch.nn.Linear):
                linear.weight.data = ops.widen_int4(*int4.round_int4(linear.weight.data), torch.float32)
    return TorchExecutor(model)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_the_widened_model(tmp_path: Path, temperature: float) -> None:
    """Prompts of more than 16 tokens and rounds of fewer, by whole rounds with a draft that is rounded too."""
    save_model(random_llama(0, **SIZES), tmp_path, torch.float32)
    prompts = [[n % 23 for n in range(40)], [1, 2, 3]]
    found, kernels = [], set()
    for there in (True, False):
        rows = [row_of(prompt, seed=b, temperature=temperature) for b, prompt in enumerate(prompts)]
        with device() if there else pytest.MonkeyPatch.context() as gpu:
            target, drafter = (
                load_executor(tmp_path, device="cuda", kernels="int4") if there else widened(tmp_path) for _ in range(2)
            )
            strategy = SingleDraft(drafter, cache_tokens=6000)
            decode(Engine(Runner(target, PagedKVCache.for_model(target, 6000)), strategy), rows)
            if there:
                names = {
                    func._schema.name for graph in gpu.alive for func, *_ in graph.steps if hasattr(func, "_schema")
                }  # type: ignore[union-attr]
                kernels = {name for name in names if "int4" in name}
                assert (target.kernels, target.weight_bytes) == ("torch-int4", 0.53)
        found.append([(row.tokens, row.drafts) for row in rows])
    assert found[0] == found[1] and kernels == {"fly::multiply_int4"}


def test_a_device_that_refuses_the_kernel_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(64, 8)
    layer, x_TK = int4.Int4Linear(linear), torch.randn(3, 64)
    want = layer(x_TK)
    monkeypatch.setattr(int4, "multiply_int4", lambda *_: pytest.fail("launched, though refused"))
    monkeypatch.setattr(int4, "refuse_layers", lambda *_: "triton is not installed")
    with device():
        on_cuda = layer.to("cuda")
        torch.testing.assert_close(on_cuda(x_TK.to("cuda")).cpu(), want)


def test_other_places_refuse_int4(tmp_path: Path) -> None:
    save_model(random_llama(0, **SIZES), tmp_path, torch.float32)
    with pytest.raises(ValueError, match="int4"):
        load_executor(tmp_path, device="cpu", kernels="int4")
    with pytest.raises(ValueError, match="20 inputs has no groups of 32"):
        int4.round_int4(torch.zeros(4, 20))


STORED = {  # of one matrix [64, 32], as the hub's checkpoints have it
    "awq": {"qweight": torch.zeros(32, 8, dtype=torch.int32), "qzeros": torch.zeros(1, 8, dtype=torch.int32)},
    "gptq": {"qweight": torch.zeros(4, 64, dtype=torch.int32), "g_idx": torch.zeros(32, dtype=torch.int32)},
    "fp8": {"weight": torch.zeros(64, 32).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
    "compressed-tensors": {"weight_packed": torch.zeros(64, 4, dtype=torch.int32)},
}


@pytest.mark.parametrize("method", STORED)
def test_quantised_checkpoints_are_refused_by_name(tmp_path: Path, method: str) -> None:
    """Before a weight is read, with what to take instead."""
    save_model(random_llama(0, **SIZES), tmp_path, torch.float32, quantization_config={"quant_method": method})
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    own = {f"model.layers.0.self_attn.q_proj.{name}": values for name, values in STORED[method].items()}
    save_file({**tensors, **own}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=f"weights quantised by '{method}' are not supported; take the unquantised"
    ):
        load_executor(tmp_path, device="cpu")
