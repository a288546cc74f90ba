"""Exceptions that this project raises on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Paragraph trees and fork parameters need no library, and they import this module.
if TYPE_CHECKING:
    from pydantic import ValidationError


class AparError(Exception):
    """Base of every error that this project raises on purpose.

    A client whose request ends with the error gets `status` (HTTP) and `code` (in OpenAI's error
    body).
    """

    status: int = 500
    code: str | None = "internal_error"
    param: str | None = None
    retry_after_s: float | None = None


class RequestError(AparError):
    """Invalid request: HTTP 400.

    `param` names the field of the request, as in OpenAI's error body. `reason` labels the refusal
    in the metric `apar_requests_rejected_total`.
    """

    status = 400
    code: str | None = None
    reason = "invalid"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(AparError):
    """No replica has room now and the client may retry: HTTP 503 with Retry-After."""

    status = 503
    code = "overloaded"
    reason = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(AparError):
    """The engine failed on a valid request, or its configuration is invalid: HTTP 500."""


class CheckpointError(AparError):
    """A checkpoint cannot be served, fetched or converted."""


class TreeError(AparError):
    """Broken invariant of a paragraph tree: a bug, never the client's fault."""


class TrainingError(AparError):
    """Invalid recipe, model or data: a training run cannot start or continue."""


class EvaluationError(AparError):
    """Invalid file, endpoint or option: an evaluation or load test cannot start or continue."""


class DataError(AparError):
    """Invalid data file, or an invalid line in one."""


class StepCostsError(AparError):
    """Unknown GPU or model, a model that a GPU cannot hold, or an invalid file of step costs."""


def validation_summary(error: ValidationError) -> str:
    """Return the first problem that pydantic reports, as "field: problem"."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "line"
    return f"{field}: {first['msg']}"
