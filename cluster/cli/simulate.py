"""`apar simulate`: a cluster of virtual engines behind the product's own router and autoscaler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import out_option
from cluster.cli.settings_options import takes_settings
from cluster.cli.terminal import clear_errors, show_report, stage_progress
from cluster.lab.simulation.settings import SimulationSettings

_PANELS = {
    "Cluster": (
        "model", "gpu", "tensor_parallel", "costs", "attention", "kv_tokens", "replicas", "router",
        "fork_policy", "token_time_s", "concurrency", "gateways",
    ),
    "Load": ("trace", "arrivals", "rate", "load", "duration_s", "surge"),
    "Faults and scaling": (
        "slow", "slowness", "kill", "join", "start_delay_s", "autoscale", "target_threads",
        "catch_up",
    ),
}  # fmt: skip


@takes_settings(
    SimulationSettings,
    panels=_PANELS,
    shown={
        "target_threads": "a quarter of what a replica runs",
        "catch_up": "the configuration's",
    },
    leave_out=("first_token_s", "report_period_s", "lists"),
)
def simulate(
    settings: SimulationSettings,
    out: Annotated[Path, out_option("simulate")],
    jobs: Annotated[int, typer.Option(min=1, help="Processes that run cases in parallel.")] = 1,
) -> None:
    """Simulate a cluster in virtual time.

    Each replica is vLLM's engine core with our scheduler and no model. The duration of a step comes
    from the step costs of the GPU. Router, fork policy, retries and autoscaler are the product's.
    Options with several values span a table with a row for each combination.

    Example: [bold]apar simulate --trace ANSWERS.jsonl --replicas 8 --slow 1
    --router threads,power_of_two --seeds 3[/bold]
    """
    with clear_errors(), stage_progress() as progress:
        # These import vLLM, which takes seconds.
        from cluster.lab.simulation.report import simulation_report
        from cluster.lab.simulation.runs import run_cases

        results, capacity = run_cases(settings, jobs, progress.start)
    show_report(simulation_report(settings, results, capacity), out)
