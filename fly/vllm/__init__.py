"""Rules of fly inside vLLM, chosen by each request: a plug-in that vLLM loads by its entry point."""

from fly.vllm.plugin import register

__all__ = ["register"]
