"""The bench's arithmetic and its clocks. No figure is judged here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fly import LLM, SamplingParams, cli
from fly.backends.cpu import available, why_not
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import Eagle3Draft, NGramDraft
from fly.extras.bench import limits as limits_module
from fly.extras.bench.clock import Timing, take_turns
from fly.extras.bench.limits import Limits
from fly.extras.bench.prompts import PROMPTS, asked_of, usual_amount
from fly.extras.bench.shapes import forward_bytes, forward_operations, matrix_parameters, random_model, shape_config
from fly.extras.bench.speed import Forward, Forwards, Rounds, Shape, context_slope, measure_rounds, predict
from fly.extras.eval import Setting, compare, decode
from fly.extras.eval.compare import in_turns
from fly.extras.eval.timed import Clock, Times, draft_runners, timed
from fly.models import LlamaConfig, load_model, save_model
from fly.models.bundled.tasks import problems
from fly.policies import FLy
from fly.runner.executor import Batch, Drafted, DraftSpec, Executor
from fly.runner.request import Stats
from tests.test_drafts import make_row
from tests.toys import build_llama, dense_logits, llama_configs, random_llama

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def limits(bandwidth: float = 100.0, rate: float = 10.0) -> Limits:
    dtypes = (torch.bfloat16, torch.float32)
    return Limits("cpu", 1, {1000: 4 * bandwidth, 10**12: bandwidth}, dict.fromkeys(dtypes, rate), {})


def forward(seconds: float, tokens: int = 1, context: int = 0, drafting: bool = False) -> Forward:
    config = random_llama().config
    return Forward("toy", config, torch.float32, 1, context, tokens, Timing((seconds, 9 * seconds)), drafting)


def strategy_of(name: str) -> LLM:
    return LLM("fly-target", name, k=5, dtype="float32", kernels="torch")


@given(config=llama_configs(), rows=st.integers(1, 3), context=st.integers(0, 9))
def test_bytes_of_a_forward_are_those_of_the_matrices_and_the_cache(
    config: LlamaConfig, rows: int, context: int
) -> None:
    model = build_llama(config)
    read = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)
    if config.tie_word_embeddings:
        read += model.embed_tokens.weight.numel()
    stored = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context * rows
    assert forward_bytes(config, torch.float32, rows, context) == 4 * (read + stored)
    assert forward_bytes(config, torch.bfloat16, rows, context) == 2 * (read + stored)
    assert forward_bytes(config, torch.bfloat16, rows, context, weight_bytes=1) == read + 2 * stored


@given(config=llama_configs(), rows=st.integers(1, 3), context=st.integers(0, 9), tokens=st.integers(1, 5))
def test_operations_of_a_forward(config: LlamaConfig, rows: int, context: int, tokens: int) -> None:
    weights = forward_bytes(config, torch.float32) // 4
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    products = attention = 0
    for _ in range(rows):
        for token in range(tokens):
            products += 2 * weights
            attention += 4 * heads * (context + token + 1)
    counts = config, torch.float32, rows, context, tokens
    assert forward_operations(*counts) == {torch.float32: products + attention}
    assert forward_operations(*counts, torch.int8) == {torch.int8: products, torch.float32: attention}


def test_what_is_slow_to_multiply_is_multiplied_as_float32() -> None:
    rates = {torch.bfloat16: 5.0, torch.float32: 10.0, torch.int8: 40.0}
    machine = Limits("cpu", 1, {1000: 100.0}, rates, {})
    assert machine.seconds(0, {torch.bfloat16: 80}) == machine.seconds(0, {torch.float32: 80}) == 8
    assert machine.seconds(0, {torch.int8: 80}) == 2
    assert machine.seconds(0, {torch.int8: 80, torch.bfloat16: 20}) == 4
    assert machine.seconds(400, {torch.int8: 80}) == 4


def test_a_shape_is_read_and_made() -> None:
    config = shape_config("768x12x32000")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (768, 12, 32_000)
    assert 105e6 < forward_bytes(config, torch.bfloat16) / 2 < 115e6
    model = random_model(shape_config("64x1x50"), torch.float32)
    assert dense_logits(model, [1, 2, 3]).isfinite().all()
    for wrong in ("768x12", "60x2x100", "0x2x100", "768x12x32000x1"):
        with pytest.raises(ValueError, match="shape"):
            shape_config(wrong)


def test_the_limit_is_the_longer_of_reading_and_computing() -> None:
    machine = limits(bandwidth=100.0, rate=10.0)
    assert machine.seconds(10**12, {torch.float32: 1}) == 10**10  # from memory
    assert machine.seconds(10**13, {torch.float32: 1}) == 10**11
    assert machine.seconds(800, {torch.float32: 1}) == 2.0  # from the cache, four times as fast
    assert machine.seconds(800, {torch.float32: 100}) == 10.0
    assert machine.bandwidth == 100.0


@given(sizes=st.lists(st.floats(1, 1e12), min_size=2, max_size=2))
def test_the_limit_of_reading_knows_no_steps(sizes: list[float]) -> None:
    machine = limits()
    small, large = sorted(sizes)
    times = [machine.seconds(size) for size in (small, large)]
    assert times[0] <= times[1]
    assert large / times[1] * (1 + 1e-9) >= 100 and large / times[1] <= 400 * (1 + 1e-9)
    assert machine.seconds(small * (1 + 1e-9)) == pytest.approx(times[0])


def test_of_two_measurements_of_the_limits_the_better_counts() -> None:
    one = Limits("cpu", 2, {8: 5.0}, {torch.float32: 2.0}, {8: 4.0, torch.float32: 1.0})
    other = Limits("cpu", 2, {8: 6.0}, {torch.float32: 1.0}, {8: 3.0, torch.float32: 1.0})
    assert one.best(other) == Limits("cpu", 2, {8: 6.0}, {torch.float32: 2.0}, {8: 4.0, torch.float32: 1.0})


def test_runs_take_turns_after_a_warm_up() -> None:
    calls: list[str] = []

    def first() -> float:
        calls.append("a")
        return 7.0

    def second() -> None:
        calls.append("b")

    a, b = take_turns([first, second], 3, CPU)
    assert calls == ["a", "b"] * 4
    assert a.times == (7.0, 7.0, 7.0)
    assert len(b.times) == 3 and 0 <= b.low <= b.median <= b.high < 7.0


def test_forwards_give_back_all_pages_and_refuse_what_does_not_fit() -> None:
    forwards = Forwards("toy", TorchExecutor(random_llama(max_positions=64)), tokens=96)
    found = forwards.measure([Shape(1, 8, 1), Shape(2, 8, 4), Shape(1, 8, 3, drafting=True)], repeats=2)
    assert [(f.rows, f.context, f.tokens, f.drafting) for f in found] == [
        (1, 8, 1, False),
        (2, 8, 4, False),
        (1, 8, 3, True),
    ]
    assert all(f.timing.low > 0 and len(f.timing.times) == 2 for f in found)
    assert forwards.cache.allocator.num_free == forwards.cache.allocator.num_blocks
    with pytest.raises(ValueError, match="exceed toy's context of 64"):
        forwards.measure([Shape(1, 60, 5)])
    with pytest.raises(ValueError, match="do not fit a cache"):
        forwards.measure([Shape(8, 40, 1)])


def test_a_share_of_the_limit_goes_by_what_memory_gave_in_the_same_turns() -> None:
    """A machine whose memory becomes half as fast leaves the share as it is."""
    made = forward(1.0)
    fast, slow = {1000: 40.0, 10**12: 10.0}, {1000: 20.0, 10**12: 5.0}
    machine = replace(limits(rate=1e9), reading=fast)
    least = machine.seconds(made.bytes)
    phases = replace(made, timing=Timing((2 * least, 4 * least, 2 * least)), reading=(fast, slow, fast))
    assert phases.of_limit(machine) == pytest.approx(0.5)
    assert replace(phases, reading=()).of_limit(machine) == pytest.approx(0.5)
    assert replace(phases, timing=Timing((4 * least,) * 3), reading=()).of_limit(machine) == pytest.approx(0.25)
    reads = {8: lambda: 2.0, 64: lambda: 4.0}
    forwards = Forwards("toy", TorchExecutor(random_llama(max_positions=64)), tokens=96)
    [found] = forwards.measure([Shape(1, 8, 1)], repeats=2, reads=reads)
    assert found.reading == ({8: 4.0, 64: 16.0},) * 2


def test_step_by_step_decoding_reads_the_weights_every_time() -> None:
    alone, steps = forward(1.0, context=5), forward(1.0, tokens=4, context=5, drafting=True)
    each = [Forward("toy", alone.config, torch.float32, 1, 5 + n, 1, alone.timing) for n in range(4)]
    assert steps.bytes == sum(f.bytes for f in each)
    assert steps.operations == sum((f.operations for f in each), Counter())


def test_the_slope_over_context_is_a_bandwidth() -> None:
    """In the middle turn, of three whose memory differs by more than the context takes."""
    made = [forward(1.0, context=context) for context in (10, 50, 400)]

    def measured(seconds: list[float]) -> list[Forward]:
        return [
            replace(
                one, timing=Timing(tuple(base + one.context_bytes * each for base, each in zip((9, 5, 1), seconds)))
            )
            for one in made
        ]

    assert context_slope(measured([2e-6, 1e-6, 5e-7])) == pytest.approx(1e6)
    assert context_slope(measured([2e-6, 1e-6, -5e-7])) is None


def test_a_clock_changes_nothing_but_the_time_it_notes() -> None:
    executor = TorchExecutor(random_llama())
    clock = Clock(executor)
    cache = PagedKVCache.for_model(executor, 8)
    cache.resize(0, 2)
    batch = Batch([1, 2], [0, 1], cache.batch([0], [0], [2]))
    assert torch.equal(clock.score(batch).logits_NV, executor.score(batch).logits_NV)
    assert clock.seconds > 0
    assert clock.config is executor.config and clock.kernels == executor.kernels
    before, rows = clock.seconds, [make_row([1, 2])]
    assert clock.extend(batch, DraftSpec(), rows, [1]) == executor.extend(batch, DraftSpec(), rows, [1])
    assert clock.seconds > before

    class Drafting(TorchExecutor):
        def extend(self, batch, spec, rows, most, sampling=None, seeds=()):  # type: ignore[no-untyped-def]
            return Drafted([[3] * n for n in most])

    drafting = Clock(Drafting(random_llama()))
    assert drafting.extend(batch, DraftSpec(), rows, [2]) == Drafted([[3, 3]]) and drafting.seconds > 0


def test_the_models_of_a_draft() -> None:
    assert [len(draft_runners(strategy_of(name))) for name in ("ngram", "fly-draft", "ngram+fly-draft")] == [
        0,
        1,
        1,
    ]
    assert len(draft_runners(strategy_of("ngram+fly-tiny+fly-draft"))) == 2
    several = {"adaptive(fly-draft)": 1, "suffix+fly-draft": 1, "choose(a=fly-tiny, b=adaptive(fly-draft))": 2}
    assert {text: len(draft_runners(strategy_of(text))) for text in several} == several


@pytest.mark.parametrize(
    "draft", ["fly-draft", "choose(a=fly-draft, b=ngram)", "fly-eagle3", "eagle3(fly-eagle3, nodes=8)"]
)
def test_rounds_are_the_same_with_clocks_and_their_parts_are_the_whole(draft: str) -> None:
    asked = problems(None, "heldout", n=1)
    llm = strategy_of(draft)
    settings = [Setting("autoregressive", llm, 0), Setting("fly", llm, 5, FLy())]

    def loaded() -> list[Executor]:
        found = [runner.executor for runner in (llm.engine.runner, *draft_runners(llm))]
        return [*found, llm.draft.runner.head] if isinstance(llm.draft, Eagle3Draft) else found

    models = loaded()
    prompts = [llm.chat_prompt(problem.prompt) for problem in asked]
    measured = measure_rounds(settings, prompts, GREEDY, turns=2)
    assert loaded() == models and len(models) == 2
    for rounds, result in zip(measured, compare(settings, asked, GREEDY)):
        assert len(rounds.times) == 2
        assert rounds.stats.rounds == 2 * result.stats.rounds
        assert rounds.stats.tau == result.stats.tau
        target, draft, rest = rounds.each()
        assert target > 0 and rest > 0
        assert (draft > 0) == (rounds.setting.k > 0)
        whole = rounds.best.decoding * 2 / rounds.stats.rounds
        assert target + draft + rest == pytest.approx(whole)
        assert 0 < rounds.best.overhead < 1 and all(times.prompt > 0 for times in rounds.times)
        assert rounds.tokens_per_second().high == pytest.approx(rounds.stats.tau / whole)


def test_a_failing_step_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(random_llama(), NGramDraft(), k=3)
    model = llm.engine.runner.executor
    steps = []

    def failing(seconds: float) -> None:
        steps.append(llm.engine.runner.executor)
        raise RuntimeError("no power")

    monkeypatch.setattr(llm.scheduler, "step", failing)
    with pytest.raises(RuntimeError, match="no power"):
        timed(Setting("ngram", llm, 3), [1, 2, 3], GREEDY, clocked=True)
    assert llm.engine.runner.executor is model and isinstance(steps[0], Clock)
    assert not llm.scheduler


@pytest.mark.parametrize("together", [1, 2, 5])
def test_everybody_has_every_prompt_in_turns(together: int) -> None:
    turns = list(in_turns("ab", range(5), together))
    assert sorted(turns) == [(who, n) for who in "ab" for n in range(5)]
    changes = sum(one[0] != other[0] for one, other in pairwise(turns))
    assert changes == 2 * -(-5 // together) - 1


def test_times_of_a_completion_are_its_parts() -> None:
    llm = LLM(random_llama(), NGramDraft(), k=3)
    setting, params = Setting("ngram", llm, 3), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    output, times = timed(setting, [1, 2, 3], params, clocked=True)
    assert output.token_ids == llm.generate([[1, 2, 3]], params)[0].token_ids
    assert 0 < times.target < times.decoding and times.draft == 0 < times.prompt
    assert times.overhead == pytest.approx(1 - times.target / times.decoding)
    assert timed(setting, [1, 2, 3], params)[1].overhead is None
    (result,) = decode([setting], [[1, 2, 3], [4, 5]], params, clocked=True)
    assert result.seconds == result.times.prompt + result.times.decoding
    assert result.decoding_speed == pytest.approx((result.stats.generated - 2) / result.times.decoding)
    assert result.tokens_per_second == pytest.approx(18 / result.seconds)


def test_the_prediction_is_the_formula() -> None:
    llm = strategy_of("model(fly-draft)")
    stats = Stats(generated=61, rounds=10, emitted=60, drafted=70)
    rounds = Rounds(Setting("exact", llm, 7), stats, [Times(0.1, 1.0, 0.5, 0.2)])
    forwards = [forward(2.0), forward(3.0, tokens=6), forward(5.0, tokens=10)]
    draft = forward(0.8, tokens=8, drafting=True)
    c, v = 0.1 / 2.0, 4.0 / 2.0  # t(8) is half way between
    assert predict(rounds, forwards, draft) == pytest.approx(6.0 / (7 * c + v) / 2.0)
    plain = Rounds(Setting("autoregressive", llm, 0), Stats(rounds=10, emitted=10), [Times(0.1, 1.0, 0.5)])
    assert predict(plain, forwards, draft) == pytest.approx(1 / 2.0)
    for name in ("fly-draft", "ngram"):
        assert predict(Rounds(Setting(name, strategy_of(name), 7), stats, [Times(0.1, 1.0)]), forwards, draft) is None
    with pytest.raises(ValueError, match="outside 1 to 6"):
        predict(rounds, forwards[:2], draft)


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_SIZES", (2**20, 2**24))
    monkeypatch.setattr(limits_module, "_SIDES", (64, 64))


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_fly_bench_speed_writes_what_it_shows(quick_limits: None, tmp_path: Path) -> None:
    record = tmp_path / "speed.json"
    plot = tmp_path / "speed.svg"
    options = ("--policy", "fly", "--turns", 1, "--problems", 1, "--k", 3, "--json", record, "--plot", plot)
    text = run("bench", "speed", "--model", "fly-draft", "--draft", "model(fly-tiny)", "--shape", "64x1x100", *options)
    for heading in ("Limits", "Forwards of fly-draft", "Forwards of model(fly-tiny)", "Forwards of 64x1x100", "Rounds"):
        assert heading in text
    assert "…" not in text  # tables fit a terminal
    figures = json.loads(record.read_text())
    assert figures["limits"]["read 16 MB"]["best"] > 0
    assert [rounds["decoding"] for rounds in figures["rounds"]] == ["autoregressive", "exact", "fly"]
    assert all(rounds["predicted"] > 0 for rounds in figures["rounds"])
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {f"speed-{sweep}.svg" for sweep in ("k", "context", "rows", "size")}
    assert all("64x1x100" in (tmp_path / f"speed-{sweep}.svg").read_text() for sweep in ("k", "context", "rows"))


@pytest.mark.skipif(available() == ["torch"], reason=why_not() or "compiled kernels are here")
def test_fly_bench_speed_counts_a_byte_for_each_weight_of_8_bits(quick_limits: None, tmp_path: Path) -> None:
    record = tmp_path / "speed.json"
    options = ("--turns", 1, "--problems", 1, "--k", 3, "--json", record, "--dtype", "bfloat16")
    run(
        "bench",
        "speed",
        "--model",
        "fly-tiny",
        "--draft",
        "ngram",
        "--shape",
        "64x1x100",
        "--shape",
        "64x1x100:w8a8",
        *options,
    )
    forwards = json.loads(record.read_text())["forwards"]
    plain, narrow = (next(f for f in forwards if f["model"] == f"64x1x100{bits}") for bits in ("", ":w8a8"))
    assert (plain["weight_bytes"], narrow["weight_bytes"]) == (2, 1)
    assert plain["bytes"] - narrow["bytes"] == forward_bytes(shape_config("64x1x100"), torch.bfloat16) // 2
    assert (plain["products"], narrow["products"]) == ("bfloat16", "int8")


def test_a_saved_random_model_loads(tmp_path: Path) -> None:
    save_model(random_model(shape_config("64x1x100"), torch.bfloat16), tmp_path, torch.bfloat16)
    assert load_model(tmp_path).config == shape_config("64x1x100")


def test_a_large_model_has_fewer_prompts_and_tokens_by_default() -> None:
    assert usual_amount(99_999_999) == (24, 400)
    assert usual_amount(matrix_parameters(shape_config("768x12x32000"))) == (8, 160)
    amounts = [usual_amount(size * 10**8)[1] for size in range(1, 99)]
    assert amounts == sorted(amounts, reverse=True) and amounts[-1] == 64


def test_bundled_models_are_asked_problems_and_others_prompts() -> None:
    llm = strategy_of("ngram")
    asked, prompts = asked_of(llm, "fly-target", 2)
    assert asked == problems(None, "heldout", 0, 2) and prompts == [llm.chat_prompt(each.prompt) for each in asked]
    assert asked_of(llm, "a/checkpoint", 9)[1] == [llm.chat_prompt(text) for text in (*PROMPTS, PROMPTS[0])]
    assert all(len(prompt) == 32 for prompt in asked_of(LLM(random_llama()), "a/checkpoint", 2)[1])
