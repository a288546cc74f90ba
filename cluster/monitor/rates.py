"""Increases and rates of counters, robust against restarts and missing readings."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from cluster.monitor.series import SeriesKey, Snapshot, Values, cumulative_names

_CUMULATIVE = cumulative_names()


def increase(before: Snapshot, after: Snapshot) -> dict[SeriesKey, float]:
    """Return the increase of each counter by Prometheus' rule, never negative.

    A smaller value means a restart from 0. A new series on a known page has counted from 0. On a
    new page, a series may be old, so its first value does not count. A vanished series adds
    nothing.
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
    """Increases between two snapshots."""

    end_s: float
    seconds: float
    gained: Values


@dataclass(frozen=True, slots=True)
class Window:
    """Sum of the last intervals; `seconds` is 0 before the second snapshot."""

    seconds: float
    gained: Values


class History:
    """The latest snapshot, and the increases in the last `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self.keep_s = keep_s
        self.latest: Snapshot | None = None
        self._intervals: deque[Interval] = deque()

    def add(self, snapshot: Snapshot) -> Interval | None:
        """Add a snapshot; return the interval that it ends, or None for the first.

        Counters of a page that does not answer are kept, so its next answer includes the missing
        increase. Its gauges are dropped, because their values are unknown.
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
        """Sum the intervals that ended within the last `seconds`, at least the last one."""
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
"""A process is idle after this many of its report intervals without a report."""

Process = tuple[str, str]
"""Metrics page and replica of a process; without a replica, the gateways of the page."""


@dataclass(frozen=True, slots=True)
class Report:
    """Increases of a process' counters, found by a reading."""

    at_s: float
    gained: Mapping[SeriesKey, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rate of each counter per second, without zeros; `seconds` is the longest averaging time.

    Rates are `known` once a process has reported twice, or if none has reported for long.
    """

    per_s: Values
    seconds: float
    known: bool

    def of(self, per_s: float) -> float | None:
        """Return a rate or a sum of rates; None if rates are not known yet."""
        return per_s if self.known else None


class Reports:
    """Reports of each process, and the increases of its counters with each.

    Engines report once a second, or between two steps if those take longer; Prometheus changes only
    with its scrapes. Over shorter times, a rate alternates between 0 and several times its true
    value. Rates are therefore taken between reports, over as
    many as fit into `span_s`. A process without change for `quiet_s` is idle.
    """

    def __init__(self, span_s: float, quiet_s: float) -> None:
        self._span_s = span_s
        self._quiet_s = quiet_s
        self._since_s: float | None = None
        self._now_s = 0.0
        self._processes: set[Process] = set()
        self._runs: dict[Process, deque[Report]] = {}

    def add(self, at_s: float, gained: Values) -> None:
        """Add the increases since the previous reading, which are empty for the first."""
        self._since_s = at_s if self._since_s is None else self._since_s
        self._now_s = at_s
        self._runs = {
            process: run
            for process, run in self._runs.items()
            if at_s - run[-1].at_s <= self._quiet_s
        }
        changed: dict[Process, dict[SeriesKey, float]] = defaultdict(dict)
        for key, amount in gained.items():
            process = (key.page, key.label("replica"))
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
        """Whether every process has reported twice, or has had the time to."""
        seen = {process for process, run in self._runs.items() if len(run) > 1}
        return self._waited() or (bool(seen) and seen >= self._processes)

    def rates(self) -> Rates:
        """Return the rates as of the last reading."""
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
        """Return a time span in seconds, and the reports within it."""
        first, *later = run
        if not later:
            # Counted since an unknown time; without a report for `quiet_s`, take that as the span.
            return (self._quiet_s, [first]) if self._waited() else (0.0, [])
        longest_s = max(after.at_s - before.at_s for before, after in pairwise(run))
        if self._now_s - run[-1].at_s > _LATE * longest_s:
            return 0.0, []
        return run[-1].at_s - first.at_s, later

    def _waited(self) -> bool:
        return self._since_s is not None and self._now_s - self._since_s >= self._quiet_s
