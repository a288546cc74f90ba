"""Histogram quantiles, as Prometheus computes them."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.monitor.series import histogram_quantile

INF = math.inf


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 1 + 2.5 / 3), (0.8, 2.0), (0.9, 4.0), (0.95, 4.0), (1.0, 4.0)],
)
def test_values_are_spread_evenly_within_a_bucket(quantile: float, expected: float) -> None:
    # 5 values up to 1, 3 up to 2, 1 up to 4, 1 beyond: 4 is the most that can be said of it.
    buckets = {1.0: 5.0, 2.0: 8.0, 4.0: 9.0, INF: 10.0}

    assert histogram_quantile(quantile, buckets) == pytest.approx(expected)


def test_without_observations_or_an_infinite_bucket_there_is_no_quantile() -> None:
    assert histogram_quantile(0.5, {}) is None
    assert histogram_quantile(0.5, {1.0: 0.0, INF: 0.0}) is None
    assert histogram_quantile(0.5, {1.0: 3.0}) is None
    assert histogram_quantile(0.5, {INF: 3.0}) is None


def test_a_lowest_bound_of_zero_is_itself_the_value() -> None:
    assert histogram_quantile(0.5, {0.0: 9.0, 1.0: 10.0, INF: 10.0}) == 0.0


def test_counts_of_different_times_may_decrease() -> None:
    assert histogram_quantile(0.99, {1.0: 10.0, 2.0: 9.0, INF: 10.0}) == pytest.approx(0.99)


histograms = st.lists(st.integers(0, 20), min_size=3, max_size=8).map(
    lambda counts: dict(
        zip([*(2.0**n for n in range(len(counts) - 1)), INF], accumulate(counts), strict=True)
    )
)


@settings(deadline=None)
@given(histograms, st.floats(0, 1), st.floats(0, 1))
def test_a_quantile_grows_with_its_share_and_stays_within_the_bounds(
    buckets: dict[float, float], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    below, above = histogram_quantile(low, buckets), histogram_quantile(high, buckets)

    if buckets[INF] == 0:
        assert below is None
        return
    assert below is not None
    assert above is not None
    assert 0 <= below <= above + 1e-12
    assert above <= max(bound for bound in buckets if bound < INF)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_true_quantile_lies_in_the_same_bucket(values: list[float], quantile: float) -> None:
    bounds = (0.01, 0.1, 0.5, 1.0, 5.0, 20.0, 100.0, INF)
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    true = sorted(values)[math.ceil(quantile * len(values)) - 1]
    upper = next(bound for bound in bounds if true <= bound)

    found = histogram_quantile(quantile, buckets)

    assert found is not None
    lower = max((bound for bound in bounds if bound < upper), default=0.0)
    assert lower - 1e-9 <= found <= upper + 1e-9
