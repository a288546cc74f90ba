"""Counts of a process."""

import math

import pytest

from apar_core.metrics.engine import Kind, Metric
from apar_core.metrics.recorder import Recorder

COUNT = Metric("apar_events_total", Kind.COUNTER, "events", "Events.", {"model": "", "reason": ""})
LEVEL = Metric("apar_level", Kind.GAUGE, "levels", "Level.", {"model": ""})
SPREAD = Metric("apar_spread", Kind.HISTOGRAM, "spreads", "Spread.", {"model": ""}, (1, 2))
PLAIN = Metric("apar_plain_total", Kind.COUNTER, "events", "Events.", {})


def test_shared_labels_complete_those_of_a_call() -> None:
    recorder = Recorder(model="m", replica="r")

    recorder.inc(COUNT, 2, reason="x")
    recorder.inc(COUNT, reason="x")
    recorder.inc(PLAIN)

    sample = recorder.registry.get_sample_value
    assert sample("apar_events_total", {"model": "m", "reason": "x"}) == 3
    assert sample("apar_plain_total") == 1
    with pytest.raises(KeyError, match="reason"):
        recorder.inc(COUNT)


def test_histograms_have_exact_sums() -> None:
    recorder = Recorder(model="m")
    recorder.declare(SPREAD)
    assert recorder.value(SPREAD, "_count") == 0

    for value in (0.25, 1.5, 1.125, 7.0):
        recorder.observe(SPREAD, value)

    assert recorder.value(SPREAD, "_sum") == 9.875
    assert recorder.value(SPREAD, "_count") == 4
    bounds = ("1.0", "2.0", "+Inf")
    assert [recorder.value(SPREAD, "_bucket", le=bound) for bound in bounds] == [1, 3, 4]


def test_a_count_kept_elsewhere_never_falls() -> None:
    recorder = Recorder(model="m")

    for total in (0.0, 5.0, 3.0, 6.0):
        recorder.set_total(COUNT, total, reason="x")

    assert recorder.value(COUNT, reason="x") == 6


def test_a_declared_counter_starts_at_0() -> None:
    recorder = Recorder(model="m")

    recorder.declare(COUNT, reason="x")

    assert recorder.value(COUNT, reason="x") == 0
    assert recorder.value(COUNT, reason="y") is None


def test_an_unknown_gauge_is_not_a_number() -> None:
    recorder = Recorder(model="m")

    recorder.set(LEVEL, 3)
    known = recorder.value(LEVEL)
    recorder.set(LEVEL, None)

    assert known == 3
    assert math.isnan(recorder.value(LEVEL) or 0)
