"""Quick counters and histograms keep the values of prometheus_client's own."""

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from apar_core.metrics.counting import Counter, Histogram

BOUNDS = (0.01, 0.1, 1.0, 10.0)
AMOUNTS = st.one_of(st.sampled_from((0.0, *BOUNDS)), st.floats(-1, 100), st.just(float("inf")))


@given(st.lists(AMOUNTS))
def test_a_histogram_counts_as_the_original(amounts: list[float]) -> None:
    pages = []
    for kind in (Histogram, prometheus_client.Histogram):
        registry = CollectorRegistry()
        spread = kind("spread", "Spread.", ("model",), registry=registry, buckets=BOUNDS)
        for amount in amounts:
            spread.labels("m").observe(amount)
        page = generate_latest(registry).decode().splitlines()
        pages.append([line for line in page if "_created" not in line])

    assert pages[0] == pages[1]


def test_a_counter_counts_and_never_falls() -> None:
    registry = CollectorRegistry()
    count = Counter("events", "Events.", ("model",), registry=registry)
    for amount in (0, 2.5, 0, 1):
        count.labels("m").inc(amount)
    with pytest.raises(ValueError, match="by -1"):
        count.labels("m").inc(-1)

    assert registry.get_sample_value("events_total", {"model": "m"}) == 3.5
