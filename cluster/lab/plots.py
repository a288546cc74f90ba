"""Figures of reports: their look, and panels side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from apar_core.reporting import PLOT_SETTINGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def panels(
    rows: int, columns: int, size: tuple[float, float], **sharing: Any
) -> Iterator[tuple[Figure, Any]]:
    """Provide a figure of a size in inches and its axes [rows, columns], with the reports' look."""
    # matplotlib takes a second to import.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(PLOT_SETTINGS):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def shared_legend(figure: Figure, panel: Axes) -> None:
    """Add the legend of one panel below all of them."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
