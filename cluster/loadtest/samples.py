"""Throughput in samples of equal length, without warm-up and cool-down, as in the paper.

Source: APAR (arXiv 2401.06761), appendix C.2: a sample every 3 seconds; the last ones, when no
request is pending, and the first third are left out; then mean, 25th and 75th percentile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.loadtest.records import RequestRecord

SAMPLE_S = 3.0
LEAST_SAMPLES = 3
"""Fewer say nothing of a steady state: the run was too short, or the server took all at once."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens per second of each sample of a run; those from `first` up to `end` are kept."""

    seconds: float
    tokens_per_s: tuple[float, ...]
    first: int
    end: int

    @property
    def kept(self) -> tuple[float, ...]:
        """The samples between warm-up and cool-down; none where there are too few."""
        found = self.tokens_per_s[self.first : self.end]
        return found if len(found) >= LEAST_SAMPLES else ()


@dataclass(frozen=True, slots=True)
class Spread:
    """What the paper's figure 5a shows of a setting."""

    mean: float
    p25: float
    p75: float
    num_samples: int


def sampled(records: Sequence[RequestRecord], seconds: float = SAMPLE_S) -> Samples:
    """Return the text tokens per second that came in each sample, of answers that came whole.

    A request is pending until the first piece of its answer has come (or it has ended): it waits
    to be sent, for a place in the server, or for its prompt. Samples that begin when nothing is
    pending any more are left out, and the first third of the others.
    """
    last_s = max((record.finished_s for record in records), default=0.0)
    number = int(last_s / seconds)
    tokens = np.zeros(number)
    for record in filter(_is_whole, records):
        for time_s, amount in record.tokens_by_piece():
            place = int(time_s / seconds)
            if place < number:
                tokens[place] += amount
    end = steady_end(records, seconds, number)
    return Samples(seconds, tuple(float(each) for each in tokens / seconds), -(-end // 3), end)


def _is_whole(record: RequestRecord) -> bool:
    return record.error is None


def steady_end(records: Sequence[RequestRecord], seconds: float, number: int) -> int:
    """Return how many of the samples begin while a request is pending."""
    begun = (record.finished_s if (s := record.first_s) is None else s for record in records)
    return min(number, -int(-max(begun, default=0.0) // seconds))


def spread(samples: Samples) -> Spread | None:
    """Return mean and quartiles of the kept samples; None if there is none."""
    if not samples.kept:
        return None
    p25, p75 = np.percentile(samples.kept, (25, 75))
    return Spread(float(np.mean(samples.kept)), float(p25), float(p75), len(samples.kept))
