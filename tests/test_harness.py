"""fly in EleutherAI's lm-evaluation-harness: the harness's own transformers model says the same of the same checkpoint,
and so does its client of servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from typer.testing import CliRunner

from fly import LLM, cli
from fly.extras.eval.harness import Fly
from fly.models.bundled import resolve_checkpoint
from fly.models.bundled.tasks import problems
from tests.serving import MODEL, running

PROBLEMS = problems("arithmetic", "heldout", n=6)


def instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_it_says_what_the_harness_s_own_model_says() -> None:
    pytest.importorskip("accelerate")
    theirs = get_model("hf")(pretrained=str(resolve_checkpoint(MODEL)), dtype="float32", device="cpu", batch_size=4)
    ours = Fly(MODEL, draft="ngram", policy="exact", dtype="float32", k=4, batch_size="auto")
    assert (ours.eot_token_id, ours.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)
    assert ours.max_length == theirs.max_length == 1024
    story = " ".join(problem.solution for problem in PROBLEMS)
    pairs = [(p.prompt + "\n", f"{answer} dollars. ") for p in PROBLEMS[:3] for answer in (p.answer, "7", "")]
    pairs += [("", "He pays"), (f"{story} " * 12, f" {PROBLEMS[0].solution}"), ("Trailing spaces   ", "4")]
    for ours_of, theirs_of in zip(
        ours.loglikelihood(instances("loglikelihood", *pairs), True),
        theirs.loglikelihood(instances("loglikelihood", *pairs), True),
    ):
        assert ours_of == (pytest.approx(theirs_of[0], abs=1e-3), theirs_of[1])
    texts = [(story,), ("4",), (f"{story} " * 12,)]
    assert len(ours.tok_encode(texts[-1][0])) > 2 * ours.max_length
    rolled = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), True)
    assert ours.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), True) == pytest.approx(
        rolled, abs=1e-2
    )
    chats = [ours.apply_chat_template([{"role": "user", "content": problem.prompt}]) for problem in PROBLEMS]
    assert chats[0] == theirs.apply_chat_template([{"role": "user", "content": PROBLEMS[0].prompt}])
    begun = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "I think "}]
    assert ours.apply_chat_template(begun, False).rstrip() == theirs.apply_chat_template(begun, False).rstrip()
    assert ours.chat_template(True) == theirs.chat_template(True)
    asked = [
        (chat, {"until": until, "max_gen_toks": 40, "do_sample": False})
        for chat in chats
        for until in ([], [".", "\n"])
    ]
    wanted = theirs.generate_until(instances("generate_until", *asked), True)
    assert ours.generate_until(instances("generate_until", *asked), True) == wanted
    info = ours.get_model_info()
    assert ours.stats.drafted and (info["fly_draft"], info["fly_guarantee"]) == ("ngram", "lossless")


def write_tasks(folder: Path) -> None:
    """A choice and a generation task, of JSON lines."""
    with (folder / "sums.jsonl").open("w") as lines:
        for problem in PROBLEMS:
            choices = [problem.answer, str(int(problem.answer) + 1)]
            work = problem.solution.rpartition("####")[0] + "####"
            row = {"question": problem.prompt, "work": work, "choices": choices, "answer": problem.answer}
            lines.write(json.dumps(row) + "\n")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
    }
    chat = "<|begin|><|user|>{{question}}<|end|><|assistant|>"
    choice = {
        "task": "sums_choice",
        "output_type": "multiple_choice",
        "doc_to_text": chat + "{{work}}",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    generate = {
        "task": "sums_generate",
        "output_type": "generate_until",
        "doc_to_text": chat,
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n\n", "."], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (choice, generate):
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**common, **task}))


def test_its_tasks_run_here_and_through_the_server(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    found = []
    with running(draft="ngram") as here:
        client = {"model": MODEL, "base_url": f"{here.url}/v1/completions", "max_length": 1024}
        ours = {"model": MODEL, "draft": "ngram", "dtype": "float32"}
        for model, arguments, size in (("fly", ours, "auto"), ("local-completions", client, 4)):
            tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
            names = ["sums_choice", "sums_generate"]
            results = simple_evaluate(model, arguments, names, batch_size=size, task_manager=tasks, bootstrap_iters=0)
            found.append({name: [sample["filtered_resps"] for sample in results["samples"][name]] for name in names})
            if model == "fly":
                assert results["config"]["fly_policy"] == "exact" and results["config"]["fly_generated"]
    by_fly, by_client = found
    for ours_of, theirs_of in zip(by_fly["sums_choice"], by_client["sums_choice"], strict=True):
        assert [greedy for _, greedy in ours_of] == [greedy for _, greedy in theirs_of]
        assert [value for value, _ in ours_of] == pytest.approx([value for value, _ in theirs_of], abs=1e-3)
        assert ours_of[0][0] > ours_of[1][0]  # the right one
    assert by_fly["sums_generate"] == by_client["sums_generate"]
    assert all(len(text) > 10 and "." not in text for (text,) in by_fly["sums_generate"]), by_fly["sums_generate"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cascade": 3}, "model_args \\['cascade'\\]: unknown; choose from model, draft, policy, batch_size"),
        ({"batch_size": 0}, "batch_size 0 must be 'auto' or a number"),
        ({"policy": "nonsense"}, "nonsense"),
        ({"k": -1}, "k -1"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fly(MODEL, **options)


def test_bad_requests_are_named() -> None:
    with LLM(MODEL) as llm:
        model = Fly(llm)
        with pytest.raises(ValueError, match="has its own"):
            Fly(llm, draft="ngram")
        with pytest.raises(ValueError, match="generation_kwargs \\['beams'\\]: unknown; choose from until"):
            model.generate_until(instances("generate_until", ("A", {"until": [], "beams": 3})), True)
        with pytest.raises(ValueError, match="chat template 'nosuch': model 'fly' has \\['default'\\]"):
            model.chat_template("nosuch")


def test_the_command_is_the_harness_s() -> None:
    result = CliRunner().invoke(cli.app, ["harness", "run", "--help"])
    assert result.exit_code == 0 and "--include_path" in result.output
