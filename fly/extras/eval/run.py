"""Runs: decode every problem of a plan's tasks in every way. If a run is killed, its folder loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fly.extras.eval.decoder import Decoder, Finished
from fly.extras.eval.plan import Plan, Turn
from fly.extras.eval.records import Appender, Key, Records, read_records
from fly.extras.eval.scorers import Programs

__all__ = ["RunWriter", "check_folder", "decode_run", "remaining", "score_run", "write_run"]


def remaining(plan: Plan, records: Records) -> list[Turn]:
    """Return the completions that have no record yet."""
    return [turn for turn in plan.turns() if turn.key not in records.completions]


def check_folder(plan: Plan, folder: Path) -> None:
    """Write the plan into a new folder, or check that the folder was begun with the same plan.

    A later plan may ask for more problems or tasks, may allow programs to run, and may name another address of the
    server.

    Raises ``ValueError`` with every other setting that has changed, because the folder would mix results of both.
    """
    fields = plan.model_dump(mode="json")
    tasks = {
        name: {"digest": task.digest, "scorer": task.scorer.kind, "scores": task.scorer.scores}
        for name, (task, _) in plan.loaded_tasks().items()
    }
    path, code = folder / "plan.yaml", plan.code
    if path.exists():
        before = {"code": {}, **yaml.safe_load(path.read_text(encoding="utf-8"))}
        # If the folder lacks a field, the field was added after the folder was begun, and its default applied then.
        begun_with = {**Plan().model_dump(mode="json"), **before["plan"]}
        changes = [
            f"{name}: {begun_with[name]!r} then, {value!r} now"
            for name, value in fields.items()
            if name not in ("tasks", "limit", "run_code", "server") and begun_with[name] != value
        ]
        if (begun_with["server"] is None) != (plan.server is None):
            changes.append(f"server: {begun_with['server']!r} then, {plan.server!r} now")
        changes += [
            f"task {name}: its file or its data have changed"
            for name, facts in tasks.items()
            if before["tasks"].get(name, facts) != facts
        ]
        changes += [
            f"{name}: its code has changed"
            for name, digest in code.items()
            if before["code"].get(name, digest) != digest
        ]
        if changes:
            raise ValueError(f"{folder} was begun with other settings; {'; '.join(changes)}. Give a new folder.")
        tasks, code = {**before["tasks"], **tasks}, {**before["code"], **code}
    folder.mkdir(parents=True, exist_ok=True)
    ways = [asdict(way.written) for way in plan.ways]
    document = {"plan": fields, "ways": ways, "tasks": tasks, "code": code}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


class RunWriter:
    """Writes finished completions into a run's folder and adds them to ``records``; a context manager. A folder has one
    writer at a time.

    Raises ``ValueError`` if another process is writing the folder.
    """

    def __init__(self, folder: Path, records: Records) -> None:
        self._folder, self._records = folder, records
        self._file = Appender(folder / "records.jsonl")

    def write(self, finished: Finished) -> None:
        """Write one completion. A kill at any moment leaves no record without its environment or its blocks."""
        record, environment, recording = finished
        if environment["id"] not in self._records.environments:
            self._file.write(environment)
            self._records.environments[environment["id"]] = environment
        if recording is not None:
            recording.save(self._folder / record["blocks"])
        self._file.write(record)
        self._records.completions[Key.of(record)] = record

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exit: object) -> None:
        self._file.__exit__(*exit)


def decode_run(
    plan: Plan,
    folder: Path,
    todo: list[Turn],
    records: Records,
    advance: Callable[[dict[str, Any]], None] = lambda record: None,
    ranks: Any = None,
) -> None:
    """Decode the completions ``todo`` of a run, and append a record of each to its folder.

    ``advance(record)`` is called after each completion. ``ranks`` are the processes that share the models: all of them
    make this call, and the first writes.
    """
    completions = Decoder(plan, [turn.way for turn in todo], ranks).decode(todo, records.texts)
    if ranks is None or ranks.leads:
        write_run(folder, records, completions, advance)
    else:
        for _ in completions:
            pass


def write_run(
    folder: Path,
    records: Records,
    completions: Iterable[Finished],
    advance: Callable[[dict[str, Any]], None] = lambda record: None,
) -> None:
    """Append a record of each completion to a run's folder, and call ``advance(record)`` after each.

    Raises ``ValueError`` if another process is writing the folder.
    """
    with RunWriter(folder, records) as writer:
        for finished in completions:
            writer.write(finished)
            advance(finished.record)


def score_run(plan: Plan, folder: Path, advance: Callable[[], None] = lambda: None) -> int:
    """Score the completions that have no score yet, if their tasks have scorers. Programs are run only if the plan
    allows that. Returns how many completions were not scored for this reason."""
    records, unscored = read_records(folder), 0
    problems = {(name, each.id): each for name, (task, _) in plan.loaded_tasks().items() for each in task.problems}
    with Programs(plan.run_code) as programs, Appender(folder / "scores.jsonl") as file:
        for key, record in records.completions.items():
            problem = problems.get((key.task, key.problem))
            # Only the last answer of a conversation is scored.
            if key in records.scores or problem is None or key.turn < len(problem.turns) - 1:
                continue
            scorer = problem.task.scorer
            if scorer.runs_code and not plan.run_code:
                unscored += 1
            elif scorer.scores:
                score = problem.task.score(problem, record["text"], programs)
                file.write({**key._asdict(), "right": score.right, "found": score.found})
                advance()
    return unscored
