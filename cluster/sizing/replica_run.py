"""One replica under an open loop of requests, in virtual time.

The replica is a `VirtualCore`: vLLM's scheduler and KV-cache manager with our forks, where only the
duration of a step is modeled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apar_core.tree import tree_statistics

if TYPE_CHECKING:
    from apar_core.virtual.core import CoreEvent, VirtualCore
    from apar_core.workload.arrivals import OpenLoop
    from apar_core.workload.replay_answers import ReplayAnswer

QUANTILE = 0.99
# The warm-up ends when so many requests have ended for each that is under way; at the latest, and
# at the earliest, after so many arrivals.
_TURNOVERS = 1.5
_WARM_UP = range(50, 1000)
# More requests than may miss a limit are tolerated in the warm-up, which is longer at times.
_WARM_UP_TOLERANCE = 3
# A replica falls behind if, while the measured requests come, more than this share of them
# remains in it.
_UNSERVED = 0.08


@dataclass(frozen=True, slots=True)
class Slos:
    """Limits in seconds that 99% of the requests keep; None for no limit.

    first_token_s: from arrival to the first token.
    token_s: from the first to the last token, per step of the critical path after the first. It is
        the metric `apar_time_per_output_token_seconds`.
    latency_s: from arrival to the end of the answer.
    """

    first_token_s: float | None = None
    token_s: float | None = None
    latency_s: float | None = None

    def named(self) -> dict[str, float]:
        """Return the limits that are set, by the names of `Quantiles` in `ReplicaRun`."""
        limits = {
            "first token": self.first_token_s, "time per token": self.token_s,
            "latency": self.latency_s,
        }  # fmt: skip
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Times:
    """Median and 99% quantile in seconds."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """What a replica did under a rate of requests.

    times: by name as in `Slos.named`, over the measured requests.
    broken: the limits that more than 1% of the requests missed, and "throughput" if requests
        came faster than they ended. A run that breaks a limit ends early unless it is to be
        complete, and its other figures are of the part that was run.
    kv_use, kv_peak: mean share of the KV cache in use after the warm-up, and the largest.
    rows: mean sequences per step after the warm-up. peak_rows: the largest number.
    requests: mean requests in the replica after the warm-up, waiting ones included.
    peak_running, peak_waiting: the most requests within the cap, and the most that waited for it.
    """

    times: dict[str, Times]
    broken: tuple[str, ...]
    mean_latency_s: float
    kv_use: float
    kv_peak: float
    rows: float
    peak_rows: int
    requests: float
    peak_running: int
    peak_waiting: int
    preemptions: int
    steps: int
    text_tokens_per_s: float


@dataclass(slots=True)
class _Timeline:
    """Times of a request, NaN before they are known; `token_s` as in `Slos`."""

    arrival_s: float
    first_s: float = math.nan
    end_s: float = math.nan
    token_s: float = math.nan


@dataclass(slots=True)
class _Window:
    """Sums over the steps after the warm-up; `..._s` are weighted by the steps' seconds."""

    seconds: float = 0.0
    kv_s: float = 0.0
    requests_s: float = 0.0
    rows: int = 0
    steps: int = 0
    text_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A load on one replica, without its rate.

    cap: most requests that run at once; further ones wait.
    measured: requests that are measured.
    """

    cap: int
    forked: bool
    measured: int
    seed: int


def run_replica(
    core: VirtualCore,
    requests: Sequence[ReplayAnswer],
    arrivals: OpenLoop,
    load: ReplicaLoad,
    slos: Slos,
    *,
    is_complete: bool = False,
) -> ReplicaRun:
    """Run a new core under an open loop of requests, which come again and again.

    After a warm-up, `load.measured` requests are measured; further ones keep the replica busy until
    these have ended. Unless `is_complete`, the run ends early when more than 1% of the requests
    have missed a limit.
    """
    return _Run(core, requests, arrivals, load, slos).result(is_complete=is_complete)


class _Run:
    """The state of one run."""

    def __init__(
        self,
        core: VirtualCore,
        requests: Sequence[ReplayAnswer],
        arrivals: OpenLoop,
        load: ReplicaLoad,
        slos: Slos,
    ) -> None:
        most = _WARM_UP.stop + load.measured
        self._core = core
        self._requests = requests
        # Fillers behind the measured requests: as many at most.
        self._times_s = arrivals.times_s(2 * most, load.seed)
        self._load = load
        self._slos = slos
        self._missed = _Missed(slos, load.measured)
        self._lines: list[_Timeline] = []
        self._first: int | None = None
        self._first_waiting = self._grown = 0
        self._num_ended = 0
        self._num_left = load.measured
        self._window = _Window()
        self._kv_peak = 0.0
        self._peak_running = self._peak_waiting = 0

    def result(self, *, is_complete: bool) -> ReplicaRun:
        """Run to the end, and return what was measured."""
        core, load = self._core, self._load
        core.scheduler.gate.max_requests = load.cap
        while self._num_left and (is_complete or not self._missed.too_many):
            self._submit_what_has_come()
            self._step()
        window, first = self._window, self._first or 0
        measured = range(first, min(first + load.measured, len(self._lines)))
        lines = [self._lines[index] for index in measured]
        seconds = max(window.seconds, 1e-9)
        return ReplicaRun(
            times={
                "first token": _times([line.first_s - line.arrival_s for line in lines]),
                "time per token": _times([line.token_s for line in lines]),
                "latency": _times([line.end_s - line.arrival_s for line in lines]),
            },
            broken=self._broken(),
            mean_latency_s=_mean([line.end_s - line.arrival_s for line in lines]),
            kv_use=window.kv_s / seconds,
            kv_peak=self._kv_peak,
            rows=window.rows / max(window.steps, 1),
            peak_rows=core.totals.largest_rows,
            requests=window.requests_s / seconds,
            peak_running=self._peak_running,
            peak_waiting=self._peak_waiting,
            preemptions=core.preemptions,
            steps=core.totals.steps,
            text_tokens_per_s=window.text_tokens / seconds,
        )

    def _broken(self) -> tuple[str, ...]:
        falls_behind = self._grown > _UNSERVED * self._load.measured
        return (*self._missed.names, *(["throughput"] if falls_behind else []))

    def _submit_what_has_come(self) -> None:
        from apar_core.virtual.core import VirtualRequest

        core, load, times_s, lines = self._core, self._load, self._times_s, self._lines
        now_s = core.now_s if core.has_work else times_s[len(lines)]
        while len(lines) < len(times_s) and times_s[len(lines)] <= now_s:
            index = len(lines)
            if self._first is None and self._is_warm(index):
                self._first, self._first_waiting = index, core.num_requests
            answer = self._requests[index % len(self._requests)]
            core.add(
                VirtualRequest(
                    str(index), answer.prompt_ids, answer.scripts(forked=load.forked),
                    max_tokens=answer.max_tokens, forked=load.forked, arrival_s=times_s[index],
                )
            )  # fmt: skip
            lines.append(_Timeline(times_s[index]))
            if self._first is not None and len(lines) == self._first + load.measured:
                self._grown = core.num_requests - self._first_waiting

    def _is_warm(self, num_arrived: int) -> bool:
        if num_arrived not in _WARM_UP:
            return num_arrived >= _WARM_UP.stop
        return self._num_ended >= _TURNOVERS * self._core.num_requests

    def _step(self) -> None:
        core, window = self._core, self._window
        totals, pool = core.totals, core.scheduler.kv_cache_manager.block_pool
        begin_s, rows = core.now_s, totals.rows
        events = core.step()
        kv_share = 1 - pool.get_num_free_blocks() / (pool.num_gpu_blocks - 1)
        self._kv_peak = max(self._kv_peak, kv_share)
        held = core.scheduler.gate.num_held
        self._peak_waiting = max(self._peak_waiting, held)
        self._peak_running = max(self._peak_running, core.num_requests - held)
        text_tokens = sum(self._take(event) for event in events)
        if self._first is not None:
            seconds = core.now_s - begin_s
            window.seconds += seconds
            window.kv_s += kv_share * seconds
            window.requests_s += core.num_requests * seconds
            window.rows += totals.rows - rows
            window.steps += 1
            window.text_tokens += text_tokens

    def _take(self, event: CoreEvent) -> int:
        """Note an event, and return the text tokens of a request that has ended."""
        index = int(event.request_id)
        line, answer = self._lines[index], self._requests[index % len(self._requests)]
        seen: dict[str, float] = {}
        if not event.is_end:
            line.first_s = event.time_s
            seen["first token"] = line.first_s - line.arrival_s
        else:
            line.end_s = event.time_s
            path = tree_statistics(answer.tree, 0).decode_steps
            steps = path if self._load.forked else len(answer.flat)
            line.token_s = (line.end_s - line.first_s) / max(steps - 1, 1)
            seen = {"latency": line.end_s - line.arrival_s, "time per token": line.token_s}
            self._num_ended += 1
        if self._first is None or index < self._first:
            self._missed.count(seen, is_measured=False)
        elif index < self._first + self._load.measured:
            self._missed.count(seen, is_measured=True)
            self._num_left -= event.is_end
        return answer.text_tokens if event.is_end else 0


class _Missed:
    """Counts the requests that missed each limit, in the warm-up and after it."""

    def __init__(self, slos: Slos, measured: int) -> None:
        self._limits = slos.named()
        # The slowest of 100 may miss a limit.
        self._allowed = math.floor((1 - QUANTILE) * measured + 1e-9)
        self._measured = dict.fromkeys(self._limits, 0)
        self._before = dict.fromkeys(self._limits, 0)

    def count(self, seen: dict[str, float], *, is_measured: bool) -> None:
        """Note times of a request."""
        counts = self._measured if is_measured else self._before
        for name, seconds in seen.items():
            if seconds > self._limits.get(name, math.inf):
                counts[name] += 1

    @property
    def too_many(self) -> bool:
        """Whether more requests than allowed missed one of the limits."""
        return bool(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The limits that more requests than allowed missed, the most missed first."""
        # The empty replica at the start only makes requests faster.
        before = _WARM_UP_TOLERANCE * self._allowed
        broken = [
            name
            for name in self._limits
            if self._measured[name] > self._allowed or self._before[name] > before
        ]
        return tuple(sorted(broken, key=lambda name: -self._measured[name] - self._before[name]))


def _times(seconds: Sequence[float]) -> Times:
    """Return median and 99% quantile of the times that are known, NaN without any."""
    known = sorted(value for value in seconds if not math.isnan(value))
    if not known:
        return Times(math.nan, math.nan)
    # So many may lie above the quantile as may miss a limit.
    above = math.floor((1 - QUANTILE) * len(known) + 1e-9)
    return Times(known[(len(known) - 1) // 2], known[len(known) - 1 - above])


def _mean(seconds: Sequence[float]) -> float:
    known = [value for value in seconds if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
