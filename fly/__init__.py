"""fly: pluggable speculative decoding. Any draft strategy proposes, any acceptance policy decides what stands."""

from fly.llm import LLM, Output, Piece
from fly.types import Guarantee, SamplingParams, Stats, Token, Why

__all__ = ["LLM", "Guarantee", "Output", "Piece", "SamplingParams", "Stats", "Token", "Why"]
