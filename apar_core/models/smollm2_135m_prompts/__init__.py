"""Prompt tokens of smollm2-135m: weights, acceptance table and card are in this folder."""
