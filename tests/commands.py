"""The ``fly`` command, called in this process. Imported by the tests of commands."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from fly import cli

__all__ = ["plain", "run", "words"]


def run(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), **options)  # type: ignore[arg-type]


def words(text: str) -> str:
    return " ".join(text.split())


def plain(text: str) -> str:
    """Words without the frame of an error."""
    return " ".join(text.replace("│", " ").split())
