"""How fast a queue moves, and so when it pays to try again."""

from collections import deque
from collections.abc import Callable

_NUM_EVENTS = 64
_DEFAULT_S = 1.0
_MAX_S = 60.0


class DrainRate:
    """The rate of the last requests that ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_NUM_EVENTS)

    def note(self) -> None:
        """A request has ended now."""
        self._ends.append(self._clock())

    def time_for(self, num_requests: int) -> float:
        """Seconds in which so many requests will end, from 1 to 60; 1 while nothing is known."""
        if len(self._ends) < 2:
            return _DEFAULT_S
        # Up to now, not to the last end: a queue that has stopped must not look fast.
        span_s = self._clock() - self._ends[0]
        return min(max(span_s / (len(self._ends) - 1) * num_requests, _DEFAULT_S), _MAX_S)
