"""The errors of this project, as one tree."""


class AparError(Exception):
    """Base of every error that this project raises on purpose.

    `status` (HTTP) and `code` (of OpenAI's error body) are what a client gets whose request ends
    with the error.
    """

    status: int = 500
    code: str | None = "internal_error"
    param: str | None = None
    retry_after_s: float | None = None


class RequestError(AparError):
    """The client asked for something that is not possible: HTTP 400.

    `param` names the field of the request, as in OpenAI's error body. `reason` labels the refusal
    in the metric `apar_requests_rejected_total`.
    """

    status = 400
    code = None
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
    """The engine failed under a valid request: HTTP 500."""


class CheckpointError(AparError):
    """A checkpoint cannot be served as it is: refuse to start."""


class TreeError(AparError):
    """A paragraph tree's invariant was broken: a bug, never the client's fault."""


class TrainingError(AparError):
    """A training run cannot start or go on: its recipe, model or data is not as it must be."""


class EvaluationError(AparError):
    """An evaluation cannot go on: a file, an endpoint or an option is not as it must be."""


class DataError(AparError):
    """A data file, or a line of it, is not what it must be."""
