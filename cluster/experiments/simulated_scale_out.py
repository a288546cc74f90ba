"""More replicas than a machine has: the repository's simulation of a cluster, if it is there.

The simulation (`benchmarks/cluster_simulation`) runs the product's own router and fork policies on
a model of a replica; it is part of the repository, not of the installed package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apar_core.errors import EvaluationError
from apar_core.evaluation.report_table import Column, ReportTable

PACKAGE = "benchmarks.cluster_simulation"
HOW_TO = (
    "in the repository: `python -m benchmarks simulation`, which needs recorded answers and "
    "arrivals as in ../shared/data"
)
_LOAD = 0.85
_POLICIES = ("threads", "round_robin")


def can_simulate(data: Path) -> bool:
    """Whether the simulation and what it replays are there."""
    if find_spec("benchmarks") is None or find_spec(PACKAGE) is None:
        return False
    return (data / "traces").is_dir() and (data / "arrivals").is_dir()


def check_model(name: str) -> None:
    """Raise EvaluationError if the simulation has no step times of this name."""
    models = _models()
    if name not in models:
        raise EvaluationError(f"--simulated-model {name!r}: there are {', '.join(models)}")


def simulated_table(
    data: Path,
    model_name: str,
    replicas: Sequence[int],
    *,
    duration_s: float,
    done: Callable[[], None],
) -> ReportTable:
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
    rows = []
    for policy in _POLICIES:
        alone = None
        for number in replicas:
            found = scenarios.simulate_routing(
                recorded, model, capacity, scenarios.Scenario(number, _LOAD), policy, 0, plan, slo
            )
            served = capacity * _LOAD * found.goodput
            alone = alone or served
            rows.append(
                (policy, number, number * capacity * _LOAD, 100 * found.goodput, served * number,
                 served / alone, found.p50_s, found.p99_s, found.imbalance)
            )  # fmt: skip
            done()
    return _table(tuple(rows), model, slo)


def _models() -> Mapping[str, Any]:
    models: Mapping[str, Any] = importlib.import_module(f"{PACKAGE}.step_times").MODELS
    return models


def _table(rows: tuple[tuple[str | float | None, ...], ...], model: Any, slo: Any) -> ReportTable:
    return ReportTable(
        name="simulated",
        title=f"Simulated replicas at {_LOAD:g} of their capacity, {model.name}",
        columns=(
            Column("router"),
            Column("replicas", "d"),
            Column("requests/s", ".1f"),
            Column("in goals %", ".1f"),
            Column("in goals/s", ".1f"),
            Column("a replica, x one", ".2f"),
            Column("p50 s", ".2f"),
            Column("p99 s", ".2f"),
            Column("imbalance", ".2f"),
        ),
        rows=rows,
        note=f"Goals: first token in {slo.first_token_s:g} s, {1000 * slo.token_s:g} ms a token. "
        f"A replica: {model.source}",
    )
