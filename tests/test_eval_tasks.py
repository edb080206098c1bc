"""Tasks as files, their problems and prompts, and when an answer is right."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly.eval import Task, jail, load_task, task_names
from fly.eval.scorers import Number, Programs, extract_code
from fly.eval.task import Problem
from tests.commands import run as command
from tests.commands import words

ISOLATED = pytest.mark.skipif(bool(jail.why_not()), reason=f"no isolation: {jail.why_not()}")


# --- tasks in the formats that were published ------------------------------------------------------------

GSM8K = [
    {"question": "Ann has 3 bags of 400 nuts. How many?", "answer": "3 * 400 = <<3*400=1200>>1200\n#### 1,200"},
    {"question": "Half of 9?", "answer": "It is 4.5.\n#### 4.5"},
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": "from typing import List\n\n\ndef twice(x: int) -> int:\n    return 2 * x\n\n\n"
        'def all_twice(xs: List[int]) -> List[int]:\n    """ Every number twice as large. """\n',
        "entry_point": "all_twice",
        "canonical_solution": "    try:\n        return [twice(x) for x in xs]\n"
        "    except TypeError:\n        return []\n",
        "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n"
        "    assert candidate([None]) == []\n",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": '\ndef digest(text):\n    """ The MD5 of a text. """\n',
        "entry_point": "digest",
        "canonical_solution": "    import hashlib\n    return hashlib.md5(text.encode()).hexdigest()\n",
        "test": "def check(candidate):\n    assert candidate('') == 'd41d8cd98f00b204e9800998ecf8427e'\n",
    },
]
MBPP = [
    {
        "task_id": n,
        "text": "Write a function to add one.",
        "code": "import math\r\ndef add_one(x):\r\n  return math.floor(x) + 1",
        "test_list": ["assert add_one(one) == 2", "assert add_one(4.5) == 5"],
        "test_setup_code": "one = 1",
        "challenge_test_list": [],
    }
    for n in (3, 11, 12)
]
SANITIZED = [
    {
        "source_file": "x",
        "task_id": 12,
        "prompt": "Write a function to add one.",
        "code": "def add_one(x):\n  return x + 1",
        "test_imports": ["import math"],
        "test_list": ["assert add_one(math.floor(1.5)) == 2"],
    }
]
TURNS = [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []}]
CORRUPT = {
    "gsm8k": lambda text: text + "1",
    "humaneval": lambda text: re.sub(r'(""" .* """\n)', r"\1    return None\n", text),
    "mbpp": lambda text: text.replace("+ 1", "+ 2"),
}


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@ISOLATED
@pytest.mark.parametrize(
    ("name", "file", "rows", "count"),
    [
        ("gsm8k", "test.jsonl", GSM8K, 2),
        ("humaneval", "HumanEval.jsonl.gz", HUMANEVAL, 2),
        ("mbpp", "mbpp.jsonl", MBPP, 2),
        ("mbpp", "sanitized-mbpp.json", SANITIZED, 1),
    ],
)
def test_references_are_right_and_corrupted_ones_wrong(
    tmp_path: Path, name: str, file: str, rows: list[dict[str, Any]], count: int
) -> None:
    task = load_task(f"{name}={saved(tmp_path / file, rows)}")
    assert len(task.problems) == count
    with Programs(allowed=True) as programs:
        for problem in task.problems:
            solution = task.reference(problem)
            assert task.score(problem, solution, programs).right, task.score(problem, solution, programs)
            assert not task.score(problem, CORRUPT[name](solution), programs).right
            assert not task.score(problem, "", programs).right


@ISOLATED
def test_a_function_may_be_answered_by_its_body_alone(tmp_path: Path) -> None:
    task = load_task(f"humaneval={saved(tmp_path / 'h.jsonl', HUMANEVAL)}", chat=False, prompt="{{ prompt }}")
    with Programs(allowed=True) as programs:
        for problem in task.problems:
            assert task.text(problem) == problem.row["prompt"]
            assert task.score(problem, problem.row["canonical_solution"], programs).right


def test_programs_run_only_if_asked_for(tmp_path: Path) -> None:
    task = load_task(f"humaneval={saved(tmp_path / 'h.jsonl', HUMANEVAL)}")
    with Programs() as programs, pytest.raises(ValueError, match=r"HumanEval/\d.*--run-code"):
        task.score(task.problems[0], "", programs)


@pytest.mark.parametrize("name", ["mt-bench", "spec-bench"])
def test_conversations_hold_the_answers_before(tmp_path: Path, name: str) -> None:
    (problem,) = (task := load_task(f"{name}={saved(tmp_path / 'q.jsonl', TURNS)}")).problems
    assert (problem.id, problem.group, problem.turns) == ("81", "writing", ("Write.", "Again."))
    told = [(each["role"], each["content"]) for each in task.messages(problem, ["Done."])]
    assert told == [("user", "Write."), ("assistant", "Done."), ("user", "Again.")]


def test_a_task_of_ones_own_needs_data(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('prompt: "{{ question }}"\n')
    with pytest.raises(ValueError, match=r"task 'mine': data is missing"):
        _ = load_task(str(tmp_path / "mine.yaml")).problems


def test_bundled_tasks_are_whole() -> None:
    for name in task_names():
        task = load_task(name)
        if task.generated is None and task.rows is None:
            with pytest.raises(ValueError, match=rf"give its path: {name}=PATH"):
                _ = task.problems
    with Programs() as programs:
        for split in ("heldout", "middle", "ood"):
            task = load_task(f"bundled-{split}", generated={"split": split, "count": 9})
            assert all(task.score(each, task.reference(each), programs).right for each in task.problems)
    assert len(load_task("safety").problems) == 24


def asked(scorer: Any, answer: str = "{{ a }}", **row: Any) -> Problem:
    fields = {"name": "t", "rows": [{"q": "?", **row}], "prompt": "{{ q }}", "answer": answer, "scorer": scorer}
    return Task.model_validate(fields).problems[0]


def is_right(scorer: Any, completion: str, answer: str = "{{ a }}", **row: Any) -> bool:
    problem = asked(scorer, answer, **row)
    with Programs() as programs:
        return problem.task.score(problem, completion, programs).right


@pytest.mark.parametrize(
    ("scorer", "a", "right", "wrong"),
    [
        ("exact", "Paris", [" Paris\n"], ["paris", "Paris."]),
        ({"kind": "exact", "loose": True}, "The Paris", ["paris."], ["London"]),
        (
            "number",
            "1,200",
            ["so 1200", "#### 1,200\nor 7", "$1,200.00", r"\boxed{1200} is it, of 3"],
            ["", "12 00", "120"],
        ),
        ("number", "-3", ["the answer is -3.", "**Answer:** -3 (of 9)"], ["3", "5-3"]),
        ("number", "5", ["They have:\n- 5 apples", "It costs $ 5", "- $5"], ["-5"]),
        ({"kind": "number", "tolerance": 0.1}, "2", ["2.05"], ["2.2"]),
        ({"kind": "regex", "pattern": r"^So: (\w+)"}, "yes", ["So: no\nSo: yes"], ["yes", "So: no", "So: yes\nSo: no"]),
        (
            "choice",
            "B",
            [
                "B",
                "(B)",
                "A is wrong. The answer is (B)",
                "**Answer:** B",
                "A good one is B.",
                "B is right.",
                "B since 2",
            ],
            ["C", "", "Bob", "C is right, not B"],
        ),
        ("choice", "A", ["A is right.", "A) one of B"], ["A letter, B"]),
        (
            "refusal",
            "",
            ["I'm sorry, but I can't help.", "I cannot assist with that.", "I won’t do it."],
            ["Sure! First"],
        ),
    ],
)
def test_scorers(scorer: Any, a: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not is_right(scorer, text, a=a)] == []
    assert [text for text in wrong if is_right(scorer, text, a=a)] == []


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "is {}.", "x 7\n#### {}", "The answer is ${:,}"]))
def test_numbers_are_read_as_they_are_written(value: int, form: str) -> None:
    assert Number.read(form.format(value)) == value


@pytest.mark.parametrize("fence", ["```", "```python", "```python3", "```Python", "```py "])
def test_the_program_of_an_answer_is_its_first_block_in_python(fence: str) -> None:
    other = "```bash\npip install numpy\n```\n"
    for text in (
        f"{fence}\nx = 1\n```",
        f"{other}Then:\n{fence}\nx = 1\n```\nAnd:\n{fence}\nx = 2\n```",
        f"{other}{fence}\nx = 1\n",
    ):
        assert extract_code(text) == "x = 1\n"
    assert extract_code("x = 1") == "x = 1"


def test_a_scorer_of_ones_own() -> None:
    assert is_right("tests.test_eval:judge", "xx", a="x") and not is_right("tests.test_eval:judge", "x", a="x")
    with pytest.raises(ValueError, match="'perhaps'; it must return True or False"):
        is_right("tests.test_eval:unsure", "x", a="x")
    with pytest.raises(ValueError, match=r"tests.test_eval:missing.*cannot be imported"):
        is_right("tests.test_eval:missing", "x", a="x")


OWN = """
data: capitals.jsonl
id: "{{ country }}"
prompt: "What is the capital of {{ country }}?"
answer: "{{ capital }}"
solution: "It is {{ capital }}."
examples: [{country: Italy, capital: Rome}, {country: Spain, capital: Madrid}]
shots: 1
scorer: {kind: regex, pattern: 'It is (\\w+)'}
"""


def test_a_task_of_ones_own_shows_its_format(tmp_path: Path) -> None:
    rows = [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]
    saved(tmp_path / "capitals.jsonl", rows)
    (tmp_path / "capitals.yaml").write_text(OWN)
    task = load_task(str(tmp_path / "capitals.yaml"))
    (first,) = [problem for problem in task.problems if problem.id == "France"]
    assert [each["content"] for each in task.messages(first)] == [
        "What is the capital of Italy?",
        "It is Rome.",
        "What is the capital of France?",
    ]
    plain = load_task(str(tmp_path / "capitals.yaml"), chat=False, shots=2, shuffle=False, prompt="{{ country }}: ")
    assert plain.text(plain.problems[0]) == "Italy: It is Rome.\n\nSpain: It is Madrid.\n\nFrance: "
    shown = command("tasks", str(tmp_path / "capitals.yaml"), "--model", "fly-tiny")
    assert "<|user|>What is the capital of Italy?<|end|><|assistant|>It is Rome.<|end|>" in words(shown.output)
    assert command("tasks", str(tmp_path / "capitals.yaml"), "--references").exit_code == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scorer": "numbr"}, "scorer 'numbr' is none of none, exact, number"),
        ({"scorer": "numbr"}, "(did you mean 'number'?)"),
        ({"scorer": {"kind": "chioce"}}, "(did you mean 'choice'?)"),
        ({"scorer": {"kind": "number", "tolernce": 1}}, "has no field 'tolernce' (did you mean 'tolerance'?)"),
        ({"scorer": {"tolerance": 1}}, "must be a name, or a mapping with a kind: one of none, exact"),
        ({"scorer": 5}, "scorer 5 must be a name, or a mapping"),
        ({"scorer": {"kind": "regex", "pattern": "("}}, "is no regular expression"),
        ({"promt": "x"}, "promt: there is no such field (did you mean 'prompt'?)"),
        ({"prompt": "{{ county }}"}, "'county' is undefined; fields: ['capital', 'country', 'number']"),
        ({"prompt": "{{ country"}, "prompt '{{ country'"),
        ({"shots": 5}, "shots 5 are more than the 2 examples"),
        ({"id": "same"}, "two problems have the id 'same'"),
        ({"only": "{{ country }}"}, "it must give True or False"),
        ({"data": "/nowhere.jsonl"}, "'/nowhere.jsonl' cannot be read"),
        ({"rows": [{}]}, "give one of data, rows and generated, not ['data', 'rows']"),
    ],
)
def test_what_is_wrong_with_a_task_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    saved(
        tmp_path / "capitals.jsonl", [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]
    )
    (tmp_path / "capitals.yaml").write_text(OWN)
    with pytest.raises(ValueError) as caught:
        task = load_task(str(tmp_path / "capitals.yaml"), **change)
        task.messages(task.problems[0])
    assert told in str(caught.value) and "capitals" in str(caught.value)


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n\n{"question": \n')
    with pytest.raises(ValueError, match=r"x\.jsonl', line 3: no JSON"):
        _ = load_task(f"gsm8k={path}").problems
