"""How many replicas the present load asks for; plain values in, plain values out."""

from __future__ import annotations
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from cluster.config.autoscaling import AutoscalingConfig
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica carries: requests and threads alive, children held back, KV cache in use.

    `kv_use` is a share of its blocks, 0 to 1.
    """

    requests: float
    threads: float
    waiting_forks: float
    kv_use: float


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """All that is known of a model's load.

    `waiting_requests` have no replica yet. `default_threads` are expected of each of them as long
    as no request runs from which more is known. `running` counts the replicas that serve, `target`
    those that were last asked for; replicas that start have no report.
    """

    replicas: Sequence[ReplicaReport]
    waiting_requests: float
    default_threads: float
    running: int
    target: int


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What a decision leaves for the next one: since when more, or fewer, have been wanted."""

    over_since_s: float | None = None
    under_since_s: float | None = None
    # The highest wish since then: a short lull in the load takes no replica away.
    most_while_under: int = 0
    trend: LoadTrend = field(default_factory=LoadTrend)


def replicas_worth(load: ModelLoad, settings: AutoscalingConfig, target_threads: float) -> float:
    """The load, threads or KV cache, whichever is more, in replicas that carry their target.

    Waiting requests count with the threads that running ones have on average, and with as much
    KV cache as these take per thread.
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
    """The replicas to ask for now, within the configured bounds, and the state to decide on next.

    More are asked for once they have been wanted for `upscale_delay_s`, and while what has piled up
    would not be gone within `catch_up_s`; fewer once the remaining would have had
    `downscale_headroom` for `downscale_delay_s`, and never while a running replica has not
    reported. `target_threads` is the settings' value or its default.
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
    # A replica takes long to start, and what piles up meanwhile must not count as more load.
    growth = max(1, math.ceil(load.running * settings.max_growth))
    wanted = min(_bounded(worth, lowest, highest), max(growth, lowest))
    # The fewer threads a replica has, the faster its steps, so that few replicas seem enough where
    # there are many: take some away, and look again.
    shrunk = math.ceil(load.running / settings.max_growth) if worth > 0 else 0
    enough = max(_bounded(worth / (1 - settings.downscale_headroom), lowest, highest), shrunk)
    if wanted > load.target:
        since = now_s if state.over_since_s is None else state.over_since_s
        # A full replica is worth several at their targets, also when it works off what came before
        # it did: that is no load that goes on.
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
    # Sums of floating-point shares may exceed a whole number by a hair.
    return min(max(math.ceil(worth - 1e-9), lowest), highest)


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
