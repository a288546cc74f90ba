"""The time of one run where several take turns."""

from __future__ import annotations

import time
from collections.abc import Callable


class TurnClock:
    """Seconds without those for which it was paused."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._paused_s = 0.0
        self._paused_at_s: float | None = None

    def __call__(self) -> float:
        """Return the time, in seconds since any moment."""
        now_s = self._clock() if self._paused_at_s is None else self._paused_at_s
        return now_s - self._paused_s

    def pause(self) -> None:
        """Stand still until `resume`."""
        if self._paused_at_s is None:
            self._paused_at_s = self._clock()

    def resume(self) -> None:
        """Go on."""
        if self._paused_at_s is not None:
            self._paused_s += self._clock() - self._paused_at_s
            self._paused_at_s = None
