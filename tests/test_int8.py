"""Int8 weights by torchao, as devices other than the CPU have them; the values are the CPU's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fly
from fly.backends import int8, load_executor
from fly.backends.int8 import INT8, wants_int8, with_int8_weights
from fly.backends.torch import TorchExecutor
from fly.models import DenseCausal, Llama, LlamaConfig, load_model, save_model
from fly.models.compiled import CompiledLayers
from fly.models.llama import LayerLoop, run_layers
from fly.models.loading import Loading
from fly.parallel import LLAMA, Part, Rule
from tests.toys import random_llama

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
CUDA = torch.device("cuda")


def save(directory: Path, tied: bool = False) -> Path:
    save_model(random_llama(1, layers=3, tied=tied), directory, torch.float32)
    return directory


def matrices(model: Llama) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def logits(model: Llama, through: LayerLoop = run_layers) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model(torch.arange(6), torch.arange(6), DenseCausal(1, 6), through=through))


@needs_torchao
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_rounded_to_the_nearest_step(tmp_path: Path, tied: bool) -> None:
    exact = load_model(save(tmp_path, tied))
    model = with_int8_weights(Loading(tmp_path))
    kept = {"lm_head"} if tied else set()
    for name, linear in matrices(model).items():
        original = matrices(exact)[name].weight
        if name in kept:
            assert torch.equal(linear.weight, original) and linear.weight is model.embed_tokens.weight
            continue
        weight: Any = linear.weight
        assert weight.qdata.dtype == torch.int8 and weight.qdata.element_size() == 1
        step = original.abs().amax(1, keepdim=True) / 127
        assert ((weight.dequantize() - original).abs() <= step / 2 + 1e-6).all(), name
    assert torch.equal(model.embed_tokens.weight, exact.embed_tokens.weight)
    copied = with_int8_weights(exact)
    assert torch.equal(logits(copied), logits(model)) and type(exact.layers[0].mlp.down_proj.weight) is nn.Parameter


@needs_torchao
def test_values_are_those_of_the_rounded_weights(tmp_path: Path) -> None:
    """One by one and compiled."""
    model, twin = with_int8_weights(Loading(save(tmp_path))), load_model(tmp_path)
    exact = logits(twin)
    for name, linear in matrices(twin).items():
        weight: Any = matrices(model)[name].weight
        linear.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
    expected = logits(twin)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=0)
    assert 1e-3 < (exact - expected).abs().max() < 1.0
    torch._dynamo.reset()
    torch.testing.assert_close(logits(model, CompiledLayers(backend="aot_eager")), expected, atol=1e-4, rtol=0)


@needs_torchao
@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_part_is_rounded_as_it_is(tmp_path: Path, rank: int) -> None:
    save(tmp_path)

    def part(config: LlamaConfig) -> Part:
        return Part(config, rank, 2, LLAMA[1:] + (Rule(LLAMA[0].names, "replicate"),))  # 37 tokens do not divide

    exact, model = load_model(tmp_path, part=part), with_int8_weights(Loading(tmp_path, part=part))
    for name, linear in matrices(model).items():
        weight: Any = linear.weight
        original = matrices(exact)[name].weight
        step = original.abs().amax(1, keepdim=True) / 127
        assert weight.qdata.dtype == torch.int8
        assert ((weight.dequantize() - original).abs() <= step / 2 + 1e-6).all(), name


@needs_torchao
def test_one_layer_at_a_time_is_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, rounding, held = Loading(save(tmp_path)), int8._round, []

    def note(module: nn.Module) -> None:
        whole = [each.weight for each in matrices(loading.model).values() if type(each.weight) is nn.Parameter]
        held.append(sum(not weight.is_meta for weight in whole))
        rounding(module)

    monkeypatch.setattr(int8, "_round", note)
    with_int8_weights(loading)
    assert held == [4, 4, 4, 1]  # the matrices of a layer, thrice, and the head


@needs_torchao
def test_an_engine_says_the_same_on_rounded_weights(tmp_path: Path) -> None:
    """Speculation is as exact as ever, whatever the weights are."""
    llama = with_int8_weights(Loading(save(tmp_path)))
    params = fly.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = []
    for draft in (None, "ngram"):
        llm = fly.LLM(TorchExecutor(llama), draft, cache=256)
        texts.append(llm.generate([[1, 2, 3, 1, 2]], params)[0].token_ids)
    assert texts[0] == texts[1] and llm.engine.runner.executor.weight_bytes == 1


def test_the_kernels_are_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not wants_int8("int8", torch.device("cpu")) and not wants_int8("auto", CUDA) and not wants_int8("w8a8", CUDA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"kernels 'int8' on cuda: torchao is not installed \(pip install 'flyspec\[gpu\]'"
    ):
        wants_int8("int8", CUDA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert wants_int8("int8", CUDA)


@needs_torchao
def test_a_checkpoint_is_loaded_so(tmp_path: Path) -> None:
    """On torch's meta device, which is none of the CPU's kernels either."""
    save(tmp_path)
    with pytest.raises(ValueError, match=r"not on meta; choices there: \['auto', 'torch', 'int8', 'int4'\]"):
        load_executor(tmp_path, device="meta", kernels="w8a8")
    executor = load_executor(tmp_path, device="meta", kernels="int8")
    assert executor.kernels == INT8 and executor.weight_bytes == 1
