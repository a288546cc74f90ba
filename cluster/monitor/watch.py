"""Reads a cluster's metrics again and again, through outages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from apar_core.errors import AparError
from cluster.monitor.overview import ClusterHistory, Overview
from cluster.monitor.pages import PageError
from cluster.monitor.sources import Source

_HINT = (
    "`apar serve` prints the address of its metrics when it is ready, unless its configuration "
    "says `metrics: {enabled: false}`."
)


class MonitorError(AparError):
    """There is nothing to show; the message says what may be the reason."""


@dataclass(slots=True)
class Watch:
    """The history of one source, and since when it has given no answer."""

    source: Source
    history: ClusterHistory
    silent_since: float | None = None
    reason: str = ""
    _answered: float = field(default_factory=time.time)

    def read(self) -> None:
        """Take the next reading; a source that has answered before may fail.

        Raises MonitorError when the first reading brings nothing.
        """
        first = self.history.history.latest is None
        try:
            snapshot = self.source.read()
            if not snapshot.values and first:
                raise PageError(
                    f"{', '.join(sorted(snapshot.pages)) or 'Prometheus'}: a metrics page, but "
                    "none of this cluster: its metrics are switched off, no replica has started "
                    "yet, or the page is another program's"
                )
        except PageError as error:
            if first:
                raise MonitorError(f"{error}. {_HINT}") from error
            self.silent_since = self.silent_since or self._answered
            self.reason = str(error)
            return
        self.history.add(snapshot)
        self.silent_since, self._answered = None, time.time()

    def overview(self) -> Overview:
        """The last figures there were."""
        return self.history.overview()

    @property
    def silence(self) -> str | None:
        """Since when nothing has answered, in words."""
        if self.silent_since is None:
            return None
        clock = time.strftime("%H:%M:%S", time.localtime(self.silent_since))
        gone_s = time.time() - self.silent_since
        return f"no answer since {clock} ({gone_s:.0f} s): {self.reason}"
