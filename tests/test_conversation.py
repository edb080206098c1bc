"""``fly chat``: conversations and their commands."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import fly
from fly import LLM, SamplingParams, cli
from fly.cli.chat import Conversation
from fly.config import Config
from fly.models.bundled import CHECKPOINTS

QUESTIONS = ["Take the list 4 9 5 7. Reverse the list.", "Take the list 3 8. Add 2 to each number."]


def talk(*lines: str, arguments: tuple[str, ...] = ("fly-target",), end: str = "") -> Result:
    return CliRunner().invoke(cli.app, ["chat", *arguments], input="".join(f"{line}\n" for line in lines) + end)


def answers(llm: LLM, questions: list[str], system: str | None = None, **options: Any) -> list[fly.Output]:
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    outputs = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        outputs.append(llm.chat(messages, SamplingParams(temperature=0, max_tokens=1024), **options))
        messages.append({"role": "assistant", "content": outputs[-1].text})
    return outputs


@pytest.fixture(scope="module")
def target() -> LLM:
    return LLM("fly-target", "fly-draft")


def test_a_conversation_says_what_chat_says_and_reuses_what_is_cached(target: LLM) -> None:
    wanted = answers(target, QUESTIONS)
    result = talk(*QUESTIONS)
    assert result.exit_code == 0 and result.stdout == "".join(f"{output.text}\n" for output in wanted)
    figures = re.findall(r"τ ([\d.]+) · [\d,.]+ tokens/s · (\d+)% relaxed · cached (\d+) of (\d+)", result.stderr)
    assert len(figures) == 2
    for (tau, relaxed, cached, prompt), output in zip(figures, wanted):
        assert tau == f"{output.stats.tau:.2f}" and int(prompt) == len(output.prompt_token_ids)
        assert int(relaxed) == round(100 * output.stats.relaxed / output.stats.generated)
        assert int(cached) <= int(prompt)
    before = len(wanted[0].prompt_token_ids) + len(wanted[0].token_ids)
    assert int(figures[0][2]) == 0 and before - 6 <= int(figures[1][2]) <= before  # but for the page under way


def test_commands_change_what_follows_and_lose_nothing(target: LLM, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    result = talk(
        QUESTIONS[0], "/polcy exact", "/policy fyl", "/k -1", "/temperature hot", "/draft nothing-there", "/drop 2",
        "/drop x", "/save", "/save /nowhere/at/all", "/reset please", "//", "", "/policy exact", "/k 3", "/draft ngram",
        QUESTIONS[1], f"/save {file}", f"/save {file}", "/temperature 0.5", "/system", "/quit", "never read",
    )  # fmt: skip
    outputs = answers(target, QUESTIONS[:1])
    asked = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": outputs[0].text}]
    said = asked + [{"role": "user", "content": "/"}]
    slash = target.chat(said, SamplingParams(temperature=0, max_tokens=1024))
    said += [{"role": "assistant", "content": slash.text}, {"role": "user", "content": QUESTIONS[1]}]
    last = target.chat(said, SamplingParams(temperature=0, max_tokens=1024), policy=fly.policies.Exact(), k=0)
    assert result.exit_code == 0
    assert result.stdout == f"{outputs[0].text}\n{slash.text}\n{last.text}\n"
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    for words, error in zip(
        [
            "/polcy is no command (did you mean '/policy'?); choices: /policy /k",
            "policy 'fyl'",
            "/k '-1'",
            "/temperature 'hot'",
            "nothing-there",
            "/drop '2' must be an integer in 1..1",
            "/drop 'x'",
            "/save needs",
            "No such file",
            "/reset takes nothing",
        ],
        errors,
        strict=True,
    ):
        assert words in error
    saved = json.loads(file.read_text())
    assert saved["messages"] == [*said, {"role": "assistant", "content": last.text}]
    assert (saved["policy"], saved["k"], saved["draft"]) == ("exact", 3, "ngram")
    assert "temperature 0.5" in result.stderr and "no system prompt but the template's own" in result.stderr
    other = talk(f"/save {file}")
    assert "exists already" in other.stderr and json.loads(file.read_text()) == saved


NO_NUMBERS = ["-1", "abc", "1.5", "1 2", "+3", "1_0", "٣", "²", "nan", "9" * 5000]
REFUSED = {
    "/k": [*NO_NUMBERS, "1024", "99999"],  # the context holds 1024 tokens, one of which is not drafted
    "/drop": [*NO_NUMBERS, "0", "3", "99999"],
    "/temperature": ["-1", "abc", "nan", "inf", "-inf", "1e999", "1 2"],
    "/policy": ["fyl", "fly(theta=high)", "entropy(0.3)", "fly(", "exact & fly", "nowhere:Rule"],
    "/draft": ["nothing-there", "ngram(k=-1)", "ngram(", "none+ngram", "''", "/nowhere"],
    "/save": ["", "/nowhere/at/all", "~nobody-of-this-name/a", "."],
    "/system": ["\ud83d"],  # half a surrogate pair, which no text is
    **{name: ["now", "0"] for name in ("/reset", "/help", "/quit")},
    "/K": ["3"],
    "/": ["k 3"],
}


@pytest.mark.parametrize(("command", "argument"), [(name, each) for name, bad in REFUSED.items() for each in bad])
def test_a_wrong_argument_is_an_error_and_changes_nothing(target: LLM, command: str, argument: str) -> None:
    conversation = Conversation(target, Config(draft="fly-draft"), SamplingParams(), None, {})
    conversation.turns = [{"role": role, "content": "a"} for _ in range(2) for role in ("user", "assistant")]

    def state() -> list[Any]:
        kept = conversation
        return [kept.llm, kept.setup, kept.params, kept.policy, kept.k, kept.system, [*kept.turns]]

    before = state()
    with pytest.raises((ValueError, OSError)) as caught:
        conversation.obey(f"{command}\t {argument}")
    assert len(str(caught.value)) < 1000 and state() == before


@given(st.integers(0, 1023))
def test_k_is_any_number_that_the_context_has_room_for(target: LLM, k: int) -> None:
    conversation = Conversation(target, Config(draft="fly-draft"), SamplingParams(), None, {})
    conversation.obey(f"/k   {k}")
    assert conversation.k == k
    conversation.obey("/k")
    assert conversation.k == k


def test_a_system_prompt_that_the_template_refuses_is_an_error_at_once(tmp_path: Path) -> None:
    """As Gemma's template does, which raises at a message of the system."""
    shutil.copytree(CHECKPOINTS / "fly-tiny", tmp_path / "gemma")
    config = json.loads((file := tmp_path / "gemma" / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[-1].content }}"
    )
    file.write_text(json.dumps(config), "utf-8")
    said = talk("/system Be brief.", "/system", arguments=(str(tmp_path / "gemma"),)).stderr
    assert "no system role" in said and "no system prompt but the template's own" in said


