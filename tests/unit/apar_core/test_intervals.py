"""Confidence intervals, compared with published values and with what they must cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apar_core.intervals import of_sums, over_repeats, ratio_over_repeats, share


def test_wilsons_interval_is_the_published_one() -> None:
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    found = share(81, 263)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.3080, 0.2553, 0.3662), abs=1e-4)
    none = share(0, 20)
    assert none is not None
    assert (none.low, none.high) == pytest.approx((0, 0.1611), abs=1e-4)


def test_a_share_of_nothing_is_unknown() -> None:
    assert share(0, 0) is None


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_lies_in_its_interval_between_0_and_1(counts: tuple[int, int]) -> None:
    found = share(*counts)

    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_repeats_have_students_interval() -> None:
    found = over_repeats([9.0, 10.0, 11.0])

    # t(2) = 4.303, standard error 1 / sqrt(3).
    assert found.value == 10
    assert found.high == pytest.approx(10 + 4.303 / 3**0.5)
    assert over_repeats([9.0, 10.0]).interval(".1f") is None


def test_a_ratio_pairs_what_was_measured_in_the_same_repeat() -> None:
    # The machine slows down by half, and both sides alike.
    found = ratio_over_repeats([20.0, 10.0, 5.0], [10.0, 5.0, 2.5])

    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_the_bootstrap_keeps_the_values_of_an_item_together() -> None:
    # Items differ a lot, but the first value is always twice the second.
    values = [(2.0 * size, size) for size in (1.0, 10.0, 100.0, 1000.0)]
    found = of_sums(values, lambda sums: sums[..., 0] / sums[..., 1], seed=0)

    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_the_bootstraps_interval_of_a_mean_is_that_of_its_standard_error() -> None:
    generator = np.random.default_rng(1)
    values = [(float(each), 1.0) for each in generator.normal(5, 2, size=400)]
    found = of_sums(values, lambda sums: sums[..., 0] / sums[..., 1], seed=0)

    assert found.low is not None
    assert found.high is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * 2 / 20, rel=0.15)
    assert found == of_sums(values, lambda sums: sums[..., 0] / sums[..., 1], seed=0)
