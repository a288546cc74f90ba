"""Counters, gauges, histograms, the recorder of the catalogue's metrics, and the flush timer."""

import asyncio
import logging

import pytest

from cluster.metrics.catalogue import Kind, Metric
from deployments.metrics.recorder import Counter, FlushTimer, Gauge, Histogram, Recorder
from tests.fakes.instruments import FakeInstruments

LABELS = {"model": "a model", "reason": "why"}
COUNT = Metric("apar_c_total", Kind.COUNTER, "things", "Things.", LABELS)
VALUE = Metric("apar_g", Kind.GAUGE, "things", "Things.", {"model": "a model"})
SPREAD = Metric("apar_h", Kind.HISTOGRAM, "things", "Things.", {"model": "a model"}, (1, 2))
M = ("m",)


def test_a_counter_emits_each_increase_once() -> None:
    exported = FakeInstruments()
    counter = Counter(exported, "c", "text", ("model",))

    counter.inc(M)
    counter.inc(M, 4)
    counter.flush()
    counter.flush()
    counter.inc(M, 2.5)
    counter.flush()

    assert exported.value("c", model="m") == 7.5
    assert exported.num_calls == 2


def test_a_counter_increased_by_zero_is_exported() -> None:
    exported = FakeInstruments()
    counter = Counter(exported, "c", "text", ("model",))

    counter.inc(M, 0)
    counter.flush()

    assert exported.value("c", model="m") == 0
    assert exported.value("c", model="other") is None


def test_a_counter_set_to_a_lower_total_does_not_decrease() -> None:
    exported = FakeInstruments()
    counter = Counter(exported, "c", "text", ("model",))

    for total in (3, 2, 8):
        counter.set_total(M, total)
        counter.flush()

    assert exported.value("c", model="m") == 8


def test_a_gauge_is_emitted_at_each_flush_until_it_is_cleared() -> None:
    exported = FakeInstruments()
    gauge = Gauge(exported, "g", "text", ("model",))

    gauge.set(M, 3)
    gauge.flush()
    gauge.flush()
    gauge.clear()
    gauge.flush()

    assert exported.value("g", model="m") == 3
    assert exported.num_calls == 2


def test_a_histogram_emits_cumulative_buckets_sum_and_count() -> None:
    exported = FakeInstruments()
    histogram = Histogram(exported, "h", "text", ("model",), (0.5, 1, 2))

    for value in (0.5, 0.75, 1, 1.25, 7):
        histogram.observe(M, value)
    histogram.flush()

    # A value on a bound belongs to that bucket, and each bucket includes those below it.
    buckets = {
        le: exported.value("h_bucket", model="m", le=le) for le in ("0.5", "1.0", "2.0", "+Inf")
    }
    assert buckets == {"0.5": 1, "1.0": 3, "2.0": 4, "+Inf": 5}
    assert exported.value("h_sum", model="m") == 10.5
    assert exported.value("h_count", model="m") == 5


def test_a_declared_histogram_is_exported_empty() -> None:
    exported = FakeInstruments()
    histogram = Histogram(exported, "h", "text", ("model",), (1,))

    histogram.declare(M)
    histogram.flush()

    assert exported.value("h_bucket", model="m", le="+Inf") == 0
    assert exported.value("h_count", model="m") == exported.value("h_sum", model="m") == 0


def test_labels_of_the_process_and_of_the_call_are_combined() -> None:
    exported = FakeInstruments()
    recorder = Recorder(exported, model="m", replica="r")

    recorder.inc(COUNT, 2, reason="x")
    recorder.observe(SPREAD, 1.5)
    recorder.flush()

    # The metrics have no label `replica`, so none is exported.
    assert exported.value("apar_c_total", model="m", reason="x") == 2
    assert exported.value("apar_h_bucket", model="m", le="2.0") == 1


def test_a_label_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="reason"):
        Recorder(FakeInstruments(), model="m").inc(COUNT)


def test_the_recorder_emits_a_gauge_only_after_it_was_set() -> None:
    exported = FakeInstruments()
    recorder = Recorder(exported)

    recorder.set(VALUE, 1, model="gone")
    recorder.flush()
    recorder.set(VALUE, 2, model="here")
    recorder.flush()

    assert exported.value("apar_g", model="gone") == 1
    assert exported.value("apar_g", model="here") == 2
    assert exported.num_calls == 2


async def test_the_timer_flushes_at_once_periodically_and_at_close() -> None:
    num_flushes = 0

    async def flush() -> None:
        nonlocal num_flushes
        num_flushes += 1

    timer = FlushTimer(flush, period_s=0.01)
    await asyncio.sleep(0.1)
    before = num_flushes
    await timer.close()
    after = num_flushes
    await asyncio.sleep(0.05)

    assert before >= 2
    assert after == num_flushes == before + 1


async def test_the_timer_logs_a_failure_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fails = True
    num_flushes = 0

    async def flush() -> None:
        nonlocal num_flushes
        num_flushes += 1
        if fails:
            raise TimeoutError("the engine does not answer")

    with caplog.at_level(logging.WARNING):
        timer = FlushTimer(flush, period_s=0.01)
        await asyncio.sleep(0.1)
        fails = False
        await asyncio.sleep(0.05)
        await timer.close()

    assert num_flushes > 3
    assert [record.message for record in caplog.records] == ["metrics not exported"]
