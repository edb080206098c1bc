"""How large caches are where nobody says, by the memory that is free."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fly
from fly.backends import choice
from fly.backends.torch import TorchExecutor
from fly.cache import DEFAULT_BYTES, PagedKVCache
from fly.runner import memory
from tests.commands import run as command
from tests.commands import words
from tests.toys import random_llama

MODEL = TorchExecutor(random_llama(max_positions=512))


@given(free=st.integers(10**6, 10**12), each=st.integers(1, 10**6), block=st.sampled_from([1, 4, 256]))
def test_caches_fit_what_is_free(free: int, each: int, block: int) -> None:
    """Half of it at most, 4 GiB at most, eight contexts at most; whole pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_memory", lambda device: free)
        budget = min(free // 2, DEFAULT_BYTES)
        if budget // each < block:
            with pytest.raises(ValueError, match=f"hold no page of {block} tokens at {each} bytes a token"):
                memory.cache_size(MODEL, each, block, memory.CacheSize())
            return
        tokens = memory.cache_size(MODEL, each, block, memory.CacheSize())
        assert tokens * each <= budget and tokens <= 8 * 512
        assert tokens == 8 * 512 or (tokens + block) * each > budget


@given(st.one_of(st.integers(-3, 10**7), st.floats(), st.booleans(), st.none()))
def test_a_size_is_tokens_or_a_share(value: object) -> None:
    """A number and its text are the same size."""
    right = value is None or (type(value) is int and value >= 1) or (type(value) is float and 0 < value <= 1)
    if not right:
        with pytest.raises(ValueError, match=r"cache .* must be a size"):
            memory.CacheSize.parse(value)
        return
    size = memory.CacheSize.parse(value)
    assert (size.tokens, size.share, size.bytes) == (
        value if type(value) is int else None, value if type(value) is float else None, None,
    )  # fmt: skip
    if value is not None:
        assert memory.CacheSize.parse(str(value)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("1.5 GB", 15 * 10**8), ("64mib", 64 << 20), ("3B", 3), ("8 TiB", 8 << 40), ("100kB", 10**5)],
)
def test_a_size_with_a_unit_is_bytes(text: str, size: int) -> None:
    assert memory.CacheSize.parse(text) == memory.CacheSize(bytes=size)
    wrong_ones = ["", "GiB", "-1GB", "0GB", "1 cat", "nan", "inf", "2.0", "0x10"]
    for wrong in [*wrong_ones, "50%", "20,000", "1,5GiB", "64-GiB", "8GiB/2", "8GiB per rank"]:
        with pytest.raises(ValueError, match="must be a size"):
            memory.CacheSize.parse(wrong)


def test_a_cache_below_the_context_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 200_000)
    model = random_llama(max_positions=512)  # 256 bytes a token
    with caplog.at_level(logging.WARNING, "fly"):
        llm = fly.LLM(model)
        assert fly.LLM(model, cache="1MB").engine.runner.cache.allocator.num_blocks
    (record,) = caplog.records
    assert "at most 388 tokens, though the model's context is 512: half of the 0.0 GB free" in record.getMessage()
    with pytest.raises(ValueError, match="400"):
        llm.generate([[1] * 400], fly.SamplingParams(max_tokens=1))


def test_the_context_is_capped_by_an_option(caplog: pytest.LogCaptureFixture) -> None:
    llm = fly.LLM("fly-target", draft="fly-draft", device="cpu", max_context=100)
    executor = llm.engine.runner.executor
    assert executor.config.max_position_embeddings == 100 and llm.draft is not None and llm.draft.context == 100
    assert llm.engine.runner.cache.keys.shape[1] == 800
    prompt = [[5] * 90]
    params = fly.SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    (capped,) = llm.generate(prompt, params)
    (whole,) = fly.LLM("fly-target", device="cpu").generate(prompt, params)
    assert len(capped.token_ids) == 10 and capped.token_ids == whole.token_ids[:10]
    with pytest.raises(ValueError, match="max_context 5: this model is loaded already, with a context of 512"):
        fly.LLM(random_llama(), max_context=5)
    with pytest.raises(ValueError, match="max_context: Input should be greater than or equal to 1, got 0"):
        fly.LLM("fly-tiny", max_context=0)


def test_free_memory_is_within_the_limit_of_the_group(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert memory.free_memory(cpu) > 0
    assert memory._free_in_group(tmp_path) > 2**60  # no group, no limit
    for name, text in {"memory.current": "900", "memory.stat": "anon 1\ninactive_file 50\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._free_in_group(tmp_path) > 2**60
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._free_in_group(tmp_path) == 150


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("unable to mmap 3554214752 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
)
def test_too_little_memory_is_said_in_bytes(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 1_500_000_000)
    said = r"a cache needs 2.00 GB of memory, and 1.50 GB were free on cpu: take less"
    with (
        pytest.raises(MemoryError, match=said),
        memory.room_for("a cache", 2 * 10**9, torch.device("cpu"), "take less"),
    ):
        raise error
    for other in (RuntimeError("shapes differ"), ValueError("k -1"), OSError(2, "not there")):
        with pytest.raises(type(other)), memory.room_for("a cache", 1, torch.device("cpu"), ""):
            raise other


def test_a_model_that_does_not_fit_says_what_it_needs_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Cannot allocate memory (os error 12)")

    monkeypatch.setattr(choice, "executor_of", full)
    with pytest.raises(
        MemoryError, match=r"loading .*fly-target needs 0.03 GB of memory, and .*'w8a8'.* needs 0.01 GB"
    ):
        fly.LLM("fly-target", dtype="float32", device="cpu")
    result = command("generate", "a", "--kernels", "w8a8")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "fly-target needs 0.01 GB of memory" in words(result.output) and "close other programs" in result.output
    monkeypatch.undo()
    monkeypatch.setattr(PagedKVCache, "for_model", full)
    with pytest.raises(MemoryError, match=r"a cache of 8192 tokens needs .* cache or max_context"):
        fly.LLM("fly-target", device="cpu")


def test_a_limit_of_addresses_is_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2**44, 2**44))
    assert 2**42 < memory._free_in_process() < 2**44
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory._free_in_process() > 2**60
