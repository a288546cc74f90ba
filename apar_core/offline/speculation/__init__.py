"""Speculative decoding: candidate trees, Medusa heads and their training."""
