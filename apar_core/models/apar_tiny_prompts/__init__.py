"""Prompt tokens of apar-tiny: weights, acceptance table and card are in this folder."""
