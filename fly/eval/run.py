"""Runs: decode every problem of a plan's tasks in every way, into a folder that loses nothing if the run is killed."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import yaml

from fly.backends.cpu.library import TORCH, chosen
from fly.drafts.stops import usual_reach
from fly.eval.plan import AUTOREGRESSIVE, Plan, Way
from fly.eval.recording import Recorder, recorded
from fly.eval.records import Appender, Key, Records, read_records
from fly.eval.scorers import Programs
from fly.eval.task import Problem, Task
from fly.eval.timed import Completion, Setting, complete
from fly.llm import LLM
from fly.models.tokenizer import TextStream
from fly.types import SamplingParams, Why

__all__ = ["Turn", "check_folder", "decode_run", "environment", "remaining", "score_run"]

_WARM_TOKENS = 24
_LETTERS = {Why.MATCH: "m", Why.RELAXED: "r", Why.CORRECTION: "c", Why.BONUS: "b"}


@dataclass(frozen=True)
class Turn:
    """One completion that a plan asks for. ``number`` is the index of the problem in its task."""

    key: Key
    number: int
    task: Task
    problem: Problem
    way: Way


def turns_of(plan: Plan) -> Iterator[Turn]:
    """All completions of a plan, in order. The ways take turns at each problem (or at each few problems that are
    decoded together), so that a busy moment of the machine affects all of them; which way comes first rotates. At
    temperature 0 seeds change nothing, so only the first is used."""
    tasks, ways = plan.loaded_tasks(), plan.ways
    for part, first in enumerate(range(0, max(limit for _, limit in tasks.values()), plan.together)):
        for task, limit in tasks.values():
            few = list(enumerate(task.problems[first : min(first + plan.together, limit)], first))
            for temperature in plan.temperatures:
                for seed in plan.seeds if temperature else plan.seeds[:1]:
                    for way in ways[part % len(ways) :] + ways[: part % len(ways)]:
                        for turn in range(max((len(problem.turns) for _, problem in few), default=0)):
                            for number, problem in few:
                                if turn < len(problem.turns):
                                    key = Key(task.name, problem.id, turn, seed, temperature, way.label)
                                    yield Turn(key, number, task, problem, way)


def remaining(plan: Plan, records: Records) -> list[Turn]:
    """The completions that have no record yet."""
    return [turn for turn in turns_of(plan) if turn.key not in records.completions]


def check_folder(plan: Plan, folder: Path) -> None:
    """Write the plan into a new folder, or check that the folder was begun with the same plan.

    A later plan may ask for more problems or tasks, and may allow programs to run.

    Raises ``ValueError`` with every other setting that has changed: results of both settings would be mixed up.
    """
    fields = plan.model_dump(mode="json")
    loaded = plan.loaded_tasks()
    tasks = {
        name: {"digest": task.digest, "scorer": task.scorer.kind, "scores": task.scorer.scores}
        for name, (task, _) in loaded.items()
    }
    path = folder / "plan.yaml"
    if path.exists():
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
        free = {"tasks", "limit", "run_code"}
        changed = [
            f"{name}: {before['plan'].get(name, other)!r} then, {value!r} now"
            for (name, value), other in zip(fields.items(), Plan().model_dump(mode="json").values())
            if name not in free and before["plan"].get(name, other) != value
        ]
        changed += [
            f"task {name}: its file or its data have changed"
            for name, facts in tasks.items()
            if before["tasks"].get(name, facts) != facts
        ]
        if changed:
            raise ValueError(f"{folder} was begun with other settings; {'; '.join(changed)}. Give a new folder.")
        tasks = {**before["tasks"], **tasks}
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"plan": fields, "tasks": tasks}, sort_keys=False, allow_unicode=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def environment(llm: LLM, label: str) -> dict[str, Any]:
    """The software, kernels and hardware that make records; ``id`` is a digest of them."""
    executor = llm.engine.runner.executor
    facts = {
        "kind": "environment",
        "fly": version("flyspec"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": _processor() if executor.device.type == "cpu" else torch.cuda.get_device_name(executor.device),
        "threads": torch.get_num_threads(),
        "device": str(executor.device),
        "dtype": str(executor.dtype).removeprefix("torch."),
        "kernels": executor.kernels,
        "model": label,
    }
    return {"id": hashlib.sha256(repr(facts).encode()).hexdigest()[:8], **facts}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def decode_run(
    plan: Plan,
    folder: Path,
    todo: list[Turn],
    records: Records,
    advance: Callable[[dict[str, Any]], None] = lambda record: None,
    ranks: Any = None,
) -> None:
    """Decode the completions ``todo`` of a run, and append a record of each.

    ``advance(record)`` is called after each completion. ``ranks`` are the processes that share the models: all of them
    make this call, and the first writes.
    """
    if plan.record and ranks is not None:
        raise ValueError("record: blocks are recorded where one process has the whole model, not among ranks")
    settings = _settings(plan, [turn.way for turn in todo], ranks)
    # Warm every way up, on a prompt that no task has.
    warm = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_WARM_TOKENS)
    for setting in settings.values():
        complete(setting, [[0, 1, 2, 3]] * plan.together, [warm] * plan.together, clocked=True)
    base = next(iter(settings.values())).llm
    around = environment(base, plan.model)
    with nullcontext() if ranks is not None and not ranks.leads else Appender(folder / "records.jsonl") as file:
        if file is not None and around["id"] not in records.environments:
            file.write(around)
            records.environments[around["id"]] = around
        # Problems that are decoded together have everything in common but the problem.
        for _, group in groupby(todo, lambda turn: (turn.number // plan.together, turn.key._replace(problem=""))):
            turns = list(group)
            key, setting = turns[0].key, settings[turns[0].key.way]
            prompts = [_prompt(turn, records, setting.llm) for turn in turns]
            params = [
                SamplingParams(
                    temperature=key.temperature,
                    top_p=plan.top_p,
                    top_k=plan.top_k,
                    seed=_row_seed(turn.key),
                    max_tokens=plan.max_tokens or turn.task.max_tokens,
                    stop=turn.task.stop,
                )
                for turn in turns
            ]
            for allocator in setting.llm.scheduler.allocators():
                allocator.forget()  # otherwise the next way would find the prompt in the cache
            records_blocks = plan.record and key.temperature == 0 and turns[0].way.exact
            try:
                with recorded(setting.llm) if records_blocks else nullcontext() as recorder:
                    completions = complete(setting, prompts, params, clocked=True)
            except ValueError as error:
                named = ", ".join(turn.problem.id for turn in turns)
                place = f"task {key.task!r}, problem {named}"
                raise ValueError(f"{place}: {error} (the task's 'only' leaves problems out)") from None
            # A recording is written before its line in records.jsonl, so that every line has its file.
            for turn, prompt, done in zip(turns, prompts, completions):
                record = _record(turn, done, around["id"], setting.llm)
                if recorder is not None:
                    record["blocks"] = _save_blocks(folder, turn, recorder, prompt, done, setting.llm)
                records.completions[turn.key] = record
                if file is not None:
                    file.write(record)
                advance(record)


def _prompt(turn: Turn, records: Records, llm: LLM) -> list[int]:
    """The prompt of a turn, with the answers to the turns before it."""
    before = [records.completions[turn.key._replace(turn=n)]["text"] for n in range(turn.key.turn)]
    return turn.task.prompt_ids(llm, turn.problem, before)


def _settings(plan: Plan, ways: list[Way], ranks: Any) -> dict[str, Setting]:
    """The loaded models of each way, by label. All share the target's weights, and each draft is loaded once."""
    options: dict[str, Any] = {name: getattr(plan, name) for name in ("dtype", "device", "kernels", "cache_bytes")}
    if early := plan.exits is not None and plan.kernels == "auto":
        options["kernels"] = TORCH  # exits run on PyTorch, and the ways they are compared with must do the same
    base = LLM(plan.model, deterministic=plan.deterministic, ranks=ranks, **options)
    if early:  # drafts may run on compiled kernels
        on_cpu = base.engine.runner.executor.device.type == "cpu"
        options["kernels"] = chosen() if on_cpu else plan.kernels
    models: dict[tuple[str, str | None], LLM] = {("none", None): base}
    found = {}
    for way in dict.fromkeys(ways):
        if (key := (way.draft, way.exits)) not in models:
            models[key] = LLM(base, way.draft, ranks=ranks, exits=way.exits, **options)
        found[way.label] = Setting(way.label, models[key], way.k, way.policy)
    return found


