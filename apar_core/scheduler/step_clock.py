"""How long the steps of an engine take, as those see it who wait for its tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from apar_core.scheduler.step_time_model import BatchView

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
