"""Estimated load of every replica, and the cost expected of a request.

`ReplicaTable` combines the replicas' reports with the requests sent since. `Forecaster` predicts
the threads and tokens of a request from the last ones. `StepTime` fits engine step times to the
number of threads. Nothing here uses a clock or Ray: time comes in as an argument.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.wire.load import ReplicaLoad
from deployments.wire.request import RequestHint
from deployments.wire.response import ResponseEnd

T = TypeVar("T", float, NDArray[np.float64])

# Forecasts before any request has ended: a chat model, about half of whose answers fork.
PRIOR_GENERATED_TOKENS = 256.0
PRIOR_PATH_TOKENS = 128.0
# Number of latest requests that count; the prior weighs as much as PRIOR_WEIGHT of them.
WINDOW = 256
PRIOR_WEIGHT = 8.0

# Number of threads at which a step takes twice as long as with one thread, until measured.
_PRIOR_DOUBLING_THREADS = 64.0
_PRIOR_STEP_S = 0.02
# Maximum number of parents whose requests are forecast from their siblings.
_MAX_FAMILIES = 1024
_PRIOR_VARIANCE = 4.0
_MEMORY = 0.998
_SLOWNESS_SHARE = 0.2
_SLOWNESS_BOUNDS = (0.05, 20.0)
_MIN_BASE_SHARE = 0.02
# An idle replica cannot show that it is no longer slow, so its measured slowness decays.
_SLOWNESS_HALF_LIFE_S = 10.0

# A replica is silent after this many usual gaps between reports, and never before
# _MIN_SILENCE_S: one long engine step may delay a report.
_SILENT_GAPS = 8.0
_MIN_SILENCE_S = 2.0
_GAP_SHARE = 0.02

_FIRST_SLOTS = 8
# Reports carry the replica's time; a larger lag means that its clock differs from ours.
_MAX_LAG_S = 10.0
# Changes remembered per replica since its last report; beyond that the oldest are merged.
_MAX_CHANGES = 4096


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected cost of a request.

    `threads` is the mean number alive while it runs, `steps` the length of its critical path.
    `generated_tokens` counts all threads; `kv_tokens` is its KV cache use at the end.
    """

    threads: float
    steps: float
    generated_tokens: float
    kv_tokens: float


@dataclass(slots=True)
class _Means:
    """Moving means over requests, per choice."""

    weight: float = PRIOR_WEIGHT
    generated_tokens: float = PRIOR_GENERATED_TOKENS
    path_tokens: float = PRIOR_PATH_TOKENS

    def add(self, generated_tokens: float, path_tokens: float) -> None:
        self.weight = min(self.weight + 1.0, WINDOW)
        share = 1.0 / self.weight
        self.generated_tokens += share * (generated_tokens - self.generated_tokens)
        self.path_tokens += share * (path_tokens - self.path_tokens)


class Forecaster:
    """Predicts the cost of a request from finished ones, separately for those that may fork.

    The client's hints come first: the expected length, then requests of the same parent.
    Further features, such as the system prompt or the prompt's length, did not help in the
    simulation: the error of a single request matters little beside what a replica already runs.
    """

    def __init__(self) -> None:
        unforked = _Means(path_tokens=PRIOR_GENERATED_TOKENS)
        self._means = {True: _Means(), False: unforked}
        # By parent and whether the request may fork; the most recently used one is last.
        self._families: OrderedDict[tuple[int, bool], _Means] = OrderedDict()

    def forecast(self, hint: RequestHint) -> Forecast:
        """Return the expected cost of a request."""
        means = self._means[hint.may_fork]
        if hint.family is not None:
            means = self._families.get((hint.family, hint.may_fork), means)
        generated, path = means.generated_tokens, means.path_tokens
        threads = max(1.0, generated / path)
        if hint.expected_tokens is not None:
            generated = float(hint.expected_tokens)
            path = generated / threads
        if hint.max_tokens is not None and generated > hint.max_tokens:
            generated = float(max(hint.max_tokens, 1))
            path = min(path, generated)
        choices = max(hint.num_choices, 1)
        generated *= choices
        return Forecast(choices * threads, path, generated, hint.prompt_tokens + generated)

    def learn(self, hint: RequestHint, end: ResponseEnd) -> None:
        """Add a finished request to the means; one that generated nothing is ignored."""
        if end.generated_tokens > 0 and end.critical_path_tokens > 0:
            generated = end.generated_tokens / max(hint.num_choices, 1)
            self._means[hint.may_fork].add(generated, end.critical_path_tokens)
            if hint.family is not None:
                self._learn_family(hint.family, generated, end.critical_path_tokens, hint.may_fork)

    def _learn_family(self, family: int, generated: float, path: float, may_fork: bool) -> None:
        place = (family, may_fork)
        means = self._families.pop(place, None)
        if means is None:
            if len(self._families) >= _MAX_FAMILIES:
                self._families.popitem(last=False)
            known = self._means[may_fork]
            means = _Means(1.0, known.generated_tokens, known.path_tokens)
        means.add(generated, path)
        self._families[place] = means


