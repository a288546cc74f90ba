"""Confidence intervals, checked against known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from cluster.loadtest.statistics import (
    mean,
    over_repeats,
    percentile,
    ratio_over_repeats,
    ratio_within_runs,
    within_run,
)


def test_an_interval_over_three_repeats_is_student_s() -> None:
    estimate = over_repeats([10.0, 12.0, 14.0])

    # t(0.975; 2) = 4.3027, standard error 2 / sqrt(3)
    assert estimate.value == 12.0
    assert estimate.high == pytest.approx(12.0 + 4.302653 * 2 / math.sqrt(3), rel=1e-5)
    assert estimate.low == pytest.approx(12.0 - 4.302653 * 2 / math.sqrt(3), rel=1e-5)


def test_two_repeats_have_no_interval() -> None:
    estimate, ratio = over_repeats([10.0, 12.0]), ratio_over_repeats([4.0, 4.0], [2.0] * 3)

    assert (estimate.value, estimate.low, estimate.high) == (11.0, None, None)
    assert ratio.value == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == (None, None)


def test_the_interval_over_repeats_has_its_coverage() -> None:
    generator = np.random.default_rng(1)
    trials = generator.normal(100.0, 5.0, size=(1000, 3))

    held = [_holds(over_repeats(list(row)), 100.0) for row in trials]
    bootstrapped = [
        _holds_pair(
            stats.bootstrap(
                (row,), np.mean, n_resamples=200, method="percentile", rng=generator
            ).confidence_interval,
            100.0,
        )
        for row in trials[:150]
    ]

    assert np.mean(held) == pytest.approx(0.95, abs=0.02)
    # Why it is not the bootstrap that is used there.
    assert np.mean(bootstrapped) < 0.85


@pytest.mark.parametrize(
    ("statistic", "truth"),
    [(mean, 2.0), (percentile(90), 2 * math.log(10))],
)
def test_the_interval_within_a_run_has_its_coverage(statistic: object, truth: float) -> None:
    generator = np.random.default_rng(2)

    held = [
        _holds(within_run(list(generator.exponential(2.0, 200)), statistic), truth)  # type: ignore[arg-type]
        for _ in range(150)
    ]

    assert 0.88 <= np.mean(held) <= 1.0


def test_two_values_are_too_few_to_resample() -> None:
    assert within_run([1.0, 2.0], mean).low is None


def test_equal_values_have_an_interval_of_no_width() -> None:
    estimate = within_run([3.0] * 10, percentile(99))

    assert (estimate.low, estimate.high) == (3.0, 3.0)


def test_a_ratio_of_repeats_uses_geometric_means() -> None:
    ratio = ratio_over_repeats([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])

    assert ratio.value == pytest.approx(2.0)
    # Welch on logarithms: both have variance (ln 2)^2, so 4 degrees of freedom: t is 2.776445.
    half = 2.776445 * math.sqrt(2 * math.log(2) ** 2 / 3)
    assert ratio.high == pytest.approx(2.0 * math.exp(half), rel=1e-5)
    assert ratio.low == pytest.approx(2.0 * math.exp(-half), rel=1e-5)


def test_a_ratio_of_repeats_that_agree_is_exact() -> None:
    ratio = ratio_over_repeats([3.0] * 3, [2.0] * 3)

    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_ratio_interval_has_its_coverage() -> None:
    generator = np.random.default_rng(3)

    held = [
        _holds(
            ratio_over_repeats(
                list(generator.lognormal(math.log(1.7), 0.05, 4)),
                list(generator.lognormal(0.0, 0.02, 4)),
            ),
            1.7,
        )
        for _ in range(1000)
    ]

    assert np.mean(held) == pytest.approx(0.95, abs=0.025)


def test_a_ratio_within_runs_resamples_both() -> None:
    generator = np.random.default_rng(4)
    these, those = generator.exponential(3.0, 300), generator.exponential(2.0, 400)

    ratio = ratio_within_runs(list(these), list(those), mean)

    assert ratio.value == pytest.approx(these.mean() / those.mean())
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 1.5 < ratio.high
    assert ratio.high - ratio.low < 0.6


def _holds(estimate: object, truth: float) -> bool:
    low, high = getattr(estimate, "low", None), getattr(estimate, "high", None)
    assert low is not None
    assert high is not None
    return bool(low <= truth <= high)


def _holds_pair(pair: tuple[float, float], truth: float) -> bool:
    return bool(pair[0] <= truth <= pair[1])
