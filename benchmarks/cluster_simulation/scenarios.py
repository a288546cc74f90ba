"""What is simulated: fixed before any policy was tuned, and reported whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from apar_core.scheduler.fork_policy import PolicyName
from benchmarks.cluster_simulation.arrivals import ArrivalTrace, read_arrivals
from benchmarks.cluster_simulation.choosers import CHOOSERS, build_choosers
from benchmarks.cluster_simulation.cluster import ClusterSettings, SimCluster, saturated_rate
from benchmarks.cluster_simulation.measures import Measures, Slo, Summary, measure, summarise
from benchmarks.cluster_simulation.step_times import ReplicaModel
from benchmarks.cluster_simulation.threads import SimRequest
from benchmarks.cluster_simulation.trees import AnswerTree, read_trees
from benchmarks.cluster_simulation.workload import Workload

LOADS = (0.5, 0.7, 0.85, 0.95, 1.05)
FORK_LOADS = (0.3, 0.5, 0.7, 0.85, 0.95, 1.05)
FORK_REPLICAS = 4
TOKEN_TIME_S = 0.03
"""Time per output token that the adaptive fork policy is told to keep; under the SLO's, which is
for a whole answer and its wait."""
FORK_POLICIES = ("none", "eager", "adaptive")


@dataclass(frozen=True, slots=True)
class RecordedData:
    """The recorded answers and arrivals that all experiments draw from."""

    trees: Sequence[AnswerTree]
    arrivals: ArrivalTrace

    @classmethod
    def read(cls, folder: Path) -> RecordedData:
        """Read traces/ and arrivals/. Raises FileNotFoundError that names a missing file."""
        traces = [folder / "traces" / name for name in ("mixed.jsonl", "structured.jsonl")]
        arrivals = folder / "arrivals" / "AzureLLMInferenceTrace_conv.csv"
        return cls(read_trees(traces), read_arrivals(arrivals))

    def workload(self, seed: int) -> Workload:
        """A source of requests."""
        return Workload(self.trees, self.arrivals, seed)

    def capacity(self, model: ReplicaModel) -> float:
        """Requests a second of one saturated replica that forks eagerly: load 1."""
        return saturated_rate(model, self.workload(99).requests(3000, 20.0))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster under a load, as a share of its capacity; see `ClusterSettings`."""

    replicas: int
    load: float
    report_period_s: float = 0.1
    one_slow_of: int = 0
    gateways: int = 1

    @property
    def name(self) -> str:
        """What sets the cluster apart."""
        slow = f"1 of {self.one_slow_of} at half speed" if self.one_slow_of else ""
        late = f"reports every {self.report_period_s:g} s" if self.report_period_s != 0.1 else ""
        many = f"{self.gateways} gateways" if self.gateways > 1 else ""
        return ", ".join(part for part in (slow, many, late) if part) or "even"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is simulated: scenarios, each with so many seeds and seconds of arrivals."""

    scenarios: tuple[tuple[Scenario, int], ...]
    duration_s: float
    fork_loads: tuple[float, ...]
    fork_seeds: int
    least_requests: int = 400
    policies: tuple[str, ...] = CHOOSERS

    def only(
        self,
        replicas: Sequence[int] | None,
        loads: Sequence[float] | None,
        policies: Sequence[str] | None,
    ) -> Plan:
        """The scenarios with these replicas and loads, under these policies; None lets all be."""
        scenarios = tuple(
            (scenario, seeds)
            for scenario, seeds in self.scenarios
            if (not replicas or scenario.replicas in replicas)
            and (not loads or scenario.load in loads)
        )
        fork_loads = tuple(load for load in self.fork_loads if not loads or load in loads)
        chosen = tuple(name for name in self.policies if not policies or name in policies)
        return replace(self, scenarios=scenarios, fork_loads=fork_loads, policies=chosen)


def _disturbed(replicas: int, load: float) -> tuple[Scenario, ...]:
    return (
        Scenario(replicas, load, one_slow_of=8),
        Scenario(replicas, load, report_period_s=1.0),
        Scenario(replicas, load, report_period_s=5.0),
        Scenario(replicas, load, report_period_s=5.0, one_slow_of=8),
        Scenario(replicas, load, gateways=4),
        Scenario(replicas, load, report_period_s=1.0, gateways=4),
    )


def build_plan(*, quick: bool, full: bool) -> Plan:
    """Seconds, minutes, or about an hour, on one core."""
    if quick:
        scenarios = ((Scenario(2, 0.85), 1),)
        return Plan(scenarios, 8.0, (0.85,), 1, least_requests=100)
    small = [(Scenario(8, load), 3) for load in LOADS]
    small += [(scenario, 2) for scenario in _disturbed(8, 0.85)]
    if not full:
        large = [(Scenario(64, load), 1) for load in (0.85, 0.95)]
        return Plan((*small, *large), 100.0, FORK_LOADS, 2)
    large = [(Scenario(replicas, load), 1) for replicas in (64, 512) for load in LOADS]
    large += [(scenario, 1) for scenario in _disturbed(64, 0.85)]
    return Plan((*small, *large), 100.0, FORK_LOADS, 3)


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a table: a policy in a scenario."""

    model: str
    scenario: Scenario
    policy: str
    summary: Summary


