"""Errors that a client can get: HTTP status, OpenAI error body, and reason in the metrics.

    AparError                        500 internal_error
      RequestError                   400
        UnknownKeyError              401 invalid_api_key
        UnknownModelError            404 model_not_found
        UnknownRouteError            404 unknown_url
          WrongMethodError           405 method_not_allowed
        BodyTimeoutError             408 request_timeout
        BodyTooLargeError            413 request_too_large
        PromptTooLongError           400 context_length_exceeded
        RateLimitError               429 rate_limit_exceeded
      CapacityError                  503 overloaded
        QueueTimeoutError            503 overloaded
        NotReadyError                503 not_ready
        DrainingError                503 draining
      EngineError                    500 internal_error
        ReplicaLostError             503 engine_lost
          ReplicaBrokenError         503 engine_lost
          EnginesDiedError           500 engine_lost_twice
          NoReplicaError             503 replica_unavailable

`answer_for` turns refusals and lost replicas into answers; the rest becomes `INTERNAL_ERROR`.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from apar_core.errors import AparError, CapacityError, EngineError, RequestError
from deployments.wire.answer import Headers

JSON_TYPE = (b"content-type", b"application/json")
DONE_EVENT = b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error"'
"""Start of the event with which vLLM or the gateway ends a failed stream."""
REJECTION_REASONS = (
    "authentication",
    "key_limit",
    "overloaded",
    "queue_timeout",
    "body_timeout",
    "invalid",
    "too_large",
    "unknown_model",
    "unknown_route",
    "no_replica",
    "draining",
)
"""Values of the label `reason` of the metric `apar_requests_rejected_total`."""
_RETRY_AFTER_S = 5.0
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class UnknownKeyError(RequestError):
    """The request carries no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"
    reason = "authentication"


class UnknownModelError(RequestError):
    """The request names a model that is not served here, or that its key may not use."""

    status = 404
    code = "model_not_found"
    reason = "unknown_model"

    def __init__(self, name: str) -> None:
        message = f"The model `{name}` does not exist or is not served here."
        super().__init__(message, param="model")


class UnknownRouteError(RequestError):
    """The path is not served."""

    status = 404
    code = "unknown_url"
    reason = "unknown_route"


class WrongMethodError(UnknownRouteError):
    """The path is served, but not with this method."""

    status = 405
    code = "method_not_allowed"


class BodyTimeoutError(RequestError):
    """The body has not arrived in time."""

    status = 408
    code = "request_timeout"
    reason = "body_timeout"


class BodyTooLargeError(RequestError):
    """The body exceeds a limit: its bytes, its JSON values, or Ray Serve's message size."""

    status = 413
    code = "request_too_large"
    reason = "too_large"


class PromptTooLongError(RequestError):
    """The prompt has more characters than allowed."""

    code = "context_length_exceeded"
    reason = "too_large"


