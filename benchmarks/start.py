"""Start-up time, memory and full caches: ``python -m benchmarks.start``."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import fly
from benchmarks.twins import save_twin, twin
from fly.backends import executor_of
from fly.extras.eval.timed import Setting, timed
from fly.models import load_model
from fly.models.bundled import resolve_checkpoint
from fly.models.bundled.tasks import problems
from fly.policies import Exact, FLy

GREEDY = fly.SamplingParams(temperature=0.0, max_tokens=400)


def seconds(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def resident() -> float:
    """Memory of this process in megabytes."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def starts() -> None:
    command = ("-m", "fly", "generate", "Take the list 4 9 5 7. Reverse it.", "--max-tokens", "1")
    for _ in range(3):
        whole, torch, both = (
            seconds(sys.executable, *what) for what in (command, ("-c", "import torch"), ("-c", "import torch, fly"))
        )
        print(f"one token of the pair {whole:.2f} s; import torch {torch:.2f} s, and fly {both - torch:.2f} s more")


def loads() -> None:
    source = resolve_checkpoint("fly-target")
    with tempfile.TemporaryDirectory() as directory:
        save_twin(twin(load_model(source, "auto", "cpu"), 4, 9), source, Path(directory))
        file = max(Path(directory).glob("*.safetensors"), key=os.path.getsize)
        for kernels in ("auto", "auto", "auto", "w8a8", "w8a8"):
            times = [time.perf_counter()]
            size = len(file.read_bytes())
            times.append(time.perf_counter())
            model = load_model(Path(directory), "auto", "cpu")
            times.append(time.perf_counter())
            executor_of(model, kernels)
            times.append(time.perf_counter())
            read, load, pack = (after - before for before, after in pairwise(times))
            print(f"{size / 1e6:.0f} MB: read {read:.2f} s, loaded {load:.2f} s, packed for {kernels} {pack:.2f} s")


def grows() -> None:
    llm = fly.LLM("fly-target", draft="ngram+fly-draft", policy=FLy())
    short = fly.SamplingParams(temperature=0.0, max_tokens=16)
    for requests in (1_000, 10_000):
        for first in range(0, requests, 100):
            texts = [f"Take the list {n % 97} {n % 89} {n % 83}. Reverse it." for n in range(first, first + 100)]
            llm.generate([llm.chat_prompt(text) for text in texts], short)
        print(f"{resident():.1f} MB after {requests:,} requests more")


def fills() -> None:
    """The same problems again and again, where the cache holds little else than what they left there."""
    for kernels in ("auto", "w8a8"):
        plain = fly.LLM("fly-target", kernels=kernels, cache=1024)
        pair = fly.LLM(plain, "fly-draft", cache=1024)
        for setting in (Setting("AR", plain, 0), Setting("exact", pair, 15, Exact()), Setting("fly", pair, 15, FLy())):
            speeds = []
            for _ in range(6):
                done = [timed(setting, plain.chat_prompt(p.prompt), GREEDY) for p in problems(None, "heldout", 0, 12)]
                speeds.append(sum(o.stats.emitted for o, _ in done) / sum(times.decoding for _, times in done))
            print(f"{kernels}, a cache of 1,024 tokens, {setting.name}: " + ", ".join(f"{s:,.0f}" for s in speeds))


for part in (starts, loads, grows, fills):
    part()
