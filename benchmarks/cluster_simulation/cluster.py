"""A simulated cluster: arrivals, gateways with router and queue, replicas, late reports."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from apar_core.scheduler.fork_policy import PolicyName, build_policy
from benchmarks.cluster_simulation.choosers import Chooser
from benchmarks.cluster_simulation.replica import SimReplica
from benchmarks.cluster_simulation.step_times import ReplicaModel
from benchmarks.cluster_simulation.threads import Outcome, SimRequest
from deployments.wire.load import ReplicaLoad

REPORT_DELAY_S = (0.07, 0.19)
"""How long a report travels; with a period of 0.1 s its age is 0.18 s at the median, 0.29 at most.

Measured through Ray Serve's controller: DESIGN.md section 6, 0.17 s and 0.29 s.
"""
SAMPLE_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Replicas, the age of their reports, and how they fork.

    One replica of `one_slow_of` (none with 0) takes `slowness` times as long. Requests come to the
    gateways by chance; none sees what the others send, but in the replicas' reports.
    """

    replicas: int
    model: ReplicaModel
    report_period_s: float = 0.1
    one_slow_of: int = 0
    gateways: int = 1
    slowness: float = 2.0
    fork_policy: PolicyName = "eager"
    token_time_s: float = 0.05

    @property
    def speed(self) -> float:
        """All replicas together, in replicas of full speed."""
        slow = self.replicas // self.one_slow_of if self.one_slow_of else 0
        return self.replicas - slow + slow / self.slowness


@dataclass(slots=True)
class Sample:
    """The cluster at one moment: threads of each replica, requests that wait at the gateway."""

    at_s: float
    threads: list[int]
    requests: int
    queued: int


@dataclass(slots=True)
class Run:
    """What one simulation has brought."""

    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    preemptions: int = 0
    step_weights: Counter[float] = field(default_factory=Counter)


@dataclass(slots=True)
class SimGateway:
    """One process that takes requests: who chooses for it, and what waits there, oldest first."""

    chooser: Chooser
    queue: deque[Outcome] = field(default_factory=deque)


class SimCluster:
    """Drives a chooser a gateway with requests; `run` returns when every request has ended."""

    def __init__(self, settings: ClusterSettings, choosers: Sequence[Chooser], seed: int) -> None:
        self.env = simpy.Environment()
        self.settings = settings
        self.gateways = [SimGateway(chooser) for chooser in choosers]
        self.replicas: dict[str, SimReplica] = {}
        self.result = Run()
        self._random = random.Random(seed)
        self._num_ended = 0
        for number in range(settings.replicas):
            one_of = settings.one_slow_of
            slow = one_of > 0 and number % one_of == one_of - 1
            self.add_replica(settings.slowness if slow else 1.0)
        self.replicas_changed(self.replicas)

    def replicas_changed(self, serving: Mapping[str, SimReplica]) -> None:
        """Tell every gateway which replicas take requests now."""
        for gateway in self.gateways:
            gateway.chooser.replicas_changed(serving)

    @property
    def num_queued(self) -> int:
        """Requests that wait at the gateways."""
        return sum(len(gateway.queue) for gateway in self.gateways)

    def add_replica(self, slowness: float = 1.0) -> SimReplica:
        """Start a replica; the gateways are yet to be told."""
        settings = self.settings
        replica = SimReplica(
            self.env,
            f"replica-{len(self.replicas)}",
            settings.model,
            build_policy(settings.fork_policy, settings.token_time_s),
            slowness=slowness,
        )
        self.replicas[replica.replica_id] = replica
        self.env.process(self._reports(replica))
        return replica

    def run(self, requests: Sequence[SimRequest]) -> Run:
        """Serve the requests, which come in order of their arrival."""
        self.env.process(self._arrivals(requests))
        ended = self.env.process(self._samples(len(requests)))
        self.env.run(until=ended)
        for replica in self.replicas.values():
            self.result.preemptions += replica.engine.preemptions
            self.result.step_weights.update(replica.step_weights)
        return self.result

    def _arrivals(self, requests: Sequence[SimRequest]) -> Generator[simpy.Event, Any, None]:
        for request in requests:
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            outcome = Outcome(request)
            self.result.outcomes.append(outcome)
            gateway = self._random.choice(self.gateways)
            if gateway.queue or not self._send(gateway, outcome):
                gateway.queue.append(outcome)

    def _send(self, gateway: SimGateway, outcome: Outcome) -> bool:
        """Give a request to a replica; false if the gateway finds none below its cap."""
        now_s = self.env.now
        replica_id = gateway.chooser.choose(outcome.request, now_s)
        if replica_id is None:
            return False
        replica = self.replicas[replica_id]
        if replica.num_requests >= replica.model.max_requests:
            # Filled by another gateway: the replica refuses.
            return False
        gateway.chooser.sent(outcome.request, replica_id, now_s)
        outcome.sent_s = now_s
        replica.submit(outcome, lambda ended: self._ended(gateway, ended))
        return True

    def _ended(self, gateway: SimGateway, outcome: Outcome) -> None:
        self._num_ended += 1
        gateway.chooser.ended(outcome, self.env.now)
        self.send_queued()

    def send_queued(self) -> None:
        """Send what waits, oldest first, as far as there is room."""
        for gateway in self.gateways:
            while gateway.queue and self._send(gateway, gateway.queue[0]):
                gateway.queue.popleft()

    def _reports(self, replica: SimReplica) -> Generator[simpy.Event, Any, None]:
        period_s = self.settings.report_period_s
        yield self.env.timeout(self._random.uniform(0.0, period_s))
        while True:
            load = replica.load()
            arrival = self.env.timeout(self._random.uniform(*REPORT_DELAY_S), value=load)
            assert arrival.callbacks is not None
            arrival.callbacks.append(lambda event: self._reported(replica.replica_id, event.value))
            yield self.env.timeout(period_s)

    def _reported(self, replica_id: str, load: ReplicaLoad) -> None:
        for gateway in self.gateways:
            gateway.chooser.reported(replica_id, load, self.env.now)
        if self.num_queued:
            self.send_queued()

    def _samples(self, num_requests: int) -> Generator[simpy.Event, Any, None]:
        while self._num_ended < num_requests:
            engines = [replica.engine for replica in self.replicas.values()]
            self.result.samples.append(
                Sample(
                    self.env.now,
                    [engine.num_threads + engine.num_waiting_forks for engine in engines],
                    sum(len(engine.families) for engine in engines),
                    self.num_queued,
                )
            )
            yield self.env.timeout(SAMPLE_PERIOD_S)


def saturated_rate(model: ReplicaModel, requests: Sequence[SimRequest]) -> float:
    """Requests a second that one replica ends with as many at once as its cap allows."""
    env = simpy.Environment()
    replica = SimReplica(env, "replica", model, build_policy("eager", 0.0))
    waiting = deque(Outcome(request) for request in requests)
    ends: list[float] = []

    def next_one(ended: Outcome | None) -> None:
        if ended is not None:
            ends.append(env.now)
        if waiting:
            replica.submit(waiting.popleft(), next_one)

    for _ in range(model.max_requests):
        next_one(None)
    env.run()
    # Neither the first wave, which starts all at once, nor the last, which runs alone.
    first, last = np.quantile(ends, [0.3, 0.8])
    return float(0.5 * len(ends) / (last - first))
