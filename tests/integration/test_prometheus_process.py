"""The helpers that run Prometheus, Alertmanager and a webhook work."""

from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
import yaml

from tests.integration.prometheus_process import (
    Prometheus,
    QueryError,
    alertmanager,
    needs_alertmanager,
    needs_prometheus,
    prometheus,
    webhook,
)

pytestmark = [needs_prometheus, needs_alertmanager]


@pytest.fixture
def exporter() -> Iterator[tuple[prometheus_client.Gauge, int]]:
    registry = prometheus_client.CollectorRegistry()
    gauge = prometheus_client.Gauge("water_level", "Metres.", ["river"], registry=registry)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        yield gauge, server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def configured(folder: Path, exporter_port: int, alertmanager_address: str) -> Path:
    rule = {"alert": "Flood", "expr": "water_level > 3", "labels": {"severity": "page"}}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": "rivers",
                "static_configs": [{"targets": [f"127.0.0.1:{exporter_port}"]}],
            }
        ],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager_address]}]}]},
    }
    groups = {"groups": [{"name": "floods", "rules": [rule]}]}
    (folder / "rules.yml").write_text(yaml.safe_dump(groups))
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def check_queries(server: Prometheus) -> None:
    (series,) = server.wait_for("water_level")
    assert series.labels["river"] == "Elbe"
    assert series.value == 2.5
    assert server.value("sum(water_level) + 1") == 3.5
    assert server.value("1 + 1") == 2
    assert server.value("water_level > 9") != server.value("water_level > 9")  # NaN
    (at,) = [time for time, _ in server.query("water_level")[0].points]
    assert server.query("water_level", at - 3600) == []
    (ranged,) = server.query_range("water_level", at, at + 2, 1)
    assert [value for _, value in ranged.points] == [2.5, 2.5, 2.5]
    assert "water_level" in server.metric_names()
    assert [rule["name"] for rule in server.rules()] == ["Flood"]
    assert [target["health"] for target in server.targets()] == ["up"]
    with pytest.raises(QueryError, match="parse error"):
        server.query("sum(")


@pytest.mark.ci
def test_a_value_is_scraped_and_an_alert_reaches_the_webhook(
    tmp_path: Path, exporter: tuple[prometheus_client.Gauge, int]
) -> None:
    gauge, exporter_port = exporter
    gauge.labels("Elbe").set(2.5)
    with webhook() as receiver:
        receivers = [{"name": "test", "webhook_configs": [{"url": receiver.url}]}]
        route = {"receiver": "test", "group_wait": "1s", "group_interval": "1s"}
        routing = tmp_path / "alertmanager.yml"
        routing.write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
        with alertmanager(routing, tmp_path) as address:
            config = configured(tmp_path, exporter_port, address)
            with prometheus(config, tmp_path) as server:
                check_queries(server)
                assert server.alerts() == []
                gauge.labels("Elbe").set(4)
                alert = receiver.wait_for("Flood")
                assert alert["labels"]["river"] == "Elbe"
                assert [each["state"] for each in server.alerts()] == ["firing"]
                gauge.labels("Elbe").set(1)
                receiver.wait_for("Flood", "resolved")
            assert server.process.poll() is not None
