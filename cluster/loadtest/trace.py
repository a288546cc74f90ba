"""Recorded requests with their answers, as JSON lines: read for replay, and written.

A line has a `prompt` and its `response`. `id`, `category`, `source` and the `history` of the chat
before the prompt are optional; other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel

from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ChatMessage


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One recorded request; `history` is the chat before the user's `prompt`."""

    id: str
    category: str
    prompt: str
    response: str
    source: str = ""
    history: tuple[ChatMessage, ...] = ()

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The chat up to the response."""
        return (*self.history, ChatMessage("user", self.prompt))


class _Message(BaseModel):
    role: str
    content: str


class _RecordedLine(BaseModel):
    prompt: str
    response: str
    id: int | str | None = None
    category: str = "other"
    source: str = ""
    history: list[_Message] = []


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceLine]:
    """Return the first `limit` lines with a non-empty response; all of them without a limit.

    A line without an `id` gets its number, counted from 0. Raises EvaluationError for a file
    without such lines, for an invalid line, and for a duplicate `id`.
    """
    lines = list(islice(_answered(path), limit))
    if not lines:
        raise EvaluationError(f"{path} has no recorded answer")
    return lines


def _answered(path: Path) -> Iterator[TraceLine]:
    known: set[str] = set()
    for number, line in enumerate(read_lines(path, _RecordedLine)):
        name = str(number) if line.id is None else str(line.id)
        if name in known:
            raise EvaluationError(f"{path}: two answers have the id {name!r}")
        known.add(name)
        if line.response:
            history = tuple(ChatMessage(turn.role, turn.content) for turn in line.history)
            yield TraceLine(name, line.category, line.prompt, line.response, line.source, history)


class TraceWriter:
    """Write answers to a new file that `read_trace` reads, one JSON line for each."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises EvaluationError if it exists or cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise EvaluationError(f"{path} exists already: answers would be lost") from error
        except OSError as error:
            raise EvaluationError(f"{path} cannot be written: {error.strerror}") from error

    def add(self, line: TraceLine) -> None:
        """Write one answer and flush it."""
        record = {
            "id": line.id,
            "source": line.source,
            "category": line.category,
            "prompt": line.prompt,
            "response": line.response,
            "history": [turn.as_dict() for turn in line.history],
        }
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
