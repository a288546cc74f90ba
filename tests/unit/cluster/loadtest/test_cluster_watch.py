"""Readings of metrics pages during a repeat."""

import asyncio
import time

import pytest

from cluster.loadtest.watches import ClusterWatch
from cluster.local_ray import free_port
from cluster.metrics import catalogue
from cluster.monitor.overview import MonitorError
from cluster.monitor.sources import PagesSource
from tests.fakes.metrics_page import busy_page, served


async def test_increases_and_gauges_cover_the_repeat() -> None:
    page = busy_page()
    with served(page.text()) as server:
        watch = ClusterWatch(PagesSource([server.url]), every_s=0.1, settle_s=0.0)
        async with watch.watching():
            await asyncio.sleep(0.25)
            of = {"model": "apar-tiny", "replica": "r1"}
            page.add(catalogue.GENERATED_TOKENS, 600, **of)
            page.add(catalogue.FORKS, 5, **of, outcome="delayed")
            page.add(catalogue.ATTENDED_TOKENS, 300, **of)
            page.add(catalogue.SEQUENTIAL_ATTENDED_TOKENS, 400, **of)
            page.set(catalogue.KV_CACHE_USAGE, 0.9, **of)
            server.body = page.text()
            await asyncio.sleep(0.25)

    figures = watch.figures()
    assert figures.generated_tokens == 600
    assert figures.forks == {"accepted": 0, "delayed": 5}
    assert (figures.attended_tokens, figures.sequential_attended_tokens) == (300, 400)
    assert {moment.kv_share for moment in figures.moments} == {0.6, 0.9}
    assert {moment.running for moment in figures.moments} == {12}
    assert {moment.waiting for moment in figures.moments} == {2}
    assert figures.failures == 0


async def test_late_reports_still_count_for_the_repeat() -> None:
    page = busy_page()
    with served(page.text()) as server:

        async def tell_late() -> None:
            for _ in range(2):
                await asyncio.sleep(0.6)
                page.add(catalogue.GENERATED_TOKENS, 300, model="apar-tiny", replica="r1")
                server.body = page.text()

        watch = ClusterWatch(PagesSource([server.url]), every_s=0.1, settle_s=1.0)
        async with watch.watching():
            telling = asyncio.create_task(tell_late())
        await telling

    assert watch.figures().generated_tokens == 600


async def test_waiting_for_busy_servers_is_bounded() -> None:
    page = busy_page()
    with served(page.text()) as server:

        async def keep_busy() -> None:
            while True:
                page.add(catalogue.GENERATED_TOKENS, 1, model="apar-tiny", replica="r1")
                server.body = page.text()
                await asyncio.sleep(0.01)

        watch = ClusterWatch(PagesSource([server.url]), every_s=0.1, settle_s=0.4)
        busy = asyncio.create_task(keep_busy())
        began_s = time.perf_counter()
        async with asyncio.timeout(10):
            await watch.settle()
        busy.cancel()

    assert time.perf_counter() - began_s >= 1.2
    assert watch.figures().generated_tokens > 0


async def test_an_outage_of_a_page_loses_no_counts() -> None:
    page = busy_page()
    with served(page.text()) as server:
        watch = ClusterWatch(PagesSource([server.url]), every_s=0.05, settle_s=0.0)
        async with watch.watching():
            server.status = 503
            await asyncio.sleep(0.3)
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
