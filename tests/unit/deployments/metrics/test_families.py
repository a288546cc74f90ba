"""Counters, gauges and histograms on their way to Ray, by numbers worked out by hand."""

from deployments.metrics.recorder import Counter, Gauge, Histogram
from tests.unit.deployments.metrics.played_instruments import PlayedInstruments

M = ("m",)


def test_a_counter_hands_over_what_was_added_and_no_more() -> None:
    told = PlayedInstruments()
    counter = Counter(told, "c", "text", ("model",))

    counter.inc(M)
    counter.inc(M, 4)
    counter.flush()
    counter.flush()
    counter.inc(M, 2.5)
    counter.flush()

    assert told.value("c", model="m") == 7.5
    assert told.told == 2


def test_a_named_count_is_told_before_it_rises() -> None:
    told = PlayedInstruments()
    counter = Counter(told, "c", "text", ("model",))

    counter.inc(M, 0)
    counter.flush()

    assert told.value("c", model="m") == 0
    assert told.value("c", model="other") is None


def test_a_count_that_is_kept_elsewhere_never_falls() -> None:
    told = PlayedInstruments()
    counter = Counter(told, "c", "text", ("model",))

    for total in (3, 2, 8):
        counter.set_total(M, total)
        counter.flush()

    assert told.value("c", model="m") == 8


def test_a_gauge_is_told_again_and_again_until_it_is_cleared() -> None:
    told = PlayedInstruments()
    gauge = Gauge(told, "g", "text", ("model",))

    gauge.set(M, 3)
    gauge.flush()
    gauge.flush()
    gauge.clear()
    gauge.flush()

    assert told.value("g", model="m") == 3
    assert told.told == 2


def test_a_histogram_tells_buckets_sum_and_count_as_prometheus_clients_do() -> None:
    told = PlayedInstruments()
    histogram = Histogram(told, "h", "text", ("model",), (0.5, 1, 2))

    for value in (0.5, 0.75, 1, 1.25, 7):
        histogram.observe(M, value)
    histogram.flush()

    # A value on a bound belongs to its bucket, and each bucket holds those below it.
    buckets = {le: told.value("h_bucket", model="m", le=le) for le in ("0.5", "1.0", "2.0", "+Inf")}
    assert buckets == {"0.5": 1, "1.0": 3, "2.0": 4, "+Inf": 5}
    assert told.value("h_sum", model="m") == 10.5
    assert told.value("h_count", model="m") == 5


def test_a_declared_histogram_is_told_empty() -> None:
    told = PlayedInstruments()
    histogram = Histogram(told, "h", "text", ("model",), (1,))

    histogram.declare(M)
    histogram.flush()

    assert told.value("h_bucket", model="m", le="+Inf") == 0
    assert told.value("h_count", model="m") == told.value("h_sum", model="m") == 0
