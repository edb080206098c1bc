"""Compiled code from several threads: one model and several, by the pool of workers and without, and one ``LLM``. Each
result is that of one thread; a thread sanitizer looks at the rest (``make sanitize``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from fly import LLM, SamplingParams
from fly.backends import executor_of
from fly.backends.cpu import CpuExecutor, available, why_not
from fly.cache import PagedKVCache
from fly.drafts import BlockDraft
from fly.policies import Exact
from fly.runner.executor import Batch, DraftSpec, Lookup
from fly.runner.request import Row
from tests.test_block import runs
from tests.test_eagle import target_on
from tests.toys import random_llama

VARIANTS = [name for name in available() if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")


@pytest.fixture(params=[2, 3])
def workers(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What calls of as many threads give that begin together. Raises the first error."""
    gate, found, errors = threading.Barrier(len(calls)), [None] * len(calls), []

    def run(number: int) -> None:
        try:
            gate.wait()
            found[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def work(executor: CpuExecutor, seed: int) -> Callable[[], list[object]]:
    """A prompt of more tokens than a tile, then drafts after it by copies of what came before, and steps."""

    def run() -> list[object]:
        cache = PagedKVCache.for_model(executor.packed, 400)
        prompt = [(seed + 3 * at) % 37 for at in range(300)]
        cache.resize(0, 330)
        found: list[object] = []
        scores = executor.score(Batch(prompt, list(range(300)), cache.batch([0], [0], [300])), [0, 299])
        found.append(scores.logits_NV.tolist())
        row = Row([*prompt, 5], 300, SamplingParams(temperature=0), Exact(), seed, 9)
        for _ in range(3):
            batch = Batch([5], [300], cache.batch([0], [300], [1]))
            found.append(executor.extend(batch, DraftSpec(lookup=Lookup(4, 1, 8)), [row], [20]).tokens)
        for at in range(301, 310):
            scores = executor.score(Batch([7], [at], cache.batch([0], [at], [1])))
            found.append((scores.argmax, executor.packed.workspace_bytes > 0))
        return found

    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_share_models_and_workers(variant: str, workers: None) -> None:
    one, other = (executor_of(random_llama(seed, hidden=64, intermediate=96), variant) for seed in (0, 1))
    calls = [work(executor, seed) for executor in (one, other) for seed in (1, 2)]
    alone = [call() for call in calls]
    for _ in range(3):
        assert at_once(*calls) == alone


@pytest.mark.parametrize("draft", ["fly-tiny", "ngram", "tree(fly-tiny, nodes=6, depth=3, width=2)"])
def test_threads_share_an_llm(draft: str, workers: None) -> None:
    """Short greedy requests of two threads beside many sampled ones of a third."""
    llm = LLM("fly-draft", draft, cache=4096)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    alone = llm.generate(["Take the list"], greedy)[0].token_ids
    running = True

    def short() -> list[list[int]]:
        found = []
        while running:
            found.append(llm.generate(["Take the list"], greedy)[0].token_ids)
        return found

    def many() -> None:
        nonlocal running
        try:
            for n in (9, 5, 3):
                params = SamplingParams(temperature=1.0, seed=n, n=n, max_tokens=20, ignore_eos=True)
                llm.generate(["Take the list"], params)
        finally:
            running = False

    one, other, _ = at_once(short, short, many)
    assert all(tokens == alone for found in (one, other) for tokens in found)
    llm.close()


@pytest.mark.parametrize("kind", ["dflash", "dspark", "rnn", "p-eagle"])
def test_threads_of_a_block_head_take_the_same_way(kind: str, workers: None) -> None:
    """One that saw the tokens of the next stage or tile, before it had left the last, waited for ever."""
    head = runs(kind, kernels=f"{VARIANTS[0]}-w8a8")
    llm = LLM(target_on(f"{VARIANTS[0]}-w8a8"), BlockDraft(head), k=5)
    texts: list[list[int]] = []

    def run() -> None:
        for seed in range(12):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
            prompts = [[(5 * seed + 3 * at + row) % 20 for at in range(30)] for row in range(1 + 9 * (seed % 3 == 0))]
            texts.append([token for output in llm.generate(prompts, params) for token in output.token_ids])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive() and len(texts) == 12
    llm.close()
