"""Rates do not depend on the intervals of reports and readings."""

from __future__ import annotations

import pytest

from cluster.monitor.rates import History, Rates, Reports
from cluster.monitor.series import SeriesKey, Snapshot, total
from deployments.metrics import catalogue

QUIET_S = 35.0
TOKENS_PER_S = 100.0


def key(worker: str = "w1") -> SeriesKey:
    labels = (("model", "m"), ("replica", worker))
    return SeriesKey("http://node/metrics", catalogue.GENERATED_TOKENS.name, labels)


class Watched:
    """Reports of processes, as readings find them."""

    def __init__(self, span_s: float = 5.0, quiet_s: float = QUIET_S) -> None:
        self.history = History(60.0)
        self.reports = Reports(span_s, quiet_s)

    def read(self, at_s: float, **counts: float) -> Rates:
        """A page that shows these counts, by worker."""
        values = {key(worker): count for worker, count in counts.items()}
        pages = frozenset({"http://node/metrics"})
        interval = self.history.add(Snapshot(at_s, values, pages, {}))
        self.reports.add(at_s, {} if interval is None else interval.gained)
        return self.reports.rates()


def tokens(rates: Rates) -> float | None:
    return rates.of(total(rates.per_s, catalogue.GENERATED_TOKENS))


def told(at_s: float, report_s: float, phase_s: float = 0.0) -> float:
    """What a process has counted by its last report."""
    reports = (at_s + phase_s) // report_s
    return max(TOKENS_PER_S * (reports * report_s - phase_s), 0.0)


@pytest.mark.parametrize("reading_s", [0.5, 1.0, 2.02, 5.03])
@pytest.mark.parametrize("report_s", [2.0, 10.0, 15.0, 30.0])
def test_a_steady_rate_is_steady(report_s: float, reading_s: float) -> None:
    watched, found = Watched(span_s=max(3 * reading_s, 5.0)), []
    for number in range(round(200 / reading_s)):
        at_s = number * reading_s
        counts = {f"w{phase}": told(at_s, report_s, phase * report_s / 3) for phase in range(3)}
        found.append(tokens(watched.read(at_s, **counts)))

    # Once all have reported twice; one reading may see a report that the next one should have.
    steady = [value for value in found[round(2 * report_s / reading_s) + 3 :] if value is not None]
    assert len(steady) > 10
    for value in steady:
        assert value == pytest.approx(3 * TOKENS_PER_S, rel=0.45)
    assert sum(steady) / len(steady) == pytest.approx(3 * TOKENS_PER_S, rel=0.1)


def test_rates_are_unknown_before_two_reports() -> None:
    watched = Watched()

    assert tokens(watched.read(0, w1=500.0)) is None
    assert tokens(watched.read(2, w1=500.0)) is None
    assert tokens(watched.read(4, w1=1500.0)) is None
    assert not watched.reports.settled
    assert tokens(watched.read(6, w1=1500.0)) is None
    assert tokens(watched.read(14, w1=2500.0)) == 100
    assert watched.reports.settled


def test_a_silent_process_becomes_idle() -> None:
    watched = Watched()
    for at_s in range(0, 30, 2):
        rates = watched.read(at_s, w1=7.0, w2=100.0 * at_s)
    assert (tokens(rates), watched.reports.settled) == (100, False)

    watched.read(QUIET_S, w1=7.0, w2=3000.0)
    assert watched.reports.settled


def test_an_idle_cluster_generates_nothing() -> None:
    watched = Watched(quiet_s=15.0)

    assert tokens(watched.read(0, w1=7.0)) is None
    assert tokens(watched.read(14, w1=7.0)) is None
    assert tokens(watched.read(15, w1=7.0)) == 0


def test_the_rate_of_a_stopped_process_falls_to_zero() -> None:
    watched = Watched()
    for at_s in range(0, 20, 2):
        watched.read(at_s, w1=100.0 * at_s)

    assert tokens(watched.read(22, w1=1800.0)) == 100
    assert tokens(watched.read(26, w1=1800.0)) == 0


def test_a_pause_is_not_averaged_into_what_comes_after_it() -> None:
    watched = Watched(quiet_s=15.0)
    for at_s in range(0, 20, 2):
        watched.read(at_s, w1=100.0 * at_s)
    for at_s in range(20, 100, 2):
        watched.read(at_s, w1=1800.0)

    watched.read(100, w1=1900.0)
    assert tokens(watched.read(102, w1=2100.0)) == 100
    assert tokens(watched.read(104, w1=2300.0)) == 100
