"""Medusa heads of apar-tiny: weights and card lie beside this file."""

from pathlib import Path


def heads_path() -> Path:
    """Return the folder of the heads, as vLLM's medusa method and `load_medusa_heads` take it."""
    return Path(__file__).parent
