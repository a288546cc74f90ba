"""Periodic samples of a run, and their steady-state means.

Source: APAR (arXiv 2401.06761), appendix C.2: samples every 3 seconds; the first third of them and
those without a pending request are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WARM_UP_SHARE = 1 / 3
LEAST_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Means over one interval.

    at_s: end of the interval, since the start. tokens_per_s: generated text tokens per second.
    kv_tokens: token capacity of held blocks. rows: sequences per step.
    has_pending: whether a request was waiting at the end of the interval.
    running: requests that had started and not ended then; None if not counted.
    """

    at_s: float
    tokens_per_s: float
    kv_tokens: float
    rows: float
    has_pending: bool
    running: int | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, and the 25th and 75th percentiles."""

    mean: float
    p25: float
    p75: float


def steady(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples without warm-up and end; none if fewer than `LEAST_SAMPLES` are left."""
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
    """Sums up steps into samples of at least `interval_s` seconds."""

    def __init__(
        self,
        interval_s: float,
        now_s: Callable[[], float],
        has_pending: Callable[[], bool],
        num_running: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.samples: list[Sample] = []
        self._has_pending = has_pending
        self._num_running = num_running
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
        """Return one sample of all steps so far, including the open interval; needs a step."""
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
            running=self._num_running(),
        )
