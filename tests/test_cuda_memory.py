"""How much memory rounds take on a CUDA device, counted before they run by tensors without values; how caches, rows and
graphs are kept within it; the warm-up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fly.backends.cuda import footprint
from fly.backends.cuda.device_round import Group
from fly.backends.cuda.executor import CudaExecutor
from fly.backends.cuda.footprint import META, measure_prompt, measure_round
from fly.backends.cuda.shapes import add_up
from fly.backends.cuda.table import Shape
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.engine import Engine
from fly.models import LlamaConfig
from fly.models.llama import skeleton
from fly.parallel import LLAMA
from fly.parallel.model import parallelise
from fly.parallel.plan import Part
from fly.parallel.ranks import Ranks
from fly.policies import Exact
from fly.runtime.executor import DraftSpec
from fly.runtime.runner import Runner
from tests.test_cuda import attend_by, decode, device, made_by, row_of, there
from tests.toys import random_llama

GIB = 1 << 30
LLAMA_1B, LLAMA_8B, LLAMA_70B = (
    LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=tied,
    )
    for hidden, inner, layers, heads, tied in (
        (2048, 8192, 16, 32, True), (4096, 14336, 32, 32, False), (8192, 28672, 80, 64, False)
    )
)  # fmt: skip


@pytest.fixture(autouse=True)
def _attends_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our kernels, which no device is asked about."""
    attend_by("pages", monkeypatch)
    for name, used in (("takes_pages", True), ("takes_flash", False)):
        monkeypatch.setattr(footprint, name, lambda cache, used=used: used)
    monkeypatch.setattr("fly.backends.cuda.fused.refuse_layers", lambda *_: None)


def bfloat16(config: LlamaConfig) -> CudaExecutor:
    return CudaExecutor(skeleton(config).bfloat16())


def shape_of(rows: int, drawn: bool, k: int = 8, **more: Any) -> tuple[Shape, tuple[Group, ...]]:
    spec = DraftSpec(reach=(1.0,))
    shape = Shape(rows, rows * drawn, k, pages=33, draft_pages=33, stops=2, spec=spec, **more)
    return shape, (Group(Exact(), drawn, rows),)


def guessed(shape: Shape, vocab_size: int) -> int:
    """What was reserved before anything was counted: the target's logits, those of a forward of the drafter, and what
    tokens are drawn from, in float32."""
    places = shape.rows * (shape.k + 1 + shape.copies + 1) + shape.drawn * (shape.k + shape.copies + 1)
    return 4 * vocab_size * places


@pytest.mark.parametrize("target", [LLAMA_8B, LLAMA_70B])
def test_a_round_takes_more_than_its_logits(target: LlamaConfig) -> None:
    """32 sampled rows with top-p: what was reserved by logits alone is too little."""
    shape, groups = shape_of(32, True, top_p=True)
    needs = measure_round(shape, groups, bfloat16(target), bfloat16(LLAMA_1B), 256, 256)
    assert needs.shared + needs.peak + needs.graph > 2 * guessed(shape, 128256)
    # At each place of the block at least float32 logits, two sorted copies of them, and of their places (int64).
    assert needs.peak > 32 * 9 * 128256 * (4 + 2 * 4 + 8)
    assert needs.peak < 32 * 9 * 128256 * 60
    # A graph holds at least five products and the attention of each layer, of the target and of two draft forwards.
    assert needs.kernels > 6 * (target.num_hidden_layers + 2 * 16)
    assert add_up([needs]) > needs.shared + needs.kept + needs.peak + needs.graph


def test_rows_and_tokens_take_more_in_proportion() -> None:
    target, drafter = bfloat16(LLAMA_8B), bfloat16(LLAMA_1B)
    found = [measure_round(*shape_of(rows, True), target, drafter, 256, 256) for rows in (8, 16, 32)]
    for small, large in pairwise(found):
        assert 1.9 < large.peak / small.peak < 2.1 and 1.9 < large.shared / small.shared < 2.1
        assert abs(small.kernels - large.kernels) < 9  # tables of angles are made once
    longer = measure_round(*shape_of(16, True, k=16), target, drafter, 256, 256)
    assert 1.7 < longer.peak / found[1].peak < 2.1


class Alone(Ranks):
    """One of several ranks, for tensors without values, which are exchanged with nobody."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.first, self.check_every = 0, size, 0, 1


def test_a_rank_takes_its_part() -> None:
    """Of 70B on four ranks, a quarter of the feed-forward layer's values and of a prompt's logits."""
    whole, rank = bfloat16(LLAMA_70B), Alone(4)
    part = Part(LLAMA_70B, 0, 4, LLAMA)
    with META:
        divided = CudaExecutor(parallelise(part.build().bfloat16(), part, rank))
    one, four = (measure_prompt(each, 256, 8192, 1, 1).peak for each in (whole, divided))
    assert four < 0.75 * one
    shape, groups = shape_of(32, True)
    needs = measure_round(shape, groups, divided, bfloat16(LLAMA_1B), 256, 256)
    assert needs.peak > 0


def test_what_is_counted_is_what_is_taken() -> None:
    """The same parts for real, on the emulated device, by the allocations that torch's profiler sees."""
    sizes = {"vocab_size": 3000, "hidden": 32, "heads": 2, "kv_heads": 1, "layers": 2, "max_positions": 600}
    target, drafter = (random_llama(seed, **sizes) for seed in (1, 2))
    with device():
        engine = Engine(
            Runner(there(target), PagedKVCache.for_model(there(target), 4000)),
            SingleDraft(there(drafter), cache_tokens=4000),
        )
        decode(engine, [row_of([1, 2, b], temperature=0.8, top_p=0.9, max_tokens=12) for b in range(8)], 2)
        (round_,) = made_by(engine)
        (stage,) = round_.stages.values()

        def run() -> None:
            round_.chain.first.run()
            round_.chain.next.run()
            round_.scored = round_.score.run()
            stage.part.run()

        with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run()
        taken = peak = 0
        for event in seen.profiler.kineto_results.events():
            if event.name() == "[memory]":
                taken += event.nbytes()
                peak = max(peak, taken)
        counted = measure_round(round_.shape, stage.groups, round_.target, there(drafter), 256, 256)
    assert 0.9 < counted.peak / peak < 1.2
