"""Panels over time: lines, stacks and heat maps."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from dashboards.grafana.drawing.style import COLOURS, GRID, PALETTE, PANEL, TEXT, overrides, shown
from dashboards.grafana.results import Series

HEAT = LinearSegmentedColormap.from_list("heat", (PANEL, "#7A3E00", "#FF9830", "#FFF3E0"))
LEGEND_COLUMNS = 3


def timeseries(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    """Lines, or a stack of them, with the legend below."""
    field = panel["fieldConfig"]["defaults"]
    stacked = field["custom"].get("stacking", {}).get("mode") == "normal"
    opacity = field["custom"]["fillOpacity"] / 100
    right: Axes | None = None
    base = np.zeros(0)
    for number, each in enumerate(series):
        special = overrides(panel, each.name, each.ref)
        colour = PALETTE[number % len(PALETTE)]
        if "color" in special:
            colour = COLOURS[special["color"]["fixedColor"]]
        times, values = _with_gaps(each)
        if special.get("custom.axisPlacement") == "right":
            right = right or _right_axis(axes, special, panel)
            right.plot(times, values, color=colour, linewidth=1, linestyle="--", label=each.name)
        elif stacked and len(values) == len(base):
            _area(axes, times, base, base + values, color=colour, alpha=opacity, label=each.name)
            base = base + values
        elif stacked:
            _area(axes, times, 0, values, color=colour, alpha=opacity, label=each.name)
            base = values
        else:
            _area(axes, times, 0, values, color=colour, alpha=opacity)
            axes.plot(times, values, color=colour, linewidth=1, label=each.name)
    _limits(axes, field)
    axes.set_ylim(0, max(axes.get_ylim()[1], field["custom"].get("axisSoftMax", 0)))
    axes.set_ylabel(field["custom"]["axisLabel"], color=TEXT, fontsize=7)
    _frame(axes, field["unit"], panel)
    _legend(axes, right)


def heatmap(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    """Counts of buckets over time; the series are cumulative, one an upper bound `le`."""
    bounds = sorted(series, key=lambda each: float(each.labels["le"]))
    times = sorted({time for each in bounds for time, _ in each.points})
    cumulative = np.zeros((len(bounds), len(times)))
    for row, each in enumerate(bounds):
        at = dict(each.points)
        cumulative[row] = [at.get(time, 0.0) for time in times]
    counts = np.diff(cumulative, axis=0, prepend=0).clip(min=0)
    shape = panel["options"]
    step_s = times[1] - times[0] if len(times) > 1 else 1.0
    edges = [time_s - step_s / 2 for time_s in (*times, times[-1] + step_s)]
    mesh = axes.pcolormesh(
        edges,
        np.arange(len(bounds) + 1),
        counts,
        cmap=HEAT,
        norm=PowerNorm(shape["color"]["exponent"], vmin=0),
    )
    axes.set_yticks(np.arange(len(bounds)) + 0.5, [each.name.removesuffix(".0") for each in bounds])
    axes.set_ylabel(shape["yAxis"]["axisLabel"], color=TEXT, fontsize=8)
    _frame(axes, None, panel)
    bar = axes.figure.colorbar(mesh, ax=axes, fraction=0.03, pad=0.01)
    bar.ax.tick_params(colors=TEXT, labelsize=7)


def _area(axes: Axes, *shape: Any, **look: Any) -> None:
    # Without an edge, so that an area of height 0 cannot be seen.
    axes.fill_between(*shape, linewidth=0, **look)


def _with_gaps(series: Series) -> tuple[list[float], NDArray[np.float64]]:
    """Times and values; where points are missing a NaN ends the line, as in Grafana."""
    times, values = [time_s for time_s, _ in series.points], [value for _, value in series.points]
    steps = [after - before for before, after in pairwise(times)]
    step_s = min(steps, default=0.0)
    for place in reversed(range(len(steps))):
        if steps[place] > 1.5 * step_s:
            times.insert(place + 1, times[place] + step_s)
            values.insert(place + 1, math.nan)
    return times, np.array(values)


def _clock(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%H:%M:%S}"


def _right_axis(axes: Axes, special: Mapping[str, Any], panel: Mapping[str, Any]) -> Axes:
    right = axes.twinx()
    right.set_ylabel(special["custom.axisLabel"], color=TEXT, fontsize=7)
    _frame(right, special["unit"], panel)
    right.grid(False)
    return right


def _limits(axes: Axes, field: Mapping[str, Any]) -> None:
    if "thresholdsStyle" not in field["custom"]:
        return
    for step in field["thresholds"]["steps"]:
        if step["value"] is not None:
            colour = COLOURS[step["color"]]
            axes.axhline(step["value"], color=colour, linestyle="--", linewidth=0.8)


def _frame(axes: Axes, unit: str | None, panel: Mapping[str, Any]) -> None:
    axes.set_facecolor(PANEL)
    axes.grid(color=GRID, linewidth=0.5)
    axes.tick_params(colors=TEXT, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.locator_params(axis="x", nbins=max(2, panel["gridPos"]["w"] // 2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: _clock(time_s)))
    if unit is not None:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))


def _legend(axes: Axes, right: Axes | None) -> None:
    handles, names = axes.get_legend_handles_labels()
    if right is not None:
        right.set_ylim(bottom=0)
        more, more_names = right.get_legend_handles_labels()
        handles, names = [*handles, *more], [*names, *more_names]
    axes.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0, -0.12),
        ncols=max(LEGEND_COLUMNS, math.ceil(len(names) / 2)),
        fontsize=7,
        labelcolor=TEXT,
        frameon=False,
    )
