"""Figures of a cluster from changing metrics pages."""

from __future__ import annotations

import pytest

from cluster.monitor.overview import ClusterHistory, ModelFigures
from cluster.monitor.series import Snapshot
from cluster.monitor.sources import parse_page
from deployments.metrics import catalogue
from tests.fakes.metrics_page import MetricsPage, busy_page

OF = {"model": "apar-tiny", "replica": "r1"}


def taken(at_s: float, *pages: MetricsPage) -> Snapshot:
    values = {}
    for page in pages:
        values.update(parse_page(page.node, page.text()))
    return Snapshot(at_s, values, frozenset({"node-1", "node-2"}), {})


def history_of(page: MetricsPage) -> ClusterHistory:
    history = ClusterHistory(rate_s=5.0, window_s=60.0, quiet_s=15.0)
    history.add(taken(100.0, page))
    return history


def after_a_report(page: MetricsPage) -> ClusterHistory:
    """The history of a page that has been seen to change once, at 102 s."""
    history = history_of(page)
    page.add(catalogue.PROMPT_TOKENS, 1, **OF)
    page.observe(catalogue.EVENT_LOOP_LAG, 0.001)  # as every gateway does all the time
    history.add(taken(102.0, page))
    return history


def only_model(history: ClusterHistory) -> ModelFigures:
    (model,) = history.overview().models
    return model


def test_one_reading_gives_gauges_but_no_rates() -> None:
    overview = history_of(busy_page()).overview()

    (replica,) = overview.replicas
    assert (replica.requests, replica.running, replica.waiting, replica.deferred) == (4, 12, 2, 1)
    assert replica.kv_share == pytest.approx(0.6)
    assert (replica.tokens_per_s, replica.forks_per_s) == (None, None)
    (model,) = overview.models
    assert (model.running, model.queued, model.replicas) == (4, 3, 1)
    assert (model.tokens_per_s, model.error_share, model.attention_saved) == (None, None, None)
    assert model.latency_s.p50 is None
    assert overview.trend == ()


def test_two_reports_give_rates_savings_and_quantiles() -> None:
    page = busy_page()
    history = after_a_report(page)
    assert only_model(history).tokens_per_s is None
    page.add(catalogue.GENERATED_TOKENS, 500, **OF)
    page.add(catalogue.FORKS, 8, **OF, outcome="accepted")
    page.add(catalogue.FORKS, 2, **OF, outcome="delayed")
    page.add(catalogue.ATTENDED_TOKENS, 600, **OF)
    page.add(catalogue.SEQUENTIAL_ATTENDED_TOKENS, 1000, **OF)
    page.add(catalogue.REQUESTS, 9, model="apar-tiny", key_class="default", outcome="ok")
    page.add(catalogue.REQUESTS, 1, model="apar-tiny", key_class="default", outcome="server_error")
    page.add(catalogue.REQUESTS_REJECTED, 3, reason="key_limit", key_class="basic")
    page.add(catalogue.REQUESTS_REJECTED, 2, reason="key_limit", key_class="gold")
    page.observe(catalogue.REQUEST_LATENCY, *[0.2] * 98, 40.0, 40.0, model="apar-tiny")
    history.add(taken(104.0, page))

    overview, model = history.overview(), only_model(history)

    assert overview.replicas[0].tokens_per_s == model.tokens_per_s == 250
    assert overview.replicas[0].forks_per_s == 5
    assert model.forks_per_s == {"accepted": 4, "delayed": 1, "refused": 0}
    assert model.requests_per_s == 5
    assert model.error_share == pytest.approx(0.1)
    assert model.attention_saved == pytest.approx(0.4)
    assert model.cache_saved is None
    assert overview.rejected == {"key_limit": 5}
    assert model.latency_s.p50 is not None
    assert 0.1 < model.latency_s.p50 <= 0.25
    # The two that took 40 s: what was observed before the first reading does not count.
    assert model.latency_s.p99 == pytest.approx(25 + (99 - 98) / 2 * 25)
    assert overview.trend == (250,)


def test_a_vanished_replica_has_no_row_but_its_tokens_count() -> None:
    old, new = busy_page("r1"), busy_page("r2", node="node-2")
    history = after_a_report(old)
    assert [each.older for each in history.overview().replicas] == [True]

    old.add(catalogue.GENERATED_TOKENS, 100, **OF)
    history.add(taken(104.0, old, new))
    new.add(catalogue.GENERATED_TOKENS, 600, **OF | {"replica": "r2"})
    history.add(taken(106.0, new))

    (replica,) = history.overview().replicas
    assert (replica.replica, replica.age_s, replica.older) == ("r2", 2.0, False)
    assert replica.tokens_per_s == 300
    # The one that has gone may as well be late with its report.
    assert history.overview().trend == (50, 350)
    history.add(taken(112.0, new))
    assert only_model(history).tokens_per_s == 300


def test_a_restarted_server_counts_from_zero() -> None:
    history = after_a_report(busy_page())
    restarted = busy_page("r9")

    history.add(taken(104.0, restarted))
    restarted.add(catalogue.GENERATED_TOKENS, 500, model="apar-tiny", replica="r9")
    history.add(taken(106.0, restarted))

    model = only_model(history)
    assert model.tokens_per_s == 250
    assert history.overview().trend
    assert min(history.overview().trend) >= 0


def test_a_model_without_replicas_is_still_listed_with_its_queue() -> None:
    page = MetricsPage()
    page.set(catalogue.REQUESTS_QUEUED, 7, model="away")
    page.set(catalogue.REQUESTS_RUNNING, 0, model="away")

    model = only_model(history_of(page))

    assert (model.model, model.queued, model.replicas) == ("away", 7, 0)


def test_models_are_kept_apart() -> None:
    history = ClusterHistory(5.0, 60.0, 15.0)
    history.add(taken(0.0, busy_page("r1", "a"), busy_page("r2", "b")))

    assert [(each.model, each.queued) for each in history.overview().models] == [("a", 3), ("b", 3)]
    assert [each.model for each in history.overview().replicas] == ["a", "b"]
