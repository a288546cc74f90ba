"""How long an engine step takes by the threads in it, and how slow each replica is beside it."""

import numpy as np
from numpy.typing import NDArray

# A step with so many threads takes twice as long as one with a single thread, until measured.
_PRIOR_DOUBLING_THREADS = 64.0
_PRIOR_STEP_S = 0.02
_PRIOR_VARIANCE = 4.0
_MEMORY = 0.998
_SLOWNESS_SHARE = 0.2
_SLOWNESS_BOUNDS = (0.05, 20.0)
_MIN_BASE_SHARE = 0.02
# A replica that does nothing cannot show that it is no longer slow: in so many seconds what was
# learnt of it loses half its weight.
_SLOWNESS_HALF_LIFE_S = 10.0


class StepTime:
    """`base_s` + `per_thread_s` * threads, times the slowness of the replica.

    The line is fitted to the reports of all replicas together, so that a replica that has seen
    only one load takes the slope from the others; a replica's slowness is its own.
    """

    def __init__(self, num_slots: int) -> None:
        self.slowness: NDArray[np.float64] = np.ones(num_slots)
        self._is_measured: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.base_s = _PRIOR_STEP_S
        self.per_thread_s = _PRIOR_STEP_S / _PRIOR_DOUBLING_THREADS
        self._weight = self._threads = self._step = self._square = self._product = 0.0

    def resize(self, num_slots: int) -> None:
        """Make room for more replicas."""
        added = num_slots - len(self.slowness)
        self.slowness = np.concatenate([self.slowness, np.ones(added)])
        self._is_measured = np.concatenate([self._is_measured, np.zeros(added, dtype=np.bool_)])

    def forget(self, slot: int) -> None:
        """Another replica takes the slot."""
        self.slowness[slot] = 1.0
        self._is_measured[slot] = False

    def measured(self, slot: int, threads: float, step_s: float) -> None:
        """Learn from one report: the mean step with so many threads in it took `step_s`."""
        if self._weight == 0.0:
            # The first report sets the scale; only what comes later can be slow beside it.
            self.slowness[slot] = 1.0
        self._is_measured[slot] = True
        scaled = step_s / float(self.slowness[slot])
        self._weight = self._weight * _MEMORY + 1.0
        self._threads = self._threads * _MEMORY + threads
        self._step = self._step * _MEMORY + scaled
        self._square = self._square * _MEMORY + threads * threads
        self._product = self._product * _MEMORY + threads * scaled
        self._fit()
        ratio = step_s / (self.base_s + self.per_thread_s * threads)
        slowness = float(self.slowness[slot]) + _SLOWNESS_SHARE * (ratio - self.slowness[slot])
        self.slowness[slot] = min(max(slowness, _SLOWNESS_BOUNDS[0]), _SLOWNESS_BOUNDS[1])

    def rested(self, slot: int, seconds: float) -> None:
        """Learn that a replica has run no step for so long.

        By and by it is taken for as fast as the fastest: one that was slow for a moment would
        otherwise get no request, and so stay slow for ever.
        """
        if not self._is_measured.any():
            return
        fastest = float(self.slowness[self._is_measured].min())
        kept = 0.5 ** (max(seconds, 0.0) / _SLOWNESS_HALF_LIFE_S)
        self.slowness[slot] = fastest * (float(self.slowness[slot]) / fastest) ** kept

    def _fit(self) -> None:
        mean_threads = self._threads / self._weight
        mean_step = self._step / self._weight
        variance = max(self._square / self._weight - mean_threads**2, 0.0)
        covariance = self._product / self._weight - mean_threads * mean_step
        prior = mean_step / (_PRIOR_DOUBLING_THREADS + mean_threads)
        slope = (covariance + _PRIOR_VARIANCE * prior) / (variance + _PRIOR_VARIANCE)
        most = (1.0 - _MIN_BASE_SHARE) * mean_step / max(mean_threads, 1.0)
        self.per_thread_s = min(max(slope, 0.0), most)
        self.base_s = mean_step - self.per_thread_s * mean_threads
