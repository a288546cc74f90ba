"""Each attempt at a replica as a span of its own, whose context goes with the request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from apar_core.journal import ThreadDelta
from deployments.routing import registry
from deployments.tracing import attributes as names
from deployments.tracing.thread_spans import (
    LOST,
    Seen,
    ThreadTimes,
    WallClock,
    make_thread_spans,
)
from deployments.wire.answer import AnswerEnd, AnswerStart, Piece
from deployments.wire.errors import ReplicaBrokenError, ReplicaLostError
from deployments.wire.request import RelayedRequest

if TYPE_CHECKING:
    from deployments.relay.relay import Progress, ReplicaCalls
    from deployments.tracing.tracing import Tracing

_ANSWERED, _REFUSED, _LEFT = "answered", "refused", "left"


class TracedCalls:
    """Calls to the replicas of one deployment, all for one request, each attempt a span."""

    def __init__(
        self, tracing: Tracing, parent: Context, replicas: ReplicaCalls, deployment: str
    ) -> None:
        self._tracing = tracing
        self._parent = parent
        self._replicas = replicas
        self._deployment = deployment
        self._num_attempts = 0
        self.answered = True
        """Whether the last attempt, if there was one, brought an answer to its end."""

    @property
    def num_running(self) -> int:
        """As in `ReplicaCalls`."""
        return self._replicas.num_running

    async def stream(
        self, request: RelayedRequest
    ) -> AsyncGenerator[AnswerStart | Piece | AnswerEnd, None]:
        """As in `ReplicaCalls`."""
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
    ) -> tuple[AnswerStart, AnswerEnd]:
        """As in `ReplicaCalls`."""
        attempt = self._attempt(request)
        try:
            start, end = await self._replicas.whole(attempt.request, progress)
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
        return _Attempt(self._tracing, span, request)

    def _end(self, attempt: _Attempt) -> None:
        self.answered = attempt.outcome in (_ANSWERED, _REFUSED)
        request_id = attempt.request.terms.request_id or ""
        attempt.end(registry.replica_of(self._deployment, request_id))


class _Attempt:
    """One attempt: its span, and what it learns of threads in case the replica dies silently."""

    def __init__(self, tracing: Tracing, span: Span, request: RelayedRequest) -> None:
        self._tracing = tracing
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

    def saw(self, part: AnswerStart | Piece | AnswerEnd) -> None:
        """Note a part of the answer."""
        if isinstance(part, AnswerEnd):
            self.outcome = _REFUSED if self._status >= 400 else _ANSWERED
            self._replica_id = part.replica
            self._num_tokens = part.generated_tokens
            return
        if isinstance(part, AnswerStart):
            self._status = part.status
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
        """The replica is gone; what it would have told of its threads, we tell."""
        self.outcome = LOST
        self._span.set_status(StatusCode.ERROR, "replica lost")
        self._span.set_attribute(names.ERROR_TYPE, type(error).__name__)
        # One that broke the answer off by itself has sent, or is sending, spans of its own.
        if not isinstance(error, ReplicaBrokenError) and self._first_s is not None:
            seen = Seen(self._first_s, time.monotonic(), LOST, by_gateway=True)
            threads = sorted(self._threads.values(), key=lambda thread: thread.key)
            make_thread_spans(self._tracing, self._inside, threads, seen, self._clock)
            if self._num_dropped:
                self._span.set_attribute(names.THREADS_DROPPED, self._num_dropped)

    def end(self, replica_id: str | None) -> None:
        """End the span; the replica's id is that of the router, where the answer has not told."""
        facts: dict[str, str | int] = {
            names.OUTCOME: self.outcome,
            names.OUTPUT_TOKENS: self._num_tokens,
        }
        if known := self._replica_id or replica_id:
            facts[names.REPLICA_ID] = known
        if self._status:
            facts[names.HTTP_STATUS] = self._status
        if self._status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.set_attributes(facts)
        self._span.end()
