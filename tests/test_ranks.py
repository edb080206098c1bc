"""Ranks agree on tokens, errors and requests, or end together: processes that diverge, fail, hang or are killed."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fly
from fly import cli
from fly.config import Config
from fly.models import save_model
from fly.parallel import (
    Ranks,
    launch,
    load,
)
from fly.parallel.ranks import Checksum
from fly.policies import parse_policy
from fly.types import SamplingParams
from tests.pool import FORK, TOY, Pool, checkpoints, free_port, told
from tests.toys import build_llama

# Agreement


def differ(ranks: Ranks, tokens: list[list[int]], said: list[str], at_once: bool) -> None:
    """Forwards of a step among others, then what ranks say of it."""
    ranks = Ranks(ranks.group)  # whose checksums begin anew
    assert ranks.compares_forwards
    ranks.compares_forwards = at_once
    ranks.agree()
    for mine in ([3, 3], tokens[ranks.rank], [0]):
        mine_T = torch.tensor(mine, dtype=torch.int64)
        ranks.note(mine_T, torch.arange(len(mine_T)))
    assert ranks.progress.entered == (5 if at_once else 2)  # with what begins them, and one for each step
    ranks.agree(said[ranks.rank])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([[1, 2], [1, 2], [2, 1], [1, 2]], "same"),
        ([[1], [1], [1, 0], [1]], "same"),
        ([[1], [1], [], [1]], "same"),
        ([[1], [1], [1], [1]], "else"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])  # as on Gloo, and on CUDA
def test_ranks_that_diverge_are_named(pool: Pool, tokens: list[list[int]], said: str, at_once: bool) -> None:
    every = ["same", "same", said, "same"]
    for success, error in pool.outcomes(4, differ, tokens, every, at_once):
        assert not success and error[0] == "RankError" and "rank 2 had other tokens than rank 0" in error[1], error
        assert ("up to forward 2," if at_once and said == "same" else "up to forward 3,") in error[1]
    assert pool.run(2, differ, tokens, every, at_once) is None


numbers = st.lists(st.integers(0, 200_000), max_size=20)


@given(st.lists(numbers, max_size=4), st.lists(numbers, max_size=4), st.data())
def test_a_checksum_is_of_numbers_in_their_order(first: list[list[int]], second: list[list[int]], data: Any) -> None:
    if data.draw(st.booleans()):  # as alike as they can be
        second = [data.draw(st.permutations(part)) for part in first]

    def of(parts: list[list[int]]) -> int:
        checksum = Checksum(torch.device("cpu"))
        for part in parts:
            checksum.add(torch.tensor(part, dtype=torch.int64))
        checksum.leave()
        return checksum.read()

    assert (of(first) == of(second)) == (first == second)


def test_noting_asks_the_device_nothing() -> None:
    """On torch's meta device, of which nothing can be read; more than the checksum had factors for, too."""
    checksum = Checksum(torch.device("meta"))
    for count in (3, 20_000):
        checksum.add(torch.zeros(count, dtype=torch.int64, device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        checksum.value.item()
    graphs = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    whole = Checksum(torch.device("cpu"))
    torch.compile(whole.add, backend=note, fullgraph=True)(torch.tensor([1, 2, 3]))
    eager = Checksum(torch.device("cpu"))
    eager.add(torch.tensor([1, 2, 3]))
    assert len(graphs) == 1 and torch.equal(whole.value, eager.value)


def meddle(ranks: Ranks, target: str) -> None:
    """The second rank is told something else."""
    llm = fly.LLM(target, ranks=ranks, cache=256)
    llm.generate([[1, 2, 3 + (ranks.rank == 1)]], SamplingParams(temperature=0, max_tokens=4))


def meddle_with_weights(ranks: Ranks, target: str) -> None:
    """The second rank says something else, of the same prompt."""
    llm = fly.LLM(target, ranks=ranks, cache=256, kernels="torch")
    if ranks.rank == 1:
        step = llm.scheduler.step

        def other(seconds: float) -> Any:
            emitted = step(seconds)
            return {row: [token._replace(id=token.id ^ 1) for token in tokens] for row, tokens in emitted.items()}

        llm.scheduler.step = other  # type: ignore[method-assign]
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))


