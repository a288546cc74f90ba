"""Figures 5a and 5b of the paper, and the methods as bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.lab.experiments.methods import METHODS
from cluster.lab.experiments.tables import PAPER_LATENCY, PAPER_THROUGHPUT, Comparison
from cluster.lab.plots import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
Line = Sequence[tuple[float, float]]

_PANEL_SIZE = (4.6, 3.3)


def throughput_figure(found: Panels) -> Figure:
    """Return figure 5a: throughput by share of the KV cache, above its ratio to sequential."""
    with _two_rows(found) as (figure, columns):
        for upper, lower, comparisons in columns:
            for method, chosen in _by_method(comparisons).items():
                spreads = [each.pairs[0][0].throughput for each in chosen]
                upper.errorbar(
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
            _draw_ratios(
                lower,
                comparisons,
                PAPER_THROUGHPUT,
                lambda each: (each.key.kv_share, each.throughput),
            )
            _label(upper, lower, "text tokens / s", "throughput x sequential")
            for panel in (upper, lower):
                _share_axis(panel)
    return figure


def latency_figure(found: Panels) -> Figure:
    """Return figure 5b: mean latency by concurrency, above its ratio to sequential."""
    with _two_rows(found) as (figure, columns):
        for upper, lower, comparisons in columns:
            for method, chosen in _by_method(comparisons).items():
                upper.plot(
                    [each.key.concurrency for each in chosen],
                    [each.pairs[0][0].latency_s.mean for each in chosen],
                    "o-",
                    color=METHOD_COLOURS[method],
                    label=method,
                )
            _draw_ratios(
                lower,
                comparisons,
                PAPER_LATENCY,
                lambda each: (each.key.concurrency, each.latency),
            )
            _label(upper, lower, "mean latency, s", "mean latency x sequential")
            numbers = sorted({each.key.concurrency for each in comparisons})
            for panel in (upper, lower):
                panel.set_xscale("log", base=2)
                panel.set_xticks(numbers, [str(number) for number in numbers], fontsize=8)
                panel.minorticks_off()
                panel.set_xlabel("concurrent requests")
    return figure


def peers_figure(found: Panels) -> Figure:
    """Return throughput and latency of each method relative to sequential decoding, as bars."""
    height = (0.9 + 0.3 * max(map(len, found.values()))) * len(found)
    with panels(len(found), 2, (12, height), sharey="row") as (figure, axes):
        for (throughput, latency), (title, comparisons) in zip(axes, found.items(), strict=True):
            _draw_bars(throughput, comparisons, lambda each: each.throughput)
            throughput.set_title(f"Throughput x, {title}")
            _draw_bars(latency, comparisons, lambda each: each.latency)
            latency.set_title("Mean latency x")
    return figure


def family_figure(found: Mapping[str, Mapping[str, Line]]) -> Figure:
    """Return one panel per title, with lines of (share of the KV cache, throughput) by label."""
    styles = (
        ("#9aa5b1", "o-"),
        *((METHOD_COLOURS["eager"], style) for style in ("o-", "o--", "o:")),
    )
    width, height = _PANEL_SIZE
    with panels(1, len(found), (width * len(found), height), sharey=True) as (figure, (axes,)):
        for panel, (title, lines) in zip(axes, found.items(), strict=True):
            for (colour, style), (label, line) in zip(styles, lines.items(), strict=False):
                shares, ratios = zip(*line, strict=True)
                panel.plot(shares, ratios, style, color=colour, label=label)
            panel.set_title(f"{title}, predicted")
            panel.set_ylim(bottom=1)
            _share_axis(panel)
        axes[0].set_ylabel("throughput x sequential")
        axes[-1].legend(frameon=False, fontsize=8)
    return figure


@contextmanager
def _two_rows(
    found: Panels,
) -> Iterator[tuple[Figure, list[tuple[Axes, Axes, Sequence[Comparison]]]]]:
    """Provide an upper and a lower panel for each title; the legends are added at the end."""
    width, height = _PANEL_SIZE
    # A single panel needs room for its title.
    size = (max(width * len(found), 6.5), 2 * height)
    with panels(2, len(found), size) as (figure, (uppers, lowers)):
        yield figure, list(zip(uppers, lowers, found.values(), strict=True))
        for upper, title in zip(uppers, found, strict=True):
            upper.set_title(title)
        uppers[0].legend(frameon=False)
        # With a frame, because the band behind the legend has the colour of its legend entry.
        lowers[0].legend(loc="upper right", fontsize=8)


def _label(upper: Axes, lower: Axes, value: str, ratio: str) -> None:
    upper.set_ylabel(value)
    upper.margins(y=0.1)
    upper.set_ylim(bottom=0)
    lower.set_ylabel(ratio)


def _draw_ratios(
    panel: Axes,
    found: Sequence[Comparison],
    paper: tuple[float, float],
    point: Callable[[Comparison], tuple[float, float]],
) -> None:
    panel.axhspan(*paper, color="#e4e7eb", label="range in the paper (A100, 7B and 13B)")
    panel.axhline(1, color=METHOD_COLOURS["sequential"], linewidth=1)
    for method, chosen in _by_method(found).items():
        if METHODS[method].is_ours:
            places, ratios = zip(*map(point, chosen), strict=True)
            panel.plot(places, ratios, "o-", color=METHOD_COLOURS[method])
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
