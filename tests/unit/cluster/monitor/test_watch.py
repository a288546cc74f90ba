"""A watch survives outages, but fails at once if there is nothing to watch."""

from __future__ import annotations

import pytest

from cluster.monitor.overview import ClusterHistory, MonitorError, Watch
from cluster.monitor.sources import PagesSource
from deployments.metrics import catalogue
from tests.fakes.metrics_page import busy_page, served


def watch_of(url: str) -> Watch:
    return Watch(PagesSource([url]), ClusterHistory(5.0, 60.0, quiet_s=15.0))


def test_a_restarted_server_is_watched_through_its_outage() -> None:
    page = busy_page()
    with served(page.text()) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        watch = watch_of(server.url)
        watch.read()
        assert watch.silence is None

    watch.read()
    watch.read()
    assert watch.silence is not None
    assert watch.silence.startswith("no answer since ")
    assert server.url in watch.silence
    assert len(watch.overview().replicas) == 1

    page = busy_page("r2")
    with served(page.text(), port) as server:
        watch.read()
        page.add(catalogue.GENERATED_TOKENS, 10, model="apar-tiny", replica="r2")
        server.body = page.text()
        watch.read()
    assert watch.silence is None
    (replica,) = watch.overview().replicas
    assert replica.replica == "r2"
    (model,) = watch.overview().models
    assert model.tokens_per_s is not None
    assert model.tokens_per_s > 0


def test_an_error_page_is_an_outage() -> None:
    with served(busy_page().text()) as server:
        watch = watch_of(server.url)
        watch.read()
        server.status = 503
        watch.read()
        assert "answered 503" in (watch.silence or "")
        server.status, server.body = 200, "<html>maintenance</html>"
        watch.read()
        assert "is not a metrics page" in (watch.silence or "")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("other_metric 1\n", "no metrics of this cluster"),
        ("", "no metrics of this cluster"),
        ("<html>", "no"),
    ],
)
def test_nothing_to_watch_is_an_error_at_the_start(body: str, reason: str) -> None:
    with served(body) as server, pytest.raises(MonitorError, match=reason):
        watch_of(server.url).read()


def test_vanished_metrics_are_no_error_later() -> None:
    page = busy_page()
    with served(page.text()) as server:
        watch = watch_of(server.url)
        watch.read()
        server.body = f"# TYPE {catalogue.FORKS.name} counter\n"
        watch.read()

    assert watch.silence is None
    assert watch.overview().replicas == ()
