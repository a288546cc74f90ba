"""Panels in the look that all dashboards share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge as bars
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
"""What a panel says when nothing was observed, so that a ratio has no value."""

AnyPanel = Builder[dashboard.Panel]
"""What the builders of all kinds of panels have in common."""
Framed = TypeVar(
    "Framed", plots.Panel, stats.Panel, gauges.Panel, heatmaps.Panel, tables.Panel, bars.Panel
)
Limits = tuple[tuple[float, str], ...]
"""Colours of values from a bound upwards; below the first the colour is green."""


@dataclass(frozen=True, slots=True)
class Unit:
    """How Grafana writes values, and what stands at their axis where that does not say it."""

    grafana: str
    axis: str = ""


REQUESTS_PER_S = Unit(units.RequestsPerSecond)
SECONDS = Unit(units.Seconds)
SHARE = Unit(units.PercentUnit)
TOKENS_PER_S = Unit(units.Short, "tokens/s")
BLOCKS_PER_S = Unit(units.Short, "blocks/s")
STEPS_PER_S = Unit(units.Short, "steps/s")
FORKS_PER_S = Unit(units.Short, "forks/s")
DECISIONS_PER_S = Unit(units.Short, "decisions/s")
REQUESTS = Unit(units.Short, "requests")
REPLICAS = Unit(units.Short, "replicas")
THREADS = Unit(units.Short, "threads")
BLOCKS = Unit(units.Short, "blocks")
TOKENS = Unit(units.Short, "tokens")
LEVELS = Unit(units.Short, "levels")
ALERTS = Unit(units.Short, "alerts")
GATEWAYS = Unit(units.Short, "gateways")
LOG_LINES = Unit(units.Short, "lines")


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and what its series are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Text:
    """What a panel shows, in whose unit, and how wide it is (24 columns a row, height in rows)."""

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
    """A query as Grafana sends it; `ref` names it within its panel."""
    built = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(ref)
    built = built.datasource(SOURCE).format(shape)
    return built.instant() if instant else built.range()


def thresholds(limits: Limits, base: str = "green") -> frame.ThresholdsConfig:
    steps = [dashboard.Threshold(value=None, color=base)]
    steps += [dashboard.Threshold(value=value, color=colour) for value, colour in limits]
    return frame.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)


def framed(panel: Framed, text: Text) -> Framed:
    """What stands around the values of every panel: words, data source, size."""
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
    """Values over time.

    The axis reaches up to `at_least`. `colours` are of series by name; `right_axis` moves queries,
    by their letter, to an axis of another unit.
    """
    panel = (
        framed(plots.Panel(), text)
        .unit(text.unit.grafana)
        .min(0)
        .line_width(1)
        .fill_opacity(70 if stacked else 8)
        .show_points(common.VisibilityMode.AUTO)
        .axis_label(text.unit.axis)
        .legend(_legend())
        .tooltip(_tooltip())
        .thresholds(thresholds(limits))
        .color_scheme(frame.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    )
    if at_least is not None:
        panel = panel.axis_soft_max(at_least)
    if stacked:
        # A line of a series at 0 would lie on those below it, and hide them.
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
    base: str = "blue",
    instant: bool = False,
    decimals: int | None = None,
) -> stats.Panel:
    """The newest value in large figures; `instant` for one that covers the whole range."""
    panel = (
        framed(stats.Panel(), text)
        .unit(text.unit.grafana)
        .no_value(IDLE)
        .thresholds(thresholds(limits, base))
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE if instant else common.BigValueGraphMode.AREA)
        .reduce_options(last_value())
        .with_target(target(query, "A", instant=instant))
    )
    return panel if decimals is None else panel.decimals(decimals)


def gauge(text: Text, query: Query, *, maximum: float, limits: Limits) -> gauges.Panel:
    """The newest value on a scale that ends at `maximum`."""
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
    """A histogram over time: how much was observed in each bucket; the unit is the buckets'."""
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
    """How Grafana calls the queries of a panel."""
    return chr(ord("A") + number)


def last_value() -> shared.ReduceDataOptions:
    return shared.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)


def _legend() -> shared.VizLegendOptions:
    return (
        shared.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )


def _tooltip() -> shared.VizTooltipOptions:
    return (
        shared.VizTooltipOptions()
        .mode(common.TooltipDisplayMode.MULTI)
        .sort(common.SortOrder.DESCENDING)
    )


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
