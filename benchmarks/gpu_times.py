"""Times on a CUDA device: of kernels, and of rounds. ``gpu.py`` calls each in a process of its own.

A time is a row of name, seconds, and the bytes that have to be read: weights once, keys and values of each row's text.
Layers are not compiled (``torch.compile``), which would take most of the hour.

Shape legend: T tokens, R rows, W pages of a row, Z tokens a page, S slots of the cache, N new tokens of each row,
H query heads, G key/value heads, D head width, C hidden width, I width of the feed-forward layer.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu import Setting
from fly.backends import executor_of
from fly.backends.cuda import ops
from fly.backends.cuda.graphs import GraphPool, Part
from fly.backends.cuda.int4 import round_int4
from fly.backends.heads import TorchHead
from fly.cache import PagedKVCache
from fly.drafts import DraftStrategy, Eagle3Draft, SingleDraft
from fly.drafts.base import Continuation, Wrapper
from fly.engine import Engine
from fly.extras.bench.clock import clocked, take_turns
from fly.extras.bench.plan import MODELS
from fly.extras.bench.shapes import forward_bytes, random_model, randomise
from fly.models import LlamaConfig
from fly.models.eagle import Eagle3Head, HeadConfig
from fly.policies import Exact
from fly.runner.executor import Executor, Spent
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import Draft, SamplingParams

_8B = MODELS["llama-3.1-8b"].model_copy(update={"max_position_embeddings": 8192})
_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
_TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
SHAPES: dict[str, LlamaConfig] = {
    "8b": _8B,
    "1b": _8B.model_copy(update={**_1B, "tie_word_embeddings": True}),
    "tiny": _8B.model_copy(update=_TINY),
}
"""Llama 3.1 8B and 3.2 1B; one for the sanitizer and the tests."""
_PAGE = 256


class Case(NamedTuple):
    """A kernel with the inputs that ``make`` makes; ``read`` are their bytes."""

    name: str
    run: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    read: int


def attention_case(
    config: LlamaConfig, device: str, dtype: torch.dtype, rows: int, context: int, new: int, tree: bool = False
) -> Case:
    """Attention of the last ``new`` of ``context`` tokens of each row, over scattered pages."""
    heads, width, window = config.num_attention_heads, config.head_dim, 100 if tree else 0
    pages, tokens = -(-context // _PAGE), rows * new

    def make() -> tuple[Any, ...]:
        q_THD = torch.randn(tokens, heads, width, device=device, dtype=dtype)
        k_SGD, v_SGD = (
            torch.randn(rows * pages * _PAGE, config.num_key_value_heads, width, device=device, dtype=dtype)
            for _ in range(2)
        )
        table_RW = torch.randperm(rows * pages, device=device).view(rows, pages).int()
        ends_R1 = torch.arange(0, tokens + 1, new, dtype=torch.int32, device=device)
        place_T = torch.arange(context - new, context, dtype=torch.int32, device=device).repeat(rows)
        given = q_THD, k_SGD, v_SGD, ends_R1, place_T + 1, place_T, table_RW, new, _PAGE, window, width**-0.5
        if not tree:
            return given
        start_R = torch.full((rows,), context - new, dtype=torch.int32, device=device)
        seen_TN = torch.rand(tokens, new, device=device).gt(0.5).to(torch.uint8)
        return *given, start_R, seen_TN

    name = f"attention{' of trees' if tree else ''}, {rows} × {new} tokens over {context}"
    read = 2 * rows * context * config.num_key_value_heads * width * dtype.itemsize
    return Case(name, ops.attend_pages, make, read)


def layer_cases(config: LlamaConfig, device: str, dtype: torch.dtype, tokens: int) -> list[Case]:
    """The other kernels of a layer that are our own."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    outputs, size, slots = (heads + 2 * kv_heads) * head, dtype.itemsize, 4 * _PAGE

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def rotation() -> tuple[Any, ...]:
        cache, places_T = (draw(slots, kv_heads, head) for _ in range(2)), torch.randperm(slots, device=device)[:tokens]
        return draw(tokens, outputs), draw(tokens, 1, head), draw(tokens, 1, head), places_T, *cache

    def int8() -> tuple[Any, ...]:
        weight_NK = torch.randint(-127, 128, (outputs, width), device=device).to(torch.int8)
        return draw(tokens, width), weight_NK, torch.full((outputs, 1), 1e-3, device=device), None

    def int4() -> tuple[Any, ...]:
        return draw(tokens, width), *round_int4(draw(outputs, width)), None

    sizes = f"{width} → {outputs}, {tokens} tokens"
    return [
        Case(f"add and norm, {tokens} tokens", ops.add_norm,
             lambda: (draw(tokens, width), draw(tokens, width), draw(width), 1e-5), 2 * tokens * width * size),
        Case(f"gate, {tokens} tokens", ops.gate, lambda: (draw(tokens, 2 * inner),), 2 * tokens * inner * size),
        Case(f"rotation and store, {tokens} tokens", ops.rotate_store, rotation, tokens * outputs * size),
        Case(f"int8 product {sizes}", ops.multiply_int8, int8, width * outputs),
        Case(f"int4 product {sizes}", ops.multiply_int4, int4, width * outputs * 67 // 128),
    ]  # fmt: skip


def step_cases(config: LlamaConfig, device: str, rows: int) -> list[Case]:
    """The kernels of a round outside of its layers, for rows above temperature 0 with top-p."""
    size = config.vocab_size

    def columns(*limits: float) -> list[torch.Tensor]:
        return [torch.full((rows,), limit, device=device) for limit in limits]

    def logits() -> torch.Tensor:
        return 3 * torch.randn(rows, size, device=device)

    def numbers() -> tuple[Any, ...]:
        seed_R = torch.arange(rows, device=device) * 12345678901
        return seed_R, seed_R + 7, 1, 8

    def places() -> tuple[Any, ...]:
        table_RW = torch.arange(rows * 4, device=device).view(rows, 4).int()
        stored_RN = torch.arange(9, device=device).expand(rows, 9) < 5
        return table_RW, torch.arange(rows, device=device) + 250, stored_RN, _PAGE, 4 * rows, 2048

    def shares() -> tuple[Any, ...]:
        logits_RV, found = logits(), columns(14.0, -1.0, 12.0)
        return logits_RV, torch.stack(found), *columns(0.8)

    def coins() -> tuple[Any, ...]:
        return logits().softmax(1), *columns(0.7)

    return [
        Case(f"places, {rows} rows", ops.place, places, 0),
        Case(f"coins, {rows} rows", ops.uniforms, numbers, 0),
        Case(f"what top-p keeps, {rows} rows", ops.find_kept,
             lambda: (logits(), *columns(0.8), None, *columns(0.9), None), 4 * rows * size),
        Case(f"shares of the mass, {rows} rows", ops.share_mass, shares, 8 * rows * size),
        Case(f"draw, {rows} rows", ops.draw, coins, 4 * rows * size),
    ]  # fmt: skip


def product_cases(config: LlamaConfig, device: str, dtype: torch.dtype, tokens: int) -> list[Case]:
    """PyTorch's products of a layer, to compare with."""
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    kv = 2 * config.num_key_value_heads * config.head_dim

    def make(inputs: int, outputs: int) -> tuple[Any, ...]:
        return tuple(torch.randn(count, inputs, device=device, dtype=dtype) for count in (tokens, outputs))

    sizes = (width, heads + kv), (heads, width), (width, 2 * inner), (inner, width)
    return [
        Case(f"product {a} → {b}, {tokens} tokens", F.linear, partial(make, a, b), a * b * dtype.itemsize)
        for a, b in sizes
    ]


def measure_bandwidth(setting: Setting) -> float:
    """Bytes a second of the device's memory: of a long sum, or of a copy, which reads and writes."""
    numbers, device = torch.ones(setting.megabytes << 17, dtype=torch.int64, device=setting.device), setting.device
    other = torch.empty_like(numbers)
    summing, copying = take_turns([numbers.sum, lambda: other.copy_(numbers)], 7, torch.device(device))
    return max(numbers.nbytes / summing.low, 2 * numbers.nbytes / copying.low)


def time_case(case: Case, setting: Setting) -> tuple[str, float, int]:
    """Seconds of one call, in a graph of many, over so many copies of the inputs that no cache holds them."""
    copies = [case.make() for _ in range(max(1, min(setting.repeats, (256 << 20) // max(case.read, 1 << 16))))]
    part = Part(
        lambda: [case.run(*copies[n % len(copies)]) for n in range(setting.repeats)],
        GraphPool(torch.device(setting.device)),
    )
    part(), part()  # warms up, then captures
    assert part._graph is not None, f"{case.name} is not captured"
    timing = take_turns([part], 5, torch.device(setting.device))[0]
    return case.name, timing.median / setting.repeats, case.read


@torch.inference_mode()
def time_kernels(setting: Setting) -> dict[str, Any]:
    config, where = SHAPES[setting.target], (setting.device, torch.bfloat16)
    new = setting.k + 1
    cases = [
        attention_case(config, *where, rows, context, count)
        for context in setting.contexts
        for rows in setting.rows
        for count in (1, new)
    ]
    cases += [case for rows in setting.rows for case in step_cases(config, setting.device, rows)]
    for tokens in (1, new):
        cases += [*layer_cases(config, *where, tokens), *product_cases(config, *where, tokens)]
    return {"rows": [time_case(case, setting) for case in cases]}


class _Watched(Wrapper):
    """A strategy whose rounds record their times."""

    def __init__(self, inner: DraftStrategy) -> None:
        super().__init__([inner])
        self.spent: list[Spent] = []

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return self.members[0].propose(rows, max_len)

    def continuation(self, rows: abc.Sequence[Row]) -> Continuation | None:
        found = self.members[0].continuation(rows)
        return None if found is None else found._replace(report=self.spent.extend)


def random_head(config: LlamaConfig, device: str) -> TorchHead:
    """A draft head of one layer of this model, with random weights and a vocabulary of 32,000."""
    layers, size = config.num_hidden_layers, min(config.vocab_size, 32000)
    states = 0, layers // 2, layers
    with torch.device("meta"):
        options = {"draft_vocab_size": size, "target_hidden_size": config.hidden_size, "states": states}
        head = Eagle3Head(HeadConfig(layer=config.resized(1), **options), embedding=False)
    head.to_target_U = torch.arange(size, device=device)
    return TorchHead(randomise(head, torch.bfloat16, device))


def time_rounds(setting: Setting, count: int) -> dict[str, Any]:
    """Rounds of ``count`` rows without a draft, with a draft model, and with a draft head."""
    target, drafter = (
        executor_of(random_model(SHAPES[name], torch.bfloat16, setting.device))
        for name in (setting.target, setting.draft)
    )
    target.compiles_layers = drafter.compiles_layers = False
    head, found = random_head(target.config, setting.device), []
    weights = sum(x.numel() * x.itemsize for name, x in head.head.named_parameters() if "embed" not in name)
    for context in setting.contexts:
        tokens, case = count * (context + 1024), (count, context)
        read = forward_bytes(target.config, target.dtype, *case)
        found.append((f"{setting.target} alone, {count} × {context}", _round(target, None, setting, *case)[0], read))
        below = {  # a strategy, and what one of its forwards reads
            f"{setting.draft} draft": (
                SingleDraft(drafter, cache_tokens=tokens),
                forward_bytes(drafter.config, drafter.dtype, *case),
            ),
            "head": (
                Eagle3Draft(head, cache_tokens=tokens),
                weights + count * context * PagedKVCache.bytes_per_token(head.config, head.dtype),
            ),
        }
        for name, (strategy, drafted) in below.items():
            whole, scoring, drafting = _round(target, strategy, setting, *case)
            found += [
                (
                    f"{setting.target} with {name}, K {setting.k}, {count} × {context}",
                    whole,
                    read + setting.k * drafted,
                ),
                (f"its target and decision, {name}, {count} × {context}", scoring, read),
                (f"its draft, {name}, {count} × {context}", drafting, setting.k * drafted),
            ]
    return {"rows": found}


def _round(
    target: Executor, strategy: DraftStrategy | None, setting: Setting, count: int, context: int
) -> tuple[float, float, float]:
    """Seconds of a round: in all, and on the device for target and decision, and for the draft."""
    device, watched = torch.device(setting.device), None if strategy is None else _Watched(strategy)
    engine = Engine(Runner(target, PagedKVCache.for_model(target, count * (context + 1024))), watched)
    params = SamplingParams(temperature=0.0, max_tokens=1024)
    text = [7 * at % min(1000, target.config.vocab_size) for at in range(context - 1)]
    rows = [Row([*text, b], context, params, Exact(), seed=b, k=setting.k) for b in range(count)]

    def go_on(rounds: int) -> None:
        until = rows[0].stats.rounds + rounds
        while rows[0].stats.rounds < until:
            engine.step(rows)

    stretch, engine.stretch = engine.stretch, 1e-9  # one round a step: the third is captured
    go_on(4)
    engine.stretch = stretch
    before = rows[0].stats.rounds
    if watched is not None:
        watched.spent.clear()
    seconds = clocked(partial(go_on, setting.repeats), device)[1]
    spent = [] if watched is None else watched.spent
    parts = (sum(each.target for each in spent), sum(each.draft for each in spent))
    for row in rows:
        engine.release(row)
    rounds = rows[0].stats.rounds - before
    return seconds / rounds, *(each / rounds for each in parts)
