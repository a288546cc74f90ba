"""Tracing whose spans stay in this process."""

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.config.tracing import TracingConfig
from deployments.tracing.tracing import Tracing


class KeptSpans:
    """A `Tracing` and its finished spans."""

    def __init__(self, **settings: Any) -> None:
        config = TracingConfig(endpoint="http://127.0.0.1:1", **settings)
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(config, "test", self._exporter)

    def all(self) -> list[ReadableSpan]:
        """Return the finished spans, sorted by start."""
        self.tracing.close_soon().join()
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans with a name."""
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """Return the only span with a name."""
        (span,) = self.named(name)
        return span


def parent_of(span: ReadableSpan, spans: list[ReadableSpan]) -> ReadableSpan | None:
    """Return the span's parent, if it is among `spans`."""
    if span.parent is None:
        return None
    wanted = span.parent.span_id
    return next((each for each in spans if each.context.span_id == wanted), None)
