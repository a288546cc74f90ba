"""How much of what other routers send is not known yet, and what follows from it for a choice."""

from deployments.routing.table import ReplicaTable

_LOOK_PERIOD_S = 0.05
_GAP_SHARE = 0.02
# Others' requests in a hundred at most: some are always under way between a router and a report.
_LEAST_OWN_SHARE = 0.02
_FEW = 0.5
# Before it has sent so many, a router cannot tell how its part compares with the others'.
_LEAST_SENT = 100


class UnseenRequests:
    """Estimates the requests that other routers have sent since the replicas reported.

    A router knows at once what it sends itself, and the rest by reports only. Did every router take
    the replica that looks best, all would take the same one until the next report. So the more is
    unseen, the fewer replicas are compared, drawn at random: two at least, as in the power of two
    choices, which stale reports do not herd (Mitzenmacher, How Useful Is Old Information?, 2000).
    """

    def __init__(self) -> None:
        self.requests = 0.0
        self._num_sent = 0
        self._gap_s = 0.0
        self._last_sent_s: float | None = None
        self._looked_at_s = float("-inf")

    def sent(self, now_s: float) -> None:
        """Count a request that this router sends."""
        self._num_sent += 1
        if self._last_sent_s is not None:
            gap_s = now_s - self._last_sent_s
            self._gap_s += (_GAP_SHARE if self._gap_s else 1.0) * (gap_s - self._gap_s)
        self._last_sent_s = now_s

    def look(self, table: ReplicaTable, now_s: float) -> None:
        """Estimate anew, if the last time was long enough ago."""
        if now_s - self._looked_at_s < _LOOK_PERIOD_S:
            return
        self._looked_at_s = now_s
        silent = table.silence.silent()
        rows = [
            row
            for slot, row in enumerate(table.rows)
            if row is not None and row.load is not None and not silent[slot]
        ]
        reported = sum(row.load.requests for row in rows if row.load is not None)
        if reported == 0 or self._gap_s <= 0.0 or self._num_sent < _LEAST_SENT:
            self.requests = 0.0
            return
        # This router's own part of what was reported: what it had there when the report was taken.
        own = sum(row.own_requests - row.since_requests for row in rows)
        own_share = min(max(own / reported, _LEAST_OWN_SHARE), 1.0)
        age_s = sum(now_s - row.taken_at_s for row in rows) / len(rows)
        self.requests = age_s / self._gap_s * (1.0 - own_share) / own_share

    def num_compared(self, num_open: int) -> int:
        """How many of the replicas with room to compare."""
        if self.requests < _FEW:
            return num_open
        return min(num_open, max(2, 1 + int(num_open / (1.0 + self.requests))))
