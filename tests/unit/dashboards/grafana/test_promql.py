"""promtool evaluates our expressions to values worked out by hand."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dashboards.grafana import promql
from dashboards.grafana.figure5 import classed, spread
from dashboards.grafana.panels import SECONDS
from deployments.metrics import catalogue as of
from deployments.metrics.catalogue import Metric
from tests.fakes.grafana import View, all_queries, boards
from tests.fakes.tools import needs

needs_promtool = needs("promtool")
# A range of half an hour: points and scrapes are 15 s apart, rates cover a minute.
VIEW = View(0.0, 1800.0)
BUSY = of.ENGINE_BUSY_SECONDS
LATENCY = of.REQUEST_LATENCY


@dataclass(frozen=True)
class Case:
    """Input series in promtool's notation, an expression, and its value after half an hour."""

    series: dict[str, str]
    expression: str
    expected: dict[str, float]


def of_replica(metric: Metric, replica: str, part: str = "", **labels: str) -> str:
    """Name of a series that one of several processes exports."""
    own = {"model": "m", "replica": replica, "instance": f"n-{replica}"} | labels
    inside = ",".join(f'{name}="{value}"' for name, value in own.items() if value)
    return f"{metric.name}{part}{{{inside}}}"


STEADY = {
    of_replica(of.ATTENDED_TOKENS, "a"): "0+60x120",
    of_replica(of.ATTENDED_TOKENS, "b"): "0+30x120",
    of_replica(of.SEQUENTIAL_ATTENDED_TOKENS, "a"): "0+90x120",
    of_replica(of.SEQUENTIAL_ATTENDED_TOKENS, "b"): "0+30x120",
}
IDLE = {name: "7+0x120" for name in STEADY}
QUICK = {
    of_replica(LATENCY, "", "_bucket", le="1.0"): "0+15x120",
    of_replica(LATENCY, "", "_bucket", le="2.5"): "0+30x120",
    of_replica(LATENCY, "", "_bucket", le="+Inf"): "0+30x120",
    of_replica(LATENCY, "", "_sum"): "0+45x120",
    of_replica(LATENCY, "", "_count"): "0+30x120",
}
RETRY = 'apar_retries_total{model="m",instance="n"}'
RETRIES = promql.events(of.RETRIES, "model")
# 15 minutes with 5 busy seconds per second and half of the cache in use, then 1 with a quarter.
# The cache usage starts after the first minute, together with the first complete rate.
CHANGING = {
    of_replica(BUSY, "a"): "0+75x60 4515+15x60",
    of_replica(of.KV_CACHE_USAGE, "a"): "_x8 0.5x52 0.25x60",
}
RATE = promql.rate(BUSY, "model")
USE = promql.level(of.KV_CACHE_USAGE, "model", how="avg")
[MEAN, LOW, HIGH] = spread(classed(RATE, "kv_use", f"floor({USE} * 10) * 10"), SECONDS)

# Two gateways of model m during a handover, and a model n with one gateway.
GATEWAYS = {
    'apar_replicas{model="m",instance="old"}': "2x120",
    'apar_replicas{model="m",instance="new"}': "2x120",
    'apar_replicas{model="n",instance="new"}': "1x120",
    'apar_replicas_wanted{model="m",instance="old"}': "3x120",
    'apar_replicas_wanted{model="m",instance="new"}': "3x120",
}
RESTART = 'apar_replica_restarts_total{model="m",instance="n"}'


def query_of(dashboard: str, kind: str, title: str, ref: str = "A") -> str:
    """Expression of a panel's query."""
    [expression] = [
        query.expression
        for query in all_queries()
        if (query.dashboard, query.ref) == (dashboard, ref)
        and (query.panel["type"], query.panel["title"]) == (kind, title)
    ]
    return expression


def annotation(name: str) -> str:
    """Expression of an annotation."""
    events = boards()["apar-overview"]["annotations"]["list"]
    [expression] = [str(event["expr"]) for event in events if event["name"] == name]
    return expression


