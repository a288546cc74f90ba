"""Checks and measurements of checkpoints: whether a model forks where it should."""
