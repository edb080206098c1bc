"""Tasks as files. A task's file says what the problems are, how they become prompts, and when an answer is right."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fly.config import Fields
from fly.errors import PlacedError, explain, suggest
from fly.extras.eval.scorers import Nothing, Programs, Score, ScorerField, render
from fly.llm import LLM
from fly.models.bundled.tasks import problems as bundled_problems

__all__ = ["Generated", "Problem", "Task", "load_task", "task_names"]

_BUNDLED = files("fly.extras.eval") / "tasks"


class Generated(BaseModel):
    """Bundled problems of one split and one kind (``fly.models.bundled.tasks.problems``): the first ``count``, or all
    (None). ``seed`` must be 0, since problems of other seeds are not bundled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: Literal["heldout", "middle", "ood"] = "heldout"
    kind: Literal["all", "arithmetic", "text", "code"] = "all"
    seed: int = 0
    count: int | None = Field(default=None, ge=1)


class Task(BaseModel):
    """The contents of a task's file. Templates are jinja2 and see the fields of a problem, which is one line of JSON.
    Unknown fields of a task or of a template are errors.

    - Problems come from one of three fields: ``data`` (a file of JSON lines or with a JSON list, possibly compressed as
      ``.gz``; its path is relative to the task's file), ``rows`` (in the task's file itself) or ``generated``.
    - The template ``only`` gives "True" for the problems to use, ``id`` gives a problem's name, and ``group`` its kind.
    - ``prompt`` is the user's message, or the text to be continued if ``chat`` is false. ``turns`` names a field with
      several messages, which are asked in one conversation. ``prompt`` is then filled in for each message, as ``turn``.
    - The scorer compares a completion with ``answer``. ``solution`` is a whole answer that is known to be right. It is
      used for the first ``shots`` of ``examples``, which precede every problem, and by ``fly tasks NAME --references``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    name: str
    about: str = ""
    data: str | None = None
    rows: tuple[dict[str, Any], ...] | None = None
    generated: Generated | None = None
    shuffle: bool = True  # whether the first n problems are drawn at random from the whole file
    only: str = ""
    id: str = ""
    group: str = ""
    system: str = ""
    prompt: str = "{{ turn }}"
    turns: str | None = None
    answer: str = ""
    solution: str = ""
    examples: str | tuple[dict[str, Any], ...] = ()
    shots: int = Field(default=0, ge=0)
    separator: str = "\n\n"
    chat: bool = True
    scorer: ScorerField = Field(default_factory=Nothing)
    max_tokens: int = Field(default=512, ge=1)
    stop: tuple[str, ...] = ()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Task:
        sources = [name for name in ("data", "rows", "generated") if getattr(self, name) is not None]
        if len(sources) > 1:
            raise PlacedError(f"give one of data, rows and generated, not {sources}", sources[-1])
        if self.shots and not (self.solution and self.examples):
            raise PlacedError(f"shots {self.shots} need examples, and a template of their solution", "shots")
        if self.turns is None and "turn" in self.prompt and self.prompt == "{{ turn }}":
            raise ValueError("prompt is missing: a template of what is asked, such as '{{ question }}'")
        return self

    @cached_property
    def problems(self) -> list[Problem]:
        """All problems. A run of n problems takes the first n."""
        if self.rows is not None:
            rows = list(self.rows)
        elif self.generated is not None:
            generated = self.generated
            bundled = bundled_problems(generated.kind, generated.split, generated.seed, generated.count)
            rows = [{**vars(problem), "tests": list(problem.tests)} for problem in bundled]
        elif self.data is not None:
            rows = read_rows(Path(self.data), f"task {self.name!r}")
        elif self.name not in task_names():
            raise ValueError(f"task {self.name!r}: data is missing: the path of a file of JSON lines, its problems")
        else:
            raise ValueError(
                f"task {self.name!r} reads the file that was published with it, which is not part of fly; "
                f"give its path: {self.name}=PATH. {' '.join(self.about.split())}"
            )
        problems = [self._problem(number, row) for number, row in enumerate(rows) if self._counts(number, row)]
        if not problems:
            raise ValueError(f"task {self.name!r}: only {self.only!r} leaves none of {len(rows)} problems")
        ids = [problem.id for problem in problems]
        if len({*ids}) < len(ids):
            duplicate = next(each for each in ids if ids.count(each) > 1)
            raise ValueError(f"task {self.name!r}: two problems have the id {duplicate!r}")
        if self.data is not None and self.shuffle:
            Random(0).shuffle(problems)
        return problems

    @cached_property
    def _examples(self) -> list[Mapping[str, Any]]:
        rows = (
            read_rows(Path(self.examples), f"task {self.name!r}") if isinstance(self.examples, str) else self.examples
        )
        if len(rows) < self.shots:
            raise ValueError(f"task {self.name!r}: shots {self.shots} are more than the {len(rows)} examples")
        return list(rows[: self.shots])

    def _counts(self, number: int, row: dict[str, Any]) -> bool:
        if not self.only:
            return True
        place = f"task {self.name!r}, problem {number}"
        text = render(f"{place}: only", self.only, {**row, "number": number}).strip()
        if text not in ("True", "False"):
            raise ValueError(f"{place}: only gives {text!r}; it must give True or False")
        return text == "True"

    def _problem(self, number: int, row: dict[str, Any]) -> Problem:
        place = f"task {self.name!r}, problem {number}:"
        fields = {**row, "number": number}
        if self.turns is None:
            turns = [render(f"{place} prompt", self.prompt, fields)]
        else:
            texts = row.get(self.turns)
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{place} turns: field {self.turns!r} must be a list of texts, got {texts!r}")
            turns = [render(f"{place} prompt", self.prompt, {**fields, "turn": text}) for text in texts]
        answer = render(f"{place} answer", self.answer, fields) if self.answer else ""
        try:
            self.scorer.check(answer)
        except ValueError as error:
            raise ValueError(f"{place} {error}") from None
        return Problem(
            self,
            id=render(f"{place} id", self.id, fields) if self.id else str(number),
            group=render(f"{place} group", self.group, fields) if self.group else "",
            turns=tuple(turns),
            answer=answer,
            row=row,
        )

    def reference(self, problem: Problem) -> str:
        """Return the solution of a problem, from the task's template. Raises ``ValueError`` if the task has none."""
        if not self.solution:
            raise ValueError(f"task {self.name!r} has no template of a solution")
        return render(f"task {self.name!r}, problem {problem.id}: solution", self.solution, problem.row)

    def messages(self, problem: Problem, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """Return the messages of the conversation up to the next question. ``answers`` are the answers to the earlier
        ones."""
        pairs = [*map(self._shown, self._examples), *zip(problem.turns, answers)]
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [
            {"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair)
        ]
        return [*system, *messages, {"role": "user", "content": problem.turns[len(answers)]}]

    def text(self, problem: Problem, answers: Sequence[str] = ()) -> str:
        """Return the conversation as one text to be continued, for tasks with ``chat: false``."""
        shots = ["".join(self._shown(row)) for row in self._examples]
        turns = [f"{turn}{answer}" for turn, answer in zip(problem.turns, answers)]
        head = [self.system] if self.system else []
        return self.separator.join([*head, *shots, *turns, problem.turns[len(answers)]])

    def _shown(self, row: Mapping[str, Any]) -> tuple[str, str]:
        place = f"task {self.name!r}, example"
        return render(f"{place}: prompt", self.prompt, row), render(f"{place}: solution", self.solution, row)

    def prompt_ids(self, llm: LLM, problem: Problem, answers: Sequence[str] = ()) -> list[int]:
        """Return the token ids of the prompt."""
        if self.chat:
            return llm.chat_prompt(self.messages(problem, answers))
        if llm.tokenizer is None:
            raise ValueError("this model has no tokenizer, and tasks are texts")
        return llm.tokenizer.encode(self.text(problem, answers))

    def score(self, problem: Problem, completion: str, programs: Programs) -> Score:
        """Score the last completion of a problem. Errors of the scorer name the problem."""
        try:
            return self.scorer.score(completion, problem.answer, problem.row, programs)
        except ValueError as error:
            raise ValueError(f"task {self.name!r}, problem {problem.id}: {error}") from None

    @cached_property
    def digest(self) -> str:
        """A digest of all that decides what is asked and which answers are right, the data included."""
        facts = self.model_dump(exclude={"about": True, "data": True, "generated": {"count"}})
        contents = [[problem.id, problem.turns, problem.answer, problem.row] for problem in self.problems]
        text = json.dumps([facts, None if self.generated else contents], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Problem:
    """One problem of a task, with its templates filled in."""

    task: Task
    id: str
    group: str
    turns: tuple[str, ...]
    answer: str
    row: Mapping[str, Any]


def task_names() -> list[str]:
    """Return the names of the bundled tasks."""
    return sorted(path.name.removesuffix(".yaml") for path in _BUNDLED.iterdir() if path.name.endswith(".yaml"))


def load_task(text: str, **changes: Any) -> Task:
    """Load a bundled task by its name, or a task from its YAML file. ``NAME=PATH`` also names the data. ``changes``
    replace fields of the task.

    Raises ``ValueError`` for an unknown task, a file that cannot be read, or a wrong field; ``PlacedError`` for one of
    ``changes``.
    """
    name, equals, data = text.partition("=")
    if equals:
        changes = {**changes, "data": str(Path(data).absolute())}
    path = Path(name)
    folder: Path | None = None  # what paths in the file are relative to; bundled tasks have none
    if path.suffix in (".yaml", ".yml"):
        source = Fields.read(path, "task", Task.model_fields)
        folder = path.parent.absolute()
        usual_name = path.stem
    elif name in task_names():
        content = (_BUNDLED / f"{name}.yaml").read_bytes()
        source = Fields.parse(content, name, "task", Task.model_fields)
        usual_name = name
    else:
        raise ValueError(f"unknown task {name!r}{suggest(name, task_names())}; a task of your own is a .yaml file")
    fields = dict(source)
    for field in ("data", "examples"):
        if folder is not None and isinstance(fields.get(field), str):
            fields[field] = str(folder / fields[field])
    if "data" in changes:
        fields = {key: value for key, value in fields.items() if key not in ("rows", "generated")}

    def where(place: tuple[str | int, ...]) -> str:
        return f"task {name!r}: " if place and place[0] in changes else source.where(place)

    try:
        return Task.model_validate({"name": usual_name, **fields, **changes})
    except ValidationError as error:
        field_names = [*Task.model_fields, *(["limit"] if changes else [])]  # a plan may also give a limit
        changed_places = (
            problem["loc"] for problem in error.errors() if problem["loc"] and problem["loc"][0] in changes
        )
        raise PlacedError(explain(error, field_names, where), *next(changed_places, ())) from error


def read_rows(path: Path, what: str) -> list[dict[str, Any]]:
    """Return the problems of a file: JSON lines or one JSON list, compressed if its name ends with ``.gz``.

    Raises ``ValueError`` that names ``what`` the file is for, the file and the line.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{what}: {str(path)!r} cannot be read: {reason}") from None
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{what}: {str(path)!r} is no JSON: {error}") from None
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{what}: {str(path)!r}, line {number}: no JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{what}: {str(path)!r}, problem {number}: {row!r} is no object with fields")
    if not rows:
        raise ValueError(f"{what}: {str(path)!r} has no problems")
    return rows
