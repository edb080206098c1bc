"""What a run decodes, as data: rules × draft lengths × drafts × temperatures × seeds × tasks."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    model_validator,
)

from fly.cache import DEFAULT_BYTES
from fly.config import Cache, Fields
from fly.errors import PlacedError, did_you_mean, explain
from fly.expressions import CLASS_PATH, grid
from fly.extras.eval.records import Key
from fly.extras.eval.task import Problem, Task, load_task, task_names
from fly.models.bundled import BUNDLED, usual_draft
from fly.policies import AcceptancePolicy, Exact, parse_policy
from fly.policies.registry import load_policy

__all__ = [
    "AUTOREGRESSIVE",
    "FLY_FIELD",
    "SERVERS_OWN",
    "Asked",
    "Plan",
    "RuleField",
    "Turn",
    "Way",
    "WrittenPlan",
    "WrittenWay",
]

AUTOREGRESSIVE = "autoregressive"
FLY_FIELD: Literal["speculation.policy"] = "speculation.policy"
RuleField = Literal["speculation.policy", "vllm_xargs.fly", "custom_params.fly"]
SERVERS_OWN = "server's own"  # the draft of a server that takes none by request


@dataclass(frozen=True)
class Way:
    """One way to decode. ``label`` names it in tables, and is unique within a plan."""

    label: str
    draft: str  # a text of ``fly.drafts.parse_draft``; "none" for autoregressive decoding
    k: int | None  # None for that of a server, which does not tell it
    policy: AcceptancePolicy

    @property
    def exact(self) -> bool:
        """Whether this is exact speculation, with which the other ways are compared."""
        return self.written.exact

    @property
    def written(self) -> WrittenWay:
        """What a run's folder says of this way."""
        return WrittenWay(self.label, self.draft, self.k, str(self.policy), self.policy.guarantee.value)


@dataclass(frozen=True)
class WrittenWay:
    """A way as a run's folder names it: ``policy`` is the name of its rule with all parameters."""

    label: str
    draft: str
    k: int | None
    policy: str
    guarantee: str

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.draft != "none"

    @property
    def exact(self) -> bool:
        """Whether this is exact speculation, with which the other ways are compared."""
        return self.drafts and self.policy == str(Exact())


@dataclass(frozen=True)
class Turn:
    """One completion that a plan asks for. ``number`` is the index of the problem in its task."""

    key: Key
    number: int
    task: Task
    problem: Problem
    way: Way

    @property
    def row_seed(self) -> int:
        """The seed of the completion, which is the same for every way."""
        text = f"{self.key.task}/{self.key.problem}/{self.key.turn}/{self.key.seed}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def earlier(self, texts: Mapping[Key, str]) -> list[str]:
        """Return the answers to the earlier turns of the conversation."""
        return [texts[self.key._replace(turn=turn)] for turn in range(self.key.turn)]

    def facts(self, reference: str) -> dict[str, Any]:
        """Return the fields of a record that are known before the completion. The way ``reference`` says what was
        asked."""
        return {
            "kind": "completion",
            **self.key._asdict(),
            "number": self.number,
            "group": self.problem.group,
            "turns": len(self.problem.turns),
            **({"asked": self.problem.turns[self.key.turn]} if self.key.way == reference else {}),
            "guarantee": self.way.policy.guarantee.value,
            "row_seed": self.row_seed,
        }


def _parsed(text: str) -> AcceptancePolicy:
    return parse_policy(text, trusted=True)


def _rule(value: object) -> str:
    """Check that a policy can be read, and return its text. A text is kept as it is, because in ``module:Class`` it
    says what to import."""
    text = value if isinstance(value, str) else str(load_policy(value, trusted=True))
    _parsed(text)
    return text


def _some_draft(text: str) -> str:
    if text == "none":
        raise ValueError("draft 'none' leaves nothing to judge; autoregressive decoding is always measured")
    return text


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _spread(value: object) -> list[Any]:
    return [each for text in _listed(value) for each in (grid(text) if isinstance(text, str) else [text])]


