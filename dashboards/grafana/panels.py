"""Panels with the appearance that all dashboards share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import dashboard as frame
from grafana_foundation_sdk.builders import gauge as gauges
from grafana_foundation_sdk.builders import heatmap as heatmaps
from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.builders import stat as stats
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.builders import timeseries as plots
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard, heatmap, units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
IDLE = "idle"
"""Shown by a panel when nothing was observed and a ratio therefore has no value."""

AnyPanel = Builder[dashboard.Panel]
"""Common type of all panel builders."""
Framed = TypeVar("Framed", plots.Panel, stats.Panel, gauges.Panel, heatmaps.Panel, tables.Panel)
Limits = tuple[tuple[float, str], ...]
"""Pairs of a lower bound and the colour from there on; below the first bound it is green."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Grafana's name of a unit, and an axis label where that name does not show the unit."""

    grafana: str
    axis: str = ""


REQUESTS_PER_S = Unit(units.RequestsPerSecond)
SECONDS = Unit(units.Seconds)
SHARE = Unit(units.PercentUnit)
TOKENS_PER_S = Unit(units.Short, "tokens/s")
BLOCKS_PER_S = Unit(units.Short, "blocks/s")
STEPS_PER_S = Unit(units.Short, "steps/s")
FORKS_PER_S = Unit(units.Short, "forks/s")
JOINS_PER_S = Unit(units.Short, "joins/s")
ROWS_PER_S = Unit(units.Short, "rows/s")
DECISIONS_PER_S = Unit(units.Short, "decisions/s")
REQUESTS = Unit(units.Short, "requests")
REPLICAS = Unit(units.Short, "replicas")
THREADS = Unit(units.Short, "threads")
BLOCKS = Unit(units.Short, "blocks")
TOKENS = Unit(units.Short, "tokens")
LEVELS = Unit(units.Short, "levels")
ALERTS = Unit(units.Short, "alerts")
GATEWAYS = Unit(units.Short, "gateways")
BATCHES = Unit(units.Short, "batches")
LINES_PER_S = Unit(units.Short, "lines/s")
BATCH_LINES = Unit(units.Short, "lines")
LOG_LINES = Unit(units.Short, "lines")
NODES = Unit(units.Short, "nodes")
TIMES = Unit(units.Short, "times")


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL expression and the legend of its series."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Text:
    """Title, description, unit and size of a panel (24 columns per row, height in grid rows)."""

    title: str
    description: str
    unit: Unit
    span: int = 8
    height: int = 8


