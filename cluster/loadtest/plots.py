"""Plots of one run or of several: throughput over time, how times are spread, the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from apar_core.reporting import PLOT_SETTINGS, RUN_COLOURS
from cluster.loadtest.cluster_watch import ClusterMoment
from cluster.loadtest.figures import Repeat, repeats_of
from cluster.loadtest.run_file import Run
from cluster.loadtest.samples import sampled
from cluster.loadtest.times import ITL, TITLES, values_of

_CURVE_POINTS = 400
# Among hundreds of requests one or two slow ones would squeeze all others to the left.
_LARGEST_SHOWN = 99.5


def throughput_figure(runs: Sequence[Run]) -> Figure:
    """Return tokens per second and requests under way over the time of each run's repeats.

    What counts for the mean is drawn in full colour, warm-up and cool-down pale.
    """
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(9.5, 6.4), layout="constrained")
        speed, running = figure.subplots(2, 1, sharex=True)
        for index, run in enumerate(runs):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            for number, repeat in enumerate(repeats_of(run)):
                label = run.name if number == 0 else None
                _draw_samples(speed, repeat, colour, label)
                _draw_running(running, repeat, colour)
        speed.set_title("Text tokens per second")
        speed.set_ylim(bottom=0)
        speed.margins(x=0.01)
        if len(runs) > 1 and speed.get_legend_handles_labels()[0]:
            speed.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
        running.set_title("Requests under way")
        running.set_ylim(bottom=0)
        running.set_xlabel("seconds since the start of the repeat")
    return figure


def times_figure(runs: Sequence[Run]) -> Figure:
    """Return the cumulative distribution of every time that an answer has."""
    names = [name for name in TITLES if any(values_of(name, run.records) for run in runs)]
    num_rows = -(-len(names) // 2) or 1
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(9.5, 2.9 * num_rows), layout="constrained")
        panels = figure.subplots(num_rows, 2, squeeze=False).flatten()
        for panel, name in zip(panels, names, strict=False):
            _draw_curves(panel, name, runs)
        for panel in panels[len(names) :]:
            panel.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        if len(runs) > 1:
            figure.legend(handles, labels, frameon=False, loc="outside upper right", ncols=4)
    return figure


def cluster_figure(runs: Sequence[Run]) -> Figure | None:
    """Return KV use and running threads over time; None where no metrics were read."""
    if not any(repeat.facts.cluster for run in runs for repeat in repeats_of(run)):
        return None
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(9.5, 5.6), layout="constrained")
        share, threads = figure.subplots(2, 1, sharex=True)
        for index, run in enumerate(runs):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            for number, repeat in enumerate(repeats_of(run)):
                moments = repeat.facts.cluster.moments if repeat.facts.cluster else []
                label = run.name if number == 0 else None
                _draw_moments(share, moments, lambda moment: moment.kv_share, colour, label)
                _draw_moments(threads, moments, lambda moment: moment.running, colour, label)
        share.set_title("KV cache in use, fullest replica")
        share.yaxis.set_major_formatter(PercentFormatter(1.0))
        share.set_ylim(bottom=0)
        if len(runs) > 1:
            share.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
        threads.set_title("Threads running")
        threads.set_ylim(bottom=0)
        threads.set_xlabel("seconds since the start of the repeat")
    return figure


def _draw_samples(panel: Axes, repeat: Repeat, colour: str, label: str | None) -> None:
    samples = sampled(repeat.records, repeat.sample_s)
    values = samples.tokens_per_s
    if not values:
        return
    edges = np.arange(len(values) + 1) * samples.seconds
    pale_label = None if samples.kept else label
    panel.stairs(
        values, edges, color=colour, alpha=0.35, linewidth=1.2, baseline=None, label=pale_label
    )
    if samples.kept:
        kept = edges[samples.first : samples.end + 1]
        panel.stairs(samples.kept, kept, color=colour, linewidth=1.8, label=label, baseline=None)
        mean = float(np.mean(samples.kept))
        panel.hlines(mean, kept[0], kept[-1], colors=colour, linestyles="--", linewidth=1.0)


def _draw_running(panel: Axes, repeat: Repeat, colour: str) -> None:
    begun = [(record.sent_s, 1) for record in repeat.records]
    ended = [(record.finished_s, -1) for record in repeat.records]
    changes = sorted([*begun, *ended])
    times = [time_s for time_s, _ in changes]
    panel.step(times, np.cumsum([step for _, step in changes]), where="post", color=colour,
               linewidth=1.3)  # fmt: skip


def _draw_curves(panel: Axes, name: str, runs: Sequence[Run]) -> None:
    scale, unit = (1000.0, "ms") if name in (ITL, "tpot", "path") else (1.0, "s")
    shares = np.linspace(0, 100, _CURVE_POINTS)
    largest = 0.0
    for index, run in enumerate(runs):
        values = np.asarray(values_of(name, run.records)) * scale
        if values.size:
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            panel.plot(np.percentile(values, shares), shares / 100, color=colour, label=run.name)
            largest = max(largest, float(np.percentile(values, _LARGEST_SHOWN)))
    panel.set_title(TITLES[name].capitalize())
    panel.set_xlabel(unit)
    panel.set_xlim(0, largest * 1.02 or 1)
    panel.set_ylim(0, 1)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.grid(alpha=0.25)


def _draw_moments(
    panel: Axes,
    moments: Sequence[ClusterMoment],
    value: Callable[[ClusterMoment], float],
    colour: str,
    label: str | None,
) -> None:
    times = [moment.at_s for moment in moments]
    panel.plot(times, [value(moment) for moment in moments], color=colour, linewidth=1.5,
               label=label)  # fmt: skip
