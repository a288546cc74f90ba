"""Benchmarks that compare alternatives in one run: `python -m benchmarks --help`."""
