"""Permissions of files that a library writes for their owner only."""

from __future__ import annotations

import shutil
from pathlib import Path


def share_weights(config: Path) -> None:
    """Give the safetensors files beside a configuration its mode, which follows the umask.

    safetensors writes them with mode 0600, so another account could not serve the checkpoint.
    """
    for weights in config.parent.glob("*.safetensors"):
        shutil.copymode(config, weights)
