"""Medusa heads of apar-tiny: weights and card are in this folder."""

from pathlib import Path


def heads_path() -> Path:
    """Return the folder of the heads, for vLLM's medusa method and `load_medusa_heads`."""
    return Path(__file__).parent
