"""Readings of metrics pages during a repeat."""

import pytest

from cluster.loadtest.watches import ClusterWatch
from cluster.local_ray import free_port
from cluster.monitor.overview import MonitorError
from cluster.monitor.sources import PagesSource
from deployments.metrics import catalogue
from tests.fakes.metrics_page import PageServer, busy_page, served
from tests.fakes.waiting import until


async def test_increases_and_gauges_cover_the_repeat() -> None:
    page = busy_page()
    with served(page.text()) as server:
        watch = ClusterWatch(PagesSource([server.url]), every_s=0.1, settle_s=0.0)
        async with watch.watching():
            await until(lambda: watch.figures().moments)
            of = {"model": "apar-tiny", "replica": "r1"}
            page.add(catalogue.GENERATED_TOKENS, 600, **of)
            page.add(catalogue.FORKS, 5, **of, outcome="delayed")
            page.add(catalogue.ATTENDED_TOKENS, 300, **of)
            page.add(catalogue.SEQUENTIAL_ATTENDED_TOKENS, 400, **of)
            page.set(catalogue.KV_CACHE_USAGE, 0.9, **of)
            server.body = page.text()
            # A reading may have begun before the change.
            num_before = len(watch.figures().moments)
            await until(lambda: len(watch.figures().moments) >= num_before + 2)

    figures = watch.figures()
    assert figures.generated_tokens == 600
    assert figures.forks == {"accepted": 0, "delayed": 5}
    assert (figures.attended_tokens, figures.sequential_attended_tokens) == (300, 400)
    assert {moment.kv_share for moment in figures.moments} == {0.6, 0.9}
    assert {moment.running for moment in figures.moments} == {12}
    assert {moment.waiting for moment in figures.moments} == {2}
    assert figures.failures == 0


def a_reading_takes(seconds: float, server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass only by readings."""
    monkeypatch.setattr("time.perf_counter", lambda: server.num_asked * seconds)


async def test_late_reports_still_count_for_the_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    page = busy_page()
    with served(page.text()) as server:
        a_reading_takes(1 / 16, server, monkeypatch)

        def tell_late(number: int) -> None:
            if number in (4, 7):
                page.add(catalogue.GENERATED_TOKENS, 300, model="apar-tiny", replica="r1")
                server.body = page.text()

        server.before = tell_late
        watch = ClusterWatch(PagesSource([server.url]), every_s=60, settle_s=1 / 4)
        async with watch.watching():
            assert server.num_asked == 1

    assert watch.figures().generated_tokens == 600
    # Without an increase for the time of four readings.
    assert server.num_asked == 7 + 4


async def test_waiting_for_busy_servers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    page = busy_page()
    with served(page.text()) as server:
        a_reading_takes(1 / 16, server, monkeypatch)

        def keep_busy(number: int) -> None:
            page.add(catalogue.GENERATED_TOKENS, 1, model="apar-tiny", replica="r1")
            server.body = page.text()

        server.before = keep_busy
        watch = ClusterWatch(PagesSource([server.url]), every_s=60, settle_s=1 / 4)
        await watch.settle()

    # Three times as long as without an increase.
    assert server.num_asked == 1 + 3 * 4
    assert watch.figures().generated_tokens == 3 * 4


async def test_an_outage_of_a_page_loses_no_counts() -> None:
    page = busy_page()
    with served(page.text()) as server:
        watch = ClusterWatch(PagesSource([server.url]), every_s=0.05, settle_s=0.0)
        async with watch.watching():
            server.status = 503
            await until(lambda: watch.figures().failures > 0)
            page.add(catalogue.GENERATED_TOKENS, 40, model="apar-tiny", replica="r1")
            server.body, server.status = page.text(), 200

    figures = watch.figures()
    assert figures.failures > 0
    assert figures.generated_tokens == 40


@pytest.mark.parametrize("body", ["other_metric 1.0\n", "<html>"])
async def test_a_foreign_page_is_an_error_before_the_run(body: str) -> None:
    with served(body) as server:
        watch = ClusterWatch(PagesSource([server.url]), every_s=0.1)
        with pytest.raises(MonitorError, match="--metrics"):
            async with watch.watching():
                pytest.fail("the run began")


async def test_a_missing_page_is_an_error_before_the_run() -> None:
    watch = ClusterWatch(PagesSource([f"127.0.0.1:{free_port()}"]), every_s=0.1)

    with pytest.raises(MonitorError, match="no answer"):
        async with watch.watching():
            pytest.fail("the run began")
