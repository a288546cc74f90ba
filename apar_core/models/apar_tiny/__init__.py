"""The embedded checkpoint apar-tiny: weights, tokenizer and model card lie beside this file."""

from pathlib import Path


def checkpoint_path() -> Path:
    """Return the folder of the checkpoint, as `from_pretrained` and vLLM take it."""
    return Path(__file__).parent
