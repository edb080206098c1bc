"""What made a first run on a GPU fail, one test each, on emulated devices: other versions of torch, a second device, a
device for each process, what is left after a failed capture, memory that graphs read, a NaN of another row."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fly.backends import executor_of
from fly.backends.cuda.graphs import GraphPool, Part
from fly.backends.cuda.kernels import launch as kernels
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.engine import Engine
from fly.models import Llama
from fly.parallel import launch
from fly.parallel.ranks import Checksum, Ranks
from fly.parallel.watch import Progress, Watch
from fly.runner.runner import Runner
from tests.emulated_flash import VERSIONS
from tests.emulator import emulated, exchanged
from tests.pool import free_port
from tests.test_cuda import DRAFTS, TARGET, WAYS, decode, device, engine_of, on_cpu, row_of, there, told

CUDA1 = torch.device("cuda", 1)


def on(model: Llama, place: str, dtype: torch.dtype = torch.float32) -> Llama:
    """The same model there."""
    made = Llama(model.config).eval()
    for module, original in zip(made.modules(), model.modules()):
        for name, weight in list(original.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(weight.data.to(place, dtype), requires_grad=False))
    return made


def engine_on(place: str, dtype: torch.dtype = torch.float32) -> Engine:
    executor, drafter = (executor_of(on(model, place, dtype)) for model in (TARGET, DRAFTS["near"]))
    cache = PagedKVCache.for_model(executor, 6000)
    return Engine(Runner(executor, cache, control_ids=(3, 4)), SingleDraft(drafter, cache_tokens=6000))


# (a) Versions of torch


@pytest.mark.parametrize(
    ("version", "refuses", "reads", "said"),
    [
        ("2.11", (), False, "varlen_attn knows no seqused_k"),
        ("2.12", ("num_splits",), True, None),
        ("2.12", ("block_table",), False, "does not take block_table"),
        *((version, (), True, None) for version in VERSIONS if version != "2.11"),
    ],
)
def test_every_torch_from_2_11_on_takes_long_prompts(
    version: str,
    refuses: tuple[str, ...],
    reads: bool,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of more than 32 tokens, in bfloat16, without Triton. Where pages cannot be read in place they are copied, with a
    warning."""
    for module in ("attention", "executor"):
        monkeypatch.setattr(f"fly.backends.cuda.{module}.takes_pages", lambda cache: False)
    with emulated(version=version, refuses=refuses) as gpu:
        engine, rows = engine_on("cuda", torch.bfloat16), [row_of([n % 23 for n in range(40 + b)]) for b in range(2)]
        gpu.launches.clear()
        decode(engine, rows)
        assert (gpu.launches["attention"] > 0) == reads
    assert all(row.generated == 40 for row in rows)
    # Beside this one, where Triton is missing, another warning says so.
    said_of = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    warned = [text for text in said_of if text.startswith("FlashAttention")]
    assert len(warned) == (said is not None) and all(said in text for text in warned if said is not None)


# (b) Another device than the first


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_runs_on_another_device_than_the_current_one(temperature: float) -> None:
    want, row, other = (row_of([1, 2, 3], temperature=temperature, max_tokens=60) for _ in range(3))
    decode(engine_of(on_cpu, "near"), [want])
    with device() as gpu:
        first, second = engine_of(there, "near"), engine_on("cuda:1")
        while not (row.finish_reason and other.finish_reason):  # in turns: torch keeps one stream for all captures
            for engine, each in ((first, row), (second, other)):
                engine.stretch = 1e-9
                if not each.finish_reason:
                    engine.step([each])
        assert gpu.device.index == 0 and gpu.graphs >= 6
    assert told(row) == told(want) == told(other)


def test_a_triton_kernel_is_launched_where_its_tensors_are() -> None:
    """Triton itself takes the current device."""
    found: list[int] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args: found.append(gpu.device.index)

    with device() as gpu:
        for where in ("cuda:1", "cuda:0", "cpu"):
            kernels.launch(Kernel(), (1,), 5, torch.zeros(2, device=where))
    assert found == [1, 0, 0]


def test_the_engines_thread_enters_the_device_of_its_model() -> None:
    from fly.engine.scheduler import Scheduler
    from fly.engine.worker import Worker

    found: list[torch.device] = []
    with device() as gpu:
        worker = Worker(Scheduler(engine_on("cuda:1"), 8, 64))
        worker._work = lambda item: found.append(gpu.device) or False  # type: ignore[method-assign,func-returns-value]
        worker._start()
        worker._inbox.put("something")
        assert isinstance(worker._thread, threading.Thread)
        worker._thread.join(10)
    assert found == [CUDA1]


# (c), (d) Processes