def simulate_routing(
    data: RecordedData,
    model: ReplicaModel,
    capacity: float,
    scenario: Scenario,
    policy: str,
    seed: int,
    plan: Plan,
    slo: Slo,
) -> Measures:
    """Run one policy through one scenario."""
    settings = ClusterSettings(
        scenario.replicas,
        model,
        report_period_s=scenario.report_period_s,
        one_slow_of=scenario.one_slow_of,
        gateways=scenario.gateways,
    )
    rate = capacity * settings.speed * scenario.load
    # The largest clusters have requests enough in less time.
    duration_s = plan.duration_s * (0.6 if scenario.replicas > 64 else 1.0)
    number = max(plan.least_requests, round(rate * duration_s))
    requests = data.workload(seed).requests(number, rate)
    choosers = build_choosers(policy, settings.gateways, seed)
    return measure(SimCluster(settings, choosers, seed).run(requests), slo)


def routing_cells(
    data: RecordedData,
    model: ReplicaModel,
    plan: Plan,
    slo: Slo,
    step: Callable[[], None],
    jobs: int = 1,
) -> list[Cell]:
    """Every policy of the plan in every scenario, in `jobs` processes.

    `step` is called as the runs are done, in their order.
    """
    capacity = data.capacity(model)
    rows = [(*row, policy) for row in plan.scenarios for policy in plan.policies]
    runs = [
        (data, model, capacity, scenario, policy, seed, plan, slo)
        for scenario, num_seeds, policy in rows
        for seed in range(num_seeds)
    ]
    cells = []
    with _calls(jobs) as call:
        found = call(simulate_routing, *zip(*runs, strict=True)) if runs else iter(())
        for scenario, num_seeds, policy in rows:
            measured = []
            for measures in islice(found, num_seeds):
                measured.append(measures)
                step()
            cells.append(Cell(model.name, scenario, policy, summarise(measured)))
    return cells


@contextmanager
def _calls(jobs: int) -> Iterator[Callable[..., Iterator[Measures]]]:
    """`map`, in so many processes; an error or Ctrl-C ends what has not begun."""
    if jobs == 1:
        yield map
        return
    # Not forked: a copy of a process with threads may wait for a lock that nobody holds.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        yield pool.map
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def simulate_forking(
    model: ReplicaModel,
    requests: Sequence[SimRequest],
    fork_policy: str,
    seed: int,
    slo: Slo,
) -> Measures:
    """Run one fork policy, behind the product's router; with "none" answers are one thread."""
    policy: PolicyName = "adaptive" if fork_policy == "adaptive" else "eager"
    settings = ClusterSettings(FORK_REPLICAS, model, fork_policy=policy, token_time_s=TOKEN_TIME_S)
    if fork_policy == "none":
        requests = [
            SimRequest(
                each.request_id,
                each.arrival_s,
                each.prompt_tokens,
                each.tree.without_forks(),
                each.hint,
                each.pieces,
            )
            for each in requests
        ]
    return measure(
        SimCluster(settings, build_choosers("threads", 1, seed), seed).run(requests), slo
    )


def forking_cells(
    data: RecordedData, model: ReplicaModel, plan: Plan, slo: Slo, step: Callable[[], None]
) -> list[Cell]:
    """Every fork policy at every load; the loads are of the capacity with eager forking."""
    capacity = data.capacity(model)
    cells = []
    for load in plan.fork_loads:
        rate = capacity * FORK_REPLICAS * load
        number = max(plan.least_requests, round(rate * plan.duration_s))
        for fork_policy in FORK_POLICIES:
            measured = []
            for seed in range(plan.fork_seeds):
                requests = data.workload(seed).requests(number, rate)
                measured.append(simulate_forking(model, requests, fork_policy, seed, slo))
                step()
            scenario = Scenario(FORK_REPLICAS, load)
            cells.append(Cell(model.name, scenario, fork_policy, summarise(measured)))
    return cells
