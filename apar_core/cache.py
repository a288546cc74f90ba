"""Folders of downloaded files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder of this name below `apar-serve` in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).absolute() / "apar-serve" / name
