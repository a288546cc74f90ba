"""Errors that a client can get: HTTP status, error body, and reason in the metrics.

    AparError                        500 internal_error
      RequestError                   400
        UnknownKeyError              401 invalid_api_key
          ExpiredKeyError            401 expired_api_key
        AdminRequiredError           403 admin_required
        ConflictError                409 conflict
        UnknownModelError            404 model_not_found
        UnknownRouteError            404 unknown_url
          WrongMethodError           405 method_not_allowed
        BodyTimeoutError             408 request_timeout
        BodyTooLargeError            413 request_too_large
        UnsupportedCodingError       415 unsupported_content_encoding
        MisdirectedError             421 host_not_allowed
        PromptTooLongError           400 context_length_exceeded
        RateLimitError               429 rate_limit_exceeded
          BudgetError                429 tokens_per_day_exceeded, and so on
      CapacityError                  503 overloaded
        QueueTimeoutError            503 overloaded
        DeadlineError                503 or 429 deadline_exceeded, first_token_deadline_exceeded
        StoreError                   503 store_unavailable
        NotReadyError                503 not_ready
        DrainingError                503 draining
      EngineError                    500 internal_error
        ReplicaLostError             503 engine_lost
          ReplicaBrokenError         503 engine_lost
          EnginesDiedError           500 engine_lost_twice
          NoReplicaError             503 replica_unavailable

`response_for` turns refusals and lost replicas into answers; the rest becomes `INTERNAL_ERROR`.
"""

import ast
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from apar_core.errors import AparError, CapacityError, EngineError, RequestError
from deployments.wire.response import Headers
from deployments.wire.routes import ResponseForm

