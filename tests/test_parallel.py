"""Ranks: the plan, loading by slices, shards of logits, the same tokens on 1, 2 and 4 Gloo processes, and faults.

One pool of four processes serves all tests of what ranks compute; whatever ends processes starts its own.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fly
from fly import cli
from fly.backends import load as load_whole
from fly.backends import load_executor
from fly.backends.cpu import CpuExecutor, available
from fly.backends.torch import TorchExecutor, TorchHead
from fly.bench.plan import DEVICES, MODELS, Link, Machines, Setting, forecast
from fly.bench.shapes import matrix_parameters
from fly.cache import PagedKVCache
from fly.config import Config
from fly.drafts import CascadeDraft, DraftStrategy, Eagle3Draft, NGramDraft, SingleDraft, parse_draft
from fly.drafts.translate import TranslatingSetup
from fly.engine import Engine
from fly.models import Llama, LlamaConfig, load_model, save_model
from fly.models.compiled import CompiledLayers
from fly.models.eagle import Eagle3Head, HeadConfig, load_head, save_head
from fly.models.loading import layout
from fly.ops import vocabulary
from fly.parallel import (
    LLAMA,
    LLAMA_WHOLE_SUMS,
    Part,
    PlanError,
    Ranks,
    Rule,
    follow,
    launch,
    lead,
    load,
    place_draft,
)
from fly.parallel.draft import FirstDraft
from fly.parallel.logits import VocabularyShards
from fly.parallel.ranks import Checksum
from fly.policies import Exact, parse_policy, policy_types
from fly.runtime.executor import Batch, Executor
from fly.runtime.request import Sequence
from fly.runtime.runner import Runner
from fly.types import SamplingParams
from tests.emulator import emulated, exchanged
from tests.test_eagle import randomise
from tests.toys import PLAIN, build_llama, llama_configs

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.test_parallel"])  # torch is imported once


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


# The pool


def serve_jobs(rank: int, size: int, port: int, pipe: Connection) -> None:
    """One process of the pool: does what it is told in the group of the first 1, 2 or 4."""
    torch.set_num_threads(1)
    address = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", **address)
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4) if n <= size}
    ranks = {n: Ranks(group) for n, group in groups.items() if rank < n}
    while (job := pipe.recv()) is not None:
        n, work, arguments = job
        torch.manual_seed(0)
        try:
            pipe.send((True, work(ranks[n], *arguments)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Pool:
    def __init__(self, size: int = 4) -> None:
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = FORK.Pipe()
            process = FORK.Process(target=serve_jobs, args=(rank, size, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def outcomes(self, n: int, work: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """Of each of ``n`` ranks, whether ``work(ranks, *arguments)`` succeeded, and its result or error."""
        for pipe in self.pipes[:n]:
            pipe.send((n, work, arguments))
        return [pipe.recv() if pipe.poll(60) else (False, ("Timeout", "", "")) for pipe in self.pipes[:n]]

    def run(self, n: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result, which must be the same on every rank."""
        found = self.outcomes(n, work, *arguments)
        for success, result in found:
            assert success, result[-1]
        assert all(result == found[0][1] for _, result in found), found
        return found[0][1]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


# The plan


@st.composite
def divisible_configs(draw: st.DrawFn, size: int = 4) -> LlamaConfig:
    """Configurations that divide by ``size`` ranks, some with fewer key heads than ranks."""
    config = draw(llama_configs(families=PLAIN))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([n for n in (1, 2, 4) if kv_heads * n % size == 0]))
    sizes = {
        "vocab_size": size * draw(st.integers(2, 12)),
        "hidden_size": size * draw(st.sampled_from([2, 5, 8])),
        "intermediate_size": size * draw(st.sampled_from([2, 3, 10])),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
    }
    return LlamaConfig.model_validate({**config.model_dump(), **sizes})


