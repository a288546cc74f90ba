"""Figures 5a and 5b of the paper, and the step time of a model against its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.reporting import PLOT_SETTINGS
from cluster.experiments.cells import Cell
from cluster.experiments.settings import MODES

if TYPE_CHECKING:
    from cluster.experiments.step_curve import StepCurve

MODE_COLOURS = {"sequential": "#9aa5b1", "eager": "#2f6f9f", "adaptive": "#d1602b"}


def throughput_figure(cells_of_trace: Mapping[str, Sequence[Cell]]) -> Figure:
    """Return figure 5a, a panel for each trace: means, and bars between the quartiles."""
    with mpl.rc_context(PLOT_SETTINGS):
        number = len(cells_of_trace)
        figure = Figure(figsize=(5.5 * number, 4), layout="constrained")
        panels = figure.subplots(1, number, squeeze=False)[0]
        for panel, (trace, cells) in zip(panels, cells_of_trace.items(), strict=True):
            _draw(panel, cells, lambda cell: cell.key.kv_share, lambda cell: cell.throughput)
            panel.set_title(f"Throughput, {trace} trace")
            panel.set_xlabel("share of the KV cache")
            panel.set_ylabel("text tokens / s")
            panel.set_xlim(0, 1)
            panel.set_ylim(bottom=0)
        panels[0].legend(frameon=False)
    return figure


def latency_figure(cells: Sequence[Cell]) -> Figure:
    """Return figure 5b: mean latency of an answer, and of a token of it."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(11, 4), layout="constrained")
        whole, token = figure.subplots(1, 2)
        _draw(whole, cells, lambda cell: cell.key.concurrency or 0, lambda cell: cell.latency_s)
        whole.set_title("Mean latency of an answer")
        whole.set_ylabel("s")
        for mode in MODES:
            chosen = [cell for cell in cells if cell.key.mode == mode]
            if chosen:
                token.plot(
                    [cell.key.concurrency for cell in chosen],
                    [1000 * cell.token_latency_s for cell in chosen],
                    "o-",
                    color=MODE_COLOURS[mode],
                    label=mode,
                )
        token.set_title("Latency a text token")
        token.set_ylabel("ms")
        numbers = sorted({cell.key.concurrency or 0 for cell in cells})
        for panel in (whole, token):
            panel.set_xscale("log", base=2)
            panel.set_xticks(numbers, [str(number) for number in numbers])
            panel.set_xlabel("requests under way")
            panel.set_ylim(bottom=0)
        whole.legend(frameon=False)
    return figure


def _draw(
    panel: Axes, cells: Sequence[Cell], place: Callable[[Cell], float], value: Callable[[Cell], Any]
) -> None:
    for mode in MODES:
        chosen = sorted((cell for cell in cells if cell.key.mode == mode), key=place)
        if not chosen:
            continue
        spreads = [value(cell) for cell in chosen]
        panel.errorbar(
            [place(cell) for cell in chosen],
            [each.mean for each in spreads],
            # The mean of a skewed sample can lie beyond a percentile.
            yerr=[
                [max(each.mean - each.p25, 0.0) for each in spreads],
                [max(each.p75 - each.mean, 0.0) for each in spreads],
            ],
            fmt="o-",
            capsize=3,
            color=MODE_COLOURS[mode],
            label=mode,
        )


def step_figure(curve: StepCurve) -> Figure:
    """Return the time of a step against its rows, and the throughput that follows."""
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(11, 4), layout="constrained")
        time, throughput = figure.subplots(1, 2)
        rows = [point.rows for point in curve.points]
        seconds = [point.step_s for point in curve.points]
        line = [curve.fixed_s + curve.row_s * each for each in rows]
        formula = f"{1000 * curve.fixed_s:.2f} ms + {1000 * curve.row_s:.3f} ms a row"
        colour, line_colour = MODE_COLOURS["eager"], MODE_COLOURS["sequential"]
        time.plot(rows, [1000 * each for each in seconds], "o", color=colour, label="median")
        time.plot(rows, [1000 * each for each in line], "-", color=line_colour, label=formula)
        time.set_title("Time of a decoding step")
        time.set_ylabel("ms")
        time.set_yscale("log")
        time.yaxis.set_major_formatter("{x:g}")
        rates = [point.rows / point.step_s for point in curve.points]
        throughput.plot(rows, rates, "o-", color=colour)
        throughput.set_title("Throughput of decoding")
        throughput.set_ylabel("tokens / s")
        throughput.set_ylim(bottom=0)
        for panel in (time, throughput):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
            panel.set_xlabel("rows")
            if (knee := curve.knee_rows) is not None:
                label = f"knee: {knee:.0f} rows"
                panel.axvline(knee, color=MODE_COLOURS["adaptive"], linestyle=":", label=label)
        time.legend(frameon=False, loc="upper left")
    return figure
