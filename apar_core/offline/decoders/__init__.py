"""Decoders on transformers, one answer at a time, with forks, Medusa heads and prompt tokens."""
