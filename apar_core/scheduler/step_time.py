"""Measure how long engine steps take, and learn their costs.

`LearnedStepCosts` is recursive least squares with exponential forgetting over the terms of
`StepCosts`. Coefficients are kept non-negative, and Huber weights bound single outliers
(compilation, garbage collection). Source of the method: TAPER (arXiv 2605.06914).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import numpy as np
import numpy.typing as npt

from apar_core.step_costs.costs import StepBatch, StepCosts, split_curve

Vector = npt.NDArray[np.float64]

MIN_STEPS = 32
"""Steps before the first prediction, enough to recognize outliers."""
_FORGETTING = 0.998
"""Weight of a step relative to the next: a memory of about 500 steps."""
_HUBER = 3.0
"""Errors beyond this multiple of the usual error get the weight of an error of that size."""
_SCALE_FORGETTING = 0.98
# Lower bound of the usual error, as a share of the step time: timers are never exact.
_LEAST_SCALE = 0.01
KNOTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Tokens of a step between which the time of matrix products is linear."""
_LOW = np.array(KNOTS[:-1], dtype=np.float64)
# The last piece has no end.
_WIDTH = np.array([*(high - low for low, high in pairwise(KNOTS[:-1])), np.inf])
_FEATURES = 3 + len(_LOW)
# Ridge strengths that keep coefficients where they were, in squared units of their features.
# What the data cannot tell apart goes to the fixed time, so the fit errs towards admitting.
_ANCHOR = np.array([1e-9, 0.5, 0.5, *[0.5] * len(_LOW)])
_ANCHOR_MATRIX = np.diag(_ANCHOR)
# Fitting is most of the cost of a step, and coefficients change slowly.
_STEPS_PER_FIT = 8
_MEAN_SHARE = 0.05
"""Weight of a new step in the mean step time: about the last twenty steps."""


