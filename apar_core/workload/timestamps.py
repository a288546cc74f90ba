"""Times of recorded requests: Azure's table of a production service, or plain seconds."""

from __future__ import annotations

import csv
import math
from datetime import UTC, datetime
from pathlib import Path

from apar_core.errors import EvaluationError

AZURE_COLUMN = "TIMESTAMP"
"""Of AzurePublicDataset's AzureLLMInferenceTrace tables."""


def read_timestamps(path: Path) -> list[float]:
    """Return the times in seconds, in the order of the file.

    A file is a table with a column TIMESTAMP (ISO 8601, UTC where it names no zone), or has one
    number of seconds a line. Raises EvaluationError, with the number of the line that is neither.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.reader(lines)
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from error
    if rows and AZURE_COLUMN in rows[0][1]:
        column = rows[0][1].index(AZURE_COLUMN)
        return [_moment_s(path, number, row, column) for number, row in rows[1:]]
    return [_seconds(path, number, row) for number, row in rows]


def _moment_s(path: Path, number: int, row: list[str], column: int) -> float:
    try:
        # Azure writes seven digits of a second, of which datetime passes over the last.
        moment = datetime.fromisoformat(row[column])
    except (ValueError, IndexError) as error:
        raise EvaluationError(f"{path}, row {number}: no {AZURE_COLUMN}: {row}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _seconds(path: Path, number: int, row: list[str]) -> float:
    try:
        (text,) = row
        seconds = float(text)
        if not math.isfinite(seconds):
            raise ValueError(text)
        return seconds
    except ValueError as error:
        raise EvaluationError(
            f"{path}, row {number}: neither seconds nor a table with {AZURE_COLUMN}: {row}"
        ) from error