@pytest.mark.parametrize("work", [meddle, meddle_with_weights])
def test_a_model_notices_that_its_ranks_diverge(pool: Pool, tmp_path: Path, work: Any) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    for success, error in pool.outcomes(2, work, target):
        assert not success and "rank 1 had other tokens" in error[1]


def work_together(ranks: Ranks, failing: list[int]) -> str:
    def work() -> str:
        if ranks.rank in failing:
            raise KeyError("mine")
        return "done"

    return ranks.together(work, "the work")


def test_what_some_ranks_cannot_do_none_does(pool: Pool) -> None:
    assert pool.run(4, work_together, []) == "done"
    for success, error in pool.outcomes(4, work_together, [1, 2]):
        assert not success and error[0] == "RankError" and "rank 1: KeyError: 'mine'; rank 2:" in error[1]
    for success, error in pool.outcomes(4, work_together, [0, 1, 2, 3]):
        assert not success and error[0] == "KeyError"


def mixed_calls(ranks: Ranks, target: str) -> list[Any]:
    """The same calls on every rank: coroutines, streams left half-way, and collectives of the caller between them."""
    llm = fly.LLM(target, "ngram", ranks=ranks, cache=256)
    llm.tokenizer = fly.LLM("fly-tiny").tokenizer
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)

    async def ask() -> list[Any]:
        calls = [llm.agenerate([[1, n]], params) for n in range(5)]
        left = asyncio.create_task(llm.agenerate([[3]], params.model_copy(update={"max_tokens": 190})))
        done = await asyncio.gather(*calls)
        left.cancel()
        return [told(outputs) for outputs in done]

    found = [asyncio.run(ask())]
    stream, other = llm.stream([1, 2, 3], params), llm.stream([3], params)
    for _ in range(4):
        found.append([str(next(stream)), ranks.collect(1), ranks.clock() > 0])
        next(other)
    stream.close()
    found += [ranks.collect(2), "".join(other), told(llm.generate([[5]], params)), ranks.collect(3)]
    assert all(each.num_free == each.num_blocks for each in llm.scheduler.allocators)
    return [*found, ranks.random.random()]


def test_calls_of_all_ranks_are_in_step(pool: Pool, tmp_path: Path) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    for size in (1, 2):
        found = pool.run(size, mixed_calls, target)  # alike on all ranks
        assert found[-3] and found[-2] == [3] * size


def lead_and_follow(ranks: Ranks, target: str) -> Any:
    """The first rank is called from several threads, the others follow until it is closed."""
    llm = fly.LLM(target, "ngram", ranks=ranks, cache=256)
    llm.tokenizer = fly.LLM("fly-tiny").tokenizer
    if not ranks.leads:
        llm.follow()
        return ranks.collect(4)
    llm.lead()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=9, n=2, stop="zz", ignore_eos=True)
    requests = [
        {"prompts": [[1, n], [n]], "params": params, "k": n % 3, "policy": parse_policy("fly")} for n in range(6)
    ]
    alone = [told(llm.generate(**request)) for request in requests]
    stream = llm.stream([1, 2], params.model_copy(update={"n": 1, "max_tokens": 60}))
    next(stream)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda request: told(llm.generate(**request)), requests)) == alone
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([[999]])
    del stream
    assert len(llm.generate([[1]], SamplingParams(temperature=1.0, max_tokens=3))[0].token_ids) == 3
    llm.close()
    return ranks.collect(4)


def test_the_first_rank_leads_and_the_others_follow(pool: Pool, tmp_path: Path) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    for size in (1, 2):
        assert pool.run(size, lead_and_follow, target) == [4] * size


# Broken checkpoints


def load_own(ranks: Ranks, paths: list[str]) -> None:
    load(paths[ranks.rank], ranks=ranks)


def test_a_corrupt_shard_is_an_error_everywhere_before_anything_runs(pool: Pool, tmp_path: Path) -> None:
    target, other = checkpoints(tmp_path, TOY, 0)
    weights = Path(other) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for success, error in pool.outcomes(4, load_own, [target, target, other, target]):  # as on another node's disk
        assert not success and error[0] == "RankError"
        assert "rank 2: CheckpointError" in error[1] and "not a readable safetensors file" in error[1]
    for success, error in pool.outcomes(2, load_own, [other, other]):
        assert not success and error[0] == "CheckpointError"
    config = Path(other) / "config.json"
    save_model(build_llama(TOY), other, torch.float32)
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    for success, error in pool.outcomes(2, load_own, [target, other]):
        assert not success and "another config.json" in error[1]
    for success, error in pool.outcomes(4, load_own, [str(tmp_path / "odd")] * 4):
        assert not success and "no such checkpoint: neither a directory" in error[1]


