"""When the requests of a load test are sent: in a closed loop, at a rate or at recorded times."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from apar_core.errors import EvaluationError
from apar_core.workload.timestamps import read_timestamps


class OpenLoop(Protocol):
    """Requests come at times of their own, whatever has become of the earlier ones."""

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return so many times in order, in seconds from the start; equal seeds give equal ones."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many requests run at any time: the next one comes when one has ended."""

    concurrency: int


Arrivals = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """All requests come at the start, as in the paper's tests."""

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return zeros."""
        return [0.0] * number


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gaps of a gamma distribution: `rate` requests a second on average.

    `cv` is the gaps' standard deviation over their mean: 1 is a Poisson process, more are bursts.
    """

    rate: float
    cv: float = 1.0

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return the ends of so many gaps in a row."""
        shape = self.cv**-2
        gaps = np.random.default_rng(seed).gamma(shape, 1 / (shape * self.rate), number)
        return [float(time_s) for time_s in np.cumsum(gaps)]


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """The gaps between recorded requests, in seconds; `rate` None keeps them as they are."""

    gaps_s: tuple[float, ...]
    rate: float | None

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return the ends of so many gaps from a random one on, round and round.

        They are stretched so that the mean rate of just these requests is `rate` a second: their
        bursts stay, relative to it.
        """
        size = len(self.gaps_s)
        start = random.Random(seed).randrange(size)
        gaps = [self.gaps_s[(start + index) % size] for index in range(number)]
        total_s = sum(gaps)
        scale = number / self.rate / total_s if self.rate is not None and total_s > 0 else 1.0
        return [float(time_s) * scale for time_s in np.cumsum(gaps)]


def read_arrivals(path: Path, rate: float | None) -> RecordedArrivals:
    """Return the gaps between the times recorded in a file, scaled to `rate` if it is given.

    Raises EvaluationError for a file without times, or without a gap between them.
    """
    times = sorted(read_timestamps(path))
    gaps = tuple(after - before for before, after in pairwise(times))
    if not any(gaps):
        raise EvaluationError(f"{path}: the {len(times)} recorded times have no gap between them")
    return RecordedArrivals(gaps, rate)
