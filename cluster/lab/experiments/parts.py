"""A measurement that is done part by part: each is kept as it ends, and not done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from apar_core.reporting import LineStore

PARTS_FILE = "parts.jsonl"

StartStage = Callable[[str, int], Callable[[], None]]
"""Begins a stage of so many parts; what it returns is called once a part."""


class Part(BaseModel):
    """A part by its name, and what it came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    data: dict[str, Any]


class PartStore:
    """Parts of one folder by their names."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        """Open the folder. Raises EvaluationError if parts with other settings are in it."""
        self._store = LineStore(folder / PARTS_FILE, settings, Part, lambda part: part.name)

    def has(self, name: str) -> bool:
        """Whether a part has been done."""
        return name in self._store.lines

    def find(self, name: str) -> dict[str, Any]:
        """Return what a part came to that has been done."""
        return self._store.lines[name].data

    def add(self, name: str, data: dict[str, Any]) -> None:
        """Keep a part."""
        self._store.add(Part(name=name, data=data))

    def get_or_do(self, name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what a part came to; do it, if it has not been done."""
        if not self.has(name):
            self.add(name, do())
        return self.find(name)
