"""The parts of a measurement that is done part by part: kept as they end, not done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from apar_core.evaluation.answer_store import claim_folder
from apar_core.evaluation.json_lines import append_line, read_finished_lines

PARTS_FILE = "parts.jsonl"

StartStage = Callable[[str, int], Callable[[], None]]
"""Begins a stage of so many parts; what it returns is called once a part."""


class Part(BaseModel):
    """A part by its name, and what it came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    data: dict[str, Any]


class PartStore:
    """Parts of one folder, in memory and in a JSON lines file."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        """Open the folder. Raises EvaluationError if parts with other settings are in it."""
        claim_folder(folder, settings)
        self._path = folder / PARTS_FILE
        self._parts = {part.name: part.data for part in read_finished_lines(self._path, Part)}

    def has(self, name: str) -> bool:
        """Whether a part has been done."""
        return name in self._parts

    def find(self, name: str) -> dict[str, Any]:
        """Return what a part came to that has been done."""
        return self._parts[name]

    def add(self, name: str, data: dict[str, Any]) -> None:
        """Keep a part."""
        append_line(self._path, Part(name=name, data=data))
        self._parts[name] = data

    def get_or_do(self, name: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what a part came to; do it, if it has not been done."""
        if name not in self._parts:
            self.add(name, do())
        return self._parts[name]
