"""Every dashboard query returns data from a Prometheus that scrapes a loaded server."""

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from cluster.local_ray import free_port
from deployments.config.keys import KeyConfig, hash_of
from deployments.metrics import catalogue
from tests.fakes.grafana import (
    PanelQuery,
    QueryError,
    Series,
    View,
    all_queries,
    ask,
    boards,
    replicas_alive,
    results,
)
from tests.fakes.rules import RULES, configured, write_yaml
from tests.integration.prometheus_process import Prometheus, needs_prometheus, prometheus
from tests.integration.serving.apar_process import REPLICA, TINY, serving
from tests.integration.serving.load_clients import PROMPTS, chat

pytestmark = [pytest.mark.cluster, pytest.mark.slow, needs_prometheus]
SCRAPE_S = 2
LOAD_S = 45.0
LOST_AFTER_S = 10.0
CLIENTS = 12
MOST_SERIES = 20
MODEL = "apar-tiny"
# Small enough for queueing, delayed and refused forks, and preemptions.
FULL: dict[str, Any] = TINY | {
    "replicas": 2,
    "max_concurrency": 5,
    "forks": {"max_threads": 3, "max_forks": 3},
    "engine": TINY["engine"] | {"num_gpu_blocks_override": 34, "max_model_len": 1024},
}
KEY = KeyConfig.model_validate({"name": "load", "hash": hash_of("load"), "metrics_class": "pro"})
ALERT = {
    "alert": "AparTest",
    "expr": "vector(1)",
    "labels": {
        "severity": "ticket",
        "model": MODEL,
        "cluster": "default",
        "namespace": "default",
    },
}


@dataclass(frozen=True)
class Watched:
    """Prometheus that scraped a loaded server while one of its two replicas was killed."""

    url: str
    prometheus: Prometheus
    view: View


def ask_server(url: str, number: int) -> None:
    """Send a request: most stream a forked answer, some are invalid, some disconnect early."""
    body = chat(PROMPTS[number % len(PROMPTS)], MODEL) | {"stream": number % 3 > 0}
    key = "load"
    match number % 10:
        case 0:
            body["model"] = "elsewhere"
        case 1:
            body["max_tokens"] = "many"
        case 2:
            key = "wrong"
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
    ) as answer:
        for place, _ in enumerate(answer.iter_lines()):
            if number % 10 == 3 and place > 20:
                return


@contextmanager
def under_load(url: str) -> Iterator[None]:
    """Run clients that send requests without a pause."""
    stop = threading.Event()

    def client(first: int) -> None:
        number = first
        while not stop.is_set():
            with suppress(httpx.HTTPError):
                ask_server(url, number)
            number += 1

    clients = [threading.Thread(target=client, args=(7 * place,)) for place in range(CLIENTS)]
    for each in clients:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in clients:
            each.join()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, port = tmp_path_factory.mktemp("dashboards"), free_port()
    static = [{"targets": [f"127.0.0.1:{port}"]}]
    config = configured("prometheus-single-machine.yml", interval_s=SCRAPE_S, static_configs=static)
    records = [rule for rule in RULES if "record" in rule]
    write_yaml(folder / "rules.yml", {"groups": [{"name": "test", "rules": [*records, ALERT]}]})
    write_yaml(folder / "prometheus.yml", config | {"rule_files": ["rules.yml"]})
    metrics = {"port": port}
    keys = [KEY.model_dump(mode="json", exclude_none=True)]
    with prometheus(folder / "prometheus.yml", folder) as process:
        with serving(folder, FULL, metrics=metrics, keys=keys) as server, under_load(server.url):
            start_s = time.time()
            time.sleep(LOST_AFTER_S)
            server.processes(REPLICA)[0].kill()
            process.wait_for("apar_replica_restarts_total > 0", timeout_s=120)
            time.sleep(LOAD_S)
            # The newest scrape may still be missing for some series.
            view = View(start_s, time.time() - SCRAPE_S, scrape_s=SCRAPE_S)
        yield Watched(process.url, process, view)


def seen(watched: Watched, query: PanelQuery) -> list[Series]:
    """Return the series of a query."""
    return results(watched.url, query, watched.view)


