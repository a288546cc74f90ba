"""Intervals that say how sure a figure is: over repeats, or within the only run there is.

Over repeats Student's t is used: a bootstrap of three or five values is far too narrow (the tests
measure both). Within one run the requests are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
LEAST_REPEATS = 3
"""For an interval over repeats: of two, Student's is twelve times as wide as they differ."""
_RESAMPLES = 1000
# So that resampling many requests does not take gigabytes.
_BATCH = 100

Statistic = Callable[..., NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval, None where nothing says how sure it is."""

    value: float
    low: float | None = None
    high: float | None = None


def percentile(share: float) -> Statistic:
    """Return the statistic that gives a percentile (0 to 100) along an axis."""

    def statistic(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        return np.asarray(np.percentile(values, share, axis=axis))

    return statistic


def mean(values: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """Return the mean along an axis."""
    return np.asarray(np.mean(values, axis=axis))


def over_repeats(values: Sequence[float]) -> Estimate:
    """Return the mean of one figure over repeats, with Student's t interval of three or more."""
    centre = float(np.mean(values))
    if len(values) < LEAST_REPEATS:
        return Estimate(centre)
    half = _t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(centre, centre - half, centre + half)


def within_run(values: Sequence[float], statistic: Statistic, *, seed: int = 0) -> Estimate:
    """Return a statistic of one run's values, with the bootstrap interval of three or more."""
    array = np.asarray(values, dtype=float)
    value = float(statistic(array))
    if len(values) < 3:
        return Estimate(value)
    return Estimate(value, *_bootstrapped((array,), statistic, seed))


def ratio_over_repeats(these: Sequence[float], those: Sequence[float]) -> Estimate:
    """Return how many times the geometric mean of the second values that of the first is.

    The interval is Welch's on the logarithms; there is none if either has fewer than three values.
    All values must be above 0.
    """
    first, second = np.log(these), np.log(those)
    difference = float(np.mean(first) - np.mean(second))
    if min(len(these), len(those)) < LEAST_REPEATS:
        return Estimate(math.exp(difference))
    squares = [float(np.var(each, ddof=1)) / len(each) for each in (first, second)]
    if sum(squares) == 0:
        return Estimate(math.exp(difference), math.exp(difference), math.exp(difference))
    sizes = (len(these), len(those))
    freedom = sum(squares) ** 2 / sum(
        square**2 / (size - 1) for square, size in zip(squares, sizes, strict=True)
    )
    half = _t_quantile(freedom) * math.sqrt(sum(squares))
    return Estimate(math.exp(difference), math.exp(difference - half), math.exp(difference + half))


def ratio_within_runs(
    these: Sequence[float], those: Sequence[float], statistic: Statistic, *, seed: int = 0
) -> Estimate:
    """Return one run's statistic over another's, with its bootstrap interval.

    The second one's must be above 0.
    """

    def ratio(
        first: NDArray[np.float64], second: NDArray[np.float64], axis: int = -1
    ) -> NDArray[np.float64]:
        return statistic(first, axis=axis) / statistic(second, axis=axis)

    arrays = (np.asarray(these, dtype=float), np.asarray(those, dtype=float))
    value = float(ratio(*arrays))
    if min(len(these), len(those)) < 3:
        return Estimate(value)
    return Estimate(value, *_bootstrapped(arrays, ratio, seed))


def _t_quantile(freedom: float) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def _bootstrapped(
    samples: tuple[NDArray[np.float64], ...], statistic: Statistic, seed: int
) -> tuple[float, float]:
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=_RESAMPLES,
        batch=_BATCH,
        vectorized=True,
        confidence_level=CONFIDENCE,
        # BCa has no answer where all resamples agree, as a percentile of many equal values does.
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
