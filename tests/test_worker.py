"""Any thread, any coroutine: whoever asks, waits, leaves or fails, each gets what it would have got alone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.backends.cpu import available, why_not
from fly.drafts import NGramDraft, SingleDraft
from fly.engine.job import Job
from fly.engine.stream import AsyncStream
from fly.engine.worker import Stopped
from fly.models.bundled import tasks
from fly.output import Output
from fly.policies import AcceptancePolicy, Exact, FLy, LossySampling
from tests.serving import eventually
from tests.toys import random_llama

TARGET = random_llama(0, 1024, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=256)
NEAR = random_llama(1, 1024, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=256)
POLICIES: tuple[AcceptancePolicy, ...] = (Exact(), FLy(window=2, hold=0), LossySampling(2.0))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=200)


def make(**options: Any) -> LLM:
    """A toy that speaks, with room for a few requests at a time."""
    llm = LLM(TARGET, SingleDraft(NEAR), k=3, **{"cache": 512, "block_size": 4, **options})
    llm.tokenizer = tokenizer()
    return llm


@cache
def tokenizer() -> Any:
    return LLM("fly-tiny").tokenizer


def whole(llm: LLM) -> bool:
    return all(a.num_free == a.num_blocks and not a.sequences() for a in llm.scheduler.allocators)


def slowed(llm: LLM, seconds: float = 0.01) -> LLM:
    """The same; each step lasts at least so long and is one round, so that there is a while in which to do things."""
    llm.engine.stretch = 0
    llm.worker.watch = lambda: time.sleep(seconds)
    return llm


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made
        assert eventually(lambda: whole(made) and not made.scheduler and not made.worker.jobs)
        assert not made.worker._owners and not made.worker._open and not made.worker._wanted


asked = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([(1,), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 9), (5,) * 30, (7, 8) * 9]),
        "temperature": st.sampled_from([0.0, 0.0, 0.8]),
        "seed": st.integers(0, 2),
        "max_tokens": st.integers(0, 24),
        "n": st.sampled_from([1, 1, 2]),
        "policy": st.integers(0, 2),
        "k": st.sampled_from([0, 2, 5]),
        "priority": st.sampled_from([0, 0, 1]),
    }
)
ways = st.sampled_from(["generate", "stream", "agenerate", "astream"])
ends = st.sampled_from([None, None, None, 0, 1, 3])  # pieces after which it is left; of a whole answer, milliseconds


def arguments(request: dict[str, Any]) -> tuple[list[int], SamplingParams, dict[str, Any]]:
    names = ("temperature", "seed", "max_tokens", "n")
    params = SamplingParams(**{name: request[name] for name in names}, ignore_eos=True)
    options = {"policy": POLICIES[request["policy"]], "k": request["k"]}
    return list(request["prompt"]), params, options | {"priority": request["priority"]}


@cache
def everything() -> LLM:
    return make(cache=None, prefix_reuse=False)


@cache
def alone(items: tuple[tuple[str, Any], ...]) -> list[tuple[str, list[int]]]:
    prompt, params, options = arguments(dict(items))
    return told(everything().generate([prompt], params, **options)[0])


def told(output: Output) -> list[tuple[str, list[int]]]:
    return [(each.text, each.token_ids) for each in (output, *output.others)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(asked, ways, ends), min_size=1, max_size=10), st.integers(1, 6))
def test_every_answer_is_what_it_is_alone(batch: list[tuple[dict[str, Any], str, int | None]], max_rows: int) -> None:
    """Threads and coroutines of one loop, streams that are dropped and tasks that are cancelled, at the same time."""
    found: dict[int, Any] = {}
    with make(max_rows=max_rows, cache=160) as llm:

        def in_thread(number: int) -> None:
            request, way, leave = batch[number]
            prompt, params, options = arguments(request)
            if way == "generate":
                found[number] = told(llm.generate([prompt], params, **options)[0])
                return
            stream = llm.stream(prompt, params.model_copy(update={"n": 1}), **options)
            pieces = list(itertools.islice(stream, leave))
            if leave is None:
                found[number] = "".join(pieces)
            elif number % 2:
                stream.close()  # else it is merely forgotten

        async def in_loop(number: int) -> None:
            request, way, leave = batch[number]
            prompt, params, options = arguments(request)
            if way == "agenerate":
                task = asyncio.create_task(llm.agenerate([prompt], params, **options))
                if leave is not None:
                    await asyncio.sleep(leave / 1000)
                    task.cancel()
                try:
                    found[number] = told((await task)[0])
                except asyncio.CancelledError:
                    assert leave is not None
                return
            pieces: list[str] = []
            if leave != 0:
                async for piece in llm.astream(prompt, params.model_copy(update={"n": 1}), **options):
                    pieces.append(piece)
                    if len(pieces) == leave:
                        break
            if leave is None:
                found[number] = "".join(pieces)

        async def all_in_loop() -> None:
            await asyncio.gather(*(in_loop(n) for n, (_, way, _) in enumerate(batch) if way.startswith("a")))

        with ThreadPoolExecutor(len(batch) + 1) as pool:
            loop = pool.submit(lambda: asyncio.run(all_in_loop()))
            for thread in [pool.submit(in_thread, n) for n, (_, way, _) in enumerate(batch) if not way.startswith("a")]:
                thread.result()
            loop.result()
        assert eventually(lambda: whole(llm) and not llm.scheduler and not llm.worker.jobs)
    for number, (request, way, leave) in enumerate(batch):
        expected = alone(tuple(request.items()))
        if number in found:
            assert found[number] == (expected if way.endswith("generate") else expected[0][0])
        else:
            assert leave is not None


def test_four_threads_give_the_texts_of_one() -> None:
    with LLM("fly-target", "fly-draft", dtype="float32") as llm:
        prompts = [llm.chat_prompt(problem.prompt) for problem in tasks.problems(None, "heldout")[-8:]]
        params = SamplingParams(temperature=0.0, max_tokens=40)
        one = [llm.generate([prompt], params)[0].text for prompt in prompts]
        before = torch.get_num_threads()
        with ThreadPoolExecutor(4) as pool:
            four = list(pool.map(lambda prompt: llm.generate([prompt], params)[0].text, prompts))
            others = {pool.submit(torch.get_num_threads).result() for _ in range(8)}
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert four == one and all(one)
        assert {torch.get_num_threads(), *others, *fresh} == {before}


def test_a_thousand_coroutines_wait_on_one_thread(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    expected = {n: llm.generate([[n, 2]], params)[0].token_ids for n in range(10)}
    before = threading.active_count()
    most = 0

    async def ask(number: int) -> list[int]:
        nonlocal most
        (output,) = await llm.agenerate([[number % 10, 2]], params)
        most = max(most, threading.active_count())
        return output.token_ids

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(ask, range(1000)))

    assert asyncio.run(ask_all()) == [expected[number % 10] for number in range(1000)]
    assert most <= before


def test_chats_and_streams_of_coroutines(llm: LLM) -> None:
    bundled = LLM("fly-tiny", NGramDraft(), dtype="float32")

    async def ask() -> tuple[str, str, Any]:
        stream = bundled.astream("Take the list", GREEDY)
        text = "".join([piece async for piece in stream])
        assert stream.finish_reason == "length" and stream.stats.generated == 12
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return (await bundled.achat([{"role": "user", "content": "hi"}], GREEDY)).text, text, stream.stats

    chat, text, stats = asyncio.run(ask())
    assert chat == bundled.chat([{"role": "user", "content": "hi"}], GREEDY).text
    (out,) = bundled.generate("Take the list", GREEDY)
    assert text == out.text and stats.generated == out.stats.generated
    for call in (lambda: bundled.astream([]), lambda: bundled.astream("a", SamplingParams(n=2))):
        with pytest.raises(ValueError):
            call()
    assert llm.generate([]) == [] == asyncio.run(llm.agenerate([]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        asyncio.run(llm.agenerate([[9999]]))


@pytest.mark.parametrize("way", ["close", "forget", "aclose", "abandon", "cancel", "interrupt"])
def test_a_call_that_is_given_up_frees_its_pages_within_a_round(llm: LLM, way: str) -> None:
    slowed(llm)
    if way in ("close", "forget"):
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        assert not whole(llm)
        if way == "close":
            stream.close()
            assert whole(llm) and list(stream) == []
        del stream
    elif way == "interrupt":
        slowed(llm, 0.05)
        thread = threading.get_ident()
        timer = threading.Timer(0.1, lambda: signal.pthread_kill(thread, signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever ran before in this process
        try:
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2, 3]], LONG)
        finally:
            signal.signal(signal.SIGINT, before)
    else:

        async def leave() -> None:
            if way == "cancel":
                task = asyncio.create_task(llm.agenerate([[1, 2, 3]], LONG))
                while whole(llm):
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return
            stream = llm.astream([1, 2, 3], LONG)
            await anext(stream)
            if way == "aclose":
                await stream.aclose()

        asyncio.run(leave())
    steps = []
    llm.worker.watch = lambda: steps.append(1)
    assert eventually(lambda: whole(llm)) and len(steps) <= 1


def test_a_closed_loop_waits_for_nothing(llm: LLM) -> None:
    slowed(llm)
    loop = asyncio.new_event_loop()
    stream = None

    async def begin() -> None:
        nonlocal stream
        stream = llm.astream([1, 2, 3], LONG)
        await anext(stream)

    loop.run_until_complete(begin())
    loop.close()
    assert eventually(lambda: whole(llm))
    assert llm.generate([[1]], GREEDY)[0].stats.generated == 12


class Failing(Exact):
    """Fails once a row has so many tokens behind it."""

    def accept_probs(self, target, draft):  # type: ignore[no-untyped-def]
        if int(target.generated_B.max()) > 2:
            raise RuntimeError("bad rule")
        return super().accept_probs(target, draft)


@pytest.mark.filterwarnings("ignore:a step failed")
def test_an_error_of_one_request_is_its_own(llm: LLM) -> None:
    expected = llm.generate([[1, 2]], LONG)[0].token_ids
    with ThreadPoolExecutor(3) as pool:
        good = pool.submit(llm.generate, [[1, 2]], LONG)
        sampled = SamplingParams(temperature=1.0, max_tokens=9)
        bad = pool.submit(llm.generate, [[3], [4]], sampled, policy=[Failing(), Exact()])
        streamed = pool.submit(lambda: list(llm.stream([5], sampled, policy=Failing())))
        for failed in (bad, streamed):
            with pytest.raises(RuntimeError, match="bad rule"):
                failed.result()
        assert good.result()[0].token_ids == expected


def test_an_error_of_the_engine_reaches_everybody_who_waits() -> None:
    llm = slowed(make())
    step, broken = llm.scheduler.step, threading.Event()

    def breaking(seconds: float) -> Any:
        if broken.is_set():
            raise ArithmeticError("out of order")
        return step(seconds)

    llm.scheduler.step = breaking  # type: ignore[method-assign]

    async def ask() -> list[Any]:
        calls = [llm.agenerate([[n]], LONG) for n in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(llm.generate, [[1]], LONG), pool.submit(lambda: list(llm.stream([2], LONG)))]
        loop = pool.submit(asyncio.run, ask())
        assert eventually(lambda: len(llm.worker._open) == 5)
        broken.set()
        for call in waiting:
            with pytest.raises(ArithmeticError, match="out of order"):
                call.result()
        assert [type(error) for error in loop.result()] == [ArithmeticError] * 3
    assert whole(llm)
    with pytest.raises(Stopped, match="out of order"):
        llm.generate([[1]], GREEDY)


def test_the_end_of_a_with_block_ends_the_thread_and_who_waits() -> None:
    def engines() -> int:
        return sum(thread.name == "fly-engine" for thread in threading.enumerate())

    gc.collect()
    before = engines()  # of what other tests keep
    while not eventually(lambda: engines() < before, 0.3):  # those that nobody keeps end meanwhile
        break
    before = engines()
    with ThreadPoolExecutor(1) as pool:
        with slowed(make()) as llm:
            assert engines() == before  # it starts with the first request
            call = pool.submit(llm.generate, [[1]], LONG)
            assert eventually(lambda: not whole(llm)) and engines() == before + 1
        assert engines() == before and whole(llm)
        with pytest.raises(Stopped, match="closed"):
            call.result()
    with pytest.raises(Stopped, match="closed"):
        llm.generate([[1]], GREEDY)
    llm.close()


def test_an_unused_llm_is_freed() -> None:
    llm = make()
    llm.generate([[1, 2]], GREEDY)
    stream = llm.stream([1, 2], LONG)
    next(stream)
    asyncio.run(llm.agenerate([[1], [2]], GREEDY))
    known = [weakref.ref(each) for each in (llm, llm.worker, llm.engine, llm.engine.runner.cache.keys)]
    thread = llm.worker._thread
    assert thread is not None
    del llm, stream
    gc.collect()
    assert eventually(lambda: not any(ref() for ref in known) and not thread.is_alive())


def test_the_thread_that_asks_and_the_one_that_holds_may_go() -> None:
    """A stream outlives its thread and its LLM."""
    held, streams = [make()], list[Any]()
    expected = "".join(held[0].stream([1, 2, 3], GREEDY))
    thread = threading.Thread(target=lambda: streams.append(held.pop().stream([1, 2, 3], GREEDY)))
    thread.start()
    thread.join()
    first = next(streams[0])
    assert not held
    assert first + "".join(streams[0]) == expected


def test_jobs_of_one_loop_get_their_news_at_once(llm: LLM) -> None:
    """One call of the loop a step, however many wait there."""
    slowed(llm, 0.0)

    async def ask() -> tuple[int, int]:
        loop, calls, steps = asyncio.get_running_loop(), [], []
        plain = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given: (calls.append(given), plain(*given))[1]  # type: ignore[method-assign]
        llm.worker.watch = lambda: steps.append(1)
        streams = [llm.astream([n], GREEDY) for n in range(8)]

        async def read(stream: Any) -> int:
            return len([piece async for piece in stream])

        assert all(await asyncio.gather(*map(read, streams)))
        return len(calls), len(steps)

    calls, steps = asyncio.run(ask())
    assert calls <= steps


def test_one_call_is_one_wake_up(llm: LLM) -> None:
    slowed(llm, 0.0)
    job = Job(llm.requests([[1], [2], [3]], LONG))
    llm.worker.run(job)
    assert job.entries == 1 and job.queue.empty() and not job.left


SCRIPT = """
import os, threading
from fly import LLM, SamplingParams
llm = LLM("fly-tiny", "ngram", dtype="float32", kernels="torch", max_rows=4)
llm.engine.stretch = 0
long = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
stream = llm.stream("a", long)
next(stream)
if (child := os.fork()) == 0:  # in the middle of something
    try:
        llm.generate("a", short)
    except RuntimeError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stream.close()
