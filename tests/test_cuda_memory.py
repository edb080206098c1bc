"""How much memory rounds take on a CUDA device, counted before they run by tensors without values; how caches, rows and
graphs are kept within it; the warm-up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fly.backends.cuda import footprint
from fly.backends.cuda.device_round import Group
from fly.backends.cuda.executor import CudaExecutor
from fly.backends.cuda.footprint import META, Footprint, measure_prompt, measure_round
from fly.backends.cuda.graphs import GraphPool
from fly.backends.cuda.rounds import note_plain_way
from fly.backends.cuda.shapes import DeviceRounds, add_up
from fly.backends.cuda.table import Shape
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.engine import Engine
from fly.llm import LLM
from fly.models import LlamaConfig
from fly.models.llama import skeleton
from fly.ops import draw
from fly.parallel import LLAMA
from fly.parallel.model import parallelise
from fly.parallel.plan import Part
from fly.parallel.ranks import Ranks
from fly.policies import Exact, parse_policy
from fly.runner.executor import DraftSpec, Workload
from fly.runner.runner import Runner
from fly.runner.sampling import BatchSampling
from fly.types import SamplingParams
from tests.emulator import Gpu
from tests.test_cuda import DRAFTS, TARGET, attend_by, decode, device, row_of, there

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
    return shape, (Group(Exact().keyed, drawn, rows),)


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
    assert needs.shared + needs.peak > 1.3 * guessed(shape, 128256)
    assert add_up([needs]) > 2 * guessed(shape, 128256)
    # The block's logits in float32, at each place, and less than eight such tensors.
    assert 4 * 32 * 9 * 128256 < needs.peak < 8 * 4 * 32 * 9 * 128256
    # A graph holds at least five products and the attention of each layer, of the target and of two draft forwards.
    assert needs.kernels > 6 * (target.num_hidden_layers + 2 * 16)
    assert add_up([needs]) > needs.shared + needs.kept + needs.peak + needs.graph


def test_rows_and_tokens_take_more_in_proportion() -> None:
    target, drafter = bfloat16(LLAMA_8B), bfloat16(LLAMA_1B)
    found = [measure_round(*shape_of(rows, True), target, drafter, 256, 256) for rows in (8, 16, 32)]
    for small, large in pairwise(found):
        assert 1.4 < large.peak / small.peak < 2.2 and 1.9 < large.shared / small.shared < 2.1
        assert abs(small.kernels - large.kernels) < 9  # tables of angles are made once
    longer = measure_round(*shape_of(16, True, k=16), target, drafter, 256, 256)
    assert 1.3 < longer.peak / found[1].peak < 2.2


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
    """Sampling with top-p, operation by operation, for real, by the allocations that torch's profiler sees."""

    def sample(logits_BJV: torch.Tensor) -> torch.Tensor:
        ones_B = torch.ones(8, device=logits_BJV.device)
        how = ones_B, ones_B.long(), ones_B, ones_B, ones_B.bool()
        sampling = BatchSampling(*how, some_greedy=False, most_k=0, top_p=True, min_p=False)
        return draw(sampling.on(logits_BJV).dense().flatten(0, 1), torch.ones(72, device=logits_BJV.device))

    with device(), torch.inference_mode():
        logits_BJV = torch.randn(8, 9, 3000).to("cuda")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            sample(logits_BJV)
    taken = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            peak = max(peak, taken)
    with torch.no_grad(), Footprint() as counted:
        sample(torch.empty(8, 9, 3000, device=META))
    assert 0.8 < counted.peak / peak < 1.5, (counted.peak, peak)
    assert counted.live == 0


# What is done with the numbers


