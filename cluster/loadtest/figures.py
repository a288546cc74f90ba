"""A figure of a run: how a repeat gives it, how sure it is, how it compares with another run's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.loadtest.records import RequestRecord
from cluster.loadtest.run_file import RepeatFacts, Run
from cluster.loadtest.slo import Objectives
from cluster.loadtest.statistics import (
    LEAST_REPEATS,
    Estimate,
    Statistic,
    mean,
    over_repeats,
    ratio_over_repeats,
    ratio_within_runs,
    within_run,
)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One repeat of a run."""

    facts: RepeatFacts
    records: Sequence[RequestRecord]
    sample_s: float
    slo: Objectives

    @property
    def whole(self) -> list[RequestRecord]:
        """The requests that ended well."""
        return [record for record in self.records if record.error is None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a repeat; None where it has none.

    `values` are those of which `of` is a `statistic`, where they are independent enough to be
    resampled. `scale` brings it to `unit`. `more_is_better` is None where neither is.
    """

    name: str
    title: str
    unit: str
    of: Callable[[Repeat], float | None]
    scale: float = 1.0
    more_is_better: bool | None = None
    values: Callable[[Repeat], Sequence[float]] | None = None
    statistic: Statistic = mean

    def each(self, run: Run) -> list[float]:
        """Return the figure of every repeat that has it."""
        found = (self.of(repeat) for repeat in repeats_of(run))
        return [value * self.scale for value in found if value is not None]

    def estimate(self, run: Run) -> Estimate | None:
        """Return the mean over three repeats or more, or what all requests say, with an interval.

        Two repeats say next to nothing of how much repeats differ: without `values` there is then
        no interval.
        """
        each = self.each(run)
        if not each:
            return None
        if len(each) >= LEAST_REPEATS or self.values is None:
            return over_repeats(each)
        return within_run(self._pooled(run), self.statistic)

    def ratio(self, run: Run, base: Run) -> Estimate | None:
        """Return how many times the figure of another run this run's is; None without both."""
        these, those = self.each(run), self.each(base)
        if not these or not those or min(*these, *those) <= 0:
            return None
        if min(len(these), len(those)) < LEAST_REPEATS and self.values is not None:
            return ratio_within_runs(self._pooled(run), self._pooled(base), self.statistic)
        return ratio_over_repeats(these, those)

    def _pooled(self, run: Run) -> list[float]:
        assert self.values is not None
        return [value * self.scale for each in repeats_of(run) for value in self.values(each)]


def repeats_of(run: Run) -> list[Repeat]:
    """Return the repeats that have a request."""
    settings = run.facts.settings
    found = [
        Repeat(facts, run.of_repeat(facts.repeat), settings.sample_s, settings.slo)
        for facts in run.facts.repeats
    ]
    return [repeat for repeat in found if repeat.records]
