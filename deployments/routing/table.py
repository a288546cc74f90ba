"""What a router knows of each replica: its last report, and what has been sent there since."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deployments.routing.forecast import Forecast
from deployments.routing.silence import Silence
from deployments.routing.step_time import StepTime
from deployments.routing.views import ReplicaLoad

_FIRST_SLOTS = 8
# A report's time is the replica's clock; beyond this the clocks cannot be the same.
_MAX_LAG_S = 10.0
# Of a replica that has long not reported, the oldest changes are kept as one.
_MAX_CHANGES = 4096


@dataclass(frozen=True, slots=True)
class _Change:
    """A request sent (counted positively) or ended, at the router's time `at_s`."""

    at_s: float
    requests: int
    threads: float
    blocks: float


@dataclass(slots=True)
class _Row:
    """One replica: its report, and this router's own part in it."""

    replica_id: str
    cap: int
    load: ReplicaLoad | None = None
    least_lag_s: float = float("inf")
    # When the report was taken, by the router's clock.
    taken_at_s: float = 0.0
    # Own requests there now, and what is expected of them all together.
    own_requests: int = 0
    own_threads: float = 0.0
    own_tokens: float = 0.0
    # What has been sent and has ended since the report was taken.
    since: deque[_Change] = field(default_factory=deque)
    since_requests: int = 0
    since_threads: float = 0.0
    since_blocks: float = 0.0
    # Tokens ever sent there, by which the age of a cached prefix is told.
    sent_tokens: float = 0.0


