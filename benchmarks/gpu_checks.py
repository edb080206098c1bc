"""Checks of a CUDA device: values against PyTorch's own, graphs against single operations, speculation against
autoregressive decoding. ``gpu.py`` calls each in a process of its own.

A check returns figures by name. It raises ``AssertionError`` where something is wrong.

Shape legend: N new tokens of all rows, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fly
from benchmarks.gpu import ROOT, Refused, Setting
from benchmarks.gpu_times import SHAPES, attention_case, layer_cases, measure_bandwidth, step_cases
from fly.backends import executor_of, load
from fly.backends.cuda.graphs import Part
from fly.backends.cuda.ops import refuse_attention, refuse_layers
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import DraftStrategy, Eagle3Draft, SingleDraft, TreeDraft
from fly.engine import Engine
from fly.extras.bench.shapes import random_model
from fly.models.bundled import CHECKPOINTS
from fly.models.bundled.tasks import problems
from fly.models.llama import allocate, skeleton
from fly.models.tokenizer import Tokenizer
from fly.policies import parse_policy
from fly.runner.executor import Batch, Executor
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import SamplingParams

DTYPES = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4}
"""The largest difference of a kernel's values, as a share of the largest value."""


@torch.inference_mode()
def check_machine(setting: Setting) -> dict[str, Any]:
    """What there is, and how fast memory is read."""
    device, driver = torch.device(setting.device), "unknown"
    if (tool := shutil.which("nvidia-smi")) is not None:
        asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    present = [name for name in ("triton", "torchao") if importlib.util.find_spec(name) is not None]
    return {
        "device": f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(device)}, compute capability "
        f"{capability}, driver {driver}",
        "software": f"fly {fly.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python "
        f"{platform.python_version()}, {', '.join(present)}",
        "attention by our kernels": refuse_attention(device, torch.bfloat16, 128, 256) or "used",
        "layers by our kernels": refuse_layers(device, torch.bfloat16) or "used",
        "bytes read a second": measure_bandwidth(setting),
    }


@torch.inference_mode()
def check_model(setting: Setting) -> dict[str, Any]:
    """A whole bfloat16 model, by our kernels and graphs, is as near to float32 as PyTorch's own operations are."""
    half = random_model(SHAPES[setting.draft], torch.bfloat16, setting.device)
    exact = skeleton(half.config)
    allocate(exact, torch.float32, setting.device)
    for weight, rounded in zip(exact.parameters(), half.parameters()):
        weight.copy_(rounded)
    (want,), (plain,) = _score(TorchExecutor(exact)), _score(TorchExecutor(half))
    del exact
    first, _, replayed = _score(executor_of(half), 3)  # the second is captured
    theirs, ours = (float((x - want).norm() / want.norm()) for x in (plain, replayed))
    assert torch.equal(first, replayed), "a captured forward has other bits than the same one by single operations"
    assert ours <= 1.5 * theirs + 1e-3, f"our kernels are off by {ours:.2e}, PyTorch's by {theirs:.2e}"
    return {"error by our kernels": ours, "by PyTorch": theirs}


def _score(executor: Executor, times: int = 1) -> list[Tensor]:
    """Logits [N, V] of nine new tokens of two rows, after texts of different lengths."""
    texts = [[(7 * at + start) % executor.config.vocab_size for at in range(start)] for start in (309, 50)]
    cache, old = PagedKVCache.for_model(executor, 1024), [len(text) - 9 for text in texts]
    for b, text in enumerate(texts):
        cache.resize(b, len(text))
    executor.score(Batch.of([text[:-9] for text in texts], cache.batch([0, 1], [0, 0], old)), ())
    batch = Batch.of([text[-9:] for text in texts], cache.batch([0, 1], old, [9, 9]))
    return [executor.score(batch).logits_NV.float().cpu() for _ in range(times)]


