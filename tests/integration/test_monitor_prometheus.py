"""`apar monitor` computes the same values as Prometheus."""

from pathlib import Path

import pytest
import yaml

from cluster.monitor.overview import ClusterHistory
from cluster.monitor.series import buckets, histogram_quantile, summed
from cluster.monitor.sources import PagesSource, PrometheusSource
from deployments.metrics import catalogue
from tests.fakes.metrics_page import busy_page, served
from tests.integration.prometheus_process import needs_prometheus, prometheus

pytestmark = [needs_prometheus]

OF = {"model": "apar-tiny"}


def configured(folder: Path, *urls: str) -> Path:
    targets = [url.split("/")[2] for url in urls]
    scrape = {"job_name": "ray", "static_configs": [{"targets": targets}]}
    path = folder / "prometheus.yml"
    path.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]})
    )
    return path


@pytest.mark.ci
def test_prometheus_and_the_pages_tell_the_same(tmp_path: Path) -> None:
    one, two = busy_page("r1"), busy_page("r2", node="node-2")
    one.observe(catalogue.REQUEST_LATENCY, 0.02, 0.3, 0.3, 1.7, 30.0, 900.0, **OF)
    latency = catalogue.REQUEST_LATENCY.name
    tokens = catalogue.GENERATED_TOKENS.name
    with (
        served(one.text()) as first,
        served(two.text()) as second,
        prometheus(configured(tmp_path, first.url, second.url), tmp_path) as server,
    ):
        server.wait_for(f"count({tokens}) == 2")
        pages = PagesSource([first.url, second.url]).read()
        source = PrometheusSource(server.url)
        history = ClusterHistory(5.0, 60.0, source.quiet_s)
        history.add(source.read())
        scraped = history.history.latest
        assert scraped is not None

        assert len(scraped.pages) == 2
        for metric in (catalogue.THREADS, catalogue.GENERATED_TOKENS, catalogue.REQUESTS):
            assert summed(scraped.values, metric, "model", "replica") == summed(
                pages.values, metric, "model", "replica"
            )
        counts = buckets(scraped.values, catalogue.REQUEST_LATENCY, "model")
        assert counts == buckets(pages.values, catalogue.REQUEST_LATENCY, "model")
        for quantile in (0.01, 0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 0.99, 1.0):
            theirs = server.value(f"histogram_quantile({quantile}, sum by (le) ({latency}_bucket))")
            ours = histogram_quantile(quantile, counts[("apar-tiny",)])
            assert ours == pytest.approx(theirs), quantile

        # Of the first report nobody knows since when it has counted.
        for amount, sum_of_all in ((50, 2050), (700, 2750)):
            one.add(catalogue.GENERATED_TOKENS, amount, **OF, replica="r1")
            first.body = one.text()
            server.wait_for(f"sum({tokens}) == {sum_of_all}")
            history.add(source.read())

    by_replica = {each.replica: each for each in history.overview().replicas}
    assert set(by_replica) == {"r1", "r2"}
    assert by_replica["r2"].tokens_per_s == 0
    seconds = history.overview().rate_s
    assert by_replica["r1"].tokens_per_s == pytest.approx(700 / seconds)
