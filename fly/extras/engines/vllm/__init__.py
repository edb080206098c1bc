"""Rules of fly inside vLLM, chosen by each request: a plug-in that vLLM loads by its entry point."""

from fly.extras.engines.vllm.plugin import register

__all__ = ["register"]
