"""Increases of counters through restarts, vanished series and outages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.monitor.rates import History, increase
from cluster.monitor.series import SeriesKey, Snapshot, total
from deployments.metrics import catalogue

PAGE = "http://node/metrics"


def key(page: str = PAGE, replica: str = "r1", name: str | None = None) -> SeriesKey:
    exported = name or catalogue.GENERATED_TOKENS.name
    return SeriesKey(page, exported, (("model", "m"), ("replica", replica)))


def snapshot(at_s: float, values: dict[SeriesKey, float], **failures: str) -> Snapshot:
    pages = frozenset({PAGE} - failures.keys()) | {each.page for each in values}
    return Snapshot(at_s, values, pages, failures)


def tokens(history: History, seconds: float = 1000.0) -> float:
    return total(history.window(seconds).gained, catalogue.GENERATED_TOKENS)


def test_increases_count_restarts_from_zero() -> None:
    before, after = snapshot(0, {key(): 100.0}), snapshot(2, {key(): 130.0})
    restarted = snapshot(4, {key(): 7.0})

    assert increase(before, after) == {key(): 30.0}
    assert increase(after, restarted) == {key(): 7.0}


def test_a_new_replica_counts_from_zero_and_a_vanished_one_adds_nothing() -> None:
    before = snapshot(0, {key(replica="old"): 100.0})
    after = snapshot(2, {key(replica="new"): 5.0})

    assert increase(before, after) == {key(replica="new"): 5.0}


def test_the_first_values_of_a_new_page_do_not_count() -> None:
    before, after = snapshot(0, {key(): 1.0}), snapshot(2, {key(): 1.0, key("other"): 5000.0})

    assert sum(increase(before, after).values()) == 0.0


def test_gauges_have_no_increase() -> None:
    gauge = key(name=catalogue.KV_CACHE_USAGE.name)

    assert increase(snapshot(0, {gauge: 0.1}), snapshot(1, {gauge: 0.9})) == {}


def test_a_window_needs_two_snapshots() -> None:
    history = History(60)
    history.add(snapshot(0, {key(): 5.0}))

    assert history.window(10).seconds == 0


def test_a_window_covers_at_least_the_last_interval() -> None:
    history = History(keep_s=10)
    for second, value in ((0, 0), (2, 20), (4, 30), (6, 90)):
        history.add(snapshot(second, {key(): float(value)}))

    assert tokens(history, 4.0) == 70
    assert history.window(4.0).seconds == 4
    assert history.window(0.1).seconds == 2
    history.add(snapshot(15, {key(): 100.0}))
    assert tokens(history) == 70
    assert history.window(1000).seconds == 11


def test_counts_during_an_outage_are_added_afterwards() -> None:
    history = History(60)
    gauge = key(name=catalogue.REPLICA_REQUESTS.name)
    history.add(snapshot(0, {key(): 100.0, gauge: 3.0, key("other"): 1.0}))

    history.add(snapshot(2, {key("other"): 1.0}, **{PAGE: "no answer"}))
    assert history.latest is not None
    assert gauge not in history.latest.values
    history.add(snapshot(4, {key(): 160.0, key("other"): 1.0}))

    assert tokens(history) == 60


def test_an_unlisted_page_is_forgotten() -> None:
    history = History(60)
    history.add(snapshot(0, {key(): 100.0, key("other"): 1.0}))
    history.add(snapshot(2, {key(): 100.0}))

    assert history.latest is not None
    assert key("other") not in history.latest.values


steps = st.lists(st.one_of(st.integers(0, 50), st.just("restart")), max_size=30)


@settings(deadline=None)
@given(steps)
def test_any_sequence_of_counts_and_restarts_adds_up(run: list[int | str]) -> None:
    """A counter that restarts has counted, between two readings, at least what it shows."""
    history, value, counted = History(1e9), 0.0, 0.0
    history.add(snapshot(0, {key(): 0.0}))
    for second, step in enumerate(run, start=1):
        if step == "restart":
            value = 0.0
        else:
            value += float(step)
            counted += float(step)
        history.add(snapshot(second, {key(): value}))

    assert tokens(history) == pytest.approx(counted)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20))
def test_increases_are_never_negative(values: list[float]) -> None:
    snapshots = [snapshot(second, {key(): value}) for second, value in enumerate(values)]

    for before, after in pairwise(snapshots):
        (gained,) = increase(before, after).values()
        assert 0 <= gained <= after.values[key()]
