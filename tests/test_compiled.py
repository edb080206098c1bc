"""Layers under torch.compile: one graph between two attentions, in few kernels, of the same values. No GPU is needed: a
kernel is a group that Inductor's scheduler has fused, or a product that it leaves to a library.

Shape legend: T packed tokens, H query heads, D head width.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fly.cache import PagedKVCache
from fly.models import Llama, LlamaConfig
from fly.models.compiled import CompiledLayers
from fly.models.families import FAMILIES, FULL, SLIDING
from fly.models.llama import LayerLoop, run_layers
from tests.toys import build_llama

# Operations of a layer in bfloat16 outside of its attention, one by one and compiled. Four of each are products.
BUDGETS = {
    "llama": (13, 8),
    "mistral": (13, 8),
    "qwen2": (13, 8),
    "qwen3": (16, 8),
    "gemma3_text": (42, 8),
    "granite": (13, 8),
    "phi3": (13, 8),
    "olmo2": (18, 10),
}


def toy(family: str, layers: int = 4) -> Llama:
    """A model with all that its family has, of few numbers: two kinds of layers where it has windows."""
    traits = FAMILIES[family]
    options: dict[str, Any] = {
        "sliding_window": 4,
        "layer_types": [FULL if number % 3 == 2 else SLIDING for number in range(layers)],
        "query_pre_attn_scalar": 9,
        "rope_local_base_freq": 50.0,
    }
    config = LlamaConfig(
        family=family,
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        **{name: value for name, value in options.items() if name in traits.options},
    )
    return build_llama(config)


class Attended:
    """Attention that does nothing."""

    def __init__(self, out_THD: Tensor) -> None:
        self.out_THD = out_THD

    def attend(self, *_: Any) -> Tensor:
        return self.out_THD


class Operations(TorchDispatchMode):
    """Counts what PyTorch does one by one: views are free, and a norm of one call counts as one, as it is on CUDA."""

    VIEWS = ("chunk", "flatten", "slice", "unflatten", "view")

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not self.inside and name not in self.VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Norms(TorchFunctionMode):
    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.rms_norm:
            return func(*args, **(kwargs or {}))
        self.operations.names["rms_norm"] += 1
        self.operations.inside = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.operations.inside = False


def forward(model: Llama, tokens: int = 3, through: LayerLoop = run_layers) -> Tensor:
    config = model.config
    attended = Attended(torch.zeros(tokens, config.num_attention_heads, config.head_dim, dtype=model.dtype))
    with torch.inference_mode():
        return model(torch.arange(tokens), torch.arange(tokens), attended, through=through)


def operations(family: str, layers: int) -> int:
    model, counted = toy(family, layers).to(torch.bfloat16), Operations()
    model.rotary()
    with Norms(counted), counted:
        forward(model)
    return sum(counted.names.values())


@contextmanager
def scheduled() -> Iterator[list[list[str]]]:
    """Of each graph that Inductor is given: its kernels, as they are after fusion. None is compiled."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    graphs: list[list[str]] = []

    def note(nodes: list[Any]) -> list[Any]:
        graphs.append([type(node).__name__ for node in nodes if type(node).__name__ != "NopKernelSchedulerNode"])
        return nodes

    class Nothing:
        @staticmethod
        def call(*_: Any) -> None: ...

    with (
        config.patch(_post_fusion_custom_pass=note, force_disable_caches=True),
        mock.patch.object(GraphLowering, "compile_to_module", lambda graph: (graph.codegen(), Nothing())[1]),
    ):
        yield graphs


def only_scheduled(graph: Any, inputs: Any) -> Any:
    """A backend that lets Inductor make its kernels, and runs the graph without them."""
    from torch._inductor.compile_fx import compile_fx

    compile_fx(graph, inputs)
    return graph.forward


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_one_graph_of_few_kernels(family: str) -> None:
    """A graph break would be an error."""
    torch._dynamo.reset()
    eager = operations(family, 4) - operations(family, 3)
    model = toy(family, 2).to(torch.bfloat16)
    with scheduled() as graphs:
        forward(model, through=CompiledLayers(backend=only_scheduled))
    _, between, _ = graphs
    assert sum(name.startswith("ExternKernel") for name in between) == 4, between
    assert (eager, len(between)) == BUDGETS.get(family), between  # a family without figures is shown its own


def test_layers_share_what_is_compiled() -> None:
    """Of each number of tokens, also where there are more of them than torch would take unasked."""
    torch._dynamo.reset()
    model, graphs = toy("gemma3_text", 6), []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = [forward(model, tokens) for tokens in range(1, 11)]
    compiled = CompiledLayers(backend=note)
    for _ in range(2):
        for tokens, theirs in enumerate(expected, 1):
            torch.testing.assert_close(forward(model, tokens, compiled), theirs, atol=1e-5, rtol=0)
    assert len(graphs) == 3 * len(expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
def test_compiled_layers_give_the_same_values() -> None:
    """Over the paged cache, as a prompt comes in and as a block is verified, through all layers and some."""
    torch._dynamo.reset()
    model = toy("gemma3_text")

    def run(through: LayerLoop) -> list[Tensor]:
        cache = PagedKVCache(model.config, 16, 4)
        cache.resize(0, 8)
        found = []
        with torch.inference_mode():
            for start, stop in ((0, 4), (4, 8)):
                places, kv = torch.arange(start, stop), cache.batch([0], [start], [stop - start])
                found.append(model(places, places, kv, through))
        return found

    expected, compiled = run(run_layers), CompiledLayers()
    with torch._inductor.config.patch(compile_threads=1):
        for ours, theirs in zip(run(compiled), expected):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_graph_break_is_an_error() -> None:
    model = toy("llama", 2)
    model.layers[0].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = CompiledLayers(backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        forward(model, through=compiled)
