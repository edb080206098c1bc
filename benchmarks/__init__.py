"""Benches that run from a checkout, as ``python -m benchmarks.peers``; README.md says what each does."""