@settings(max_examples=25)
@given(divisible_configs(), st.sampled_from([1, 2, 4]), st.sampled_from([LLAMA, LLAMA_WHOLE_SUMS]))
def test_parts_cover_every_tensor(config: LlamaConfig, size: int, plan: tuple[Rule, ...]) -> None:
    """Every number of the checkpoint is on one rank, or on as many as its style says; biases of sums on the first."""
    with torch.device("meta"):
        whole = layout(config, dict(Llama(config).named_parameters()))
    parts = [Part(config, rank, size, plan) for rank in range(size)]
    numbers = 0
    for name, pieces in whole.items():
        for number, piece in enumerate(pieces):
            (rule,) = [rule for rule in plan if rule.matches(piece.key)]
            held = torch.zeros(piece.shape, dtype=torch.int64)
            for part in parts:
                own = part.pieces[name][number]
                assert own.key == piece.key
                held[own.cut] += own.stored
            copies = size if rule.style == "replicate" else 1
            if rule.of == "num_key_value_heads":
                copies = max(1, size // config.num_key_value_heads)
            assert (held == copies).all(), (piece.key, rule)
            zeros = rule.style == "row" and len(piece.shape) == 1  # the other ranks' biases
            numbers += math.prod(piece.shape) * (size if zeros else copies)
    assert all(part.sizes.vocab_size == config.vocab_size for part in parts)
    assert sum(part.bytes(4) for part in parts) == 4 * numbers


@settings(max_examples=15)
@given(divisible_configs(), st.sampled_from([2, 4]), st.sampled_from([LLAMA, LLAMA_WHOLE_SUMS]), st.integers(0, 99))
def test_ranks_load_their_slices(
    tmp_path_factory: pytest.TempPathFactory, config: LlamaConfig, size: int, plan: tuple[Rule, ...], seed: int
) -> None:
    """What ranks load, put together by the plan's cuts, is the checkpoint."""
    model, directory = build_llama(config, seed), tmp_path_factory.mktemp("slices")
    save_model(model, directory, torch.float32)
    parameters = dict(model.named_parameters())
    whole = layout(config, parameters)
    for rank in range(size):
        part = Part(config, rank, size, plan)
        loaded = dict(load_model(directory, part=lambda _, part=part: part).named_parameters())  # type: ignore[misc]
        assert loaded.keys() == parameters.keys()
        for name, pieces in part.pieces.items():
            for ours, all_of_it in zip(pieces, whole[name]):
                expected = parameters[name][all_of_it.rows][ours.cut] * ours.stored
                assert torch.equal(loaded[name][ours.rows], expected), ours.key


TOY = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)


def without(*names: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in LLAMA if not any(name in rule.names for name in names))


