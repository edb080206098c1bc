"""Benchmarks that run from a checkout, such as ``python -m benchmarks.beside``; README.md describes each."""
