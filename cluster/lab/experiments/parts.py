"""Measurements in parts: each part is stored as it completes, and not repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from apar_core.reporting import LineStore

PARTS_FILE = "parts.jsonl"

StartStage = Callable[[str, int], Callable[[], None]]
"""Starts a progress stage of a number of parts; the returned function is called once per part."""


class Part(BaseModel):
    """A named part and its result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    data: dict[str, Any]


class PartStore:
    """Parts stored in one folder, by name."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        """Open the folder. Raises EvaluationError if parts with other settings are in it."""
        self._store = LineStore(folder / PARTS_FILE, settings, Part, lambda part: part.name)

    def has(self, name: str) -> bool:
        """Return whether a part is stored."""
        return name in self._store.lines

    def find(self, name: str) -> dict[str, Any]:
        """Return the result of a stored part."""
        return self._store.lines[name].data

    def add(self, name: str, data: dict[str, Any]) -> None:
        """Store the result of a part."""
        self._store.add(Part(name=name, data=data))

    def sort(self) -> None:
        """Rewrite the file in the order of names, whichever part ended first."""
        self._store.sort()

    def get_or_do(self, name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a part; call `do` and store its result if the part is missing."""
        if not self.has(name):
            self.add(name, do())
        return self.find(name)
