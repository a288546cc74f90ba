"""More replicas than a machine has: the repository's simulation of a cluster, if it is there.

The simulation (`benchmarks/cluster_simulation`) runs the product's own router and fork policies on
a model of a replica; it is part of the repository, not of the installed package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apar_core.errors import EvaluationError
from apar_core.reporting import Column, ReportTable

PACKAGE = "benchmarks.cluster_simulation"
HOW_TO = (
    "in the repository: `python -m benchmarks simulation`, which needs recorded answers and "
    "arrivals as in ../shared/data"
)
_LOAD = 0.85
ROUTERS = ("threads", "round_robin")


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """What arrives at so many replicas behind a router, and the share of it within its goals."""

    router: str
    replicas: int
    arriving_per_s: float
    kept_share: float
    p50_s: float
    p99_s: float
    imbalance: float

    @property
    def kept_per_replica_s(self) -> float:
        """Requests a second within their goals, of each replica."""
        return self.arriving_per_s * self.kept_share / self.replicas


@dataclass(frozen=True, slots=True)
class SimulatedClusters:
    """Clusters of one model of a replica, all at the same load; `note` tells goals and model."""

    model: str
    note: str
    clusters: tuple[SimulatedCluster, ...]


def find_repository() -> None:
    """Let the simulation be imported: the command `apar` finds only what is installed."""
    root = Path(__file__).parents[2]
    if (root / "benchmarks").is_dir() and str(root) not in sys.path:
        sys.path.append(str(root))


def can_simulate(data: Path) -> bool:
    """Whether the simulation, which `find_repository` may have to find, and its data are there."""
    if find_spec("benchmarks") is None or find_spec(PACKAGE) is None:
        return False
    return (data / "traces").is_dir() and (data / "arrivals").is_dir()


def check_model(name: str) -> None:
    """Raise EvaluationError if the simulation has no step times of this name."""
    models = _models()
    if name not in models:
        raise EvaluationError(f"--simulated-model {name!r}: there are {', '.join(models)}")


def simulate(
    data: Path,
    model_name: str,
    replicas: Sequence[int],
    *,
    duration_s: float,
    done: Callable[[], None],
) -> SimulatedClusters:
    """Return what clusters of so many replicas serve within their goals, all at the same load.

    Load 1 is the rate that a saturated replica keeps up with when it forks eagerly.
    """
    scenarios: Any = importlib.import_module(f"{PACKAGE}.scenarios")
    measures: Any = importlib.import_module(f"{PACKAGE}.measures")
    model = _models()[model_name]
    recorded = scenarios.RecordedData.read(data)
    capacity = recorded.capacity(model)
    plan = scenarios.Plan((), duration_s, (), 1)
    slo = measures.Slo()
    clusters = []
    for router in ROUTERS:
        for number in replicas:
            found = scenarios.simulate_routing(
                recorded, model, capacity, scenarios.Scenario(number, _LOAD), router, 0, plan, slo
            )
            arriving_per_s = number * capacity * _LOAD
            clusters.append(
                SimulatedCluster(
                    router, number, arriving_per_s, found.goodput,
                    found.p50_s, found.p99_s, found.imbalance,
                )
            )  # fmt: skip
            done()
    note = (
        f"Goals: first token in {slo.first_token_s:g} s, {1000 * slo.token_s:g} ms a token. "
        f"A replica: {model.source}"
    )
    return SimulatedClusters(model.name, note, tuple(clusters))


def simulated_table(simulated: SimulatedClusters) -> ReportTable:
    """Return what was simulated, each router's clusters beside its smallest."""
    columns = (
        Column("router"),
        Column("replicas", "d"),
        Column("requests/s", ".1f"),
        Column("in goals %", ".1f"),
        Column("in goals/s", ".1f"),
        Column("a replica, x one", ".2f"),
        Column("p50 s", ".2f"),
        Column("p99 s", ".2f"),
        Column("imbalance", ".2f"),
    )
    alone: dict[str, float] = {}
    rows = []
    for each in simulated.clusters:
        first = alone.setdefault(each.router, each.kept_per_replica_s)
        rows.append(
            (each.router, each.replicas, each.arriving_per_s, 100 * each.kept_share,
             each.replicas * each.kept_per_replica_s,
             each.kept_per_replica_s / first if first else None,
             each.p50_s, each.p99_s, each.imbalance)
        )  # fmt: skip
    title = f"Simulated replicas at {_LOAD:g} of their capacity, {simulated.model}"
    return ReportTable("simulated", title, columns, tuple(rows), note=simulated.note)


def _models() -> Mapping[str, Any]:
    models: Mapping[str, Any] = importlib.import_module(f"{PACKAGE}.step_times").MODELS
    return models
