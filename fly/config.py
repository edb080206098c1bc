"""A configuration file: target, draft, policy and how to run them. ``fly.LLM.from_config`` builds an ``LLM`` from
it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from fly.errors import explain
from fly.expressions import CLASS_PATH
from fly.policies import Exact, PolicyField

__all__ = ["COLLECTIVE_TIMEOUT", "HEARTBEAT_TIMEOUT", "LONGEST", "SHORTEST", "Config", "read_yaml"]

HEARTBEAT_TIMEOUT, COLLECTIVE_TIMEOUT = 5.0, 60.0  # seconds
SHORTEST, LONGEST = 0.5, 86400.0  # the range of either


class _Once(yaml.SafeLoader):
    """A loader that refuses a mapping in which a name occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Read YAML or JSON. Raises ``yaml.YAMLError``, also if a mapping has a name twice."""
    return yaml.load(text, Loader=_Once)


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
    exits: str | None = None
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

        Raises ``ValueError``, which names the file and every wrong field, or the reason why the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ValueError(f"configuration {str(path)!r} cannot be read: {reason}") from error
        try:
            data = read_yaml(text)
            return Config.model_validate(data or {}, context={"trusted": True})
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
        except ValidationError as error:
            raise ValueError(f"{path}: {explain(error, Config.model_fields)}") from error
