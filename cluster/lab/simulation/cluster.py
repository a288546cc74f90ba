"""A cluster of virtual engine cores in one event loop.

The product's own code makes all decisions: the router, and in each core the scheduler, the fork
policy and the KV-cache manager. So it does for the autoscaler and the limits of a `ModelConfig` and
a `RetryConfig`. The rest is modeled: arrivals, the gateway's queue (one key, so first in, first
out), the delay of load reports, and loss and start of replicas.

All times are virtual. An entry of the event heap is a time and a call. A core's next step is such a
call, and its output is delivered at the end of the step. Until then a core handles no new request,
no report and not its own death, as a real engine core does.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean

from apar_core.journal import Journal
from cluster.lab.simulation.workload import PromptTokens, SimRequest
from cluster.lab.virtual.core import CoreEvent, VirtualCore, VirtualCores
from cluster.lab.virtual.engine import VirtualSpec
from cluster.lab.virtual.executor import StepRecord
from cluster.lab.virtual.reader import ListReader, Reader
from deployments.autoscaling import ModelLoad, ReplicaReport, ScalingState, decide
from deployments.config.model import ModelConfig
from deployments.config.retries import MAX_DEATHS, RetryConfig, pause_before_retry_s
from deployments.config.routing import RoutingSettings
from deployments.replica.replica import LoadReporter
from deployments.routing.shared_router import SharedRouter
from deployments.wire.load import ReplicaLoad
from deployments.wire.response import ResponseEnd

REPORT_DELAY_S = (0.07, 0.19)
"""Delay of a load report through Ray Serve's controller, uniformly distributed.

The bounds reproduce a measurement with a period of 0.1 s (DESIGN.md, section 6): when used, reports
are 0.17 s old at the median and 0.29 s at most.
"""
START_S = 60.0
"""Time from asking for a replica to its first request: process, weights, warm-up."""
DECISION_PERIOD_S = 1.0
"""Period of the autoscaler's decisions, and of the reports that it averages."""
MEAN_OVER_S = 3.0
SAMPLE_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Replicas of one model, their faults, and the age of their reports.

    spec: the engine of each replica.
    model: limits on requests, the queue's limits, and the autoscaler's bounds and targets.
    replicas: replicas at the start.
    slow: cost factors of slow replicas, by replica number.
    kills: times at which the longest-serving replica dies. Ray Serve replaces it after `start_s`.
    joins: times at which another replica is ready.
    gateways: number of gateways. Each sees the requests of the others only in load reports.
    """

    spec: VirtualSpec
    model: ModelConfig
    replicas: int
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    retries: RetryConfig = field(default_factory=RetryConfig)
    slow: Mapping[int, float] = field(default_factory=dict)
    kills: tuple[float, ...] = ()
    joins: tuple[float, ...] = ()
    gateways: int = 1
    start_s: float = START_S


@dataclass(slots=True)
class Outcome:
    """Outcome of a request; times in seconds since the start, None until reached.

    reader: has the times of its certain text, on the replica that ended it.
    error: why the request was refused or given up.
    """

    request: SimRequest
    sent_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    replica_id: str | None = None
    reader: Reader | None = None
    cached_tokens: int = 0
    generated_tokens: int = 0
    retries: int = 0
    deaths: int = 0
    error: str | None = None

    @property
    def critical_tokens(self) -> int:
        """Steps that the answer takes if no thread ever waits."""
        return self.response_end().critical_path_tokens

    def response_end(self) -> ResponseEnd:
        """Return the cost that a replica reports for the answer."""
        request, reader = self.request, self.reader
        if not isinstance(reader, ListReader):
            return request.answer.end(request.prompt_tokens, forked=request.forked)
        counts = reader.statistics(request.prompt_tokens)
        return ResponseEnd(
            prompt_tokens=request.prompt_tokens,
            generated_tokens=self.generated_tokens,
            threads=counts.threads,
            forks=counts.forks,
            critical_path_tokens=counts.decode_steps,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the cluster at one time: threads of each serving replica, and totals.

    up: replicas that serve, drain or start. wanted: replicas that the autoscaler asks for.
    """

    at_s: float
    threads: tuple[int, ...]
    requests: int
    queued: int
    up: int
    wanted: int


