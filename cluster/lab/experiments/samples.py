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
        # Steps and sums of tokens, KV tokens and rows: of the run, and before the open interval.
        self._sums = self._opened = (0, 0, 0, 0)

    def add_step(self, *, tokens: int, kv_tokens: int, rows: int) -> None:
        """Count a step that has just ended."""
        steps, *sums = self._sums
        self._sums = (steps + 1, sums[0] + tokens, sums[1] + kv_tokens, sums[2] + rows)
        now_s = self._now_s()
        if now_s - self._opened_s >= self._interval_s:
            self.samples.append(self._sample(self._opened, self._opened_s, now_s))
            self._opened_s, self._opened = now_s, self._sums

    def whole(self) -> Sample:
        """Return one sample of all steps so far, including the open interval; needs a step."""
        return self._sample((0, 0, 0, 0), self._start_s, self._now_s())

    def _sample(self, before: tuple[int, ...], since_s: float, now_s: float) -> Sample:
        steps, tokens, kv_tokens, rows = (
            after - start for after, start in zip(self._sums, before, strict=True)
        )
        return Sample(
            at_s=now_s - self._start_s,
            tokens_per_s=tokens / (now_s - since_s),
            kv_tokens=kv_tokens / steps,
            rows=rows / steps,
            has_pending=self._has_pending(),
            running=self._num_running(),
        )
