"""Cases spanned by the options of `apar simulate`, and their runs with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from apar_core.attention.settings import FamilySettings
from apar_core.errors import EvaluationError
from apar_core.step_costs.costs import StepCosts
from cluster.lab.grid import grid
from cluster.lab.simulation.cluster import (
    Cluster,
    ClusterRun,
    ClusterSettings,
    Sample,
    saturated_rate,
)
from cluster.lab.simulation.measures import Measures, Slo, measure
from cluster.lab.simulation.workload import CONTEXT_TOKENS, RecordedData, read_data
from cluster.lab.virtual.engine import VirtualSpec
from cluster.lab.virtual.shared_reads import Grouping
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.model import ForkLimits, ModelConfig
from deployments.config.routing import RoutingPolicy, RoutingSettings

NO_FORKS = "off"
"""Fork policy of requests that may not fork."""
_CAPACITY_SEED = 99
_CAPACITY_WAVES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """The settings in which cases of a simulation differ: one row of the result.

    load: rate over that of the initial replicas when each is saturated with eager forks.
    target_threads, catch_up_s: settings of the autoscaler; None without one or for its defaults.
    """

    replicas: int
    rate: float
    load: float | None
    router: str
    fork_policy: str
    target_threads: float | None = None
    catch_up_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """A grid of cases and their common settings. Times in seconds; rates are of the whole cluster.

    slow, slowness: number of slow replicas, and the factor by which they are slower.
    surge: factor on the arrival rate in the middle third of the duration.
    autoscale: bounds on the number of replicas.
    family: settings of `attention: family`; None: each row reads its own KV blocks.
    """

    costs: StepCosts
    config: Mapping[str, Any]
    kv_tokens: int
    traces: tuple[Path, ...]
    arrivals: Path | None
    replicas: tuple[int, ...] = (8,)
    rates: tuple[float, ...] = ()
    loads: tuple[float, ...] = (0.85,)
    routers: tuple[str, ...] = ("threads",)
    fork_policies: tuple[str, ...] = ("eager",)
    token_time_ms: float = 50.0
    first_token_ms: float | None = None
    concurrency: int = 350
    duration_s: float = 60.0
    seeds: int = 1
    slow: int = 0
    slowness: float = 2.0
    kills: tuple[float, ...] = ()
    joins: tuple[float, ...] = ()
    start_s: float = 60.0
    surge: float = 1.0
    autoscale: tuple[int, int] | None = None
    target_threads: tuple[float | None, ...] = (None,)
    catch_up_s: tuple[float | None, ...] = (None,)
    report_period_s: float | None = None
    gateways: int = 1
    family: FamilySettings | None = None
    slo: Slo = field(default_factory=Slo)

    def cluster(self, case: Case) -> ClusterSettings:
        """Return the cluster of a case.

        Raises pydantic.ValidationError for limits that the product's configuration refuses.
        """
        fields: dict[str, Any] = {}
        if case.fork_policy != NO_FORKS:
            limits: dict[str, Any] = {"policy": case.fork_policy}
            if case.fork_policy != "eager":
                limits["token_time_ms"] = self.token_time_ms
                limits["first_token_ms"] = self.first_token_ms
            fields["forks"] = ForkLimits(**limits)
        if self.autoscale is not None:
            low, high = self.autoscale
            scaling: dict[str, Any] = {"min_replicas": low, "max_replicas": high}
            if case.target_threads is not None:
                scaling["target_threads"] = case.target_threads
            if case.catch_up_s is not None:
                scaling["catch_up_s"] = case.catch_up_s
            fields["autoscaling"] = AutoscalingConfig(**scaling)
        model = ModelConfig(max_concurrency=self.concurrency, **fields)
        forks: dict[str, Any] = model.forks.model_dump(exclude_none=True)
        if self.family is not None:
            # The fork policy and the router also depend on it.
            forks |= {"attention": "family", "family": asdict(self.family)}
        spec = VirtualSpec(
            self.config,
            self.costs,
            self.kv_tokens,
            max_model_len=CONTEXT_TOKENS,
            max_rows=model.threads_per_replica,
            forks=forks,
            attention=None if self.family is None else Grouping("family", self.family),
        )
        routing: dict[str, Any] = {"policy": RoutingPolicy(case.router)}
        if self.report_period_s is not None:
            routing["report_period_s"] = self.report_period_s
        return ClusterSettings(
            spec,
            model,
            case.replicas,
            RoutingSettings(**routing),
            slow={case.replicas - 1 - number: self.slowness for number in range(self.slow)},
            kills=self.kills,
            joins=self.joins,
            gateways=self.gateways,
            start_s=self.start_s,
        )

    def cases(self, capacity: float | None) -> list[Case]:
        """Return all cases; `capacity` is a replica's saturated rate, needed for loads."""
        cases = []
        for replicas in self.replicas:
            speed = replicas - self.slow + self.slow / self.slowness
            offered: list[tuple[float, float | None]] = [(rate, None) for rate in self.rates]
            if not self.rates:
                if capacity is None:
                    raise EvaluationError("loads need the saturated rate of a replica")
                offered = [(load * capacity * speed, load) for load in self.loads]
            for (rate, load), router, policy, target, catch_up in product(
                offered, self.routers, self.fork_policies, self.target_threads, self.catch_up_s
            ):
                cases.append(Case(replicas, rate, load, router, policy, target, catch_up))
        return cases

    def stages(self, case: Case) -> list[tuple[float, float]]:
        """Return the stages (seconds, requests per second) of a case."""
        if self.surge == 1.0:
            return [(self.duration_s, case.rate)]
        third_s = self.duration_s / 3
        return [
            (third_s, case.rate),
            (third_s, self.surge * case.rate),
            (third_s, case.rate),
        ]


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One run: measures, counts of the whole run, and one sample per second."""

    seed: int
    measures: Measures
    requests: int
    errors: Mapping[str, int]
    continued: int
    steps: int
    forks: int
    forks_delayed: int
    replica_hours: float
    most_replicas: int
    last_replicas: int
    most_queued: int
    end_s: float
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case with its runs, one per seed."""

    case: Case
    seeds: tuple[SeedResult, ...]


