"""Throughput and latency of each method, as bars beside sequential decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from apar_core.reporting import PLOT_SETTINGS, RUN_COLOURS
from cluster.experiments.peers.methods import METHODS
from cluster.experiments.peers.table import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cluster.experiments.peers.table import Value

_HEIGHT = 0.8
_OTHERS, _OURS = "#9aa5b1", RUN_COLOURS[0]


def peers_figure(found: Sequence[Comparison]) -> Figure:
    """Return two panels for each share of the KV cache."""
    with mpl.rc_context(PLOT_SETTINGS):
        number = len(found[0].methods)
        figure = Figure(figsize=(12, (0.9 + 0.4 * number) * len(found)), layout="constrained")
        panels = figure.subplots(len(found), 2, squeeze=False, sharey="row")
        for (throughput, latency), comparison in zip(panels, found, strict=True):
            share = f"{comparison.kv_share:g} of the KV cache"
            _draw(throughput, comparison, comparison.speed, ".0f")
            throughput.set_title(f"Text tokens/s, {share}")
            _draw(latency, comparison, lambda run: run.latency_mean_s, ".2f")
            latency.set_title(f"Mean latency in s, {share}")
    return figure


def _draw(panel: Axes, comparison: Comparison, value: Value, form: str) -> None:
    methods = list(reversed(comparison.methods))
    values = [comparison.median(name, value) for name in methods]
    colours = [_OURS if METHODS[name].is_ours else _OTHERS for name in methods]
    bars = panel.barh([METHODS[name].title for name in methods], values, _HEIGHT, color=colours)
    panel.bar_label(bars, [format(each, form) for each in values], padding=3, fontsize=8)
    panel.set_xlim(0, 1.15 * max(values))