_Value = TypeVar("_Value")
_Rule = Annotated[str, BeforeValidator(_rule)]
_Draft = Annotated[str, AfterValidator(_some_draft)]
_Several = Annotated[tuple[_Value, ...], BeforeValidator(_listed), Field(min_length=1)]  # or a single value


class _Extra(BaseModel):
    """A single way, in addition to the product. A field that is left out takes the plan's first value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: _Rule = "exact"
    k: int | None = Field(default=None, ge=1)
    draft: str | None = None


class Asked(BaseModel):
    """A task of a plan. ``task`` names it (``NAME``, ``NAME=PATH`` or a ``.yaml`` file), and ``limit`` is the number of
    its problems to use. Any other field replaces the task's own field of that name."""

    model_config = ConfigDict(frozen=True, extra="allow")

    task: str
    limit: int | None = Field(default=None, ge=1)

    def load(self) -> Task:
        """Load the task and apply the changes. Raises ``ValueError`` naming what is wrong."""
        return load_task(self.task, **(self.model_extra or {}))


def _asked(value: object) -> object:
    return {"task": value} if isinstance(value, str) else value


class Plan(BaseModel):
    """The settings of a run, from a YAML or JSON file or the command line. Both are trusted: a policy may name a
    ``module:Class``, which is imported. Unknown fields are errors.

    A plan has these ways to decode:

    - autoregressive decoding;
    - for every draft and ``k``, exact speculation and each of ``policies`` (``fly(theta={0.1, 0.3})`` is two policies,
      see ``fly.expressions.grid``);
    - the single ways of ``settings``, each together with exact speculation with the same draft and length.

    With ``server``, an OpenAI-compatible server makes the completions, and ``model`` is the name of its model. The rule
    of each request stands in its field ``rule_field``. Without them, what the server lists decides. Only fly's own
    servers can decode autoregressively and take ``drafts`` and ``k`` by request; by default these are the server's own.
    The first way of other servers is exact speculation.

    Each way runs at every temperature with every seed. ``limit`` is the number of problems of each task, unless the
    task has its own ``limit``. ``max_tokens`` replaces the tasks' own limits. ``together`` is the number of problems
    decoded at a time. ``record`` keeps the blocks of exact speculation at temperature 0 for ``fly replay``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = BUNDLED[0]
    server: str | None = None
    rule_field: RuleField | None = None
    drafts: _Several[_Draft] = ()
    k: _Several[Annotated[int, Field(ge=1)] | None] = (15,)
    policies: Annotated[tuple[_Rule, ...], BeforeValidator(_spread)] = ()
    settings: tuple[_Extra, ...] = ()
    temperatures: _Several[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = (0.0,)
    seeds: _Several[int] = (0,)
    tasks: _Several[Annotated[Asked, BeforeValidator(_asked)]] = (Asked(task="bundled-middle"),)
    limit: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    together: int = Field(default=1, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    run_code: bool = False
    record: bool = False
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    deterministic: bool = False
    cache: Cache = f"{DEFAULT_BYTES >> 30}GiB"  # of each draft's engine, so that several fit on one device

    @model_validator(mode="before")
    @classmethod
    def _default_draft(cls, values: Any) -> Any:
        """Fill in the default draft: fly-draft for fly-target, and prompt lookup for other models. The defaults of a
        server are its own."""
        if not isinstance(values, dict):
            return values
        if values.get("server") is not None:
            given_values = {name: value for name, value in values.items() if value is not None}
            return {"model": "", "k": (None,), "drafts": (SERVERS_OWN,), **given_values}
        if values.get("drafts") is not None:
            return values
        usual = usual_draft(values.get("model", BUNDLED[0]))
        return values | {"drafts": (usual if usual != "none" else "ngram",)}

    @model_validator(mode="after")
    def _suits_the_server(self) -> Plan:
        if self.server is None:
            if self.rule_field is not None:
                raise PlacedError(f"rule_field: {self.rule_field!r} does nothing without a server", "rule_field")
            if None in self.k:
                raise PlacedError("k: a number of tokens is missing", "k")
            return self
        for name in ("record", "dtype", "device", "kernels", "deterministic", "cache"):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise PlacedError(f"{name}: {value!r} does nothing with a server, which loads its models itself", name)
        if self.rule_field not in (None, FLY_FIELD):
            chosen = {
                "drafts": self.drafts != (SERVERS_OWN,),
                "k": self.k != (None,),
                "settings": any(each.draft or each.k for each in self.settings),
            }
            for field in (field for field, is_chosen in chosen.items() if is_chosen):
                raise PlacedError(
                    f"{field}: requests choose drafts and k on fly's server alone ({FLY_FIELD}); an engine drafts as "
                    "it was started",
                    field,
                )
        return self

    @model_validator(mode="after")
    def _can_be_recorded(self) -> Plan:
        if self.record and 0.0 not in self.temperatures:
            raise PlacedError(
                "record: blocks are recorded at temperature 0 alone, and the temperatures are "
                f"{list(self.temperatures)}",
                "record",
            )
        if self.record and self.together > 1:
            raise PlacedError(
                f"record: blocks are recorded one problem at a time, not {self.together} together", "record"
            )
        return self

    @field_serializer("settings", "tasks")
    def _without_defaults(self, value: tuple[BaseModel, ...]) -> list[dict[str, Any]]:
        return [each.model_dump(exclude_none=True) for each in value]

    @property
    def code(self) -> dict[str, str]:
        """The modules that rules and drafts name as ``module:Class``, each with a digest of its file."""
        texts = [*self.policies, *self.drafts, *(part for each in self.settings for part in (each.policy, each.draft))]
        names = {match[0].partition(":")[0] for text in texts if text for match in CLASS_PATH.finditer(text)}
        digests = {}
        for name in sorted(names):
            with suppress(ImportError):  # the path of a checkpoint may contain a colon, too
                if file := inspect.getsourcefile(import_module(name)):
                    digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
        return digests

    @property
    def ways(self) -> list[Way]:
        """Every way to decode: first autoregressive decoding, where it can be asked for; then, for each draft and
        length, exact speculation before the others. The others are compared with the first."""
        rules = [Exact(), *map(_parsed, self.policies)]
        combinations = list(product(self.drafts, self.k, rules))
        for extra in self.settings:
            draft, k = extra.draft or self.drafts[0], extra.k or self.k[0]
            combinations += [(draft, k, Exact()), (draft, k, _parsed(extra.policy))]
        several = len({draft for draft, _, _ in combinations}) > 1
        ways = []
        if self.server is None or self.rule_field == FLY_FIELD:
            ways.append(Way(AUTOREGRESSIVE, "none", 0, Exact()))
        for draft, k, rule in dict.fromkeys(combinations):
            label = str(rule) + (f" k{k}" if k else "") + (f" {draft}" if several else "")
            ways.append(Way(label, draft, k, rule))
        return ways

    def together_of(self, turns: Iterable[Turn]) -> Iterator[list[Turn]]:
        """Yield the completions that are decoded together, which differ in nothing but the problem."""
        for _, group in groupby(turns, lambda turn: (turn.number // self.together, turn.key._replace(problem=""))):
            yield list(group)

    def loaded_tasks(self) -> dict[str, tuple[Task, int]]:
        """Return the tasks by name, each with the number of problems to decode.

        Raises ``ValueError`` if two tasks share a name, or one cannot be loaded.
        """
        loaded: dict[str, tuple[Task, int]] = {}
        for planned in self.tasks:
            task = planned.load()
            if task.name in loaded:
                raise ValueError(f"two tasks are called {task.name!r}; give one another name: {{task: …, name: …}}")
            limit = planned.limit or self.limit
            if limit and task.generated is not None:  # load only as many bundled problems as are needed
                task = planned.model_copy(
                    update={"generated": task.generated.model_copy(update={"count": limit})}
                ).load()
            loaded[task.name] = task, min(limit or len(task.problems), len(task.problems))
        return loaded

    def turns(self) -> Iterator[Turn]:
        """Yield all completions, in order. The ways take turns at each problem (or each group of problems that are
        decoded together), so that a busy moment of the machine affects all of them. Which way comes first rotates. At
        temperature 0 seeds change nothing, so only the first seed is used."""
        tasks = self.loaded_tasks().values()
        ways = self.ways
        few = self.together
        for part, first in enumerate(range(0, max(limit for _, limit in tasks), few)):
            at = part % len(ways)
            for task, limit in tasks:
                problems = list(enumerate(task.problems[first : min(first + few, limit)], first))
                turns = range(max((len(problem.turns) for _, problem in problems), default=0))
                sampled = [(heat, seed) for heat in self.temperatures for seed in self.seeds[: None if heat else 1]]
                for (heat, seed), way, turn in product(sampled, ways[at:] + ways[:at], turns):
                    for number, problem in problems:
                        if turn < len(problem.turns):
                            key = Key(task.name, problem.id, turn, seed, heat, way.label)
                            yield Turn(key, number, task, problem, way)

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: Callable[[tuple[str | int, ...]], str] | None = None) -> Self:
        """Make a plan with these fields. Raises ``ValueError`` that names every wrong field; ``where`` returns what
        comes before each (see ``fly.errors.explain``)."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(explain(error, cls.model_fields, where)) from error

    @staticmethod
    def read(path: str | Path) -> Fields:
        """Read the fields of a plan's file, or of the plan in a run's folder, without checking them. Paths in a file
        are relative to it. Raises ``ValueError`` if the file cannot be read, or is no plan."""
        path = Path(path)
        if path.is_dir():
            return Plan.settings_of(Plan.read_run(path))
        if not path.suffix and not path.exists():
            hint = "" if str(path) in task_names() else did_you_mean(str(path), task_names())
            raise ValueError(f"plan {str(path)!r}: there is no such file or folder; --task names a task{hint}")
        fields = Fields.read(path, "plan", Plan.model_fields)
        if "tasks" in fields:
            fields["tasks"] = [_placed(each, path.absolute().parent) for each in _listed(fields["tasks"])]
        return fields

    @staticmethod
    def read_run(folder: Path) -> Fields:
        """Read what a run's folder says of its plan, its ways and its tasks. Raises ``ValueError`` as ``read`` does."""
        fields = Fields.read(folder / "plan.yaml", "plan", Plan.model_fields)
        if not isinstance(fields.get("plan"), dict):
            raise ValueError(f"{fields.source}: this is no plan of a run, which 'fly eval --out FOLDER' writes")
        return fields

    @staticmethod
    def settings_of(run: Fields) -> Fields:
        """Return the fields of the plan in what ``read_run`` has read, by their present names."""
        settings = run.part("plan")
        for name in [name for name, value in settings.items() if value is None and name not in Plan.model_fields]:
            del settings[name]  # a setting that fly had when it made the run, and that was not used
        if "cache_bytes" in settings:  # the name of ``cache`` up to version 0.3
            settings["cache"] = f"{settings.pop('cache_bytes')}B"
        return settings


class _WrittenExtra(_Extra):
    policy: str = "exact"


class WrittenPlan(Plan):
    """The plan of a run that is over. Its rules are texts, which are not read, since their code may be gone."""

    policies: tuple[str, ...] = ()
    settings: tuple[_WrittenExtra, ...] = ()


def _placed(entry: Any, folder: Path) -> Any:
    """Return a task of a plan's file, with its paths made absolute."""
    entry = _asked(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("task"), str):
        return entry
    name, equals, data = entry["task"].partition("=")
    task_path = str(folder / name) if name.endswith((".yaml", ".yml")) else name
    absolute_paths = {
        field: str(folder / entry[field]) for field in ("data", "examples") if isinstance(entry.get(field), str)
    }
    return {**entry, **absolute_paths, "task": task_path + (f"={folder / data}" if equals else "")}
