"""``fly bench plan``: costs past one machine."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fly import cli
from fly.extras.bench import blocks, plan_command
from fly.extras.bench.blocks import QWEN3_8B, TAUS, BlockCosts, extrapolate, measure_costs
from fly.extras.bench.demo import describe_scale
from fly.extras.bench.plan import DEVICES, MODELS, PAPER, Link, Machines, Setting, forecast
from fly.extras.bench.shapes import matrix_parameters
from fly.extras.eval.report import Report, Row
from fly.models import Llama, LlamaConfig
from fly.models.dflash import DFlashConfig
from fly.models.eagle import HeadConfig
from tests.test_parallel import divisible_configs


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


def test_a_run_at_the_costs_of_a_large_pair_has_the_gain_that_the_plan_shows() -> None:
    """A draft of K tokens that never stops costs what the plan's K does; one that stops costs a forward more."""
    paper = PAPER[0]
    shown = CliRunner().invoke(cli.app, ["bench", "plan"], env={"COLUMNS": "200"}).output
    (gains,) = (line for line in shown.splitlines() if re.match(r"\W*gain ", line))
    row = {each.name: None for each in fields(Row)} | {"tau": paper.tau, "drafted": paper.k, "k": paper.k}
    ways = [Row(**row | {"way": "autoregressive", "k": 0})]
    ways += [Row(**row | {"way": way, "reach": reach}) for way, reach in (("fixed", 0.0), ("stops", 0.5))]
    table = SimpleNamespace(rows=ways)
    told = describe_scale(Report([table], [], []))  # type: ignore[list-item]
    fixed, stops = (float(re.search(rf"{way} (\S+)×", told)[1]) for way in ("fixed", "stops"))  # type: ignore[index]
    assert f"{fixed:.2f}×" in gains and stops < fixed and "autoregressive" not in told
    assert paper.target in told and paper.draft in told


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
    assert shown.output.count("sharded ┃") == 2 and "does not fit" not in shown.output
    shown = plan("--target", "llama-3.1-70b", "--tau", "12", "--ranks", "1")
    assert shown.output.count("does not fit") == 2
    assert "--tau is needed" in plan("--target", "llama-3.1-70b").output
    for name in ("--tau", "--k", "--ranks"):  # the paper's settings have their own
        assert f"{name} does nothing without --target" in plan(name, "4").output
    assert "choices: ['a100'" in plan("--device", "abacus").output
    assert "is not divisible by 7 ranks" in plan("--target", "llama-3.1-70b", "--tau", "12", "--ranks", "7").output


@given(st.floats(0, 1), st.floats(1e-6, 1), st.integers(1, 99))
def test_few_layers_stand_for_all(besides: float, layer: float, layers: int) -> None:
    few, many = (besides + depth * layer for depth in (1, 3))
    assert extrapolate(few, many, layers) == pytest.approx(besides + layers * layer)


def test_the_gain_of_a_block_drafter_is_what_its_costs_allow() -> None:
    """At τ 6, a verification of 1.13 and a draft of 0.25 forwards, it is 6 / 1.38. The published target has 6.95
    billion weights besides embeddings (its model card)."""
    assert BlockCosts(0.4, 0.4 * 1.13, 0.4 * 0.25, ("", "")).gain(6) == pytest.approx(6 / 1.38)
    vocabulary = QWEN3_8B.hidden_size * QWEN3_8B.vocab_size
    assert round((matrix_parameters(QWEN3_8B) - vocabulary) / 1e9, 2) == 6.95


def test_costs_of_a_block_drafter_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4,
             "num_key_value_heads": 2}  # fmt: skip
    target = QWEN3_8B.resized(4, max_position_embeddings=512, **sizes)
    same: dict[str, Any] = {"layer": target.resized(1), "target_hidden_size": 32, "states": (1, 2), "mask_token_id": 63}
    head = DFlashConfig(draft_vocab_size=64, block_size=4, causal=(False,), **same)
    turns: list[None] = []
    parallel = HeadConfig(draft_vocab_size=32, drafts=3, **same)
    for drafter in (head, parallel):
        turns.clear()
        costs = measure_costs(target, drafter, "torch", torch.float32, turns=2, advance=lambda: turns.append(None))
        assert costs.kernels == ("torch", "torch") and len(turns) == 3 and costs.block > 0
    kept: list[int] = []
    drafting = blocks._drafting

    def note(drafter: Any, config: Any) -> Any:
        kept.append(len(drafter.to_target_U))
        return drafting(drafter, config)

    monkeypatch.setattr(blocks, "_drafting", note)
    measure_costs(target, head, "torch", torch.float32, turns=1, vocabulary=5)
    assert kept == [5]
    with pytest.raises(ValueError, match="vocabulary trims models, DFlash and DSpark heads"):
        measure_costs(target, parallel, "torch", torch.float32, vocabulary=5)
    with pytest.raises(ValueError, match="kernels 'w9'"):
        measure_costs(target, head, "w9")


def test_the_plan_of_a_block_drafter_is_marked_as_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_options = dict[str, Any]()

    def measured(**options: Any) -> BlockCosts:
        measure_options.update(options)
        return BlockCosts(0.4, 0.45, 0.08, ("avx2-w8a8", "torch"))

    def plan(*arguments: str) -> str:
        return CliRunner().invoke(cli.app, ["bench", "plan", *arguments], env={"COLUMNS": "200"}).output

    monkeypatch.setattr(plan_command, "measure_costs", measured)
    shown = plan("--draft", "dflash")
    assert measure_options["kernels"] == "w8a8" and "a plan, not a measurement" in shown and "a plan: Qwen3-8B" in shown
    for task, tau in TAUS.items():
        assert task in shown and f"{tau * 0.4 / 0.53:.2f}×" in shown
    mine = plan("--draft", "dflash", "--tau", "5", "--kernels", "w4a8")
    assert f"{5 * 0.4 / 0.53:.2f}×" in mine and "GSM8K" not in mine and measure_options["kernels"] == "w4a8"
    for option in (["--device", "h100"], ["--k", "7"], ["--target", "llama-3.1-8b"], ["--recorded", "."]):
        assert f"{option[0]} does nothing with --draft dflash" in plan("--draft", "dflash", *option)
    assert "--kernels does nothing without --draft dflash" in plan("--kernels", "w8a8")
