"""Number of replicas that the current load needs.

`decide` is a pure function: load, settings and the previous state in, decision and next state out.
`deployments/app/autoscaling.py` calls it in the Serve controller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deployments.config.autoscaling import AutoscalingConfig

if TYPE_CHECKING:
    from apar_core.scheduler.core_state import CoreState

# Window of the load trend, and the shortest time from which a trend is computed.
_TREND_S = 15.0
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Load of one replica.

    `requests` and `threads` are alive, `waiting_forks` are children held back, and `kv_use` is the
    share of KV cache blocks in use, 0 to 1.
    """

    requests: float
    threads: float
    waiting_forks: float
    kv_use: float

    @classmethod
    def of(cls, requests: int, state: CoreState) -> ReplicaReport:
        """Return the report of a replica with `requests` calls inside and this engine state."""
        return cls(
            requests=float(requests),
            threads=float(state.threads),
            waiting_forks=float(state.deferred_threads),
            kv_use=state.kv_use,
        )


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Load of a model.

    `waiting_requests` have no replica yet. Each is expected to have as many threads as a running
    request on average, or `default_threads` if none runs. `running` counts the replicas that serve,
    `target` those last asked for. Starting replicas have no report.
    """

    replicas: Sequence[ReplicaReport]
    waiting_requests: float
    default_threads: float
    running: int
    target: int


@dataclass(frozen=True, slots=True)
class LoadTrend:
    """Requests of a model over the last seconds, running or waiting, at a constant replica count.

    `seen` holds (time, requests), oldest first. `settling` is set after replicas were added, until
    their effect can be measured.
    """

    running: int = 0
    seen: tuple[tuple[float, float], ...] = ()
    settling: bool = False

    def after(self, now_s: float, held: float, running: int) -> LoadTrend:
        """Return the trend with the current number of requests added."""
        same = running == self.running
        kept = tuple(each for each in self.seen if same and each[0] >= now_s - _TREND_S)
        seen = (*kept, (now_s, held))
        settling = self.settling if same else 0 < self.running < running
        return LoadTrend(running, seen, settling)

    def clears(self, worth: float, within_s: float) -> bool:
        """Whether the backlog will be gone within `within_s` if the trend continues.

        `worth` is the load in replicas at their target.
        """
        if worth <= self.running:
            return False
        (began_s, before), (now_s, held) = self.seen[0], self.seen[-1]
        if now_s - began_s < _SETTLE_S:
            return self.settling
        falling_per_s = (before - held) / (now_s - began_s)
        return held * (1 - self.running / worth) <= falling_per_s * within_s


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State between two decisions: since when more, or fewer, replicas have been wanted.

    `most_while_under` is the highest number wanted since `under_since_s`: a short lull removes no
    replica.
    """

    over_since_s: float | None = None
    under_since_s: float | None = None
    most_while_under: int = 0
    trend: LoadTrend = field(default_factory=LoadTrend)


def replicas_worth(load: ModelLoad, settings: AutoscalingConfig, target_threads: float) -> float:
    """Convert the load to replicas at their target; the larger of threads and KV cache counts.

    A waiting request counts with the mean threads of the running ones, and with the same KV cache
    per thread.
    """
    requests = sum(report.requests for report in load.replicas)
    alive = sum(report.threads + report.waiting_forks for report in load.replicas)
    each = alive / requests if requests > 0 else load.default_threads
    threads = alive + load.waiting_requests * each
    kv_use = sum(report.kv_use for report in load.replicas)
    if alive > 0:
        kv_use *= threads / alive
    return max(threads / target_threads, kv_use / settings.target_kv_use)


def decide(
    load: ModelLoad,
    settings: AutoscalingConfig,
    target_threads: float,
    state: ScalingState,
    now_s: float,
) -> tuple[int, ScalingState]:
    """Return the replicas to ask for, within the configured bounds, and the next state.

    Scale up after more have been wanted for `upscale_delay_s`, unless the backlog will be gone
    within `catch_up_s`. Scale down after fewer would have left `downscale_headroom` for
    `downscale_delay_s`, and never while a running replica has not reported. `target_threads` is
    the settings' value or its default.
    """
    held = sum(report.requests for report in load.replicas) + load.waiting_requests
    trend = state.trend.after(now_s, held, load.running)
    decision, after = _decide(load, settings, target_threads, replace(state, trend=trend), now_s)
    return decision, replace(after, trend=trend)


def _decide(
    load: ModelLoad,
    settings: AutoscalingConfig,
    target_threads: float,
    state: ScalingState,
    now_s: float,
) -> tuple[int, ScalingState]:
    worth = replicas_worth(load, settings, target_threads)
    lowest, highest = settings.min_replicas, settings.max_replicas
    # Starting a replica takes long; the backlog of that time must not count as additional load.
    growth = max(1, math.ceil(load.running * settings.max_growth))
    wanted = min(_bounded(worth, lowest, highest), max(growth, lowest))
    # With many replicas each has few threads and short steps, so that few replicas seem enough.
    # Remove some, then measure again.
    shrunk = math.ceil(load.running / settings.max_growth) if worth > 0 else 0
    enough = max(_bounded(worth / (1 - settings.downscale_headroom), lowest, highest), shrunk)
    if wanted > load.target:
        since = now_s if state.over_since_s is None else state.over_since_s
        # A full replica is worth several at their target, even while it only works off a backlog.
        catches_up = settings.catch_up_s > 0 and state.trend.clears(worth, settings.catch_up_s)
        long_enough = now_s - since >= settings.upscale_delay_s
        if load.target == 0 or (long_enough and not catches_up):
            return wanted, ScalingState()
        return load.target, ScalingState(over_since_s=since)
    if enough < load.target and len(load.replicas) >= load.running:
        since = now_s if state.under_since_s is None else state.under_since_s
        most = max(enough, state.most_while_under)
        if now_s - since >= settings.downscale_delay_s:
            return most, ScalingState()
        return load.target, ScalingState(under_since_s=since, most_while_under=most)
    return min(max(load.target, lowest), highest), ScalingState()


def _bounded(worth: float, lowest: int, highest: int) -> int:
    # Sums of floating-point shares may exceed a whole number by a rounding error.
    return min(max(math.ceil(worth - 1e-9), lowest), highest)
