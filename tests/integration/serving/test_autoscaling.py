"""The number of replicas follows the load without failed requests."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.serving.apar_process import ENGINE, TINY, Server, serving
from tests.integration.serving.load_clients import RIGHT, outcome_of, texts, under_load

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PATIENCE_S = 120.0


async def until_engines(server: Server, number: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(server.processes(ENGINE)) != number:
        assert time.monotonic() < deadline, f"{len(server.processes(ENGINE))} engines"
        await asyncio.sleep(0.5)


async def test_a_second_replica_comes_with_the_load_and_goes_with_it(tmp_path: Path) -> None:
    autoscaling = {
        "max_replicas": 2,
        "target_threads": 12,
        "upscale_delay_s": 1,
        "downscale_delay_s": 5,
    }
    with serving(tmp_path, TINY | {"autoscaling": autoscaling}, drain_s=30) as server:
        await asyncio.sleep(8)
        assert len(server.processes(ENGINE)) == 1
        async with under_load(server.url, num_clients=8) as heavy:
            await until_engines(server, 2)
            await asyncio.sleep(5)
        # One client goes on while the second replica is taken away.
        async with under_load(server.url, num_clients=1) as light:
            await until_engines(server, 1)

        assert heavy.failures == []
        assert light.failures == []
        server.wait_until_idle(1)


async def test_a_model_without_replicas_wakes_up_for_a_request(tmp_path: Path) -> None:
    autoscaling = {
        "min_replicas": 0,
        "max_replicas": 1,
        "upscale_delay_s": 0,
        "downscale_delay_s": 3,
    }
    with serving(tmp_path, TINY | {"autoscaling": autoscaling}) as server:
        expected = await texts(server.url, "apar-tiny")
        async with httpx.AsyncClient(base_url=server.url) as client:
            listed = (await client.get("/v1/models")).json()
            await until_engines(server, 0)
            # Listing the models starts no engine: the autoscaler decides every second.
            for _ in range(8):
                assert (await client.get("/v1/models")).json() == listed
                await asyncio.sleep(1)
                assert server.processes(ENGINE) == []
        prompt, text = next(iter(expected.items()))

        woken = await outcome_of(server.url, "openai stream", prompt, "apar-tiny", text)

    assert woken.kind == RIGHT
