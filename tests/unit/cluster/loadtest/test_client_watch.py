"""The load of the client: CPU usage, event loop lag, late requests."""

import asyncio
import time

import pytest

from cluster.loadtest.watches import ClientWatch
from tests.unit.cluster.loadtest.load_records import record


@pytest.mark.usefixtures("simulated_clocks")
async def test_an_idle_client_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.perf_counter
    monkeypatch.setattr("time.process_time", lambda: clock() / 4)
    watch = ClientWatch()
    async with watch.watching():
        await asyncio.sleep(3.0)

    figures = watch.figures([record(planned_s=0.0, sent_s=0.01)])
    assert figures.cpu_share == pytest.approx(0.25)
    assert figures.busiest_cpu_share == pytest.approx(0.25)
    assert figures.lag_max_s < 1e-6
    assert figures.warnings == []
    assert figures.late_p99_s == 0.01


async def test_a_busy_client_is_marked() -> None:
    watch = ClientWatch()
    async with watch.watching():
        for _ in range(8):
            burned = time.process_time() + 0.15
            while time.process_time() < burned:
                pass
            await asyncio.sleep(0)

    figures = watch.figures([])
    assert figures.lag_max_s > 0.1
    assert figures.late_p99_s is None
    assert any("event loop" in mark for mark in figures.warnings)


async def test_late_requests_are_marked() -> None:
    watch = ClientWatch()
    async with watch.watching():
        await asyncio.sleep(0.05)

    figures = watch.figures([record(planned_s=1.0, sent_s=1.5)])
    assert [mark for mark in figures.warnings if "sent 500 ms late" in mark]
