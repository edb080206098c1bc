"""The ``fly`` command. Everything it does can be done from Python too; it only reads options and prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from fly import __version__
from fly.cli.audit import audit
from fly.cli.bench import bench
from fly.cli.chat import chat
from fly.cli.comparison import demo
from fly.cli.completion import generate
from fly.cli.doctor import doctor
from fly.cli.evaluation import evaluate, harness, report_command, tasks
from fly.cli.registry import check, drafts, models, policies
from fly.cli.replay import replay
from fly.cli.run import ARGUMENTS
from fly.cli.serving import serve
from fly.cli.training import train_exit_command, train_head_command
from fly.errors import explain

__all__ = ["app"]


class _Commands(TyperGroup):
    """Commands whose errors name the bad value of an option, which typer's own do not. The context keeps their
    arguments."""

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


app = typer.Typer(
    cls=_Commands,
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


for _command in (generate, chat, serve, models, policies, drafts, tasks, check, demo):
    app.command()(_command)
app.command("eval")(evaluate)
app.command("train-head")(train_head_command)
app.command("train-exit")(train_exit_command)
_TO_OTHERS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=_TO_OTHERS)(harness)  # every argument after its name goes to the harness, --help too
app.command("report")(report_command)
app.command()(replay)
app.command()(audit)
app.command()(doctor)
app.add_typer(bench, name="bench")