def test_as_many_rows_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8B target and a 1B draft, all of 256 rows sampled: of 80 GB a quarter is enough, of 24 GB it is not."""
    monkeypatch.setattr(GraphPool, "current", lambda self: nullcontext())
    work = Workload(256, 8, parse_policy("fly"), 2048, 261, 256, bfloat16(LLAMA_1B))
    target = bfloat16(LLAMA_8B)
    needed, rows = target.reserve(work, int(0.9 * 80e9 - 18e9) // 4)
    assert rows in (128, 256) and target.budget is not None and target.budget <= needed
    less, fewer = target.reserve(work, int(0.9 * 24e9 - 18e9) // 4)
    assert fewer < rows and less < needed and less <= int(0.9 * 24e9 - 18e9) // 4


@pytest.mark.parametrize("k", [15])
def test_the_shapes_of_a_busy_server_are_kept(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """1 to 32 rows at temperature 0 and above, again and again: none is dropped and captured anew."""
    monkeypatch.setattr(GraphPool, "current", lambda self: nullcontext())
    target, drafter, cache = bfloat16(LLAMA_8B), bfloat16(LLAMA_1B), PagedKVCache(LLAMA_1B, 1, 256, device=META)
    target.reserve(Workload(32, k, Exact(), 2048, 261, 256, drafter), 20 << 30)
    kept = DeviceRounds(target.pool, target.budget)
    shapes = [shape_of(rows, drawn, k, top_p=drawn) for rows in (32, 16, 8, 4, 2, 1) for drawn in (False, True)]
    first = [kept.find(*shape, target, cache, drafter, cache) for shape in shapes]
    assert list(kept.made.values()) == first and kept.find(*shapes[0], target, cache, drafter, cache) is first[0]
    assert sum(guessed(shape, 128256) for shape, _ in shapes) > (1 << 29) * (k // 8)
    # The large tensors of all shapes are the same memory.
    starts = {round_.chain.probs_DXV.untyped_storage()._cdata for round_ in first if round_.shape.drawn}
    assert len(starts) == 1


@contextmanager
def loaded(memory: int = 1 << 30, way: str = "pages", **options: Any) -> Iterator[tuple[Gpu, LLM]]:
    """A target and a draft on a device of so many bytes."""
    with device(way) as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (memory, memory))
        patch.setattr("fly.backends.cuda.ops.refuse_attention", lambda *_: None)
        draft = SingleDraft(there(DRAFTS["near"]))
        with LLM(there(TARGET), draft, k=4, **{"cache": 0.9, **options}) as llm:

            def generate(prompts: list[list[int]], params: Any) -> None:
                """On this thread, which alone has the device."""
                for request in llm.requests(prompts, params):
                    llm.scheduler.add(request.row)
                while llm.scheduler:
                    llm.scheduler.step()

            llm.generate = generate  # type: ignore[method-assign,assignment]
            yield gpu, llm


def test_caches_take_what_rounds_and_prompts_leave() -> None:
    with loaded(max_rows=4, memory=4 << 30) as (_, llm):
        cache, executor = llm.engine.runner.cache, llm.engine.runner.executor
        draft = llm.engine.setup.drafters[0].cache
        caches = 2 * (cache.keys.nbytes + draft.keys.nbytes)
        left = int(0.9 * (4 << 30))
        assert caches < left - executor.budget  # type: ignore[attr-defined]
        # A row cannot have more than a context, and there are four of them.
        assert cache.allocator.num_blocks == -(-4 * 700 // 256)
    with device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 28, 1 << 30))
        with pytest.raises(ValueError, match=r"50% of the 1\.1 GB of cuda:0: 0\.8 GB are in use"):
            LLM(there(TARGET), cache=0.5)


def test_after_a_warm_up_nothing_is_captured_inside_a_request(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[str] = []
    with loaded(max_rows=8, memory=4 << 30) as (gpu, llm):
        llm.warm(steps.append)
        assert steps == [f"{rows} rows" for rows in (8, 4, 2, 1) for _ in range(2)]
        before, prepared = gpu.graphs, llm.engine.runner.executor.prepared
        greedy = SamplingParams(temperature=0.0, max_tokens=30, seed=5)
        for params in (greedy, greedy.changed({"temperature": 1.0})):
            for rows in (1, 2, 4, 8):
                alike = [params.changed({"cache_salt": str(row)}) for row in range(rows)]
                llm.generate([[row % 23 for row in range(40)]] * rows, alike)
        assert gpu.graphs == before and llm.engine.runner.executor.prepared == prepared
        said = llm.devices
        # Rows beyond what was prepared are captured inside a request, and the log says so.
        caplog.clear()
        with caplog.at_level(logging.INFO, "fly"):
            llm.generate([[1, 2, 3]] * 3, greedy)
        assert gpu.graphs > before and any("a new shape of batches" in record.message for record in caplog.records)
    assert "cuda:0 (an emulated GPU) · attention by our Triton kernels · " in said
    assert "CUDA graphs for 16 shapes of rounds" in said and "at most 8 rows" in said


def test_a_cpu_has_nothing_to_warm_up() -> None:
    with LLM(TARGET) as llm:
        llm.warm()
        assert llm.devices == "" and llm.worker.submitted == 0


def test_the_log_says_why_rows_take_the_plain_way(caplog: pytest.LogCaptureFixture) -> None:
    note_plain_way.cache_clear()
    with device(), caplog.at_level(logging.INFO, "fly"):
        executor = there(TARGET)
        engine = Engine(Runner(executor, PagedKVCache.for_model(executor, 6000)))
        for _ in range(2):
            decode(engine, [row_of([1, 2, 3], max_tokens=9)])
            decode(engine, [row_of([1, 2, 3], max_tokens=9, repetition_penalty=1.1)])
    said = [record.getMessage() for record in caplog.records if "take the plain way" in record.getMessage()]
    assert len(said) == 1 and "penalties" in said[0]
