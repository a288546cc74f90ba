"""Errors as HTTP status and OpenAI error body."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from apar_core.errors import AparError, CapacityError, RequestError

JSON_TYPE = (b"content-type", b"application/json")
DONE_EVENT = b"data: [DONE]\n\n"
ERROR_EVENT = b'data: {"error"'
"""How an event begins that ends a stream with an error, ours or vLLM's."""
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ENGINE_LOST = "engine_lost"
ENGINE_LOST_TWICE = "engine_lost_twice"
REPLICA_UNAVAILABLE = "replica_unavailable"


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error, ready to be sent whole or as an event of a stream."""

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
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers, `Retry-After` among them where the client may retry."""
        headers = [JSON_TYPE, (b"content-length", str(len(self.body)).encode())]
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", str(seconds).encode()))
        return [*headers, *self.extra_headers]

    @property
    def events(self) -> bytes:
        """The last events of a stream that cannot go on."""
        return b"data: " + self.body + b"\n\n" + DONE_EVENT


def answer_for(error: AparError) -> ErrorAnswer:
    """The answer that a client gets for one of our errors."""
    if isinstance(error, RequestError):
        return ErrorAnswer(400, str(error), param=error.param)
    if isinstance(error, CapacityError):
        return ErrorAnswer(503, str(error), code="overloaded", retry_after_s=error.retry_after_s)
    return ErrorAnswer(500, str(error), code="internal_error")


def unknown_key(message: str) -> ErrorAnswer:
    """The answer to a request without a key, or with one that is not known here."""
    challenge = (b"www-authenticate", b'Bearer realm="apar"')
    return ErrorAnswer(401, message, code="invalid_api_key", extra_headers=(challenge,))


def rate_limited(message: str, kind: str, retry_after_s: float) -> ErrorAnswer:
    """The answer when a key has used up what it may have: `requests`, `tokens` or `threads`."""
    return ErrorAnswer(
        429, message, code="rate_limit_exceeded", kind=kind, retry_after_s=retry_after_s
    )


def prompt_too_long(message: str, param: str | None) -> ErrorAnswer:
    """The answer to a prompt over the limit of its characters."""
    return ErrorAnswer(400, message, param=param, code="context_length_exceeded")


def body_too_large(message: str) -> ErrorAnswer:
    """The answer to a body over the limit of its bytes."""
    return ErrorAnswer(413, message, code="request_too_large")


def body_timeout(message: str) -> ErrorAnswer:
    """The answer to a request whose body has not come in time."""
    return ErrorAnswer(408, message, code="request_timeout")


def unknown_model(name: str) -> ErrorAnswer:
    """The answer for a `model` that is not served here."""
    message = f"The model `{name}` does not exist or is not served here."
    return ErrorAnswer(404, message, param="model", code="model_not_found")


def unknown_route(method: str, path: str) -> ErrorAnswer:
    """The answer for a path that is not served."""
    return ErrorAnswer(404, f"Unknown route: {method} {path}", code="unknown_url")


def wrong_method(method: str, path: str) -> ErrorAnswer:
    """The answer for a known path asked for with another method."""
    return ErrorAnswer(405, f"{path} does not accept {method}", code="method_not_allowed")


def engine_lost() -> ErrorAnswer:
    """The answer when a replica dies under a request: the client may send it again."""
    message = "The engine that served this request stopped; please send the request again."
    return ErrorAnswer(503, message, code=ENGINE_LOST, retry_after_s=5.0)


def engine_lost_twice() -> ErrorAnswer:
    """The answer when two engines died under a request, which may be the reason.

    It has no `Retry-After`, and tells OpenAI's clients not to send the request again by themselves.
    """
    message = (
        "Two engines died while they served this request, so it is not sent to another one. "
        "It may be the cause."
    )
    no_retry = ((b"x-should-retry", b"false"),)
    return ErrorAnswer(500, message, code=ENGINE_LOST_TWICE, extra_headers=no_retry)


def replica_unavailable() -> ErrorAnswer:
    """The answer when no replica has taken a request in time: the client may send it again."""
    message = "No replica has taken this request in time; please send it again."
    return ErrorAnswer(503, message, code=REPLICA_UNAVAILABLE, retry_after_s=5.0)


def internal_error() -> ErrorAnswer:
    """The answer for a failure that is ours; its cause stands in the log."""
    return ErrorAnswer(500, "The server failed to answer this request.", code="internal_error")


def no_replica() -> ErrorAnswer:
    """The health answer while no replica can serve."""
    return ErrorAnswer(503, "No replica is ready.", code="not_ready", retry_after_s=5.0)


def error_code(body: bytes) -> str | None:
    """The code in an OpenAI error body; None where there is none."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, str) else None


def error_summary(status: int, body: bytes) -> str:
    """Status, type and code of an error body; never its message, which may quote a prompt."""
    try:
        error = json.loads(body)["error"]
        kind, code = error.get("type"), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        kind = code = None
    return f"HTTP {status}, type {_word(kind)}, code {_word(code)}"


def _word(value: object) -> str:
    """A plain word or number for a summary; anything else becomes `unknown`."""
    text = str(value)
    return text if isinstance(value, str | int) and _WORD.fullmatch(text) else "unknown"


def event_error_code(events: bytes) -> str:
    """The code in the error event that a stream ends with; `error` where it has none."""
    event = events.removeprefix(b"data: ").partition(b"\n\n")[0]
    return error_code(event) or "error"


def normalised(status: int, body: bytes) -> bytes:
    """vLLM's error body with OpenAI's four keys and types.

    vLLM names the status in `code` and Python exceptions in `type`; the place of a wrong
    field comes as `body.prompt`.
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
