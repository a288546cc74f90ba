"""Metrics pages are found, read and parsed; other pages are errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.local_ray import free_port
from cluster.monitor.series import buckets, exported_names, largest, summed
from cluster.monitor.sources import PageError, PagesSource, PrometheusSource, page_url, parse_page
from deployments.metrics import catalogue
from deployments.metrics.catalogue import Kind
from tests.fakes.metrics_page import MetricsPage, busy_page, served

OTHERS = (
    "# HELP vllm:num_requests_running Running.\n# TYPE vllm:num_requests_running gauge\n"
    'vllm:num_requests_running{engine="0"} 3.0\n'
)


def test_only_our_series_are_taken_from_a_page() -> None:
    values = parse_page("u", OTHERS + busy_page().text() + OTHERS)

    assert {key.name for key in values} <= exported_names()
    assert summed(values, catalogue.THREADS, "state")[("waiting",)] == 2
    assert summed(values, catalogue.GENERATED_TOKENS, "model") == {("apar-tiny",): 1000}


def test_every_metric_of_the_catalogue_survives_page_and_parser() -> None:
    page = MetricsPage()
    for metric in catalogue.metrics():
        labels = dict.fromkeys(metric.labels, "x")
        if metric.kind is Kind.COUNTER:
            page.add(metric, 2.0, **labels)
        elif metric.kind is Kind.GAUGE:
            page.set(metric, 2.0, **labels)
        else:
            page.observe(metric, 2.0, **labels)

    names = {key.name for key in parse_page("u", page.text())}

    assert names >= exported_names()


def test_processes_are_summed_except_shared_gauges() -> None:
    text = busy_page(node="a").text() + busy_page(node="b").text()

    values = parse_page("u", text)

    assert summed(values, catalogue.REQUESTS_RUNNING, "model") == {("apar-tiny",): 8}
    assert largest(values, catalogue.REPLICAS, "model") == {("apar-tiny",): 1}
    counts = buckets(values, catalogue.REQUEST_LATENCY, "model")[("apar-tiny",)]
    assert counts[0.25] == 0
    assert counts[0.5] == counts[float("inf")] == 4


def test_labels_with_odd_characters_are_kept() -> None:
    page = MetricsPage()
    page.set(catalogue.REPLICAS, 2, model='a "b", {c}\\d')

    assert summed(parse_page("u", page.text()), catalogue.REPLICAS, "model") == {
        ('a "b", {c}\\d',): 2
    }


@pytest.mark.parametrize("text", ["<html><body>hello</body></html>", '{"status": "ok"}', "hello"])
def test_another_page_is_not_a_metrics_page(text: str) -> None:
    with pytest.raises(PageError, match="is not a metrics page"):
        parse_page("u", text)


def test_a_page_of_other_programs_has_none_of_our_series() -> None:
    assert parse_page("u", OTHERS) == {}
    assert parse_page("u", "") == {}


def test_pages_are_combined_and_failed_ones_named() -> None:
    gone = f"127.0.0.1:{free_port()}"
    with served(busy_page("r1").text()) as one, served(busy_page("r2").text()) as two:
        snapshot = PagesSource([one.url, two.url, gone]).read()

    assert snapshot.pages == {one.url, two.url}
    assert list(snapshot.failures) == [f"http://{gone}/metrics"]
    assert len(summed(snapshot.values, catalogue.REPLICA_REQUESTS, "replica")) == 2


def test_a_discovery_file_is_read_anew_each_time(tmp_path: Path) -> None:
    file = tmp_path / "prom_metrics_service_discovery.json"
    source = PagesSource([str(file)])
    with served(busy_page("r1").text()) as one, served(busy_page("r2").text()) as two:
        hosts = [server.url.split("/")[2] for server in (one, two)]
        file.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": hosts[:1]}]))
        first = source.read()
        file.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": hosts}]))
        second = source.read()

    assert first.pages == {one.url}
    assert second.pages == {one.url, two.url}


def test_a_discovery_list_may_be_a_url() -> None:
    with served(busy_page().text()) as page:
        targets = [{"targets": [page.url.split("/")[2]]}]
        with served(json.dumps(targets)) as discovery:
            assert PagesSource([discovery.url]).read().pages == {page.url}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "is not a service-discovery list: not a text file"),
        ("{}", "is not a service-discovery list"),
        ("[1]", "is not a service-discovery list"),
        ("[]", "contains no targets"),
    ],
)
def test_an_unusable_discovery_file_is_named(
    tmp_path: Path, content: str | bytes | None, reason: str
) -> None:
    file = tmp_path / "nodes.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(PageError, match=f"nodes.json {reason}"):
        PagesSource([str(file)]).read()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("node:8080", "http://node:8080/metrics"),
        ("http://node:8080", "http://node:8080/metrics"),
        ("https://node/own/path", "https://node/own/path"),
    ],
)
def test_an_address_may_be_short(address: str, url: str) -> None:
    assert page_url(address) == url


def test_an_error_status_and_a_timeout_are_distinguished() -> None:
    with served("no", 0) as server:
        server.status = 404
        with pytest.raises(PageError, match="answered 404 Not Found"):
            PagesSource([server.url]).read()

    with pytest.raises(PageError, match="no answer"):
        PagesSource([server.url]).read()


def test_another_server_is_not_accepted_as_prometheus() -> None:
    with served("<html>") as server:
        url = server.url.removesuffix("/metrics")
        with pytest.raises(PageError, match="is not a Prometheus server"):
            PrometheusSource(url).read()
    with pytest.raises(PageError, match="did not answer"):
        PrometheusSource(url.removeprefix("http://")).read()
