"""An OpenAI-compatible server: per-request policies, every token explained. ``python -m fly.serve`` runs it."""

from fly.serve.app import create_app
from fly.serve.server import Server
from fly.serve.service import Service
from fly.serve.settings import Settings

__all__ = ["Server", "Service", "Settings", "create_app"]
