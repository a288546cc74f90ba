"""Adapter of a checkpoint folder of `apar train`."""

from __future__ import annotations

from pathlib import Path

ADAPTER_FOLDER = "adapter"
"""Folder of an adapter that is not merged, inside that of its base model."""
ADAPTER_CONFIG = "adapter_config.json"


def adapter_in(checkpoint: str | Path) -> Path | None:
    """Return the adapter in a checkpoint's folder; None without one, and for names on a hub."""
    folder = Path(checkpoint).expanduser() / ADAPTER_FOLDER
    return folder if (folder / ADAPTER_CONFIG).is_file() else None
