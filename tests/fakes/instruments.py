"""Instruments that keep the numbers they receive, as Ray's agent would export them."""

from deployments.metrics.recorder import Emit

Series = tuple[str, tuple[tuple[str, str], ...]]


class FakeInstruments:
    """Counters add up, gauges keep the last value; `num_calls` counts the calls."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}
        self.num_calls = 0

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Make a counter that refuses to decrease."""
        assert text

        def add(amount: float, tags: dict[str, str]) -> None:
            assert amount >= 0
            assert tuple(tags) == labels
            series = self._series(name, tags)
            self.values[series] = self.values.get(series, 0.0) + amount
            self.num_calls += 1

        return add

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Emit:
        """Make a gauge."""

        def take(value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == labels
            self.values[self._series(name, tags)] = value
            self.num_calls += 1

        return take

    def value(self, name: str, **labels: str) -> float | None:
        """Return the number exported under this name and these labels."""
        return self.values.get(self._series(name, labels))

    @staticmethod
    def _series(name: str, labels: dict[str, str]) -> Series:
        return name, tuple(sorted(labels.items()))
