"""Recorded arrivals of a production service, rescaled to a rate."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ArrivalTrace:
    """Gaps between requests in seconds, and the prompt tokens of each, in the recorded order."""

    gaps_s: tuple[float, ...]
    prompt_tokens: tuple[int, ...]

    def arrivals(self, number: int, rate: float, start: int) -> list[tuple[float, int]]:
        """(time, prompt tokens) of so many requests from the `start`-th on, round and round.

        The gaps are stretched so that the mean rate of just these requests is `rate` a second:
        their bursts stay, relative to it.
        """
        size = len(self.gaps_s)
        gaps = [self.gaps_s[(start + index) % size] for index in range(number)]
        scale = number / rate / sum(gaps)
        now_s, arrivals = 0.0, []
        for index, gap in enumerate(gaps):
            now_s += gap * scale
            arrivals.append((now_s, self.prompt_tokens[(start + index) % size]))
        return arrivals


def read_arrivals(path: Path) -> ArrivalTrace:
    """Read Azure's table of TIMESTAMP and ContextTokens.

    Raises FileNotFoundError that names a missing file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no recorded arrivals at {path}: the simulation takes its load from there"
        )
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    # Seven digits of a second; datetime reads six.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    gaps = [max(0.0, after - before) for before, after in pairwise(times)]
    prompts = [max(1, int(row["ContextTokens"])) for row in rows[1:]]
    return ArrivalTrace(tuple(gaps), tuple(prompts))


def stepped_times(trace: ArrivalTrace, stages: list[tuple[float, float]], seed: int) -> list[float]:
    """Arrival times of stages (seconds, rate) that follow each other, each with its own gaps."""
    times: list[float] = []
    begin_s = 0.0
    chosen = random.Random(seed)
    for seconds, rate in stages:
        number = max(1, round(seconds * rate))
        start = chosen.randrange(len(trace.gaps_s))
        times.extend(begin_s + at_s for at_s, _ in trace.arrivals(number, rate, start))
        begin_s += seconds
    return times
