"""Arrival times of a load test's requests: a closed loop, a rate or recorded times."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from apar_core.errors import EvaluationError


class OpenLoop(Protocol):
    """Open loop: arrival times do not depend on earlier requests."""

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return sorted arrival times in seconds from the start; equal seeds give equal times."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Closed loop: a request arrives when another has ended."""

    concurrency: int


Arrivals = OpenLoop | ClosedLoop


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """All requests arrive at the start, as in the paper's tests."""

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return zeros."""
        return [0.0] * number


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gamma-distributed gaps with `rate` requests per second on average.

    `cv` is the standard deviation of the gaps over their mean: 1 is a Poisson process, larger
    values are bursts.
    """

    rate: float
    cv: float = 1.0

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return the cumulative sums of random gaps."""
        shape = self.cv**-2
        gaps = np.random.default_rng(seed).gamma(shape, 1 / (shape * self.rate), number)
        return [float(time_s) for time_s in np.cumsum(gaps)]


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """Recorded gaps in seconds, scaled to `rate` requests per second unless that is None."""

    gaps_s: tuple[float, ...]
    rate: float | None

    def times_s(self, number: int, seed: int) -> list[float]:
        """Return the cumulative sums of the gaps from a random one on, cyclically.

        The gaps are scaled so that these requests have the mean rate; bursts stay.
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


AZURE_COLUMN = "TIMESTAMP"
"""Column of the AzureLLMInferenceTrace tables in AzurePublicDataset."""


def read_timestamps(path: Path) -> list[float]:
    """Return the recorded times in seconds, in the order of the file.

    The file is a CSV table with a column TIMESTAMP (ISO 8601, UTC by default), or has one number of
    seconds per line. Raises EvaluationError with the number of an invalid line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.reader(lines)
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EvaluationError(f"{path} cannot be read: {error}") from error
    if rows and AZURE_COLUMN in rows[0][1]:
        column = rows[0][1].index(AZURE_COLUMN)
        return [_moment_s(path, number, row, column) for number, row in rows[1:]]
    return [_seconds(path, number, row) for number, row in rows]


def _moment_s(path: Path, number: int, row: list[str], column: int) -> float:
    try:
        # Azure writes seven digits of a second; datetime ignores the last.
        moment = datetime.fromisoformat(row[column])
    except (ValueError, IndexError) as error:
        raise EvaluationError(f"{path}, row {number}: no {AZURE_COLUMN}: {row}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _seconds(path: Path, number: int, row: list[str]) -> float:
    try:
        (text,) = row
        seconds = float(text)
        if not math.isfinite(seconds):
            raise ValueError(text)
        return seconds
    except ValueError as error:
        raise EvaluationError(
            f"{path}, row {number}: neither seconds nor a table with {AZURE_COLUMN}: {row}"
        ) from error
