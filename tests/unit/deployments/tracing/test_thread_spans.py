"""Spans of threads observed in any order."""

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
