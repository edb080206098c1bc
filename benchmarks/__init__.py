"""Benchmarks that run from a checkout, such as ``python -m benchmarks.peers``; README.md describes each."""
