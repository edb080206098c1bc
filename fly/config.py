"""A configuration file: target, draft, policy and how to run them. ``fly.LLM.from_config`` builds an ``LLM`` from
it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from fly.errors import explain, short
from fly.expressions import CLASS_PATH
from fly.policies import Exact, PolicyField

__all__ = ["COLLECTIVE_TIMEOUT", "HEARTBEAT_TIMEOUT", "LONGEST", "SHORTEST", "Config", "Fields"]

HEARTBEAT_TIMEOUT, COLLECTIVE_TIMEOUT = 5.0, 60.0  # seconds
SHORTEST, LONGEST = 0.5, 86400.0  # the range of either


class _Once(yaml.SafeLoader):
    """A loader that refuses a mapping in which a name occurs twice, and says on which line a value is malformed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (before := first.setdefault(key.value, key)) is not key:
                raise _malformed(f"{key.value!r} is given twice, first on line {_line(before)}", key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # such as a date in a thirteenth month
            raise _malformed(str(error), node) from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _malformed(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class Fields(dict[str, Any]):
    """The fields of a YAML or JSON file, by name. It knows on which lines they stand.

    Args:
        fields: the fields.
        source: what errors call the file.
        node: the mapping that ``fields`` were read from.
    """

    def __init__(self, fields: Mapping[str, Any], source: str, node: yaml.Node) -> None:
        super().__init__(fields)
        self.source, self._node = source, node

    @staticmethod
    def read(path: str | Path, kind: str, known: Iterable[str]) -> Fields:
        """Read a file. ``kind`` is what errors call its contents, and ``known`` are the fields that it may have; they
        are not checked.

        Raises ``ValueError``, which names the file and the line: the file cannot be read, is not YAML, has a name
        twice, is no mapping, or is empty.
        """
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{kind} {str(path)!r} cannot be read: {error.strerror}") from error
        return Fields.parse(content, str(path), kind, known)

    @staticmethod
    def parse(content: bytes, source: str, kind: str, known: Iterable[str]) -> Fields:
        """Parse the content of a file. Errors are as in ``read``, and call the file ``source``."""
        try:
            text = content.decode()
            if source.endswith(".json"):
                text = text.replace("\t", " ")  # YAML allows no tabs between values; texts in JSON have none
            loader = _Once(text)
            node = loader.get_single_node()
            fields = None if node is None else loader.construct_document(node)
        except UnicodeError as error:
            line = content.count(b"\n", 0, getattr(error, "start", 0)) + 1
            raise ValueError(f"{source}, line {line}: not in UTF-8 ({error})") from error
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ValueError(f"{source}, line {line}: not valid YAML: {error.reason}") from error
        except yaml.MarkedYAMLError as error:
            at, begun = error.problem_mark, error.context_mark
            place = f"{source}, line {at.line + 1}" if at else source
            context = f"{error.context} (line {begun.line + 1}): " if error.context and begun else ""
            raise ValueError(f"{place}: not valid YAML: {context}{error.problem}") from error
        except RecursionError:
            raise ValueError(f"{source}: this {kind} is nested too deeply") from None
        if node is None or not fields:
            raise ValueError(f"{source}: this {kind} is empty; fields: {list(known)}")
        if not isinstance(fields, dict):
            raise ValueError(f"{source}: a {kind} is a mapping of fields, not {short(fields)}")
        return Fields(fields, source, node)

    def part(self, name: str) -> Fields:
        """Return the fields of the mapping that stands in the field ``name``."""
        return Fields(self[name], self.source, self._find(name)[1])

    def where(self, place: Sequence[str | int]) -> str:
        """Return the file and, if it has a value at ``place``, the line of that value: the beginning of an error."""
        if not place or place[0] not in self:
            return f"{self.source}: "
        key, node = self._find(str(place[0]))
        for step in place[1:]:
            if isinstance(node, yaml.MappingNode):
                key, node = next((pair for pair in reversed(node.value) if pair[0].value == str(step)), (key, node))
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                key = node = node.value[step]
        return f"{self.source}, line {_line(key)}: "

    def _find(self, name: str) -> tuple[yaml.Node, yaml.Node]:
        """Return the nodes of a field: its name and its value."""
        return next(pair for pair in reversed(self._node.value) if pair[0].value == name)


class Config(BaseModel):
    """The arguments of ``fly.LLM`` in a YAML or JSON file. The fields in ``of_ranks`` are arguments of
    ``fly.parallel.launch`` instead: how long ranks wait for one another. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    of_ranks: ClassVar = ("heartbeat_timeout", "collective_timeout")

    model: str = "fly-target"
    draft: str = "none"
    policy: PolicyField = Field(default_factory=Exact)
    k: int = Field(default=15, ge=0)
    dtype: str = "auto"
    device: str = "auto"
    deterministic: bool = False
    cache_tokens: int | None = Field(default=None, gt=0)
    cache_bytes: int | None = Field(default=None, gt=0)
    cache_share: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    memory_share: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    max_context: int | None = Field(default=None, gt=0)
    block_size: int | None = Field(default=None, gt=0)
    max_rows: int = Field(default=256, gt=0)
    step_tokens: int = Field(default=2048, gt=0)
    prefix_reuse: bool = True
    kernels: str = "auto"
    draft_placement: Literal["auto", "replicated", "sharded", "first"] = "auto"
    whole_sums: bool = False
    heartbeat_timeout: float = Field(default=HEARTBEAT_TIMEOUT, ge=SHORTEST, le=LONGEST, allow_inf_nan=False)
    collective_timeout: float = Field(default=COLLECTIVE_TIMEOUT, ge=SHORTEST, le=LONGEST, allow_inf_nan=False)

    @field_validator("draft")
    @classmethod
    def _imports_where_trusted(cls, value: str, info: ValidationInfo) -> str:
        """Refuse a class path, which imports code, from a source that is not trusted."""
        if CLASS_PATH.search(value) and not (info.context or {}).get("trusted"):
            raise ValueError(f"draft {value!r} would import code, which is not allowed from here")
        return value

    @staticmethod
    def read(path: str | Path) -> Config:
        """Read a file that the user trusts: its policy may name a ``module:Class``, which is imported.

        Raises ``ValueError``, which names the file, and the line and the name of every wrong field; or the reason why
        the file cannot be read. A file without any field is an error.
        """
        fields = Fields.read(path, "configuration", Config.model_fields)
        try:
            return Config.model_validate(fields, context={"trusted": True})
        except ValidationError as error:
            raise ValueError(explain(error, Config.model_fields, fields.where)) from error
