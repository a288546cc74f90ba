"""Columns of tables and panels of figures, for the reports."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apar_core.reporting import PLOT_SETTINGS, Column

INTERVAL = "95% interval"
"""Title of the column with the interval of the figure before it."""

Panel = tuple[str, str, str, Callable[[Axes], None]]
"""Title, label of each axis, and the function that draws the panel."""


def columns(header: str) -> tuple[Column, ...]:
    """Return the columns of a header such as "Decoder | Steps :d | Tokens/s :.1f".

    A number's format stands after the title, as in an f-string.
    """
    parts = (part.rpartition(" :") for part in header.split(" | "))
    return tuple(Column(title or form, form if title else "") for title, _, form in parts)


def figure(
    size: tuple[float, float], *panels: Panel, legend: bool = True, font_size: int = 8
) -> Figure:
    """Return panels side by side, each with a legend of what has a label."""
    with mpl.rc_context(PLOT_SETTINGS):
        found = Figure(figsize=size, layout="constrained")
        places = found.subplots(1, len(panels), squeeze=False)[0]
        for panel, (title, x, y, draw) in zip(places, panels, strict=True):
            draw(panel)
            panel.set(title=title, xlabel=x, ylabel=y)
            if legend and panel.get_legend_handles_labels()[0]:
                panel.legend(frameon=False, fontsize=font_size)
    return found
