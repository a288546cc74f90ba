"""The simulation's results as pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from benchmarks.cluster_simulation.measures import Measures
from benchmarks.cluster_simulation.scaling import ScalingRun
from benchmarks.cluster_simulation.scenarios import Cell

_COLORS = {
    "threads": "#0072b2",
    "power_of_two": "#d55e00",
    "fewest_requests": "#009e73",
    "round_robin": "#cc79a7",
    "random": "#999999",
    "oracle": "#000000",
    "none": "#999999",
    "eager": "#d55e00",
    "adaptive": "#0072b2",
}
_MARKERS = {"threads": "o", "oracle": "x", "power_of_two": "s", "adaptive": "o", "eager": "s"}

Panel = tuple[str, Callable[[Measures], float], bool]
"""Label of the y axis, what it shows, and whether it is logarithmic."""

ROUTING_PANELS: Sequence[Panel] = (
    ("latency, p50 (s)", lambda m: m.p50_s, True),
    ("latency, p99 (s)", lambda m: m.p99_s, True),
    ("time to first token, p99 (s)", lambda m: m.first_token_p99_s, True),
    ("latency per token, p99 (ms)", lambda m: 1e3 * m.token_p99_s, True),
    ("goodput (share within the SLO)", lambda m: m.goodput, False),
    ("imbalance of threads (cv)", lambda m: m.imbalance, False),
)
FORKING_PANELS: Sequence[Panel] = (
    ("latency, p50 (s)", lambda m: m.p50_s, True),
    ("latency, p99 (s)", lambda m: m.p99_s, True),
    ("time to first token, p99 (s)", lambda m: m.first_token_p99_s, True),
    ("time between a thread's tokens, p50 (ms)", lambda m: 1e3 * m.step_p50_s, False),
    ("time between a thread's tokens, p99 (ms)", lambda m: 1e3 * m.step_p99_s, False),
    ("goodput (share within the SLO)", lambda m: m.goodput, False),
)


def load_plot(path: Path, title: str, cells: Sequence[Cell], panels: Sequence[Panel]) -> None:
    """Draw measures over the load, one line a policy, with 95 % intervals over the seeds."""
    with mpl.rc_context({"font.size": 11}):
        figure = Figure(figsize=(15, 9), layout="constrained")
        axes = figure.subplots(2, 3, squeeze=False).ravel()
        for ax, panel in zip(axes, panels, strict=True):
            _draw_panel(ax, cells, panel)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
        figure.suptitle(title)
        figure.savefig(path, dpi=110)


def _draw_panel(ax: Any, cells: Sequence[Cell], panel: Panel) -> None:
    label, get, logarithmic = panel
    for policy in dict.fromkeys(cell.policy for cell in cells):
        own = sorted(
            (cell for cell in cells if cell.policy == policy), key=lambda cell: cell.scenario.load
        )
        ax.errorbar(
            [cell.scenario.load for cell in own],
            [get(cell.summary.mean) for cell in own],
            yerr=[get(cell.summary.half_width) for cell in own],
            label=policy.replace("_", " "),
            color=_COLORS[policy],
            marker=_MARKERS.get(policy, "."),
            linestyle="--" if policy == "oracle" else "-",
            linewidth=2.0 if policy in ("threads", "adaptive") else 1.3,
            capsize=2,
        )
    if logarithmic:
        _logarithmic(ax)
    else:
        ax.set_ylim(bottom=0)
    ax.set_xlabel("load (share of the saturated rate)")
    ax.set_ylabel(label)
    ax.grid(visible=True, which="both", alpha=0.25)


def _logarithmic(ax: Any) -> None:
    """Set a logarithmic y axis with plain numbers at 1, 2 and 5."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def scaling_plot(path: Path, title: str, run: ScalingRun) -> None:
    """Draw a load step: the rate, replicas, what waits, and latency, over time."""
    with mpl.rc_context({"font.size": 11}):
        figure = Figure(figsize=(11, 11), layout="constrained")
        rate, replicas, threads, latency = figure.subplots(4, 1, sharex=True)
        rate.plot(run.times_s, run.rates, color="#999999", drawstyle="steps-post")
        rate.set_ylabel("requests/s, offered")
        replicas.plot(run.times_s, run.wanted, color="#d55e00", label="asked for",
                      drawstyle="steps-post")  # fmt: skip
        replicas.plot(run.times_s, run.running, color="#0072b2", label="running",
                      drawstyle="steps-post")  # fmt: skip
        replicas.set_ylabel("replicas")
        replicas.legend(frameon=False)
        threads.plot(run.times_s, run.threads, color="#0072b2", label="threads at replicas")
        threads.plot(run.times_s, run.queued, color="#d55e00", label="requests at the gateway")
        threads.set_ylabel("alive or waiting")
        threads.legend(frameon=False)
        latency.plot(run.latency_times_s, run.latency_p50_s, color="#0072b2", label="p50")
        latency.plot(run.latency_times_s, run.latency_p99_s, color="#d55e00", label="p99")
        latency.set_ylabel("latency of requests\nthat came then (s)")
        _logarithmic(latency)
        latency.legend(frameon=False)
        latency.set_xlabel("time (s)")
        for ax in (rate, replicas, threads, latency):
            ax.grid(visible=True, alpha=0.25)
            if ax is not latency:
                ax.set_ylim(bottom=0)
        figure.suptitle(title)
        figure.savefig(path, dpi=110)
