"""Whether the client itself kept up: its CPU share, its event loop's lag, requests sent late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, ConfigDict

from cluster.loadtest.records import RequestRecord

MOST_CPU_SHARE = 0.9
MOST_LAG_S = 0.1
MOST_LATE_S = 0.25
_SECOND_S = 1.0
_BEAT_S = 0.02


class ClientFigures(BaseModel):
    """What the client did in one repeat.

    Shares are of one core: over the whole repeat, and of its busiest second. `lag_...` is how much
    later than asked for the event loop woke up; `late_p99_s` how long after their times requests
    were sent (None where they have none).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_share: float
    busiest_cpu_share: float
    lag_p50_s: float
    lag_p99_s: float
    lag_max_s: float
    late_p99_s: float | None

    @property
    def marks(self) -> list[str]:
        """Why this run says more about the client than about the server; empty if it does not."""
        marks = []
        if self.cpu_share > MOST_CPU_SHARE:
            marks.append(
                f"the client used {self.cpu_share:.2f} of a core (more than {MOST_CPU_SHARE})"
            )
        if self.lag_p99_s > MOST_LAG_S:
            marks.append(
                f"the client's event loop was {self.lag_p99_s * 1000:.0f} ms late at its 99th "
                f"percentile (more than {MOST_LAG_S * 1000:.0f})"
            )
        if self.late_p99_s is not None and self.late_p99_s > MOST_LATE_S:
            marks.append(
                f"requests were sent {self.late_p99_s * 1000:.0f} ms late at the 99th percentile "
                f"(more than {MOST_LATE_S * 1000:.0f})"
            )
        return marks


@dataclass(slots=True)
class ClientWatch:
    """Measures this process while a repeat runs."""

    _lags_s: list[float] = field(default_factory=list)
    _cpu_shares: list[float] = field(default_factory=list)
    _cpu_s: float = 0.0
    _wall_s: float = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Measure from here to the end of the block."""
        started = (time.process_time(), time.perf_counter())
        beat = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beat.cancel()
            self._cpu_s = time.process_time() - started[0]
            self._wall_s = time.perf_counter() - started[1]

    def figures(self, records: Sequence[RequestRecord]) -> ClientFigures:
        """Return what has been measured, beside the lateness of these requests."""
        share = self._cpu_s / self._wall_s if self._wall_s else 0.0
        lags = self._lags_s or [0.0]
        late = [record.late_s for record in records if record.late_s is not None]
        return ClientFigures(
            cpu_share=share,
            busiest_cpu_share=max(self._cpu_shares, default=share),
            lag_p50_s=float(np.percentile(lags, 50)),
            lag_p99_s=float(np.percentile(lags, 99)),
            lag_max_s=max(lags),
            late_p99_s=float(np.percentile(late, 99)) if late else None,
        )

    async def _beat(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        while True:
            asked = time.perf_counter() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            now = time.perf_counter()
            self._lags_s.append(now - asked)
            if now - wall >= _SECOND_S:
                used = time.process_time()
                self._cpu_shares.append((used - cpu) / (now - wall))
                cpu, wall = used, now