class StepClock:
    """Times steps from output to output while the engine is busy, else from schedule to output.

    From output to output, a step includes the engine's own work, and overlapping steps are not
    counted twice where vLLM schedules ahead.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.mean_s = 0.0
        # Since the start: steps, rows that got a token, and total step time.
        self.num_steps = 0
        self.num_rows = 0
        self.busy_s = 0.0
        self._clock = clock
        self._begun: deque[tuple[object, StepBatch, float]] = deque()
        self._last_end_s: float | None = None

    @property
    def now_s(self) -> float:
        """The time now, on the clock of the steps."""
        return self._clock()

    def begin(self, step: object, batch: StepBatch) -> None:
        """Note that a step with this batch has been scheduled."""
        self._begun.append((step, batch, self._clock()))

    def end(self, step: object, *, still_busy: bool) -> tuple[StepBatch, float] | None:
        """Return the batch and the seconds of a step whose output has arrived.

        `still_busy` is whether rows are left, so that the next step begins at once. Returns None
        for a step that was not begun here.
        """
        now_s = self._clock()
        last_end_s, self._last_end_s = self._last_end_s, now_s if still_busy else None
        while self._begun:
            begun, batch, begin_s = self._begun.popleft()
            if begun is step:
                seconds = now_s - (begin_s if last_end_s is None else last_end_s)
                self.mean_s += (_MEAN_SHARE if self.mean_s else 1.0) * (seconds - self.mean_s)
                self.num_steps += 1
                self.num_rows += batch.rows
                self.busy_s += seconds
                return batch, seconds
        return None


class LearnedStepCosts:
    """Learns the costs of steps from their durations; ready after `MIN_STEPS` steps.

    A duration is the time from output to output, so the engine core's own time is part of it.
    With `known` costs it is ready at once and corrects them by what it observes.
    """

    def __init__(self, known: StepCosts | None = None) -> None:
        self.num_steps = 0
        self.largest_rows = 0 if known is None else known.matrix_s[-1][0]
        self._is_known = known is not None
        self._largest_tokens = 1
        self._information = np.zeros((_FEATURES, _FEATURES))
        self._moments = np.zeros(_FEATURES)
        self._coefficients = np.zeros(_FEATURES) if known is None else _coefficients(known)
        self._scale_s = 0.0
        self._first: list[tuple[Vector, float]] = []
        self._num_unfitted = 0

    @property
    def is_ready(self) -> bool:
        """Whether enough is known to predict a step."""
        return self._is_known or self.num_steps >= MIN_STEPS

    @property
    def costs(self) -> StepCosts:
        """Costs as learned so far; zero until enough is known."""
        self._fit()
        fixed_s, row_s, attended_s, *slopes = self._coefficients.tolist()
        seconds = [fixed_s]
        for slope_s, (low, high) in zip(slopes, pairwise(KNOTS), strict=True):
            seconds.append(seconds[-1] + slope_s * (high - low))
        launch_s, matrix_s = split_curve(list(zip(KNOTS, seconds, strict=True)))
        return StepCosts(
            name="learned",
            kind="measured",
            source=f"{self.num_steps} steps of this engine",
            matrix_s=matrix_s,
            attended_token_s=attended_s / 1000,
            launch_s=launch_s,
            row_s=row_s,
        )

    @property
    def usual_error_s(self) -> float:
        """Running mean of the absolute prediction error, with outliers bounded."""
        return self._scale_s

    def predict_s(self, batch: StepBatch) -> float:
        """Return the predicted seconds of a step with this batch."""
        self._fit()
        return float(self._coefficients @ _features(batch))

    def observe(self, batch: StepBatch, seconds: float) -> None:
        """Learn from the duration of a step."""
        self.num_steps += 1
        self.largest_rows = max(self.largest_rows, batch.rows)
        self._largest_tokens = max(self._largest_tokens, batch.tokens)
        features = _features(batch)
        if self.num_steps < MIN_STEPS:
            self._first.append((features, seconds))
            return
        if self._first:
            self._begin()
        predicted_s = float(self._coefficients @ features)
        error_s = seconds - predicted_s
        self._add(features, seconds, self._weight(error_s))
        self._rescale(error_s, least_s=_LEAST_SCALE * predicted_s)
        self._num_unfitted += 1
        if self._num_unfitted >= _STEPS_PER_FIT:
            self._fit()

    def _begin(self) -> None:
        """Fit the first steps, with outliers judged by the median."""
        middle_s = median(seconds for _, seconds in self._first)
        spread_s = median(abs(seconds - middle_s) for _, seconds in self._first)
        self._scale_s = max(spread_s, 0.1 * middle_s)
        for features, seconds in self._first:
            self._add(features, seconds, self._weight(seconds - middle_s))
        self._first.clear()
        self._num_unfitted = MIN_STEPS
        self._fit()

    def _weight(self, error_s: float) -> float:
        bound_s = _HUBER * self._scale_s
        return 1.0 if abs(error_s) <= bound_s else bound_s / abs(error_s)

    def _rescale(self, error_s: float, *, least_s: float) -> None:
        # Bounded: an outlier changes little, and a lasting change widens the scale step by step.
        error_s = min(abs(error_s), _HUBER * self._scale_s)
        self._scale_s += (1 - _SCALE_FORGETTING) * (error_s - self._scale_s)
        self._scale_s = max(self._scale_s, least_s)

    def _add(self, features: Vector, seconds: float, weight: float) -> None:
        self._information *= _FORGETTING
        self._information += np.outer(weight * features, features)
        self._moments *= _FORGETTING
        self._moments += (weight * seconds) * features

    def _fit(self) -> None:
        """Solve for the coefficients; set a negative one to zero and fit the others again."""
        if self._num_unfitted == 0:
            return
        self._num_unfitted = 0
        information = self._information + _ANCHOR_MATRIX
        moments = self._moments + _ANCHOR * self._coefficients
        free = np.arange(_FEATURES)
        solution = np.linalg.solve(information, moments)
        while free.size > 1 and solution.min() < 0:
            free = np.delete(free, solution.argmin())
            solution = np.linalg.solve(information[np.ix_(free, free)], moments[free])
        self._coefficients = np.zeros(_FEATURES)
        self._coefficients[free] = np.maximum(solution, 0.0)
        if not self._is_known:
            # Beyond the largest step seen, the slope of its piece goes on.
            last = max(int(np.sum(self._largest_tokens > _LOW)), 1) - 1
            self._coefficients[-len(_LOW) + last :] = self._coefficients[-len(_LOW) + last]


def _features(batch: StepBatch) -> Vector:
    pieces = np.clip(batch.tokens - _LOW, 0.0, _WIDTH)
    return np.array([1.0, batch.rows, batch.read_tokens / 1000, *pieces])


def _coefficients(costs: StepCosts) -> Vector:
    """Return the coefficients that predict as `costs` do, as far as pieces of tokens allow."""
    seconds = [costs.matrix_time_s(tokens) for tokens in KNOTS]
    slopes = [
        max(high_s - low_s, 0.0) / (high - low)
        for (low, high), (low_s, high_s) in zip(pairwise(KNOTS), pairwise(seconds), strict=True)
    ]
    fixed_s = costs.launch_s + costs.host_base_s + seconds[0]
    row_s = costs.row_s + costs.host_row_s
    return np.array([fixed_s, row_s, 1000 * costs.attended_token_s, *slopes])