def test_options_of_a_conversation(target: LLM) -> None:
    options = ("--model", "fly-target", "--draft", "none", "--system", "Be brief.", "--max-tokens", "9")
    result = talk(QUESTIONS[0], "/reset", "/system Be long.", QUESTIONS[0], arguments=options)
    for system, said in zip(("Be brief.", "Be long."), result.stdout.splitlines()):
        assert answers(target, QUESTIONS[:1], system, policy=fly.policies.Exact(), k=0)[0].text.startswith(said)
    assert result.stderr.count("cut by --max-tokens 9") == 2 and "τ 1.00" in result.stderr
    for arguments, words in (
        (("fly-target", "--model", "fly-tiny"), "two models"),
        (("fly-target", "--temperature", "-1"), "temperature"),
        (("fly-target", "--chat-template-kwargs", "{"), "no JSON"),
        (("fly-target", "--chat-template-kwargs", "[1]"), "must be a JSON object"),
        (("fly-targte",), "did you mean 'fly-target'"),
    ):
        refused = talk("hi", arguments=arguments)
        assert refused.exit_code == 2 and words in refused.stderr and "Traceback" not in refused.stderr
    unread = talk(QUESTIONS[0], arguments=("fly-tiny", "--chat-template-kwargs", '{"think": 1}'))
    assert unread.exit_code == 0 and "does not read ['think']" in unread.stderr


