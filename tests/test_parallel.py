"""Ranks: the plan, loading by slices, shards of logits, and the same tokens on 1, 2 and 4 Gloo processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fly
from fly.backends import load as load_whole
from fly.backends import load_executor
from fly.backends.cpu import CpuExecutor, available
from fly.backends.heads import TorchHead
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.config import Config
from fly.drafts import CascadeDraft, DraftStrategy, Eagle3Draft, NGramDraft, SingleDraft, parse_draft
from fly.drafts.setup import TranslatingSetup
from fly.engine import Engine
from fly.models import Llama, LlamaConfig, load_model, save_model
from fly.models.compiled import CompiledLayers
from fly.models.dflash import DFlashConfig, DFlashHead, save_dflash_head
from fly.models.eagle import Eagle3Head, HeadConfig, load_head, save_head
from fly.models.families import Family
from fly.models.loading import layout
from fly.ops import vocabulary
from fly.parallel import (
    LLAMA,
    LLAMA_WHOLE_SUMS,
    Part,
    PlanError,
    Ranks,
    Rule,
    load,
    place_draft,
)
from fly.parallel.logits import VocabularyShards
from fly.policies import parse_policy, policy_types
from fly.runner.executor import Batch, Executor
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import SamplingParams
from tests.emulator import emulated, exchanged
from tests.pool import TOY, Pool, checkpoints, told
from tests.test_eagle import randomise
from tests.toys import PLAIN, build_llama, llama_configs

# The plan


@st.composite
def divisible_configs(draw: st.DrawFn, families: tuple[Family, ...] = PLAIN, size: int = 4) -> LlamaConfig:
    """Configurations that divide by ``size`` ranks, some with fewer key heads than ranks."""
    config = draw(llama_configs(families=families))
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


@settings(max_examples=4)
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([LLAMA, LLAMA_WHOLE_SUMS]))
@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_parts_cover_every_tensor(family: Family, data: st.DataObject, size: int, plan: tuple[Rule, ...]) -> None:
    """Every number of the checkpoint is on one rank, or on as many as its style says; biases of sums on the first."""
    config = data.draw(divisible_configs((family,)))
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


@settings(max_examples=3)
@given(data=st.data(), size=st.sampled_from([2, 4]), plan=st.sampled_from([LLAMA, LLAMA_WHOLE_SUMS]))
@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_ranks_load_their_slices(
    tmp_path_factory: pytest.TempPathFactory, family: Family, data: st.DataObject, size: int, plan: tuple[Rule, ...]
) -> None:
    """What ranks load, put together by the plan's cuts, is the checkpoint."""
    config, seed = data.draw(divisible_configs((family,))), data.draw(st.integers(0, 99))
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


def without(*names: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in LLAMA if not any(name in rule.names for name in names))


@pytest.mark.parametrize(
    ("size", "changes", "plan", "said"),
    [
        (3, {}, LLAMA, "vocab_size 48|num_attention_heads 4 is not divisible by 3 ranks"),
        (5, {}, LLAMA, "is not divisible by 5 ranks"),
        (4, {"intermediate_size": 50}, LLAMA, "intermediate_size 50 is not divisible by 4 ranks"),
        (6, {"num_key_value_heads": 4, "num_attention_heads": 12}, LLAMA, "heads 4 is not divisible by 6"),
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
]


def generate(
    ranks: Ranks | None, target: str, draft: str, request: dict[str, Any], options: dict[str, Any] | None = None
) -> list[Any]:
    sharing = {name: value for name, value in (options or {}).items() if name in Config.of_ranks}
    if ranks is not None:
        ranks = Ranks(ranks.group, **sharing)
    kernels = (options or {}).get("kernels", "auto")
    llm = fly.LLM(target, draft, k=5, ranks=ranks, cache=2048, kernels=kernels)
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
        llm = fly.LLM(load_noisily(target), draft, k=5, cache=2048)
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
    placement = data.draw(st.sampled_from(["replicated", "sharded"]))
    kernels = data.draw(st.sampled_from(["auto", "torch"]))
    options = {"draft_placement": placement, "whole_sums": whole_sums, "kernels": kernels}
    expected = generate(None, target, draft, request)
    assume(all(generate_with_noise(target, draft, request, 1e-4) == expected for _ in range(2)))
    for size in (1, 2, 4):
        found = pool.run(size, generate, target, draft, request, options)
        assert found == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_a_block_drafter_uses_an_output_matrix_that_is_divided(
    pool: Pool, tmp_path: Path, placement: str, temperature: float
) -> None:
    target, _ = checkpoints(tmp_path, TOY, 5)
    layer = LlamaConfig.model_validate(TOY.model_dump() | {"family": "qwen3", "num_hidden_layers": 1})
    config = DFlashConfig(
        layer=layer, draft_vocab_size=TOY.vocab_size, target_hidden_size=TOY.hidden_size, states=(1,), block_size=4,
        mask_token_id=1, causal=(False,), anchor_first=True, markov="vanilla", markov_rank=4,
    )  # fmt: skip
    head = DFlashHead(config)
    randomise(head)
    save_dflash_head(head, draft := str(tmp_path / "head"), torch.float32)
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3)
    request = {"prompts": [[1, 2, 3], [3, 2]], "params": params}
    expected = generate(None, target, f'block("{draft}")', request)
    options = {"draft_placement": placement, "kernels": "torch"}
    assert pool.run(2, generate, target, f'block("{draft}")', request, options) == expected


