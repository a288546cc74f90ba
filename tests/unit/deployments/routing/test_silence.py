"""Detection of silent replicas."""

import pytest

from deployments.routing.table import SilenceDetector

SLOTS = (0, 1, 2)


def heard(
    silence: SilenceDetector, slots: tuple[int, ...], begin_s: float, end_s: float, gap_s: float
) -> None:
    now_s = begin_s
    while now_s < end_s:
        for slot in slots:
            silence.heard(slot, now_s)
        now_s += gap_s


@pytest.mark.parametrize(
    ("gap_s", "tolerated_s", "silent_s"), [(0.2, 1.8, 2.4), (0.5, 3.0, 5.0), (2.0, 13.0, 20.0)]
)
def test_silence_is_measured_in_usual_report_gaps(
    gap_s: float, tolerated_s: float, silent_s: float
) -> None:
    silence = SilenceDetector(4)
    heard(silence, SLOTS, 0.0, 50.0, gap_s)

    heard(silence, (0, 2), 50.0, 50.0 + tolerated_s, gap_s)
    assert not silence.silent().any()

    heard(silence, (0, 2), 50.0 + tolerated_s, 50.0 + silent_s + gap_s, gap_s)
    assert silence.silent().tolist() == [False, True, False, False]

    silence.heard(1, 50.0 + silent_s + gap_s)
    assert not silence.silent().any()


def test_no_replica_is_silent_if_all_stop_reporting() -> None:
    silence = SilenceDetector(4)
    heard(silence, SLOTS, 0.0, 10.0, 0.2)

    silence.heard(1, 10.1)
    silence.heard(1, 10.3)
    assert not silence.silent().any()


def test_a_replica_that_has_not_reported_yet_is_not_silent() -> None:
    silence = SilenceDetector(2)
    heard(silence, (0,), 0.0, 100.0, 0.2)
    assert not silence.silent().any()

    silence.heard(1, 100.0)
    heard(silence, (0,), 100.0, 110.0, 0.2)
    assert silence.silent().tolist() == [False, True]
    silence.forget(1)
    silence.resize(4)
    assert silence.silent().tolist() == [False] * 4
