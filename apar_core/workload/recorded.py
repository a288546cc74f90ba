"""Answers of a live cluster, saved in the form that `trace.read_trace` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from apar_core.errors import EvaluationError
from apar_core.workload.trace import TraceLine


class TraceWriter:
    """A new file of JSON lines, one for each answer, in the order in which they end."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises EvaluationError if there is one already or none can be made."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise EvaluationError(f"{path} exists already: answers would be lost") from error
        except OSError as error:
            raise EvaluationError(f"{path} cannot be written: {error.strerror}") from error

    def add(self, line: TraceLine) -> None:
        """Write one answer, so that it outlasts this process."""
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