def _row_seed(key: Key) -> int:
    """The seed of a completion, which is the same for every way."""
    text = f"{key.task}/{key.problem}/{key.turn}/{key.seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _record(turn: Turn, done: Completion, around: str, llm: LLM) -> dict[str, Any]:
    """The record of a completion. ``why`` has one letter a token (m: match, r: relaxed, c: correction, b: bonus),
    ``ends`` says where the text of each token ends, and ``excused`` has for each relaxed token its place, the clause,
    and the target's own choice."""
    key, output, stats = turn.key, done.output, done.output.stats
    counts = ("prompt_tokens", "generated", "rounds", "emitted", "drafted", "accepted", "relaxed", "nats", "layers")
    return {
        "kind": "completion",
        **key._asdict(),
        "number": turn.number,
        "group": turn.problem.group,
        "turns": len(turn.problem.turns),
        **({"asked": turn.problem.turns[key.turn]} if key.way == AUTOREGRESSIVE else {}),
        "text": output.text,
        "token_ids": output.token_ids,
        "why": "".join(_LETTERS[token.why] for token in output.provenance),
        "ends": _ends(output.text, output.token_ids, llm),
        "excused": [
            [place, token.clause, token.target_choice, _written(llm, token.target_choice)]
            for place, token in enumerate(output.provenance)
            if token.why == Why.RELAXED
        ],
        "finish_reason": output.finish_reason,
        **{name: getattr(stats, name) for name in counts},
        "gates": {name: [gate.asked, gate.passed] for name, gate in stats.gates.items()},
        "drafts": done.drafts,
        "policy": str(output.policy),
        "guarantee": output.guarantee.value,
        "reach": _reach(llm, turn.way),
        "seconds": {name: value for name, value in asdict(done.times).items() if name != "judged"},
        "judged": done.times.judged,
        "row_seed": _row_seed(key),
        "environment": around,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _reach(llm: LLM, way: Way) -> float | None:
    """The reach at which a way's drafts stop by themselves; None if they do not, or stop by measured times."""
    reach = getattr(llm.draft, "reach", 0.0)
    return usual_reach(reach, way.policy) if way.k and reach != 0.0 else None


def _save_blocks(folder: Path, turn: Turn, recorder: Recorder, prompt: list[int], done: Completion, llm: LLM) -> str:
    """Write the blocks of a completion to a file in the run's folder, and return its path relative to the folder."""
    key, ids = turn.key, done.output.token_ids
    about = {
        **key._asdict(),
        "k": turn.way.k,
        "draft": turn.way.draft,
        "row_seed": _row_seed(key),
        "vocabulary": llm.engine.runner.executor.config.vocab_size,
        "control": llm.engine.runner.control_V.nonzero().flatten().tolist(),
        "stop": sorted(llm.eos_ids),
    }
    name = f"blocks/{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.safetensors"
    recorder.recording(about, [*prompt, *ids], len(prompt)).save(folder / name)
    return name


def _written(llm: LLM, token: int | None) -> str:
    return "" if token is None or llm.tokenizer is None else llm.tokenizer.decode([token], skip_special_tokens=False)


def _ends(text: str, tokens: list[int], llm: LLM) -> list[int]:
    """For each token, the length of the text after which nothing can change."""
    if llm.tokenizer is None:
        return []
    stream, ends, at = TextStream(llm.tokenizer), [], 0
    for number, token in enumerate(tokens, start=1):
        at += len(stream.push(token)) + (len(stream.finish()) if number == len(tokens) else 0)
        ends.append(min(at, len(text)))
    return ends


def score_run(plan: Plan, folder: Path, advance: Callable[[], None] = lambda: None) -> int:
    """Score the completions that have no score yet, if their tasks have scorers. Programs are run only if the plan
    allows that. Returns how many completions were not scored for this reason."""
    tasks, records, left = plan.loaded_tasks(), read_records(folder), 0
    problems = {(name, problem.id): problem for name, (task, _) in tasks.items() for problem in task.problems}
    with Programs(plan.run_code) as programs, Appender(folder / "scores.jsonl") as file:
        for key, record in records.completions.items():
            problem = problems.get((key.task, key.problem))
            if key in records.scores or problem is None or key.turn < len(problem.turns) - 1:
                continue
            task = problem.task
            if not task.scorer.scores:
                continue
            if task.scorer.runs_code and not plan.run_code:
                left += 1
                continue
            score = task.score(problem, record["text"], programs)
            file.write({**key._asdict(), "right": score.right, "found": score.found})
            advance()
    return left
