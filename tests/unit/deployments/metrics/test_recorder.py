"""The recorder: labels, what is told once and what is told on."""

import pytest

from cluster.metrics.catalogue import Kind, Metric
from deployments.metrics.recorder import Recorder
from tests.unit.deployments.metrics.played_instruments import PlayedInstruments

LABELS = {"model": "a model", "reason": "why"}
COUNT = Metric("apar_c_total", Kind.COUNTER, "things", "Things.", LABELS)
VALUE = Metric("apar_g", Kind.GAUGE, "things", "Things.", {"model": "a model"})
SPREAD = Metric("apar_h", Kind.HISTOGRAM, "things", "Things.", {"model": "a model"}, (1, 2))


def test_labels_of_the_process_and_of_the_call_come_together() -> None:
    told = PlayedInstruments()
    recorder = Recorder(told, model="m", replica="r")

    recorder.inc(COUNT, 2, reason="x")
    recorder.observe(SPREAD, 1.5)
    recorder.flush()

    # The metrics have no label `replica`, so none is told.
    assert told.value("apar_c_total", model="m", reason="x") == 2
    assert told.value("apar_h_bucket", model="m", le="2.0") == 1


def test_a_label_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="reason"):
        Recorder(PlayedInstruments(), model="m").inc(COUNT)


def test_a_gauge_that_is_not_set_again_is_told_no_more() -> None:
    told = PlayedInstruments()
    recorder = Recorder(told)

    recorder.set(VALUE, 1, model="gone")
    recorder.flush()
    recorder.set(VALUE, 2, model="here")
    recorder.flush()

    assert told.value("apar_g", model="gone") == 1
    assert told.value("apar_g", model="here") == 2
    assert told.told == 2
