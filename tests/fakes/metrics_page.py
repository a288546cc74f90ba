"""Metrics pages of nodes, rendered by prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind, Metric


@dataclass
class MetricsPage:
    """One node's page; every series carries its name, so that pages can be joined."""

    node: str = "node-1"
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _metrics: dict[str, Counter | Gauge | Histogram] = field(default_factory=dict)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        child = self._child(metric, labels)
        assert isinstance(child, Gauge)
        child.set(value)

    def add(self, metric: Metric, amount: float, **labels: str) -> None:
        """Increase a counter."""
        child = self._child(metric, labels)
        assert isinstance(child, Counter)
        child.inc(amount)

    def observe(self, metric: Metric, *values: float, **labels: str) -> None:
        """Add to a histogram."""
        child = self._child(metric, labels)
        assert isinstance(child, Histogram)
        for value in values:
            child.observe(value)

    def text(self) -> str:
        """Render the page."""
        return generate_latest(self.registry).decode()

    def _child(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        own = {"node": self.node}
        if metric.name not in self._metrics:
            self._metrics[metric.name] = self._new(metric, [*metric.labels, *own])
        return self._metrics[metric.name].labels(**labels, **own)

    def _new(self, metric: Metric, labels: list[str]) -> Counter | Gauge | Histogram:
        name, text, registry = metric.name, metric.help, self.registry
        if metric.kind is Kind.COUNTER:
            return Counter(name, text, labels, registry=registry)
        if metric.kind is Kind.GAUGE:
            return Gauge(name, text, labels, registry=registry)
        return Histogram(name, text, labels, registry=registry, buckets=metric.buckets)


def busy_page(replica: str = "r1", model: str = "apar-tiny", node: str = "node-1") -> MetricsPage:
    """Return a page with the metrics of a busy replica and of the gateway."""
    page = MetricsPage(node)
    of = {"model": model, "replica": replica}
    for state, count in (("running", 12), ("waiting", 2), ("deferred", 1)):
        page.set(catalogue.THREADS, count, **of, state=state)
    page.set(catalogue.REPLICA_REQUESTS, 4, **of)
    page.set(catalogue.KV_CACHE_USAGE, 0.6, **of)
    page.add(catalogue.GENERATED_TOKENS, 1000, **of)
    page.add(catalogue.FORKS, 50, **of, outcome="accepted")
    page.add(catalogue.ATTENDED_TOKENS, 5000, **of)
    page.add(catalogue.SEQUENTIAL_ATTENDED_TOKENS, 10_000, **of)
    page.set(catalogue.REPLICAS, 1, model=model)
    page.set(catalogue.REQUESTS_RUNNING, 4, model=model)
    page.set(catalogue.REQUESTS_QUEUED, 3, model=model)
    page.add(catalogue.REQUESTS, 20, model=model, key_class="default", outcome="ok")
    page.observe(catalogue.REQUEST_LATENCY, 0.3, 0.4, model=model)
    return page


@dataclass
class PageServer:
    """Body that a port returns; tests may change it while the server runs.

    `before` is called before each answer, with its number.
    """

    url: str
    body: str
    status: int = 200
    num_asked: int = 0
    before: Callable[[int], None] = lambda number: None


@contextmanager
def served(body: str, port: int = 0) -> Iterator[PageServer]:
    """Serve the body to every GET on a free local port."""
    state = PageServer("", body)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.num_asked += 1
            state.before(state.num_asked)
            self.send_response(state.status)
            self.end_headers()
            self.wfile.write(state.body.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/metrics"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
