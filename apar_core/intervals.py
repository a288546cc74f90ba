"""Estimates with 95% confidence intervals: of shares, over repeats, and by resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NORMAL_95 = 1.96
# Student's t for 95 %, by the degrees of freedom from 1 on.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
MIN_REPEATS = 3
"""Minimum for an interval over repeats; for two, it is twelve times as wide as their difference."""
_RESAMPLES = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval, None if unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def interval(self, form: str) -> str | None:
        """Return the interval as text, given the format of its ends; None if it is unknown."""
        if self.low is None or self.high is None:
            return None
        return f"{self.low:{form}} to {self.high:{form}}"


def share(hits: int, number: int) -> Estimate | None:
    """Return a share with Wilson's interval, which also holds near 0 and 1; None of nothing."""
    if number == 0:
        return None
    found = hits / number
    spread = _NORMAL_95**2 / number
    centre = (found + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (found * (1 - found) + spread / 4)) / (1 + spread)
    # Rounding must not leave the share outside its interval.
    return Estimate(found, max(0.0, min(found, centre - half)), min(1.0, max(found, centre + half)))


def half_width(values: Sequence[float] | Floats) -> float:
    """Return half the width of Student's interval of a mean; 0 for one value."""
    freedom = len(values) - 1
    if freedom < 1:
        return 0.0
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL_95 + 2.4 / freedom
    return float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def over_repeats(values: Sequence[float]) -> Estimate:
    """Return the mean over repeats; with three or more, with Student's interval."""
    centre = float(np.mean(values))
    if len(values) < MIN_REPEATS:
        return Estimate(centre)
    half = half_width(values)
    return Estimate(centre, centre - half, centre + half)


def ratio_over_repeats(these: Sequence[float], those: Sequence[float]) -> Estimate:
    """Return the geometric mean of the ratios of values that were measured in the same repeat.

    The interval is Student's on the logarithms. All values must be positive.
    """
    logarithms = np.log(these) - np.log(those)
    found = over_repeats([float(each) for each in logarithms])
    if found.low is None or found.high is None:
        return Estimate(math.exp(found.value))
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high))


def of_sums(
    values_NK: Sequence[Sequence[float]], statistic: Callable[[Floats], Floats], *, seed: int
) -> Estimate:
    """Return a statistic of the sums of K values over N items, with its bootstrap interval.

    `statistic` takes sums [..., K] and returns [...]. Values of an item stay together, so the
    interval of a difference or ratio is paired. With fewer than three items there is none.
    """
    array_NK = np.asarray(values_NK, dtype=float)
    value = float(statistic(array_NK.sum(0)))
    number = len(array_NK)
    if number < MIN_REPEATS:
        return Estimate(value)
    # How often each item is drawn is all that its sum needs.
    generator = np.random.default_rng(seed)
    counts_RN = generator.multinomial(number, np.full(number, 1 / number), size=_RESAMPLES)
    low, high = np.percentile(statistic(counts_RN @ array_NK), (2.5, 97.5))
    return Estimate(value, float(low), float(high))
