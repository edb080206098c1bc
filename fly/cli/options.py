"""Options that several commands share, each declared once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fly.config import LONGEST, SHORTEST


def number(least: float, most: float = math.inf, *, help: str) -> Any:
    """An option that takes a finite number in a range. Unlike with typer's ``min`` and ``max``, NaN is refused, and
    errors name the bad value."""
    within = f"of at least {least:g}" if most == math.inf else f"in [{least:g}, {most:g}]"

    def check(value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise typer.BadParameter(f"{value:g} must be a finite number {within}")
        return value

    shown = f"x>={least:g}" if most == math.inf else f"{least:g}<=x<={most:g}"
    return typer.Option(callback=check, metavar=f"<float range> [{shown}]", help=help)


def output(*names: str, help: str, suffix: str = "") -> Any:
    """An option that names a file to write, which ends in ``suffix``. It is an error at once if the directory does not
    exist, so that no figures are lost at the end."""

    def check(path: Path | None) -> Path | None:
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no directory {str(path.parent)!r}")
        if path is not None and path.suffix != suffix != "":
            raise typer.BadParameter(f"{str(path)!r} must end in {suffix!r}")
        return path

    return typer.Option(*names, help=help, callback=check)


def gone(name: str, instead: str) -> Any:
    """A deleted option. It is hidden, and its error says what to use ``instead``."""

    def refuse(given: bool) -> bool:
        if given:
            raise typer.BadParameter(f"it was deleted; {instead}")
        return given

    return typer.Option(name, hidden=True, callback=refuse)


Model = Annotated[
    str,
    typer.Option(help="Target: a bundled name, a directory, a GGUF file, or a name on the Hugging Face hub."),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        min=1, help="The most tokens of a text, prompt and answer; takes less memory than the model's own context."
    ),
]
CacheBytes = Annotated[
    int | None,
    typer.Option(min=1, help="The most bytes for the KV caches. Default: 4 GiB, or half of the free memory."),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        help="The draft: 'none', a checkpoint (prompt lookup drafts for it), or a strategy ('fly drafts'). Default: "
        "fly-draft for fly-target, none for other models."
    ),
]
Policy = Annotated[str, typer.Option(help="The acceptance policy: 'exact', 'fly', 'fly(theta=0.3, window=6)', ...")]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        help="A rule to compare with exact speculation; repeatable. 'fly(theta={0.1, 0.3})' is a rule for each value.",
        show_default=False,
    ),
]
K = Annotated[int, typer.Option(min=0, help="The most tokens drafted in a round; 0 decodes autoregressively.")]
DraftLength = Annotated[int, typer.Option(min=1, help="The most tokens drafted in a round.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Kernels = Annotated[
    str,
    typer.Option(
        help="What runs on the CPU: auto, torch, avx512bf16, avx512, avx2; int8: weights of 8 bits (on CUDA by "
        "torchao); w8a8: weights and activations; w4a8: weights of 4 bits; stored: a GGUF file's blocks as they are, "
        "which auto takes for such a file."
    ),
]
Exits = Annotated[
    str | None, typer.Option(help="A directory of 'fly train-exit': the target stops after the layers that settle it.")
]
Split = Annotated[str, typer.Option(help="heldout (in domain), middle or ood (out of domain).")]
Turns = Annotated[int, typer.Option(min=1, help="How often everything is measured, in turns.")]
Json = Annotated[Path | None, output("--json", help="Write all figures to this file.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="A YAML or JSON file with model, draft, policy, k; options override it. Without either: exact, no draft."
    ),
]
HeartbeatTimeout = Annotated[
    float,
    number(SHORTEST, LONGEST, help="With torchrun: seconds without a sign of life after which a rank counts as lost."),
]
CollectiveTimeout = Annotated[
    float, number(SHORTEST, LONGEST, help="With torchrun: seconds a rank waits in a collective for the others.")
]
