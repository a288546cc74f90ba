"""What counters have gained between two moments, through restarts and through losses."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

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


_LATE = 3
"""Times its own pause between reports after which a process is taken to stand still."""

Process = tuple[str, str]
"""The page that a process' counters stand on, and its Ray worker id there."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a process' counters had gained when a reading found them changed."""

    at_s: float
    gained: Mapping[SeriesKey, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """What each counter gains a second, none for 0; `seconds` is the longest time it is taken over.

    Nothing is known before a process has been seen to report twice, or nobody reports for long.
    """

    per_s: Values
    seconds: float
    known: bool

    def of(self, per_s: float) -> float | None:
        """A rate, or a sum of some; None where nothing is known."""
        return per_s if self.known else None


class Reports:
    """When each process was seen to report, and what its counters had gained by then.

    A page changes with the reports of its processes, every 5 s on a private cluster and 10 s on
    another; a Prometheus with its scrapes. Over fewer seconds than that, a rate is now 0 and now
    several times too high, so rates are taken between moments at which something changed: between
    as many as fill `span_s`. A process that does not change for `quiet_s` stands still.
    """

    def __init__(self, span_s: float, quiet_s: float) -> None:
        self._span_s = span_s
        self._quiet_s = quiet_s
        self._since_s: float | None = None
        self._now_s = 0.0
        self._processes: set[Process] = set()
        self._runs: dict[Process, deque[Report]] = {}

    def add(self, at_s: float, gained: Values) -> None:
        """Take what was gained between the reading before and this one; nothing with the first."""
        self._since_s = at_s if self._since_s is None else self._since_s
        self._now_s = at_s
        self._runs = {
            process: run
            for process, run in self._runs.items()
            if at_s - run[-1].at_s <= self._quiet_s
        }
        changed: dict[Process, dict[SeriesKey, float]] = defaultdict(dict)
        for key, amount in gained.items():
            process = (key.page, key.label("WorkerId"))
            self._processes.add(process)
            if amount > 0:
                changed[process][key] = amount
        for process, amounts in changed.items():
            run = self._runs.setdefault(process, deque())
            run.append(Report(at_s, amounts))
            while len(run) > 2 and at_s - run[1].at_s >= self._span_s:
                run.popleft()

    @property
    def settled(self) -> bool:
        """Whether every process has been seen to report twice, or all have had the time to."""
        seen = {process for process, run in self._runs.items() if len(run) > 1}
        return self._waited() or (bool(seen) and seen >= self._processes)

    def rates(self) -> Rates:
        """As of the last reading."""
        per_s: dict[SeriesKey, float] = defaultdict(float)
        longest_s = 0.0
        for run in self._runs.values():
            seconds, reports = self._span(run)
            longest_s = max(longest_s, seconds)
            for report in reports:
                for key, amount in report.gained.items():
                    per_s[key] += amount / seconds
        known = self._waited() or any(len(run) > 1 for run in self._runs.values())
        return Rates(dict(per_s), longest_s, known)

    def _span(self, run: deque[Report]) -> tuple[float, list[Report]]:
        """So many seconds, and the reports whose gains fell into them."""
        first, *later = run
        if not later:
            # Counted since an unknown moment, which was no report for `quiet_s` if we looked.
            return (self._quiet_s, [first]) if self._waited() else (0.0, [])
        longest_s = max(after.at_s - before.at_s for before, after in pairwise(run))
        if self._now_s - run[-1].at_s > _LATE * longest_s:
            return 0.0, []
        return run[-1].at_s - first.at_s, later

    def _waited(self) -> bool:
        return self._since_s is not None and self._now_s - self._since_s >= self._quiet_s
