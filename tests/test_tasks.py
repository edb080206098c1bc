"""The bundled problems and their generators, the sandbox that checks programs, and the bundled tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from typer.testing import CliRunner

from fly.extras.eval import jail
from fly.extras.eval.sandbox import Language, Refused, Result, Sandbox
from fly.extras.eval.scorers import Programs, check_many
from fly.extras.eval.task import load_task
from fly.models import load_model
from fly.models.bundled import CHECKPOINTS
from fly.models.bundled.tasks import FROZEN, KINDS, SPLITS, Problem, problems
from tools import problems as tools_problems
from tools import train as training
from tools.problems import FROZEN_COUNTS, generate
from tools.train import Round

NAMES = ("fly-target", "fly-draft", "fly-tiny")

seeds = st.integers(0, 2**32)


def check(problem: Problem, completion: str) -> bool:
    return check_many([(problem, completion)])[0]


# --- generators ------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*KINDS, "all", None]), st.sampled_from(SPLITS), seeds)
def test_the_same_seed_gives_the_same_problems(kind: str | None, split: str, seed: int) -> None:
    first = list(generate(kind, split, seed, 6))
    assert first == list(generate(kind, split, seed, 6))
    assert first == list(islice(generate(kind, split, seed), 6))
    assert first != list(generate(kind, split, seed + 1, 6))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_solutions_pass(kind: str, split: str) -> None:
    batch = list(generate(kind, split, 11, 150))
    assert {p.kind for p in batch} == {kind}
    assert [p for p, ok in zip(batch, check_many([(p, p.solution) for p in batch])) if not ok] == []


@pytest.mark.parametrize("kind", ["arithmetic", "text"])
def test_a_wrong_last_line_fails(kind: str) -> None:
    for p in problems(kind, "heldout", n=100):
        steps, _, _ = p.solution.rpartition("####")
        assert check(p, f"{steps}#### {p.answer}\n")
        assert not check(p, f"{steps}#### {p.answer}1")
        assert not check(p, f"{p.solution}\n#### 1{p.answer}")
        assert not check(p, steps)
        assert not check(p, "")


def test_changed_programs_fail() -> None:
    swaps = (
        (" > ", " >= "), (" < ", " <= "), ("== 0", "== 1"), ("% 2 == 1", "% 2 == 0"), ("!=", "=="),
        ("return True", "return False"), (".append(", ".remove("), ("+= 1", "+= 2"), (" * ", " + "),
        ("starts", "ends"), ("ends", "starts"), (" in ", " not in "),
    )  # fmt: skip
    pairs = []
    for p in problems("code", "heldout", n=100):
        head, fence, program = p.solution.partition("```python\n")
        signature, _, body = program.partition(":\n")
        comment, _, body = body.partition("\n")
        for old, new in swaps:
            # The loop header's "in" is not a wording of the test.
            if old in body and not (old == " in " and '" in ' not in body):
                changed = body.replace('" in ', '" not in ') if old == " in " else body.replace(old, new)
                pairs.append((p, f"{head}{fence}{signature}:\n{comment}\n{changed}"))
        pairs.append((p, head))
        pairs.append((p, f"{head}{fence}{signature}:\n    return"))
    passed = check_many(pairs)
    # A change may be harmless for the inputs drawn, but rarely.
    assert len(pairs) > 250
    assert sum(passed) / len(pairs) < 0.08


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(KINDS), seeds, seeds)
def test_splits_share_no_prompt(kind: str, seed: int, other: int) -> None:
    prompts = {
        split: {p.prompt for p in generate(kind, split, s, 300)} for split, s in zip(SPLITS, (seed, other, other, seed))
    }
    for one, two in combinations(SPLITS, 2):
        assert not prompts[one] & prompts[two], (one, two)


def test_wording_is_free_but_the_facts_are_not() -> None:
    openings = {p.solution.split(",")[0] for p in generate("arithmetic", "train", 0, 300)}
    assert len(openings) >= 6


@pytest.mark.parametrize(
    ("kind", "split", "words"), [("poetry", "train", ("poetry", *KINDS)), ("code", "test", ("test", *SPLITS))]
)
def test_unknown_kind_or_split_names_the_choices(kind: str, split: str, words: tuple[str, ...]) -> None:
    for ask in (problems, generate):
        with pytest.raises(ValueError) as caught:
            ask(kind, split, 0)
        assert all(word in str(caught.value) for word in words)


def test_a_negative_count_is_refused() -> None:
    for ask in (problems, generate):
        with pytest.raises(ValueError, match="-1"):
            ask("code", "train", 0, -1)


def test_mixed_kinds_take_turns() -> None:
    for ask in (problems, generate):
        assert [p.kind for p in ask("all", "train", 0, 6)] == list(KINDS) * 2


@pytest.mark.parametrize("split", SPLITS)
def test_bundled_problems_are_the_generators_of_seed_0(split: str) -> None:
    for kind in (*KINDS, None):
        count = FROZEN_COUNTS[split] * (len(KINDS) if kind is None else 1)
        found = problems(kind, split)
        assert len(found) == count and problems(kind, split, 0, 7) == found[:7]
        made = list(generate(kind, split, 0, 60))
        assert found[:60] == ([Problem(p.kind, p.prompt) for p in made] if split == "train" else made)
    assert sum(path.stat().st_size for path in FROZEN.iterdir()) < 1_000_000


def test_more_problems_than_there_are_and_other_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 1200 problems of seed 0 .400 of each kind.*1201 were asked"):
        problems(None, "heldout", n=1201)
    with pytest.raises(ValueError, match=r"holds 1200 problems of seed 0 .*seed 3 was asked"):
        problems(None, "heldout", seed=3, n=2)
    with pytest.raises(ValueError, match=r"split 'ood' holds 400 problems of seed 0 .code., and 500 were asked"):
        _ = load_task("bundled-ood", generated={"split": "ood", "kind": "code", "count": 500}).problems
    with pytest.raises(ValueError, match=r"heldout.*middle.*ood"):
        load_task("bundled-ood", generated={"split": "train"})


def test_problems_of_another_seed_are_a_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    words = ["write", str(path), "--kind", "code", "--seed", "3", "--count", "5"]
    assert CliRunner().invoke(tools_problems.app, words).exit_code == 0
    changes = {"data": str(path), "shuffle": False}
    asked = load_task("bundled-heldout", **changes)
    assert [p.turns[0] for p in asked.problems] == [p.prompt for p in generate("code", "heldout", 3, 5)]
    with Programs() as programs:
        assert all(asked.score(each, asked.reference(each), programs).right for each in asked.problems)


def test_programs_are_taken_from_the_block_or_the_whole_text() -> None:
    p = Problem("code", "", "", "", ("f(2) == 3",))
    program = "def f(x):\n    return x + 1\n"
    assert check(p, program)
    assert check(p, f"Sure.\n```python\n{program}```\nDone.")
    assert check(p, f"```python\n{program}")
    assert not check(p, f"Sure.\n{program}")


# --- sandbox ---------------------------------------------------------------------------------------------


def run_many(jobs: list[tuple[str, list[str]]], timeout_s: float = 5.0, language: Language = "small") -> list[Result]:
    with Sandbox(timeout_s) as opened:
        return [opened.run(code, tests, language) for code, tests in jobs]


def run_python(code: str, tests: list[str], language: Language = "small") -> Result:
    return run_many([(code, tests)], language=language)[0]


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "from os import path",
        "__import__('os')",
        "x = ().__class__",
        "x = '{0.__class__}'.format(1)",
        "x = (i for i in []).gi_frame",
        "open('x', 'w')",
        "eval('1')",
        "exec('1')",
        "getattr(1, 'real')",
        "globals()",
        "class A: pass",
        "try:\n    1\nexcept Exception:\n    pass",
        "with 1: pass",
        "def f(__x): pass",
        "def __f(): pass",
        "@print\ndef f(): pass",
        "input()",
        "1 / 0",
        "def f(): return f()\nf()",
        "x = 1 +",
        "x = '" + "\ud800" + "'",
        "(" * 5000 + ")" * 5000,
        "raise ValueError",
    ],
)
def test_the_sandbox_refuses(code: str) -> None:
    result = run_python(code, ["True"])
    assert not result.ok
    assert result.reason


def test_the_sandbox_stops_endless_loops_and_goes_on() -> None:
    jobs = [
        ("x = 1", ["x == 1"]),
        ("while True:\n    pass", ["True"]),
        ("x = 9 ** 9 ** 9", ["True"]),
        ("y = 2", ["y == 2"]),
    ]
    results = run_many(jobs, timeout_s=0.5)
    assert [r.ok for r in results] == [True, False, False, True]
    assert results[1].reason == "timed out"


def test_the_sandbox_limits_memory() -> None:
    assert "MemoryError" in run_python("x = [0] * 10 ** 10", ["True"]).reason
    grow = "x = [0]\nwhile True:\n    x = x + x"
    assert not run_python(grow, ["True"]).ok


def test_the_sandbox_writes_nothing_even_past_the_syntax_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The limits of the process are a second wall: run a server whose syntax check lets everything through.
    target = tmp_path / "written"
    source = Path(jail.__file__).read_text(encoding="utf-8")
    open_server = tmp_path / "server.py"
    open_server.write_text(
        source.replace("def refusal(tree: ast.AST) -> str:\n", "def refusal(tree):\n    return ''\n").replace(
            '"abs", ', '"abs", "open", "__import__", '
        ),
        encoding="utf-8",
    )
    monkeypatch.setattr(jail, "__file__", str(open_server))
    assert run_python("x = 1", ["x == 1"]).ok
    assert not run_python(f"open({str(target)!r}, 'w').write('a')", ["True"]).ok
    assert not target.exists()
    assert run_python("import os", ["'PATH' not in os.environ"]).ok


def test_a_failed_test_is_named_and_must_be_true_itself() -> None:
    assert "f(1) == 3" in run_python("def f(x):\n    return 2", ["f(1) == 2", "f(1) == 3"]).reason
    assert not run_python("def f(x):\n    return 2", ["f(1)"]).ok


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80))
def test_the_sandbox_never_raises(code: str) -> None:
    assert isinstance(jail.run_job(code, [], "small"), tuple)


ISOLATED = pytest.mark.skipif(bool(jail.why_not()), reason=f"no isolation: {jail.why_not()}")


@ISOLATED
def test_real_programs_run_as_they_need_it() -> None:
    programs = [
        "import math, re, hashlib\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    ok = math.sqrt(4)\nassert ok == 2",
        "open('x', 'w').write('a')\nassert open('x').read() == 'a'",
        "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nassert A(1).x == 1",
        "import asyncio\nasync def f():\n    return 1\nassert asyncio.run(f()) == 1",
    ]
    assert [r.reason for r in run_many([(p, []) for p in programs], language="python")] == [""] * len(programs)


@ISOLATED
@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 22))",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nassert os.system('true') == 0",
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "import os\nos.listdir('/')",
        "open('/tmp/evil', 'w')",
        "import os\nos.chmod('.', 0)",
        "import os\nos.kill(os.getppid(), 0)",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import ctypes\nassert ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0) == 0",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes\nassert ctypes.CDLL(None).syscall(10_000) != -1 or ctypes.get_errno()",
        "x = [0] * 10 ** 10",
        "open('big', 'wb').write(bytes(1 << 26))",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "assert 'PATH' in __import__('os').environ",
        "def f(:",
    ],
)
def test_real_programs_reach_nothing_else(code: str, open_sandbox: Sandbox) -> None:
    result = open_sandbox.run(code, language="python")
    assert not result.ok and result.reason
    assert open_sandbox.run("import os", language="python").ok  # and it goes on


@pytest.fixture(scope="module")
def open_sandbox() -> Iterator[Sandbox]:
    with Sandbox() as opened:
        yield opened


@ISOLATED
def test_real_programs_end_in_time_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Sandbox(timeout_s=20) as opened:
        fills = "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(1 << 23))\n    n += 1"
        assert opened.run(fills, language="python").reason == "wrote too much"
    with Sandbox(timeout_s=0.5) as opened:
        swallows = (
            "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass"
        )
        assert opened.run(swallows, language="python").reason == "timed out"
        assert opened.run("open('kept', 'w')", language="python").ok
        gone = opened.run("import os\nassert os.listdir('.') == []", language="python")
    assert gone.ok, gone.reason


def test_where_nothing_isolates_real_programs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = Path(jail.__file__).read_text(encoding="utf-8")
    bare = tmp_path / "server.py"
    bare.write_text(source.replace("    if _landlock_version() < 1:\n", "    if True:\n"), encoding="utf-8")
    monkeypatch.setattr(jail, "__file__", str(bare))
    with pytest.raises(Refused, match="Landlock"):
        run_python("x = 1", [], language="python")
    assert run_python("x = 1", ["x == 1"]).ok  # the small language needs none of it
    # isolation that does not hold is noticed, and nothing is run
    bare.write_text(source.replace("        _seccomp()\n", "        pass\n"), encoding="utf-8")
    if not jail.why_not():
        with pytest.raises(Refused, match="forked"):
            run_python("x = 1", [], language="python")


# --- tokenizer -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINTS / "fly-target" / "tokenizer.json"))


@pytest.mark.parametrize(
    ("split", "usual", "most"), [("train", 250, 300), ("heldout", 250, 300), ("middle", 250, 300), ("ood", 500, 600)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_problems_fit_their_token_limits(tokenizer: Tokenizer, kind: str, split: str, usual: int, most: int) -> None:
    batch = list(generate(kind, split, 21, 400))
    lengths = [len(e.ids) for e in tokenizer.encode_batch([p.prompt + p.solution for p in batch])]
    assert sum(length <= usual for length in lengths) >= 0.99 * len(lengths)
    assert max(lengths) <= most


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_encoding_is_lossless_and_begins_once(tokenizer: Tokenizer, text: str) -> None:
    begin = tokenizer.token_to_id("<|begin|>")
    ids = tokenizer.encode(text).ids
    assert ids[0] == begin
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [t for t in tokenizer.encode("120 + 9", add_special_tokens=False).tokens if t.isdigit()] == [
        "1",
        "2",
        "0",
        "9",
    ]
    assert not [t for t in tokenizer.get_vocab() if any(c.isdigit() for c in t) and len(t) > 1]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_folders_share_the_tokenizer(name: str, tokenizer: Tokenizer) -> None:
    folder = CHECKPOINTS / name
    assert (folder / "tokenizer.json").read_text() == (CHECKPOINTS / "fly-target" / "tokenizer.json").read_text()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.token_to_id(t) for t in ("<|end|>", "<|endoftext|>")]
    assert tokenizer.get_vocab_size() == json.loads((folder / "config.json").read_text())["vocab_size"] == 1024


@pytest.mark.parametrize("name", NAMES)
def test_chat_template(name: str) -> None:
    def refuse(message: str) -> None:
        raise ValueError(message)

    config = json.loads((CHECKPOINTS / name / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(config["chat_template"])
    names = {"bos_token": config["bos_token"], "raise_exception": refuse}
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    text = template.render(messages=messages, add_generation_prompt=True, **names)
    assert text == "<|begin|><|system|>A<|end|><|user|>B<|end|><|assistant|>"
    assert template.render(messages=messages[1:], **names) == "<|begin|><|user|>B<|end|>"
    with pytest.raises(ValueError, match="tool"):
        template.render(messages=[{"role": "tool", "content": "A"}], **names)


# --- training --------------------------------------------------------------------------------------------


def test_rows_hold_whole_conversations(tokenizer: Tokenizer) -> None:
    recipe = replace(training.RECIPES["fly-tiny"], batch=8)
    ids, weights = next(training._batches(tokenizer, recipe, 0, 0))
    assert ids.shape == weights.shape == (8, recipe.length + 1)
    assert (weights > 0).float().mean() > 0.85
    end, begin, assistant = (tokenizer.token_to_id(t) for t in ("<|end|>", "<|begin|>", "<|assistant|>"))
    for row, weight in zip(ids.tolist(), weights.tolist()):
        used = sum(w > 0 for w in weight)
        assert row[0] == begin
        assert row[used - 1] == end
        assert row.count(begin) == row.count(assistant)
        assert weight[row.index(assistant)] == pytest.approx(training._PROMPT_WEIGHT)
        assert weight[used - 1] == 1


def test_training_repeats_itself_and_resumes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = replace(training.RECIPES["fly-tiny"], rounds=(Round(3), Round(2, 0.5, (1, 2, 0))), batch=4)
    facts = training.train(recipe, tokenizer, 7, tmp_path / "a")
    training.train(replace(recipe, rounds=recipe.rounds[:1]), tokenizer, 7, tmp_path / "b")
    resumed = training.train(recipe, tokenizer, 7, tmp_path / "b", resume=True)
    first, second = (load_model(tmp_path / name, dtype="float32") for name in ("a", "b"))
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)
    assert {**facts, "minutes": 0} == {**resumed, "minutes": 0}
    assert (facts["rounds"], facts["steps"]) == (2, 5)
    assert first.config == recipe.config()


def test_packed_conversations_do_not_see_each_other(tokenizer: Tokenizer) -> None:
    model = load_model(CHECKPOINTS / "fly-tiny", dtype="float32")
    begin = tokenizer.token_to_id("<|begin|>")
    first, second, other = ([begin, *(range(start, start + 9))] for start in (300, 400, 500))

    def hidden(*parts: list[int]) -> torch.Tensor:
        row = torch.tensor([[token for part in parts for token in part]])
        return model(row[0], torch.arange(row.shape[1]), training._PackedCausal(row, begin))

    torch.testing.assert_close(hidden(first, second)[10:], hidden(other, second)[10:])


def test_the_target_solves_held_out_problems(tokenizer: Tokenizer) -> None:
    model = load_model(CHECKPOINTS / "fly-target", dtype="float32")
    scores, _ = training.evaluate(model, tokenizer, n=12, seed=5, splits=["heldout"])
    assert min(scores["heldout"].values()) >= 0.8
