"""Spans of a request in the gateway: the request, its ingress and wait, each attempt at a replica.

The context of an attempt's span travels with the request, so that it is the parent of the replica's
spans.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from starlette.types import Scope

from apar_core.journal import ThreadDelta
from deployments.gateway.request_log import RequestRecord
from deployments.relay.relay import Progress, ReplicaCalls
from deployments.routing.shared_router import ROUTERS
from deployments.tracing import attributes as names
from deployments.tracing.thread_spans import (
    LOST,
    Seen,
    ThreadTimes,
    WallClock,
    make_thread_spans,
)
from deployments.tracing.tracing import Tracing
from deployments.wire.errors import (
    ReplicaBrokenError,
    ReplicaLostError,
    UnknownRouteError,
    WrongMethodError,
)
from deployments.wire.request import RelayedRequest
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from deployments.wire.routes import ONE_MODEL

_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
_UNKNOWN_ROUTE = (UnknownRouteError.code, WrongMethodError.code)
# Outcomes of an attempt, besides LOST.
_ANSWERED, _REFUSED, _LEFT = "answered", "refused", "left"


def start_trace(tracing: Tracing | None, scope: Scope) -> RequestTrace | None:
    """Start the trace of a request that has just arrived; None if it is not traced."""
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


class RequestTrace:
    """Trace of one request: the server span, with ingress, queue and attempts below it."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._inside = set_span_in_context(span, Context())
        self._phase: Span | None = tracing.start(names.INGRESS, SpanKind.INTERNAL, self._inside)
        self._calls: TracedCalls | None = None

    @property
    def trace_id(self) -> str:
        """The trace's id in W3C's form."""
        return format(self._span.get_span_context().trace_id, "032x")

    def asked(self, fields: dict[str, Any]) -> None:
        """Record the numeric fields of a request's body."""
        for field, name in names.NUMBER_FIELDS.items():
            value = fields.get(field)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._span.set_attribute(name, value)

    def queueing(self) -> None:
        """Start the span of the wait for a replica."""
        self._end_phase()
        self._phase = self._tracing.start(names.QUEUE, SpanKind.INTERNAL, self._inside)

    def sending(self) -> None:
        """End the span of the wait."""
        self._end_phase()

    def calls(self, replicas: ReplicaCalls, deployment: str) -> ReplicaCalls:
        """Wrap the calls to a deployment's replicas so that each makes a span."""
        self._calls = TracedCalls(self._tracing, self._inside, replicas, deployment)
        return self._calls

    def end(self, record: RequestRecord) -> None:
        """End the trace with the facts of the request's record."""
        self._end_phase()
        span = self._span
        span.set_attributes(_facts(record))
        if record.error_code not in _UNKNOWN_ROUTE:
            # A fixed set of names for all requests: a client may ask for any model.
            is_model = record.path.startswith(ONE_MODEL)
            route = f"{ONE_MODEL}{{model}}" if is_model else record.path
            span.update_name(f"{record.method} {route}")
            span.set_attribute(names.HTTP_ROUTE, route)
        status = record.status or 0
        broke_off = self._calls is not None and not self._calls.answered and not record.cancelled
        if status >= 500 or broke_off:
            # By the conventions, a 4xx is an error of the client and not of the server span.
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


class TracedCalls:
    """`ReplicaCalls` of one request that make a span per attempt."""

    def __init__(
        self, tracing: Tracing, parent: Context, replicas: ReplicaCalls, deployment: str
    ) -> None:
        self._tracing = tracing
        self._parent = parent
        self._replicas = replicas
        self._deployment = deployment
        self._num_attempts = 0
        self.answered = True
        """Whether the last attempt, if any, completed its answer."""

    @property
    def num_running(self) -> int:
        """See `ReplicaCalls`."""
        return self._replicas.num_running

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[ResponseStart | Piece | ResponseEnd, None]:
        """See `ReplicaCalls`."""
        attempt = self._attempt(request)
        try:
            async with aclosing(self._replicas.stream(attempt.request)) as parts:
                async for part in parts:
                    attempt.saw(part)
                    yield part
        except ReplicaLostError as error:
            attempt.lost(error)
            raise
        finally:
            self._end(attempt)

    async def whole(
        self, request: RelayedRequest, progress: Progress | None = None
    ) -> tuple[ResponseStart, ResponseEnd]:
        """See `ReplicaCalls`."""
        attempt = self._attempt(request)

        def noted(num_tokens: int, prompt_tokens: int) -> None:
            attempt.find_replica()
            if progress is not None:
                progress(num_tokens, prompt_tokens)

        try:
            start, end = await self._replicas.whole(attempt.request, noted)
            attempt.saw(start)
            attempt.saw(end)
            return start, end
        except ReplicaLostError as error:
            attempt.lost(error)
            raise
        finally:
            self._end(attempt)

    def _attempt(self, request: RelayedRequest) -> _Attempt:
        facts: dict[str, int | bool] = {names.ATTEMPT: self._num_attempts}
        self._num_attempts += 1
        if request.terms.resume is not None:
            facts[names.ATTEMPT_CONTINUES] = True
        span = self._tracing.start(names.REPLICA, SpanKind.CLIENT, self._parent, facts)
        return _Attempt(self._tracing, span, request, self._deployment)

    def _end(self, attempt: _Attempt) -> None:
        self.answered = attempt.outcome in (_ANSWERED, _REFUSED)
        attempt.end()