@contextmanager
def launched(patch: pytest.MonkeyPatch, **variables: str) -> Iterator[Ranks]:
    """A group of one process on an emulated device, where Gloo stands for NCCL."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    for name, value in own.items():
        patch.setenv(name, value)
    begin = dist.init_process_group
    patch.setattr(dist, "init_process_group", lambda kind, device_id, **how: begin("gloo", **how))
    with launch() as ranks:
        yield ranks


def test_graphs_are_gone_before_the_process_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated() as gpu, exchanged(gpu):
        with launched(monkeypatch) as ranks, torch.inference_mode():
            x = torch.ones(3, device="cuda")
            part = Part(lambda: ranks._run(dist.all_reduce, x), GraphPool(x.device, ranks.awaited, ranks.preparing))
            part(), part()
            assert [graph.communicates for graph in gpu.alive] == [True]
        assert part._graph is None


def test_a_process_that_sees_one_device_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(devices=1) as gpu, launched(monkeypatch, LOCAL_RANK="3"):
        assert gpu.device.index == 0
    refused = pytest.raises(ValueError, match="LOCAL_RANK 3: this process sees 2 CUDA devices")
    with emulated(devices=2), refused, launched(monkeypatch, LOCAL_RANK="3"):
        pass


# (f) After a failed capture


def test_after_a_failed_capture_work_goes_on_and_is_captured_later(caplog: pytest.LogCaptureFixture) -> None:
    with emulated() as gpu, torch.inference_mode():
        x, runs = torch.zeros(3, device="cuda:1"), 0

        def work() -> Any:
            nonlocal runs
            runs += 1
            if runs == 2:  # while it is captured
                bool(x.sum() > 0)
            return x.add_(1)

        part = Part(work, GraphPool(CUDA1))
        with torch.cuda.device(CUDA1):
            for _ in range(5):
                part()
            torch.cuda.Event().record()
        assert gpu.stream is None and gpu.graphs == 1 and part._graph is not None
        assert x.tolist() == [5.0] * 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert "while a graph is captured" in said


def test_what_a_rank_has_checked_stays_where_graphs_read_it() -> None:
    with emulated(), torch.inference_mode():
        checksum, tokens_T = Checksum(torch.device("cuda", 0)), torch.arange(4, device="cuda")
        part = Part(lambda: checksum.add(tokens_T), GraphPool(checksum.device))
        part(), part()
        checksum.add(torch.arange(1 << 15, device="cuda"))  # longer than ever before
        gc.collect()
        part()


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_that_another_row_left_in_a_page_reaches_no_row(way: str) -> None:
    want, rows = ([row_of([1, 2, 3 + b], seed=b, temperature=0.8 * b) for b in range(3)] for _ in range(2))
    decode(engine_of(on_cpu, "near"), want)
    with device(way):
        engine = engine_of(there, "near")
        for runner in (engine.runner, engine.setup.drafters[0]):
            runner.cache.keys.fill_(torch.nan), runner.cache.values.fill_(torch.nan)
        decode(engine, rows)
    assert [told(row) for row in rows] == [told(row) for row in want]


def test_ranks_wait_longer_for_one_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blamed is who does not come to a collective within the timeout, or ten times that while new code is compiled."""
    blamed: list[str] = []
    watch = object.__new__(Watch)
    watch.rank, watch.size, watch.collective_timeout, watch._left = 0, 2, 60.0, set()
    watch.progress, watch._complete = (progress := Progress()), (3, 500.0)
    monkeypatch.setattr(watch, "declare", lambda rank, reason: blamed.append(reason))
    progress.entered, progress.since, watch._beats = 3, 0.0, {1: b"0.0 2 0"}
    ranks = object.__new__(Ranks)
    ranks.progress = progress
    with ranks.preparing():
        watch._look_for_stuck(100.0)
        assert blamed == []
        watch._look_for_stuck(601.0)
    assert "for 600 s it has not come to collective 3" in blamed[0]
    watch._look_for_stuck(100.0)
    assert "for 60 s" in blamed[1]


# What else the emulated devices refuse


def test_the_emulator_refuses_what_devices_would() -> None:
    with emulated() as gpu, torch.inference_mode():
        here, elsewhere = torch.ones(2, device="cuda"), torch.ones(2, device="cuda:1")
        with pytest.raises(RuntimeError, match=r"mixes \['cuda:0', 'cuda:1'\]"):
            here + elsewhere
        with pytest.raises(RuntimeError, match="cuda:1 while cuda:0"):
            elsewhere.add_(1)
            torch.cuda.Event().record()
        part = Part(lambda: elsewhere.add_(1), GraphPool(here.device))
        part(), part()
        assert part._graph is None and gpu.graphs == 0
        assert torch.cuda.current_device() == 0
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(2, device="cuda:2")


def test_the_emulator_refuses_what_no_graph_can_hold() -> None:
    @torch.library.custom_op("fly_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def unsafe(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with emulated() as gpu, torch.inference_mode():
        x = torch.ones(2, device="cuda")
        part = Part(lambda: unsafe(x), GraphPool(x.device))
        part(), part()
        assert part._graph is None and gpu.graphs == 0
