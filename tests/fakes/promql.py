"""Names and labels that a query uses, and those that exist."""

import re

from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind, Metric
from tests.fakes.rules import CLUSTER, RULES

_NAME = r"[a-zA-Z_][\w:]*"
_GROUPING = r"\b(?:by|on|group_left)\s*\(([^)]*)\)"
_TARGET = {*CLUSTER, "instance"}
_PER_BUCKET = ("_bucket", "_sum", "_count")

METRICS: dict[str, Metric] = {
    metric.name + suffix: metric
    for metric in (*catalogue.metrics(), *catalogue.VLLM)
    for suffix in (_PER_BUCKET if metric.kind is Kind.HISTOGRAM else ("",))
}
"""Metric of the catalogue that a series belongs to."""


def names_used(expression: str) -> set[str]:
    """Return the names of the series in a query."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    bare = re.sub(rf"{_GROUPING}|\{{[^}}]*\}}|\[[^\]]*\]|\$\w+", "", bare)
    found = re.findall(rf"(?<![\w.:]){_NAME}(?![\w:]|\s*\()", bare)
    return set(found) - {"and", "or", "unless", "offset"}


def matchers(expression: str) -> set[tuple[str, str, str]]:
    """Return series, label, and value or regular expression of every matcher."""
    return {
        (name, label, value)
        for name, inside in re.findall(rf"({_NAME})\{{([^}}]*)\}}", expression)
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', inside)
    }


def grouped_by(expression: str) -> set[str]:
    """Return the labels that a query aggregates or joins by."""
    lists = re.findall(_GROUPING, expression)
    return {label.strip() for each in lists for label in each.split(",")} - {""}


def unknown(expression: str) -> set[str]:
    """Return series that do not exist, and labels that none of the query's series has."""
    names = names_used(expression)
    labels = {label for _, label, _ in matchers(expression)} | grouped_by(expression)
    # A query may make a label itself.
    labels -= set(re.findall(r'count_values by \(\w+\) \("(\w+)"', expression))
    known = set().union(*(LABELS.get(name, set()) for name in names))
    return (names - LABELS.keys()) | (labels - known)


def wrong_values(expression: str) -> set[tuple[str, str, str]]:
    """Return matchers for a value that the catalogue does not know, or that is no bucket bound."""
    declared: dict[str, set[str]] = {"job": {"apar"}}
    for metric in METRICS.values():
        for label, text in metric.labels.items():
            declared.setdefault(label, set()).update(re.findall(r"\w+", text))
    return {
        (name, label, value)
        for name, label, values in matchers(expression)
        for value in values.split("|")
        if not value.startswith("$")
        if (
            float(value) not in METRICS[name].buckets
            if label == "le"
            else value not in declared.get(label, {value})
        )
    }


LABELS: dict[str, set[str]] = {
    "ALERTS": {"alertname", "alertstate", "severity", "model", *_TARGET},
    "up": {"job", *_TARGET},
    **{series: {*metric.labels, "le", *_TARGET} for series, metric in METRICS.items()},
    **{rule["record"]: grouped_by(rule["expr"]) for rule in RULES if "record" in rule},
}
"""Labels of every series that rules and dashboards may use."""