# Faults


def live(rank: int, size: int, port: int, log: str, what: str) -> None:
    """A rank of a group that computes, or waits for requests, until something happens to it."""
    torch.set_num_threads(1)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    environment = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})
    with launch(heartbeat_timeout=1.5, collective_timeout=1.5) as ranks:
        print(f"rank {rank} lives", flush=True)
        if what.startswith("decodes"):
            decode(ranks, alone=what.endswith("alone"))
        if what == "waits" and rank:
            ranks.share(None, wait=True)
        elif what == "waits":
            time.sleep(60)
        for step in range(50 if what.endswith("ends") else 10**9):
            ranks.sum_(torch.ones(8))
            if step == 20 and rank == 1 and what == "fails":
                raise MemoryError("no memory for this")
            if step == 20 and rank == 1 and what in ("hangs", "leaves it queued"):
                time.sleep(60)
            if step == 20 and what == "leaves it queued":  # as on CUDA, where entering a collective only queues it
                ranks.progress.entered += 1
                work = dist.all_reduce(torch.ones(8), async_op=True)
                ranks.progress.is_done = work.is_completed
                time.sleep(60)
            if step == 20 and what == "is cut off":
                with ranks.awaited():  # a graph's result, which does not come
                    time.sleep(60)
            if step == 20 and what == "has other lengths":
                ranks.compares_forwards = False  # as on CUDA
                ranks.note(torch.arange(2 + rank))
                with ranks.awaited():
                    time.sleep(60)
            if step == 20 and what == "errs":
                raise ValueError("the same everywhere")


def decode(ranks: Ranks, alone: bool) -> None:
    """Two requests, in a step of which memory runs out: of the last rank ``alone``, or of all."""
    llm = fly.LLM("fly-tiny", ranks=ranks, dtype="float32", kernels="torch", cache=512)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=3))

    def run_out(*_: Any) -> None:
        raise MemoryError("no memory for this")

    if ranks.rank == 1 or not alone:
        model: Any = llm.engine.runner.executor.model
        model.norm.register_forward_pre_hook(run_out)
    try:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=3))
    except MemoryError:
        print(f"rank {ranks.rank} goes on", flush=True)


def run_group(size: int, tmp_path: Path, what: str, harm: int | None = None) -> tuple[list[int | None], str, float]:
    """Start a group, do ``harm`` (a signal) to its last rank; exit codes, all that was said, and how long it took."""
    log, port = tmp_path / "log", free_port()
    log.touch()
    processes = [FORK.Process(target=live, args=(rank, size, port, str(log), what)) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    while log.read_text().count("lives") < size and time.monotonic() < deadline:
        time.sleep(0.01)
    start = time.monotonic()
    if harm is not None:
        time.sleep(0.1)
        start = time.monotonic()
        os.kill(processes[-1].pid or 0, harm)
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes], log.read_text(), time.monotonic() - start


FAULTS = [
    (2, "computes", signal.SIGKILL, r"rank 1 .* ended without a word"),
    (4, "computes", signal.SIGKILL, r"rank 3 .* ended without a word"),
    (2, "waits", signal.SIGKILL, r"rank 1 .* ended without a word"),
    (2, "computes", signal.SIGSTOP, r"rank 1 .* no sign of life for 1.5 s"),
    (4, "computes", signal.SIGSTOP, r"rank 3 .* no sign of life for 1.5 s"),
    (4, "fails", None, r"rank 1 .* failed: MemoryError: no memory for this"),
    (2, "decodes alone", None, r"rank 1 .* failed: MemoryError: no memory for this"),
    (2, "hangs", None, r"rank 1 .* hangs: for 1.5 s it has not come to collective 22"),
    (2, "leaves it queued", None, r"rank 1 .* hangs: for 1.5 s it has not come to collective 22"),
    (2, "is cut off", None, r"waits for collective 22, which all ranks have come to but which does not end"),
    (2, "has other lengths", None, r"has other tokens than rank [01], so that collective 22 cannot end"),
]


