"""Embedded checkpoint apar-tiny-threadweaver, whose threads are joined before it goes on."""

from pathlib import Path


def checkpoint_path() -> Path:
    """Return the folder of the checkpoint, for `from_pretrained` and vLLM."""
    return Path(__file__).parent
