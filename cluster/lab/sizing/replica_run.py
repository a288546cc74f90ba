"""One replica under open-loop load, in virtual time.

The replica is a `VirtualCore`: vLLM's scheduler and KV-cache manager with our forks. Only the
duration of a step is modeled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apar_core.tree import tree_statistics

if TYPE_CHECKING:
    from cluster.lab.virtual.core import CoreEvent, VirtualCore
    from cluster.loadtest.arrivals import OpenLoop
    from cluster.loadtest.replay_answers import ReplayAnswer

QUANTILE = 0.99
# The warm-up ends when the finished requests are this multiple of those in the replica, within this
# range of arrivals.
_TURNOVERS = 1.5
_WARM_UP = range(50, 1000)
# Requests kept waiting at a saturated replica, so that a finished one is replaced in the next step.
_BACKLOG = 8


@dataclass(frozen=True, slots=True)
class Slos:
    """Limits in seconds that 99% of the requests must meet; None for no limit.

    first_token_s: from arrival to the first token.
    token_s: from the first to the last token, per step of the critical path after the first. This
        is the metric `apar_time_per_output_token_seconds`.
    latency_s: from arrival to the end of the answer.
    """

    first_token_s: float | None = None
    token_s: float | None = None
    latency_s: float | None = None

    def named(self) -> dict[str, float]:
        """Return the limits that are set, by the names in `ReplicaRun.times`."""
        limits = {
            "first token": self.first_token_s, "time per token": self.token_s,
            "latency": self.latency_s,
        }  # fmt: skip
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Times:
    """Median and 99th percentile in seconds."""

    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """Measurements of a replica at one request rate.

    times: by name as in `Slos.named`, over requests whose first token, or end, came after the
        warm-up.
    broken: limits that more than 1% of the requests missed. Such a run ends early unless it must be
        complete; its other figures then cover only the part that ran.
    rows_per_s: tokens generated per second after the warm-up, control and end tokens included.
    kv_use: mean share of the KV cache in use after the warm-up. kv_peak: largest share of the run.
    rows: mean sequences per step after the warm-up. peak_rows: the most in any step of the run.
    requests: mean requests in the replica after the warm-up, waiting ones included.
    peak_running, peak_waiting: most requests running at once, and most waiting because of the cap.
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
    rows_per_s: float


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load on one replica.

    cap: maximum number of running requests; further ones wait.
    measured: requests that finish after the warm-up.
    """

    cap: int
    forked: bool
    measured: int
    seed: int


@dataclass(slots=True)
class _Window:
    """Sums over the steps after the warm-up; `kv_s` and `requests_s` are weighted by step time."""

    seconds: float = 0.0
    kv_s: float = 0.0
    requests_s: float = 0.0
    rows: int = 0
    steps: int = 0


class ReplicaDriver:
    """Runs a new core under open-loop load that cycles through the requests.

    Without `arrivals` the replica is saturated: each finished request is replaced by a new one.
    """

    def __init__(
        self,
        core: VirtualCore,
        requests: Sequence[ReplayAnswer],
        arrivals: OpenLoop | None,
        load: ReplicaLoad,
        slos: Slos,
    ) -> None:
        self._core = core
        self._requests = requests
        self._load = load
        self._limits = slos.named()
        number = 2 * (_WARM_UP.stop + load.measured)
        self._times_s = None if arrivals is None else arrivals.times_s(number, load.seed)
        # By request index.
        self._arrivals_s: list[float] = []
        self._first_tokens_s: dict[int, float] = {}
        self._num_ended = self._num_measured = 0
        self._is_warm = False
        self._times: dict[str, list[float]] = {
            "first token": [], "time per token": [], "latency": []
        }  # fmt: skip
        self._missed = dict.fromkeys(self._limits, 0)
        self._window = _Window()
        self._kv_peak = 0.0
        self._peak_running = self._peak_waiting = 0

    def result(self, *, is_complete: bool) -> ReplicaRun:
        """Run to the end and return the measurements.

        After a warm-up, the run continues until `load.measured` requests have finished. Unless
        `is_complete`, it ends early once more than 1% of that number have missed a limit.
        """
        core, load, window = self._core, self._load, self._window
        core.scheduler.gate.max_requests = load.cap
        while self._num_measured < load.measured and (is_complete or not self._broken()):
            self._submit_what_has_come()
            self._step()
        latencies = self._times["latency"]
        seconds = max(window.seconds, 1e-9)
        return ReplicaRun(
            times={name: _times(seen) for name, seen in self._times.items()},
            broken=self._broken(),
            mean_latency_s=sum(latencies) / len(latencies) if latencies else math.nan,
            kv_use=window.kv_s / seconds,
            kv_peak=self._kv_peak,
            rows=window.rows / max(window.steps, 1),
            rows_per_s=window.rows / seconds,
            peak_rows=core.totals.largest_rows,
            requests=window.requests_s / seconds,
            peak_running=self._peak_running,
            peak_waiting=self._peak_waiting,
            preemptions=core.preemptions,
            steps=core.totals.steps,
        )

    def _submit_what_has_come(self) -> None:
        core, times_s, arrivals_s = self._core, self._times_s, self._arrivals_s
        if times_s is None:
            while core.num_requests < self._load.cap + _BACKLOG:
                self._submit(core.now_s)
            return
        now_s = core.now_s if core.has_work else times_s[len(arrivals_s)]
        while len(arrivals_s) < len(times_s) and times_s[len(arrivals_s)] <= now_s:
            self._submit(times_s[len(arrivals_s)])

    def _submit(self, arrival_s: float) -> None:
        from cluster.lab.virtual.core import VirtualRequest

        core, load, index = self._core, self._load, len(self._arrivals_s)
        if not self._is_warm and index in _WARM_UP:
            self._is_warm = self._num_ended >= _TURNOVERS * core.num_requests
        self._is_warm |= index >= _WARM_UP.stop
        answer = self._answer(index)
        core.add(
            VirtualRequest(
                str(index), answer.prompt_ids, answer.scripts(forked=load.forked),
                max_tokens=answer.max_tokens, forked=load.forked, arrival_s=arrival_s,
            )
        )  # fmt: skip
        self._arrivals_s.append(arrival_s)

    def _answer(self, index: int) -> ReplayAnswer:
        return self._requests[index % len(self._requests)]

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
        for event in events:
            self._take(event)
        if self._is_warm:
            seconds = core.now_s - begin_s
            window.seconds += seconds
            window.kv_s += kv_share * seconds
            window.requests_s += core.num_requests * seconds
            window.rows += totals.rows - rows
            window.steps += 1

    def _take(self, event: CoreEvent) -> None:
        index = int(event.request_id)
        since_arrival_s = event.time_s - self._arrivals_s[index]
        if not event.is_end:
            self._first_tokens_s[index] = event.time_s
            self._note("first token", since_arrival_s)
            return
        answer = self._answer(index)
        path = tree_statistics(answer.tree, 0).decode_steps
        steps = path if self._load.forked else len(answer.flat)
        decoding_s = event.time_s - self._first_tokens_s.pop(index)
        self._note("time per token", decoding_s / max(steps - 1, 1))
        self._note("latency", since_arrival_s)
        self._num_ended += 1
        self._num_measured += self._is_warm

    def _note(self, name: str, seconds: float) -> None:
        if not self._is_warm:
            return
        self._times[name].append(seconds)
        if seconds > self._limits.get(name, math.inf):
            self._missed[name] += 1

    def _broken(self) -> tuple[str, ...]:
        """Return the limits that more than 1% of the requests missed, the most missed first."""
        broken = [
            name
            for name, missed in self._missed.items()
            if missed > _num_above(max(self._load.measured, len(self._times[name])))
        ]
        return tuple(sorted(broken, key=lambda name: -self._missed[name]))


def _num_above(number: int) -> int:
    """Return how many of the slowest requests lie above the 99th percentile."""
    return math.floor((1 - QUANTILE) * number + 1e-9)


def _times(seconds: Sequence[float]) -> Times:
    """Return median and 99th percentile; NaN for an empty sequence."""
    if not seconds:
        return Times(math.nan, math.nan)
    ordered = sorted(seconds)
    return Times(ordered[(len(ordered) - 1) // 2], ordered[-1 - _num_above(len(ordered))])
