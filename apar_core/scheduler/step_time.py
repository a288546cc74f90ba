"""Learns how long an engine step takes, from the steps that the engine makes.

Least squares with exponential forgetting on four features of a batch (recursive, in information
form), coefficients kept non-negative, single outliers (compilation, garbage collection) bounded by
Huber weights. Source of the features: TAPER (arXiv 2605.06914), which predicts a step's time from
its rows and their contexts.
"""

from __future__ import annotations
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
import numpy as np
import numpy.typing as npt


_MEAN_SHARE = 0.05
"""Weight of a step in the mean: that of about the last twenty."""


class StepClock:
    """Measures from output to output while rows run, else from the schedule to its output.

    From output to output a step has its whole cost, the engine's own work included; and where
    vLLM schedules a step ahead, the step before it is not counted twice.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.mean_s = 0.0
        # Since the start: steps, the rows that got a token in them, and the time they took.
        self.num_steps = 0
        self.num_rows = 0
        self.busy_s = 0.0
        self._clock = clock
        self._begun: deque[tuple[object, BatchView, float]] = deque()
        self._last_end_s: float | None = None

    def begin(self, step: object, batch: BatchView) -> None:
        """A step with this batch has been scheduled."""
        self._begun.append((step, batch, self._clock()))

    def end(self, step: object, *, still_busy: bool) -> tuple[BatchView, float] | None:
        """The batch and the seconds of a step whose output has come; None if it was not begun.

        `still_busy` tells whether rows run on, so that the next step begins at once.
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


Vector = npt.NDArray[np.float64]

MIN_STEPS = 32
"""Steps before the first prediction: as many as tell an outlier from the rest."""
FORGETTING = 0.998
"""Weight of a step against the next one: a memory of about 500 steps."""
HUBER = 3.0
"""Errors beyond this many times the usual one count as much as one of that size."""
_SCALE_FORGETTING = 0.98
# Least error that is called usual, as a share of the step: timers and tasks are never exact.
_LEAST_SCALE = 0.01
# Strength with which a coefficient stays where it was, in squared units of its feature. What
# nothing tells apart goes to the first one, a step's fixed time: the model errs towards admitting,
# and learns from what follows.
_ANCHOR = np.array([1e-9, 0.5, 0.005, 0.5])
_ANCHOR_MATRIX = np.diag(_ANCHOR)
# Coefficients change little from step to step, and fitting them is most of the cost of one.
_STEPS_PER_FIT = 8


@dataclass(frozen=True, slots=True)
class BatchView:
    """What one engine step computes.

    `rows` are the sequences that get a token, `attended_tokens` the tokens of KV cache that all
    rows together read, `prefill_tokens` the tokens computed beyond one a row.
    """

    rows: int
    attended_tokens: int
    prefill_tokens: int = 0

    def grown(self, *, rows: int, attended_tokens: int) -> BatchView:
        """The batch with more rows that decode."""
        return BatchView(
            self.rows + rows, self.attended_tokens + attended_tokens, self.prefill_tokens
        )


@dataclass(frozen=True, slots=True)
class StepTimeCoefficients:
    """What a step's time is made of, in seconds."""

    fixed_s: float
    row_s: float
    attended_kilotoken_s: float
    prefill_token_s: float


class StepTimeModel:
    """Predicts the seconds of a step; knows nothing until it has seen `MIN_STEPS` steps."""

    def __init__(self, *, forgetting: float = FORGETTING) -> None:
        self.num_steps = 0
        self.largest_rows = 0
        self._forgetting = forgetting
        self._information = np.zeros((4, 4))
        self._moments = np.zeros(4)
        self._coefficients = np.zeros(4)
        self._scale_s = 0.0
        self._first: list[tuple[Vector, float]] = []
        self._num_unfitted = 0

    @property
    def is_ready(self) -> bool:
        """Whether enough steps have been seen to predict one."""
        return self.num_steps >= MIN_STEPS

    @property
    def coefficients(self) -> StepTimeCoefficients:
        """The coefficients as they are now; zero until the model is ready."""
        self._fit()
        return StepTimeCoefficients(*self._coefficients.tolist())

    @property
    def usual_error_s(self) -> float:
        """By how much the last steps missed their prediction, outliers bounded."""
        return self._scale_s

    def predict_s(self, batch: BatchView) -> float:
        """Seconds that a step with this batch will take."""
        self._fit()
        return float(self._coefficients @ _features(batch))

    def observe(self, batch: BatchView, seconds: float) -> None:
        """Learn from a step that took so long."""
        self.num_steps += 1
        self.largest_rows = max(self.largest_rows, batch.rows)
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
        """Fit the first steps, among which nothing but their median tells an outlier."""
        middle_s = median(seconds for _, seconds in self._first)
        spread_s = median(abs(seconds - middle_s) for _, seconds in self._first)
        self._scale_s = max(spread_s, 0.1 * middle_s)
        for features, seconds in self._first:
            self._add(features, seconds, self._weight(seconds - middle_s))
        self._first.clear()
        self._num_unfitted = MIN_STEPS
        self._fit()

    def _weight(self, error_s: float) -> float:
        bound_s = HUBER * self._scale_s
        return 1.0 if abs(error_s) <= bound_s else bound_s / abs(error_s)

    def _rescale(self, error_s: float, *, least_s: float) -> None:
        # A bounded share of each error: a lasting change widens the scale, and so gets its weight.
        error_s = min(abs(error_s), HUBER * self._scale_s)
        self._scale_s += (1 - _SCALE_FORGETTING) * (error_s - self._scale_s)
        self._scale_s = max(self._scale_s, least_s)

    def _add(self, features: Vector, seconds: float, weight: float) -> None:
        self._information *= self._forgetting
        self._information += np.outer(weight * features, features)
        self._moments *= self._forgetting
        self._moments += (weight * seconds) * features

    def _fit(self) -> None:
        """The coefficients that fit best; a negative one becomes zero and the others fit anew."""
        if self._num_unfitted == 0:
            return
        self._num_unfitted = 0
        information = self._information + _ANCHOR_MATRIX
        moments = self._moments + _ANCHOR * self._coefficients
        free = np.arange(4)
        solution = np.linalg.solve(information, moments)
        while free.size > 1 and solution.min() < 0:
            free = np.delete(free, solution.argmin())
            solution = np.linalg.solve(information[np.ix_(free, free)], moments[free])
        self._coefficients = np.zeros(4)
        self._coefficients[free] = np.maximum(solution, 0.0)


def _features(batch: BatchView) -> Vector:
    return np.array([1.0, batch.rows, batch.attended_tokens / 1000, batch.prefill_tokens])