def test_a_conversation_beyond_the_context_gets_a_message() -> None:
    long = "4 " * 1200
    result = talk(QUESTIONS[0], long, "/drop", long, QUESTIONS[0], arguments=("fly-tiny", "--draft", "none"))
    assert result.exit_code == 0 and len(re.findall(r"the context holds 1024: nothing was sent", result.stderr)) == 2
    assert "/drop N forgets its oldest N turns (of 1)" in result.stderr and "0 turns are left" in result.stderr
    first, last = (line for line in re.findall(r"cached \d+ of \d+", result.stderr))
    assert first.split()[-1] == last.split()[-1]  # nothing of what was refused is kept


def test_what_was_said_before_an_interrupt_is_kept(
    target: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, most = importlib.import_module("fly.cli.chat"), [5, 0]
    show = module.show

    def interrupted(pieces: Any) -> None:
        iterator = iter(pieces)

        def some() -> Iterator[Any]:
            for _ in range(most.pop(0) if most else 10**6):
                if (piece := next(iterator, None)) is None:
                    return
                yield piece
            raise KeyboardInterrupt

        show(some())

    monkeypatch.setattr(module, "show", interrupted)
    file = tmp_path / "said.json"
    result = talk(QUESTIONS[0], "gone", QUESTIONS[1], f"/save {file}")
    wanted = answers(target, QUESTIONS[:1])[0].text
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    said = messages[1]["content"]
    assert said and said != wanted and wanted.startswith(said) and messages[2]["content"] == QUESTIONS[1]
    assert "first after" in result.stderr and "· stopped\n" in result.stderr


def test_a_model_may_cap_the_guarantee_of_any_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that exits early does (``fly.extras.early_exit``): the rule alone is lossless, or bounded."""
    for keeps, exact, bounded in ((True, "lossless", "bounded"), (False, "heuristic", "heuristic")):
        monkeypatch.setattr("fly.runner.executor.Executor.keeps_guarantees", keeps)
        told = talk("/policy", "/policy ears").stderr
        assert f"policy exact ({exact})" in told and f"({bounded})" in told
        output = LLM("fly-tiny").generate("a", policy="ears", temperature=1.0, max_tokens=2)[0]
        assert output.guarantee.value == bounded and (output.bound is not None) == keeps


def test_an_interrupt_of_anything_else_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fly.llm.LLM.chat_prompt", interrupted)
    result = talk(QUESTIONS[0], "/k 3", "/k")
    assert result.exit_code == 0 and "stopped" in result.stderr and result.stderr.count("k 3\n") == 2


def test_thinking_is_dimmed_on_a_terminal_and_left_out_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from fly.cli.completion import show
    from fly.runner.request import Token
    from fly.types import Why

    token = Token(1, Why.MATCH)
    pieces = [fly.Piece("hm", (token,), "reasoning"), fly.Piece("yes", (token,))]
    for terminal in (True, False):
        console = Console(force_terminal=terminal, color_system="standard", width=80)
        monkeypatch.setattr("fly.cli.completion.console", console)
        with console.capture() as said:
            show(pieces)
        if terminal:
            assert said.get() == "\x1b[2;32mhm\x1b[0m\n\n\x1b[32myes\x1b[0m"


def test_a_warning_of_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    for path in (CHECKPOINTS / "fly-tiny").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1], "num_beams": 3}')
    result = talk("/quit", arguments=(str(tmp_path),))
    assert [line for line in result.stderr.splitlines() if "num_beams" in line] == [
        f"warning: {tmp_path}/generation_config.json: num_beams 3 not supported, and ignored"
    ]
