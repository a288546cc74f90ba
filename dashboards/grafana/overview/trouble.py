"""What goes wrong: refusals, losses of replicas, alerts."""

from cluster.metrics import catalogue as of
from cluster.metrics.catalogue import Metric
from dashboards.grafana.board import ALERT_NAMES
from dashboards.grafana.panels import (
    ALERTS,
    GATEWAYS,
    LOG_LINES,
    REQUESTS,
    REQUESTS_PER_S,
    AnyPanel,
    Query,
    Text,
    lines,
)
from dashboards.grafana.promql import events, level, rate, zero_unless
from dashboards.grafana.tables import Column, table


def panels() -> list[AnyPanel]:
    return [_reasons(), _key_classes(), _losses(), _processes(), _alerts()]


def _reasons() -> AnyPanel:
    text = Text(
        "Rejections by reason", "Requests that no replica has seen, a second.", REQUESTS_PER_S, 6
    )
    return lines(text, Query(rate(of.REQUESTS_REJECTED, "reason"), "{{reason}}"), stacked=True)


def _key_classes() -> AnyPanel:
    text = Text(
        "Rejections by class of key",
        "The same by `metrics_class` of the API key.",
        REQUESTS_PER_S,
        6,
    )
    query = Query(rate(of.REQUESTS_REJECTED, "key_class"), "{{key_class}}")
    return lines(text, query, stacked=True)


def _losses() -> AnyPanel:
    text = Text(
        "After losses of replicas",
        "Requests sent again from the start, streams continued on another replica, requests given "
        "up, and replicas started in place of lost ones, within the last scrapes.",
        REQUESTS,
        6,
    )
    return lines(
        text,
        _loss(of.RETRIES, "sent again"),
        _loss(of.MIGRATIONS, "continued"),
        _loss(of.GIVEN_UP, "given up"),
        _loss(of.REPLICA_RESTARTS, "replicas started"),
        at_least=1,
    )


def _loss(metric: Metric, name: str) -> Query:
    return Query(
        zero_unless(events(metric, "model"), of.REPLICAS, "model"), f"{{{{model}}}} {name}"
    )


def _processes() -> AnyPanel:
    text = Text(
        "Settings refused, log lines dropped",
        "Gateways that use older settings because the last ones of a source are wrong, and log "
        "lines dropped within the last scrapes because a disk hung; none is good.",
        GATEWAYS,
        6,
    )
    return lines(
        text,
        Query(level(of.SETTINGS_REFUSED, "source"), "{{source}} refused"),
        Query(zero_unless(events(of.LOG_LINES_DROPPED), of.SETTINGS_REFUSED), "log lines"),
        at_least=1,
        right_axis={"B": LOG_LINES},
    )


def _alerts() -> AnyPanel:
    labels = {"alertname": "Alert", "severity": "Severity", "model": "Model", "alertstate": "State"}
    return table(
        Text("Alerts", "Alerts that are pending or fire; none is good.", ALERTS, 24, 5),
        labels,
        [Column("Series", f"count by ({', '.join(labels)}) (ALERTS{{{ALERT_NAMES}}})", ALERTS)],
        sorted_by="State",
    )
