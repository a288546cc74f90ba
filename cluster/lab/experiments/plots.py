"""Figures 5a and 5b of the paper, and the methods as bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

from apar_core.reporting import PLOT_SETTINGS
from cluster.lab.experiments.methods import METHODS
from cluster.lab.experiments.tables import PAPER_LATENCY, PAPER_THROUGHPUT, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHOD_COLOURS = {
    "sequential": "#9aa5b1",
    "eager": "#2f6f9f",
    "adaptive": "#d1602b",
    "sequential-reserve": "#6b7681",
    "eager-unreserved": "#7fb0d3",
    "lists": "#1f9e89",
    "lists-adaptive": "#9a3b52",
    "client-forking": "#4b8b3b",
    "skeleton": "#8a5a9e",
    "parent-stops": "#b08d1e",
    "parent-stops-free": "#50707a",
}

Panels = Mapping[str, Sequence[Comparison]]
"""Comparisons by the title of their panel, which names model, trace and device."""

_PANEL_SIZE = (4.6, 3.3)


def throughput_figure(panels: Panels) -> Figure:
    """Return figure 5a: throughput by share of the KV cache, above its ratio to sequential."""
    return _figure(panels, _draw_throughput, _draw_throughput_ratio)


def latency_figure(panels: Panels) -> Figure:
    """Return figure 5b: mean latency by concurrency, above its ratio to sequential."""
    return _figure(panels, _draw_latency, _draw_latency_ratio)


def peers_figure(panels: Panels) -> Figure:
    """Return throughput and latency of each method relative to sequential decoding, as bars."""
    with mpl.rc_context(PLOT_SETTINGS):
        number = max(len(found) for found in panels.values())
        height = (0.9 + 0.3 * number) * len(panels)
        figure = Figure(figsize=(12, height), layout="constrained")
        axes = figure.subplots(len(panels), 2, squeeze=False, sharey="row")
        for (throughput, latency), (title, found) in zip(axes, panels.items(), strict=True):
            _draw_bars(throughput, found, lambda each: each.throughput)
            throughput.set_title(f"Throughput x, {title}")
            _draw_bars(latency, found, lambda each: each.latency)
            latency.set_title("Mean latency x")
    return figure


Line = Sequence[tuple[float, float]]


def family_figure(panels: Mapping[str, Mapping[str, Line]]) -> Figure:
    """Return one panel per title, with lines of (share of the KV cache, throughput) by label."""
    styles = (
        ("#9aa5b1", "o-"),
        *((METHOD_COLOURS["eager"], style) for style in ("o-", "o--", "o:")),
    )
    with mpl.rc_context(PLOT_SETTINGS):
        width, height = _PANEL_SIZE
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for panel, (title, lines) in zip(axes, panels.items(), strict=True):
            for (colour, style), (label, line) in zip(styles, lines.items(), strict=False):
                shares, ratios = zip(*line, strict=True)
                panel.plot(shares, ratios, style, color=colour, label=label)
            panel.set_title(f"{title}, predicted")
            panel.set_ylim(bottom=1)
            _share_axis(panel)
        axes[0].set_ylabel("throughput x sequential")
        axes[-1].legend(frameon=False, fontsize=8)
    return figure


def _figure(
    panels: Panels,
    draw: Callable[[Axes, Sequence[Comparison]], None],
    draw_ratio: Callable[[Axes, Sequence[Comparison]], None],
) -> Figure:
    with mpl.rc_context(PLOT_SETTINGS):
        width, height = _PANEL_SIZE
        # A single panel needs room for its title.
        size = (max(width * len(panels), 6.5), 2 * height)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(2, len(panels), squeeze=False)
        for upper, lower, (title, found) in zip(axes[0], axes[1], panels.items(), strict=True):
            draw(upper, found)
            upper.set_title(title)
            draw_ratio(lower, found)
        axes[0][0].legend(frameon=False)
        # With a frame, because the band behind the legend has the colour of its legend entry.
        axes[1][0].legend(loc="upper right", fontsize=8)
    return figure


def _draw_throughput(panel: Axes, found: Sequence[Comparison]) -> None:
    for method, chosen in _by_method(found).items():
        spreads = [each.pairs[0][0].throughput for each in chosen]
        panel.errorbar(
            [each.key.kv_share for each in chosen],
            [each.mean for each in spreads],
            # The mean of a skewed sample can lie beyond a percentile.
            yerr=[
                [max(each.mean - each.p25, 0.0) for each in spreads],
                [max(each.p75 - each.mean, 0.0) for each in spreads],
            ],
            fmt="o-",
            capsize=3,
            color=METHOD_COLOURS[method],
            label=method,
        )
    panel.set_ylabel("text tokens / s")
    panel.margins(y=0.1)
    panel.set_ylim(bottom=0)
    _share_axis(panel)


def _draw_throughput_ratio(panel: Axes, found: Sequence[Comparison]) -> None:
    _draw_ratios(
        panel, found, lambda each: each.key.kv_share, lambda each: each.throughput, PAPER_THROUGHPUT
    )
    panel.set_ylabel("throughput x sequential")
    _share_axis(panel)


def _draw_latency(panel: Axes, found: Sequence[Comparison]) -> None:
    for method, chosen in _by_method(found).items():
        panel.plot(
            [each.key.concurrency for each in chosen],
            [each.pairs[0][0].latency_s.mean for each in chosen],
            "o-",
            color=METHOD_COLOURS[method],
            label=method,
        )
    panel.set_ylabel("mean latency, s")
    panel.margins(y=0.1)
    panel.set_ylim(bottom=0)
    _concurrency_axis(panel, found)


def _draw_latency_ratio(panel: Axes, found: Sequence[Comparison]) -> None:
    _draw_ratios(
        panel, found, lambda each: each.key.concurrency, lambda each: each.latency, PAPER_LATENCY
    )
    panel.set_ylabel("mean latency x sequential")
    _concurrency_axis(panel, found)


def _draw_ratios(
    panel: Axes,
    found: Sequence[Comparison],
    place: Callable[[Comparison], float],
    value: Callable[[Comparison], float],
    paper: tuple[float, float],
) -> None:
    panel.axhspan(*paper, color="#e4e7eb", label="range in the paper (A100, 7B and 13B)")
    panel.axhline(1, color=METHOD_COLOURS["sequential"], linewidth=1)
    for method, chosen in _by_method(found).items():
        if METHODS[method].is_ours:
            panel.plot(
                [place(each) for each in chosen],
                [value(each) for each in chosen],
                "o-",
                color=METHOD_COLOURS[method],
            )
    low, high = panel.get_ylim()
    # Room for the legend.
    panel.set_ylim(min(low, 0.9), max(high, 1.1) + 0.1)


def _draw_bars(
    panel: Axes, found: Sequence[Comparison], value: Callable[[Comparison], float]
) -> None:
    chosen = list(reversed(found))
    values = [value(each) for each in chosen]
    colours = [
        METHOD_COLOURS["eager" if METHODS[each.key.method].is_ours else "sequential"]
        for each in chosen
    ]
    titles = [METHODS[each.key.method].title for each in chosen]
    bars = panel.barh(titles, values, 0.75, color=colours)
    panel.bar_label(bars, [f"{each:.2f}" for each in values], padding=3, fontsize=8)
    panel.axvline(1, color="#52606d", linewidth=0.8, linestyle=":")
    panel.set_xlim(0, 1.12 * max(values))


def _by_method(found: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    methods: dict[str, list[Comparison]] = {}
    for each in found:
        methods.setdefault(each.key.method, []).append(each)
    return methods


def _share_axis(panel: Axes) -> None:
    panel.set_xlabel("share of the KV cache")
    panel.set_xlim(0, 1)


def _concurrency_axis(panel: Axes, found: Sequence[Comparison]) -> None:
    numbers = sorted({each.key.concurrency for each in found})
    panel.set_xscale("log", base=2)
    panel.set_xticks(numbers, [str(number) for number in numbers], fontsize=8)
    panel.minorticks_off()
    panel.set_xlabel("concurrent requests")
