"""Cases spanned by the options of `apar simulate`, and their runs with several seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from apar_core.formats.shipped_formats import LISTS
from cluster.lab.experiments.parts import StartStage
from cluster.lab.experiments.random_model import random_model
from cluster.lab.grid import grid
from cluster.lab.simulation.cluster import (
    Cluster,
    ClusterRun,
    ClusterSettings,
    Sample,
    saturated_rate,
)
from cluster.lab.simulation.measures import Measures, measure
from cluster.lab.simulation.settings import NO_FORKS, Case, SimulationSettings
from cluster.lab.simulation.workload import CONTEXT_TOKENS, RecordedData, read_data
from cluster.lab.virtual.engine import VirtualSpec
from cluster.lab.virtual.shared_reads import Grouping
from deployments.config.autoscaling import AutoscalingConfig
from deployments.config.model import ForkLimits, ModelConfig
from deployments.config.routing import RoutingPolicy, RoutingSettings

_CAPACITY_SEED = 99
_CAPACITY_WAVES = 4


def cluster_settings(settings: SimulationSettings, case: Case) -> ClusterSettings:
    """Return the cluster of a case."""
    fields: dict[str, Any] = {}
    if case.fork_policy != NO_FORKS:
        limits: dict[str, Any] = {"policy": case.fork_policy}
        if case.fork_policy != "eager":
            limits["token_time_ms"] = 1000 * settings.token_time_s
            if settings.first_token_s is not None:
                limits["first_token_ms"] = 1000 * settings.first_token_s
        fields["forks"] = ForkLimits(**limits)
    if settings.autoscale is not None:
        low, high = settings.autoscale
        scaling = {
            "min_replicas": low,
            "max_replicas": high,
            "target_threads": case.target_threads,
            "catch_up_s": case.catch_up_s,
        }
        fields["autoscaling"] = AutoscalingConfig(
            **{name: value for name, value in scaling.items() if value is not None}
        )
    model = ModelConfig(max_concurrency=settings.concurrency, **fields)
    forks: dict[str, Any] = model.forks.model_dump(exclude_none=True)
    family = settings.family
    if family is not None:
        # The fork policy and the router also depend on it.
        forks |= {"attention": "family", "family": asdict(family)}
    checkpoint: dict[str, Any] = {}
    if settings.lists:
        forks["parallel_format"] = LISTS.name
        # The format reads text, so the engine needs a tokenizer with all of Llama's vocabulary.
        checkpoint["checkpoint"] = random_model(settings.model)
    spec = VirtualSpec(
        settings.device.size.config,
        settings.step_costs,
        settings.cache_tokens,
        max_model_len=CONTEXT_TOKENS,
        max_rows=model.threads_per_replica,
        forks=forks,
        attention=None if family is None else Grouping("family", family),
        **checkpoint,
    )
    routing: dict[str, Any] = {"policy": RoutingPolicy(case.router)}
    if settings.report_period_s is not None:
        routing["report_period_s"] = settings.report_period_s
    return ClusterSettings(
        spec,
        model,
        case.replicas,
        RoutingSettings(**routing),
        slow={case.replicas - 1 - number: settings.slowness for number in range(settings.slow)},
        kills=tuple(sorted(settings.kill)),
        joins=tuple(sorted(settings.join)),
        gateways=settings.gateways,
        start_s=settings.start_delay_s,
    )


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
    settings: SimulationSettings, jobs: int, begin: StartStage
) -> tuple[list[CaseResult], float | None]:
    """Run all cases in `jobs` processes; return the results and a replica's saturated rate.

    The rate is None if the settings have rates instead of loads. The results do not depend on
    `jobs`. Raises EvaluationError for missing data.
    """
    data = read_data(settings.trace, settings.arrivals)
    capacity = None
    if not settings.rate:
        done = begin("saturated rate", 1)
        capacity = replica_capacity(settings, data)
        done()
    cases = settings.cases(capacity)
    runs = [(case, seed) for case in cases for seed in range(settings.seeds)]
    done = begin("cases", len(runs))
    found: dict[tuple[Case, int], SeedResult] = {}
    with grid(jobs, partial, run_seed, settings, data) as run_all:
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
    cluster = cluster_settings(settings, Case(1, 1.0, 1.0, "threads", "eager"))
    number = max(800, _CAPACITY_WAVES * settings.concurrency)
    return saturated_rate(cluster, data.workload(_CAPACITY_SEED).requests([(number, 1.0)]))


def run_seed(settings: SimulationSettings, data: RecordedData, case: Case, seed: int) -> SeedResult:
    """Run a case with a seed, and return its measures."""
    return run_case(settings, data, case, seed)[0]


def run_case(
    settings: SimulationSettings, data: RecordedData, case: Case, seed: int
) -> tuple[SeedResult, ClusterRun]:
    """Run a case with a seed."""
    requests = data.workload(seed).requests(
        settings.stages(case), forked=case.fork_policy != NO_FORKS
    )
    run = Cluster(cluster_settings(settings, case), seed).run(requests)
    window_s = None
    if settings.surge != 1.0 or settings.kill or settings.join:
        # The disturbance itself is measured, so no request is left out.
        window_s = (0.0, float("inf"))
    errors = dict(Counter(each.error for each in run.outcomes if each.error is not None))
    result = SeedResult(
        seed,
        measure(run, window_s),
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
