"""One metric with all its label values, kept as plain numbers until they are handed over."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of their names."""

Hand = Callable[[float, dict[str, str]], None]
"""Takes a number and its labels: a counter's increase, or a gauge's value."""


class Instruments(Protocol):
    """Makes what numbers are handed to."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Something that adds up."""

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Something that keeps the last value."""


class Counter:
    """Counts up. A count that has been named is handed over from the start, as 0."""

    def __init__(
        self, instruments: Instruments, name: str, text: str, labels: tuple[str, ...]
    ) -> None:
        self._labels = labels
        self._hand = instruments.counter(name, text, labels)
        self._totals: dict[Labels, float] = {}
        self._handed: dict[Labels, float] = {}

    def inc(self, labels: Labels, amount: float = 1.0) -> None:
        """Add to a count."""
        self._totals[labels] = self._totals.get(labels, 0.0) + amount

    def set_total(self, labels: Labels, total: float) -> None:
        """Take a count that is kept elsewhere; it never falls."""
        self._totals[labels] = max(total, self._totals.get(labels, 0.0))

    def flush(self) -> None:
        """Hand over what has been added."""
        for labels, total in self._totals.items():
            handed = self._handed.get(labels)
            if handed is None or total > handed:
                self._handed[labels] = total
                self._hand(total - (handed or 0.0), dict(zip(self._labels, labels, strict=True)))


class Gauge:
    """Has a value now. Ray drops one that is not handed over again for a while."""

    def __init__(
        self, instruments: Instruments, name: str, text: str, labels: tuple[str, ...]
    ) -> None:
        self._labels = labels
        self._hand = instruments.gauge(name, text, labels)
        self._values: dict[Labels, float] = {}

    def set(self, labels: Labels, value: float) -> None:
        """Take the value of now."""
        self._values[labels] = value

    def clear(self) -> None:
        """Forget all values: what is not set again is told no more."""
        self._values.clear()

    def flush(self) -> None:
        """Hand all values over."""
        for labels, value in self._values.items():
            self._hand(value, dict(zip(self._labels, labels, strict=True)))


class Histogram:
    """Observations by upper bounds, handed over as the gauges `_bucket`, `_sum` and `_count`.

    Ray's own histograms would lose the observed values: its agent puts each in the middle of its
    bucket, so that their sum is wrong, and takes a call for each. As gauges, the very numbers
    arrive that a Prometheus client would tell.
    """

    def __init__(
        self,
        instruments: Instruments,
        name: str,
        text: str,
        labels: tuple[str, ...],
        buckets: Sequence[float],
    ) -> None:
        self._labels = labels
        self._bounds = tuple(buckets)
        self._names = (*(_bound_name(bound) for bound in self._bounds), "+Inf")
        self._bucket = instruments.gauge(f"{name}_bucket", text, (*labels, "le"))
        self._sum = instruments.gauge(f"{name}_sum", text, labels)
        self._count = instruments.gauge(f"{name}_count", text, labels)
        # Observations by bucket, each in one; and the sum of their values.
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def declare(self, labels: Labels) -> list[int]:
        """Tell of these labels from now on, of no observation at first."""
        self._sums.setdefault(labels, 0.0)
        return self._counts.setdefault(labels, [0] * len(self._names))

    def observe(self, labels: Labels, value: float) -> None:
        """Count an observation."""
        counts = self._counts.get(labels) or self.declare(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def flush(self) -> None:
        """Hand the counts over, each bucket with those below it."""
        for labels, counts in self._counts.items():
            tags = dict(zip(self._labels, labels, strict=True))
            so_far = 0
            for name, count in zip(self._names, counts, strict=True):
                so_far += count
                self._bucket(so_far, {**tags, "le": name})
            self._sum(self._sums[labels], tags)
            self._count(so_far, tags)


def _bound_name(bound: float) -> str:
    """As Prometheus' clients write it."""
    return repr(float(bound))
