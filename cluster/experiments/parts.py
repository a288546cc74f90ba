"""A measurement that is done part by part: each is kept as it ends, and not done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from apar_core.json_lines import append_line, read_finished_lines
from apar_core.reporting import SETTINGS_FILE, claim_folder

PARTS_FILE = "parts.jsonl"

StartStage = Callable[[str, int], Callable[[], None]]
"""Begins a stage of so many parts; what it returns is called once a part."""


Key = TypeVar("Key")
Line = TypeVar("Line", bound=BaseModel)


class Part(BaseModel):
    """A part by its name, and what it came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    data: dict[str, Any]


class LineStore(Generic[Key, Line]):
    """What one folder holds already: models by their key, in memory and in a JSON lines file."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, str],
        model: type[Line],
        key_of: Callable[[Line], Key],
    ) -> None:
        """Open the file. Raises EvaluationError if other settings are those of its folder.

        What is refused before a first line is kept leaves the folder free for another try.
        """
        if (path.parent / SETTINGS_FILE).is_file():
            claim_folder(path.parent, settings)
        self._settings = settings
        self._path = path
        self._key_of = key_of
        self.lines = {key_of(line): line for line in read_finished_lines(path, model)}

    def add(self, line: Line) -> None:
        """Keep one."""
        if not self.lines:
            claim_folder(self._path.parent, self._settings)
        append_line(self._path, line)
        self.lines[self._key_of(line)] = line

    def sort(self) -> None:
        """Rewrite the file in the order of the keys, whichever line was added first."""
        ordered = sorted(self.lines.items(), key=lambda item: str(item[0]))
        self.lines = dict(ordered)
        copy = self._path.with_suffix(".new")
        copy.write_text("".join(f"{line.model_dump_json()}\n" for _, line in ordered), "utf-8")
        copy.replace(self._path)


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
