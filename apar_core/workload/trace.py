"""Recorded requests with the answers that were given: JSON lines to replay.

A line has a `prompt` and the `response` to it; `id`, `category`, `source` and the `history` of the
chat before the prompt may be absent. Other keys are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from apar_core.errors import EvaluationError
from apar_core.json_lines import read_lines
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.answer_files import AnswerLine


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One recorded request; `history` is the chat before `prompt`, which the user wrote."""

    id: str
    category: str
    prompt: str
    response: str
    source: str = ""
    history: tuple[ChatMessage, ...] = ()

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The whole chat that was answered."""
        return (*self.history, ChatMessage("user", self.prompt))


class _RecordedLine(AnswerLine):
    source: str = ""


def read_trace(path: Path, *, limit: int | None = None) -> list[TraceLine]:
    """Return the first `limit` lines that have an answer; all of them without a limit.

    A line without an `id` is called by its number, counted from 0. Raises EvaluationError for a
    file that is empty or not of this form, and for an `id` that comes twice.
    """
    lines = list(islice(_answered(path), limit))
    if not lines:
        raise EvaluationError(f"{path} has no recorded answer")
    return lines


def _answered(path: Path) -> Iterator[TraceLine]:
    known: set[str] = set()
    for number, line in enumerate(read_lines(path, _RecordedLine)):
        if line.prompt is None or line.response is None:
            raise EvaluationError(f"{path}: answer {number} has no 'prompt' with its 'response'")
        name = str(number) if line.id is None else str(line.id)
        if name in known:
            raise EvaluationError(f"{path}: two answers have the id {name!r}")
        known.add(name)
        if line.response:
            history = tuple(ChatMessage(turn.role, turn.content) for turn in line.history)
            yield TraceLine(name, line.category, line.prompt, line.response, line.source, history)
