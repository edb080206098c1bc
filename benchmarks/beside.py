"""Libraries side by side, each in a process of its own: ``python -m benchmarks.beside LIBRARIES.yaml``.

The file lists the libraries. ``run`` is the command of a worker (``workers.py``); the target, the draft, the size of a
batch and the longest text are added to it::

    - {name: fly, run: python -m benchmarks.workers fly:w8a8 -, target: DIRECTORY, draft: DIRECTORY}
    - {name: vLLM, run: VENV/bin/python -m benchmarks.workers vllm -, target: ..., draft: ..., does: [plain]}
    - {name: vLLM, run: VENV/bin/python -m benchmarks.workers vllm:draft -, target: ..., draft: ..., does: [draft]}
    - {name: llama.cpp, run: python -m benchmarks.workers llama.cpp FOLDER, target: FILE.gguf, draft: FILE.gguf, ...}
    - {name: llama.cpp, run: python -m benchmarks.workers llama.cpp:7 FOLDER, target: ..., draft: ..., does: [draft]}

They take turns, prompt by prompt. Processes whose turn it is not are stopped, so that none of their threads spins.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
import yaml

from fly.cli.options import Json
from fly.cli.run import command
from fly.cli.show import console, note, table, write_json
from fly.extras.eval.task import load_task
from fly.extras.statistics import Estimate, bootstrap_ratio
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import Tokenizer, read_eos_ids

LENGTHS = (512, 2048)
ROWS = 8
WARM = 0.7  # the temperature of sampled speculation
PLAIN, DRAFT = ("plain", "draft")


@dataclass
class Request:
    """What a worker is asked; ``workers.py`` names the fields."""

    prompts: list[list[int]]
    tokens: int
    ends: list[int]
    draft: bool = False
    temperature: float = 0.0
    seed: int = 0
    logprobs: int | None = None


@dataclass
class Worker:
    """A library's process."""

    name: str
    run: str
    target: str
    draft: str
    does: list[str] = field(default_factory=lambda: [PLAIN, DRAFT])
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        most = max(LENGTHS) + 256
        words = [*shlex.split(self.run), self.target, self.draft, str(ROWS), str(most)]
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads},
            process_group=0,
        )  # fmt: skip
        self._read()

    def ask(self, request: Request) -> dict[str, Any]:
        """Let the process run until it has answered."""
        assert self.process is not None and self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        print(json.dumps(vars(request)), file=self.process.stdin, flush=True)
        answer = self._read()
        os.killpg(self.process.pid, signal.SIGSTOP)
        return answer

    def _read(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}: {self.run}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def memory(self) -> float:
        """Gigabytes that the process and its children hold, pages of files included."""
        assert self.process is not None
        held = 0
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int((path / "stat").read_text().rpartition(")")[2].split()[2]) == self.process.pid:
                    lines = (path / "status").read_text().splitlines()
                    held += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return held / 1024**2

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class Figures:
    """A library's results. Series have a number for each prompt, or for each turn."""

    name: str
    start: float = 0.0  # seconds from the start of the process to the first token
    memory: dict[str, float] = field(default_factory=dict)  # GB by what the process does
    first: list[float] = field(default_factory=list)  # seconds to the first token of each prompt
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of whole answers, by way of decoding
    ids: dict[str, list[list[int]]] = field(default_factory=dict)
    together: list[float] = field(default_factory=list)  # tokens a second of a batch
    reading: dict[int, list[float]] = field(default_factory=dict)  # seconds to the first token, by length

    def series(self, way: str) -> tuple[list[float], list[float]]:
        """The tokens after the first of each answer, and their seconds."""
        tokens = [float(len(ids) - 1) for ids in self.ids[way]]
        return tokens, [whole - first for whole, first in zip(self.seconds[way], self.first)]

    def rate(self, way: str) -> float:
        tokens, seconds = self.series(way)
        return sum(tokens) / sum(seconds)


def over(one: Figures, way: str, other: Figures, than: str) -> Estimate:
    """How many times the tokens a second of ``other`` ``one`` has, with an interval over the prompts."""
    tokens, seconds = one.series(way)
    base_tokens, base_seconds = other.series(than)
    return bootstrap_ratio([tokens, base_seconds], [seconds, base_tokens])


WAYS = {"autoregressive": (PLAIN, 0.0), "speculation": (DRAFT, 0.0), f"speculation at {WARM}": (DRAFT, WARM)}
AR, SPECULATION, SAMPLED = WAYS


def measure(
    workers: Sequence[Worker],
    prompts: Sequence[list[int]],
    ends: list[int],
    tokens: int,
    turns: int,
    vocabulary: int,
    told: Callable[[str], None],
    keep: Callable[[list[Figures]], None],
) -> list[Figures]:
    """Start every library alone, and then let all take turns. ``keep`` is given the figures so far, now and then."""
    found = {worker.name: Figures(worker.name) for worker in workers}
    for worker in workers:
        told(f"start {worker.name} ({', '.join(worker.does)})")
        began, draft = time.perf_counter(), PLAIN not in worker.does
        worker.start()
        worker.ask(Request([prompts[0]], 1, ends, draft))
        figures = found[worker.name]
        if not draft:
            figures.start = time.perf_counter() - began
        for kind in worker.does:
            worker.ask(Request([prompts[-1]], 16, ends, kind == DRAFT))
            figures.memory[kind] = worker.memory()
    for number, prompt in enumerate(prompts):
        told(f"prompt {number + 1} of {len(prompts)}")
        keep(list(found.values()))
        for worker in workers:
            figures = found[worker.name]
            if PLAIN in worker.does:
                figures.first.append(worker.ask(Request([prompt], 1, ends))["seconds"])
            for way, (kind, temperature) in WAYS.items():
                if kind in worker.does:
                    answer = worker.ask(Request([prompt], tokens, ends, kind == DRAFT, temperature, number))
                    figures.seconds.setdefault(way, []).append(answer["seconds"])
                    figures.ids.setdefault(way, []).append(answer["ids"][0])
    plain = [worker for worker in workers if PLAIN in worker.does]
    batch = [prompts[number % len(prompts)] for number in range(ROWS)]
    rng = random.Random(1)
    for turn in range(turns):
        told(f"batches and long prompts, turn {turn + 1} of {turns}")
        keep(list(found.values()))
        for worker in plain:
            answer = worker.ask(Request(batch, tokens, ends))
            found[worker.name].together.append(sum(map(len, answer["ids"])) / answer["seconds"])
        for length in LENGTHS:
            for worker in plain:
                text = [rng.randrange(vocabulary) for _ in range(length)]
                seconds = worker.ask(Request([text], 1, []))["seconds"]
                found[worker.name].reading.setdefault(length, []).append(seconds)
    return list(found.values())