if (child := os.fork()) == 0:
    os._exit(llm.generate("a", short)[0].stats.generated)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
print(llm.generate("a", short)[0].stats.generated)
threading.Thread(target=lambda: llm.generate("b", long), daemon=True).start()
left = llm.stream("a", long)
next(left)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_program_may_fork_and_end_at_any_time() -> None:
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "4\n"), ran.stderr
    assert "Fatal" not in ran.stderr


ENDING = """
import threading, time
from fly.backends import executor_of
from fly.backends.cpu import available
from fly.cache import PagedKVCache
from fly.runner.executor import Batch
from tests.toys import random_llama
executor = executor_of(random_llama(hidden=512, layers=6, max_positions=4000), available()[0])
cache = PagedKVCache.for_model(executor, 4000)
cache.resize(0, 4000)
batch = Batch([1] * 4000, list(range(4000)), cache.batch([0], [0], [4000]))
threading.Thread(target=executor.score, args=(batch, [0]), daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.skipif(available() == ["torch"], reason=why_not() or "compiled kernels are here")
def test_a_program_may_end_while_a_thread_is_in_a_long_forward() -> None:
    """As after a prompt's forward that takes longer than a program waits for at its end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    ran = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_stream_that_waits_and_is_closed_elsewhere_ends_for_its_reader() -> None:
    with slowed(make(max_rows=1)) as llm:
        running, waiting = llm.stream([1], LONG), llm.stream([2], LONG)
        next(running)
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(list, waiting)
            assert eventually(lambda: len(llm.worker.jobs) == 2)
            waiting.close()
            assert reader.result(10) == []
        running.close()
        assert eventually(lambda: whole(llm))


def test_two_readers_of_one_stream_both_come_to_its_end() -> None:
    with make() as llm:
        wanted = "".join(llm.stream([1, 2, 3], GREEDY))
        shared = llm.stream([1, 2, 3], GREEDY)
        with ThreadPoolExecutor(2) as pool:
            parts = [reader.result(10) for reader in [pool.submit(list, shared) for _ in range(2)]]
        assert sorted("".join(parts[0] + parts[1])) == sorted(wanted)


def test_a_stream_belongs_to_the_loop_that_reads_it() -> None:
    with make() as llm:

        async def opened() -> AsyncStream:
            return llm.astream([1, 2, 3], GREEDY)

        async def read(stream: AsyncStream) -> str:
            return "".join([piece async for piece in stream])

        assert asyncio.run(read(asyncio.run(opened()))) == "".join(llm.stream([1, 2, 3], GREEDY))
