"""Drafts of one target in turns, problem by problem: ``python -m benchmarks.pairs TASK=FILE RECORDS.jsonl ...``.

The target alone and every draft answer each problem greedily. The tables show the speed of each draft over
autoregressive decoding, and of the last draft over the fastest other way, with intervals over the problems. ``--spin``
keeps one core busy meanwhile. An interrupted run goes on where it ended; a finished one prints its tables again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

import fly
from fly.cli.run import command
from fly.cli.show import console, progress, table
from fly.extras.eval.task import load_task
from fly.extras.statistics import Estimate, bootstrap_ratio

ALONE = "none"
Records = list[dict[str, Any]]


@contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Keep one core busy with another process, if ``wanted``."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def answer(llm: fly.LLM, prompt: list[int], tokens: int) -> tuple[float, fly.Output]:
    """Answer greedily, from an empty prompt cache. Return the seconds and the output."""
    llm.scheduler.forget()
    start = time.perf_counter()
    (output,) = llm.generate([prompt], fly.SamplingParams(temperature=0.0, max_tokens=tokens))
    return time.perf_counter() - start, output


def decode(llms: dict[str, fly.LLM], prompt: list[int], tokens: int) -> dict[str, Any]:
    """Let each of ``llms`` answer. Return its token ids, and the seconds to the first token and of the whole answer."""
    found = {}
    for name, llm in llms.items():
        first, _ = answer(llm, prompt, 1)
        seconds, output = answer(llm, prompt, tokens)
        found[name] = {"first": first, "s": seconds, "ids": list(output.token_ids), "rounds": output.stats.rounds}
    return found


def speed_over(records: Records, one: str, other: str, whole: bool = False) -> Estimate:
    """Divide the tokens a second of ``one`` by those of ``other``. ``whole`` counts the prompt's time too."""

    def series(name: str) -> tuple[list[float], list[float]]:
        answers = [record["arms"][name] for record in records]
        tokens = [len(answer["ids"]) - (not whole) for answer in answers]
        return tokens, [answer["s"] - (0.0 if whole else answer["first"]) for answer in answers]

    (tokens, seconds), (other_tokens, other_seconds) = series(one), series(other)
    return bootstrap_ratio([tokens, other_seconds], [seconds, other_tokens])


def print_results(records: Records, title: str) -> None:
    names = list(records[0]["arms"])

    def shown(one: str, other: str, whole: bool = False) -> str:
        ratio = speed_over(records, one, other, whole)
        return f"{ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"

    def answers(name: str) -> list[Any]:
        return [record["arms"][name] for record in records]

    def tau(name: str) -> float:
        return sum(len(a["ids"]) - 1 for a in answers(name)) / max(1, sum(a["rounds"] for a in answers(name)))

    def equal(name: str) -> int:
        return sum(one["ids"] == other["ids"] for one, other in zip(answers(name), answers(ALONE)))

    columns = {
        "draft": lambda name: name,
        "over AR": lambda name: shown(name, ALONE),
        "with the prompt": lambda name: shown(name, ALONE, whole=True),
        "τ": lambda name: f"{tau(name):.1f}",
        "same texts": lambda name: f"{equal(name)}/{len(records)}",
    }
    console.print(table(f"{title}, {len(records)} problems", names, columns))
    last = names[-1]
    for whole in (False, True):
        best = max(names[:-1], key=lambda name: speed_over(records, name, ALONE, whole).value)
        each = median(speed_over([record], last, best, whole).value for record in records)
        ending = "with the prompt" if whole else "decoding alone"
        console.print(f"{last} over {best}, {ending}: {shown(last, best, whole)}, median of problems {each:.2f}×")


def _named(draft: str) -> tuple[str, str]:
    name, _, text = draft.partition("=")
    if not name or not text or name.count("(") > name.count(")"):  # the "=" of an option in a draft's text
        raise ValueError(f"--draft {draft!r} has no name: write NAME=DRAFT")
    return name, text


@command
def main(
    task: Annotated[str, typer.Argument(help="A task as NAME=FILE.")],
    records: Annotated[Path, typer.Argument(help="A file of JSON lines, one for each problem.")],
    model: Annotated[str, typer.Option(help="The target.")],
    draft: Annotated[list[str], typer.Option(help="A draft as NAME=DRAFT; repeatable.")],
    kernels: Annotated[str, typer.Option(help="As in fly eval.")] = "auto",
    problems: Annotated[int, typer.Option(min=1, help="How many problems.")] = 40,
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of an answer.")] = 96,
    spin: Annotated[bool, typer.Option("--spin", help="Keep one core busy with another process.")] = False,
) -> None:
    """Compare the speed of drafts with autoregressive decoding and with each other, in turns."""
    drafts = dict(map(_named, draft))
    kept = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    asked = load_task(task)
    numbers = sorted(set(range(min(problems, len(asked.problems)))) - {record["i"] for record in kept})
    if numbers:
        llms = {ALONE: fly.LLM(model, kernels=kernels)}
        for name, text in drafts.items():
            llms[name] = fly.LLM(llms[ALONE], text)
        for llm in llms.values():  # the first answer allocates, and reads the weights into the page cache
            answer(llm, asked.prompt_ids(llm, asked.problems[-1]), 4)
        with progress(len(numbers), "problems") as advance:
            for number in numbers:
                prompt = asked.prompt_ids(llms[ALONE], asked.problems[number])
                names = list(llms)
                turned = names[number % len(names) :] + names[: number % len(names)]
                with busy_core(spin):
                    found = decode({name: llms[name] for name in turned}, prompt, tokens)
                kept.append({"i": number, "arms": {name: found[name] for name in names}})
                with records.open("a") as file:
                    print(json.dumps(kept[-1]), file=file)
                advance()
    print_results(kept, f"{task.partition('=')[0]}, {tokens} tokens at most")


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
