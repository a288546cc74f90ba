"""`apar experiment scale-out`: its report, from what was measured and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from apar_core.reporting import Report
from cluster.experiments.scale_out import ReplicasRun, ScaleOutSettings, scale_out_table
from cluster.experiments.simulated_scale_out import HOW_TO, simulated_table

if TYPE_CHECKING:
    from cluster.experiments.simulated_scale_out import SimulatedClusters


def report_scale_out(
    settings: ScaleOutSettings,
    runs: Sequence[ReplicasRun],
    simulated: SimulatedClusters | None,
    *,
    wanted: bool,
) -> Report:
    """Return tables and plot of what was measured, and of what was simulated, if anything was.

    Where a simulation was `wanted` and there is none, the report says what it takes.
    """
    # matplotlib takes a second to import.
    from cluster.experiments.scale_out_plot import scale_out_figure

    facts = {
        "Model": settings.model,
        "Load": f"{settings.requests} answers of {settings.trace}, {settings.concurrency} under "
        f"way at once, {settings.repeats} repeats",
    }
    tables = [scale_out_table(runs)]
    if simulated is not None:
        tables.append(simulated_table(simulated))
    elif wanted:
        facts["More replicas"] = f"not simulated: {HOW_TO}"
    return Report(
        "Scaling out",
        facts,
        tables,
        {"scale-out": scale_out_figure(runs, simulated)},
        {"runs": [run.model_dump(mode="json") for run in runs]},
    )
