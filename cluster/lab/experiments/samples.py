"""Figures of a run that is under way, taken every few seconds, and what they come to.

Source: APAR (arXiv 2401.06761), appendix C.2: samples every 3 seconds; the first third of them and
those with no request pending are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WARM_UP_SHARE = 1 / 3
LEAST_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Means over one interval; `has_pending` tells whether a request waited at its end.

    `tokens_per_s` counts generated tokens of the text; `kv_tokens` is what held blocks have room
    for; `rows` are the sequences of a step.
    """

    at_s: float
    tokens_per_s: float
    kv_tokens: float
    rows: float
    has_pending: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, and the 25th and 75th percentiles."""

    mean: float
    p25: float
    p75: float


def steady(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples without warm-up and end; none where fewer than `LEAST_SAMPLES` are left,
    which say nothing.
    """
    warm = samples[round(WARM_UP_SHARE * len(samples)) :]
    kept = [sample for sample in warm if sample.has_pending]
    return kept if len(kept) >= LEAST_SAMPLES else []


def spread(values: Sequence[float]) -> Spread:
    """Return mean and percentiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(statistics.fmean(values), lower, upper)


@dataclass(slots=True)
class _Sums:
    steps: int = 0
    tokens: int = 0
    kv_tokens: int = 0
    rows: int = 0

    def add(self, tokens: int, kv_tokens: int, rows: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.kv_tokens += kv_tokens
        self.rows += rows


class Sampler:
    """Adds up steps and closes an interval when it has lasted `interval_s`.

    `whole` is everything so far as one sample.
    """

    def __init__(
        self, interval_s: float, now_s: Callable[[], float], has_pending: Callable[[], bool]
    ) -> None:
        self.samples: list[Sample] = []
        self._has_pending = has_pending
        self._interval_s = interval_s
        self._now_s = now_s
        self._start_s = self._opened_s = now_s()
        self._open = _Sums()
        self._all = _Sums()

    def add_step(self, *, tokens: int, kv_tokens: int, rows: int) -> None:
        """Count a step that has just ended."""
        for sums in (self._open, self._all):
            sums.add(tokens, kv_tokens, rows)
        now_s = self._now_s()
        if now_s - self._opened_s >= self._interval_s:
            self._close(now_s)

    def whole(self) -> Sample:
        """All steps, also those of the interval that is still open; at least one."""
        return self._sample(self._all, self._start_s, self._now_s())

    def _close(self, now_s: float) -> None:
        self.samples.append(self._sample(self._open, self._opened_s, now_s))
        self._opened_s = now_s
        self._open = _Sums()

    def _sample(self, sums: _Sums, since_s: float, now_s: float) -> Sample:
        return Sample(
            at_s=now_s - self._start_s,
            tokens_per_s=sums.tokens / (now_s - since_s),
            kv_tokens=sums.kv_tokens / sums.steps,
            rows=sums.rows / sums.steps,
            has_pending=self._has_pending(),
        )
