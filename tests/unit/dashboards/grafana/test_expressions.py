"""Every dashboard query parses and uses only metrics and labels that exist."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from dashboards.prometheus import rule_groups
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind, Metric
from tests.fakes.grafana import View, all_queries, boards
from tests.fakes.tools import needs

VIEW = View(1000.0, 4600.0)
needs_promtool = needs("promtool")
QUERIES = [pytest.param(query.expression, id=query.place) for query in all_queries()] + [
    pytest.param(event["expr"], id=f"{name} / {event['name']}")
    for name, board in boards().items()
    for event in board["annotations"]["list"]
]
# Prometheus' own series, with the labels that the dashboards use.
TARGET = {"instance", "cluster", "namespace"}
OWN = {"ALERTS": {"alertname", "alertstate", "severity", "model", *TARGET}, "up": TARGET}
RECORDS = {
    rule["record"]: {*rule["record"].partition(":")[0].split("_"), *TARGET}
    for group in rule_groups()
    for rule in group["rules"]
    if "record" in rule
}
WORDS = {"sum", "avg", "max", "min", "count", "count_values", "by", "on", "or", "and", "unless"}
WORDS |= {"offset", "group_left", "rate", "increase", "histogram_quantile", "avg_over_time"}
WORDS |= {"round", "quantile_over_time", "floor", "log2", "clamp_min", "clamp_max"}
NAME = r"[a-zA-Z_][a-zA-Z0-9_:]*"


def series_of(metric: Metric) -> Iterable[str]:
    if metric.kind is Kind.HISTOGRAM:
        return (f"{metric.name}{part}" for part in ("_bucket", "_sum", "_count"))
    return (metric.name,)


LABELS = (
    OWN
    | RECORDS
    | {
        series: {*metric.labels, "le", *TARGET}
        for metric in (*catalogue.metrics(), *catalogue.VLLM)
        for series in series_of(metric)
    }
)


def names_used(expression: str) -> set[str]:
    """Names of the series in an expression."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]|\{[^}]*\}|\$\w+', "", expression)
    bare = re.sub(r"\b(by|on|group_left)\s*\([^)]*\)", "", bare)
    return set(re.findall(rf"\b{NAME}", bare)) - WORDS


def labels_used(expression: str) -> set[str]:
    """Labels that an expression matches or aggregates by, except labels it creates."""
    made = set(re.findall(r'count_values by \(\w+\) \("(\w+)"', expression))
    matched = set(re.findall(rf"({NAME})(?:=~|!~|!=|=)\"", expression))
    grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    return (matched | {label.strip() for each in grouped for label in each.split(",")}) - made


def unknown(expression: str) -> set[str]:
    """Unknown metrics, and labels that none of the used metrics has."""
    names = names_used(expression)
    known = set().union(*(LABELS.get(name, set()) for name in names))
    return names - LABELS.keys() | labels_used(expression) - known


def parse_errors(expressions: Iterable[str], folder: Path) -> list[str]:
    """Parse errors that promtool reports."""
    file = folder / "rules.yml"
    rules = [{"record": f"r{place}", "expr": each} for place, each in enumerate(expressions)]
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", "--lint=none", str(file)], capture_output=True, text=True
    )
    said = (checked.stdout + checked.stderr).splitlines()
    return [line for line in said if "parse" in line.lower()] if checked.returncode else []


@pytest.mark.parametrize("expression", QUERIES)
def test_every_metric_and_label_exists(expression: str) -> None:
    assert names_used(expression)
    assert unknown(expression) == set()


@needs_promtool
def test_every_query_parses(tmp_path: Path) -> None:
    expressions = [VIEW.expression(str(query.values[0])) for query in QUERIES]

    assert parse_errors(expressions, tmp_path) == []


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_aggregates_to_a_bounded_set_of_labels(expression: str) -> None:
    assert re.search(r"\b(sum|avg|max|count)\b", expression)
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", expression)
    labels = {label.strip() for each in grouped for label in each.split(",")}

    bounded = {"model", "model_name", "replica", "le"}
    bounded |= {"state", "outcome", "reason", "key_class", "source", "forked"}
    bounded |= {"alertname", "severity", "alertstate", "cluster", "namespace"}
    bounded |= {"version", "vllm", "ray", "python"}
    assert labels <= bounded


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_is_of_the_selected_clusters(expression: str) -> None:
    selected = re.findall(rf"(?<![\w:])({NAME})\{{([^}}]*)\}}", expression)

    assert selected
    for name, matchers in selected:
        assert 'cluster=~"$cluster",namespace=~"$namespace"' in matchers, name


def test_every_metric_of_the_catalogue_is_on_a_dashboard() -> None:
    used = set().union(*(names_used(str(query.values[0])) for query in QUERIES))

    unseen = {metric.name for metric in catalogue.metrics() if not used & set(series_of(metric))}
    assert unseen == set()


@pytest.mark.parametrize(
    ("expression", "mistakes"),
    [
        ("sum (rate(apar_forks[5m]))", {"apar_forks"}),
        ('sum by (modle) (apar_replicas{model="x"})', {"modle"}),
        ('sum (apar_replicas{replica=~"$replica"})', {"replica"}),
        ("sum (rate(apar_request_latency_seconds[5m]))", {"apar_request_latency_seconds"}),
        ('sum (vllm:num_preemptions_total{model=~"$model"})', {"model"}),
        ("sum by (le) (increase(apar_request_threads_bucket[5m]))", set()),
        ("count by (severity) (ALERTS) or 0 * sum (up)", set()),
    ],
)
def test_unknown_metrics_and_labels_are_found(expression: str, mistakes: set[str]) -> None:
    assert unknown(expression) == mistakes


@needs_promtool
@pytest.mark.parametrize(
    "expression", ["sum(rate(up[5m])", "sum by model (up)", "rate(up)", "up[$__range]"]
)
def test_parse_errors_are_found(expression: str, tmp_path: Path) -> None:
    assert parse_errors([expression], tmp_path)
