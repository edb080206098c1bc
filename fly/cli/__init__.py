"""The ``fly`` command. Everything it does can be done from Python too; it only reads options and prints.

Commands of the core are imported here. A command of an extra (``fly/extras``) is imported when it runs: ``EXTRAS`` says
where each is, and what ``fly --help`` shows of it.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import ValidationError
from typer import core, rich_utils
from typer.core import TyperCommand, TyperGroup

from fly import __version__
from fly.cli.chat import chat
from fly.cli.completion import generate
from fly.cli.doctor import doctor
from fly.cli.registry import check, drafts, models, policies
from fly.cli.run import ARGUMENTS
from fly.cli.serving import serve
from fly.cli.show import console
from fly.cli.terminal import prepare_streams
from fly.errors import explain

__all__ = ["EXTRAS", "Extra", "app"]

_NARROW = 80  # columns below which typer cuts names of options in its help


class Extra(NamedTuple):
    """A command of an extra: the ``place`` of its function or of its own typer app, its line in ``fly --help``, and
    whether it passes all arguments on."""

    place: str
    help: str
    passes_on: bool = False


EXTRAS = {
    "demo": Extra(
        "fly.extras.bench.demo:demo",
        "Show what speculation gains: one completion in colours, then a table over held-out problems.",
    ),
    "tasks": Extra(
        "fly.extras.eval.command:tasks",
        "List the tasks, or show one: its first prompt as a model gets it, and its scorer.",
    ),
    "eval": Extra(
        "fly.extras.eval.command:evaluate",
        "Measure accuracy and speed of rules on tasks, beside autoregressive decoding and exact speculation.",
    ),
    "report": Extra(
        "fly.extras.eval.command:report_command",
        "Compare runs: speed, accuracy with intervals, recovery with a paired test, where the texts differ.",
    ),
    "replay": Extra(
        "fly.extras.eval.replay_command:replay",
        "Try any rule on recorded blocks: tokens a round, relaxed tokens, and how fast that would be.",
    ),
    "harness": Extra(
        "fly.extras.eval.command:harness",
        "Run lm-evaluation-harness's own command, with fly as one of its models: --model fly --model_args model=...",
        passes_on=True,
    ),
    "bench": Extra(
        "fly.extras.bench.command:bench",
        "Measure speed, as ratios within one run.",
    ),
    "train-head": Extra(
        "fly.extras.train.command:train_head_command",
        "Train a draft head for a target on its own answers: EAGLE-3, or the block drafters DFlash and DSpark.",
    ),
    "train-exit": Extra(
        "fly.extras.early_exit.command:train_exit",
        "Train early exits (SpecEE) for a target on its own answers: predictors of when more layers change nothing.",
    ),
    "audit": Extra(
        "fly.extras.audit.command:audit",
        "Judge any OpenAI-compatible server: are its answers those of its model, whatever makes it fast?",
    ),
}


class Commands(TyperGroup):
    """The commands of the core and of the extras. They print what the terminal can show. Their errors name the bad
    value of an option, which typer's own do not. The context keeps their arguments."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, extra in EXTRAS.items():
            self.add_command(TyperCommand(name, help=extra.help, rich_help_panel="Extras"))

    def main(self, *arguments: Any, **options: Any) -> Any:
        prepare_streams()
        # On a narrow terminal typer's own help would cut the names of options, which plain help does not.
        width = rich_utils.MAX_WIDTH = console.options.max_width
        core.HAS_RICH = width >= _NARROW
        return super().main(*arguments, **{"terminal_width": width, **options})

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(context, args)
        return name, load_command(name) if name in EXTRAS else command, rest

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        context.meta[ARGUMENTS] = [*arguments]
        return super().parse_args(context, arguments)

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):
                error.message = explain(error.__cause__)
            raise


def load_command(name: str) -> Any:
    """Import the command of an extra."""
    place, _, passes_on = EXTRAS[name]
    module, _, attribute = place.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if isinstance(function, typer.Typer):
        function.info.name = name
        return typer.main.get_group(function)
    command_app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    # Every argument after the name of a command that passes them on is its own, --help too.
    settings = (
        {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []} if passes_on else None
    )
    command_app.command(name, context_settings=settings)(function)
    return typer.main.get_command(command_app)


app = typer.Typer(
    cls=Commands,
    help="Pluggable speculative decoding: any draft proposes tokens, any acceptance policy decides which are kept.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fly {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


for _command in (generate, chat, serve, models, policies, drafts, check, doctor):
    app.command()(_command)
