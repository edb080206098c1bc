"""Which kernels are chosen, what a process holds in memory, and the small functions of the library."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.backends import choice, executor_of
from fly.backends.cpu import PackedLlama, available, chosen, library, why_not
from fly.backends.cpu.host import uniforms as host_uniforms
from fly.backends.cpu.packed import pool_threads
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.cli.chat import Conversation
from fly.config import Config
from fly.drafts import SingleDraft
from fly.extras.bench.shapes import random_model, shape_config
from fly.extras.eval import Plan
from fly.extras.eval.decoder import Decoder
from fly.models import save_model
from fly.models.loading import Loading
from fly.ops import Stream, uniforms
from fly.runner.executor import Batch
from tests.kernels import (
    NARROW,
    VARIANTS,
    W4A8,
    built,
    same_bits,
)
from tests.toys import random_llama


def test_kernels_are_chosen_by_argument_then_variable_then_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLY_KERNELS", raising=False)
    assert available()[-1] == "torch"
    assert chosen() == chosen("auto") == available()[0]
    assert bool(why_not()) == (available() == ["torch"])
    for name in available():
        assert chosen(name) == name
        monkeypatch.setenv("FLY_KERNELS", name)
        assert chosen() == name and chosen("torch") == "torch"
    for name in VARIANTS:
        for kind in ("w8a8", "w4a8"):
            assert chosen(f"{name}-{kind}") == f"{name}-{kind}" and chosen(kind) == f"{VARIANTS[0]}-{kind}"
    for wrong in ("torch-w8a8", "w8a8-w8a8", "w4a8-w8a8") if VARIANTS else ("w8a8",):
        told = "unknown" if VARIANTS else "not available here"
        with pytest.raises(ValueError, match=rf"kernels '{wrong}' is {told}; choices: .*'torch'\]"):
            chosen(wrong)
    with pytest.raises(ValueError, match=r"kernels 'neon' .*choices: \['auto'.*'torch'\]"):
        chosen("neon")
    monkeypatch.setenv("FLY_KERNELS", "sse")
    assert library.default_variant() == available()[0]  # whoever asks for nothing is not told
    with pytest.raises(ValueError, match=r"FLY_KERNELS=sse .*choices: \['auto'.*'torch'\]"):
        LLM("fly-tiny")


@pytest.mark.parametrize("name", [*available(), *NARROW])
def test_the_choice_reaches_target_and_draft(name: str) -> None:
    if name.endswith("w4"):
        with pytest.raises(ValueError, match="are for drafts"):
            LLM("fly-tiny", device="cpu", kernels=name)
        return
    llm = LLM("fly-tiny", "fly-tiny", device="cpu", kernels=name)
    assert isinstance(llm.draft, SingleDraft)
    for executor in (llm.engine.runner.executor, llm.draft.runner.executor):
        assert executor.kernels == name
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids


@built
@pytest.mark.parametrize("kernels", ["auto", "w8a8"])
def test_a_large_draft_has_four_bits_unless_it_is_told_otherwise(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_LARGE", 0)
    prompt, params = [[1, 2, 3]], SamplingParams(max_tokens=12, temperature=0.0)
    plain = LLM("fly-tiny", device="cpu", kernels=kernels)
    texts = [plain.generate(prompt, params)[0].token_ids]
    for draft, expected in (("fly-tiny", "w4"), ("ngram+model(fly-tiny, kernels=w4a8)", "w4a8")):
        llm = LLM(plain, draft)
        assert isinstance(llm.draft, SingleDraft)
        assert llm.draft.runner.executor.kernels == chosen(expected)
        texts.append(llm.generate(prompt, params)[0].token_ids)
    assert texts[0] == texts[1] == texts[2]
    for loaded in (LLM("fly-tiny", "fly-tiny", device="cpu", kernels=kernels), LLM(plain, "fly-tiny", kernels="auto")):
        assert loaded.computed[1][0] == chosen("w4")
    assert LLM(plain, "fly-tiny", kernels="w8a8").computed[1][0] == chosen("w8a8")
    # Commands that keep the loaded target leave the choice to its draft, too.
    plan = Plan.of({"model": "fly-tiny", "drafts": "fly-tiny", "kernels": kernels})
    assert Decoder(plan, plan.ways)._settings["exact k15"].llm.computed[1][0] == chosen("w4")
    setup = Config(model="fly-tiny", kernels=kernels)
    conversation = Conversation(LLM.from_config(setup), setup, params, None, {})
    conversation.commands["/draft"]("fly-tiny")
    assert conversation.llm.computed[1][0] == chosen("w4")
    on_torch = LLM("fly-tiny", "fly-tiny", device="cpu", kernels="torch").draft
    assert isinstance(on_torch, SingleDraft) and on_torch.runner.executor.kernels == "torch"


@built
def test_the_draft_alone_may_have_narrow_weights() -> None:
    llm = LLM("fly-tiny", "model(fly-tiny, kernels=w4a8)", device="cpu")
    assert isinstance(llm.draft, SingleDraft)
    kernels = [executor.kernels for executor in (llm.engine.runner.executor, llm.draft.runner.executor)]
    assert kernels == [VARIANTS[0], W4A8[0]]
    prompt, params = [[1, 2, 3]], SamplingParams(max_tokens=12, temperature=0.0)
    plain = LLM("fly-tiny", device="cpu").generate(prompt, params)[0].token_ids
    assert llm.generate(prompt, params)[0].token_ids == plain
    with pytest.raises(ValueError, match=r"kernels 'w8a8': compiled kernels take .*float16"):
        LLM("fly-tiny", dtype="float16", kernels="w8a8", device="cpu")


@built
@pytest.mark.parametrize(("ending", "instead"), [("int8", "w8a8"), ("int4", "w4a8")])
def test_kernels_of_other_devices_are_refused_on_processors(
    ending: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, from every place that may name them, and the message says what takes as few bits."""
    monkeypatch.delenv("FLY_KERNELS", raising=False)
    choices = rf"\['auto', .*'{VARIANTS[0]}-{instead}'.*\]"
    advice = rf" is unknown; choices: {choices}; instead of '{ending}', CPUs have '{instead}'$"
    places: list[Callable[[str], object]] = [
        chosen,
        lambda kernels: LLM("fly-tiny", kernels=kernels, device="cpu"),
        lambda kernels: LLM("fly-tiny", f"model(fly-tiny, kernels={kernels})", device="cpu"),
        lambda kernels: PackedLlama(random_llama(0), kernels),
    ]
    for wrong in (ending, f"{VARIANTS[0]}-{ending}", f"torch-{ending}"):
        for place in places:
            with pytest.raises(ValueError, match=f"kernels '{wrong}'{advice}"):
                place(wrong)
        monkeypatch.setenv("FLY_KERNELS", wrong)
        with pytest.raises(ValueError, match=f"FLY_KERNELS={wrong}{advice}"):
            LLM("fly-tiny", device="cpu")
        monkeypatch.delenv("FLY_KERNELS")


