"""Every dashboard query parses and uses only metrics and labels that exist."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from deployments.metrics import catalogue
from tests.fakes.grafana import View, all_queries, boards
from tests.fakes.promql import METRICS, grouped_by, names_used, unknown, wrong_values
from tests.fakes.rules import write_yaml
from tests.fakes.tools import needs

VIEW = View(1000.0, 4600.0)
needs_promtool = needs("promtool")
QUERIES = [(query.place, query.expression) for query in all_queries()] + [
    (f"{name} / {event['name']}", event["expr"])
    for name, board in boards().items()
    for event in board["annotations"]["list"]
]
EXPRESSIONS = [expression for _, expression in QUERIES]
EVERY = pytest.mark.parametrize("expression", EXPRESSIONS, ids=[place for place, _ in QUERIES])


def parse_errors(expressions: Iterable[str], folder: Path) -> list[str]:
    """Parse errors that promtool reports."""
    file = folder / "rules.yml"
    rules = [{"record": f"r{place}", "expr": each} for place, each in enumerate(expressions)]
    write_yaml(file, {"groups": [{"name": "all", "rules": rules}]})
    checked = subprocess.run(
        ["promtool", "check", "rules", "--lint=none", str(file)], capture_output=True, text=True
    )
    said = (checked.stdout + checked.stderr).splitlines()
    return [line for line in said if "parse" in line.lower()] if checked.returncode else []


@EVERY
def test_every_metric_label_and_label_value_exists(expression: str) -> None:
    assert names_used(expression)
    assert unknown(expression) == set()
    assert wrong_values(expression) == set()


@needs_promtool
def test_every_query_parses(tmp_path: Path) -> None:
    expressions = [VIEW.expression(expression) for expression in EXPRESSIONS]

    assert parse_errors(expressions, tmp_path) == []


@EVERY
def test_every_query_aggregates_to_a_bounded_set_of_labels(expression: str) -> None:
    assert re.search(r"\b(sum|avg|max|count)\b", expression)

    bounded = {"model", "model_name", "replica", "le"}
    bounded |= {"state", "outcome", "reason", "key_class", "source", "forked"}
    bounded |= {"alertname", "severity", "alertstate", "cluster", "namespace"}
    bounded |= {"version", "vllm", "ray", "python"}
    assert grouped_by(expression) <= bounded


@EVERY
def test_every_query_is_of_the_selected_clusters(expression: str) -> None:
    selected = re.findall(r"(?<![\w:])[a-zA-Z_][\w:]*\{([^}]*)\}", expression)

    assert selected
    for matchers in selected:
        assert 'cluster=~"$cluster",namespace=~"$namespace"' in matchers


def test_every_metric_of_the_catalogue_is_on_a_dashboard() -> None:
    names = set().union(*map(names_used, EXPRESSIONS))
    seen = {METRICS[name].name for name in names if name in METRICS}

    assert {metric.name for metric in catalogue.metrics()} - seen == set()


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