CASES = {
    "a restarted replica is annotated": Case(
        {RESTART: "0x116 1x4"}, annotation("Replica restarts"), {'{model="m"}': 1.0}
    ),
    "a new replica is not annotated": Case(
        {RESTART: "_x117 0x3"}, annotation("Replica restarts"), {}
    ),
    "replicas are counted once, however many gateways report them": Case(
        GATEWAYS, query_of("apar-overview", "stat", "Replicas"), {"{}": 3.0}
    ),
    "replicas by model are counted once": Case(
        GATEWAYS,
        query_of("apar-overview", "timeseries", "Replicas"),
        {'{model="m"}': 2.0, '{model="n"}': 1.0},
    ),
    "wanted replicas are counted once": Case(
        GATEWAYS, query_of("apar-overview", "timeseries", "Replicas", "B"), {'{model="m"}': 3.0}
    ),
    "delayed forks share blocks too": Case(
        {
            of_replica(of.FORKS, "a", outcome="accepted"): "0+15x120",
            of_replica(of.FORKS, "a", outcome="delayed"): "0+30x120",
            of_replica(of.FORKS, "a", outcome="refused"): "0+90x120",
            of_replica(of.KV_SHARED_BLOCKS, "a"): "0+180x120",
        },
        query_of("apar-forks", "timeseries", "Blocks per fork"),
        {'{model="m"}': 4.0},
    ),
    "a full cache is in the last class": Case(
        {
            of_replica(of.GENERATED_TOKENS, "a"): "0+75x120",
            of_replica(of.KV_CACHE_USAGE, "a"): "_x8 1x112",
        },
        query_of("apar-forks", "table", "5a: throughput by KV usage (tokens/s)"),
        {'{model="m",kv_use="90"}': 5.0},
    ),
    "a rate sums over processes": Case(
        STEADY, promql.rate(of.ATTENDED_TOKENS, "model"), {'{model="m"}': 6.0}
    ),
    "a saving covers all replicas together": Case(
        STEADY, promql.saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS), {"{}": 0.25}
    ),
    "a saving over the range": Case(
        STEADY,
        promql.saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS, window=promql.WHOLE_RANGE),
        {"{}": 0.25},
    ),
    "without events there is no saving": Case(
        IDLE, promql.saving(of.ATTENDED_TOKENS, of.SEQUENTIAL_ATTENDED_TOKENS), {}
    ),
    "a quantile lies within its bucket": Case(
        QUICK, promql.quantile(0.75, LATENCY, "model"), {'{model="m"}': 1.75}
    ),
    "without observations there is no quantile": Case(
        {name: "3+0x120" for name in QUICK}, promql.quantile(0.75, LATENCY, "model"), {}
    ),
    "a mean is the sum over the count": Case(
        QUICK, promql.mean(LATENCY, "model"), {'{model="m"}': 1.5}
    ),
    "an event that never happened counts 0": Case({RETRY: "0x120"}, RETRIES, {'{model="m"}': 0.0}),
    "the past events of a new target do not count": Case(
        {RETRY: "_x117 900x3"}, RETRIES, {'{model="m"}': 0.0}
    ),
    "another cluster is not counted": Case(
        {RETRY: "0x120", 'apar_retries_total{model="m",cluster="b"}': "0+15x120"},
        RETRIES.replace("$cluster", ""),
        {'{model="m"}': 0.0},
    ),
    # The rate covers a minute, and therefore falls to 1 over 4, 3 and 2: (4 + 3 + 2 + 57 * 1) / 60.
    "a class contains the samples of its times": Case(
        CHANGING,
        f"round({MEAN.expression}, 0.001)",
        {'{model="m",kv_use="50"}': 5.0, '{model="m",kv_use="20"}': 1.1},
    ),
    "samples are labelled with their class": Case(
        CHANGING, HIGH.expression, {'{model="m",kv_use="50"}': 5.0, '{model="m",kv_use="20"}': 1.0}
    ),
    "quantiles are taken over the samples of a class": Case(
        CHANGING, LOW.expression, {'{model="m",kv_use="50"}': 5.0, '{model="m",kv_use="20"}': 1.0}
    ),
}


def failures(case: Case, folder: Path) -> str:
    """Differences that promtool reports; empty if there are none."""
    expected = [{"labels": labels, "value": value} for labels, value in case.expected.items()]
    query = {
        "expr": VIEW.expression(case.expression),
        "eval_time": "30m",
        "exp_samples": expected,
    }
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [query]}
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    ran = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, cwd=folder
    )
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_an_expression_gives_the_value_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    assert failures(CASES[name], tmp_path) == ""


@needs_promtool
def test_a_wrong_value_is_found(tmp_path: Path) -> None:
    case = CASES["a rate sums over processes"]

    assert failures(Case(case.series, case.expression, {'{model="m"}': 5.0}), tmp_path)
