"""Marks of forks in the tokens of model families."""
