"""Speculative decoding: candidate trees, Medusa heads, prompt tokens and their training."""