def test_kernels_that_this_processor_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_built", lambda: {"avx1024": "it lacks them", "avx2": ""})
    assert available() == ["avx2", "torch"] and library.variant_number("avx2") == 1
    for wanted in ("avx1024", "avx1024-w8a8"):
        with pytest.raises(ValueError, match=f"{wanted}' is not available here; .*it lacks them"):
            chosen(wanted)
    with pytest.raises(ValueError, match=r"'avx3' is unknown; choices: [^(]*$"):
        chosen("avx3")


def test_without_a_library_it_is_pytorch_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_open", lambda: (None, "no compiler was found"))
    monkeypatch.setattr(library, "_built", dict)
    assert available() == ["torch"] and chosen() == "torch" and why_not() == "no compiler was found"
    model = random_llama(0)
    choice._log_once.cache_clear()
    for _ in range(2):
        assert isinstance(executor_of(model), TorchExecutor)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["no compiler was found"]
    with pytest.raises(ValueError, match=r"kernels 'avx2' is not available here; choices: .*no compiler was found"):
        executor_of(model, "avx2")
    with pytest.raises(ValueError, match="no compiler was found"):
        library.load()


@built
@pytest.mark.parametrize("kernels", ["auto", "w8a8", "w4a8", "w4"])
def test_a_checkpoint_is_packed_as_it_is_read(kernels: str, tmp_path: Path) -> None:
    """Layer by layer, into what is made of the loaded model; the model that was filled is without memory again."""
    save_model(kept := random_llama(3), tmp_path, torch.float32)
    loading = Loading(tmp_path)
    logits = []
    for model in (executor_of(kept, chosen(kernels)), executor_of(loading, kernels)):
        cache = PagedKVCache(model.config, 4, 4, model.dtype)
        cache.resize(0, 3)
        logits.append(model.score(Batch([1, 2, 3], [0, 1, 2], cache.batch([0], [0], [3]))).logits_NV)
    assert same_bits(*logits)
    assert all(parameter.device.type == "meta" for parameter in loading.model.parameters())