class StepTime:
    """Linear model of the engine step: (`base_s` + `per_thread_s` * threads) * `slowness`.

    One line is fitted to the reports of all replicas, so a replica that has only seen one load
    takes the slope from the others. `slowness` is per slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.slowness: NDArray[np.float64] = np.ones(num_slots)
        self._is_measured: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self.base_s = _PRIOR_STEP_S
        self.per_thread_s = _PRIOR_STEP_S / _PRIOR_DOUBLING_THREADS
        self._weight = self._threads = self._step = self._square = self._product = 0.0

    def resize(self, num_slots: int) -> None:
        """Add slots."""
        added = num_slots - len(self.slowness)
        self.slowness = np.concatenate([self.slowness, np.ones(added)])
        self._is_measured = np.concatenate([self._is_measured, np.zeros(added, dtype=np.bool_)])

    def forget(self, slot: int) -> None:
        """Reset a slot for another replica."""
        self.slowness[slot] = 1.0
        self._is_measured[slot] = False

    def measured(self, slot: int, threads: float, step_s: float) -> None:
        """Learn that steps with `threads` threads took `step_s` seconds on average."""
        if self._weight == 0.0:
            # The first report sets the scale; slowness is relative to it.
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
        """Let the slowness of an idle replica decay towards that of the fastest one.

        Otherwise a replica that was slow for a moment would get no requests and stay slow.
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


class SilenceDetector:
    """Detects replicas that have stopped reporting while others continue.

    A hung process looks idle, because its last report never changes. Report times are compared
    with the latest report of any replica: if the Serve controller, which carries all reports,
    hangs, none is silent. The threshold follows the observed gaps: slow engines report less often.
    """

    def __init__(self, num_slots: int) -> None:
        # Infinite before a replica's first report, which may take any time.
        self._heard_s: NDArray[np.float64] = np.full(num_slots, np.inf)
        self._last_s = -np.inf
        self._gap_s = 0.0

    def resize(self, num_slots: int) -> None:
        """Add slots."""
        added = num_slots - len(self._heard_s)
        self._heard_s = np.concatenate([self._heard_s, np.full(added, np.inf)])

    def forget(self, slot: int) -> None:
        """Reset a slot for another replica."""
        self._heard_s[slot] = np.inf

    def heard(self, slot: int, now_s: float) -> None:
        """Note the arrival of a new report, by the router's clock."""
        before_s = float(self._heard_s[slot])
        if np.isfinite(before_s):
            gap_s = max(now_s - before_s, 0.0)
            self._gap_s += (_GAP_SHARE if self._gap_s else 1.0) * (gap_s - self._gap_s)
        self._heard_s[slot] = self._last_s = now_s

    def silent(self) -> NDArray[np.bool_]:
        """Return, per slot, whether its replica has stopped reporting."""
        if not self._gap_s:
            return np.zeros(len(self._heard_s), dtype=np.bool_)
        longest_s = max(_SILENT_GAPS * self._gap_s, _MIN_SILENCE_S)
        silent: NDArray[np.bool_] = self._heard_s < self._last_s - longest_s
        return silent


@dataclass(frozen=True, slots=True)
class _Change:
    """Requests sent (positive) or ended (negative) at the router's time `at_s`."""

    at_s: float
    requests: int
    threads: float
    blocks: float


@dataclass(slots=True)
class _Row:
    """One replica: its last report, and the requests that this router has there."""

    replica_id: str
    cap: int
    load: ReplicaLoad | None = None
    least_lag_s: float = float("inf")
    # Time of the report by the router's clock.
    taken_at_s: float = 0.0
    # This router's requests there now, and the sum of their forecasts.
    own_requests: int = 0
    own_threads: float = 0.0
    own_tokens: float = 0.0
    # Changes since the report was taken, and their sums.
    since: deque[_Change] = field(default_factory=deque)
    since_requests: int = 0
    since_threads: float = 0.0
    since_blocks: float = 0.0
    # Total tokens ever sent there; used for the age of a cached prefix.
    sent_tokens: float = 0.0


