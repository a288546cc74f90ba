"""Ray's metrics as the instruments that numbers are handed to."""

from ray.util import metrics

from deployments.metrics.families import Hand


class RayInstruments:
    """Instruments of the Ray process that this is.

    `Metric._record` instead of its public callers, because `Counter.inc` refuses 0: a count that
    first appears as 1 never rises in the eyes of Prometheus.
    """

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """A counter; Ray's agent writes `_total` behind its name where that is missing."""
        return metrics.Counter(name, text, labels)._record

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """A gauge."""
        return metrics.Gauge(name, text, labels)._record


class NoInstruments:
    """Instruments that take everything and tell nobody."""

    def counter(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Nothing to tell."""
        return _unheard

    def gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Hand:
        """Nothing to tell."""
        return _unheard


def _unheard(value: float, labels: dict[str, str]) -> None:
    """Nobody wants to know."""