@torch.inference_mode()
def check_kernels(setting: Setting) -> dict[str, Any]:
    """Each of our kernels gives what PyTorch gives on the host."""
    config, worst = SHAPES[setting.target], dict[str, float]()
    for dtype, tolerance in DTYPES.items():
        where, name = (config, setting.device, dtype), f"difference in {str(dtype).removeprefix('torch.')}"
        cases = [
            attention_case(*where, 2, context, new, tree)
            for context in setting.contexts
            for new, tree in ((1, False), (9, False), (9, True))
        ]
        cases += [case for tokens in (1, 9) for case in layer_cases(*where, tokens)]
        for case in [*cases, *step_cases(*where[:2], 9)]:
            there = case.make()
            here = [x.cpu() if isinstance(x, Tensor) else x for x in there]
            ours, theirs = (tree_leaves((case.run(*given), given)) for given in (there, here))
            for own, other in zip(ours, theirs):
                if isinstance(own, Tensor):
                    error = float((own.cpu().double() - other.double()).abs().max() / other.double().abs().max())
                    assert error <= (tolerance if own.is_floating_point() else 0.0), (
                        f"{case.name} in {dtype} differs by {error:.2e} of the largest value"
                    )
                    worst[name] = max(worst.get(name, 0.0), error)
    return worst


def _load(names: Iterable[str], dtype: torch.dtype, setting: Setting) -> list[Any]:
    """Bundled models."""
    return [load(CHECKPOINTS / name, dtype, setting.device).executor for name in names]


def _decode(target: Executor, strategy: DraftStrategy | None, tokens: int, temperature: float = 0.0) -> list[Row]:
    """Answers of the bundled target to two problems, the second by a relaxed rule above temperature 0."""
    tokenizer, params = (
        Tokenizer(CHECKPOINTS / "fly-target"),
        SamplingParams(temperature=temperature, max_tokens=tokens),
    )
    asked = [[{"role": "user", "content": one.prompt}] for one in problems("arithmetic", "heldout", n=2)]
    texts = [tokenizer.apply_chat_template(messages) for messages in asked]
    rules = ["exact", "fly" if temperature else "exact"]
    rows = [
        Row(list(text), len(text), params, parse_policy(rule), seed, k=4)
        for seed, (text, rule) in enumerate(zip(texts, rules))
    ]
    engine = Engine(Runner(target, PagedKVCache.for_model(target, 2048)), strategy)
    while going := [row for row in rows if not row.finish_reason]:
        engine.step(going)
    return rows


def _compare(target: Executor, strategies: dict[str, DraftStrategy], tokens: int) -> dict[str, Any]:
    """Greedy answers with each strategy are those without one, in fewer rounds."""
    want, found = [row.tokens for row in _decode(target, None, tokens)], {}
    for name, strategy in strategies.items():
        rows = _decode(target, strategy, tokens)
        assert [row.tokens for row in rows] == want, f"with {name} the answers are not those of the target alone"
        found[f"tokens a round with {name}"] = sum(row.generated for row in rows) / sum(
            row.stats.rounds for row in rows
        )
        assert min(found.values()) > 1.5, f"what {name} drafts is not kept: {found}"
    return found


def check_graphs(setting: Setting) -> dict[str, Any]:
    """Rounds by graphs give the tokens of the same rounds by single operations."""
    captured, own = Counter[str](), Part._capture

    def count_captured(part: Part[Any]) -> Any:
        found = own(part)
        captured[f"graphs in {dtype}"] += part._graph is not None
        return found

    for dtype in (torch.bfloat16, torch.float32):
        graphs, eager = (_load(("fly-target", "fly-draft"), dtype, setting) for _ in range(2))
        for temperature in (0.0, 0.8):
            tokens = []
            for (target, drafter), capture in ((graphs, count_captured), (eager, lambda part: part.run())):
                with mock.patch.object(Part, "_capture", capture):
                    rows = _decode(target, SingleDraft(drafter, cache_tokens=2048), setting.tokens, temperature)
                tokens.append([row.tokens for row in rows])
            assert tokens[0] == tokens[1], f"{dtype}, temperature {temperature}: graphs give other tokens"
        assert captured[f"graphs in {dtype}"], f"{dtype}: nothing was captured"
    return dict(captured)


