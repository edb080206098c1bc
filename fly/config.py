"""The options of an engine, each declared once, in ``EngineOptions``: the signature of ``fly.LLM``, the fields of a
configuration file and the options of the commands are made from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict, cast, get_type_hints

import torch
import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo

from fly.errors import explain, shorten, suggest
from fly.expressions import CLASS_PATH
from fly.policies import Exact, PolicyField
from fly.runner.memory import CacheSize

__all__ = [
    "COLLECTIVE_TIMEOUT",
    "DEFAULT_K",
    "HEARTBEAT_TIMEOUT",
    "LONGEST",
    "SHORTEST",
    "Cache",
    "Config",
    "EngineOptions",
    "Fields",
    "OfRanks",
    "Placement",
    "check_options",
    "check_sharing",
    "declared",
]

DEFAULT_K = 15
HEARTBEAT_TIMEOUT, COLLECTIVE_TIMEOUT = 5.0, 60.0  # seconds
SHORTEST, LONGEST = 0.5, 86400.0  # the range of either


class _Once(yaml.SafeLoader):
    """A loader that refuses a mapping in which a name occurs twice, and says on which line a value is malformed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_keys: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (first_key := first_keys.setdefault(key.value, key)) is not key:
                raise _malformed(f"{key.value!r} is given twice, first on line {_line(first_key)}", key)
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
            problem_mark, context_mark = error.problem_mark, error.context_mark
            place = f"{source}, line {problem_mark.line + 1}" if problem_mark else source
            context = f"{error.context} (line {context_mark.line + 1}): " if error.context and context_mark else ""
            raise ValueError(f"{place}: not valid YAML: {context}{error.problem}") from error
        except RecursionError:
            raise ValueError(f"{source}: this {kind} is nested too deeply") from None
        if node is None or not fields:
            raise ValueError(f"{source}: this {kind} is empty; fields: {list(known)}")
        if not isinstance(fields, dict):
            raise ValueError(f"{source}: a {kind} is a mapping of fields, not {shorten(fields)}")
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


Placement = Literal["auto", "replicated", "sharded"]


def _read_size(value: Any) -> Any:
    """Check what ``cache`` says. A number of NumPy becomes Python's."""
    size = CacheSize.parse(value)
    return value if isinstance(value, str) or size.tokens is None else size.tokens


Cache = Annotated[int | float | str | None, BeforeValidator(_read_size)]


class EngineOptions(TypedDict, total=False):
    """How an engine runs its models. ``declared`` gives the default, the range and the description of each option."""

    dtype: Annotated[
        str | torch.dtype,
        Field(default="auto", description="auto (as the checkpoint states), bfloat16, float16 or float32."),
    ]
    device: Annotated[
        str | torch.device, Field(default="auto", description="auto, cpu, cuda, cuda:1, or any torch device.")
    ]
    deterministic: Annotated[
        bool, Field(default=False, description="The same bits for a token, whatever is in the batch.")
    ]
    cache: Annotated[
        Cache,
        Field(
            default=None,
            description="How much the KV caches hold: a size for all of them ('8GiB'), a number of tokens for each "
            "(20000), or a share of memory (0.5): on the CPU of what is free after loading, on CUDA of the whole "
            "device, weights included. Default: eight contexts, at most 4 GiB or half of the free memory; on CUDA 0.9.",
        ),
    ]
    max_context: Annotated[
        int | None,
        Field(
            default=None,
            ge=1,
            strict=True,
            description="The most tokens of a text, prompt and answer; less than the model's own saves memory.",
        ),
    ]
    block_size: Annotated[
        int | None,
        Field(
            default=None,
            ge=1,
            strict=True,
            description="Tokens in a page of the target's cache. Default: by the device.",
        ),
    ]
    max_rows: Annotated[
        int, Field(default=256, ge=1, strict=True, description="The most completions in one step of the engine.")
    ]
    step_tokens: Annotated[
        int, Field(default=2048, ge=1, strict=True, description="About the most tokens in one step of the engine.")
    ]
    prefix_reuse: Annotated[
        bool, Field(default=True, description="Requests that begin with the same tokens share their cache pages.")
    ]
    kernels: Annotated[
        str,
        Field(
            default="auto",
            description="What runs on the CPU: auto, torch, amx, avx512bf16, avx512, avx2; w8a8: weights and "
            "activations of 8 bits; w4a8: weights of 4 bits, but the head's of 8; stored: a GGUF file's blocks, which "
            "auto takes for such a file. On CUDA int8: weights of 8 bits, by torchao; int4: layers' weights of 4 bits.",
        ),
    ]