class ReplicaTable:
    """Replicas in numbered slots, with one array per quantity, indexed by slot.

    `requests`, `threads` and `used_blocks` are current estimates: the last report, plus what this
    router has sent since, minus what has ended. The router therefore sees its own decisions
    between two reports, and a burst does not go to a single replica. `room` is the number of
    requests a replica can still take, 0 in a free slot. `blocks` is infinite until reported.
    """

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.rows: list[_Row | None] = [None] * _FIRST_SLOTS
        self.step_time = StepTime(_FIRST_SLOTS)
        self.silence = SilenceDetector(_FIRST_SLOTS)
        self.room: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.requests: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.threads: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.used_blocks: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.blocks: NDArray[np.float64] = np.full(_FIRST_SLOTS, np.inf)
        self.sent_tokens: NDArray[np.float64] = np.zeros(_FIRST_SLOTS)
        self.block_size = 16
        self.thread_weight = 1.0

    def weighted(self, requests: T, threads: T) -> T:
        """Return the step cost of threads, in units of the cost of a request's first thread."""
        if self.thread_weight == 1.0:
            return threads
        return requests + self.thread_weight * (threads - requests)

    def replicas_changed(self, caps: Mapping[str, int]) -> None:
        """Take the running replicas, each with its cap in requests."""
        for slot in [slot for name, slot in self.slots.items() if name not in caps]:
            row = self._row(slot)
            del self.slots[row.replica_id]
            self.rows[slot] = None
            self.step_time.forget(slot)
            self.silence.forget(slot)
            for values in (
                self.room,
                self.requests,
                self.threads,
                self.used_blocks,
                self.sent_tokens,
            ):
                values[slot] = 0.0
            self.blocks[slot] = np.inf
        for replica_id, cap in caps.items():
            known = self.slots.get(replica_id)
            slot = self._free_slot() if known is None else known
            if known is None:
                self.slots[replica_id] = slot
                self.rows[slot] = _Row(replica_id, cap)
            self._row(slot).cap = cap
            self._estimate(slot)

    def replica_id(self, slot: int) -> str:
        """Return the replica in an occupied slot."""
        return self._row(slot).replica_id

    def sent(self, slot: int, forecast: Forecast, now_s: float) -> None:
        """Add a request that goes to a replica now."""
        row = self._row(slot)
        row.sent_tokens += forecast.kv_tokens
        self.sent_tokens[slot] = row.sent_tokens
        self._change(slot, row, forecast, now_s, sign=1)

    def ended(self, slot: int, replica_id: str, forecast: Forecast, now_s: float) -> None:
        """Remove a request that was `sent` with this forecast; its replica may be gone."""
        row = self.rows[slot]
        if row is not None and row.replica_id == replica_id:
            self._change(slot, row, forecast, now_s, sign=-1)

    def reported(self, replica_id: str, load: ReplicaLoad, now_s: float) -> None:
        """Take a replica's report; unknown replicas and reports that are not newer are ignored."""
        slot = self.slots.get(replica_id)
        if slot is None:
            return
        row = self._row(slot)
        if row.load is not None and load.taken_at_s <= row.load.taken_at_s:
            return
        before, row.load = row.load, load
        self.silence.heard(slot, now_s)
        self.block_size = max(load.block_size, 1)
        self.thread_weight = load.thread_weight
        row.taken_at_s = _by_own_clock(row, load, now_s)
        while row.since and row.since[0].at_s <= row.taken_at_s:
            change = row.since.popleft()
            row.since_requests -= change.requests
            row.since_threads -= change.threads
            row.since_blocks -= change.blocks
        if not row.since:  # Clear accumulated rounding errors.
            row.since_threads = row.since_blocks = 0.0
        if load.step_s > 0 and load.tokens_per_s > 0:
            batch = load.tokens_per_s * load.step_s
            if load.threads > load.requests > 0:
                batch *= self.weighted(float(load.requests), float(load.threads)) / load.threads
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
        if row.own_requests == 0:  # Clear accumulated rounding errors.
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
        """Combine the report with this router's own requests.

        A request that was on its way when the report was taken appears only in the own count.
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
        # Running requests still grow; on average they hold half of their final size.
        self.used_blocks[slot] = max(used, row.own_tokens / self.block_size * 0.5)
        self.room[slot] = row.cap - requests

    def _row(self, slot: int) -> _Row:
        row = self.rows[slot]
        if row is None:
            raise KeyError(slot)
        return row

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


def _by_own_clock(row: _Row, load: ReplicaLoad, now_s: float) -> float:
    """Convert the time of a report to the router's clock, which may differ from the replica's."""
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
