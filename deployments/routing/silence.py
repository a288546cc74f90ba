"""Which replicas have stopped to report, though others go on."""

import numpy as np
from numpy.typing import NDArray

# Silent for so many times the usual gap between two reports, and for so long at least: one step
# of an engine may hold a report up.
_SILENT_GAPS = 8.0
_LEAST_SILENCE_S = 2.0
_GAP_SHARE = 0.02


class Silence:
    """When each replica's last new report arrived, by the router's clock.

    A process that hangs looks idle: its last report stays as it was. Compared is with the last
    report of any replica, so that none is silent when the controller, which carries the reports,
    is what hangs; and with the gaps that there really are, as reports come later from slow engines.
    """

    def __init__(self, num_slots: int) -> None:
        # Infinite until a replica's first report: how long that takes tells nothing.
        self._heard_s: NDArray[np.float64] = np.full(num_slots, np.inf)
        self._last_s = -np.inf
        self._gap_s = 0.0

    def resize(self, num_slots: int) -> None:
        """Make room for more replicas."""
        added = num_slots - len(self._heard_s)
        self._heard_s = np.concatenate([self._heard_s, np.full(added, np.inf)])

    def forget(self, slot: int) -> None:
        """Another replica takes the slot."""
        self._heard_s[slot] = np.inf

    def heard(self, slot: int, now_s: float) -> None:
        """A replica's new report has arrived."""
        before_s = float(self._heard_s[slot])
        if np.isfinite(before_s):
            gap_s = max(now_s - before_s, 0.0)
            self._gap_s += (_GAP_SHARE if self._gap_s else 1.0) * (gap_s - self._gap_s)
        self._heard_s[slot] = self._last_s = now_s

    def silent(self) -> NDArray[np.bool_]:
        """Per slot, whether the replica in it has stopped to report."""
        if not self._gap_s:
            return np.zeros(len(self._heard_s), dtype=np.bool_)
        longest_s = max(_SILENT_GAPS * self._gap_s, _LEAST_SILENCE_S)
        silent: NDArray[np.bool_] = self._heard_s < self._last_s - longest_s
        return silent
