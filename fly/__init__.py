"""fly: pluggable speculative decoding. Any draft strategy proposes tokens, any acceptance policy decides which are
kept."""

from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from fly.late import find_late as _find_late
from fly.moved import report_moves as _report_moves

if TYPE_CHECKING:
    from fly.llm import LLM, Output, Piece
    from fly.runner.request import Stats, Token
    from fly.types import Guarantee, SamplingParams, Why
else:
    __getattr__, __dir__ = _find_late(__name__)

__all__ = ["LLM", "Guarantee", "Output", "Piece", "SamplingParams", "Stats", "Token", "Why"]

try:
    __version__ = _version("flyspec")
except _NotInstalled:  # run from a source tree
    __version__ = "0+unknown"

_report_moves()
