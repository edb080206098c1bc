"""Options that several commands have. Each is declared once."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from fly.config import DEFAULT_K, Config, OfRanks, declared

_Run = TypeVar("_Run", bound=Callable[..., Any])
_OF_MODEL: dict[str, Any] = {"rich_help_panel": "Model and decoding"}


def takes(*groups: Mapping[str, tuple[Any, Any]]) -> Callable[[_Run], _Run]:
    """Decorate a command: it also takes the options in ``groups``, after its own, as keyword arguments. A group gives
    the annotation and the default of each option by its name."""
    options = {name: option for group in groups for name, option in group.items()}

    def decorate(run: _Run) -> _Run:
        parameters = inspect.signature(run, eval_str=True).parameters.values()
        run_parameters = [each for each in parameters if each.name not in options and each.kind != each.VAR_KEYWORD]
        option_parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
        run.__signature__ = inspect.Signature([*run_parameters, *option_parameters])  # type: ignore[attr-defined]  # typer reads it
        return run

    return decorate


def option(kind: Any, help: str, *names: str, default: Any = None, **look: Any) -> tuple[Any, Any]:
    """Return an option for a group of ``takes``. ``look`` goes to ``typer.Option``."""
    return Annotated[kind if default is not None else kind | None, typer.Option(*names, help=help, **look)], default


def number(least: float, most: float = math.inf, *, help: str, **look: Any) -> Any:
    """Return an option that takes a finite number in a range. Unlike with typer's ``min`` and ``max``, NaN is refused,
    and errors name the bad value."""
    within = f"of at least {least:g}" if most == math.inf else f"in [{least:g}, {most:g}]"

    def check(value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise typer.BadParameter(f"{value:g} must be a finite number {within}")
        return value

    range_text = f"x>={least:g}" if most == math.inf else f"{least:g}<=x<={most:g}"
    return typer.Option(callback=check, metavar=f"<float range> [{range_text}]", help=help, **look)


def declared_options(
    fields: Mapping[str, FieldInfo], *names: str, flags: Mapping[str, str] = MappingProxyType({}), **look: Any
) -> dict[str, tuple[Any, Any]]:
    """Return options for declared fields, by default for all of them, as a group of ``takes``: with their types,
    defaults and descriptions. Whoever declares the fields checks the values.

    Args:
        flags: names on the command line, for fields that have another one there; several in one text.
        look: goes to ``typer.Option``.
    """
    group = {}
    for name in names or fields:
        field = fields[name]
        kind, repeatable = _plain_kind(field.annotation)
        plain = (bool, int, float, str)
        default = field.default if isinstance(field.default, plain) and not repeatable else None
        flag = f"--{name.replace('_', '-')}"
        group[name] = option(
            list[str] if repeatable else kind, str(field.description), *flags.get(name, flag).split(), default=default,
            **look,
        )  # fmt: skip
    return group


def _plain_kind(annotation: Any) -> tuple[Any, bool]:
    """Return the type that the command line reads for a field, and whether the option is repeatable."""
    members = [each for each in get_args(annotation) if each is not NoneType] or [annotation]
    if get_origin(annotation) is tuple or any(get_origin(each) is tuple for each in members):
        return str, True
    if get_origin(annotation) is Literal or len(members) > 1:
        return str, False
    return members[0] if members[0] in (bool, int, float, Path) else str, False


def output(*names: str, help: str, suffix: str = "") -> Any:
    """Return an option that names a file to write, which ends in ``suffix``. It is an error at once if the directory
    does not exist, so that no figures are lost at the end."""

    def check(path: Path | None) -> Path | None:
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no directory {str(path.parent)!r}")
        if path is not None and path.suffix != suffix != "":
            raise typer.BadParameter(f"{str(path)!r} must end in {suffix!r}")
        if path is not None and suffix == ".svg" and importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("plots need matplotlib: pip install 'flyspec[plots]'")
        return path

    return typer.Option(*names, help=help, callback=check)


DraftLength = Annotated[int, typer.Option(min=1, help="The most tokens drafted in a round.", **_OF_MODEL)]
Policy = Annotated[str, typer.Option(help=Config.model_fields["policy"].description, **_OF_MODEL)]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="A rule to compare with exact speculation; repeatable. 'fly(theta={0.1, 0.3})' is a rule for each value.",
    ),
]
Split = Annotated[str, typer.Option(help="heldout (in domain), middle or ood (out of domain).")]
Turns = Annotated[int, typer.Option(min=1, help="How often everything is measured, in turns.")]
Json = Annotated[Path | None, output("--json", help="Write all figures to this file.")]

# Groups for ``takes``. Options of how a model runs:
RUNNING = declared_options(declared(), "dtype", "device", "kernels", **_OF_MODEL)
MODEL = declared_options(Config.model_fields, "model", **_OF_MODEL)
K = {"k": option(int, str(Config.model_fields["k"].description), min=0, default=DEFAULT_K, **_OF_MODEL)}
LOADING = {**MODEL, **RUNNING}
# Options of how it decodes, with or without a configuration file:
SETUP = {
    "draft": option(
        str, f"{Config.model_fields['draft'].description} Default: fly-draft for fly-target, none for other models.",
        **_OF_MODEL,
    ),
    "policy": (Policy, "exact"),
    **K,
    **RUNNING,
    **declared_options(declared(), "deterministic", "cache", "max_context", **_OF_MODEL),
    "config": option(
        Path, "A YAML or JSON file with model, draft, policy, k; options override it. Without either: exact, no draft.",
        **_OF_MODEL,
    ),
}  # fmt: skip
# Options of ranks, and of how they share a model:
_OF_RANKS: dict[str, Any] = {"rich_help_panel": "Several processes (--ranks, torchrun)"}
RANKS = {
    "ranks_": option(int, "Processes on this machine that share the model.", "--ranks", min=1, default=1, **_OF_RANKS),
    **declared_options(declared(OfRanks), **_OF_RANKS),
}
# Options of work that is spread over a Ray cluster:
GRID = {
    "ray": option(str, "Spread the work over this Ray cluster; 'auto' is the one at hand.", "--ray", metavar="ADDRESS"),
    "actors": option(int, "Actors on it that hold the model. Default: one a node, or one a GPU.", min=1),
}
