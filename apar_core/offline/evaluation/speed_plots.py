"""Figures 4 and 6 of the paper: generation speed by category, and lengths of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.offline.evaluation.measurement import AnswerMeasurement
from apar_core.offline.evaluation.paper_figures import MEAN
from apar_core.offline.evaluation.speed_tables import SpeedRun, category_rows

_BASELINE_COLOUR = "#9aa5b1"
RUN_COLOURS = ("#2f6f9f", "#d1602b", "#4b8b3b", "#8a5a9e", "#b08d1e", "#50707a")
_GROUP_WIDTH = 0.8
_MOST_CHARACTERS_ON_AN_AXIS = 90
_NUM_LENGTH_BINS = 18
# Text stays text in an SVG, so that it can be searched; and two runs write the same bytes.
PLOT_SETTINGS: Any = {
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
    """Return figure 4, a panel for each model and set of prompts.

    None where no run was timed beside a baseline.
    """
    groups: dict[tuple[str, str], list[SpeedRun]] = {}
    for run in filter(_is_timed, runs):
        groups.setdefault((run.model, run.prompts), []).append(run)
    if not groups:
        return None
    with mpl.rc_context(PLOT_SETTINGS):
        width = 8.5 + max(map(len, groups.values()))
        figure = Figure(figsize=(width, 3.6 * len(groups)), layout="constrained")
        panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
        for panel, group in zip(panels, groups.values(), strict=True):
            _draw_speeds(panel, group)
    return figure


def length_figure(runs: Sequence[SpeedRun]) -> Figure:
    """Return figure 6: the lengths of the answers, one panel for each set of prompts."""
    prompts = list(dict.fromkeys(run.prompts for run in runs))
    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=(9.5, 3.4 * len(prompts)), layout="constrained")
        panels = figure.subplots(len(prompts), 1, squeeze=False)[:, 0]
        for panel, name in zip(panels, prompts, strict=True):
            _draw_lengths(panel, [run for run in runs if run.prompts == name])
    return figure


def save_figure(figure: Figure, path_without_suffix: Path) -> list[Path]:
    """Write a figure as PNG and as SVG; return both paths."""
    paths = [path_without_suffix.with_suffix(suffix) for suffix in (".png", ".svg")]
    with mpl.rc_context(PLOT_SETTINGS):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _is_timed(run: SpeedRun) -> bool:
    return bool(run.baseline) and all(
        answers[0].decode_s is not None for answers in (run.answers, run.baseline)
    )


def _draw_speeds(panel: Axes, runs: Sequence[SpeedRun]) -> None:
    base = _speeds(runs[0].baseline)
    names = list(dict.fromkeys(name for run in runs for name in _speeds(run.answers)))
    # The mean stands last, and apart from the categories.
    names.sort(key=lambda name: name == MEAN)
    places = np.arange(len(names), dtype=float)
    places[-1] += 0.5
    width = _GROUP_WIDTH / (1 + len(runs))
    first = -_GROUP_WIDTH / 2 + width / 2
    slow = [base.get(name, 0.0) for name in names]
    decoder = runs[0].baseline[0].decoder
    panel.bar(places + first, slow, width, color=_BASELINE_COLOUR, label=decoder)
    fastest = max(slow)
    for index, run in enumerate(runs):
        speeds = [_speeds(run.answers).get(name, 0.0) for name in names]
        fastest = max(fastest, *speeds)
        bars = panel.bar(
            places + first + (1 + index) * width,
            speeds,
            width,
            color=RUN_COLOURS[index],
            label=run.answers[0].decoder,
        )
        ratios = [fast / base if base else 0.0 for fast, base in zip(speeds, slow, strict=True)]
        # Narrow bars have room for no more than the number.
        unit, size = ("x", 9.0) if len(runs) == 1 else ("", 6.5)
        labels = [f"{ratio:.2f}{unit}" if ratio else "" for ratio in ratios]
        panel.bar_label(bars, labels, padding=2, fontsize=size)
    panel.set_xticks(places, names)
    _tilt_long_names(panel, names)
    panel.set_ylabel("tokens per second")
    panel.set_ylim(0, 1.18 * fastest)
    panel.set_title(f"{runs[0].model} on {runs[0].benchmark}")
    panel.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0)


def _tilt_long_names(panel: Axes, names: Sequence[str]) -> None:
    if max(map(len, names)) * len(names) > _MOST_CHARACTERS_ON_AN_AXIS:
        panel.tick_params(axis="x", rotation=30)
        for tick in panel.get_xticklabels():
            tick.set_horizontalalignment("right")


def _speeds(answers: Sequence[AnswerMeasurement]) -> dict[str, float]:
    return {name: row.tokens_per_s or 0.0 for name, row in category_rows(answers)}


def _length_series(runs: Sequence[SpeedRun]) -> dict[str, list[int]]:
    """Return the lengths of each run under its label, and of baselines that wrote other text."""
    series: dict[str, list[int]] = {}
    for run in runs:
        lengths = [answer.text_tokens for answer in run.answers]
        if lengths not in series.values():
            series[run.label] = lengths
        base = [answer.text_tokens for answer in run.baseline]
        if base and base not in series.values():
            series[f"{run.model} ({run.baseline[0].decoder})"] = base
    return series


def _draw_lengths(panel: Axes, runs: Sequence[SpeedRun]) -> None:
    series = _length_series(runs)
    longest = max(max(lengths) for lengths in series.values())
    bins = list(np.linspace(0, longest + 1, _NUM_LENGTH_BINS + 1))
    for index, (label, lengths) in enumerate(series.items()):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
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
