"""What was seen of the threads of a request, and the spans that it makes.

Times are noted while the threads run, and the spans made when the request has ended: that costs
the running request least, and a replica that is killed leaves no span whose parent is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

from deployments.tracing import attributes as names

if TYPE_CHECKING:
    from deployments.tracing.tracing import Tracing

Key = tuple[str, tuple[int, ...]]
"""A thread: its root's id, and the fork ordinals down from there."""

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
"""vLLM's `FinishReason`s, by value."""
LOST = "lost"
"""Reason of a thread whose replica was lost: it goes on elsewhere, or never."""
CUT = "cut"
"""Reason of a thread that was ended with its request: a stop string, or a client that left."""
_FAILED = (LOST, "error")


class WallClock:
    """The monotonic clock's seconds as nanoseconds since the epoch, fixed at one moment."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        """A moment of the monotonic clock."""
        return int(monotonic_s * 1e9) + self._offset_ns


@dataclass(slots=True)
class ThreadTimes:
    """One thread, as far as it ran in one replica; moments of the monotonic clock.

    `forked_s` is None where the thread has no fork there: a root, or one that was taken over.
    `num_before` counts the tokens that another replica had generated.
    """

    key: Key
    choice: int | None = None
    forked_s: float | None = None
    scheduled_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    num_before: int = 0
    num_preemptions: int = 0
    finish_reason: int | None = None
    ended_elsewhere: bool = False

    def generated(self, num_tokens: int, finish_reason: int | None, now_s: float) -> None:
        """Note what the thread has put out."""
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        self.num_tokens += num_tokens
        if finish_reason is not None:
            self.finish_reason = finish_reason


@dataclass(frozen=True, slots=True)
class Seen:
    """What all threads of a request have in common.

    The request's first token came at `first_s`, and it ended at `end_s`. `open_reason` is that of
    threads that had not ended by then.
    """

    first_s: float
    end_s: float
    open_reason: str
    by_gateway: bool = False


def make_thread_spans(
    tracing: Tracing, parent: Context, threads: Iterable[ThreadTimes], seen: Seen, clock: WallClock
) -> None:
    """Make the spans of the threads, which come parents first, each under its parent's span.

    A thread that ended elsewhere has its span there; what it forked is its next ancestor's here.
    """
    made: dict[Key, tuple[Context, float]] = {}
    for thread in threads:
        if thread.ended_elsewhere:
            continue
        above, not_before_s = _above(thread.key, made) or (parent, seen.first_s)
        start_s = max(_start(thread, seen), not_before_s)
        end_s = seen.end_s if thread.finish_reason is None else thread.last_s
        reason = _reason(thread, seen)
        span = tracing.start(
            names.THREAD,
            SpanKind.INTERNAL,
            above,
            _attributes(thread, reason, seen),
            clock.ns(start_s),
        )
        if reason in _FAILED:
            span.set_status(StatusCode.ERROR, reason)
        span.end(clock.ns(max(start_s, end_s)))
        made[thread.key] = set_span_in_context(span, Context()), start_s


def _start(thread: ThreadTimes, seen: Seen) -> float:
    if thread.forked_s is not None:
        return thread.forked_s
    # One that was taken over goes on when its request does; so does what hangs from it.
    taken_over = bool(thread.key[1]) or thread.num_before > 0
    return seen.first_s if taken_over or thread.first_s is None else thread.first_s


def _above(key: Key, made: dict[Key, tuple[Context, float]]) -> tuple[Context, float] | None:
    """The nearest ancestor that has a span here."""
    root, path = key
    for length in reversed(range(len(path))):
        found = made.get((root, path[:length]))
        if found is not None:
            return found
    return None


def _reason(thread: ThreadTimes, seen: Seen) -> str:
    reason = thread.finish_reason
    return seen.open_reason if reason is None else FINISH_REASONS[reason]


def thread_name(path: tuple[int, ...]) -> str:
    """A thread's id as it stands in spans: `root`, `root.0`, `root.0.2`."""
    return ".".join(["root", *map(str, path)])


def _attributes(thread: ThreadTimes, reason: str, seen: Seen) -> dict[str, str | int | float]:
    _, path = thread.key
    given: dict[str, str | int | float] = {
        names.THREAD_ID: thread_name(path),
        names.THREAD_DEPTH: len(path),
        names.THREAD_TOKENS: thread.num_tokens,
        names.FINISH_REASON: reason,
    }
    if path:
        given[names.THREAD_PARENT] = thread_name(path[:-1])
    if thread.choice is not None:
        given[names.THREAD_CHOICE] = thread.choice
    if thread.forked_s is not None and thread.scheduled_s is not None:
        given[names.THREAD_WAIT_S] = round(max(0.0, thread.scheduled_s - thread.forked_s), 6)
    if thread.num_before:
        given[names.THREAD_TOKENS_BEFORE] = thread.num_before
    if thread.num_preemptions:
        given[names.THREAD_PREEMPTIONS] = thread.num_preemptions
    if seen.by_gateway:
        given[names.OBSERVED_BY] = "gateway"
    return given
