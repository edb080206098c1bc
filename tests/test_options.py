"""Options of the commands: defaults, ranges, and what is said about a wrong one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import fly.serve
from fly import cli
from fly.config import Config, OfRanks, check_options, declared
from fly.serve import Settings
from tests.commands import plain, run, words

QUESTION = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."


def test_help_shows_defaults_that_are_words() -> None:
    """In brackets they would be taken for markup, and left out."""
    shown = plain(run("eval", "--help").output)
    assert "The most tokens drafted in a round; repeatable. Default: 15." in shown
    assert "How many problems of each task, or of one, TASK=N; repeatable. Default: 48; with a plan all." in shown


def test_options_that_other_servers_have() -> None:
    said = run("generate", "a", "--cache", "3B").output
    assert "cache 3 bytes hold no page" in words(said)
    said = run("serve", "--cache", "3 cats", "--port", "0").output
    assert "cache '3 cats' must be a size ('8GiB'), a number of tokens of at least 1 (20000), or a share" in words(said)
    app: Any = typer.main.get_command(cli.app)
    (name,) = [parameter for parameter in app.commands["serve"].params if parameter.name == "name"]
    assert name.opts == ["--name", "--served-model-name"]


def test_a_server_has_the_settings_of_its_options_and_else_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Settings] = []
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr("fly.cli.serving._serve_here", lambda setup, settings, *_, **__: found.append(settings))
    monkeypatch.setattr("fly.cli.serving.require_free", lambda host, port: asked.append((host, port)))
    monkeypatch.delenv("FLY_API_KEY", raising=False)
    assert run("serve").exit_code == 0 and asked == [("127.0.0.1", 8000)]
    options = ["--policies", "fly", "--trusted-proxies", "::1,10.0.0.0/8", "--trusted-proxies", "127.0.0.1"]
    assert run("serve", *options, "--cors-origin", "*", "--api-key", "a", "--api-key", "b").exit_code == 0
    assert found[0] == Settings()
    assert found[1] == Settings(
        policies=("fly",), trusted_proxies=("::1", "10.0.0.0/8", "127.0.0.1"), cors_origins=("*",), api_keys=("a", "b")
    )
    assert "max_waiting: Input should be greater than or equal to 0, got -1" in words(
        run("serve", "--max-waiting", "-1").output
    )


def test_what_is_for_several_processes_may_be_said_to_one(tmp_path: Path) -> None:
    (tmp_path / "fly.yaml").write_text("model: fly-tiny\nheartbeat_timeout: 9")
    options = ("--config", str(tmp_path / "fly.yaml"), "--heartbeat-timeout", "20", "--max-tokens", "3")
    result = run("generate", "a", *options)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "command",
    ["eval", "bench speed", "bench speed --plot"],
)
def test_where_figures_go_is_looked_at_before_they_are_measured(command: str, tmp_path: Path) -> None:
    arguments = command.split() if "--plot" in command else [*command.split(), "--json"]
    result = run(*arguments, str(tmp_path / "not_there" / "x.svg"))
    assert result.exit_code == 2 and "there is no directory" in words(result.output), result.output


@pytest.mark.parametrize("command", ["bench speed", "replay runs/none --policy fly"])
def test_a_plot_is_svg(command: str, tmp_path: Path) -> None:
    result = run(*command.split(), "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 2 and "must end in '.svg'" in plain(result.output), result.output


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "flyy", "policy 'flyy': 'flyy' is unknown (did you mean 'fly'?)"),
        ("--policy", "fly & aftr(2)", "'aftr' is unknown (did you mean 'after'?)"),
        ("--draft", "ngrm", "'ngrm' is unknown (did you mean 'ngram'?)"),
        ("--model", "fly-taget", "is neither a bundled checkpoint (did you mean 'fly-target'?), nor a directory"),
        ("--policy", "qqqqq", "'qqqqq' is unknown; policies"),
        ("--policy", "naive", "'window'], or one of yours, as 'module:Class'"),  # and not "did you mean 'above'?"
        ("--draft", "qqqqq", "or one of yours, as 'module:Class'"),
    ],
)
def test_a_typing_error_gets_a_suggestion(options: tuple[str, str, str]) -> None:
    *given, told = options
    result = run("generate", "a", *given)
    assert result.exit_code == 2 and told in words(result.output)
    assert words(result.output).count("error:") == 1 and "policy: policy" not in result.output


def test_sampling_options_reach_the_sampler() -> None:
    options = ["generate", QUESTION, "--temperature", "1.2", "--top-p", "0.9", "--max-tokens", "30", "--seed"]
    assert run(*options, "7").output == run(*options, "7").output
    assert len({run(*options, str(seed)).output for seed in range(4)}) > 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            ["generate", "x", "--config", "absent.yaml"],
            ["temperature", "top-p", "min-p", "presence-penalty", "frequency-penalty", "repetition-penalty"],
        ),
        (["generate", "x"], ["heartbeat-timeout", "collective-timeout", "logit-bias"]),
        (["serve", "--model", "absent", "--port", "0"], ["timeout", "drain-timeout", "heartbeat-timeout"]),
        (["bench", "plan", "--target", "llama-3.1-8b"], ["tau", "draft-tau"]),
    ],
)
def test_a_number_that_is_not_finite_is_refused(command: list[str], options: list[str], value: str) -> None:
    for option in options:
        result = run(*command, f"--{option}", f"5={value}" if option == "logit-bias" else value)
        said = words(re.sub("[│╭╮╰╯─]", "", result.output))
        assert result.exit_code == 2 and "Traceback" not in said
        assert "a finite number" in said and re.search(rf"(got |: ){value}\b", said), said
        assert option in said.replace("_", "-")


def test_numbers_out_of_range_are_named_with_the_range() -> None:
    for value, told in (("0.4", "greater than or equal to 0.5, got 0.4"), ("1e5", "or equal to 86400, got 100000.0")):
        assert told in words(re.sub("[│─]", "", run("generate", "x", "--heartbeat-timeout", value).output))
    assert "of at least 1" in words(run("bench", "plan", "--tau", "0.5").output)
    assert "got -1.0" in run("generate", "x", "--temperature", "-1").output


def test_only_a_server_imports_what_serves() -> None:
    code = "import sys, fly.cli; print(sorted({'fastapi', 'uvicorn'} & {*sys.modules})); from fly.serve import Server"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="Sever"):
        _ = fly.serve.Sever  # type: ignore[attr-defined]


def test_each_option_of_an_engine_is_declared_once() -> None:
    """The signature and the documentation of ``LLM``, the fields of a file and the options of ``fly serve`` are those
    that ``fly.config`` declares."""
    options, of_ranks = declared(), declared(OfRanks)
    parameters = inspect.signature(fly.LLM).parameters
    assert set(parameters) == {"model", "draft", "policy", "k", "ranks"} | set(options) and len(parameters) <= 15
    assert all(parameters[name].default == option.default for name, option in options.items())
    assert all(f"{name} ({option.default!r}): " in str(fly.LLM.__doc__) for name, option in options.items())
    assert set(Config.model_fields) == {"model", "draft", "policy", "k"} | set(options) | set(of_ranks)
    assert dict(Config().options) == {name: option.default for name, option in options.items()}
    assert inspect.signature(fly.LLM).parameters["k"].default == Config().k
    app: Any = typer.main.get_command(cli.app)
    served = {parameter.name: parameter for parameter in app.commands["serve"].params}
    for name, option in {**options, **of_ranks}.items():
        if name in served:
            assert served[name].help == option.description and served[name].default == option.default


@given(st.data())
def test_a_file_and_keywords_are_checked_alike(data: st.DataObject) -> None:
    """A value of any option is taken from a file if and only if it is taken as a keyword, and is then the same."""
    name = data.draw(st.sampled_from([*declared()]))
    value = data.draw(st.one_of(st.integers(-2, 9), st.booleans(), st.none(), st.sampled_from(["auto", "8GiB", 0.5])))
    try:
        checked = {**check_options({name: value})}[name]
    except ValueError as error:
        with pytest.raises(ValidationError):
            Config.model_validate({name: value})
        assert name in str(error)
        return
    assert getattr(Config.model_validate({name: value}), name) == checked


def test_the_reference_lists_the_declared_options() -> None:
    """To make the table again, print what the assertion wants."""
    page = (Path(__file__).parents[1] / "docs/reference/python.md").read_text("utf-8")
    rows = [
        f"| `{name}` | `{option.default!r}` | {option.description} |".replace("``", "`")
        for fields in (declared(), declared(OfRanks))
        for name, option in fields.items()
    ]
    missing = [row for row in rows if row not in page.splitlines()]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_tokens": 5}, "did you mean 'cache'"),
        ({"memory_share": 0.5}, "did you mean 'cache'"),
        ({"whole_sums": True}, "fly.parallel.launch"),
        ({"exits": "a"}, "early_exit.load"),
    ],
)
def test_an_option_that_moved_is_an_error_that_names_its_place(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        fly.LLM("fly-tiny", **given)


def test_what_only_ranks_can_do_is_refused_in_one_process() -> None:
    for command in (["generate", "x"], ["eval", "--problems", "1"]):
        result = run(*command, "--whole-sums")
        assert result.exit_code == 2 and "without --ranks or torchrun" in words(result.output)
    assert "got -3" in words(run("eval", "--heartbeat-timeout", "-3").output)


def test_numbers_of_numpy_are_sizes_and_truths_are_not() -> None:
    assert check_options({"cache": np.int64(20000)})["cache"] == 20000
    for wrong in (True, np.True_, 20000.0):
        with pytest.raises(ValueError, match="must be a size"):
            check_options({"cache": wrong})
