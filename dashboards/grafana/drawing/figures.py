"""Panels of the moment: figures, gauges, bars and tables."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Wedge

from dashboards.grafana.drawing.style import COLOURS, GRID, PANEL, TEXT, shown, threshold_colour
from dashboards.grafana.results import Series

MAX_ROWS = 12
# Few bars stay thin, as the panel's largest height of a bar makes them.
LEAST_BARS = 8


def stat(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    """The newest value in large figures, over its course."""
    field = panel["fieldConfig"]["defaults"]
    [each] = series
    colour = threshold_colour(each.last, field)
    if panel["options"]["graphMode"] == "area":
        values = [value for _, value in each.points]
        places = range(len(values))
        axes.fill_between(places, 0, values, color=colour, alpha=0.2)
        axes.plot(places, values, color=colour, linewidth=1)
        axes.set_ylim(0, max(*values, 1e-9) * 2.5)
    text = shown(each.last, field["unit"], field.get("decimals"))
    _write(axes, 0.5, 0.6, text, colour, 20)
    empty(axes)


def gauge(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    """The newest value on an arc from 0 to its maximum."""
    field = panel["fieldConfig"]["defaults"]
    [each] = series
    share = min(each.last / field["max"], 1.0)
    colour = threshold_colour(each.last, field)
    axes.add_patch(Wedge((0, 0), 1, 0, 180, width=0.25, color=GRID))
    axes.add_patch(Wedge((0, 0), 1, 180 * (1 - share), 180, width=0.25, color=colour))
    axes.set_xlim(-1.1, 1.1)
    axes.set_ylim(-0.1, 1.1)
    axes.set_aspect("equal")
    _write(axes, 0.5, 0.25, shown(each.last, field["unit"]), colour, 16)
    empty(axes)


def bargauge(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    """One horizontal bar a series, the first on top."""
    field = panel["fieldConfig"]["defaults"]
    for place, each in enumerate(series):
        colour = threshold_colour(each.last, field)
        axes.barh(place, each.last, color=colour, alpha=0.7)
        text = shown(each.last, field["unit"], field.get("decimals"))
        axes.text(each.last, place, f" {text}", va="center", color=colour, fontsize=8)
    axes.set_yticks(range(len(series)), [each.name for each in series])
    axes.set_ylim(max(len(series), LEAST_BARS) - 0.5, -0.5)
    axes.margins(x=0.25)
    axes.set_xticks([])
    axes.set_facecolor(PANEL)
    axes.tick_params(colors=TEXT, labelsize=8, length=0)
    _without_spines(axes)


def table(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    """A row for each set of labels, a column for each query, named as the panel says."""
    renamed = _transformation(panel, "organize")["renameByName"]
    names = sorted(renamed, key=_transformation(panel, "organize")["indexByName"].__getitem__)
    keys = [name for name in names if not name.startswith("Value")]
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for each in series:
        column = renamed.get(f"Value #{each.ref}") or renamed["Value"]
        key = tuple(each.labels.get(label, "") for label in keys)
        rows.setdefault(key, {})[column] = each.last
    titles = [renamed[key] for key in keys]
    columns = [renamed[name] for name in names if name.startswith("Value")]
    sorted_by = titles.index(panel["options"]["sortBy"][0]["displayName"])
    order = sorted(rows, key=lambda key: _sortable(key[sorted_by]))
    texts = [
        [*key, *(_cell(panel, title, rows[key].get(title, math.nan)) for title in columns)]
        for key in order[:MAX_ROWS]
    ]
    drawn = axes.table(texts, colLabels=[*titles, *columns], loc="upper left", cellLoc="left")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    drawn.auto_set_column_width(list(range(len(titles) + len(columns))))
    for (row, _), cell in drawn.get_celld().items():
        cell.set_facecolor(PANEL)
        cell.set_edgecolor(GRID)
        cell.set_text_props(color=COLOURS["blue"] if row == 0 else TEXT)
    empty(axes)


def empty(axes: Axes) -> None:
    """No axis at all."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_facecolor(PANEL)
    _without_spines(axes)


def _cell(panel: Mapping[str, Any], title: str, value: float) -> str:
    properties: dict[str, Any] = {}
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == title:
            properties |= {each["id"]: each["value"] for each in override["properties"]}
    return "" if math.isnan(value) else shown(value, properties["unit"], properties.get("decimals"))


def _transformation(panel: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(
        each["options"] for each in panel["transformations"] if each["id"] == name
    )
    return found


def _sortable(text: str) -> tuple[float, str]:
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def _write(axes: Axes, x: float, y: float, text: str, colour: str, size: int) -> None:
    axes.text(
        x, y, text, transform=axes.transAxes, ha="center", va="center", color=colour, fontsize=size
    )


def _without_spines(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
