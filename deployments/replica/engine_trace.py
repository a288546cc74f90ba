"""Spans of a request inside a replica: engine queue, prefill, decode, and every thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from apar_core.tree.thread_names import thread_path
from deployments.tracing import attributes as names
from deployments.tracing.thread_spans import (
    CUT,
    LOST,
    Seen,
    ThreadTimes,
    WallClock,
    make_thread_spans,
)
from deployments.tracing.tracing import Tracing
from deployments.wire.response import ResponseEnd

if TYPE_CHECKING:
    from apar_core.vllm_names import EngineCoreOutput

# Values of vLLM's `EngineCoreEventType` and `FinishReason`, which takes seconds to import.
_SCHEDULED, _PREEMPTED = 2, 3
_ABORT = 2


class EngineTrace:
    """Observes the threads of a request (as `ThreadObserver`) and makes all spans at its end."""

    def __init__(self, tracing: Tracing, headers: Mapping[str, str], replica_id: str) -> None:
        self._tracing = tracing
        self._parent = tracing.context_of(headers)
        self._replica_id = replica_id
        self._clock = WallClock()
        self._arrived_s = time.monotonic()
        self._threads: dict[str, ThreadTimes] = {}
        self._num_dropped = 0
        self._replaying = False
        # Times of the request: received, scheduled, first token, last token.
        self._began_s: float | None = None
        self._scheduled_s: float | None = None
        self._first_s: float | None = None
        self._last_s = 0.0

    def began(self, root_id: str, choice: int | None) -> None:
        """See `ThreadObserver`."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        self._add(root_id, ThreadTimes((root_id, ()), choice))

    def forked(self, parent_id: str, child_id: str) -> None:
        """See `ThreadObserver`."""
        parent = self._threads.get(parent_id)
        if parent is None:
            self._num_dropped += 1
            return
        forked_s = None if self._replaying else parent.last_s
        root_id, _ = parent.key
        key = (root_id, thread_path(root_id, child_id))
        self._add(child_id, ThreadTimes(key, parent.choice, forked_s))

    def generated(self, output: EngineCoreOutput, *, replayed: bool) -> None:
        """See `ThreadObserver`."""
        self._replaying = replayed
        thread = self._threads.get(output.request_id)
        reason = None if output.finish_reason is None else int(output.finish_reason)
        if replayed:
            if thread is not None:
                thread.num_before += len(output.new_token_ids)
                thread.ended_elsewhere = reason is not None
            return
        now_s = self._last_s = time.monotonic()
        if self._first_s is None and output.new_token_ids:
            self._first_s = now_s
        if thread is not None:
            if output.events:
                self._note(output, thread, now_s)
            # An engine core that exits aborts its requests first; the thread has not ended.
            thread.generated(len(output.new_token_ids), None if reason == _ABORT else reason, now_s)

    def _note(self, output: EngineCoreOutput, thread: ThreadTimes, now_s: float) -> None:
        for event in output.events or ():
            kind = int(event.type)
            thread.num_preemptions += kind == _PREEMPTED
            # The engine core shares our clock only if it runs on this machine.
            is_ours = (self._began_s or now_s) <= event.timestamp <= now_s
            if kind == _SCHEDULED and thread.scheduled_s is None and is_ours:
                thread.scheduled_s = event.timestamp
                if self._scheduled_s is None:
                    self._scheduled_s = event.timestamp

    def _add(self, thread_id: str, thread: ThreadTimes) -> None:
        if len(self._threads) < self._tracing.config.max_thread_spans:
            self._threads[thread_id] = thread
        else:
            self._num_dropped += 1

    def end(self, cost: ResponseEnd, *, broken: bool) -> None:
        """Make the spans; `broken` means that the replica cannot continue the request."""
        end_s = time.monotonic()
        engine = self._span(
            names.ENGINE, self._parent, self._arrived_s, self._engine_facts(cost), SpanKind.SERVER
        )
        if broken:
            engine.set_attribute(names.OUTCOME, LOST)
            engine.set_status(StatusCode.ERROR, LOST)
        if self._began_s is not None:
            inside = set_span_in_context(engine, Context())
            self._make_phases(inside, self._began_s, end_s, broken=broken)
        engine.end(self._clock.ns(end_s))
        if broken:
            # The process is about to end.
            self._tracing.flush_soon()

    def _make_phases(self, parent: Context, began_s: float, end_s: float, *, broken: bool) -> None:
        scheduled_s, first_s = self._scheduled_s, self._first_s
        if scheduled_s is not None or first_s is None:
            queue_end_s = end_s if scheduled_s is None else scheduled_s
            self._span(names.ENGINE_QUEUE, parent, began_s).end(self._clock.ns(queue_end_s))
        if scheduled_s is not None or first_s is not None:
            prefill = self._span(names.PREFILL, parent, scheduled_s or began_s)
            prefill.end(self._clock.ns(end_s if first_s is None else first_s))
        if first_s is None:
            return
        decode = self._span(names.DECODE, parent, first_s)
        seen = Seen(first_s, end_s, LOST if broken else CUT)
        threads = self._threads.values()
        inside = set_span_in_context(decode, Context())
        make_thread_spans(self._tracing, inside, threads, seen, self._clock)
        all_ended = all(
            thread.finish_reason is not None or thread.ended_elsewhere for thread in threads
        )
        decode.end(self._clock.ns(self._last_s if all_ended else end_s))

    def _engine_facts(self, cost: ResponseEnd) -> dict[str, str | int]:
        facts: dict[str, str | int] = {names.REPLICA_ID: self._replica_id}
        if self._began_s is None:
            return facts
        num_elsewhere = sum(thread.ended_elsewhere for thread in self._threads.values())
        facts |= {
            names.INPUT_TOKENS: cost.prompt_tokens,
            names.OUTPUT_TOKENS: cost.generated_tokens,
            names.THREADS: cost.threads,
            names.FORKS: cost.forks,
            names.CRITICAL_PATH_TOKENS: cost.critical_path_tokens,
            names.THREADS_DROPPED: self._num_dropped,
            names.THREADS_ELSEWHERE: num_elsewhere,
        }
        return facts

    def _span(
        self,
        name: str,
        parent: Context,
        start_s: float,
        facts: Mapping[str, str | int] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        return self._tracing.start(name, kind, parent, facts, self._clock.ns(start_s))


def start_engine_trace(
    tracing: Tracing | None, headers: Mapping[str, str] | None, replica_id: str
) -> EngineTrace | None:
    """Return the trace of a request with these W3C headers; None if it is not traced."""
    if tracing is None or headers is None:
        return None
    return EngineTrace(tracing, headers, replica_id)
