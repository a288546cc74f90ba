"""Sends spans to a collector over OTLP, and says so when it cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cluster.config.tracing import TracingConfig

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
