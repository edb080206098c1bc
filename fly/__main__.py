"""``python -m fly`` is the ``fly`` command."""

from fly.cli import app

app()
