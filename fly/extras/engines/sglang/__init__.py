"""Rules of fly inside SGLang, chosen by each request: a plug-in that SGLang loads by its entry point."""

from fly.extras.engines.sglang.plugin import register

__all__ = ["register"]
