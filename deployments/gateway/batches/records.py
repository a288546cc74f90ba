"""Records of files and batches: what is stored, its changes of state, and what clients see."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from deployments.wire.errors import ConflictError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Paths to which the lines of a batch may be sent."""
COMPLETION_WINDOW = "24h"
WINDOW_S = 86_400
INPUT = "batch"
OUTPUT = "batch_output"
_NUM_TIME_CHARS = 12


def new_id(prefix: str) -> str:
    """Return a new id that sorts behind those made in earlier milliseconds."""
    now_ms = time.time_ns() // 1_000_000
    return f"{prefix}{now_ms:0{_NUM_TIME_CHARS}x}{secrets.token_hex(10)}"


class StoredFile(BaseModel):
    """A file of one key: uploaded, or the results of a batch.

    `owner` is the name of the key, empty for callers without one. `batch_id` is set for results,
    which are stored with their batch; `has_errors` tells the error file from the output file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    owner: str
    filename: str
    num_bytes: int
    purpose: str
    created_at: int
    expires_at: int
    batch_id: str | None = None
    has_errors: bool = False

    def shown(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class Status(StrEnum):
    """State of a batch, as in OpenAI's API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OPEN = frozenset({Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING})
"""States of a batch that has not ended."""


class InputProblem(BaseModel):
    """Why a batch fails; `line` counts from 1, `param` is the field of the line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of a batch that have been answered, and the bytes of their results."""

    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of both files."""
        return self.output_bytes + self.error_bytes


class Batch(BaseModel):
    """A batch of one key, without the counts of its lines, which the store keeps apart.

    A line's result is stored before it is counted as done, so a batch continues where it was.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    # Lines with requests, and the number of the last of them.
    num_lines: int = 0
    last_line: int = 0
    problems: tuple[InputProblem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    # When the batch reached a state, by the state's name.
    times: dict[Status, int] = {}

    @property
    def is_open(self) -> bool:
        """Whether the batch has not ended."""
        return self.status in OPEN

    @property
    def ended_at(self) -> int | None:
        """When the batch ended; None while it is open."""
        return None if self.is_open else self.times[self.status]

    def now(self, status: Status, now_s: int, **changes: Any) -> "Batch":
        """Return the batch in another state."""
        times = self.times | {status: now_s}
        return self.model_copy(update={"status": status, "times": times, **changes})

    def validated(self, num_lines: int, last_line: int, now_s: int) -> "Batch":
        """Return the batch with a valid input of so many lines."""
        if self.status is not Status.VALIDATING:
            return self  # Cancelled meanwhile.
        return self.now(Status.IN_PROGRESS, now_s, num_lines=num_lines, last_line=last_line)

    def refused(self, problems: Sequence[InputProblem], now_s: int) -> "Batch":
        """Return the batch as failed because of its input."""
        if not self.is_open:
            return self
        return self.now(Status.FAILED, now_s, problems=tuple(problems))

    def answered(self, now_s: int) -> "Batch":
        """Return the batch, all of whose lines have results."""
        if self.status is not Status.IN_PROGRESS:
            return self
        return self.now(Status.FINALIZING, now_s)

    def ended(
        self, now_s: int, output_file_id: str | None, error_file_id: str | None, *, expired: bool
    ) -> "Batch":
        """Return the batch at its end, with the files of its results."""
        if not self.is_open:
            return self
        if self.status is Status.CANCELLING:
            status = Status.CANCELLED
        else:
            status = Status.EXPIRED if expired else Status.COMPLETED
        return self.now(status, now_s, output_file_id=output_file_id, error_file_id=error_file_id)

    def cancelled(self, now_s: int) -> "Batch":
        """Return the batch as its owner's request to cancel leaves it. Raises ConflictError."""
        if self.status is Status.CANCELLING:
            return self
        if not self.is_open:
            raise ConflictError(f"The batch {self.id} has ended: its status is {self.status}.")
        return self.now(Status.CANCELLING, now_s)

    def shown(self, counts: Counts) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        errors = [problem.model_dump() for problem in self.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMED},
            "request_counts": {
                "total": self.num_lines,
                "completed": counts.completed,
                "failed": counts.failed,
            },
            "metadata": self.metadata,
        }


_TIMED = tuple(status for status in Status if status is not Status.VALIDATING)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of an output or error file; `line` is its line in the input, from 1."""

    line: int
    is_error: bool
    record: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list: at most `limit` records behind the id `after`."""

    after: str | None = None
    limit: int = 20
    newest_first: bool = True