def target(
    query: Query,
    ref: str,
    *,
    instant: bool = False,
    shape: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> prometheus.Dataquery:
    """Build a query; `ref` is its letter within the panel."""
    built = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(ref)
    built = built.datasource(SOURCE).format(shape)
    return built.instant() if instant else built.range()


def thresholds(limits: Limits, base: str = "green") -> frame.ThresholdsConfig:
    steps = [dashboard.Threshold(value=None, color=base)]
    steps += [dashboard.Threshold(value=value, color=colour) for value, colour in limits]
    return frame.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def framed(panel: Framed, text: Text) -> Framed:
    """Set title, description, data source and size of a panel."""
    return (
        panel.title(text.title)
        .description(text.description)
        .datasource(SOURCE)
        .span(text.span)
        .height(text.height)
    )


def lines(
    text: Text,
    *queries: Query,
    stacked: bool = False,
    at_least: float | None = None,
    limits: Limits = (),
    colours: Mapping[str, str] | None = None,
    right_axis: Mapping[str, Unit] | None = None,
) -> plots.Panel:
    """Plot values over time.

    `at_least` is the minimum upper end of the axis. `colours` maps names of series to colours.
    `right_axis` maps letters of queries to the unit of a second axis on the right.
    """
    panel = (
        framed(plots.Panel(), text)
        .unit(text.unit.grafana)
        .min(0)
        .line_width(1)
        .fill_opacity(70 if stacked else 8)
        .show_points(common.VisibilityMode.AUTO)
        .axis_label(text.unit.axis)
        .legend(
            shared.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(
            shared.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .thresholds(thresholds(limits))
        .color_scheme(frame.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    )
    if at_least is not None:
        panel = panel.axis_soft_max(at_least)
    if stacked:
        # The line of a series at 0 would cover the line of the series below it.
        panel = panel.line_width(0).stacking(
            shared.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
        )
    if limits:
        style = shared.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    for name, colour in (colours or {}).items():
        panel = panel.override_by_name(name, [_fixed_colour(colour)])
    for ref, unit in (right_axis or {}).items():
        panel = panel.override_by_query(ref, _on_the_right(unit))
    for number, query in enumerate(queries):
        panel = panel.with_target(target(query, letter(number)))
    return panel


def stat(
    text: Text,
    query: Query,
    *,
    limits: Limits = (),
    base: str | None = None,
    instant: bool = False,
    decimals: int | None = None,
) -> stats.Panel:
    """Show the newest value as a number; `instant` if the expression covers the whole range.

    `base` is the colour below the first of the limits: by default green, or blue without limits.
    """
    panel = (
        framed(stats.Panel(), text)
        .unit(text.unit.grafana)
        .no_value(IDLE)
        .thresholds(thresholds(limits, base or ("green" if limits else "blue")))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE if instant else common.BigValueGraphMode.AREA)
        .reduce_options(last_value())
        .with_target(target(query, "A", instant=instant))
    )
    return panel if decimals is None else panel.decimals(decimals)


def gauge(text: Text, query: Query, *, maximum: float, limits: Limits) -> gauges.Panel:
    """Show the newest value on a scale from 0 to `maximum`."""
    return (
        framed(gauges.Panel(), text)
        .unit(text.unit.grafana)
        .min(0)
        .max(maximum)
        .no_value(IDLE)
        .thresholds(thresholds(limits))
        .show_threshold_markers(True)
        .reduce_options(last_value())
        .with_target(target(query, "A"))
    )


def buckets(text: Text, query: Query) -> heatmaps.Panel:
    """Heat map of a histogram over time; the unit is that of the bucket bounds."""
    colours = (
        heatmaps.HeatmapColorOptions()
        .mode(heatmap.HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .scale(heatmap.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .fill("dark-orange")
        .steps(64)
        .reverse(False)
    )
    return (
        framed(heatmaps.Panel(), text)
        .calculate(False)
        .color(colours)
        .cell_gap(1)
        .cell_values(heatmaps.CellValues().unit(text.unit.grafana))
        .filter_values(heatmaps.FilterValueRange().le(1e-9))
        .y_axis(
            heatmaps.YAxisConfig().axis_label(text.unit.axis).unit(text.unit.grafana).decimals(0)
        )
        .show_legend()
        .mode(common.TooltipDisplayMode.SINGLE)
        .exemplars_color("rgba(255,0,255,0.7)")
        .with_target(target(query, "A", shape=PromQueryFormat.HEATMAP))
    )


def letter(number: int) -> str:
    """Grafana's name of a panel's query."""
    return chr(ord("A") + number)


def last_value() -> shared.ReduceDataOptions:
    return shared.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)


def _fixed_colour(colour: str) -> dashboard.DynamicConfigValue:
    return dashboard.DynamicConfigValue(
        id_val="color", value={"mode": "fixed", "fixedColor": colour}
    )


def _on_the_right(unit: Unit) -> list[dashboard.DynamicConfigValue]:
    values: Sequence[tuple[str, object]] = (
        ("unit", unit.grafana),
        ("custom.axisLabel", unit.axis),
        ("custom.axisPlacement", common.AxisPlacement.RIGHT.value),
        ("custom.fillOpacity", 0),
    )
    return [dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in values]


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: one row per series of the expression; `limits` colour the cells."""

    title: str
    expression: str
    unit: Unit
    limits: Limits = ()
    decimals: int | None = None


def table(
    text: Text,
    keys: Mapping[str, str],
    columns: Sequence[Column],
    *,
    sorted_by: str,
    numbers: Sequence[str] = (),
    links: Mapping[str, tuple[str, str]] | None = None,
) -> tables.Panel:
    """Build a table with a row per combination of labels and a column per expression.

    `keys` maps labels to column titles. `numbers` lists the labels to sort as numbers.
    `links` maps a column title to the link of its cells, as (name, URL).
    """
    panel = (
        framed(tables.Panel(), text)
        .unit(text.unit.grafana)
        .thresholds(thresholds((), base="text"))
        .sort_by([shared.TableSortByFieldState().display_name(sorted_by).desc(False)])
        .with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(_as_numbers(numbers))
        .with_transformation(_columns(keys, columns))
    )
    for number, column in enumerate(columns):
        query = Query(column.expression, "")
        panel = panel.with_target(
            target(query, letter(number), instant=True, shape=PromQueryFormat.TABLE)
        )
        panel = panel.override_by_name(column.title, _cells(column))
    for title, (name, url) in (links or {}).items():
        link = dashboard.DynamicConfigValue(id_val="links", value=[{"title": name, "url": url}])
        panel = panel.override_by_name(title, [link])
    return panel


def _columns(keys: Mapping[str, str], columns: Sequence[Column]) -> dashboard.DataTransformerConfig:
    """Set titles and order of the columns, and hide the time."""
    # With one query Grafana calls its column "Value", with several "Value #A" and so on.
    values = (
        ["Value"]
        if len(columns) == 1
        else [f"Value #{letter(number)}" for number in range(len(columns))]
    )
    names = [*keys, *values]
    titles = [*keys.values(), *(column.title for column in columns)]
    options = {
        "excludeByName": {"Time": True},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": dict(zip(names, titles, strict=True)),
    }
    return dashboard.DataTransformerConfig(id_val="organize", options=options)


def _as_numbers(labels: Sequence[str]) -> dashboard.DataTransformerConfig:
    conversions = [{"targetField": label, "destinationType": "number"} for label in labels]
    return dashboard.DataTransformerConfig(
        id_val="convertFieldType", options={"fields": {}, "conversions": conversions}
    )


def _cells(column: Column) -> list[dashboard.DynamicConfigValue]:
    properties: list[tuple[str, object]] = [("unit", column.unit.grafana)]
    if column.decimals is not None:
        properties.append(("decimals", column.decimals))
    if column.limits:
        steps: list[dict[str, object]] = [{"color": "text", "value": None}]
        steps += [{"color": colour, "value": value} for value, colour in column.limits]
        properties.append(("thresholds", {"mode": "absolute", "steps": steps}))
        properties.append(("custom.cellOptions", {"type": "color-text"}))
    return [dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in properties]
