"""Speculative decoding: Medusa heads and candidate trees."""
