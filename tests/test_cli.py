"""The command as a user types it."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf import GGMLQuantizationType
from typer.testing import CliRunner

import fly
from fly import cli
from fly.backends import load_executor
from fly.cli import show
from fly.cli.run import rules_of
from fly.config import Config
from fly.expressions import grid
from fly.extras.eval import Plan, Setting, compare
from fly.models.bundled import resolve_checkpoint
from fly.models.bundled.tasks import problems
from fly.policies import Exact, FLy
from tests.commands import commands_of_fly, plain, run, words
from tests.ggufs import write_gguf
from tests.toys import random_llama

QUESTION = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."
COMMANDS = {"generate", "chat", "serve", "models", "policies", "drafts", "tasks", "check", "demo", "bench", "eval"}
COMMANDS |= {"report", "harness", "replay", "audit", "doctor"}


def test_it_says_its_version() -> None:
    assert run("--version").output == f"fly {version('flyspec')}\n"


def test_the_commands_are_these() -> None:
    """The command line is public: a change to it is a decision."""
    result = run("--help")
    assert result.exit_code == 0
    assert set(re.findall(r"^│ ([a-z]+) ", result.output, flags=re.MULTILINE)) == COMMANDS
    options = set(re.findall(r"--[a-z][a-z-]*", run("generate", "--help").output))
    assert options >= {
        "--model",
        "--draft",
        "--policy",
        "--k",
        "--max-tokens",
        "--seed",
        "--stop",
        "--json",
        "--config",
    }


def test_text_is_generated_by_the_exact_rule_unless_another_is_named() -> None:
    named = commands_of_fly()
    named |= {f"bench {name}": each for name, each in named["bench"].commands.items()}
    rules = {name: p.default for name, each in named.items() for p in each.params if p.name == "policy"}
    assert {name for name, rule in rules.items() if rule == "exact"} == {"generate", "chat", "serve", "bench drafts"}
    assert {name for name, rule in rules.items() if rule == "fly"} == {"demo"}
    assert not any(rule for name, rule in rules.items() if rule not in ("exact", "fly"))  # beside exact, no others
    assert fly.LLM("fly-tiny").policy == Config().policy == Exact() and Plan().policies == ()
    answer = json.loads(run("generate", QUESTION, "--json").output)
    assert (answer["policy"], answer["guarantee"], answer["stats"]["relaxed"]) == ("exact", "lossless", 0)


def test_the_help_shows_of_an_extra_what_its_command_says() -> None:
    for name, extra in cli.EXTRAS.items():
        assert extra.help == commands_of_fly()[name].get_short_help_str(200), name


def test_the_help_imports_no_extra() -> None:
    program = """if True:
        import contextlib, sys
        from fly.cli import app
        sys.argv = ["fly", "--help"]
        with contextlib.suppress(SystemExit):
            app()
        print([name for name in sys.modules if name.startswith("fly.extras")])
    """
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "train-exit" in shown and shown.endswith("[]\n")


def test_values_in_braces_are_a_rule_each() -> None:
    assert grid("exact") == ["exact"]
    rules = rules_of(["exact | margin({1, 2.5}) & window({2,4})", "exact", "typical"])
    pairs = [(1, 2), (1, 4), (2.5, 2), (2.5, 4)]
    assert list(map(str, rules)) == ["exact", *(f"exact | margin({a}) & window({b})" for a, b in pairs), "typical"]
    assert len(Plan.of({"policies": ["fly(theta={0.1, 0.3}, window={2, 6})", "exact"]}).policies) == 5
    result = run("eval", "--policy", "fly(theta={0.1,})")
    assert result.exit_code == 2 and "a value is missing in braces" in words(result.output)


def test_without_a_terminal_lines_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seconds = itertools.count(0, 40)
    monkeypatch.setattr(show, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    made = CliRunner().invoke(cli.app, ["eval", "--model", "fly-tiny", "--problems", "2", "--max-tokens", "4"])
    said = [line for line in made.stderr.splitlines() if line.startswith("decoding: ")]
    # 4 completions 40 seconds apart: a line at the first, and then at most one a minute
    assert len(said) == 2 and said[0].startswith("decoding: 1 of 4 after 0:00:40, about 0:02:00 left · bundled-middle")
    assert said[1].startswith("decoding: 3 of 4 after 0:02:00, about 0:00:40 left") and "4 tokens" in said[1]
    head = ["train-head", str(tmp_path / "head"), "--model", "fly-tiny", "--task", "arithmetic", "--count", "2"]
    head += ["--steps", "4", "--batch", "1", "--max-tokens", "8", "--width", "32"]
    trained = CliRunner().invoke(cli.app, head)
    assert trained.exit_code == 0, trained.output
    assert "training: 1 of 4 after" in trained.stderr and "· loss" in trained.stderr


def test_what_is_over_soon_says_nothing_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "time", SimpleNamespace(monotonic=lambda: 0.0))  # on a busy machine nothing is soon
    assert run("check", "exact", "--problems", "0").stderr == ""


def test_generate_prints_plain_text_when_piped() -> None:
    result = run("generate", QUESTION, "--policy", "exact", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    llm = fly.LLM("fly-target", dtype="float32")
    assert result.output.strip() == llm.chat([{"role": "user", "content": QUESTION}]).text.strip()


def test_generate_reads_standard_input() -> None:
    piped = run("generate", "--dtype", "float32", input=QUESTION)
    assert piped.output == run("generate", QUESTION, "--dtype", "float32").output


@pytest.mark.parametrize(
    ("arguments", "told", "silent"),
    [
        (
            ("generate", "a", "--policy", "fly(tetha=1)"),
            "fly has no parameter 'tetha' (did you mean 'theta'?)",
            "choices",
        ),
        (
            ("generate", "a", "--draft", "model(fly-tiny, raech=1)"),
            "no parameter 'raech' (did you mean 'reach'?)",
            "choi",
        ),
        (("generate", "a", "--policy", "typical(zzz=1)"), "parameter 'zzz'; choices: ['eps', 'delta']", "did you"),
        (("generate", "a", "--policy", "flyy"), "'flyy' is unknown (did you mean 'fly'?)", "policies"),
        (("eval", "PLAN", "limt: 3"), "limt: there is no such field (did you mean 'limit'?)", "fields:"),
        (("eval", "PLAN", "tasks: [{task: safety, limt: 3}]"), "no such field (did you mean 'limit'?)", "fields:"),
        (("eval", "PLAN", "zzz: 3"), "zzz: there is no such field; fields: ['model', 'server'", "did you"),
        (("generate", "a", "--config", "PLAN", "polcy: fly"), "no such field (did you mean 'policy'?)", "fields:"),
        (("tasks", "PLAN", "promt: a"), "promt: there is no such field (did you mean 'prompt'?)", "fields:"),
        (("tasks", "gsm8"), "unknown task 'gsm8' (did you mean 'gsm8k'?)", "humaneval"),
        (("eval", "--problems", "safty=3", "--task", "safety"), "no such task (did you mean 'safety'?)", "choices"),
        (("eval", "--problems", "many"), "--problems 'many' must be a number of at least 1, or TASK=NUMBER", "choices"),
    ],
)
def test_a_wrong_word_is_answered_by_the_right_one_and_by_a_list_only_without_one(
    arguments: tuple[str, ...], told: str, silent: str, tmp_path: Path
) -> None:
    if "PLAN" in arguments:
        *given, text = arguments
        (tmp_path / "plan.yaml").write_text(text)
        arguments = tuple(str(tmp_path / "plan.yaml") if word == "PLAN" else word for word in given)
    result = run(*arguments)
    assert result.exit_code == 2 and told in words(result.output), result.output
    assert silent not in words(result.output)


def test_the_number_of_problems_may_differ_by_task() -> None:
    tasks = ("--task", "bundled-middle", "--task", "bundled-heldout")
    options = ("--model", "fly-tiny", "--max-tokens", "4", "--problems", "1", "--problems", "bundled-heldout=2")
    said = words(run("eval", *tasks, *options).output)
    assert "bundled-middle · temperature 0 · 1 problem" in said
    assert "bundled-heldout · temperature 0 · 2 problems" in said


@pytest.mark.parametrize("command", ["policies", "drafts"])
def test_lists_are_whole_in_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80, record=True)
    monkeypatch.setattr(show.console, "__dict__", console.__dict__)
    assert run(command).exit_code == 0
    shown = console.export_text()
    assert "…" not in shown and all(len(line) <= 80 for line in shown.splitlines())


def test_a_reader_who_has_seen_enough_is_not_an_error() -> None:
    command = [sys.executable, "-m", "fly", "policies"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 1


def test_a_draft_too_long_for_the_context_is_refused_before_anything_is_measured() -> None:
    result = run("bench", "speed", "--k", "5000")
    assert result.exit_code == 2 and "--k 5000" in words(result.output) and "context of 1024" in words(result.output)
    assert "Limits" not in result.output


def test_an_empty_prompt_needs_a_begin_token(tmp_path: Path) -> None:
    options = ["--raw", "--draft", "none", "--max-tokens", "3", "--json"]
    with_begin = run("generate", "", "--model", "fly-tiny", *options)
    assert json.loads(with_begin.output)["stats"]["prompt_tokens"] == 1
    shutil.copytree(resolve_checkpoint("fly-tiny"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"post_processor": None}), "utf-8")
    assert run("generate", "a", "--model", str(tmp_path), *options).exit_code == 0
    for result in (
        run("generate", "", "--model", str(tmp_path), *options),
        run("generate", "--model", str(tmp_path), *options, input=""),
    ):
        assert result.exit_code == 2 and "Traceback" not in result.output
        assert "the prompt is empty" in words(result.output) and "adds no begin token" in words(result.output)
    templated = run("generate", "", "--model", str(tmp_path), *options[1:])  # a message without text is one
    assert json.loads(templated.output)["stats"]["prompt_tokens"] > 1


def test_generate_as_json_explains_every_token() -> None:
    result = run("generate", QUESTION, "--json", "--policy", "fly & after(2)", "--draft", "ngram+fly-tiny+fly-draft")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert len(answer["provenance"]) == len(answer["token_ids"]) == answer["stats"]["generated"]
    assert {token["why"] for token in answer["provenance"]} <= {"match", "relaxed", "correction", "bonus"}
    assert answer["guarantee"] == "heuristic" and answer["policy"].endswith("after(2)")
    assert answer["finish_reason"] == "stop" and answer["stats"]["rounds"] < answer["stats"]["generated"]


def test_generate_shows_colours_and_a_legend_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    console = Console(force_terminal=True, width=100, color_system="standard")
    monkeypatch.setattr(show.console, "__dict__", console.__dict__)
    result = run("generate", QUESTION)
    assert "\x1b[32m" in result.output and "relaxed" in result.output and "τ" in result.output


def test_generate_prints_every_completion() -> None:
    options = ["generate", QUESTION, "--temperature", "1.2", "--max-tokens", "30", "--seed", "1", "--n", "3"]
    llm = fly.LLM("fly-target", "fly-draft")
    params = fly.SamplingParams(temperature=1.2, max_tokens=30, seed=1, n=3)
    first = llm.chat([{"role": "user", "content": QUESTION}], params)
    texts = [first.text, *(other.text for other in first.others)]
    assert len(set(texts)) > 1
    for extra in ([], ["--stop", "reverse"]):
        wanted = [text.partition("reverse")[0] if extra else text for text in texts]
        said = run(*options, *extra)
        assert said.output == "".join(f"--- {i} of 3 ---\n{text}\n" for i, text in enumerate(wanted, start=1))
    answer = json.loads(run(*options, "--json").output)
    assert [answer["text"], *(other["text"] for other in answer["others"])] == texts


@pytest.mark.parametrize("stop", [(), ("reverse",), ("e ",)])
def test_an_output_comes_in_pieces_as_its_stream_would(stop: tuple[str, ...]) -> None:
    llm = fly.LLM("fly-target", "fly-draft", FLy())
    for params in (
        fly.SamplingParams(temperature=0, max_tokens=40, stop=stop),
        fly.SamplingParams(temperature=2, max_tokens=40, seed=3, stop=stop),
    ):
        prompt = llm.chat_prompt(QUESTION)
        (output,) = llm.generate([prompt], params)
        shown = output.pieces
        assert "".join(shown) == output.text == "".join(llm.stream(prompt, params))
        known = [token for piece in shown for token in piece.tokens]
        assert known == output.provenance[: len(known)]


def test_a_bias_forbids_and_forces() -> None:
    options = ["generate", QUESTION, "--json", "--max-tokens", "3", "--policy", "exact"]
    first = json.loads(run(*options).output)["token_ids"][0]
    other = 7 if first != 7 else 8
    answers = [
        json.loads(run(*options, *biases).output)["token_ids"]
        for biases in (["--logit-bias", f"{first}=-100"], ["--logit-bias", f"{other}=100", "--logit-bias", "9=-1.5"])
    ]
    assert first not in answers[0] and answers[1] == [other] * 3


def test_an_answer_follows_a_grammar_of_a_text_or_a_file(tmp_path: Path) -> None:
    grammar = 'word: "aye" | "nay"\nstart: word " " word "."\n'
    (tmp_path / "votes.lark").write_text(grammar)
    for given in (grammar, str(tmp_path / "votes.lark"), f"@{tmp_path / 'votes.lark'}"):
        result = run("generate", QUESTION, "--grammar", given)
        assert re.fullmatch(r"(aye|nay) (aye|nay)\.\n", result.output), result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--logit-bias", "5"], ["--logit-bias '5'", "TOKEN_ID=BIAS"]),
        (["generate", "x", "--logit-bias", "a=5"], ["--logit-bias 'a=5'", "TOKEN_ID=BIAS"]),
        (["generate", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"], ["'5=2'", "token 5", "already, 1"]),
        (["generate", "x", "--logit-bias", "5=101"], ["logit_bias.5", "100", "101"]),
        (["generate", "x", "--logit-bias", "5000=1"], ["logit_bias", "5000", "vocabulary of 1024"]),
        (["generate", "x", "--n", "0"], ["n:", "1", "0"]),
        (["generate", "x", "--grammar", "absent.lark"], ["--grammar 'absent.lark'", "a rule start", "No such file"]),
        (["generate", "x", "--grammar", "start: nowhere"], ["structured grammar", "nowhere"]),
        (["generate", "x", "--grammar", 'start: "a"', "--regex", "b"], ["exactly one", "'regex', 'grammar'"]),
        (["generate", "x", "--model", "fly-targt"], ["'fly-targt'", "fly-target"]),
        (["generate", "x", "--draft", "fly-drft"], ["'fly-drft'", "fly-draft"]),
        (["generate", "x", "--policy", "flx"], ["'flx'", "did you mean 'fly'?"]),
        (["generate", "x", "--top-p", "2"], ["top_p", "2"]),
        (["generate", "x", "--dtype", "int3"], ["int3", "bfloat16"]),
        (["generate", "x", "--config", "absent.yaml"], ["absent.yaml"]),
        (["generate", "x", "--max-tokens", "5", "--min-tokens", "6"], ["min_tokens 6", "max_tokens 5"]),
        (["generate", "x", "--k", "-1"], ["--k", "-1"]),
        (["serve", "--port", "many"], ["--port", "valid integer", "got 'many'"]),
        (["bench", "speed", "--turns", "0"], ["--turns", "equal to 1, got", "'0'"]),
        (["generate", "x", "--draft", "none+ngram"], ["'none+ngram'", "'none' stands alone"]),
        (["serve", "--api-keys-file", "absent.txt"], ["error: 'absent.txt': No such file or directory"]),
        (["eval", "bundled-ood"], ["plan 'bundled-ood': there is no such file or folder; --task names a task"]),
        (["eval", "bundled-odd"], ["--task names a task (did you mean 'bundled-ood'?)"]),
        (["eval", "--task", "absent.yaml"], ["'absent.yaml' cannot be read: No such file or directory"]),
        (["check", "absent_module_x:Rule"], ["absent_module_x"]),
        (["demo", "--split", "nowhere"], ["nowhere", "heldout"]),
        (["serve", "--replicas", "2"], ["--replicas does nothing without --ray"]),
        (["tasks", "--model", "fly-tiny"], ["--model does nothing without a task"]),
        (["tasks", "safety", "--run-code"], ["--run-code does nothing without --references"]),
        (["tasks", "bundled-ood", "--references", "--problem", "3"], ["--problem does nothing with --references"]),
        (["audit", "http://127.0.0.1:9", "--beside-name", "x"], ["--beside-name does nothing without --beside"]),
        (["audit", "http://127.0.0.1:9", "--dtype", "float32"], ["--dtype does nothing without --model"]),
        (["audit", "http://127.0.0.1:9", "--kernels", "w8a8"], ["--kernels does nothing without --model"]),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments: list[str], said: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert all(word in words(result.output) for word in said), result.output


def test_configuration_files(tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    path.write_text("draft: ngram+fly-draft\npolicy: {name: fly, theta: 0.5}\nk: 9\ndtype: float32\n")
    answer = json.loads(run("generate", QUESTION, "--json", "--config", str(path)).output)
    assert answer["policy"] == "fly(theta=0.5)"
    answer = json.loads(run("generate", QUESTION, "--json", "--config", str(path), "--policy", "exact").output)
    assert answer["policy"] == "exact"
    llm = fly.LLM.from_config(path)
    assert llm.k == 9 and llm.policy == FLy(theta=0.5)
    for text, said in (
        ("polcy: x", "polcy"),
        ("k: -1", "k"),
        ("cache: .nan", r"cache nan must be a size"),
        ("policy: flx", "flx"),
        ("{", "YAML"),
        ("- 1", "mapping"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            fly.LLM.from_config(path)
    for shipped in (Path(__file__).parent.parent / "configs").glob("*.yaml"):
        rule = Config.read(shipped).policy
        assert rule == (FLy() if shipped.stem == "fly" else Exact()), f"{shipped} relaxes without saying so in its name"


def test_a_model_is_described(tmp_path: Path) -> None:
    told = words(run("models", str(resolve_checkpoint("fly-target"))).output)
    assert "llama (LlamaForCausalLM)" in told and "1024 tokens" in told and "BF16" in told and "GB in bfloat16" in told
    model = random_llama(layers=3, vocab_size=99, intermediate=64)
    write_gguf(model, tmp_path / "some.gguf", GGMLQuantizationType.Q8_0)
    told = words(run("models", str(tmp_path / "some.gguf")).output)
    assert "3 × 32" in told and "Q8_0, F32" in told and "99 tokens, no tokenizer" in told
    shutil.copytree(resolve_checkpoint("fly-tiny"), tmp_path / "bad")
    config = json.loads((tmp_path / "bad" / "config.json").read_text())
    for change, message in [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM'] is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq' are not supported"),
    ]:
        (tmp_path / "bad" / "config.json").write_text(json.dumps(config | change))
        result = run("models", str(tmp_path / "bad"))
        assert result.exit_code == 2 and message in words(result.output)


def test_blocks_of_a_file_are_named_as_what_kernels_compute_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_llama(vocab_size=99, hidden=256, intermediate=256)
    kinds = dict.fromkeys(("gate_proj", "up_proj"), "Q3_K") | {"down_proj": "Q6_K"}
    write_gguf(model, file := tmp_path / "some.gguf", GGMLQuantizationType.Q4_K, kinds=kinds)
    monkeypatch.delenv("FLY_KERNELS", raising=False)
    told = plain(run("models", str(file)).output)
    assert "stored as Q6_K, Q4_K, Q3_K, F32; 0.00 GB" in told
    kept = load_executor(file).kernels.endswith("-stored")  # where there are compiled kernels
    assert ("computed in Q6_K, Q4_K as stored, times inputs rounded to 8 bits; decoded to bfloat16 on" in told) == kept
    assert ("GB in the file's blocks, at most; 0.00 GB in bfloat16" in told) == kept
    monkeypatch.setenv("FLY_KERNELS", "torch")
    assert "computed in bfloat16 vocabulary" in plain(run("models", str(file)).output)


def test_models_and_policies_are_listed() -> None:
    listed = run("models").output
    assert all(name in listed for name in ("fly-target", "fly-draft", "fly-tiny"))
    listed = run("policies").output
    assert all(name in listed for name in ("exact", "fly", "block", "lossless", "bounded", "entropy(", "after("))


def test_check_passes_a_sound_rule_and_fails_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_planted.py").write_text(
        "from dataclasses import dataclass\n"
        "from fly.policies import Exact\n"
        "@dataclass(frozen=True)\n"
        "class Wrong(Exact):\n"
        "    def residual(self, target_BV, draft_BV):\n"
        "        return target_BV\n"
        "@dataclass(frozen=True)\n"
        "class Raising(Exact):\n"
        "    def accept_probs(self, target, draft):\n"
        "        raise KeyError('nothing here')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = run("check", "cli_planted:Wrong", "--problems", "2")
    assert wrong.exit_code == 1 and "FAIL" in wrong.output and "lossless" in wrong.output
    assert "tok/s" in wrong.output and "breaks the contract" in wrong.output
    raising = run("check", "cli_planted:Raising", "--problems", "2")
    assert raising.exit_code == 1 and "on a trial block: KeyError: 'nothing here'" in words(raising.output)
    marked = run("check", "exact | phase('<think>', '</think>')", "--problems", "2")
    assert marked.exit_code == 0 and "a marker must be exactly one" in words(marked.output)
    right = run("check", "exact", "--problems", "2")
    assert right.exit_code == 0 and "FAIL" not in right.output and "tok/s" in right.output
    told = words(right.output)
    assert "measured on the bundled models, at temperature 0 alone" in told
    assert "lost, won: problems" in told and "gate:" not in told and "layers:" not in told  # what has no value


def test_the_demo_shows_a_completion_and_the_table() -> None:
    result = run("demo", "--problems", "3")
    assert result.exit_code == 0, result.output
    said = words(result.output)
    assert "decoding tok/s AR exact cost τ kept gate Python" in said  # the headings' last words
    for word in ("autoregressive", "exact k15", "fly k15", "recovery", "p relaxed same cut first length"):
        assert word in said
    last = said.partition("intervals of 95 %")[2]  # after the tables' legend
    assert re.search(r"at the costs of llama-3.1-70b .*: exact k15 \d\.\d\d×, fly k15 \d\.\d\d× over AR", last)


def test_a_table_of_many_rules_fits_a_terminal() -> None:
    rules = ["fly", "fly(window=4)", "fly", "exact | (entropy(0.3) & window(6) | ~control) & after(2)", "typical"]
    result = run("eval", "--problems", "2", *(option for rule in rules for option in ("--policy", rule)))
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines()), result.output
    assert "…" not in result.stdout  # nothing is cut off
    names = ["autoregressive", "exact k15", "fly k15", "fly(window=4) k15", "exact | (entropy(0.3) &", "typical k15"]
    rows = [next((n for n in names if line.startswith(f"{n} ")), "") for line in result.output.splitlines()]
    assert [row for row in rows if row] == 3 * names  # each once in every table


def test_compare_counts_what_happened() -> None:
    llm = fly.LLM("fly-target", "fly-draft", dtype="float32")
    questions = problems(None, "heldout", n=9)[-3:]
    settings = [Setting("plain", llm, 0), Setting("exact", llm, 7), Setting("fly", llm, 15, FLy())]
    seen: list[str] = []
    plain, exact, loose = compare(settings, questions, fly.SamplingParams(temperature=0, max_tokens=200), seen.append)
    assert seen == [name for name in ("plain", "exact", "fly") for _ in questions]  # a turn of a few prompts each
    assert plain.texts == exact.texts and plain.right == exact.right
    assert plain.stats.rounds == plain.stats.emitted and plain.stats.tau == 1.0 and plain.stats.drafted == 0
    assert exact.stats.generated == plain.stats.generated and exact.stats.tau > 1.5 and exact.stats.relaxed == 0
    assert loose.stats.tau >= exact.stats.tau
    assert all(result.seconds > 0 and result.tokens_per_second > 0 for result in (plain, exact, loose))
    assert exact.setting.policy == Exact()
    with pytest.raises(ValueError, match="at least one"):
        compare([], questions, fly.SamplingParams())


@pytest.mark.usefixtures("few_seeds")
def test_drafts_are_listed_checked_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run("drafts").output
    assert all(name in listed for name in ("ngram(", "suffix(", "tree(", "adaptive(strategy, lookup"))
    (tmp_path / "my_drafts_cli.py").write_text(
        "from fly.drafts import NGramDraft, pad\n"
        "class Mine(NGramDraft): pass\n"
        "class TooLong(NGramDraft):\n"
        "    def propose(self, rows, max_len):\n"
        "        return pad([row.tokens[-1:] * (n + 1) for row, n in zip(rows, max_len)])\n"
    )
    monkeypatch.chdir(tmp_path)
    good = run("check", "--draft", "my_drafts_cli:Mine(k=4)", "--problems", "0")
    assert good.exit_code == 0 and "FAIL" not in good.output, good.output
    bad = run("check", "--draft", "my_drafts_cli:TooLong", "--problems", "0")
    assert bad.exit_code == 1 and "at most" in words(bad.output)
    refused = run("generate", "hi", "--draft", "my_drafts_cli:TooLong")
    assert refused.exit_code == 2 and "TooLong proposed" in words(refused.stderr)
    assert run("check").exit_code == 2
    options = ("--problems", "1", "--repeats", "1", "--model", "fly-tiny")
    table = run("bench", "drafts", "--draft", "ngram", "--draft", "adaptive(ngram)", *options)
    assert table.exit_code == 0, table.output
    assert all(text in words(table.output) for text in ("/3", "always wrong", "Promise, at most 2% slower"))


def test_an_error_in_a_plug_in_is_one_line_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rules.py").write_text("def f(:\n")
    (tmp_path / "raising_rules.py").write_text(
        "from dataclasses import dataclass\nfrom fly.policies import Exact\n"
        "@dataclass(frozen=True)\nclass Raises(Exact):\n"
        "    def accept_probs(self, target, draft):\n        raise KeyError('oh')\n"
        "class Unpacks(Exact):\n"
        "    def accept_probs(self, target, draft):\n        values, ids, rest = target.top_probs(2)[:, :1]\n"
        "class Refuses(Exact):\n"
        "    def accept_probs(self, target, draft):\n        raise ValueError('not at this time')\n"
    )
    monkeypatch.chdir(tmp_path)
    for rule, told in (
        ("broken_rules:X", "SyntaxError"),
        ("raising_rules:Raises", "raising_rules.py:6 in accept_probs"),
        ("raising_rules:Unpacks", "ValueError: not enough values to unpack (expected 3, got 2)"),
        ("raising_rules:Unpacks", "raising_rules.py:9 in accept_probs"),
        ("raising_rules:Refuses", "fails on a trial block: ValueError: not at this time"),
    ):
        result = run("generate", "hi", "--policy", rule, "--draft", "ngram", "--ignore-eos")
        assert result.exit_code == 2 and told in words(result.stderr), result.stderr
        assert result.stdout[-1:] in ("", "\n"), "the error stands behind a text that was begun"


def test_a_model_that_takes_long_to_load_is_named_first_without_a_terminal() -> None:
    path = str(resolve_checkpoint("fly-tiny"))
    result = run("eval", "--model", path, "--draft", "ngram", "--problems", "1", "--max-tokens", "4")
    assert result.exit_code == 0 and result.stderr.startswith(f"loading {path}"), result.stderr


def test_rules_are_compared_on_the_bundled_tasks(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    rules = ("--policy", "fly", "--policy", "fly(theta=0.9)", "--policy", "exact")
    options = ("--model", "fly-tiny", "--draft", "ngram", "--problems", "2", "--json", str(path))
    shown = run("eval", *rules, *options)
    assert shown.exit_code == 0 and "bundled-middle · temperature 0 · 2 problems" in words(shown.output), shown.output
    (table,) = json.loads(path.read_text())["tables"]
    assert [row["k"] for row in table["rows"]] == [0, 15, 15, 15] and table["rows"][0]["way"] == "autoregressive"
    assert len({row["way"] for row in table["rows"]}) == 4 and all(row["problems"] == 2 for row in table["rows"])
    assert run("eval", "--draft", "none").exit_code == 2
