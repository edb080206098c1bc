"""An OpenAI-compatible server: per-request policies, every token explained. ``python -m fly.serve`` runs it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fly.serve.settings import Settings

if TYPE_CHECKING:
    from fly.serve.app import create_app
    from fly.serve.server import Server
    from fly.serve.service import Service

__all__ = ["Server", "Service", "Settings", "create_app"]


def __getattr__(name: str) -> Any:
    """Import the server only when it is used: FastAPI takes a moment to import, and commands need only ``Settings``."""
    if name in __all__:
        return getattr(import_module(f"fly.serve.{name.removeprefix('create_').lower()}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
