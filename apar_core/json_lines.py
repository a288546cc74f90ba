"""Read and append JSON lines that are pydantic models."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from apar_core.errors import EvaluationError, validation_summary

Line = TypeVar("Line", bound=BaseModel)


def read_lines(path: Path, model: type[Line], context: Any = None) -> Iterator[Line]:
    """Yield each line of a file as a model; skip blank lines.

    `context` is passed to the model's validators. Raises EvaluationError, with the number of an
    invalid line.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    parsed = model.model_validate_json(line, context=context)
                except ValidationError as error:
                    problem = validation_summary(error)
                    raise EvaluationError(f"{path}, line {number}: {problem}") from error
                yield parsed
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is not UTF-8: {error.reason}") from error


def read_finished_lines(path: Path, model: type[Line]) -> list[Line]:
    """Return the lines that an interrupted run has written; truncate an incomplete last line.

    Returns an empty list if there is no file.
    """
    if not path.is_file():
        return []
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    return list(read_lines(path, model))


def append_line(path: Path, line: BaseModel) -> None:
    """Append a line and sync it to disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


class LineWriter:
    """Appends many lines to a file, and syncs them to disk about once a second.

    Use it as a context manager. `read_finished_lines` reads the file after an interruption.
    """

    def __init__(self, path: Path, interval_s: float = 1.0) -> None:
        self._path = path
        self._interval_s = interval_s
        self._synced_at = time.monotonic()

    def __enter__(self) -> LineWriter:
        self._file: IO[str] = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._sync()
        self._file.close()

    def append(self, line: BaseModel) -> None:
        """Append a line."""
        self._file.write(line.model_dump_json() + "\n")
        if time.monotonic() - self._synced_at >= self._interval_s:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()
