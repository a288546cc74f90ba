"""Spans of threads observed in any order."""

import pytest
from opentelemetry.context import Context

from deployments.tracing import attributes as names
from deployments.tracing.thread_spans import (
    LOST,
    Seen,
    ThreadTimes,
    WallClock,
    make_thread_spans,
)
from tests.fakes.kept_spans import KeptSpans


def test_a_child_observed_before_its_parent_starts_with_it() -> None:
    kept = KeptSpans()
    root, child = ThreadTimes(("", ())), ThreadTimes(("", (0,)), forked_s=1.0)
    child.generated(1, None, 1.0)
    root.generated(1, None, 2.0)
    seen = Seen(first_s=1.0, end_s=5.0, open_reason=LOST, by_gateway=True)

    make_thread_spans(kept.tracing, Context(), [root, child], seen, WallClock())

    first, second = kept.named(names.THREAD)
    assert first.start_time == second.start_time
    assert first.end_time == second.end_time
    assert ((first.end_time or 0) - (first.start_time or 0)) == 3_000_000_000


def test_an_interruption_between_the_two_clocks_shifts_no_span(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns, interruptions_ns = 5_000_000_000, [70_000_000, 30_000_000]

    def monotonic_ns() -> int:
        nonlocal now_ns
        now_ns += 100
        return now_ns

    def time_ns() -> int:
        nonlocal now_ns
        now_ns += interruptions_ns.pop() if interruptions_ns else 0
        return now_ns + 10**18

    monkeypatch.setattr("time.monotonic_ns", monotonic_ns)
    monkeypatch.setattr("time.time_ns", time_ns)

    assert abs(WallClock().ns(2.5) - (10**18 + 2_500_000_000)) <= 100
    assert interruptions_ns == []


def test_a_clock_that_is_always_interrupted_is_read_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = 0

    def monotonic_ns() -> int:
        nonlocal now_ns
        now_ns += 1_000_000
        return now_ns

    monkeypatch.setattr("time.monotonic_ns", monotonic_ns)
    monkeypatch.setattr("time.time_ns", lambda: now_ns + 10**18)

    assert abs(WallClock().ns(2.5) - (10**18 + 2_500_000_000)) <= 1_000_000