def adapt(ranks: Ranks, target: str, draft: str, placement: str) -> list[Any]:
    """Decisions by the clock, a text nobody seeded, and what drafting costs where."""
    ranks = Ranks(ranks.group, draft_placement=placement)
    llm = fly.LLM(target, f'adaptive("{draft}")', k=4, ranks=ranks, cache=1024)
    outputs = llm.generate([[1, 2, 3], [3, 2]], SamplingParams(temperature=1.0, max_tokens=24))
    return [*told(outputs), [o.stats.drafted for o in outputs]]


@pytest.mark.parametrize("placement", ["auto", "replicated", "sharded"])
def test_time_and_chance_are_the_first_ranks(pool: Pool, tmp_path: Path, placement: str) -> None:
    target, draft = checkpoints(tmp_path, TOY, 0)
    pool.run(2, adapt, target, draft, placement)  # alike on both ranks


def logits_of(executor: Executor, batch: Batch) -> torch.Tensor:
    logits_NV = executor.score(batch).logits_NV
    return logits_NV.gathered() if isinstance(logits_NV, VocabularyShards) else logits_NV


def bits(ranks: Ranks | None, target: str, plan: tuple[Rule, ...], kernels: str = "torch") -> list[list[float]]:
    executor: Executor = TorchExecutor(load_model(target))
    if ranks is not None:
        executor = load(target, ranks=ranks, plan=plan, kernels=kernels)
    torch.set_num_threads(2)  # who is no first thread of compiled kernels waits for the ranks as well
    cache = PagedKVCache.for_model(executor, 64)
    try:
        cache.resize(0, 40)
        with torch.inference_mode():
            first, rest = list(range(39)), [39]  # as a prompt comes in, and as a row decodes
            executor.score(Batch(first, first, cache.batch([0], [0], [39])))
            last = logits_of(executor, Batch(rest, rest, cache.batch([0], [39], [1])))
            cache.resize(0, 0)
            cache.resize(0, 40)
            whole = list(range(40))
            found = logits_of(executor, Batch(whole, whole, cache.batch([0], [0], [40])))
            return [*found.tolist(), *last.tolist()]
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kernels", available())
def test_logits_of_ranks_are_those_of_one(pool: Pool, tmp_path: Path, kernels: str) -> None:
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
    clock, load_by = setup.clock, setup.load_by
    strategy = place_draft(make, setup, Ranks(ranks.group, draft_placement=placement), load_part)
    assert (setup.clock, setup.load_by) == (clock, load_by)  # the caller's setup stays as it is
    shapes = [] if not isinstance(strategy, SingleDraft) else [tokens_of_head(strategy.runner.executor)]
    return [type(strategy).__name__, str(shapes)]


def test_drafts_are_placed_where_they_are_asked_to(pool: Pool, tmp_path: Path) -> None:
    _, draft = checkpoints(tmp_path, TOY, 0)
    odd = build_llama(LlamaConfig.model_validate({**TOY.model_dump(), "vocab_size": 47}))
    save_model(odd, tmp_path / "odd", torch.float32)
    assert pool.run(2, place, draft, "replicated") == ["SingleDraft", "[48]"]
    assert pool.run(2, place, draft, "sharded") == ["SingleDraft", "[24]"]
    assert pool.run(2, place, draft, "auto") in (["SingleDraft", "[24]"], ["SingleDraft", "[48]"])
    assert pool.run(2, place, str(tmp_path / "odd"), "auto") == ["SingleDraft", "[47]"]
    for placement in ("auto", "replicated"):
        assert pool.run(2, place, "model(fly-draft, vocabulary=300)", placement)[0] == "SingleDraft"
    assert pool.run(2, place, "none", "auto") == ["NoneType", "[]"]
    for work, said in (
        (("ngram", "first"), "'first' is unknown; choices: ['auto', 'replicated', 'sharded']"),
        (("model(fly-draft, vocabulary=300)", "sharded"), "is not divided among ranks"),
    ):
        for success, error in pool.outcomes(2, place, *work):
            assert not success and said in error[1]


def compiled(ranks: Ranks, target: str, plan: tuple[Rule, ...]) -> list[list[float]]:
    """Hidden states of a part under torch.compile, whose graphs must hold all that ranks exchange within layers."""
    executor = load(target, ranks=ranks, plan=plan)
    assert isinstance(executor, TorchExecutor) and isinstance(executor.model, Llama)
    expected = logits_of(executor, _block(executor))
    entered, graphs = ranks.progress.entered, []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    executor.model.forward = partial(executor.model.forward, through=CompiledLayers(backend=note))  # type: ignore[method-assign]
    with torch.inference_mode():
        found = logits_of(executor, _block(executor))
        assert torch.equal(found, expected) and len(graphs) == 3
        noted = ranks.progress.entered - entered
        # outside of the layers: what is compared before the forward, the embedding's sum, the logits
        assert noted == 3, noted
    return found.tolist()


def rounds_on_gpus(ranks: Ranks | None, target: str, draft: str, kind: str, temperature: float) -> list[Any]:
    """What rows say by graphs that hold what ranks exchange, on emulated devices; alone on the CPU."""
    rows = [
        Row(
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


@pytest.mark.parametrize(("kind", "temperature"), [("whole", 0.0), ("whole", 0.8), ("sharded", 0.8), ("head", 0.8)])
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