def trouble(watched: Watched, query: PanelQuery) -> str | None:
    """Describe what is wrong with the result of a query; None if nothing is."""
    try:
        found = seen(watched, query)
    except QueryError as error:
        return f"broken: {error}"
    if not any(math.isfinite(value) for series in found for _, value in series.points):
        return "empty"
    if len(found) > MOST_SERIES:
        return f"{len(found)} series"
    # A label in a legend that the series does not have leaves a gap.
    if unnamed := [each for each in found if query.legend and re.search(r"^ | $|^$", each.name)]:
        return f"names of series: {unnamed[0].labels}"
    return None


def test_every_query_of_every_panel_returns_values(watched: Watched) -> None:
    found = [(query.place, trouble(watched, query)) for query in all_queries()]

    assert [(place, what) for place, what in found if what is not None] == []


def test_a_broken_and_an_empty_query_are_found(watched: Watched) -> None:
    query = all_queries()[0]

    assert trouble(watched, query) is None
    broken = replace(query, expression=f"sum ({query.expression}")
    assert "broken" in str(trouble(watched, broken))
    renamed = replace(query, expression=query.expression.replace("_total", "_totals"))
    assert trouble(watched, renamed) == "empty"
    unnamed = replace(query, legend="{{outcome}}")
    assert "names of series" in str(trouble(watched, unnamed))


def test_outcomes_rejections_and_forks_appear_in_the_panels(watched: Watched) -> None:
    names = {
        query.panel["title"]: {series.name for series in seen(watched, query)}
        for query in all_queries()
        if query.ref == "A"
    }

    assert names["Requests by outcome"] >= {"ok", "cancelled"}
    assert names["Rejections by reason"] >= {"unknown_model", "authentication"}
    assert names["Rejections by key class"] >= {"pro"}
    assert names["Forks by outcome"] == {"accepted", "delayed", "refused"}
    assert names["Threads by state"] >= {"running", "waiting", "deferred"}


def test_vllm_exports_what_the_dashboards_use_of_it(watched: Watched) -> None:
    assert {metric.name for metric in catalogue.VLLM} <= watched.prometheus.metric_names()


def test_the_variables_find_the_model_and_both_replicas(watched: Watched) -> None:
    board = next(iter(boards().values()))
    variables = {each["name"]: each for each in board["templating"]["list"]}
    query = r"label_values\((\w+(?:\{.*\})?), (\w+)\)"

    def values(name: str) -> list[str]:
        [(series, label)] = re.findall(query, variables[name]["query"])
        match = watched.view.expression(series)
        return list(ask(watched.url, f"label/{label}/values", {"match[]": match}))

    assert values("cluster") == values("namespace") == ["default"]
    models = values("model")
    replicas = replicas_alive(watched.url, watched.view)
    assert models == [MODEL]
    assert len(replicas) == 2
    # As Grafana cuts them from the answer.
    [pattern] = re.findall(r"^/(.*)/$", variables["replica"]["regex"])
    assert re.findall(pattern, f'{{replica="{replicas[0]}"}} 1') == [replicas[0]]


def test_annotations_show_alerts_and_restarts(watched: Watched) -> None:
    found = {}
    for board in boards().values():
        for event in board["annotations"]["list"]:
            view = watched.view
            span = {"start": str(view.start_s), "end": str(view.end_s), "step": str(SCRAPE_S)}
            query = {"query": view.expression(event["expr"])}
            found[event["name"]] = ask(watched.url, "query_range", query | span)["result"]

    assert [each["metric"] for each in found["Alerts"]] == [{"alertname": "AparTest"}]
    [mark] = found["Replica restarts"]
    assert mark["metric"] == {"model": MODEL}
    assert {value for _, value in mark["values"]} == {"1"}


def test_a_selected_replica_is_shown_alone(watched: Watched) -> None:
    first, second = replicas_alive(watched.url, watched.view)
    query = next(query for query in all_queries() if query.panel["title"] == "Requests by replica")

    def shown(*chosen: str) -> set[str]:
        view = replace(watched.view, chosen={"replica": chosen})
        return {series.name for series in results(watched.url, query, view)}

    assert shown(first) == {first}
    assert shown(first, second) == {first, second}
    assert shown() >= {first, second}