def run_cases(
    settings: SimulationSettings, jobs: int, begin: Callable[[str, int], Callable[[], None]]
) -> tuple[list[CaseResult], float | None]:
    """Run all cases in `jobs` processes; return the results and a replica's saturated rate.

    The rate is None if the settings have rates instead of loads. The results do not depend on
    `jobs`. Raises EvaluationError for missing data.
    """
    data = read_data(settings.traces, settings.arrivals)
    capacity = None
    if not settings.rates:
        done = begin("saturated rate", 1)
        capacity = replica_capacity(settings, data)
        done()
    cases = settings.cases(capacity)
    runs = [(case, seed) for case in cases for seed in range(settings.seeds)]
    done = begin("cases", len(runs))
    found: dict[tuple[Case, int], SeedResult] = {}
    with grid(jobs, _Worker, settings, data) as run_all:
        for run, result in run_all(runs):
            found[run] = result
            done()
    results = [
        CaseResult(case, tuple(found[case, seed] for seed in range(settings.seeds)))
        for case in cases
    ]
    return results, capacity


def replica_capacity(settings: SimulationSettings, data: RecordedData) -> float:
    """Return the requests per second of one saturated replica that forks eagerly."""
    cluster = settings.cluster(Case(1, 1.0, 1.0, "threads", "eager"))
    number = max(800, _CAPACITY_WAVES * settings.concurrency)
    return saturated_rate(cluster, data.workload(_CAPACITY_SEED).requests([(number, 1.0)]))


def run_case(
    settings: SimulationSettings, data: RecordedData, case: Case, seed: int
) -> tuple[SeedResult, ClusterRun]:
    """Run a case with a seed."""
    requests = data.workload(seed).requests(
        settings.stages(case), forked=case.fork_policy != NO_FORKS
    )
    run = Cluster(settings.cluster(case), seed).run(requests)
    window_s = None
    if settings.surge != 1.0 or settings.kills or settings.joins:
        # The disturbance itself is measured, so no request is left out.
        window_s = (0.0, float("inf"))
    errors: dict[str, int] = {}
    for outcome in run.outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    result = SeedResult(
        seed,
        measure(run, settings.slo, window_s),
        len(run.outcomes),
        errors,
        sum(outcome.retries > 0 and outcome.error is None for outcome in run.outcomes),
        run.steps,
        run.forks,
        run.forks_delayed,
        run.replica_s / 3600,
        max(sample.up for sample in run.samples),
        run.samples[-1].up,
        max(sample.queued for sample in run.samples),
        run.end_s,
        tuple(run.samples),
    )
    return result, run


class _Worker:
    """Runs cases with shared settings and recorded data."""

    def __init__(self, settings: SimulationSettings, data: RecordedData) -> None:
        self._settings = settings
        self._data = data

    def run(self, case: Case, seed: int) -> SeedResult:
        """Run a case with a seed."""
        return run_case(self._settings, self._data, case, seed)[0]

    def close(self) -> None:
        """Do nothing."""
