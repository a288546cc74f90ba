"""A load that triples and falls back, and the autoscaler's own decisions on it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import simpy

from benchmarks.cluster_simulation.arrivals import stepped_times
from benchmarks.cluster_simulation.choosers import build_choosers
from benchmarks.cluster_simulation.cluster import ClusterSettings, SimCluster
from benchmarks.cluster_simulation.replica import SimReplica
from benchmarks.cluster_simulation.scenarios import RecordedData
from benchmarks.cluster_simulation.step_times import ReplicaModel
from benchmarks.cluster_simulation.threads import SimRequest
from cluster.autoscaling import ModelLoad, ReplicaReport, ScalingState, decide
from cluster.config.autoscaling import DEFAULT_TARGET_SHARE, AutoscalingConfig

START_REPLICAS = 4
LOAD_BEFORE = 0.7
"""Of what the first replicas can do."""
STEP = 3.0
START_DELAY_S = 60.0
"""From asking for a replica to its first request: process, weights, warm-up."""
DECISION_PERIOD_S = 5.0
DEFAULT_THREADS = 4.0


@dataclass(slots=True)
class ScalingRun:
    """Figures over time, one at each decision; latencies by when the requests came."""

    times_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    latency_times_s: list[float] = field(default_factory=list)
    latency_p50_s: list[float] = field(default_factory=list)
    latency_p99_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    replica_seconds: float = 0.0


class ScalingCluster(SimCluster):
    """A cluster whose replicas follow `cluster.autoscaling.decide`.

    A replica that is let go gets no more requests and ends what it has.
    """

    def __init__(
        self,
        model: ReplicaModel,
        config: AutoscalingConfig,
        stages: list[tuple[float, float]],
        seed: int,
    ) -> None:
        settings = ClusterSettings(START_REPLICAS, model)
        super().__init__(settings, build_choosers("threads", 1, seed), seed)
        self.scaling = ScalingRun()
        self._config = config
        self._stages = stages
        self._target_threads = config.target_threads or DEFAULT_TARGET_SHARE * model.max_threads
        self._wanted = START_REPLICAS
        self._starting = 0
        self._serving = dict(self.replicas)
        self.env.process(self._decisions())

    def _decisions(self) -> Generator[simpy.Event, Any, None]:
        state = ScalingState()
        while True:
            self._wanted, state = decide(
                self._load(), self._config, self._target_threads, state, self.env.now
            )
            missing = self._wanted - len(self._serving) - self._starting
            for _ in range(missing):
                self._starting += 1
                self.env.process(self._start())
            # Of those that start, too many are given up when they are ready.
            if len(self._serving) > self._wanted:
                self._let_go(len(self._serving) - self._wanted)
            self._take_down()
            yield self.env.timeout(DECISION_PERIOD_S)

    def _load(self) -> ModelLoad:
        reports = [_report(replica) for replica in self._serving.values()]
        return ModelLoad(
            reports, self.num_queued, DEFAULT_THREADS, len(self._serving), self._wanted
        )

    def _start(self) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(START_DELAY_S)
        self._starting -= 1
        if len(self._serving) >= self._wanted:
            return
        replica = self.add_replica()
        self._serving[replica.replica_id] = replica
        self.replicas_changed(self._serving)
        self.send_queued()

    def _let_go(self, number: int) -> None:
        """Take the replicas with the fewest requests out."""
        idle_first = sorted(self._serving.values(), key=lambda replica: replica.num_requests)
        for replica in idle_first[: min(number, len(idle_first) - 1)]:
            del self._serving[replica.replica_id]
        self.replicas_changed(self._serving)

    def _take_down(self) -> None:
        scaling, now_s = self.scaling, self.env.now
        begin_s, rate = 0.0, 0.0
        for seconds, stage_rate in self._stages:
            if begin_s <= now_s < begin_s + seconds:
                rate = stage_rate
            begin_s += seconds
        # Those that still end their requests cost too.
        engines = [replica.engine for replica in self.replicas.values()]
        up = sum(
            name in self._serving or bool(replica.engine.families)
            for name, replica in self.replicas.items()
        )
        scaling.times_s.append(now_s)
        scaling.rates.append(rate)
        scaling.wanted.append(self._wanted)
        scaling.running.append(len(self._serving))
        scaling.threads.append(
            sum(engine.num_threads + engine.num_waiting_forks for engine in engines)
        )
        scaling.queued.append(self.num_queued)
        scaling.replica_seconds += (up + self._starting) * DECISION_PERIOD_S


def _report(replica: SimReplica) -> ReplicaReport:
    load = replica.load()
    return ReplicaReport(
        load.requests, load.threads, load.waiting_forks, 1.0 - load.free_blocks / load.blocks
    )


def simulate_scaling(
    data: RecordedData,
    model: ReplicaModel,
    *,
    stage_s: float = 300.0,
    seed: int = 0,
    config: AutoscalingConfig | None = None,
) -> ScalingRun:
    """Serve a load, three times as much, and the first again; each for `stage_s`."""
    config = config or AutoscalingConfig(min_replicas=2, max_replicas=32)
    rate = data.capacity(model) * START_REPLICAS * LOAD_BEFORE
    stages = [(stage_s, rate), (stage_s, STEP * rate), (stage_s, rate)]
    workload = data.workload(seed)
    times = stepped_times(data.arrivals, stages, seed)
    # Prompts and trees in the workload's own order, at the times of the stages.
    drawn = workload.requests(len(times), len(times) / times[-1])
    requests: list[SimRequest] = [
        replace(each, arrival_s=at_s) for each, at_s in zip(drawn, times, strict=True)
    ]
    cluster = ScalingCluster(model, config, stages, seed)
    run = cluster.run(requests)
    scaling = cluster.scaling
    scaling.num_requests = len(run.outcomes)
    bin_s = stage_s / 20
    came = np.array([outcome.request.arrival_s for outcome in run.outcomes])
    ended = np.array([outcome.end_s for outcome in run.outcomes], dtype=float)
    for begin_s in np.arange(0.0, 3 * stage_s, bin_s):
        chosen = (came >= begin_s) & (came < begin_s + bin_s)
        if chosen.any():
            took = (ended - came)[chosen]
            scaling.latency_times_s.append(float(begin_s + bin_s / 2))
            scaling.latency_p50_s.append(float(np.quantile(took, 0.5)))
            scaling.latency_p99_s.append(float(np.quantile(took, 0.99)))
    return scaling
