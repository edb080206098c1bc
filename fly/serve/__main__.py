"""``python -m fly.serve``, the same as ``fly serve``; under torchrun too."""

import sys

from fly.cli import app

app(["serve", *sys.argv[1:]], prog_name="fly")
