"""What counters have gained between two moments, through restarts and through losses."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from cluster.monitor.series import SeriesKey, Snapshot, Values, cumulative_names

_CUMULATIVE = cumulative_names()


def increase(before: Snapshot, after: Snapshot) -> dict[SeriesKey, float]:
    """How much each counter has grown, by Prometheus' rule; never negative.

    A smaller value means a restart from 0. A series that is new on a page that answered before has
    counted from 0; one on a page that is new to us may be old, and is only remembered. One that
    has gone adds nothing.
    """
    gained: dict[SeriesKey, float] = {}
    for key, value in after.values.items():
        if key.name not in _CUMULATIVE:
            continue
        earlier = before.values.get(key)
        if earlier is None:
            earlier = 0.0 if key.page in before.pages else value
        gained[key] = value - earlier if value >= earlier else value
    return gained


@dataclass(frozen=True, slots=True)
class Interval:
    """What has been gained between two snapshots, in so many seconds."""

    end_s: float
    seconds: float
    gained: Values


@dataclass(frozen=True, slots=True)
class Window:
    """The last intervals together; `seconds` is 0 before there are two snapshots."""

    seconds: float
    gained: Values


class History:
    """The latest snapshot, and what has been gained over the last `keep_s` seconds before it."""

    def __init__(self, keep_s: float) -> None:
        self.keep_s = keep_s
        self.latest: Snapshot | None = None
        self._intervals: deque[Interval] = deque()

    def add(self, snapshot: Snapshot) -> Interval | None:
        """Take the next snapshot; the interval that it ends, or None for the first.

        Of a page that does not answer the counters stay known, so that what it counts meanwhile is
        gained when it answers again. Its gauges go: nobody knows how they are.
        """
        if self.latest is None:
            self.latest = snapshot
            return None
        interval = Interval(
            snapshot.at_s, snapshot.at_s - self.latest.at_s, increase(self.latest, snapshot)
        )
        self._intervals.append(interval)
        while self._intervals and self._intervals[0].end_s <= snapshot.at_s - self.keep_s:
            self._intervals.popleft()
        silent = self.latest.pages & snapshot.failures.keys()
        kept = {
            key: value
            for key, value in self.latest.values.items()
            if key.page in silent and key.name in _CUMULATIVE
        }
        self.latest = Snapshot(
            snapshot.at_s,
            {**kept, **snapshot.values},
            snapshot.pages | silent,
            snapshot.failures,
        )
        return interval

    def window(self, seconds: float) -> Window:
        """The intervals that ended within the last `seconds`, the last one at least."""
        gained: dict[SeriesKey, float] = defaultdict(float)
        length_s = 0.0
        for interval in reversed(self._intervals):
            assert self.latest is not None
            if length_s > 0 and interval.end_s <= self.latest.at_s - seconds:
                break
            length_s += interval.seconds
            for key, amount in interval.gained.items():
                gained[key] += amount
        return Window(length_s, dict(gained))
