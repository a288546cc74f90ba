"""Rules use only existing metrics, labels and label values; every alert has a runbook section."""

import re
from pathlib import Path

import pytest

from dashboards.prometheus import rule_groups
from dashboards.prometheus.rule import CLUSTER
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind
from tests.fakes.grafana import all_queries

RULES = [rule for group in rule_groups() for rule in group["rules"]]
RECORDS = {rule["record"] for rule in RULES if "record" in rule}
RUNBOOK = Path(__file__).resolve().parents[4] / "dashboards" / "RUNBOOK.md"
EXPORTED = {
    metric.name + suffix: metric
    for metric in catalogue.metrics()
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}
FOREIGN = {"up", *(metric.name for metric in catalogue.VLLM)}
KEYWORDS = {"and", "or", "unless", "on", "by", "offset", "bool", "ignoring", "without"}
NAME = r"[a-zA-Z_:][\w:]*"
NAME_OF_RECORD = r"\w+:[\w:]+"


def used_names(expression: str) -> set[str]:
    """Names of the series in a query."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|on|ignoring|without)\s*\([^)]*\)", r"\1", bare)
    bare = re.sub(r"\boffset\s+\w+", "", bare)
    found = re.findall(rf"(?<![\w.:])({NAME})(?![\w:]|\s*\()", bare)
    return set(found) - KEYWORDS - {"sum", "max", "group"}


def matchers(expression: str) -> set[tuple[str, str, str]]:
    """(series, label, value or regular expression) of every matcher."""
    return {
        (name, label, value)
        for name, inside in re.findall(rf"({NAME})\{{([^}}]*)\}}", expression)
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', inside)
    }


def test_the_parser_finds_names_and_matchers() -> None:
    query = (
        'sum by (model) (rate(a_b_total{x=~"p|q"}[5m] offset 1h)) / (m:c:sum > 0.5) '
        "unless on (instance) up == 1e3"
    )

    assert used_names(query) == {"a_b_total", "m:c:sum", "up"}
    assert matchers(query) == {("a_b_total", "x", "p|q")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_series_of_a_rule_exists(rule: dict[str, str]) -> None:
    names = used_names(rule["expr"])

    assert names
    assert names - EXPORTED.keys() - RECORDS - FOREIGN == set()


def test_label_values_in_rules_are_declared_in_the_catalogue() -> None:
    declared: dict[str, set[str]] = {"job": {"apar"}}
    for metric in catalogue.metrics():
        for label, text in metric.labels.items():
            declared.setdefault(label, set()).update(re.findall(r"\w+", text))
    bounds = {
        (name, str(float(bound))) for name, metric in EXPORTED.items() for bound in metric.buckets
    }
    looked_for = {match for rule in RULES for match in matchers(rule["expr"])}
    labels = {label for _, label, _ in looked_for}
    assert {"outcome", "reason", "state", "le"} <= labels

    wrong = [
        (name, label, value)
        for name, label, values in looked_for
        for value in values.split("|")
        if not ((name, value) in bounds if label == "le" else value in declared[label])
    ]

    assert wrong == []


def test_each_record_is_unique_and_named_after_its_labels() -> None:
    made = [rule for rule in RULES if "record" in rule]

    assert len(RECORDS) == len(made)
    for rule in made:
        level = rule["record"].partition(":")[0]
        inner = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert inner is not None
        labels = [name for name in inner[1].split(", ") if name != "le"]
        assert level == "_".join(labels[len(CLUSTER) :]), rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_no_rule_merges_two_clusters(rule: dict[str, str]) -> None:
    bare = re.sub(NAME_OF_RECORD, "", rule["expr"])
    grouped = re.findall(r"\b(?:sum|max|min|avg|count|group)\b(?: by \(([^)]*)\))?", bare)

    # An aggregation without labels leaves an empty match.
    for labels in grouped:
        assert tuple(labels.split(", ")[:2]) == CLUSTER, rule["expr"]
    assert " on (" not in rule["expr"]


def test_every_record_is_read_by_a_rule_or_a_dashboard() -> None:
    read = [rule["expr"] for rule in RULES] + [query.expression for query in all_queries()]
    names = set().union(*map(used_names, read))

    assert RECORDS - names == set()


def test_every_alert_has_a_value_a_summary_and_a_runbook_section() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    runbook = RUNBOOK.read_text(encoding="utf-8")
    sections = {
        heading: text for heading, text in re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", runbook)
    }

    assert {rule["alert"] for rule in alerts} == set(sections)
    for rule in alerts:
        notes = rule["annotations"]
        assert "$value" in notes["description"]
        assert notes["summary"]
        assert re.fullmatch(rf"https://.+#{rule['alert'].lower()}", notes["runbook_url"])
        assert rule["labels"]["severity"] in {"page", "ticket"}
        section = sections[rule["alert"]]
        for part in ("**Means:**", "**Look at:**", "**Do:**"):
            assert part in section, rule["alert"]
