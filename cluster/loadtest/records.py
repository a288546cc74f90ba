"""What one request of a load test took: a line of `requests.jsonl`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict

CANCELLED = "cancelled"
"""Kind of error of a request that was under way when the user ended the run."""


class RequestRecord(BaseModel):
    """One request; times are seconds, `sent_s` and `planned_s` since the start of its repeat.

    `planned_s` is None where a request is sent when another one ends. `pieces` are the parts of the
    text as they came: (seconds since it was sent, characters). `end_s`, when the last part of the
    answer had come, and `paragraph_s`, when the first paragraph was complete, count from there too.
    `text_tokens` are the server's count, or that of the pieces if it gives none (`counted` is false
    then). `error` is the kind of error, None for an answer that came whole. `apar` is the server's
    statistics of its threads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repeat: int
    index: int
    id: str
    category: str
    sent_s: float
    end_s: float
    planned_s: float | None = None
    pieces: list[tuple[float, int]] = []
    paragraph_s: float | None = None
    status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    text_tokens: int = 0
    counted: bool = True
    error: str | None = None
    message: str | None = None
    apar: dict[str, Any] | None = None

    @property
    def first_s(self) -> float | None:
        """When the first piece of text had come, since the start of the repeat."""
        return self.sent_s + self.pieces[0][0] if self.pieces else None

    @property
    def finished_s(self) -> float:
        """When it had ended, since the start of the repeat."""
        return self.sent_s + self.end_s

    @property
    def late_s(self) -> float | None:
        """How long after its time it was sent: the client's fault."""
        return None if self.planned_s is None else self.sent_s - self.planned_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between one piece of text and the next."""
        times = [time_s for time_s, _ in self.pieces]
        return [after - before for before, after in pairwise(times)]

    def tokens_by_piece(self) -> list[tuple[float, float]]:
        """When the text's tokens came, since the start of the repeat, and how many.

        A piece may hold several; the answer's tokens are shared out by characters.
        """
        characters = sum(length for _, length in self.pieces)
        if not characters:
            return []
        per_character = self.text_tokens / characters
        return [(self.sent_s + time_s, length * per_character) for time_s, length in self.pieces]