def differences(
    fly: Worker, own: Figures, other: Figures, prompts: Sequence[list[int]], ends: list[int]
) -> list[float]:
    """Where ``other``'s greedy answers first differ from ``own``'s: the nats between fly's two likeliest tokens."""
    gaps = []
    for prompt, ours, theirs in zip(prompts, own.ids[AR], other.ids[AR]):
        if ours != theirs:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs)))
            answer = fly.ask(Request([[*prompt, *ours[:common]]], 1, ends, logprobs=2))
            gaps.append(answer["logprobs"][0][0] - answer["logprobs"][0][1])
    return gaps


@command
def main(
    libraries: Annotated[Path, typer.Argument(help="A YAML file that lists the libraries; fly is the first.")],
    task: Annotated[list[str], typer.Option(help="A task as NAME=FILE; repeatable.")],
    problems: Annotated[int, typer.Option(min=1, help="Problems of each task.")] = 4,
    skip: Annotated[int, typer.Option(min=0, help="Leave out this many first problems.")] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of an answer.")] = 48,
    turns: Annotated[int, typer.Option(min=1, help="Turns of batches and long prompts.")] = 2,
    json_: Json = None,
) -> None:
    """Autoregression, speculation, batches, long prompts, memory and start of libraries side by side."""
    workers = [Worker(**entry) for entry in yaml.safe_load(libraries.read_text(encoding="utf-8"))]
    checkpoint = open_checkpoint(workers[0].target)
    tokenizer, vocabulary = Tokenizer.load(checkpoint), checkpoint.config.vocab_size
    if tokenizer is None:
        raise ValueError(f"{workers[0].target} has no tokenizer, and tasks are texts")
    prompts = [
        list(tokenizer.apply_chat_template(loaded.messages(problem)))
        for loaded in map(load_task, task)
        for problem in loaded.problems[skip : skip + problems]
    ]
    ends = sorted(read_eos_ids(checkpoint, vocabulary))

    def keep(found: list[Figures]) -> None:  # an interrupted run leaves what it has
        write_json(json_, [vars(figures) for figures in found])

    try:
        found = measure(workers, prompts, ends, tokens, turns, vocabulary, note, keep)
        gaps = {figures.name: differences(workers[0], found[0], figures, prompts, ends) for figures in found}
    finally:
        for worker in workers:
            worker.stop()
    write_json(json_, [{**vars(figures), "gaps": gaps[figures.name]} for figures in found])
    console.print(result_table(found, gaps, f"{libraries.stem}, {len(prompts)} prompts, {tokens} tokens at most"))


def result_table(found: Sequence[Figures], gaps: dict[str, list[float]], title: str) -> Any:
    """A line for each measure and a column for each library."""

    def spread(estimate: Estimate) -> str:
        return f"{estimate.value:.2f}× ({estimate.low:.2f}–{estimate.high:.2f})"

    def ratio_to(other: Figures, way: str) -> str:
        return "" if other is found[0] or way not in other.ids else spread(over(found[0], way, other, way))

    def equal(one: list[list[int]], other: list[list[int]]) -> str:
        return f"{sum(a == b for a, b in zip(one, other))}/{len(one)}"

    rows: dict[str, Callable[[Figures], str]] = {}
    for way in WAYS:
        rows[f"{way}, tokens/s"] = lambda f, way=way: f"{f.rate(way):.1f}" if way in f.ids else "–"
        rows[f"{way}, fly over"] = lambda f, way=way: ratio_to(f, way)
        if way != AR:
            rows[f"{way}, over own AR"] = lambda f, way=way: spread(over(f, way, f, AR)) if way in f.ids else "–"
    rows[f"batch of {ROWS}, tokens/s"] = lambda f: f"{median(f.together):.1f}"
    for length in LENGTHS:
        rows[f"prompt of {length}, s"] = lambda f, length=length: f"{median(f.reading[length]):.2f}"
    rows["first token from the start, s"] = lambda f: f"{f.start:.1f}"
    rows["memory, GB: target"] = lambda f: f"{f.memory[PLAIN]:.1f}"
    rows["with the draft"] = lambda f: f"{f.memory[DRAFT]:.1f}" if DRAFT in f.memory else "–"
    rows["texts as fly's AR"] = lambda f: equal(f.ids[AR], found[0].ids[AR])
    rows["widest gap where not, nats"] = lambda f: f"{max(gaps[f.name]):.2f}" if gaps[f.name] else "–"
    rows["speculation as own AR"] = lambda f: equal(f.ids[SPECULATION], f.ids[AR]) if SPECULATION in f.ids else "–"
    columns: dict[str, Callable[[str], str]] = {title: lambda row: row}
    columns |= {f.name: lambda row, f=f: rows[row](f) for f in found}
    return table("", list(rows), columns)


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
