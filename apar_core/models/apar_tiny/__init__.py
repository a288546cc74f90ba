"""Embedded checkpoint apar-tiny: weights, tokenizer and model card are in this folder."""

from pathlib import Path


def checkpoint_path() -> Path:
    """Return the folder of the checkpoint, for `from_pretrained` and vLLM."""
    return Path(__file__).parent
