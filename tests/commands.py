"""The ``fly`` command, called in this process. Imported by the tests of commands."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer
from typer.testing import CliRunner, Result

from fly import cli

__all__ = ["commands_of_fly", "plain", "run", "words"]


@cache
def commands_of_fly() -> dict[str, Any]:
    """Every command by its name, those of extras too."""
    app: Any = typer.main.get_command(cli.app)
    return {name: cli.load_command(name) if name in cli.EXTRAS else each for name, each in app.commands.items()}


def run(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), **options)  # type: ignore[arg-type]


def words(text: str) -> str:
    return " ".join(text.split())


def plain(text: str) -> str:
    """Words without the frame of an error."""
    return " ".join(text.replace("│", " ").split())
