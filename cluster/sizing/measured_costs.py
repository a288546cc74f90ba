"""Step times from the metrics of a running cluster: engine busy seconds by steps, and threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.metrics import catalogue
from cluster.monitor.rates import increase
from cluster.monitor.series import Snapshot, summed
from cluster.monitor.sources import PageError, Source
from cluster.sizing.errors import SizingError
from cluster.sizing.step_costs import StepCosts

_LEAST_STEPS = 20
_LEAST_POINTS = 4
# Below this the slope is the noise's.
_LEAST_SPREAD = 1.5


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Steps of one replica between two readings: their mean time, and threads running meanwhile."""

    threads: float
    seconds: float
    steps: float


def watch(
    source: Source, seconds: float, interval_s: float, pause: Callable[[float], None] = time.sleep
) -> list[Snapshot]:
    """Readings over so many seconds. Raises SizingError where one fails."""
    snapshots: list[Snapshot] = []
    try:
        for number in range(max(2, round(seconds / interval_s) + 1)):
            if number:
                pause(interval_s)
            snapshots.append(source.read())
    except PageError as error:
        raise SizingError(f"no step times from the cluster: {error}") from error
    return snapshots


def step_points(snapshots: Sequence[Snapshot]) -> list[StepPoint]:
    """What each replica did between each two readings, where it made steps enough."""
    by = ("model", "replica")
    points = []
    for before, after in pairwise(snapshots):
        gained = increase(before, after)
        steps = summed(gained, catalogue.ENGINE_STEPS, *by)
        busy = summed(gained, catalogue.ENGINE_BUSY_SECONDS, *by)
        running = [summed(each.values, catalogue.THREADS, *by, "state") for each in (before, after)]
        for replica, number in steps.items():
            threads = sum(each.get((*replica, "running"), 0.0) for each in running) / 2
            if number >= _LEAST_STEPS and threads > 0:
                points.append(StepPoint(threads, busy.get(replica, 0.0) / number, number))
    return points


def fit_costs(points: Sequence[StepPoint], base_s: float | None = None) -> StepCosts:
    """Base and cost per thread by least squares, each point with the weight of its steps.

    Reading the KV cache and prefilling are in them, at the lengths of what ran. A `base_s` is taken
    as it is. Raises SizingError where the load was too even, or there was none.
    """
    if not points:
        raise SizingError(
            "no step times from the cluster: its engines made next to no steps meanwhile; put "
            "load on it, or give --step-time-base and --step-time-per-thread"
        )
    weight = sum(each.steps for each in points)
    threads = sum(each.steps * each.threads for each in points) / weight
    seconds = sum(each.steps * each.seconds for each in points) / weight
    told = (
        f"measured: {weight:,.0f} steps of {1000 * seconds:.2f} ms with {threads:.0f} threads on "
        "average, reading the KV cache and prefilling included"
    )
    if base_s is not None:
        return StepCosts(
            base_s, max(seconds - base_s, 0.0) / threads, 0.0, 0.0, f"{told}; base given"
        )
    least, highest = min(e.threads for e in points), max(e.threads for e in points)
    if len(points) < _LEAST_POINTS or highest < _LEAST_SPREAD * least:
        raise SizingError(
            f"{len(points)} measurements with {least:.0f} to {highest:.0f} threads do not tell the "
            "time of a step from that of its threads: measure while the load changes, or give "
            "--step-time-base"
        )
    covariance = sum(e.steps * (e.threads - threads) * (e.seconds - seconds) for e in points)
    variance = sum(e.steps * (e.threads - threads) ** 2 for e in points)
    slope_s = min(max(covariance / variance, 0.0), seconds / threads)
    return StepCosts(seconds - slope_s * threads, slope_s, 0.0, 0.0, told)
