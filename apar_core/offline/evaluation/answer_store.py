"""The measured answers of one run in its folder: kept as they come, for a run to go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from apar_core.errors import EvaluationError
from apar_core.json_lines import append_line, read_finished_lines
from apar_core.offline.evaluation.measurement import AnswerKey, AnswerMeasurement

SETTINGS_FILE = "run.json"


def claim_folder(folder: Path, settings: Mapping[str, str]) -> bool:
    """Make a folder this run's own; return whether an earlier part of the same run is in it.

    Raises EvaluationError if a run with other settings is in it.
    """
    path = folder / SETTINGS_FILE
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EvaluationError(f"{path} is damaged: {error}") from error
        differing = [
            f"{name} was {found.get(name)!r}, is {value!r}"
            for name, value in settings.items()
            if found.get(name) != value
        ]
        if differing:
            raise EvaluationError(
                f"{folder} holds another run ({'; '.join(differing)}): give another --out"
            )
        return True
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(settings), indent=1), encoding="utf-8")
    return False


class AnswerStore:
    """Measured answers by question, turn and decoder, in memory and in a JSON lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers = {line.key: line for line in read_finished_lines(path, AnswerMeasurement)}

    def find(self, question_id: str, turn: int, decoder: str) -> AnswerMeasurement | None:
        """Return a measured answer, or None where it is still to be generated."""
        return self._answers.get((question_id, turn, decoder))

    def add(self, answer: AnswerMeasurement) -> None:
        """Keep an answer."""
        append_line(self._path, answer)
        self._answers[answer.key] = answer

    def of_decoder(self, decoder: str, keys: Sequence[AnswerKey]) -> tuple[AnswerMeasurement, ...]:
        """Return a decoder's answers in the order of the keys; all have to be there."""
        return tuple(self._answers[(key.question_id, key.turn, decoder)] for key in keys)
