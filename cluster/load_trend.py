"""Whether what has piled up at a model goes down again, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

# The trend is that of so long, and not told from less than `_SETTLE_S`.
_TREND_S = 15.0
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadTrend:
    """Requests that a model holds, running or waiting, while as many replicas run as now."""

    running: int = 0
    # Times and requests held, oldest first.
    seen: tuple[tuple[float, float], ...] = ()
    # Replicas have come, and what they do about it is not to be seen yet.
    settling: bool = False

    def after(self, now_s: float, held: float, running: int) -> LoadTrend:
        """The trend with what is seen now."""
        same = running == self.running
        kept = tuple(each for each in self.seen if same and each[0] >= now_s - _TREND_S)
        seen = (*kept, (now_s, held))
        settling = self.settling if same else 0 < self.running < running
        return LoadTrend(running, seen, settling)

    def clears(self, worth: float, within_s: float) -> bool:
        """Whether what is over the targets may be gone in time, if it goes on as it does.

        `worth` is the load in replicas that carry their targets.
        """
        if worth <= self.running:
            return False
        (began_s, before), (now_s, held) = self.seen[0], self.seen[-1]
        if now_s - began_s < _SETTLE_S:
            return self.settling
        falling_per_s = (before - held) / (now_s - began_s)
        return held * (1 - self.running / worth) <= falling_per_s * within_s
