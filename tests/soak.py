"""A soak: mixed load for minutes, against ``LLM`` and against a server. ``make soak``, or ``python -m tests.soak``.

Each stage is a draft on its own kernels, in a process of its own. Two threads ask for short greedy answers in a loop,
one for 32, 17 and 5 samples by turns, others for requests of all sorts, some of which they leave in the middle. Answers
are compared with those of the same request alone: all of temperature 0 under lossless rules, and sampled ones under
drafts that do not learn from what they saw, as what is drawn depends on what was drafted. At the end of a stage nothing
is held, no more files are open than before, and there is little more memory than in its first third. A server then ends
by SIGTERM in the middle of an answer, which is given to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fly import LLM, SamplingParams
from fly.backends.cpu import available, why_not
from fly.policies import parse_policy
from fly.types import Guarantee

MODEL = "fly-target"
EAGLE = "eagle3(fly-eagle3, nodes=12, depth=4, width=3)"
LEARN = "adaptive", "choose", "suffix", "eagle3"  # a head by what it kept of hidden states
MEGABYTES, FILES = 64, 2  # that a process may have grown by
RULES = ["exact", "exact", "block", "fly(theta=0.3, window=2, hold=2)", "exact | entropy(0.4) & ~control"]
FORMS = [{"regex": "[0-9]{1,3}( [0-9]{1,3}){0,9}"}, {"json_object": True}]


@dataclass(frozen=True)
class Stage:
    """``served`` or called, by a draft, on kernels."""

    draft: str
    kernels: str = "auto"
    served: bool = False

    def __str__(self) -> str:
        return f"{'server' if self.served else 'LLM'} {self.draft} {self.kernels}"


STAGES = [
    Stage("fly-draft"),
    Stage("fly-draft", served=True),
    Stage(EAGLE, "avx2"),
    Stage("ngram+model(fly-tiny)", "w4a8", served=True),
    Stage("suffix+fly-draft", "w8a8"),
    Stage("adaptive(tree(fly-draft, nodes=9, depth=4, width=3))", served=True),
]


@dataclass(frozen=True)
class Asked:
    """A request: its prompt, sampling parameters, rule and draft length."""

    prompt: str
    params: dict[str, Any]
    policy: str = "exact"
    k: int = 15

    def body(self) -> dict[str, Any]:
        """The same for a server."""
        params = dict(self.params)
        if (form := params.pop("structured", None)) is not None:
            params["structured_outputs"] = form
        return {"model": MODEL, "prompt": self.prompt, **params, "speculation": {"policy": self.policy, "k": self.k}}

    def is_settled(self, draft: str) -> bool:
        """Whether its text is the same whatever runs beside it."""
        lossless = parse_policy(self.policy).guarantee is Guarantee.LOSSLESS
        return lossless and (not self.params["temperature"] or not any(name in draft for name in LEARN))


GREEDY = Asked("Take the list", {"temperature": 0, "max_tokens": 8})
BURSTS = [
    Asked("Take the list", {"temperature": 1.0, "seed": n, "n": n, "max_tokens": 200, "ignore_eos": True})
    for n in (32, 17, 5)
]


def requests(count: int) -> list[Asked]:
    """Of all sorts, the same ones every time."""
    draw, made = random.Random(1), []
    for number in range(count):
        text = "Take the list " + " ".join(str(draw.randrange(10)) for _ in range(draw.randrange(3, 60)))
        params: dict[str, Any] = {"temperature": 0, "max_tokens": draw.randrange(1, 120)}
        if number % 2:
            params |= {"temperature": draw.choice([0.7, 1.0, 1.5]), "seed": number, "n": draw.choice([1, 2, 5])}
        kinds: list[dict[str, Any]] = [
            {}, {"ignore_eos": True}, {"stop": ["5"]}, {"presence_penalty": 0.5, "frequency_penalty": 0.2},
            {"repetition_penalty": 1.3}, {"structured": draw.choice(FORMS)}, {"top_p": 0.9, "top_k": 40},
            {"min_p": 0.05},
        ]  # fmt: skip
        made.append(Asked(text, params | draw.choice(kinds), draw.choice(RULES), draw.choice([0, 3, 9, 15])))
    return made


def ask(llm: LLM, asked: Asked) -> list[str]:
    (output,) = llm.generate([asked.prompt], SamplingParams(**asked.params), policy=asked.policy, k=asked.k)
    return [output.text, *(other.text for other in output.others)]


class Called:
    """An ``LLM`` in this process."""

    def __init__(self, stage: Stage) -> None:
        self.llm, self.process = LLM(MODEL, draft=stage.draft, kernels=stage.kernels, cache=1 << 14), os.getpid()

    def ask(self, asked: Asked) -> list[str]:
        return ask(self.llm, asked)

    def leave(self, asked: Asked, after: int) -> None:
        params = SamplingParams(**{**asked.params, "n": 1})
        stream = self.llm.stream(asked.prompt, params, policy=asked.policy, k=asked.k)
        for _, _ in zip(range(after), stream):
            pass
        stream.close()

    def is_idle(self) -> bool:
        return all(each.num_free == each.num_blocks for each in self.llm.scheduler.allocators)

    def end(self) -> None:
        self.llm.close()


class Served:
    """A server, a process of its own on a free port."""

    def __init__(self, stage: Stage) -> None:
        command = [
            sys.executable,
            "-m",
            "fly.serve",
            "--model",
            MODEL,
            "--draft",
            stage.draft,
            "--kernels",
            stage.kernels,
        ]
        command += ["--port", "0", "--max-waiting", "5000", "--cache", str(1 << 14)]
        self.log = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self.server = subprocess.Popen(command, stderr=self.log)
        self.process = self.server.pid
        while (found := re.search(r"running on (http://\S+)", self.said())) is None:
            assert self.server.poll() is None, self.said()
            time.sleep(0.1)
        self.http = httpx.Client(base_url=found[1], timeout=600, limits=httpx.Limits(max_keepalive_connections=0))

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    def ask(self, asked: Asked) -> list[str]:
        answer = self.http.post("/v1/completions", json=asked.body())
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    def leave(self, asked: Asked, after: int) -> None:
        with self.http.stream("POST", "/v1/completions", json={**asked.body(), "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for _, _ in zip(range(after), answer.iter_lines()):
                pass

    def is_idle(self) -> bool:
        gauges = dict(re.findall(r"^((?:vllm|fly):\w+)\{[^}]*\} (\S+)$", self.http.get("/metrics").text, re.MULTILINE))
        return not float(gauges["vllm:num_requests_running"]) and not float(gauges["vllm:kv_cache_usage_perc"])

    def end(self) -> None:
        """SIGTERM in the middle of a request, which is answered nevertheless."""
        texts: list[list[str]] = []
        last = threading.Thread(target=lambda: texts.append(self.ask(BURSTS[1])))
        last.start()
        while self.is_idle():
            time.sleep(0.01)
        self.server.send_signal(signal.SIGTERM)
        last.join()
        self.http.close()
        assert self.server.wait(60) == 0 and len(texts) == 1, self.said()


@dataclass
class Tally:
    """What has come of it so far. ``wrong`` are requests with the text that came and the one alone."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[Asked, list[str], list[str]]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def memory(process: int) -> float:
    """Resident megabytes."""
    return int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def files(process: int) -> int:
    """Open descriptors."""
    return len(os.listdir(f"/proc/{process}/fd"))


