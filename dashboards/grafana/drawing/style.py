"""Colours and numbers as Grafana shows them."""

import math
from collections.abc import Mapping
from typing import Any

COLOURS = {
    "green": "#73BF69",
    "orange": "#FF9830",
    "red": "#F2495C",
    "blue": "#5794F2",
    "purple": "#B877D9",
    "yellow": "#FADE2A",
    "text": "#CCCCDC",
}
PALETTE = ("#73BF69", "#F2CC0C", "#8AB8FF", "#FF780A", "#F2495C", "#5794F2", "#B877D9", "#705DA0")
PAGE = "#111217"
PANEL = "#181B1F"
GRID = "#2C3036"
TEXT = COLOURS["text"]
SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """A value with its unit: about three digits, or `decimals` of them behind the point."""
    if math.isnan(value):
        return "NaN"
    if unit == "percentunit":
        return f"{_number(value * 100, decimals)}%"
    if unit == "s":
        if value >= 60:
            return f"{_number(value / 60, decimals)} min"
        size, name = next(((size, name) for size, name in SCALES if abs(value) >= size), (1.0, "s"))
        return f"{_number(value / size, decimals)} {name}"
    if unit == "reqps":
        return f"{_number(value, decimals)} req/s"
    for size, name in ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K")):
        if unit == "short" and abs(value) >= size:
            return f"{_number(value / size, decimals)}{name}"
    return _number(value, decimals)


def threshold_colour(value: float, field: Mapping[str, Any]) -> str:
    """The colour of the last threshold that the value reaches."""
    colour = "green"
    for step in field["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    return COLOURS[colour]


def overrides(panel: Mapping[str, Any], name: str, ref: str) -> dict[str, Any]:
    """Properties that the panel sets for a series of this name, or of this query."""
    found: dict[str, Any] = {}
    for override in panel["fieldConfig"]["overrides"]:
        matcher = override["matcher"]
        wanted = {"byName": name, "byFrameRefID": ref}[matcher["id"]]
        if matcher["options"] == wanted:
            found |= {each["id"]: each["value"] for each in override["properties"]}
    return found


def _number(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
