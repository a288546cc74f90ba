"""Rollouts of new configurations under load."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.random_checkpoint import write_checkpoint
from tests.integration.serving.apar_process import ENGINE, TINY, Server, serving, slowed
from tests.integration.serving.load_clients import under_load
from tests.integration.serving.shared_server import MODEL, REPLICATED, SharedServer

pytestmark = pytest.mark.cluster


def engines(server: Server) -> list[int]:
    return [process.pid for process in server.processes(ENGINE)]


@pytest.mark.slow
async def test_rollouts_under_load_lose_no_request(
    shared: SharedServer, server: Server, tmp_path: Path
) -> None:
    plain = {
        "checkpoint": str(write_checkpoint(tmp_path / "plain")),
        "cpu_threads": 1,
        "kv_cache_gib": 0.1,
        "max_concurrency": 4,
        "engine": {"enforce_eager": True},
    }

    async def rolled_out(*models: dict[str, Any], **fields: Any) -> str:
        shared.write(*models, **fields)
        return await asyncio.to_thread(server.roll_out)

    async with under_load(server.url, num_clients=3) as load:
        first = engines(server)

        said = await rolled_out(MODEL | {"max_queued_requests": 77})
        assert "model apar-tiny is changed: max_queued_requests" in said
        assert engines(server) == first  # a limit of the gateway restarts nothing

        assert "models.0.replicas" in await rolled_out(MODEL | {"replicas": "many"})
        assert "port: cannot be changed" in await rolled_out(MODEL, port=1)
        wrong = MODEL | {"engine": {"no_such_argument": 1}}
        assert "no_such_argument" in await rolled_out(wrong)
        assert engines(server) == first  # a refused configuration changes nothing

        said = await rolled_out(REPLICATED, plain)
        assert "model plain is added" in said
        assert not set(engines(server)) & set(first)
        models = await asyncio.to_thread(server.openai().models.list)
        assert [model.id for model in models] == ["apar-tiny", "plain"]
        answer = await asyncio.to_thread(
            server.post, "/v1/completions", json={"model": "plain", "prompt": "x", "max_tokens": 4}
        )
        assert answer.json()["model"] == "plain"
        assert "apar" not in answer.json()

        kept = engines(server)
        said = await rolled_out(REPLICATED)
        assert "model plain is removed" in said
        while len(left := engines(server)) > 2:  # noqa: ASYNC110  # drained first
            await asyncio.sleep(0.2)
        assert set(left) < set(kept)
    assert load.failures == []
    assert len(load.outcomes) > 20
    server.wait_until_idle(2)


@pytest.mark.slow
async def test_requests_that_outlast_the_drain_time_continue_on_the_new_replica(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, TINY, drain_s=0.2) as server:
        async with under_load(server.url) as load:
            first = engines(server)
            server.write(TINY | {"max_concurrency": 32}, drain_s=0.2)
            with slowed(server.processes(ENGINE)):
                assert "Rolled out" in await asyncio.to_thread(server.roll_out)
                while set(engines(server)) & set(first):  # noqa: ASYNC110  # drained first
                    await asyncio.sleep(0.2)
        assert load.failures == []
        assert any(record["retries"] for record in server.records())
        server.wait_until_idle(1)
