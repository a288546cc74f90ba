"""Read and append JSON lines that are pydantic models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

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
