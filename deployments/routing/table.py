"""What a router knows of each replica: its last report, and what has been sent there since."""

from dataclasses import dataclass
from deployments.wire.answer import AnswerEnd
from deployments.wire.request import RequestHint
import numpy as np
from numpy.typing import NDArray
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from deployments.wire.load import ReplicaLoad


# Until requests have ended: answers of a chat model, about half of them forked.
PRIOR_GENERATED_TOKENS = 256.0
PRIOR_PATH_TOKENS = 128.0
# The last so many requests count, and the prior as much as so many.
WINDOW = 256
PRIOR_WEIGHT = 8.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected cost of a request.

    `threads` is the mean number alive while it runs, `steps` the length of its critical path,
    `generated_tokens` its thread steps, and `kv_tokens` what it holds in the KV cache at its end.
    """

    threads: float
    steps: float
    generated_tokens: float
    kv_tokens: float


@dataclass(slots=True)
class _Means:
    """Moving means over requests, for one choice of each."""

    weight: float = PRIOR_WEIGHT
    generated_tokens: float = PRIOR_GENERATED_TOKENS
    path_tokens: float = PRIOR_PATH_TOKENS

    def add(self, generated_tokens: float, path_tokens: float) -> None:
        self.weight = min(self.weight + 1.0, WINDOW)
        share = 1.0 / self.weight
        self.generated_tokens += share * (generated_tokens - self.generated_tokens)
        self.path_tokens += share * (path_tokens - self.path_tokens)


class Forecaster:
    """Learns from ended requests, apart by whether they may fork."""

    def __init__(self) -> None:
        unforked = _Means(path_tokens=PRIOR_GENERATED_TOKENS)
        self._means = {True: _Means(), False: unforked}

    def forecast(self, hint: RequestHint) -> Forecast:
        """What a request with this hint will probably bring."""
        means = self._means[hint.may_fork]
        generated, path = means.generated_tokens, means.path_tokens
        threads = max(1.0, generated / path)
        if hint.max_tokens is not None and generated > hint.max_tokens:
            generated = float(max(hint.max_tokens, 1))
            path = min(path, generated)
        choices = max(hint.num_choices, 1)
        generated *= choices
        return Forecast(choices * threads, path, generated, hint.prompt_tokens + generated)

    def learn(self, hint: RequestHint, end: AnswerEnd) -> None:
        """Count what a request brought; one that never ran teaches nothing."""
        if end.generated_tokens > 0 and end.critical_path_tokens > 0:
            generated = end.generated_tokens / max(hint.num_choices, 1)
            self._means[hint.may_fork].add(generated, end.critical_path_tokens)


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


# A step with so many threads takes twice as long as one with a single thread, until measured.
_PRIOR_DOUBLING_THREADS = 64.0
_PRIOR_STEP_S = 0.02
_PRIOR_VARIANCE = 4.0
_MEMORY = 0.998
_SLOWNESS_SHARE = 0.2
_SLOWNESS_BOUNDS = (0.05, 20.0)
_MIN_BASE_SHARE = 0.02
# A replica that does nothing cannot show that it is no longer slow: in so many seconds what was
# learnt of it loses half its weight.
_SLOWNESS_HALF_LIFE_S = 10.0


class StepTime:
    """`base_s` + `per_thread_s` * threads, times the slowness of the replica.

    The line is fitted to the reports of all replicas together, so that a replica that has seen
    only one load takes the slope from the others; a replica's slowness is its own.
    """

    def __init__(self, num_slots: int) -> None:
        self.slowness: NDArray[np.float64] = np.ones(num_slots)
        self._is_measured: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.base_s = _PRIOR_STEP_S
        self.per_thread_s = _PRIOR_STEP_S / _PRIOR_DOUBLING_THREADS
        self._weight = self._threads = self._step = self._square = self._product = 0.0

    def resize(self, num_slots: int) -> None:
        """Make room for more replicas."""
        added = num_slots - len(self.slowness)
        self.slowness = np.concatenate([self.slowness, np.ones(added)])
        self._is_measured = np.concatenate([self._is_measured, np.zeros(added, dtype=np.bool_)])

    def forget(self, slot: int) -> None:
        """Another replica takes the slot."""
        self.slowness[slot] = 1.0
        self._is_measured[slot] = False

    def measured(self, slot: int, threads: float, step_s: float) -> None:
        """Learn from one report: the mean step with so many threads in it took `step_s`."""
        if self._weight == 0.0:
            # The first report sets the scale; only what comes later can be slow beside it.
            self.slowness[slot] = 1.0
        self._is_measured[slot] = True
        scaled = step_s / float(self.slowness[slot])
        self._weight = self._weight * _MEMORY + 1.0
        self._threads = self._threads * _MEMORY + threads
        self._step = self._step * _MEMORY + scaled
        self._square = self._square * _MEMORY + threads * threads
        self._product = self._product * _MEMORY + threads * scaled
        self._fit()
        ratio = step_s / (self.base_s + self.per_thread_s * threads)
        slowness = float(self.slowness[slot]) + _SLOWNESS_SHARE * (ratio - self.slowness[slot])
        self.slowness[slot] = min(max(slowness, _SLOWNESS_BOUNDS[0]), _SLOWNESS_BOUNDS[1])

    def rested(self, slot: int, seconds: float) -> None:
        """Learn that a replica has run no step for so long.

        By and by it is taken for as fast as the fastest: one that was slow for a moment would
        otherwise get no request, and so stay slow for ever.
        """
        if not self._is_measured.any():
            return
        fastest = float(self.slowness[self._is_measured].min())
        kept = 0.5 ** (max(seconds, 0.0) / _SLOWNESS_HALF_LIFE_S)
        self.slowness[slot] = fastest * (float(self.slowness[slot]) / fastest) ** kept

    def _fit(self) -> None:
        mean_threads = self._threads / self._weight
        mean_step = self._step / self._weight
        variance = max(self._square / self._weight - mean_threads**2, 0.0)
        covariance = self._product / self._weight - mean_threads * mean_step
        prior = mean_step / (_PRIOR_DOUBLING_THREADS + mean_threads)
        slope = (covariance + _PRIOR_VARIANCE * prior) / (variance + _PRIOR_VARIANCE)
        most = (1.0 - _MIN_BASE_SHARE) * mean_step / max(mean_threads, 1.0)
        self.per_thread_s = min(max(slope, 0.0), most)
        self.base_s = mean_step - self.per_thread_s * mean_threads


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
