"""Figures 4 and 6 of the paper: generation speed by category, and lengths of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.evaluation.paper_figures import MEAN
from apar_core.evaluation.speed_tables import SpeedRun, category_rows

_BASELINE_COLOUR = "#9aa5b1"
_SPEED_COLOUR = "#2f6f9f"
_RUN_COLOURS = ("#2f6f9f", "#d1602b", "#4b8b3b", "#8a5a9e", "#b08d1e", "#50707a")
_BAR_WIDTH = 0.38
_NUM_LENGTH_BINS = 18
# Text stays text in an SVG, so that it can be searched; and two runs write the same bytes.
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "apar-serve",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def speed_figure(runs: Sequence[SpeedRun]) -> Figure | None:
    """Return figure 4, one panel a run; None where no run was timed beside a baseline."""
    timed = [run for run in runs if _is_timed(run)]
    if not timed:
        return None
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(9.5, 3.6 * len(timed)), layout="constrained")
        panels = figure.subplots(len(timed), 1, squeeze=False)[:, 0]
        for panel, run in zip(panels, timed, strict=True):
            _draw_speeds(panel, run)
    return figure


def length_figure(runs: Sequence[SpeedRun]) -> Figure:
    """Return figure 6: the lengths of the answers, one panel for each set of prompts."""
    prompts = list(dict.fromkeys(run.prompts for run in runs))
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(9.5, 3.4 * len(prompts)), layout="constrained")
        panels = figure.subplots(len(prompts), 1, squeeze=False)[:, 0]
        for panel, name in zip(panels, prompts, strict=True):
            _draw_lengths(panel, [run for run in runs if run.prompts == name])
    return figure


def save_figure(figure: Figure, path_without_suffix: Path) -> list[Path]:
    """Write a figure as PNG and as SVG; return both paths."""
    paths = [path_without_suffix.with_suffix(suffix) for suffix in (".png", ".svg")]
    with mpl.rc_context(_SETTINGS):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _is_timed(run: SpeedRun) -> bool:
    return bool(run.baseline) and all(
        answers[0].decode_s is not None for answers in (run.answers, run.baseline)
    )


def _draw_speeds(panel: Axes, run: SpeedRun) -> None:
    speeds = {name: row.tokens_per_s or 0.0 for name, row in category_rows(run.answers)}
    base = {name: row.tokens_per_s or 0.0 for name, row in category_rows(run.baseline)}
    names = list(speeds)
    # The mean stands apart from the categories.
    places = np.arange(len(names), dtype=float)
    places[-1] += 0.5
    decoder = run.answers[0].decoder
    base_bars = [base.get(name, 0.0) for name in names]
    panel.bar(
        places - _BAR_WIDTH / 2,
        base_bars,
        _BAR_WIDTH,
        color=_BASELINE_COLOUR,
        label=run.baseline[0].decoder,
    )
    bars = panel.bar(
        places + _BAR_WIDTH / 2,
        list(speeds.values()),
        _BAR_WIDTH,
        color=_SPEED_COLOUR,
        label=decoder,
    )
    labels = [
        f"{speed / slow:.2f}x" if slow else ""
        for speed, slow in zip(speeds.values(), base_bars, strict=True)
    ]
    panel.bar_label(bars, labels, padding=2, fontsize=9)
    panel.set_xticks(places, ["Mean" if name == MEAN else name for name in names])
    if max(map(len, names)) * len(names) > 90:
        panel.tick_params(axis="x", rotation=30)
        for tick in panel.get_xticklabels():
            tick.set_horizontalalignment("right")
    panel.set_ylabel("tokens per second")
    panel.set_ylim(0, 1.18 * max(*speeds.values(), *base_bars))
    panel.set_title(f"{run.label} on {run.benchmark}")
    panel.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)


def _length_series(runs: Sequence[SpeedRun]) -> list[tuple[str, list[int]]]:
    """Return the lengths of each run under its label, and those of baselines of other text."""
    series = []
    for run in runs:
        lengths = [answer.text_tokens for answer in run.answers]
        series.append((run.label, lengths))
        base = [answer.text_tokens for answer in run.baseline]
        if base and base != lengths:
            series.append((f"{run.label} ({run.baseline[0].decoder})", base))
    return series


def _draw_lengths(panel: Axes, runs: Sequence[SpeedRun]) -> None:
    series = _length_series(runs)
    longest = max(max(lengths) for _, lengths in series)
    bins = list(np.linspace(0, longest + 1, _NUM_LENGTH_BINS + 1))
    for index, (label, lengths) in enumerate(series):
        colour = _RUN_COLOURS[index % len(_RUN_COLOURS)]
        mean = sum(lengths) / len(lengths)
        weights = [1 / len(lengths)] * len(lengths)
        panel.hist(lengths, bins, weights=weights, histtype="stepfilled", color=colour, alpha=0.18)
        panel.hist(
            lengths,
            bins,
            weights=weights,
            histtype="step",
            color=colour,
            linewidth=1.6,
            label=f"{label}: mean {mean:.0f}",
        )
        panel.axvline(mean, color=colour, linestyle="--", linewidth=1.1)
    panel.set_xlim(0, 1.01 * (longest + 1))
    panel.set_xlabel("tokens of an answer")
    panel.set_ylabel("share of the answers")
    panel.set_title(f"Response length on {runs[0].benchmark}")
    panel.legend(frameon=False, loc="upper right")
