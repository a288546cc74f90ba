"""Step times out of metrics pages, as a cluster under changing load writes them."""

from __future__ import annotations

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from cluster.metrics import catalogue
from cluster.monitor.series import Snapshot
from cluster.monitor.sources import PagesSource, parse_page
from cluster.sizing.errors import SizingError
from cluster.sizing.measured_costs import StepPoint, fit_costs, step_points, watch
from tests.fakes.metrics_page import MetricsPage, served

OF = {"model": "m", "replica": "r"}
BASE_S, THREAD_S = 0.004, 0.0001


def pages(threads: list[int]) -> list[Snapshot]:
    """Readings of an engine that makes 100 steps between each two, with so many threads."""
    page, snapshots = MetricsPage(), []
    for second, number in enumerate(threads):
        page.set(catalogue.THREADS, number, **OF, state="running")
        page.set(catalogue.THREADS, 99, **OF, state="waiting")
        snapshots.append(Snapshot(second, parse_page("p", page.text()), frozenset({"p"}), {}))
        # What runs from now on; the next reading shows the same number.
        page.add(catalogue.ENGINE_STEPS, 100, **OF)
        page.add(catalogue.ENGINE_BUSY_SECONDS, 100 * (BASE_S + THREAD_S * number), **OF)
    return snapshots


def test_base_and_threads_are_told_apart_under_changing_load() -> None:
    points = step_points(pages([4, 4, 4, 16, 16, 16, 40, 40, 40]))
    steady = [point for point in points if point.threads in (4, 16, 40)]

    costs = fit_costs(steady)

    assert costs.base_s == pytest.approx(BASE_S)
    assert costs.thread_s == pytest.approx(THREAD_S)
    assert "measured: 600 steps" in costs.source
    # Where the number changed in between, the mean of both readings is a guess.
    assert fit_costs(points).thread_s == pytest.approx(THREAD_S, rel=0.2)


def test_an_even_load_is_refused_unless_the_base_is_given() -> None:
    points = step_points(pages([10, 10, 11, 10, 10, 10]))

    with pytest.raises(SizingError, match="5 measurements with 10 to 10 threads"):
        fit_costs(points)
    costs = fit_costs(points, base_s=BASE_S)
    assert costs.base_s == BASE_S
    assert costs.thread_s == pytest.approx(THREAD_S, rel=0.05)
    assert "base given" in costs.source


def test_an_idle_cluster_has_no_step_times() -> None:
    with pytest.raises(SizingError, match="put load on it"):
        fit_costs(step_points(pages([0, 0, 0])))


@settings(deadline=None)
@given(
    st.lists(
        st.builds(StepPoint, st.floats(1, 200), st.floats(1e-4, 1.0), st.floats(20, 1e4)),
        min_size=4,
        max_size=20,
    )
)
def test_no_measurement_gives_negative_times(points: list[StepPoint]) -> None:
    try:
        costs = fit_costs(points)
    except SizingError:
        reject()
    assert costs.base_s >= -1e-12
    assert costs.thread_s >= 0


def test_a_cluster_is_watched_for_as_long_as_asked() -> None:
    pauses: list[float] = []
    with served(MetricsPage().text()) as server:
        snapshots = watch(PagesSource([server.url]), 6.0, 2.0, pauses.append)

    assert len(snapshots) == 4
    assert pauses == [2.0, 2.0, 2.0]
    with pytest.raises(SizingError, match="no step times from the cluster: http"):
        watch(PagesSource([server.url]), 6.0, 2.0, pauses.append)