MEMORY = """
import gc, sys
from fly import LLM, SamplingParams

def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def decode(llm, tokens):
    for temperature in (0.0, 1.0):
        llm.generate([[1, 2, 3] * 20], SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True))

decode(LLM("fly-tiny", draft="ngram", device="cpu"), 64)  # libraries take what they need once
gc.collect()
before = anonymous()
llm = LLM(sys.argv[1], draft="ngram", device="cpu", cache=2048)
decode(llm, 300)
gc.collect()
cache, model = llm.engine.runner.cache, llm.engine.runner.executor.packed
print(anonymous() - before, cache.keys.nbytes + cache.values.nbytes + model.workspace_bytes)
"""


@built
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process holds")
@pytest.mark.parametrize(("kernels", "share"), [("auto", 1.0), ("w4a8", 0.35)])
def test_a_process_holds_weights_cache_and_workspace_and_little_else(
    kernels: str, share: float, tmp_path: Path
) -> None:
    """Weights in bfloat16 as they are stored, or half of that; nothing of them twice, once they are loaded.

    The allocator of C keeps some freed megabytes, which differ from run to run: a quarter of the weights is far more.
    """
    save_model(random_model(shape_config("512x16x8000"), torch.bfloat16), tmp_path, torch.bfloat16)
    weights = share * (tmp_path / "model.safetensors").stat().st_size
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        env={**os.environ, "FLY_KERNELS": "" if kernels == "auto" else kernels},
        capture_output=True,
        text=True,
        check=True,
    )
    grown, rest = map(int, ran.stdout.split())
    assert 0.9 * (weights + rest) < grown < 1.25 * weights + rest


@built
@given(count=st.integers(0, 400), threads=st.integers(1, 3))
def test_everything_is_read_that_reading_is_timed_for(count: int, threads: int) -> None:
    numbers = torch.randint(-(2**62), 2**62, (count * 8,), generator=torch.Generator().manual_seed(count))
    assert library.load().fly_sum(numbers, threads) == sum(numbers.tolist()) % 2**64


@built
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    start=st.integers(0, 2**40),
    stream=st.sampled_from(Stream),
    n=st.integers(0, 9),
)
def test_uniforms_are_those_of_tensors(seeds: list[int], start: int, stream: Stream, n: int) -> None:
    starts = [start + b for b in range(len(seeds))]
    wanted = uniforms(torch.tensor(seeds), torch.tensor(starts), stream, n)
    assert host_uniforms(seeds, starts, stream, n).tolist() == wanted.flatten().tolist()


@built
def test_decisions_run_on_one_thread_of_their_own_and_others_keep_theirs() -> None:
    """Of torch's threads; forwards have as many as before, and threads that come later begin with as many."""
    seen: list[int] = []

    def decides() -> None:
        executor_of(random_llama(0), VARIANTS[0]).enter_thread()
        seen.extend([torch.get_num_threads(), pool_threads()])

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for run in (decides, lambda: seen.append(torch.get_num_threads())):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert seen == [1, 3, 3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
