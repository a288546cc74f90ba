"""Names, units and labels of all metrics, and the generated metrics reference."""

import re
from pathlib import Path

import pytest

from deployments.metrics.catalogue import BUILD_INFO, Kind, Metric, metrics
from deployments.metrics.reference import as_markdown

PAGE = Path(__file__).parents[4] / "dashboards" / "METRICS.md"
ALL = list(metrics())
# Labels of targets and histograms.
TAKEN = {"cluster", "namespace", "pod", "le", "job", "instance"}


def test_each_name_is_declared_once() -> None:
    names = [metric.name for metric in ALL]

    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_follow_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"apar_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.unit in ("seconds", "ratio"):
        assert metric.unit in metric.name
    assert metric.help.endswith(".")
    assert not TAKEN & set(metric.labels)
    known = {"model", "replica", "state", "outcome", "reason", "key_class", "source", "kind"}
    assert set(metric.labels) <= known | {"forked"} or metric is BUILD_INFO


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_only_histograms_have_buckets_in_rising_order(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown(), "run `python -m deployments.metrics`"


def test_the_reference_contains_every_metric_and_label() -> None:
    page = as_markdown()

    for metric in ALL:
        assert f"## `{metric.name}`\n" in page
        assert metric.help in page
        for name, values in metric.labels.items():
            assert f"- `{name}`: {values}\n" in page
