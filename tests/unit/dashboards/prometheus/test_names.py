"""Rules use only existing metrics, labels and label values; every alert has a runbook section."""

import re

import pytest

from tests.fakes.grafana import all_queries
from tests.fakes.promql import matchers, names_used, unknown, wrong_values
from tests.fakes.rules import ALERTS, CLUSTER, FOLDER, RECORDS, RULES

EVERY = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])


def test_the_parser_finds_names_matchers_and_mistakes() -> None:
    query = (
        'sum by (model) (rate(a_b_total{x=~"p|q"}[5m] offset 1h)) / (m:c:sum > 0.5) '
        "unless on (instance) up == 1e3"
    )

    assert names_used(query) == {"a_b_total", "m:c:sum", "up"}
    assert matchers(query) == {("a_b_total", "x", "p|q")}
    assert unknown(query) == {"a_b_total", "m:c:sum", "x", "model"}
    late = 'apar_time_to_first_token_seconds_bucket{le="3"}'
    assert wrong_values(late) == {("apar_time_to_first_token_seconds_bucket", "le", "3")}
    assert wrong_values('apar_threads{state="running|asleep"}') == {
        ("apar_threads", "state", "asleep")
    }


@EVERY
def test_every_series_label_and_label_value_of_a_rule_exists(rule: dict[str, str]) -> None:
    assert names_used(rule["expr"])
    assert unknown(rule["expr"]) == set()
    assert wrong_values(rule["expr"]) == set()


def test_each_record_is_unique_and_named_after_its_labels() -> None:
    made = [rule for rule in RULES if "record" in rule]

    assert len(RECORDS) == len(made)
    for rule in made:
        level = rule["record"].partition(":")[0]
        inner = re.search(r"by \(([^)]*)\)", rule["expr"])
        assert inner is not None
        labels = [name for name in inner[1].split(", ") if name != "le"]
        assert level == "_".join(labels[len(CLUSTER) :]), rule


@EVERY
def test_no_rule_merges_two_clusters(rule: dict[str, str]) -> None:
    bare = re.sub(r"\w+:[\w:]+", "", rule["expr"])
    grouped = re.findall(r"\b(?:sum|max|min|avg|count|group)\b(?: by \(([^)]*)\))?", bare)

    # An aggregation without labels leaves an empty match.
    for labels in grouped:
        assert tuple(labels.split(", ")[:2]) == CLUSTER, rule["expr"]
    assert " on (" not in rule["expr"]


def test_every_record_is_read_by_a_rule_or_a_dashboard() -> None:
    read = [rule["expr"] for rule in RULES] + [query.expression for query in all_queries()]
    names = set().union(*map(names_used, read))

    assert RECORDS - names == set()


def test_the_readme_has_the_thresholds_of_the_alerts() -> None:
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (Apar\w+) \| ([\d.]+) ", readme, re.MULTILINE)

    assert len(listed) == 9
    for name, threshold in listed:
        assert re.search(rf"> {re.escape(threshold)}(\n|$)", ALERTS[name]["expr"]), name


def test_every_alert_has_a_value_a_summary_and_a_runbook_section() -> None:
    runbook = (FOLDER.parent / "RUNBOOK.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", runbook))

    assert ALERTS.keys() == sections.keys()
    for name, rule in ALERTS.items():
        notes = rule["annotations"]
        assert "$value" in notes["description"]
        assert notes["summary"]
        assert re.fullmatch(rf"https://.+#{name.lower()}", notes["runbook_url"])
        assert rule["labels"]["severity"] in {"page", "ticket"}
        for part in ("**Means:**", "**Look at:**", "**Do:**"):
            assert part in sections[name], name