def check_trees(setting: Setting) -> dict[str, Any]:
    target, drafter = _load(("fly-target", "fly-draft"), torch.float32, setting)
    tree = TreeDraft(drafter, nodes=8, depth=4, width=2, cache_tokens=2048)
    return _compare(target, {"a tree": tree}, setting.tokens)


def check_heads(setting: Setting) -> dict[str, Any]:
    target, head = _load(("fly-target", "fly-eagle3"), torch.float32, setting)
    tree = {"nodes": 8, "depth": 4, "width": 2}
    shapes: dict[str, dict[str, int]] = {"a head's chain": {}, "a head's tree": tree}
    strategies = {name: Eagle3Draft(head, cache_tokens=2048, **how) for name, how in shapes.items()}
    return _compare(target, strategies, setting.tokens)


def check_int8(setting: Setting) -> dict[str, Any]:
    if importlib.util.find_spec("torchao") is None:
        raise Refused("torchao is not installed")
    return _check_rounded(setting, "int8")


def check_int4(setting: Setting) -> dict[str, Any]:
    return _check_rounded(setting, "int4")


@torch.inference_mode()
def _check_rounded(setting: Setting, kernels: str) -> dict[str, Any]:
    """Products of nine tokens, by our kernel, are those of more tokens, by PyTorch."""
    executor = executor_of(random_model(SHAPES[setting.draft].resized(4), torch.bfloat16, setting.device), kernels)
    cache, text = PagedKVCache.for_model(executor, 512), [7 * at % 1000 for at in range(300)]
    cache.resize(0, 300)
    whole = executor.score(Batch.of([text], cache.batch([0], [0], [300]))).logits_NV[-9:].float().cpu()
    few = executor.score(Batch.of([text[-9:]], cache.batch([0], [291], [9]))).logits_NV.float().cpu()
    error = float((few - whole).norm() / whole.norm())
    assert error <= 0.03, f"they are off by {error:.2e}"
    return {"difference": error}


def check_ranks(setting: Setting) -> dict[str, Any]:
    """Two processes, each with a part of the target and a device, give the answers of one."""
    if (count := torch.cuda.device_count()) < 2:
        raise Refused(f"two processes need two devices, and there are {count}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (target,) = _load(("fly-target",), torch.float32, setting)
    want = [row.tokens for row in _decode(target, None, setting.tokens)]
    with multiprocessing.get_context(setting.start).Pool(2) as pool:
        found = pool.starmap(_run_rank, [(rank, port, setting) for rank in range(2)], chunksize=1)
    assert found == [want, want], "two processes give other tokens than one"
    return {"tokens": sum(map(len, want))}


def _run_rank(rank: int, port: int, setting: Setting) -> list[list[int]]:
    from fly.parallel import launch
    from fly.parallel import load as load_part

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with setting.around(), launch() as ranks:
        target = load_part(CHECKPOINTS / "fly-target", torch.float32, "cuda", ranks=ranks)
        return [row.tokens for row in _decode(target, None, setting.tokens)]


def check_sanitizer(setting: Setting) -> dict[str, Any]:
    """compute-sanitizer finds no access outside of memory in our kernels."""
    if (tool := shutil.which("compute-sanitizer")) is None:
        raise Refused("compute-sanitizer is not on the path")
    code = (
        "from benchmarks import gpu, gpu_checks; gpu_checks.check_kernels(gpu.Setting(target='tiny', contexts=(300,)))"
    )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert ran.returncode == 0, f"it ended with code {ran.returncode}; the log has what it found"
    return {"tool": tool}