@dataclass(slots=True)
class ClusterRun:
    """Results of one simulation. `step_rows` counts rows by the device time of their step."""

    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    preemptions: int = 0
    forks: int = 0
    forks_delayed: int = 0
    steps: int = 0
    rows: int = 0
    step_rows: Counter[float] = field(default_factory=Counter)
    replica_s: float = 0.0
    end_s: float = 0.0


class Replica:
    """A core, its requests, and its load reports."""

    def __init__(self, replica_id: str, core: VirtualCore, step_rows: Counter[float]) -> None:
        self.replica_id = replica_id
        self.core = core
        self.is_dead = False
        self.is_draining = False
        self.outcomes: dict[str, tuple[Gateway, Outcome]] = {}
        self.is_stepping = False
        # Calls to make between the current step and the next.
        self.between_steps: list[Callable[[], None]] = []
        self.autoscaling_reports: deque[ReplicaReport] = deque(
            maxlen=round(MEAN_OVER_S / DECISION_PERIOD_S)
        )
        self._reporter = LoadReporter(core.spec.block_size)
        self._step_rows = step_rows
        core.device.on_step = self._note

    def load(self, now_s: float) -> ReplicaLoad:
        """Return a load report, as the product's replica does."""
        return self._reporter.report(self.core.state(), len(self.outcomes), now_s)

    @property
    def num_threads(self) -> int:
        """Running and waiting threads, and deferred forks."""
        state = self.core.state()
        return state.threads + state.deferred_threads

    def autoscaling_report(self) -> ReplicaReport:
        """Return the mean of the last reports to the autoscaler, the current one included."""
        self.autoscaling_reports.append(ReplicaReport.of(len(self.outcomes), self.core.state()))
        reports = self.autoscaling_reports
        return ReplicaReport(
            fmean(each.requests for each in reports),
            fmean(each.threads for each in reports),
            fmean(each.waiting_forks for each in reports),
            fmean(each.kv_use for each in reports),
        )

    def _note(self, record: StepRecord) -> None:
        self._step_rows[round(record.end_s - record.begin_s, 4)] += record.batch.rows


class Gateway:
    """A gateway: its router, its queue, and admitted requests that no replica has room for yet."""

    def __init__(self, router: SharedRouter) -> None:
        self.router = router
        self.queue: deque[Outcome] = deque()
        self.unplaced: deque[tuple[Outcome, float]] = deque()
        self.num_running = 0