class _Attempt:
    """One attempt: its span, and thread times from the journal in case the replica dies."""

    def __init__(
        self, tracing: Tracing, span: Span, request: RelayedRequest, deployment: str
    ) -> None:
        self._tracing = tracing
        self._deployment = deployment
        self._span = span
        self._inside = set_span_in_context(span, Context())
        terms = replace(request.terms, trace_headers=tracing.headers_of(self._inside))
        self.request = replace(request, terms=terms)
        self.outcome = _LEFT
        self._status = 0
        self._replica_id: str | None = None
        self._threads: dict[tuple[int, ...], ThreadTimes] = {}
        self._num_tokens = 0
        self._num_dropped = 0
        self._first_s: float | None = None
        self._clock = WallClock()

    def find_replica(self) -> None:
        """Note the replica while the router still counts the request there."""
        if self._replica_id is None:
            request_id = self.request.terms.request_id or ""
            self._replica_id = ROUTERS.replica_of(self._deployment, request_id)

    def saw(self, part: ResponseStart | Piece | ResponseEnd) -> None:
        """Note a part of the answer."""
        if isinstance(part, ResponseEnd):
            self.outcome = _REFUSED if self._status >= 400 else _ANSWERED
            self._replica_id = part.replica or self._replica_id
            self._num_tokens = part.generated_tokens
            return
        if isinstance(part, ResponseStart):
            self._status = part.status
            self.find_replica()
        if part.journal:
            self._note(part.journal)

    def _note(self, journal: Iterable[ThreadDelta]) -> None:
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        for path, token_ids, finish_reason in journal:
            self._num_tokens += len(token_ids)
            thread = self._threads.get(path)
            if thread is None:
                if len(self._threads) >= self._tracing.config.max_thread_spans:
                    self._num_dropped += 1
                    continue
                forked_s = now_s if path else None
                thread = self._threads[path] = ThreadTimes(("", path), forked_s=forked_s)
            thread.generated(len(token_ids), finish_reason, now_s)

    def lost(self, error: ReplicaLostError) -> None:
        """Mark the replica as lost; if it sent no spans of its threads, make them here."""
        self.outcome = LOST
        self._replica_id = error.replica or self._replica_id
        self._span.set_status(StatusCode.ERROR, "replica lost")
        self._span.set_attribute(names.ERROR_TYPE, type(error).__name__)
        # A replica that broke the answer off itself sends its own spans.
        if not isinstance(error, ReplicaBrokenError) and self._first_s is not None:
            seen = Seen(self._first_s, time.monotonic(), LOST, by_gateway=True)
            threads = sorted(self._threads.values(), key=lambda thread: thread.key)
            make_thread_spans(self._tracing, self._inside, threads, seen, self._clock)
            if self._num_dropped:
                self._span.set_attribute(names.THREADS_DROPPED, self._num_dropped)

    def end(self) -> None:
        """End the span."""
        self.find_replica()
        facts: dict[str, str | int] = {
            names.OUTCOME: self.outcome,
            names.OUTPUT_TOKENS: self._num_tokens,
        }
        if self._replica_id is not None:
            facts[names.REPLICA_ID] = self._replica_id
        if self._status:
            facts[names.HTTP_STATUS] = self._status
        if self._status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attributes(facts)
        self._span.end()