@pytest.mark.parametrize(
    ("size", "changes", "plan", "said"),
    [
        (3, {}, LLAMA, "vocab_size 48|num_attention_heads 4 does not divide by 3 ranks"),
        (5, {}, LLAMA, "does not divide by 5 ranks"),
        (4, {"intermediate_size": 50}, LLAMA, "intermediate_size 50 does not divide by 4 ranks"),
        (6, {"num_key_value_heads": 4, "num_attention_heads": 12}, LLAMA, "num_key_value_heads 4 does not divide by 6"),
        (2, {}, without("q_proj"), "q_proj.weight is matched by no rule"),
        (2, {}, (*LLAMA, Rule("*.o_proj.*", "replicate")), "o_proj.weight is matched by 2 rules"),
        (2, {}, (*LLAMA, Rule("model.nothing", "replicate")), "'model.nothing' .* matches no tensor"),
        (2, {}, (*LLAMA, Rule("model.nothing", "column", "wings")), "'wings', which is no size"),
        (2, {}, (*without("down_proj"), Rule("*.down_proj.*", "replicate")), "down_proj.weight: the plan leaves"),
        (2, {}, (*without("gate"), Rule("*gate*", "replicate"), Rule("*up_*", "column", "vocab_size")), "differently"),
        (2, {}, (*without("k_proj"), Rule("*.k_proj.* *.v_proj.*", "replicate")), "query and key heads go together"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_says_why(size: int, changes: dict[str, int], plan: Any, said: str) -> None:
    config = LlamaConfig.model_validate({**TOY.model_dump(), **changes})
    with pytest.raises(PlanError, match=said):
        Part(config, 0, size, plan)


# Shards of logits


def ask_shards(ranks: Ranks, logits_BJV: torch.Tensor, tokens_BJ: torch.Tensor, n: int, seed: int) -> dict[str, Any]:
    """What the passes over the vocabulary say of shards, and of one tensor."""
    width = logits_BJV.shape[-1] // ranks.size
    shards = VocabularyShards(logits_BJV[..., ranks.rank * width : (ranks.rank + 1) * width].clone(), ranks)
    generator = torch.Generator().manual_seed(seed)
    rows, positions, _ = logits_BJV.shape
    rows_N = torch.randint(0, rows, (5,), generator=generator)
    positions_N = torch.randint(0, positions, (5,), generator=generator)
    answers = {}
    for name, logits in (("whole", logits_BJV), ("shards", shards)):
        peak_N = logits[rows_N, positions_N, vocabulary.argmax(logits)[rows_N, positions_N]]
        at_N = rows_N * positions + positions_N
        temperature_N, least_N = torch.full((5,), 0.7), peak_N - 1.0
        flat = logits.flatten(0, 1)
        answers[name] = {
            "shape": tuple(logits.shape),
            "argmax": vocabulary.argmax(logits[:, :-1]).tolist(),
            "top": vocabulary.top(logits, n).values.tolist(),
            "pick": vocabulary.pick(logits, tokens_BJ).tolist(),
            "amax": flat.amax(-1).tolist(),
            "at": logits[rows_N, positions_N].softmax(-1).tolist(),
            "rows": [x.tolist() for x in logits],
            "views": logits.unsqueeze(1).expand(-1, 2, -1, -1).flatten(0, 1).unflatten(0, (rows, 2))[:, 1].tolist(),
            "mass": vocabulary.log_mass(flat, peak_N, at_N=at_N).tolist(),
            "some": vocabulary.log_mass(flat, peak_N, temperature_N, least_N, at_N).tolist(),
        }
        if name == "shards":
            assert shards.whole is None, "something gathered them all"
        picked = vocabulary.top(logits, n).indices
        assert torch.equal(logits.gather(-1, picked), vocabulary.top(logits, n).values)
    close = {name: answers["whole"].pop(name) for name in ("mass", "some")}
    for name, expected in close.items():
        torch.testing.assert_close(torch.tensor(answers["shards"].pop(name)), torch.tensor(expected))
    return answers


@settings(max_examples=15)
@given(st.data())
def test_shards_answer_like_one_tensor(pool: Pool, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([2, 4]))
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([4, 8, 520, 4096])))
    seed = data.draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    levels = data.draw(st.sampled_from([3, 1000000]))  # ties, or none
    logits_BJV = torch.randint(0, levels, shape, generator=generator) * (6.0 / levels)
    if data.draw(st.booleans()):
        logits_BJV[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
        logits_BJV[..., 1] = 2.0
    tokens_BJ = torch.randint(0, shape[-1], shape[:2], generator=generator)
    answers = pool.run(size, ask_shards, logits_BJV, tokens_BJ, data.draw(st.integers(1, 3)), seed)
    assert answers["shards"] == answers["whole"]


# The same tokens, however many ranks

POLICIES = sorted(policy_types())
STRATEGIES = [
    "none",
    "ngram",
    "{draft}",
    "ngram+{draft}",
    "tree({draft}, nodes=6, depth=3)",
    "union(ngram, {draft})",
]


def checkpoints(directory: Path, config: LlamaConfig, seed: int) -> tuple[str, str]:
    """A target, and a draft that is close to it, so that some of what it proposes stands."""
    model = build_llama(config, seed)
    save_model(model, directory / "target", torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    save_model(model, directory / "draft", torch.float32)
    return str(directory / "target"), str(directory / "draft")


def told(outputs: list[fly.Output]) -> list[Any]:
    """All that must be alike."""
    return [
        (o.token_ids, o.finish_reason, [(t.id, int(t.why), t.clause, t.target_choice) for t in o.provenance])
        for o in outputs
    ]


def generate(
    ranks: Ranks | None, target: str, draft: str, request: dict[str, Any], options: dict[str, Any] | None = None
) -> list[Any]:
    llm = fly.LLM(target, draft, k=5, ranks=ranks, cache_tokens=2048, **(options or {}))
    first = llm.generate(**request)
    return told(first) + told(llm.generate(**request))  # caches and strategies as a first call leaves them


def generate_with_noise(target: str, draft: str, request: dict[str, Any], noise: float) -> list[Any]:
    """One rank again, with logits a little off: where that changes nothing, no tie was near."""
    generator = torch.Generator().manual_seed(1)

    def load_noisily(*arguments: Any, kernels: str = "torch") -> Executor:
        model = load_model(*arguments)
        model.lm_head.register_forward_hook(
            lambda _, inputs, out: out + noise * torch.randn(out.shape, generator=generator)
        )
        return TorchExecutor(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fly.llm.load_model", lambda model, *_, **__: load_whole(model, by=load_noisily))
        llm = fly.LLM(load_noisily(target), draft, k=5, cache_tokens=2048)
    first = llm.generate(**request)
    return told(first) + told(llm.generate(**request))


@settings(max_examples=8, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_ranks_change_no_token(pool: Pool, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """1, 2 and 4 ranks give the same tokens for the same reasons, whatever decides, unless a tie was near.

    Near: logits that are off by a deviation of 1e-4 change something (on toy models ranks change them by some 1e-6).
    """
    config = data.draw(divisible_configs())
    target, model = checkpoints(tmp_path_factory.mktemp("toys"), config, data.draw(st.integers(0, 99)))
    draft = data.draw(st.sampled_from(STRATEGIES)).format(draft=f'"{model}"')
    greedy = data.draw(st.booleans())
    params = SamplingParams(
        temperature=0.0 if greedy else data.draw(st.sampled_from([0.7, 1.3])),
        top_p=data.draw(st.sampled_from([1.0, 0.9])),
        top_k=data.draw(st.sampled_from([0, 5])),
        seed=data.draw(st.integers(0, 99)),
        max_tokens=12,
        logprobs=data.draw(st.sampled_from([None, 2])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.2])),
    )
    prompts = [[1, 0, 1, 0, 1], [3 % config.vocab_size]]
    policies = [parse_policy(name) for name in data.draw(st.tuples(*[st.sampled_from(POLICIES)] * 2))]
    request = {"prompts": prompts, "params": params, "policy": policies}
    whole_sums = data.draw(st.booleans())
    placement = data.draw(st.sampled_from(["replicated", "sharded", "first"]))
    kernels = data.draw(st.sampled_from(["auto", "torch"]))
    options = {"draft_placement": placement, "whole_sums": whole_sums, "kernels": kernels}
    expected = generate(None, target, draft, request)
    assume(all(generate_with_noise(target, draft, request, 1e-4) == expected for _ in range(2)))
    for size in (1, 2, 4):
        found = pool.run(size, generate, target, draft, request, options)
        assert found == expected


def adapt(ranks: Ranks, target: str, draft: str, placement: str) -> list[Any]:
    """Decisions by the clock, a text nobody seeded, and what drafting costs where."""
    llm = fly.LLM(target, f'adaptive("{draft}")', k=4, ranks=ranks, cache_tokens=1024, draft_placement=placement)
    outputs = llm.generate([[1, 2, 3], [3, 2]], SamplingParams(temperature=1.0, max_tokens=24))
    return [*told(outputs), [o.stats.drafted for o in outputs]]


@pytest.mark.parametrize("placement", ["auto", "replicated", "sharded", "first"])
def test_time_and_chance_are_the_first_ranks(pool: Pool, tmp_path: Path, placement: str) -> None:
    target, draft = checkpoints(tmp_path, TOY, 0)
    pool.run(2, adapt, target, draft, placement)  # alike on both ranks


def bits(ranks: Ranks | None, target: str, plan: tuple[Rule, ...], kernels: str = "torch") -> list[list[float]]:
    executor: Executor = TorchExecutor(load_model(target))
    if ranks is not None:
        executor = load(target, ranks=ranks, plan=plan, gather_logits=True, kernels=kernels)
    torch.set_num_threads(2)  # who is no first thread of compiled kernels waits for the ranks as well
    cache = PagedKVCache.for_model(executor, 64)
    try:
        cache.resize(0, 40)
        with torch.inference_mode():
            first, rest = list(range(39)), [39]  # as a prompt comes in, and as a row decodes
            executor.score(Batch(first, first, cache.batch([0], [0], [39])))
            last = executor.score(Batch(rest, rest, cache.batch([0], [39], [1]))).logits_NV
            cache.resize(0, 0)
            cache.resize(0, 40)
            whole = list(range(40))
            found = executor.score(Batch(whole, whole, cache.batch([0], [0], [40]))).logits_NV
            return [*found.tolist(), *last.tolist()]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kernels", available())
def test_plain_logits_where_they_are_asked_for(pool: Pool, tmp_path: Path, kernels: str) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    expected = torch.tensor(bits(None, target, LLAMA))
    for size in (2, 4):
        for plan in (LLAMA, LLAMA_WHOLE_SUMS):
            if kernels == "torch" or plan is LLAMA:
                found = torch.tensor(pool.run(size, bits, target, plan, kernels))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            else:
                for success, error in pool.outcomes(size, bits, target, plan, kernels):
                    assert not success and "only PyTorch runs a plan that gathers" in error[1]


def tokens_of_head(executor: Any) -> int:
    """Of a model divided among ranks only its part; either may be compiled."""
    model = executor.packed if isinstance(executor, CpuExecutor) else executor.model
    return model.lm_head.weight.shape[0] if isinstance(model, Llama) else model.vocab


def place(ranks: Ranks, draft: str, placement: Any) -> list[str]:
    known = draft if Path(draft).exists() else "fly-target"
    setup = TranslatingSetup(Runner(load_whole(known).executor, None), load=load_whole)
    make, load_part = partial(parse_draft, draft), partial(load, ranks=ranks)
    strategy = place_draft(make, setup, ranks, placement, load_part)
    shapes = [] if not isinstance(strategy, SingleDraft) else [tokens_of_head(strategy.executor)]
    return [type(strategy).__name__, str(shapes)]


def test_drafts_are_placed_where_they_are_asked_to(pool: Pool, tmp_path: Path) -> None:
    _, draft = checkpoints(tmp_path, TOY, 0)
    odd = build_llama(LlamaConfig.model_validate({**TOY.model_dump(), "vocab_size": 47}))
    save_model(odd, tmp_path / "odd", torch.float32)
    assert pool.run(2, place, draft, "replicated") == ["SingleDraft", "[48]"]
    assert pool.run(2, place, draft, "sharded") == ["SingleDraft", "[24]"]
    assert pool.run(2, place, draft, "first") == ["FirstDraft", "[]"]
    assert pool.run(2, place, draft, "auto") in (["SingleDraft", "[24]"], ["SingleDraft", "[48]"])
    assert pool.run(2, place, str(tmp_path / "odd"), "auto") == ["SingleDraft", "[47]"]
    assert pool.run(2, place, "none", "first") == ["NoneType", "[]"]
    for work, said in (
        (("eagle3(fly-eagle3)", "first"), "hidden states"),
        (("ngram", "there"), "'there' is unknown"),
    ):
        for success, error in pool.outcomes(2, place, *work):
            assert not success and said in error[1]


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
    llm = fly.LLM(target, ranks=ranks, cache_tokens=256)
    llm.generate([[1, 2, 3 + (ranks.rank == 1)]], SamplingParams(temperature=0, max_tokens=4))


def meddle_with_weights(ranks: Ranks, target: str) -> None:
    """The second rank says something else, of the same prompt."""
    llm = fly.LLM(target, ranks=ranks, cache_tokens=256, kernels="torch")
    if ranks.rank == 1:
        step = llm.scheduler.step

        def other() -> Any:
            return {row: [token._replace(id=token.id ^ 1) for token in tokens] for row, tokens in step().items()}

        llm.scheduler.step = other  # type: ignore[method-assign]
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))


@pytest.mark.parametrize("work", [meddle, meddle_with_weights])
def test_a_model_notices_that_its_ranks_diverge(pool: Pool, tmp_path: Path, work: Any) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    for success, error in pool.outcomes(2, work, target):
        assert not success and "rank 1 had other tokens" in error[1]


class Elsewhere(TorchExecutor):
    """A model that is on another device than the first rank's, as far as anybody can see."""

    def __init__(self, model: Llama) -> None:
        super().__init__(model)
        self.device = torch.device("meta")


def draft_first(ranks: Ranks, target: str, draft: str) -> list[list[str]]:
    """What the first rank drafts, as each rank has it."""
    executor = (TorchExecutor if ranks.leads else Elsewhere)(load_model(target))
    first = FirstDraft(ranks, partial(parse_draft, draft))
    setup = TranslatingSetup(Runner(executor, PagedKVCache(executor.config, 64, 4)), load=load_whole)
    setup.attach(first)
    setup.reserve()
    params = SamplingParams(temperature=0.0)
    row = Sequence(tokens=[1, 2, 1, 2, 1], prompt_length=5, params=params, policy=Exact(), seed=1, k=3)
    proposed = first.propose([row], [3])
    return ranks.collect([f"{each.device} {[*each.shape]}" for each in (proposed.tokens_BK, proposed.lengths_B)])


def test_a_draft_from_the_first_rank_is_on_each_ranks_own_device(pool: Pool, tmp_path: Path) -> None:
    target, draft = checkpoints(tmp_path, TOY, 0)
    found = pool.run(2, draft_first, target, f'model("{draft}")')
    assert found == [["cpu [1, 3]", "cpu [1]"], ["meta [1, 3]", "meta [1]"]]


def compiled(ranks: Ranks, target: str, plan: tuple[Rule, ...]) -> list[list[float]]:
    """Hidden states of a part under torch.compile, whose graphs must hold all that ranks exchange within layers."""
    executor = load(target, ranks=ranks, plan=plan, gather_logits=True)
    assert isinstance(executor, TorchExecutor) and isinstance(executor.model, Llama)
    expected = executor.score(_block(executor)).logits_NV
    entered, graphs = ranks.progress.entered, []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    executor.model.forward = partial(executor.model.forward, through=CompiledLayers(backend=note))  # type: ignore[method-assign]
    with torch.inference_mode():
        found = executor.score(_block(executor)).logits_NV
        assert torch.equal(found, expected) and len(graphs) == 3
        noted = ranks.progress.entered - entered
        # outside of the layers: what is compared before the forward, the embedding's sum, the logits
        assert noted == 3, noted
    return found.tolist()


def rounds_on_gpus(ranks: Ranks | None, target: str, draft: str, kind: str, temperature: float) -> list[Any]:
    """What rows say by graphs that hold what ranks exchange, on emulated devices; alone on the CPU."""
    rows = [
        Sequence(
            [1, 2, 3 + b], 3, SamplingParams(temperature=temperature, max_tokens=120), parse_policy(policy), b, 5
        )
        for b, policy in enumerate(("exact", "fly(theta=0.1, window=2, hold=2)", "exact"))
    ]  # fmt: skip

    def decode(load_target: Callable[..., Executor], load_draft: Callable[..., Executor]) -> Iterator[None]:
        executor, drafter = load_target(target, kernels="torch"), load_draft(draft, kernels="torch")
        strategy: DraftStrategy
        if kind == "head":
            strategy = Eagle3Draft(drafter, cache_tokens=2048, reach=0.02)
        else:
            strategy = CascadeDraft([NGramDraft(), SingleDraft(drafter, cache_tokens=2048, reach=0.02)])
        engine = Engine(Runner(executor, PagedKVCache.for_model(executor, 2048)), strategy)
        while going := [row for row in rows if not row.finish_reason]:
            engine.stretch = 1e-9
            engine.step(going)
            yield

    def load_all(path: str, device: str = "cpu", **options: Any) -> Executor:
        if kind != "head":
            return load_executor(path, device=device, **options)
        from tests.test_cuda_heads import head_there  # takes a second to import, in each process

        head = load_head(Path(path))
        return head_there(head) if device == "cuda" else TorchHead(head)

    if ranks is None:
        assert len([*decode(load_executor, load_all)]) > 0
    else:
        compares, ranks.compares_forwards = ranks.compares_forwards, False  # as with NCCL, which Gloo stands for
        divided = partial(load, ranks=ranks, device="cuda")
        try:
            with emulated() as gpu, exchanged(gpu):
                steps = decode(divided, divided if kind == "sharded" else partial(load_all, device="cuda"))
                for number, _ in enumerate(steps):
                    if 3 <= number <= 4:  # before, what is new is warmed up and captured; later, rows end
                        assert gpu.launches["all_reduce"] == 0 and gpu.launches["graph"] >= 3, gpu.launches
                        assert 1 <= len(gpu.waits) <= 4 and all("event" in wait for wait in gpu.waits), gpu.waits
                    gpu.launches.clear(), gpu.waits.clear()
                    ranks.agree([row.tokens for row in rows])
        finally:
            ranks.compares_forwards = compares
            ranks._checksums.clear()
    return [(row.tokens, row.drafts, row.finish_reason) for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["whole", "sharded", "head"])
def test_graphs_of_several_devices_hold_what_they_exchange(
    pool: Pool, tmp_path: Path, kind: str, temperature: float
) -> None:
    """One wait a round, up to four rounds a call, and the texts of one CPU."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=300,
    )  # fmt: skip
    target, draft = checkpoints(tmp_path, config, 5)
    if kind == "head":
        head = Eagle3Head(
            HeadConfig(layer=config.resized(1), draft_vocab_size=32, target_hidden_size=16, states=(0, 2))
        )
        randomise(head)
        save_head(head, draft := str(tmp_path / "head"), torch.float32)
    want = rounds_on_gpus(None, target, draft, kind, temperature)
    assert pool.run(2, rounds_on_gpus, target, draft, kind, temperature) == want


def _block(executor: Executor) -> Batch:
    cache = PagedKVCache.for_model(executor, 64)
    cache.resize(0, 5)
    return Batch([1, 2, 3, 4, 5], [0, 1, 2, 3, 4], cache.batch([0], [0], [5]))


@pytest.mark.parametrize("plan", [LLAMA, LLAMA_WHOLE_SUMS])
def test_what_ranks_exchange_is_part_of_the_compiled_graph(pool: Pool, tmp_path: Path, plan: Any) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    assert len(pool.run(2, compiled, target, plan)) == 5


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


def take_requests(ranks: Ranks, target: str) -> list[Any]:
    llm = fly.LLM(target, "ngram", ranks=ranks, cache_tokens=256)
    seen: list[Any] = []

    def handle(message: Any) -> Any:
        seen.append(message)
        return told(llm.generate([message], SamplingParams(temperature=1.0, max_tokens=5)))

    if not ranks.leads:
        follow(ranks, handle)
        with pytest.raises(ValueError, match="cannot lead"):
            lead(ranks, handle)
        return seen
    leader = lead(ranks, handle)
    answers = [leader([1, 2, 3])]
    with pytest.raises(ValueError, match="outside the vocabulary"):  # the request's fault, not the group's
        leader([1, 999])
    answers.append(leader([4]))
    leader.close()
    assert all(len(tokens) == 5 for ((tokens, _, _),) in answers)
    return seen


def test_the_first_rank_takes_requests_and_all_serve_them(pool: Pool, tmp_path: Path) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    assert pool.run(4, take_requests, target) == [[1, 2, 3], [1, 999], [4]]


def mixed_calls(ranks: Ranks, target: str) -> list[Any]:
    """The same calls on every rank: coroutines, streams left half-way, and collectives of the caller between them."""
    llm = fly.LLM(target, "ngram", ranks=ranks, cache_tokens=256)
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
    assert all(each.num_free == each.num_blocks for each in llm.scheduler.allocators())
    return [*found, ranks.random.random()]


def test_calls_of_all_ranks_are_in_step(pool: Pool, tmp_path: Path) -> None:
    target, _ = checkpoints(tmp_path, TOY, 0)
    for size in (1, 2):
        found = pool.run(size, mixed_calls, target)  # alike on all ranks
        assert found[-3] and found[-2] == [3] * size


def lead_and_follow(ranks: Ranks, target: str) -> Any:
    """The first rank is called from several threads, the others follow until it is closed."""
    llm = fly.LLM(target, "ngram", ranks=ranks, cache_tokens=256)
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
            follow(ranks, print)
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
                ranks.progress.over = work.is_completed
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
    llm = fly.LLM("fly-tiny", ranks=ranks, dtype="float32", kernels="torch", cache_tokens=512)
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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
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
        given.append({name: options[name] for name in Config.of_ranks})
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


# The plan past one machine


def test_costs_behave_as_they_must() -> None:
    """Distributions of the model of costs, whatever the figures are."""
    target, draft = MODELS["llama-3.1-70b"], MODELS["llama-3.1-8b"]
    setting = Setting(target, draft, 15, 12.0)
    few, many = (forecast(setting, Machines(DEVICES["h100"], n)) for n in (4, 8))
    assert many.memory["sharded"] < few.memory["sharded"] < few.memory["replicated"]
    assert many.step < few.step < few.verify < few.round()
    assert few.draft["replicated"] == many.draft["replicated"] > many.draft["sharded"]
    split = forecast(setting, Machines(DEVICES["h100"], 8, per_node=4))
    assert split.step > many.step  # the network is slower than what is inside a node
    longer = forecast(replace(setting, context=100_000), Machines(DEVICES["h100"], 8))
    assert longer.step > many.step and longer.memory["sharded"] > many.memory["sharded"]
    assert forecast(replace(setting, tau=6.0), Machines(DEVICES["h100"], 8)).gain() == pytest.approx(many.gain() / 2)
    assert not forecast(setting, Machines(DEVICES["h100"], 1)).fits and many.fits
    assert Link(1e-6, 1e9).all_reduce(1e9, 2) == pytest.approx(1 + 1e-6) and Link(1.0, 1.0).all_reduce(9, 1) == 0


@settings(max_examples=15)
@given(divisible_configs())
def test_a_step_reads_what_the_plan_divides(config: LlamaConfig) -> None:
    """The matrices a step is said to read are those of the model."""
    with torch.device("meta"):
        parameters = dict(Llama(config).named_parameters())
    matrices = sum(p.numel() for name, p in parameters.items() if p.dim() == 2 and "embed" not in name)
    matrices += parameters["embed_tokens.weight"].numel() * config.tie_word_embeddings
    assert matrix_parameters(config) == matrices


def test_bench_plan_on_the_command_line() -> None:
    def plan(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["bench", "plan", *arguments], env={"COLUMNS": "200"})

    shown = plan()
    assert shown.exit_code == 0 and "2.81×" in shown.output and "5.07×" in shown.output, shown.output
    assert shown.output.count("sharded") == 2 and "does not fit" not in shown.output
    shown = plan("--target", "llama-3.1-70b", "--tau", "12", "--ranks", "1")
    assert shown.output.count("does not fit") == 2
    assert "--tau is needed" in plan("--target", "llama-3.1-70b").output
    assert "choices: ['a100'" in plan("--device", "abacus").output
    assert "does not divide by 7 ranks" in plan("--target", "llama-3.1-70b", "--tau", "12", "--ranks", "7").output


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_configurations_are_read(path: Path) -> None:
    assert Config.read(path).k >= 15
