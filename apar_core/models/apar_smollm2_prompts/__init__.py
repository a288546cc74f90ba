"""Prompt tokens of apar-smollm2: weights, acceptance table and card are in this folder."""
