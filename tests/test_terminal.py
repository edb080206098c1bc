"""What a terminal can show: commands in its letters and its width."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Column
from typer.testing import CliRunner

from fly import cli
from fly.cli.terminal import WIDEST, Table, Terminal, read_bytes
from fly.drafts import Eagle3Draft, SingleDraft, draft_types
from fly.extras.audit import Finding, Report, Verdict
from fly.extras.audit import command as audit
from fly.policies import condition_types, policy_types
from fly.policies.registry import PRESETS
from tests.commands import commands_of_fly, run

# Commands that measure nothing and ask no model.
COMMANDS = [
    *(["policies"], ["drafts"], ["models"], ["models", "fly-target"], ["doctor"], ["tasks"]),
    *(["bench", "plan"], ["audit", "--list"], ["policies", "fly"], ["drafts", "suffix"]),
]
HELPS = [[name, "--help"] for name in commands_of_fly() if name != "harness"]

letters = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyzé東[]/:"), min_size=1, max_size=30)
cells = st.lists(letters, max_size=6).map(" ".join)


def printed(table: Table, width: int) -> list[str]:
    console = Terminal(file=io.StringIO(), width=width, record=True)
    console.print(table)
    return console.export_text().splitlines()


def count(text: str) -> Counter[str]:
    """The letters of cells; headings and frames have none of them."""
    return Counter(re.findall(r"[a-zé東\[\]/]", text))


@given(
    st.integers(1, 5).flatmap(lambda columns: st.lists(st.lists(cells, min_size=columns, max_size=columns))),
    st.sets(st.integers(0, 4)),
    st.sampled_from([20, 40, 80, 120, 1280]),
)
@example([["longestlongestlongestlongest" * 4] * 3], {1}, 40)
def test_a_table_has_every_letter_and_no_line_is_too_wide(rows: list[list[str]], figures: set[int], width: int) -> None:
    count_of_columns = len(rows[0]) if rows else 1
    columns = [Column(str(number), no_wrap=number in figures) for number in range(count_of_columns)]
    lines = printed(Table(columns, [[escape(cell) for cell in row] for row in rows], show_lines=True), width)
    assert all(cell_len(line) <= width for line in lines)
    assert count("".join(lines)) == sum((count(cell) for row in rows for cell in row), Counter())
    short = {word for row in rows for cell in row for word in cell.split() if cell_len(word) <= 12}
    assert all(any(word in line for line in lines) for word in short)  # whole


def test_a_table_is_no_wider_than_texts_are_read_unless_its_figures_need_it() -> None:
    assert max(map(len, printed(Table(["a", "b"], [["word " * 100] * 2]), 1280))) == WIDEST
    figures = [Column(str(number), no_wrap=True) for number in range(20)]
    assert max(map(len, printed(Table(figures, [["1234567"] * 20]), 1280))) == 2 + 10 * 20 - 1


@pytest.mark.parametrize("width", [40, 80, 120, 1280])
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_every_command_fits_the_terminal(arguments: list[str], width: int) -> None:
    result = run(*arguments, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    assert all(cell_len(line) <= min(width, WIDEST) for line in result.output.splitlines())
    assert "…" not in result.output  # nothing is cut off


@pytest.mark.parametrize("width", [60, 80, 120, 1280])
@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_every_help_fits_the_terminal(arguments: list[str], width: int) -> None:
    shown = run(*arguments, env={"COLUMNS": str(width)}).output
    assert all(len(line) <= min(width, WIDEST) for line in shown.splitlines())
    named = {name for option in commands_of_fly()[arguments[0]].params for name in option.opts if name[:2] == "--"}
    assert all(name in shown for name in named)  # whole


@pytest.mark.parametrize("width", [40, 80, 120, 1280])
def test_the_table_of_an_audit_fits_the_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    detail = "first tokens: 'a' drawn 130 times of 4,000, and the reported probability is 0.051"
    findings = tuple(
        Finding(
            name, "tests", verdict, "4,000 answers of 12 prompts", 0.00012, "a token's probability off by 0.031", detail
        )
        for name, verdict in zip(("joint-distribution", "log-probabilities", "response_format"), Verdict)
    )
    url = "http://a-host-with-a-long-name.example:8000/v1"
    console = Terminal(width=width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit, "console", console)
        patch.setattr("fly.cli.show.console", console)
        audit._show(Report(url, "a-model", "completions", None, 0.001, findings, 12345, 60.0), None)
    shown = capsys.readouterr().out
    assert all(len(line) <= min(width, WIDEST) for line in shown.splitlines())
    for finding in findings:
        assert finding.check in shown and finding.verdict.value in shown
    assert shown.count("0.00012") == 3 and "…" not in shown


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("arguments", [*COMMANDS, *HELPS, ["policies", "flé"]], ids=" ".join)
def test_every_command_prints_in_any_encoding(arguments: list[str], charset: str) -> None:
    result = CliRunner(charset=charset).invoke(cli.app, arguments)
    assert result.exit_code == (2 if "flé" in arguments else 0), result.output
    assert "\\u" not in result.output  # each letter of ours has a plain one
    result.output_bytes.decode(charset)


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "utf-8"])
def test_a_completion_is_valid_json_in_any_encoding(charset: str) -> None:
    arguments = ["generate", "café “东京” 😀", "--raw", "--max-tokens", "1", "--model", "fly-tiny", "--json"]
    shown = CliRunner(charset=charset).invoke(cli.app, arguments)
    same = json.loads(run(*arguments).stdout)
    assert json.loads(shown.stdout_bytes.decode(charset))["prompt_token_ids"] == same["prompt_token_ids"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_that_python_could_not_read_are_utf_8(text: str) -> None:
    """In the C locale, Python gives the bytes of an argument as PEP 383 says."""
    given_ = text.encode().decode("ascii", "surrogateescape")
    assert read_bytes(given_, "prompt") in (text, given_ if os.path.exists(given_) else text)
    assert read_bytes(text, "prompt") == text


def test_bytes_that_are_no_text_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt is no text in UTF-8: b'caf\\xe9'"):
        read_bytes("caf\udce9", "prompt")
    file = os.fsencode(tmp_path) + b"/\xe9"
    Path(os.fsdecode(file)).touch()
    assert read_bytes(os.fsdecode(file), "config") == os.fsdecode(file)


def test_the_c_locale_reads_what_is_typed_and_prints_plain_letters() -> None:
    """Of a process, since the encoding of arguments and of files is chosen as Python starts."""
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables.pop("PYTHONIOENCODING", None)
    command = [sys.executable, "-m", "fly", "chat", "fly-tiny", "--max-tokens", "1", "--system", "né"]
    lines = "/system\n/system hé\nhé\n/system caf".encode() + b"\xe9\n"
    done = subprocess.run(command, input=lines, capture_output=True, env=variables, timeout=120)
    said = done.stderr.decode("ascii")
    assert done.returncode == 0 and "system: ne\n" in said and "system: he\n" in said
    assert "error: the line is no text in UTF-8: b'/system caf\\xe9'" in said
    done.stdout.decode("ascii")


@pytest.mark.parametrize("name", [*policy_types(), *condition_types(), *PRESETS])
def test_a_policy_is_shown_with_its_promise_and_every_parameter(name: str) -> None:
    result = run("policies", name, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    make = {**policy_types(), **condition_types()}.get(name)
    promise = "heuristic" if make is None or make in condition_types().values() else make().guarantee.value
    assert re.search(rf"guarantee +│ {promise}", result.output) and re.search(r"compiled +│ \w+", result.output)
    assert all(preset in result.output for preset in PRESETS if preset.startswith(f"{name}."))
    assert_every_parameter_has_a_meaning(result.output, make)


@pytest.mark.parametrize("name", [*draft_types(), "fly-draft", "fly-eagle3"])
def test_a_draft_is_shown_with_every_parameter(name: str) -> None:
    result = run("drafts", name, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    others = {"fly-draft": SingleDraft, "fly-eagle3": Eagle3Draft}
    assert_every_parameter_has_a_meaning(result.output, {**draft_types(), **others}[name])


def assert_every_parameter_has_a_meaning(output: str, make: Any) -> None:
    for parameter in inspect.signature(make).parameters.values() if make else ():
        if not callable(parameter.default) or parameter.default is parameter.empty:
            assert re.search(rf"^│ {parameter.name} +│ [^│]+ +│ [^│ ]", output, re.MULTILINE), parameter


def test_what_compiled_code_decides_is_said() -> None:
    """As ``is_compiled`` and ``clauses_of`` say: compiled code takes six clauses (docs/how-to/write-rules.md)."""
    seven = " | ".join(["exact", "control", *(f"room({hold})" for hold in range(1, 7))])
    said = {name: run("policies", name).output for name in ("exact", "fly", "typical", "asd", "block", "lossy", seven)}
    shown = {name: re.search(r"compiled +│ (yes|no|in part)", text) for name, text in said.items()}
    wanted = {"exact": "yes", "fly": "yes", "typical": "yes", "asd": "yes", "block": "no", "lossy": "no"}
    wanted[seven] = "in part"
    assert {name: found and found[1] for name, found in shown.items()} == wanted


@pytest.mark.parametrize("name", ["near", "margin"])
def test_a_class_shows_the_defaults_of_its_parameters_and_an_instance_its_values(name: str) -> None:
    assert re.search(r"parameter +┃ default +┃", run("policies", name).output)
    assert re.search(r"parameter +┃ value +┃", run("policies", "near(0.2)").output)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["policies", "flx"], "did you mean 'fly'?"),
        (["policies", "typicl"], "did you mean 'typical'?"),
        (["policies", "entropi"], "did you mean 'entropy'?"),
        (["policies", "zzzz"], "'exact', 'fly', 'fly.paper'"),
        (["policies", "fly(thet=1)"], "did you mean 'theta'?"),
        (["drafts", "sufix"], "did you mean 'suffix'?"),
        (["drafts", "zzzz"], "'ngram', 'suffix', 'tree'"),
    ],
)
def test_a_wrong_name_is_an_error_with_near_choices(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and said in result.output
