"""A collector that keeps the OTLP traces it receives over HTTP or gRPC."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from deployments.tracing import attributes as names

WAIT_S = 120.0


@dataclass(frozen=True)
class Span:
    """A received span; times in nanoseconds since the epoch."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """The spans and headers received at `endpoint`."""

    endpoint: str
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    delay_s: float = 0.0

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        """Keep the spans of an export."""
        time.sleep(self.delay_s)
        self.headers.append(headers)
        for group in request.resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans.extend(_span(span, resource) for span in scope.spans)

    def trace(self, request_id: str, *, seconds: float = WAIT_S) -> list[Span]:
        """Wait for a request's server span and until no more spans arrive; return its trace.

        While spans of threads or parents are missing, wait longer.
        """
        root = self.wait_for(
            lambda span: span.attributes.get(names.REQUEST_ID) == request_id, seconds=seconds
        )
        deadline = time.monotonic() + seconds
        while not self._whole(root) and time.monotonic() < deadline:
            time.sleep(0.05)
        before = -1
        while (now := len(self.spans)) != before:
            before = now
            time.sleep(1.0)
        return [span for span in self.spans if span.trace_id == root.trace_id]

    def _whole(self, root: Span) -> bool:
        """Return whether every parent in a trace has arrived, and every thread of the request."""
        spans = [span for span in self.spans if span.trace_id == root.trace_id]
        known = {span.span_id for span in spans}
        num_threads = sum(span.name == names.THREAD for span in spans)
        return num_threads >= int(root.attributes.get(names.THREADS, 0)) and all(
            span is root or span.parent_id in known for span in spans
        )

    def wait_for(self, wanted: Callable[[Span], bool], *, seconds: float = WAIT_S) -> Span:
        """Wait for the first matching span; fail if none arrives."""
        deadline = time.monotonic() + seconds
        while True:
            for span in list(self.spans):
                if wanted(span):
                    return span
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.05)


def _span(span: WireSpan, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        resource=resource,
    )


def _values(attributes: Iterable[Any]) -> dict[str, Any]:
    return {
        item.key: getattr(item.value, item.value.WhichOneof("value"))
        for item in attributes
        if item.value.WhichOneof("value") != "array_value"
    }


@contextmanager
def http_collector() -> Iterator[Collector]:
    """Run a collector for OTLP over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            request = ExportTraceServiceRequest.FromString(body)
            headers = {name.lower(): value for name, value in self.headers.items()}
            collector.take(request, headers | {":path": self.path})
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    executor = threading.Thread(target=server.serve_forever, daemon=True)
    executor.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        executor.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Run a collector for OTLP over gRPC."""

    class Servicer(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            collector.take(request, dict(context.invocation_metadata()))
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector(f"http://127.0.0.1:{port}")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