@pytest.mark.parametrize(("size", "what", "harm", "said"), FAULTS)
def test_one_lost_rank_ends_all_with_one_message(
    tmp_path: Path, size: int, what: str, harm: int | None, said: str
) -> None:
    codes, text, _ = run_group(size, tmp_path, what, harm)
    assert all(codes), (codes, text)
    messages = [line for line in text.splitlines() if line.startswith("fly: ")]
    assert len(messages) == 1 and re.search(said + rf".*; all {size} ranks end", messages[0]), text


def test_ranks_that_end_together_end_in_peace(tmp_path: Path) -> None:
    codes, text, _ = run_group(4, tmp_path, "ends")
    assert codes == [0] * 4 and "fly: " not in text, text
    codes, text, _ = run_group(2, tmp_path, "decodes and ends")
    assert codes == [0, 0] and "fly: " not in text and text.count("goes on") == 2, text
    codes, text, _ = run_group(2, tmp_path, "errs")
    assert codes == [1, 1] and "fly: " not in text and text.count("ValueError: the same everywhere") == 2, text


# As a user starts it

SCRIPT = """
import os, signal, sys, torch
torch.set_num_threads(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    from fly.parallel import launch
    with launch() as ranks:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            ranks.sum_(torch.ones(1))
from fly.cli import app
app(sys.argv[1:])
"""


def test_torchrun_starts_again_what_was_killed(tmp_path: Path) -> None:
    """The command on two ranks, which prints once what it prints on one, after a first try that was killed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    question = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."
    arguments = ["generate", "--dtype", "float32", "--draft", "ngram+fly-draft"]
    # Torchrun looks after its ranks every 3 seconds, so rank 0 always says first that rank 1 has ended.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--monitor-interval", "3"]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", str(tmp_path / "script.py"), *arguments],
        input=question,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    llm = fly.LLM("fly-target", "ngram+fly-draft", dtype="float32")
    expected = llm.generate([llm.chat_prompt(question)], policy=parse_policy("fly"), k=15)[0].text
    assert done.returncode == 0 and done.stdout.strip() == expected.strip(), done.stderr
    assert len(re.findall("^fly: rank 1 .* ended without a word", done.stderr, flags=re.MULTILINE)) == 1, done.stderr


def test_timeouts_come_from_the_command_line_or_else_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, float]] = []

    def launched(**options: Any) -> Any:
        given.append({name: options[name] for name in ("heartbeat_timeout", "collective_timeout")})
        raise ValueError("far enough")

    monkeypatch.setattr("fly.parallel.launch", launched)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    (tmp_path / "fly.yaml").write_text("heartbeat_timeout: 9\ncollective_timeout: 99")
    for command in ("generate", "serve", "eval"):
        options = ["--config", str(tmp_path / "fly.yaml")] if command in ("generate", "serve") else []
        for arguments in ([], ["--collective-timeout", "7"], [*options, "--collective-timeout", "7"], options):
            shown = CliRunner().invoke(cli.app, [command, *arguments])
            assert "far enough" in shown.output, shown.output
    assert given[:4] == [
        {"heartbeat_timeout": 5.0, "collective_timeout": 60.0},
        {"heartbeat_timeout": 5.0, "collective_timeout": 7.0},
        {"heartbeat_timeout": 9.0, "collective_timeout": 7.0},
        {"heartbeat_timeout": 9.0, "collective_timeout": 99.0},
    ]
    assert given[4:8] == given[:4] and len(given) == 12
    assert "0.5" in CliRunner().invoke(cli.app, ["generate", "--heartbeat-timeout", "0.1"]).output
    (tmp_path / "fly.yaml").write_text("heartbeat_timeout: 0.1")
    with pytest.raises(ValueError, match=r"heartbeat_timeout: .* 0\.5, got 0\.1"):
        Config.read(tmp_path / "fly.yaml")
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with (
            pytest.raises(ValueError, match=f"collective_timeout {seconds} must be"),
            launch(collective_timeout=seconds),
        ):
            pass


def test_commands_for_one_process_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    for command in (
        ["demo"],
        ["check", "fly"],
        *(["bench", name] for name in ("speed", "drafts", "plan")),
    ):
        shown = CliRunner().invoke(cli.app, command)
        assert shown.exit_code == 2 and "this command is for one process" in shown.output, command


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_configurations_are_read(path: Path) -> None:
    assert Config.read(path).k >= 15
