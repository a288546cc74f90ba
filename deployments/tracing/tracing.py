"""The tracing of one process: makes spans, samples, and sends them in the background.

OpenTelemetry's process-wide provider is left alone: Ray and vLLM live in the same processes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cluster.config.tracing import TracingConfig

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, SpanKind
    from opentelemetry.util.types import AttributeValue

GATEWAY = "gateway"
REPLICA = "replica"
CLOSE_S = 3.0
"""Time that the last spans of a process get; a collector may be down, or hang."""
_BATCH_SPANS = 512


class Tracing:
    """Spans of one process, whose part in a request is its `role`: gateway or replica."""

    def __init__(
        self, config: TracingConfig, role: str, exporter: SpanExporter | None = None
    ) -> None:
        # They take a fifth of a second to import, for nothing where nobody traces.
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from deployments.tracing.tracing import build_exporter

        self.config = config
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create({"service.name": config.service_name, "apar.role": role}),
            shutdown_on_exit=False,
        )
        processor = BatchSpanProcessor(
            exporter or build_exporter(config),
            max_queue_size=config.max_queued_spans,
            schedule_delay_millis=config.export_s * 1000,
            max_export_batch_size=min(_BATCH_SPANS, config.max_queued_spans),
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("apar")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        kind: SpanKind,
        parent: Context,
        attributes: Mapping[str, AttributeValue] | None = None,
        start_ns: int | None = None,
    ) -> Span:
        """A span under the parent that a context holds; a trace of its own where that is empty."""
        return self._tracer.start_span(
            name, context=parent, kind=kind, attributes=attributes, start_time=start_ns
        )

    def context_of(self, headers: Mapping[str, str]) -> Context:
        """The context that W3C's `traceparent` and `tracestate` name; empty where they do not."""
        from opentelemetry.context import Context

        return self._propagator.extract(headers, Context())

    def headers_of(self, context: Context) -> dict[str, str]:
        """A context as W3C's headers."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context)
        return headers

    def flush_soon(self) -> None:
        """Send now what waits; returns at once."""
        threading.Thread(target=self._provider.force_flush, daemon=True).start()

    def close_soon(self) -> threading.Thread:
        """Send what waits, and nothing more; returns at once."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        return closing


def open_tracing(config: TracingConfig, role: str) -> Tracing | None:
    """The tracing of this process; None where none is configured."""
    return Tracing(config, role) if config.enabled else None


async def close_tracing(tracing: Tracing | None, timeout_s: float = CLOSE_S) -> None:
    """Send what waits, for as long as `timeout_s`, and nothing more."""
    if tracing is not None:
        await asyncio.to_thread(tracing.close_soon().join, timeout_s)


def reopened(tracing: Tracing | None, config: TracingConfig, role: str) -> Tracing | None:
    """The tracing of a changed configuration; what the old one still holds is sent."""
    if config == (TracingConfig() if tracing is None else tracing.config):
        return tracing
    changed = open_tracing(config, role)
    if tracing is not None:
        tracing.close_soon()
    return changed


if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

_TRACES_PATH = "/v1/traces"
_QUIET_S = 60.0
# They tell of every attempt and, with a collector that is down, of one a second.
_LIBRARY_LOGGERS = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal")


def build_exporter(config: TracingConfig) -> SpanExporter:
    """The exporter of a configuration that has an endpoint."""
    for name in _LIBRARY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    endpoint = config.endpoint or ""
    return ReportedExporter(
        _grpc_exporter(config, endpoint)
        if config.protocol == "grpc"
        else _http_exporter(config, endpoint)
    )


def _http_exporter(config: TracingConfig, endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    has_path = urlsplit(endpoint).path not in ("", "/")
    return OTLPSpanExporter(
        endpoint=endpoint if has_path else endpoint.rstrip("/") + _TRACES_PATH,
        headers=config.read_headers(),
        timeout=config.timeout_s,
    )


def _grpc_exporter(config: TracingConfig, endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=endpoint,
        insecure=urlsplit(endpoint).scheme == "http",
        headers=config.read_headers(),
        timeout=config.timeout_s,
    )


class ReportedExporter(SpanExporter):
    """Logs the spans that another exporter could not send, at most once a minute."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._num_lost = 0
        self._quiet_until_s = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans; never raises."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001  # the executor of the exports must go on
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            self._report()
        return result

    def shutdown(self) -> None:
        """Send no more."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept here."""
        return self._exporter.force_flush(timeout_millis)

    def _report(self) -> None:
        if time.monotonic() >= self._quiet_until_s:
            self._quiet_until_s = time.monotonic() + _QUIET_S
            logger.warning("spans could not be exported", extra={"spans": self._num_lost})
            self._num_lost = 0
