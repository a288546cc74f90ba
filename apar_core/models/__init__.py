"""Checkpoints that come with the package."""