JSON_TYPE = (b"content-type", b"application/json")
DONE_EVENT = b"data: [DONE]\n\n"
ERROR_EVENTS = (b'data: {"error"', b"event: error\n")
"""Starts of the events with which vLLM or the gateway ends a failed stream."""
REJECTION_REASONS = (
    "authentication",
    "key_limit",
    "budget",
    "forbidden",
    "overloaded",
    "queue_timeout",
    "deadline",
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
# Of the names of models in an error; `/v1/models` lists all.
_MAX_NAMES = 20
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_PYDANTIC_HEAD = re.compile(r"\d+ validation errors?:")
_CONTEXT = ", 'ctx': {'error': "
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
_FIELD_AND_VALUE = re.compile(r" \(parameter=\w+(, value=.*)?\)$", re.DOTALL)
# Names that vLLM gives to the length of a prompt, which are not fields.
_PROMPT_LENGTHS = ("input_text", "input_tokens")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class UnknownKeyError(RequestError):
    """The request carries no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"
    reason = "authentication"


class ExpiredKeyError(UnknownKeyError):
    """The API key has expired."""

    code = "expired_api_key"


class AdminRequiredError(RequestError):
    """The API key is no admin's."""

    status = 403
    code = "admin_required"
    reason = "forbidden"


class ConflictError(RequestError):
    """The request contradicts what exists, such as a key of the configuration."""

    status = 409
    code = "conflict"


class UnknownModelError(RequestError):
    """The request names a model that is not served here, or that its key may not use."""

    status = 404
    code = "model_not_found"
    reason = "unknown_model"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        """`served` are the names that the caller may use."""
        names = ", ".join(served[:_MAX_NAMES]) or "nothing that this key may use"
        more = f", and {len(served) - _MAX_NAMES} more" if len(served) > _MAX_NAMES else ""
        super().__init__(
            f"The model `{name}` does not exist or is not served here; served: {names}{more}.",
            param="model",
        )


class UnknownRouteError(RequestError):
    """The path is not served."""

    status = 404
    code = "unknown_url"
    reason = "unknown_route"


class WrongMethodError(UnknownRouteError):
    """The path is served, but not with this method; `allowed` are the ones it is served with."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        # HEAD is answered wherever GET is.
        self.allowed = (*allowed, *(["HEAD"] if "GET" in allowed else []))
        super().__init__(f"{path} does not accept {method}; it accepts {', '.join(self.allowed)}")


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


CODINGS = ("gzip", "deflate", "zstd")
"""Content codings of request bodies that are decoded."""


class UnsupportedCodingError(RequestError):
    """The body has a content coding that is not decoded, or several."""

    status = 415
    code = "unsupported_content_encoding"

    def __init__(self, coding: str) -> None:
        super().__init__(
            f"`Content-Encoding: {coding}` is not supported; send one of {', '.join(CODINGS)}, or "
            "a body without a coding.",
            param="content-encoding",
        )


class MisdirectedError(RequestError):
    """The header `Host` names another machine, and this server listens on loopback only."""

    status = 421
    code = "host_not_allowed"
    reason = "forbidden"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"`Host: {host}` is no name of this machine: this server listens on a loopback address "
            "and answers `localhost`, loopback addresses and the names of `allowed_hosts` in its "
            "configuration.",
            param="host",
        )


class OriginError(RequestError):
    """A web page of another origin sent a request for which browsers do not ask the server."""

    status = 403
    code = "origin_not_allowed"
    reason = "forbidden"

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"Pages of {origin!r} may not send such requests; to allow them, add the origin, or "
            "`*` for all, to `cors.origins` in the configuration.",
            param="origin",
        )


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


class BudgetError(RateLimitError):
    """The key has used up a budget; `kind` is its name, such as `tokens_per_day`."""

    reason = "budget"

    def __init__(self, message: str, *, kind: str, retry_after_s: float) -> None:
        super().__init__(message, kind=kind, retry_after_s=retry_after_s)
        self.code = f"{kind}_exceeded"


class StoreError(CapacityError):
    """The store of usage and run-time keys fails; the message is for the log.

    A request for an answer depends on the store only if its key is not configured, and only after
    `key_store.max_keys_age_s`.
    """

    code = "store_unavailable"
    client_message = "The store of keys and usage does not answer; please try again."

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=_RETRY_AFTER_S)


class QueueTimeoutError(CapacityError):
    """The request has waited in the queue for the longest time allowed."""

    reason = "queue_timeout"


class DeadlineError(CapacityError):
    """A deadline of the request cannot be met; `option` is the field that sets it.

    The status is 429 if the key's own `max_threads` held the request back.
    """

    reason = "deadline"

    def __init__(
        self, option: str, reason: str, *, retry_after_s: float = 1.0, key_is_full: bool = False
    ) -> None:
        super().__init__(
            f"The deadline `apar.{option}` of this request could not be met: {reason}.",
            retry_after_s=retry_after_s,
        )
        self.param = f"apar.{option}"
        self.code = f"{option.removesuffix('_ms')}_exceeded"
        if key_is_full:
            self.status = 429


class NotReadyError(CapacityError):
    """No replica is ready."""

    code = "not_ready"

    def __init__(
        self, message: str = "No replica is ready.", *, retry_after_s: float = _RETRY_AFTER_S
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


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
class ErrorResponse:
    """An error as it is sent: as a whole answer, or as the last events of a stream.

    In Anthropic's form the error also has `code`, and `param` if a field is wrong.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    kind: str | None = None
    extra_headers: tuple[tuple[bytes, bytes], ...] = ()
    form: ResponseForm = ResponseForm.CHUNKS

    def in_form(self, form: ResponseForm) -> "ErrorResponse":
        """Return the error in another form."""
        return self if form is self.form else replace(self, form=form)

    @property
    def body(self) -> bytes:
        """The error body."""
        return json.dumps(self._fields).encode()

    @property
    def _fields(self) -> dict[str, Any]:
        if self.form is ResponseForm.MESSAGES:
            usual = "api_error" if self.status >= 500 else "invalid_request_error"
            error = {"type": _ANTHROPIC_TYPES.get(self.status, usual), "message": self.message}
            named = {"param": self.param, "code": self.code}
            error |= {name: value for name, value in named.items() if value is not None}
            return {"type": "error", "error": error}
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": self.kind or usual,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> Headers:
        """The response headers, with `Retry-After` if the client may retry."""
        headers = [JSON_TYPE, (b"content-length", str(len(self.body)).encode())]
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", str(seconds).encode()))
        return [*headers, *self.extra_headers]

    def events(self, before: bytes = b"") -> bytes:
        """The error event and the end of a stream; `before` is the last piece of the stream."""
        match self.form:
            case ResponseForm.CHUNKS:
                return b"data: " + self.body + b"\n\n" + DONE_EVENT
            case ResponseForm.MESSAGES:
                return named_event(self._fields)
            case ResponseForm.RESPONSES:
                numbers = _SEQUENCE_NUMBER.findall(before)
                event = {"type": "error", "code": self.code or self._fields["error"]["type"]}
                event |= {"message": self.message, "param": self.param}
                event["sequence_number"] = int(numbers[-1]) + 1 if numbers else 0
                # OpenAI documents the fields above, and its client raises at `error`.
                return named_event(event | self._fields)


def named_event(fields: dict[str, Any]) -> bytes:
    """Return a server-sent event that is named after its `type`."""
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    return b"event: " + str(fields["type"]).encode() + b"\ndata: " + text.encode() + b"\n\n"


INTERNAL_ERROR = ErrorResponse(
    AparError.status, "The server failed to answer this request.", code=AparError.code
)
"""Answer to a request that failed unexpectedly; the reason belongs in the log."""


def response_for(error: RequestError | CapacityError | ReplicaLostError) -> ErrorResponse:
    """Return the answer to a request that was refused, or whose replica was lost."""
    message = str(error)
    if isinstance(error, ReplicaLostError | StoreError):
        message = error.client_message
    kind: str | None = None
    extra_headers: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, EnginesDiedError | BudgetError):
        # Without this header, OpenAI's clients would retry by themselves.
        extra_headers = ((b"x-should-retry", b"false"),)
    elif isinstance(error, UnknownKeyError):
        extra_headers = ((b"www-authenticate", b'Bearer realm="apar"'),)
    elif isinstance(error, WrongMethodError):
        extra_headers = ((b"allow", ", ".join(error.allowed).encode()),)
    elif isinstance(error, UnsupportedCodingError):
        extra_headers = ((b"accept-encoding", ", ".join(CODINGS).encode()),)
    if isinstance(error, RateLimitError):
        kind = error.kind
    return ErrorResponse(
        error.status,
        message,
        param=error.param,
        code=error.code,
        retry_after_s=error.retry_after_s,
        kind=kind,
        extra_headers=extra_headers,
    )


