"""JSON lines with models: read with the line's number in every error, appended one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from apar_core.errors import EvaluationError
from apar_core.validation import validation_summary

Line = TypeVar("Line", bound=BaseModel)


def read_lines(path: Path, model: type[Line], context: Any = None) -> Iterator[Line]:
    """Yield each line of a file as a model; blank lines are passed over.

    Raises EvaluationError with the number of a line that is not what it must be.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(path, number, line, model, context)
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is not UTF-8: {error.reason}") from error


def read_finished_lines(path: Path, model: type[Line]) -> list[Line]:
    """Return what an interrupted run has left; a last line without its end is cut off the file."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    return list(read_lines(path, model))


def append_line(path: Path, line: BaseModel) -> None:
    """Add a line so that it outlasts this process."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def _parse(path: Path, number: int, line: str, model: type[Line], context: Any) -> Line:
    try:
        return model.model_validate_json(line, context=context)
    except ValidationError as error:
        raise EvaluationError(f"{path}, line {number}: {validation_summary(error)}") from error