class ReplicaTable:
    """Replicas in numbered slots, as arrays of one value a slot; a free slot has no room.

    `requests`, `threads` and `used_blocks` are estimates for this moment: the last report, plus
    what this router has sent since it was taken, less what of that has ended. So between two
    reports the router sees its own decisions, and a burst does not all go to one replica.
    """

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.rows: list[_Row | None] = [None] * _FIRST_SLOTS
        self.step_time = StepTime(_FIRST_SLOTS)
        self.silence = Silence(_FIRST_SLOTS)
        # Room in requests; none in a free slot.
        self.room: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.requests: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.threads: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.used_blocks: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        # Infinite while a replica has not reported how many blocks it has.
        self.blocks: NDArray[np.float64] = np.full(_FIRST_SLOTS, np.inf)
        self.sent_tokens: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.block_size = 16

    def replicas_changed(self, caps: Mapping[str, int]) -> list[int]:
        """Take the running replicas and their caps in requests; returns the slots given up."""
        gone = [slot for name, slot in self.slots.items() if name not in caps]
        for slot in gone:
            row = self._row(slot)
            del self.slots[row.replica_id]
            self.rows[slot] = None
            self.step_time.forget(slot)
            self.silence.forget(slot)
            self._clear(slot)
        for replica_id, cap in caps.items():
            known = self.slots.get(replica_id)
            slot = self._free_slot() if known is None else known
            if known is None:
                self.slots[replica_id] = slot
                self.rows[slot] = _Row(replica_id, cap)
            self._row(slot).cap = cap
            self._estimate(slot)
        return gone

    def replica_id(self, slot: int) -> str:
        """The replica in a slot that is taken."""
        return self._row(slot).replica_id

    def sent(self, slot: int, forecast: Forecast, now_s: float) -> None:
        """Count a request that goes to a replica now."""
        row = self._row(slot)
        row.sent_tokens += forecast.kv_tokens
        self.sent_tokens[slot] = row.sent_tokens
        self._change(slot, row, forecast, now_s, sign=1)

    def ended(self, slot: int, replica_id: str, forecast: Forecast, now_s: float) -> None:
        """Count off a request that was `sent` with this forecast; the replica may have gone."""
        row = self.rows[slot]
        if row is not None and row.replica_id == replica_id:
            self._change(slot, row, forecast, now_s, sign=-1)

    def reported(self, replica_id: str, load: ReplicaLoad, now_s: float) -> None:
        """Take a replica's report; one that is not newer than the last is left."""
        slot = self.slots.get(replica_id)
        if slot is None:
            return
        row = self._row(slot)
        if row.load is not None and load.taken_at_s <= row.load.taken_at_s:
            return
        before, row.load = row.load, load
        self.silence.heard(slot, now_s)
        self.block_size = max(load.block_size, 1)
        row.taken_at_s = _on_own_clock(row, load, now_s)
        while row.since and row.since[0].at_s <= row.taken_at_s:
            change = row.since.popleft()
            row.since_requests -= change.requests
            row.since_threads -= change.threads
            row.since_blocks -= change.blocks
        if not row.since:  # No rounding errors stay.
            row.since_threads = row.since_blocks = 0.0
        if load.step_s > 0 and load.tokens_per_s > 0:
            batch = load.tokens_per_s * load.step_s
            self.step_time.measured(slot, batch, load.step_s)
        elif before is not None:
            self.step_time.rested(slot, load.taken_at_s - before.taken_at_s)
        self._estimate(slot)

    def _change(self, slot: int, row: _Row, forecast: Forecast, now_s: float, *, sign: int) -> None:
        change = _Change(
            now_s,
            sign,
            sign * forecast.threads,
            sign * forecast.kv_tokens / self.block_size,
        )
        row.own_requests += sign
        row.own_threads += change.threads
        row.own_tokens += sign * forecast.kv_tokens
        if row.own_requests == 0:  # No rounding errors stay.
            row.own_threads = row.own_tokens = 0.0
        if row.load is not None:
            row.since.append(change)
            if len(row.since) > _MAX_CHANGES:
                _merge_oldest(row.since)
            row.since_requests += sign
            row.since_threads += change.threads
            row.since_blocks += change.blocks
        self._estimate(slot)

    def _estimate(self, slot: int) -> None:
        """Put report and own part together.

        A request on its way when the report was taken is in neither; the own count has it.
        """
        row = self._row(slot)
        requests, threads, used = row.own_requests, row.own_threads, 0.0
        if row.load is not None:
            load = row.load
            reported = max(load.requests + row.since_requests, 0)
            missing = max(row.own_requests - reported, 0)
            mean = row.own_threads / row.own_requests if row.own_requests else 0.0
            now = max(load.threads + load.waiting_forks + row.since_threads, float(reported))
            threads = now + missing * mean
            requests = max(reported, row.own_requests)
            used = max(load.blocks - load.free_blocks + row.since_blocks, 0.0)
            self.blocks[slot] = load.blocks
        self.requests[slot] = requests
        self.threads[slot] = threads
        # Running requests still grow; on average they hold half of what they will.
        self.used_blocks[slot] = max(used, row.own_tokens / self.block_size * 0.5)
        self.room[slot] = row.cap - requests

    def _row(self, slot: int) -> _Row:
        row = self.rows[slot]
        if row is None:
            raise KeyError(slot)
        return row

    def _clear(self, slot: int) -> None:
        for values in (self.room, self.requests, self.threads, self.used_blocks, self.sent_tokens):
            values[slot] = 0.0
        self.blocks[slot] = np.inf

    def _free_slot(self) -> int:
        if None in self.rows:
            return self.rows.index(None)
        old = len(self.rows)
        self.rows.extend([None] * old)
        self.step_time.resize(2 * old)
        self.silence.resize(2 * old)
        for name in ("room", "requests", "threads", "used_blocks", "sent_tokens"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(old)]))
        self.blocks = np.concatenate([self.blocks, np.full(old, np.inf)])
        return old


def _on_own_clock(row: _Row, load: ReplicaLoad, now_s: float) -> float:
    """When a report was taken; where the replica's clock is plainly off, by its least lag."""
    lag_s = now_s - load.taken_at_s
    row.least_lag_s = min(row.least_lag_s, lag_s)
    if row.least_lag_s < 0.0 or row.least_lag_s > _MAX_LAG_S:
        lag_s -= row.least_lag_s
    return now_s - lag_s


def _merge_oldest(since: deque[_Change]) -> None:
    first, second = since.popleft(), since.popleft()
    since.appendleft(
        _Change(
            second.at_s,
            first.requests + second.requests,
            first.threads + second.threads,
            first.blocks + second.blocks,
        )
    )