class OfRanks(TypedDict, total=False):
    """How ranks share a model: arguments of ``fly.parallel.launch``."""

    draft_placement: Annotated[
        Placement,
        Field(
            default="auto",
            description="Where a draft given as text runs: replicated, sharded (as the target), or auto, whichever is "
            "faster.",
        ),
    ]
    whole_sums: Annotated[
        bool,
        Field(
            default=False,
            description="Split no sum among ranks, so that their number does not change rounding; they exchange more.",
        ),
    ]
    heartbeat_timeout: Annotated[
        float,
        Field(
            default=HEARTBEAT_TIMEOUT,
            ge=SHORTEST,
            le=LONGEST,
            allow_inf_nan=False,
            description="Seconds without a sign of life after which a rank counts as lost.",
        ),
    ]
    collective_timeout: Annotated[
        float,
        Field(
            default=COLLECTIVE_TIMEOUT,
            ge=SHORTEST,
            le=LONGEST,
            allow_inf_nan=False,
            description="Seconds that a rank waits in a collective for the others.",
        ),
    ]


def declared(kind: type = EngineOptions) -> dict[str, FieldInfo]:
    """Return the options of ``EngineOptions``, or of ``OfRanks``, by name: each with its ``annotation``, its
    ``default`` and its ``description``."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: FieldInfo.from_annotation(hint) for name, hint in hints.items()}


def check_options(values: Mapping[str, Any]) -> EngineOptions:
    """Return all options. Those that are not among ``values`` have their defaults.

    Raises ``TypeError`` for an unknown option, with the choices, and ``ValueError`` for a wrong value.
    """
    option_names = ["model", "draft", "policy", "k", "ranks", *_Options.model_fields]
    if unknown := next((name for name in values if name not in option_names), None):
        if unknown in _OfRanks.model_fields:
            raise TypeError(f"{unknown!r} is no option of LLM, but of fly.parallel.launch, which makes its ranks")
        if unknown == "exits":
            raise TypeError("'exits' is no option of LLM: give it early_exit.load(model, exits), of fly.extras")
        raise TypeError(f"{unknown!r} is no option of LLM{suggest(unknown, option_names)}")
    return cast(EngineOptions, _validate(_Options, values))


def check_sharing(values: Mapping[str, Any]) -> OfRanks:
    """Return how ranks share a model. Raises ``ValueError`` for a wrong value."""
    return cast(OfRanks, _validate(_OfRanks, values))


def _validate(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, checked. Raises ``ValueError`` for a wrong value."""
    try:
        return dict(model.model_validate(values))
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def _make_model(*kinds: type) -> Any:
    """Make a pydantic model of declared options, which refuses others."""
    refusing = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind, include_extras=True).items()}
    return create_model("Options", __config__=refusing, **hints)


_Options, _OfRanks = _make_model(EngineOptions), _make_model(OfRanks)


class Config(_make_model(EngineOptions, OfRanks)):  # type: ignore[misc]
    """A YAML or JSON file: the arguments of ``fly.LLM``, and, by the names in ``of_ranks``, those of
    ``fly.parallel.launch``. Unknown fields are errors."""

    of_ranks: ClassVar = tuple(declared(OfRanks))

    model: str = Field(
        default="fly-target",
        description="The target: a bundled name, a directory, a GGUF file, or a name on the Hugging Face hub.",
    )
    draft: str = Field(
        default="none",
        description="The draft: 'none', a checkpoint (prompt lookup drafts for it), or a strategy ('fly drafts').",
    )
    policy: PolicyField = Field(
        default_factory=Exact, description="The acceptance policy: 'exact', 'fly', 'fly(theta=0.3, window=6)', ..."
    )
    k: int = Field(
        default=DEFAULT_K, ge=0, strict=True,
        description="The most tokens drafted in a round; 0 decodes autoregressively.",
    )  # fmt: skip

    @property
    def options(self) -> EngineOptions:
        """The options of ``fly.LLM``, for ``**``."""
        return cast(EngineOptions, {name: getattr(self, name) for name in declared()})

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
