"""Instruments that keep what they are handed, as Ray's agent would tell it."""

from deployments.metrics.recorder import Hand

Series = tuple[str, tuple[tuple[str, str], ...]]


class PlayedInstruments:
    """Counters add up, gauges keep the last value; `told` counts the calls."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}
        self.told = 0

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """A counter that refuses to fall."""
        assert text

        def add(amount: float, tags: dict[str, str]) -> None:
            assert amount >= 0
            assert tuple(tags) == labels
            series = self._series(name, tags)
            self.values[series] = self.values.get(series, 0.0) + amount
            self.told += 1

        return add

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """A gauge."""

        def take(value: float, tags: dict[str, str]) -> None:
            assert tuple(tags) == labels
            self.values[self._series(name, tags)] = value
            self.told += 1

        return take

    def value(self, name: str, **labels: str) -> float | None:
        """What has been handed over under this name and these labels."""
        return self.values.get(self._series(name, labels))

    @staticmethod
    def _series(name: str, labels: dict[str, str]) -> Series:
        return name, tuple(sorted(labels.items()))