def error_code(body: bytes) -> str | None:
    """Return the code in an error body, None if it has none."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return code if isinstance(code, str) else None


def event_error_code(events: bytes) -> str:
    """Return the code in the error event that ends a stream, `error` if it has none."""
    event = events.partition(b"\n\n")[0].rpartition(b"data: ")[2]
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


def normalised_events(events: bytes, form: ResponseForm) -> bytes:
    """Rewrite the error events with which vLLM ends a failed stream, as `normalised` does."""
    begin = ERROR_EVENTS[form is ResponseForm.MESSAGES]
    # The content of an answer is JSON, in which these quotes and line ends are escaped.
    if form is ResponseForm.RESPONSES or begin not in events:
        return events
    return b"".join(
        _normalised_event(event, form) if event.startswith(begin) else event
        for event in re.findall(rb".+?\n\n", events, re.DOTALL)
    )


def _normalised_event(event: bytes, form: ResponseForm) -> bytes:
    body = event.strip().rpartition(b"data: ")[2]
    try:
        code = json.loads(body)["error"].get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        code = None
    body = normalised(code if isinstance(code, int) else AparError.status, body, form)
    return (
        named_event(json.loads(body)) if form is ResponseForm.MESSAGES else b"data: %s\n\n" % body
    )


def plain_message(message: str, param: str | None) -> str:
    """Return a message of vLLM in the words of this server's API and configuration.

    Errors of pydantic come as lines of Python, options as those of vLLM's command line, and the
    name of the field in the end.
    """
    head, _, rest = message.partition("\n")
    if _PYDANTIC_HEAD.fullmatch(head):
        message = _problems(rest) or message
    message = _OPTION.sub(lambda match: f"`engine.{match[1].replace('-', '_')}`", message)
    if message.endswith(")"):
        # Searched only then: a message may quote a client's text, and the search must be linear.
        message = _FIELD_AND_VALUE.sub("", message)
    is_named = param is None or re.search(rf"(?<!\w){re.escape(param)}(?!\w)", message)
    return message if is_named else f"`{param}`: {message}"


def _problems(lines: str) -> str:
    """Return what pydantic says of each field, at most three of them."""
    found: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for line in lines.splitlines():
        # Behind it is an exception, which is no literal.
        facts, _, context = line.strip().partition(_CONTEXT)
        try:
            problem = ast.literal_eval(f"{facts}}}" if context else facts)
            name = problem["loc"].removeprefix("body.")
            found.setdefault(name, []).append(problem["msg"].removeprefix("Value error, "))
            values[name] = f" (got {problem['input']})" if problem["type"] != "missing" else ""
        except (ValueError, SyntaxError, LookupError, TypeError, AttributeError):
            continue  # Another line, or one that was cut.
    return "; ".join(
        f"`{name}`: {', or: '.join(dict.fromkeys(found[name]))}{values[name]}"
        for name in list(found)[:3]
    )


def normalised(status: int, body: bytes, form: ResponseForm = ResponseForm.CHUNKS) -> bytes:
    """Rewrite vLLM's error body in a form of ours.

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
        return ErrorResponse(status, text or f"HTTP {status}", form=form).body
    param = error.get("param")
    if isinstance(param, str):
        param = param.removeprefix("body.") or None
    param = param if isinstance(param, str) else None
    code = error.get("code")
    if param in _PROMPT_LENGTHS:
        param, code = None, PromptTooLongError.code
    return ErrorResponse(
        status,
        plain_message(str(error.get("message", f"HTTP {status}")), param),
        param=param,
        code=code if isinstance(code, str) else None,
        form=form,
    ).body
