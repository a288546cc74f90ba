"""The trace of one request in the gateway: the span of all of it, and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from deployments.tracing import attributes as names
from deployments.tracing.attempts import TracedCalls

if TYPE_CHECKING:
    from typing import Any

    from starlette.types import Scope

    from deployments.gateway.request_log import RequestRecord
    from deployments.relay.relay import ReplicaCalls
    from deployments.tracing.tracing import Tracing

_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_UNKNOWN_ROUTE = ("unknown_url", "method_not_allowed")


class RequestTrace:
    """The server span, and within it ingress, queue and the attempts at replicas."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._inside = set_span_in_context(span, Context())
        self._phase: Span | None = tracing.start(names.INGRESS, SpanKind.INTERNAL, self._inside)
        self._calls: TracedCalls | None = None

    @property
    def trace_id(self) -> str:
        """The trace's id, as W3C writes it."""
        return format(self._span.get_span_context().trace_id, "032x")

    def asked(self, fields: dict[str, Any]) -> None:
        """Note the numbers among the fields of a request's body."""
        for field, name in names.NUMBER_FIELDS.items():
            value = fields.get(field)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._span.set_attribute(name, value)

    def queueing(self) -> None:
        """The request waits for a place at the replicas now."""
        self._end_phase()
        self._phase = self._tracing.start(names.QUEUE, SpanKind.INTERNAL, self._inside)

    def sending(self) -> None:
        """The request has its place."""
        self._end_phase()

    def calls(self, replicas: ReplicaCalls, deployment: str) -> ReplicaCalls:
        """Calls to the replicas of a deployment, each a span of this trace."""
        self._calls = TracedCalls(self._tracing, self._inside, replicas, deployment)
        return self._calls

    def end(self, record: RequestRecord) -> None:
        """End the trace with what the record says of the request."""
        self._end_phase()
        span = self._span
        span.set_attributes(_facts(record))
        if record.error_code not in _UNKNOWN_ROUTE:
            span.update_name(f"{record.method} {record.path}")
            span.set_attribute(names.HTTP_ROUTE, record.path)
        status = record.status or 0
        broke_off = self._calls is not None and not self._calls.answered and not record.cancelled
        if status >= 500 or broke_off:
            # As the conventions have it: a server's 4xx are its client's errors.
            kind = record.error_code or ("engine_lost" if broke_off else str(status))
            span.set_attribute(names.ERROR_TYPE, kind)
            span.set_status(StatusCode.ERROR, kind)
        span.end()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.end()
            self._phase = None


def _facts(record: RequestRecord) -> dict[str, str | int | float | bool]:
    facts = {
        names.HTTP_STATUS: record.status,
        names.REQUEST_ID: record.request_id,
        names.KEY: record.key,
        names.OPERATION: _OPERATIONS.get(record.path) if record.model else None,
        names.PROVIDER: "apar" if record.model else None,
        names.REQUEST_MODEL: record.model,
        names.RESPONSE_MODEL: record.model if record.threads else None,
        names.REQUEST_STREAM: True if record.stream else None,
        names.INPUT_TOKENS: record.prompt_tokens,
        names.OUTPUT_TOKENS: record.generated_tokens if record.model else None,
        names.FIRST_CHUNK_S: record.first_byte_s if record.stream else None,
        names.THREADS: record.threads,
        names.FORKS: record.forks,
        names.REPLICA_ID: record.replica,
        names.RETRIES: record.retries or None,
        names.CONTINUED: record.continued or None,
        names.CANCELLED: True if record.cancelled else None,
        names.ERROR_CODE: record.error_code,
    }
    return {name: value for name, value in facts.items() if value is not None}


def start_trace(tracing: Tracing | None, scope: Scope) -> RequestTrace | None:
    """The trace of a request that has just come; None where it is not traced."""
    if tracing is None:
        return None
    headers: dict[str, str] = {}
    if tracing.config.honour_traceparent:
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _CONTEXT_HEADERS
        }
    method = scope["method"]
    known = method if method in _METHODS else "HTTP"
    facts = {
        names.HTTP_METHOD: known if known == method else "_OTHER",
        names.URL_PATH: scope["path"],
        names.URL_SCHEME: scope.get("scheme", "http"),
    }
    span = tracing.start(known, SpanKind.SERVER, tracing.context_of(headers), facts)
    return RequestTrace(tracing, span) if span.is_recording() else None
