"""Tables and rows of bars: values of the moment, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge as bars
from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.grafana.panels import (
    IDLE,
    Limits,
    Query,
    Text,
    Unit,
    framed,
    last_value,
    letter,
    target,
    thresholds,
)


@dataclass(frozen=True, slots=True)
class Column:
    """An expression whose series are the rows; `limits` colour its cells."""

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
    """A row for each combination of the labels `keys` (label to title), a column an expression.

    `numbers` are the labels among them whose values are numbers, and sort as such.
    `links` leads from the cells of a column, by its title: what the link is called, and its URL.
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


def bar_row(
    text: Text, *queries: Query, colour: str = "blue", decimals: int | None = None
) -> bars.Panel:
    """One horizontal bar a query."""
    panel = (
        framed(bars.Panel(), text)
        .unit(text.unit.grafana)
        .min(0)
        .no_value(IDLE)
        .thresholds(thresholds((), base=colour))
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .orientation(common.VizOrientation.HORIZONTAL)
        .show_unfilled(False)
        .sizing(common.BarGaugeSizing.MANUAL)
        .min_viz_height(16)
        .max_viz_height(32)
        .legend(
            shared.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(False)
            .calcs([])
        )
        .reduce_options(last_value())
    )
    for number, query in enumerate(queries):
        panel = panel.with_target(target(query, letter(number), instant=True))
    return panel if decimals is None else panel.decimals(decimals)


def _columns(keys: Mapping[str, str], columns: Sequence[Column]) -> dashboard.DataTransformerConfig:
    """Give the columns their titles and order, and hide the time."""
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
