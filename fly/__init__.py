"""fly: pluggable speculative decoding. Any draft strategy proposes, any acceptance policy decides what stands."""

from fly.llm import LLM, Output, Piece
from fly.request import Stats, Token
from fly.types import Guarantee, SamplingParams, Why

__all__ = ["LLM", "Guarantee", "Output", "Piece", "SamplingParams", "Stats", "Token", "Why"]
