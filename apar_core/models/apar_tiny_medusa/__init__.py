"""Medusa heads of apar-tiny: weights and card are in this folder."""
