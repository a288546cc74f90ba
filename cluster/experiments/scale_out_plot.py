"""Throughput against replicas: measured on this machine, and simulated for more than it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from apar_core.reporting import PLOT_SETTINGS, RUN_COLOURS
from cluster.experiments.plots import METHOD_COLOURS
from cluster.experiments.simulated_scale_out import ROUTERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cluster.experiments.scale_out import ReplicasRun
    from cluster.experiments.simulated_scale_out import SimulatedClusters

_WIDTH = 0.38


def scale_out_figure(runs: Sequence[ReplicasRun], simulated: SimulatedClusters | None) -> Figure:
    """Return a panel of what was measured, and one of what was simulated, if anything was."""
    with mpl.rc_context(PLOT_SETTINGS):
        number = 1 if simulated is None else 2
        figure = Figure(figsize=(5.8 * number, 4), layout="constrained")
        panels = figure.subplots(1, number, squeeze=False)[0]
        _draw_measured(panels[0], runs)
        if simulated is not None:
            _draw_simulated(panels[1], simulated)
    return figure


def _draw_measured(panel: Axes, runs: Sequence[ReplicasRun]) -> None:
    """Draw bars, with each way's throughput and how many times that of its fewest replicas."""
    numbers = sorted({run.replicas for run in runs})
    for offset, forked in ((-_WIDTH / 2, False), (_WIDTH / 2, True)):
        alike = sorted((run for run in runs if run.forked is forked), key=lambda run: run.replicas)
        rates = [run.tokens_per_s for run in alike]
        bars = panel.bar(
            [numbers.index(run.replicas) + offset for run in alike],
            rates,
            _WIDTH,
            color=METHOD_COLOURS["eager" if forked else "sequential"],
            label="forked" if forked else "sequential",
        )
        labels = [f"{rate:,.0f}\n{rate / rates[0]:.2f}x" for rate in rates]
        panel.bar_label(bars, labels, padding=2, fontsize=8)
    panel.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    panel.set_title("Measured on this machine")
    panel.set_xlabel("replicas")
    panel.set_ylabel("text tokens / s")
    panel.set_ylim(0, 1.3 * max(run.tokens_per_s for run in runs))
    panel.legend(frameon=False, loc="upper left", ncols=2)


def _draw_simulated(panel: Axes, simulated: SimulatedClusters) -> None:
    clusters = simulated.clusters
    arriving = {each.replicas: each.arriving_per_s / each.replicas for each in clusters}
    numbers = list(arriving)
    panel.plot(numbers, list(arriving.values()), ":", color="black", label="all that arrive")
    for router, colour in zip(ROUTERS, RUN_COLOURS, strict=False):
        alike = [each for each in clusters if each.router == router]
        panel.plot(
            [each.replicas for each in alike],
            [each.kept_per_replica_s for each in alike],
            "o-",
            color=colour,
            label=f"router {router}",
        )
    panel.set_title(f"Simulated, {simulated.model}")
    panel.set_xlabel("replicas")
    panel.set_ylabel("requests within goals / s, a replica")
    # Each number of replicas is twice the one before it.
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers])
    panel.minorticks_off()
    panel.set_ylim(0, 1.1 * max(arriving.values()))
    panel.legend(frameon=False, loc="lower left")
