"""Reads a server's metrics as Prometheus does."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics.catalogue import EVENT_LOOP_LAG, Metric
from tests.integration.serving.apar_process import Server

SETTLE_S = 40.0
# The state of engines is recorded once a second.
REST_S = 2.0
OURS = "apar_"


@dataclass(frozen=True)
class Page:
    """The samples of one page: name, labels, value."""

    samples: tuple[tuple[str, dict[str, str], float], ...]

    def total(self, metric: Metric, part: str = "", **labels: str) -> float:
        """The sum of the series with these labels; `part` is `_sum`, `_count` or `_bucket`."""
        return sum(
            value
            for name, given, value in self.samples
            if name == metric.name + part and labels.items() <= given.items()
        )

    def by(self, metric: Metric, *names: str) -> dict[tuple[str, ...], float]:
        """Return a metric's nonzero values by some of its labels."""
        found: dict[tuple[str, ...], float] = {}
        for name, given, value in self.samples:
            if name == metric.name and value:
                key = tuple(given[label] for label in names)
                found[key] = found.get(key, 0.0) + value
        return found

    def counts(self) -> dict[tuple[str, ...], float]:
        """Return all our counters by name and labels, without the one that never rests."""
        return {
            (name, *labels.values()): value
            for name, labels, value in self.samples
            if name.startswith(OURS) and name.endswith(("_total", "_count"))
            if not name.startswith(EVENT_LOOP_LAG.name)
        }

    @property
    def names(self) -> set[str]:
        """Return the names of all samples."""
        return {name for name, _, _ in self.samples}


def metrics_url(server: Server) -> str:
    """Return the address of the metrics that a server prints."""
    return server.log.read_text().partition("Metrics for Prometheus: ")[2].split()[0]


def read(url: str) -> Page:
    """Read the page of one node."""
    answer = httpx.get(url, timeout=30)
    answer.raise_for_status()
    families = text_string_to_metric_families(answer.text)
    return Page(tuple((s.name, s.labels, s.value) for family in families for s in family.samples))


def read_at_rest(url: str) -> Page:
    """Return the page once its counters stay the same; the server must be idle."""
    page = read(url)
    while True:
        time.sleep(REST_S)
        before, page = page, read(url)
        if before.counts() == page.counts():
            return page


def read_when(url: str, is_there: Callable[[Page], bool], timeout_s: float = SETTLE_S) -> Page:
    """Wait for a page that meets a condition; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not is_there(page := read(url)):
        ours = [sample for sample in page.samples if sample[0].startswith(OURS) and sample[2]]
        assert time.monotonic() < deadline, [
            (name, {k: v for k, v in labels.items() if k.islower()}, value)
            for name, labels, value in ours
            if not name.endswith("_bucket")
        ]
        time.sleep(0.3)
    return page