class Cluster:
    """Serves requests on virtual cores; `run` returns when all of them have an outcome."""

    def __init__(self, settings: ClusterSettings, seed: int = 0) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.result = ClusterRun()
        self.replicas: dict[str, Replica] = {}
        self.gateways = [
            Gateway(SharedRouter(settings.routing, seed=1000 * seed + number, now=self._clock))
            for number in range(settings.gateways)
        ]
        self._random = random.Random(seed)
        self._cores = VirtualCores(settings.spec)
        self._prompts = PromptTokens()
        # Tokens that lost requests have generated, until another replica continues them.
        self._journals: dict[str, Journal] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._num_replicas = 0
        self._num_starting = 0
        self._num_open = 0
        self._wanted = settings.replicas
        self._scaling = ScalingState()
        for number in range(self._wanted):
            self._add_replica(settings.slow.get(number, 1.0))

    def run(self, requests: Sequence[SimRequest]) -> ClusterRun:
        """Serve requests, which are given in order of arrival."""
        settings = self.settings
        self._num_open = len(requests)
        coming = iter(requests)

        def arrive(request: SimRequest) -> None:
            if (following := next(coming, None)) is not None:
                self._at(following.arrival_s, partial(arrive, following))
            self._arrive(request)

        if requests:
            first = next(coming)
            self._at(first.arrival_s, partial(arrive, first))
        for at_s in settings.kills:
            self._at(at_s, self._kill)
        for at_s in settings.joins:
            self._at(at_s, self._join)
        self._at(0.0, self._sample)
        if settings.model.autoscaling is not None:
            self._at(0.0, self._decide)
        while self._num_open:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        self.result.end_s = self.now_s
        for replica in self.replicas.values():
            self._count(replica)
        return self.result

    def _clock(self) -> float:
        return self.now_s

    def _at(self, time_s: float, call: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, call))

    # Requests at the gateways.

    def _arrive(self, request: SimRequest) -> None:
        outcome = Outcome(request)
        self.result.outcomes.append(outcome)
        gateway = self._random.choice(self.gateways)
        if not gateway.queue and gateway.num_running < self._capacity:
            gateway.num_running += 1
            self._place(gateway, outcome)
        elif len(gateway.queue) >= self.settings.model.max_queued_requests:
            self._give_up(outcome, "queue full")
        else:
            gateway.queue.append(outcome)
            self._at(self.now_s + self.settings.model.max_queue_s, partial(self._expire, gateway))

    def _expire(self, gateway: Gateway) -> None:
        """Refuse the requests that have waited too long; the queue is in the order of arrival."""
        limit_s = self.settings.model.max_queue_s
        while gateway.queue and gateway.queue[0].request.arrival_s + limit_s <= self.now_s:
            self._give_up(gateway.queue.popleft(), "queue timeout")

    @property
    def _capacity(self) -> int:
        return len(self._serving) * self.settings.model.requests_per_replica

    @property
    def _serving(self) -> dict[str, Replica]:
        return {name: each for name, each in self.replicas.items() if not each.is_draining}

    def _place(self, gateway: Gateway, outcome: Outcome) -> None:
        """Send a request to a replica, or let it wait for one with room."""
        if not self._send(gateway, outcome):
            deadline_s = self.now_s + self.settings.retries.replica_wait_s
            gateway.unplaced.append((outcome, deadline_s))

    def _send(self, gateway: Gateway, outcome: Outcome) -> bool:
        request, cap = outcome.request, self.settings.model.requests_per_replica
        refused: set[str] = set()
        while True:
            chosen = gateway.router.assign(request.request_id, request.hint, refused)
            if chosen is None or chosen in refused:
                break
            if len(self.replicas[chosen].outcomes) < cap:
                self._submit(gateway, outcome, self.replicas[chosen])
                return True
            # Filled by another gateway: the replica refuses.
            refused.add(chosen)
        gateway.router.released(request.request_id)
        return False

    def _submit(self, gateway: Gateway, outcome: Outcome, replica: Replica) -> None:
        request = outcome.request
        outcome.replica_id = replica.replica_id
        if outcome.sent_s is None:
            outcome.sent_s = self.now_s
        replica.outcomes[request.request_id] = (gateway, outcome)
        core_request = request.virtual_request(self._prompts.of(request), self.now_s)
        journal = self._journals.pop(request.request_id, ())
        replica.core.add(core_request, journal)
        self._wake(replica)

    def _advance(self) -> None:
        """Place waiting requests, oldest first, while there is room."""
        for gateway in self.gateways:
            while gateway.unplaced:
                outcome, deadline_s = gateway.unplaced[0]
                if not self._send(gateway, outcome):
                    if deadline_s > self.now_s:
                        break
                    self._leave(gateway, outcome, "no replica")
                gateway.unplaced.popleft()
            while gateway.queue and gateway.num_running < self._capacity:
                gateway.num_running += 1
                self._place(gateway, gateway.queue.popleft())

    def _leave(self, gateway: Gateway, outcome: Outcome, error: str | None = None) -> None:
        """End a request that has left the queue, served or failed."""
        gateway.num_running -= 1
        request = outcome.request
        end = outcome.response_end() if error is None else None
        gateway.router.ended(request.request_id, end)
        self._journals.pop(request.request_id, None)
        if error is not None:
            self._give_up(outcome, error)
            return
        outcome.end_s = self.now_s
        self._num_open -= 1

    def _give_up(self, outcome: Outcome, error: str) -> None:
        outcome.error = error
        self._num_open -= 1

    # Steps of the replicas.

    def _wake(self, replica: Replica) -> None:
        if not replica.is_stepping and replica.core.has_work:
            replica.is_stepping = True
            self._at(replica.core.now_s, partial(self._step, replica))

    def _step(self, replica: Replica) -> None:
        """Run a step; its events are delivered at its end."""
        calls, replica.between_steps = replica.between_steps, []
        for call in calls:
            call()
        replica.is_stepping = False
        if replica.is_dead:
            return
        events = replica.core.step()
        if events:
            self._at(replica.core.now_s, partial(self._deliver, replica, events))
        self._wake(replica)

    def _between_steps(self, replica: Replica, call: Callable[[], None]) -> None:
        """Make a call after the current step, or at once if none is running."""
        if replica.is_stepping:
            replica.between_steps.append(call)
        else:
            call()

    def _deliver(self, replica: Replica, events: Sequence[CoreEvent]) -> None:
        for event in events:
            gateway, outcome = replica.outcomes[event.request_id]
            if not event.is_end:
                outcome.first_token_s = self.now_s
                outcome.cached_tokens = event.cached_tokens
                continue
            outcome.generated_tokens = event.generated_tokens
            outcome.reader = event.reader
            del replica.outcomes[event.request_id]
            self._leave(gateway, outcome)
        if any(event.is_end for event in events):
            if replica.is_draining and not replica.outcomes:
                self._remove(replica)
            self._advance()

    # Replicas and their reports.

    def _add_replica(self, slowness: float = 1.0) -> None:
        costs = self.settings.spec.costs
        core = self._cores.build(
            costs=costs if slowness == 1.0 else costs.slower(slowness), start_s=self.now_s
        )
        replica = Replica(f"replica-{self._num_replicas}", core, self.result.step_rows)
        self._num_replicas += 1
        self.replicas[replica.replica_id] = replica
        period_s = self.settings.routing.report_period_s
        self._at(self.now_s + self._random.uniform(0.0, period_s), partial(self._report, replica))
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        caps = dict.fromkeys(self._serving, self.settings.model.requests_per_replica)
        for gateway in self.gateways:
            gateway.router.replicas_changed(self, caps)
        self._advance()

    def _report(self, replica: Replica) -> None:
        if not replica.is_dead:
            self._between_steps(replica, partial(self._send_report, replica))

    def _send_report(self, replica: Replica) -> None:
        load = replica.load(self.now_s)
        delay_s = self._random.uniform(*REPORT_DELAY_S)
        self._at(self.now_s + delay_s, partial(self._reported, replica.replica_id, load))
        self._at(self.now_s + self.settings.routing.report_period_s, partial(self._report, replica))

    def _reported(self, replica_id: str, load: ReplicaLoad) -> None:
        for gateway in self.gateways:
            gateway.router.reported(replica_id, load)
            if gateway.unplaced:
                self._advance()

    def _join(self) -> None:
        self._wanted += 1
        self._add_replica()

    def _kill(self) -> None:
        if replica := next(iter(self._serving.values()), None):
            self._between_steps(replica, partial(self._die, replica))

    def _die(self, replica: Replica) -> None:
        if replica.is_dead:
            return
        for gateway in self.gateways:
            gateway.router.died(replica.replica_id)
        self._remove(replica)
        for request_id, (gateway, outcome) in replica.outcomes.items():
            self._lose(replica, gateway, outcome, request_id)
        self._num_starting += 1
        self._at(self.now_s + self.settings.start_s, self._start)

    def _lose(self, replica: Replica, gateway: Gateway, outcome: Outcome, request_id: str) -> None:
        """Retry a request of a replica that has died, as the relay does."""
        retries = self.settings.retries
        gateway.router.released(request_id)
        outcome.retries += 1
        outcome.deaths += 1
        if outcome.deaths >= MAX_DEATHS or outcome.retries > retries.max_retries:
            self._leave(gateway, outcome, "engines died")
            return
        if outcome.first_token_s is not None:
            if not retries.continue_streams:
                self._leave(gateway, outcome, "stream lost")
                return
            self._journals[request_id] = replica.core.journal(request_id)
        pause_s = pause_before_retry_s(outcome.retries)
        self._at(self.now_s + pause_s, partial(self._place, gateway, outcome))

    def _start(self) -> None:
        """Add a replica that has started, unless it is no longer wanted."""
        self._num_starting -= 1
        if len(self._serving) < self._wanted:
            self._add_replica()

    def _remove(self, replica: Replica) -> None:
        replica.is_dead = True
        del self.replicas[replica.replica_id]
        self._count(replica)
        self._replicas_changed()

    def _count(self, replica: Replica) -> None:
        core, result = replica.core, self.result
        counters = core.scheduler.admission.counters
        result.preemptions += core.preemptions
        result.forks += core.num_forks
        result.forks_delayed += sum(counters.delayed.values())
        result.steps += core.totals.steps
        result.rows += core.totals.rows

    # The autoscaler.

    def _decide(self) -> None:
        model, serving = self.settings.model, self._serving
        assert model.autoscaling is not None
        waiting = sum(len(each.queue) + len(each.unplaced) for each in self.gateways)
        load = ModelLoad(
            replicas=[replica.autoscaling_report() for replica in serving.values()],
            waiting_requests=waiting,
            default_threads=model.threads_per_request,
            running=len(serving),
            target=self._wanted,
        )
        self._wanted, self._scaling = decide(
            load, model.autoscaling, model.target_threads, self._scaling, self.now_s
        )
        for _ in range(self._wanted - len(serving) - self._num_starting):
            self._num_starting += 1
            self._at(self.now_s + self.settings.start_s, self._start)
        # The newest replicas drain first.
        surplus = max(0, len(serving) - max(self._wanted, 1))
        for replica in list(reversed(serving.values()))[:surplus]:
            replica.is_draining = True
            if not replica.outcomes:
                self._remove(replica)
        if surplus:
            self._replicas_changed()
        self._at(self.now_s + DECISION_PERIOD_S, self._decide)

    def _sample(self) -> None:
        serving = self._serving
        up = len(self.replicas) + self._num_starting
        self.result.samples.append(
            Sample(
                self.now_s,
                tuple(replica.num_threads for replica in serving.values()),
                sum(len(replica.outcomes) for replica in self.replicas.values()),
                sum(len(each.queue) + len(each.unplaced) for each in self.gateways),
                up,
                self._wanted,
            )
        )
        self.result.replica_s += up * SAMPLE_PERIOD_S
        self._at(self.now_s + SAMPLE_PERIOD_S, self._sample)


def saturated_rate(settings: ClusterSettings, requests: Sequence[SimRequest]) -> float:
    """Return the requests per second that one replica finishes while it is always at its cap."""
    prompts = PromptTokens()
    core = VirtualCores(settings.spec).build()
    waiting = iter(requests)

    def add(number: int, at_s: float) -> None:
        for request in islice(waiting, number):
            core.add(request.virtual_request(prompts.of(request), at_s))

    add(settings.model.requests_per_replica, 0.0)
    ends: list[float] = []
    while core.has_work:
        new = [event.time_s for event in core.step() if event.is_end]
        ends += new
        add(len(new), core.now_s)
    # Skip the first wave, which starts all at once, and the last, which runs alone.
    low, high = (ends[math.floor(share * (len(ends) - 1))] for share in (0.3, 0.8))
    return 0.5 * len(ends) / (high - low)
