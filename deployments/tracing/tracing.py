"""Tracing of one process: make spans, sample them, and export them over OTLP in the background.

OpenTelemetry's global provider stays untouched, because Ray and vLLM run in the same processes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from deployments.config.tracing import TracingConfig

logger = logging.getLogger(__name__)

GATEWAY = "gateway"
REPLICA = "replica"
CLOSE_S = 3.0
"""Time for a process's last spans at shutdown; a collector may be down or hang."""
_BATCH_SPANS = 512
_TRACES_PATH = "/v1/traces"
_WARNING_PERIOD_S = 60.0
# They log every failed export; while a collector is down, that is a line per second.
_LIBRARY_LOGGERS = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal")


class Tracing:
    """Spans of one process; `role` is gateway or replica."""

    def __init__(
        self, config: TracingConfig, role: str, exporter: SpanExporter | None = None
    ) -> None:
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
        """Start a span under the parent in `parent`, or a new trace if there is none."""
        return self._tracer.start_span(
            name, context=parent, kind=kind, attributes=attributes, start_time=start_ns
        )

    def context_of(self, headers: Mapping[str, str]) -> Context:
        """Read a context from `traceparent` and `tracestate` (W3C); empty if they are invalid."""
        return self._propagator.extract(headers, Context())

    def headers_of(self, context: Context) -> dict[str, str]:
        """Write a context as W3C headers."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context)
        return headers

    def flush_soon(self) -> None:
        """Export waiting spans in the background."""
        threading.Thread(target=self._provider.force_flush, daemon=True).start()

    def close_soon(self) -> threading.Thread:
        """Export waiting spans in the background, and none after them."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        return closing


def open_tracing(config: TracingConfig, role: str) -> Tracing | None:
    """Return the tracing of this process; None if it is not configured."""
    return Tracing(config, role) if config.enabled else None


async def close_tracing(tracing: Tracing | None, timeout_s: float = CLOSE_S) -> None:
    """Export waiting spans for at most `timeout_s`, and none after them."""
    if tracing is not None:
        await asyncio.to_thread(tracing.close_soon().join, timeout_s)


def reopened(tracing: Tracing | None, config: TracingConfig, role: str) -> Tracing | None:
    """Return the tracing for a changed configuration; the old one exports what it holds."""
    if config == (TracingConfig() if tracing is None else tracing.config):
        return tracing
    changed = open_tracing(config, role)
    if tracing is not None:
        tracing.close_soon()
    return changed


def build_exporter(config: TracingConfig) -> SpanExporter:
    """Build the OTLP exporter of a configuration that has an endpoint."""
    for name in _LIBRARY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    endpoint = config.endpoint or ""
    url = urlsplit(endpoint)
    # Imported late: gRPC takes long to import, and few use it.
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return ReportedExporter(
            GrpcExporter(
                endpoint=endpoint,
                insecure=url.scheme == "http",
                headers=config.read_headers(),
                timeout=config.timeout_s,
            )
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    return ReportedExporter(
        HttpExporter(
            endpoint=endpoint.rstrip("/") + _TRACES_PATH if url.path in ("", "/") else endpoint,
            headers=config.read_headers(),
            timeout=config.timeout_s,
        )
    )


class ReportedExporter(SpanExporter):
    """Wraps an exporter; logs lost spans, at most once a minute."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._num_lost = 0
        self._quiet_until_s = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans; never raises."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001  # The exporting executor must continue.
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            if time.monotonic() >= self._quiet_until_s:
                self._quiet_until_s = time.monotonic() + _WARNING_PERIOD_S
                logger.warning("spans could not be exported", extra={"spans": self._num_lost})
                self._num_lost = 0
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Flush the exporter; nothing is buffered here."""
        return self._exporter.force_flush(timeout_millis)