def eventually(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def alone(stage: Stage, pool: list[Asked]) -> dict[int, list[str]]:
    """The texts of those requests that are settled, one after the other with nothing beside them; of temperature 0 by
    the target without a draft."""
    plain = LLM(MODEL, None, kernels=stage.kernels)
    drafting = LLM(plain, stage.draft, kernels=stage.kernels)
    settled = {number: asked for number, asked in enumerate(pool) if asked.is_settled(stage.draft)}
    return {n: ask(drafting if asked.params["temperature"] else plain, asked) for n, asked in settled.items()}


def load(
    side: Called | Served, pool: list[Asked], wanted: dict[int, list[str]], ends: float, tally: Tally
) -> Iterator[None]:
    """Threads that ask until ``ends``; yields while they do."""

    def mixed(seed: int) -> Iterator[tuple[int, int | None]]:
        """Numbers of requests, and after how many pieces they are left."""
        draw = random.Random(seed)
        while True:
            number = draw.randrange(1 + len(BURSTS), len(pool))
            yield number, draw.randrange(5) if seed % 2 and draw.random() < 0.5 else None

    def over_and_over(*numbers: int) -> Iterator[tuple[int, int | None]]:
        while True:
            yield from ((number, None) for number in numbers)

    def run(plan: Iterator[tuple[int, int | None]]) -> None:
        try:
            for number, after in plan:
                if time.monotonic() > ends or tally.errors:
                    return
                if after is not None:
                    side.leave(pool[number], after)
                    tally.counts["left"] += 1
                    continue
                texts, own = side.ask(pool[number]), wanted.get(number)
                with tally.lock:
                    tally.counts["answers"] += len(texts)
                    tally.counts["compared"] += 0 if own is None else len(texts)
                    if own is not None and texts != own:
                        tally.wrong.append((pool[number], texts, own))
        except BaseException as error:
            tally.errors.append(error)

    plans = [over_and_over(0), over_and_over(0), over_and_over(*range(1, 1 + len(BURSTS))), *map(mixed, range(4))]
    threads = [threading.Thread(target=run, args=(plan,), daemon=True) for plan in plans]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        yield
        time.sleep(0.5)


def take(stage: Stage, seconds: float) -> None:
    """One stage. Raises ``AssertionError`` for what is wrong."""
    pool = [GREEDY, *BURSTS, *requests(60)]
    wanted = alone(stage, pool)
    side, tally = (Served if stage.served else Called)(stage), Tally()
    for asked in (GREEDY, *BURSTS[:1]):
        side.ask(asked)
    eventually(side.is_idle, "pages are held before anything was asked for")
    begun, opened, early, late = time.monotonic(), files(side.process), 0.0, 0.0
    shown = begun
    for _ in load(side, pool, wanted, begun + seconds, tally):
        now = time.monotonic()
        if now - begun < seconds / 3:
            early = max(early, memory(side.process))
        else:
            late = max(late, memory(side.process))
        if now - shown > 10:
            shown = now
            print(f"  {now - begun:4.0f} s  {dict(tally.counts)}  {memory(side.process):.0f} MB", flush=True)
    assert not tally.errors, tally.errors[:3]
    eventually(side.is_idle, "pages are held after all answers")
    eventually(lambda: files(side.process) <= opened + FILES, "more files are open than before")  # sockets close late
    left_open = files(side.process) - opened
    side.end()
    found = f"{dict(tally.counts)}, {len(tally.wrong)} differ"
    print(f"{stage}: {found}; {early:.0f} MB, {late - early:+.0f} later; {left_open:+} descriptors", flush=True)
    assert not tally.wrong, tally.wrong[:3]
    assert tally.counts["compared"], "no answer was compared"
    assert late - early < MEGABYTES, f"{late - early:.0f} MB more than in the first third"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--stage", type=int, help="the number of one of them, taken here, for all of the seconds")
    options = parser.parse_args()
    if available() == ["torch"]:
        raise SystemExit(f"there is no compiled code to soak: {why_not()}")
    if options.stage is not None:
        return take(STAGES[options.stage], options.seconds)
    failed = []
    for number, stage in enumerate(STAGES):
        print(f"{stage}, {options.seconds / len(STAGES):.0f} s", flush=True)
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.soak", "--stage", str(number)]
        ran = subprocess.run([*command, "--seconds", str(options.seconds / len(STAGES))])
        if ran.returncode:
            failed.append(f"{stage} (exit status {ran.returncode})")
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
