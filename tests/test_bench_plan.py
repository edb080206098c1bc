"""``fly bench plan``: costs past one machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from typer.testing import CliRunner

from fly import cli
from fly.extras.bench.plan import DEVICES, MODELS, Link, Machines, Setting, forecast
from fly.extras.bench.shapes import matrix_parameters
from fly.models import Llama, LlamaConfig
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
