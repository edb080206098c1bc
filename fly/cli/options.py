"""Options that several commands have. Each is declared once."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT, LONGEST, SHORTEST

_Run = TypeVar("_Run", bound=Callable[..., Any])
_OF_MODEL: dict[str, Any] = {"rich_help_panel": "Model and decoding"}
_of_model = functools.partial(typer.Option, **_OF_MODEL)
_of_ranks: dict[str, Any] = {"rich_help_panel": "Several processes (--ranks, torchrun)"}


def takes(*groups: Mapping[str, tuple[Any, Any]]) -> Callable[[_Run], _Run]:
    """Decorate a command: it also takes the options in ``groups``, after its own, as keyword arguments. A group gives
    the annotation and the default of each option by its name."""
    given = {name: option for group in groups for name, option in group.items()}

    def decorate(run: _Run) -> _Run:
        parameters = inspect.signature(run, eval_str=True).parameters.values()
        own = [each for each in parameters if each.name not in given and each.kind != each.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in given.items()
        ]
        run.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]  # typer reads it
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

    shown = f"x>={least:g}" if most == math.inf else f"{least:g}<=x<={most:g}"
    return typer.Option(callback=check, metavar=f"<float range> [{shown}]", help=help, **look)


def ranks_option(help: str) -> tuple[Any, Any]:
    """Return the option ``--ranks`` for a group of ``takes``."""
    return option(int, help, "--ranks", min=1, default=1, **_of_ranks)


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


Model = Annotated[
    str, _of_model(help="The target: a bundled name, a directory, a GGUF file, or a name on the Hugging Face hub.")
]
DraftOption = Annotated[
    str | None,
    _of_model(
        help="The draft: 'none', a checkpoint (prompt lookup drafts for it), or a strategy ('fly drafts'). Default: "
        "fly-draft for fly-target, none for other models."
    ),
]
Policy = Annotated[str, _of_model(help="The acceptance policy: 'exact', 'fly', 'fly(theta=0.3, window=6)', ...")]
K = Annotated[int, _of_model(min=0, help="The most tokens drafted in a round; 0 decodes autoregressively.")]
DraftLength = Annotated[int, _of_model(min=1, help="The most tokens drafted in a round.")]
Dtype = Annotated[str, _of_model(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, _of_model(help="auto, cpu, cuda, cuda:1, ...")]
Kernels = Annotated[
    str,
    _of_model(
        help="What runs on the CPU: auto, torch, amx, avx512bf16, avx512, avx2; int8: weights of 8 bits (on CUDA by "
        "torchao); w8a8: weights and activations; w4a8: weights of 4 bits, but the head's of 8; stored: "
        "a GGUF file's blocks, which auto takes for such a file. On CUDA also int4: layers' weights of 4 bits."
    ),
]
MaxContext = Annotated[
    int | None,
    _of_model(min=1, help="The most tokens of a text, prompt and answer; less than the model's own saves memory."),
]
CacheBytes = Annotated[
    int | None, _of_model(min=1, help="The most bytes for the KV caches. Default: 4 GiB, or half of the free memory.")
]
MemoryShare = Annotated[
    float | None,
    number(0.01, 1, help="On CUDA: the share of the memory to take, caches included. Default: 0.9.", **_OF_MODEL),
]
Deterministic = Annotated[
    bool, _of_model("--deterministic", help="The same bits for a token, whatever is in the batch.")
]
ConfigFile = Annotated[
    Path | None,
    _of_model(
        help="A YAML or JSON file with model, draft, policy, k; options override it. Without either: exact, no draft."
    ),
]
HeartbeatTimeout = Annotated[
    float,
    number(SHORTEST, LONGEST, help="Seconds without a sign of life after which a rank counts as lost.", **_of_ranks),
]
CollectiveTimeout = Annotated[
    float, number(SHORTEST, LONGEST, help="Seconds that a rank waits in a collective for the others.", **_of_ranks)
]
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
RUNNING = {"dtype": (Dtype, "auto"), "device": (Device, "auto"), "kernels": (Kernels, "auto")}
MODEL = {"model": (Model, "fly-target")}
LOADING = {**MODEL, **RUNNING}
# Options of how it decodes, with or without a configuration file:
SETUP = {
    "draft": (DraftOption, None),
    "policy": (Policy, "exact"),
    "k": (K, 15),
    **RUNNING,
    "max_context": (MaxContext, None),
    "cache_bytes": (CacheBytes, None),
    "memory_share": (MemoryShare, None),
    "config": (ConfigFile, None),
}
# Options of ranks, and of how long they wait for one another:
RANKS = {
    "ranks_": ranks_option("Processes on this machine that share the model."),
    "heartbeat_timeout": (HeartbeatTimeout, HEARTBEAT_TIMEOUT),
    "collective_timeout": (CollectiveTimeout, COLLECTIVE_TIMEOUT),
}
# Options of work that is spread over a Ray cluster:
GRID = {
    "ray": option(str, "Spread the work over this Ray cluster; 'auto' is the one at hand.", "--ray", metavar="ADDRESS"),
    "actors": option(int, "Actors on it that hold the model. Default: one a node, or one a GPU.", min=1),
}