class RateLimitError(RequestError):
    """The key has used up a limit and may retry later.

    `kind` is `requests` or `tokens` (per minute), or `threads` (alive at once).
    """

    status = 429
    code = "rate_limit_exceeded"
    reason = "key_limit"
    retry_after_s: float

    def __init__(self, message: str, *, kind: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class QueueTimeoutError(CapacityError):
    """The request has waited in the queue for the longest time allowed."""

    reason = "queue_timeout"


class NotReadyError(CapacityError):
    """No replica is ready."""

    code = "not_ready"

    def __init__(self) -> None:
        super().__init__("No replica is ready.", retry_after_s=_RETRY_AFTER_S)


class DrainingError(CapacityError):
    """The server is stopping and takes no new requests."""

    code = "draining"
    reason = "draining"

    def __init__(self) -> None:
        message = "The server is stopping; please send the request again."
        super().__init__(message, retry_after_s=_RETRY_AFTER_S)


class ReplicaLostError(EngineError):
    """A replica died, cannot be reached, or handed over the request it was serving.

    `engine_died` is set if the replica reported that its engine died. `replica` is its id, None if
    unknown. Clients get `client_message`; the exception's own text is for the log.
    """

    status = 503
    code = "engine_lost"
    retry_after_s: float | None = _RETRY_AFTER_S
    client_message = "The engine that served this request stopped; please send the request again."

    def __init__(
        self, message: str, *, engine_died: bool = False, replica: str | None = None
    ) -> None:
        super().__init__(message)
        self.engine_died = engine_died
        self.replica = replica


class ReplicaBrokenError(ReplicaLostError):
    """The replica itself reported that it cannot continue."""


class EnginesDiedError(ReplicaLostError):
    """Several engines died under a request, which may be the cause and is not retried."""

    status = 500
    code = "engine_lost_twice"
    retry_after_s = None
    client_message = (
        "Two engines died while serving this request. It may be the cause and is not sent to "
        "another one."
    )


class NoReplicaError(ReplicaLostError):
    """No replica accepted the request within the timeout, which is not retried."""

    code = "replica_unavailable"
    reason = "no_replica"
    client_message = "No replica accepted this request in time; please send it again."


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as it is sent: as a whole answer, or as the last events of a stream."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    kind: str | None = None
    extra_headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        """The OpenAI error body."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": self.kind or usual,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": error}).encode()

    @property
    def headers(self) -> Headers:
        """The response headers, with `Retry-After` if the client may retry."""
        headers = [JSON_TYPE, (b"content-length", str(len(self.body)).encode())]
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", str(seconds).encode()))
        return [*headers, *self.extra_headers]

    @property
    def events(self) -> bytes:
        """The error event and the end of a stream."""
        return b"data: " + self.body + b"\n\n" + DONE_EVENT


INTERNAL_ERROR = ErrorAnswer(
    AparError.status, "The server failed to answer this request.", code=AparError.code
)
"""Answer to a request that failed unexpectedly; the reason belongs in the log."""


def answer_for(error: RequestError | CapacityError | ReplicaLostError) -> ErrorAnswer:
    """Return the answer to a request that was refused, or whose replica was lost."""
    message = error.client_message if isinstance(error, ReplicaLostError) else str(error)
    kind: str | None = None
    extra_headers: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, EnginesDiedError):
        # Without this header, OpenAI's clients would retry by themselves.
        extra_headers = ((b"x-should-retry", b"false"),)
    elif isinstance(error, UnknownKeyError):
        extra_headers = ((b"www-authenticate", b'Bearer realm="apar"'),)
    elif isinstance(error, RateLimitError):
        kind = error.kind
    return ErrorAnswer(
        error.status,
        message,
        param=error.param,
        code=error.code,
        retry_after_s=error.retry_after_s,
        kind=kind,
        extra_headers=extra_headers,
    )


def error_code(body: bytes) -> str | None:
    """Return the code in an OpenAI error body, None if it has none."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, str) else None


def event_error_code(events: bytes) -> str:
    """Return the code in the error event that ends a stream, `error` if it has none."""
    event = events.removeprefix(b"data: ").partition(b"\n\n")[0]
    return error_code(event) or "error"


def error_summary(status: int, body: bytes) -> str:
    """Return status, type and code of an error body; its message may quote a prompt."""
    try:
        error = json.loads(body)["error"]
        kind, code = error.get("type"), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        kind = code = None
    return f"HTTP {status}, type {_word(kind)}, code {_word(code)}"


def _word(value: object) -> str:
    text = str(value)
    return text if isinstance(value, str | int) and _WORD.fullmatch(text) else "unknown"


def normalised(status: int, body: bytes) -> bytes:
    """Rewrite vLLM's error body with OpenAI's four keys and types.

    vLLM puts the status into `code` and the Python exception into `type`, and prefixes the name of
    a wrong field with `body.`.
    """
    try:
        answer: Any = json.loads(body)
    except ValueError:
        answer = None
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        detail = answer.get("detail") if isinstance(answer, dict) else None
        text = detail if isinstance(detail, str) else body.decode(errors="replace")
        return ErrorAnswer(status, text or f"HTTP {status}").body
    param = error.get("param")
    if isinstance(param, str):
        param = param.removeprefix("body.") or None
    code = error.get("code")
    return ErrorAnswer(
        status,
        str(error.get("message", f"HTTP {status}")),
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    ).body
