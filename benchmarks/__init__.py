"""Benchmarks, run from a checkout (``python -m benchmarks.beside``). README.md describes each."""
