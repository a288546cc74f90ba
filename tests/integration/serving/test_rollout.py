"""New settings, and the end, under load: nobody loses a request."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.random_checkpoint import write_checkpoint
from tests.integration.serving.apar_process import (
    ENGINE,
    STOP_S,
    TINY,
    Server,
    serving,
    session_members,
    wait_for,
)
from tests.integration.serving.load_clients import chat, under_load

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LONG = chat("Give me 5 tips for sleeping well.", "apar-tiny") | {
    "max_tokens": 1900,
    "ignore_eos": True,
    "stream": True,
}


async def rolled_out(server: Server) -> str:
    return await asyncio.to_thread(server.roll_out)


def engines(server: Server) -> list[int]:
    return [process.pid for process in server.processes(ENGINE)]


def served(server: Server) -> list[str]:
    answer = httpx.get(f"{server.url}/v1/models", timeout=30).json()
    return [card["id"] for card in answer["data"]]


async def test_every_kind_of_rollout_under_load_loses_no_request(tmp_path: Path) -> None:
    plain = {
        "checkpoint": str(write_checkpoint(tmp_path / "plain")),
        "cpu_threads": 1,
        "kv_cache_gib": 0.1,
        "max_concurrency": 4,
        "engine": {"enforce_eager": True},
    }
    with serving(tmp_path, TINY, drain_s=30) as server:
        async with under_load(server.url) as load:
            first = engines(server)

            server.write(TINY | {"max_queued_requests": 77}, drain_s=30)
            said = await rolled_out(server)
            assert "model apar-tiny is changed: max_queued_requests" in said
            assert engines(server) == first  # a limit of the gateway restarts nothing

            server.write(TINY | {"replicas": "many"}, drain_s=30)
            assert "models.0.replicas" in await rolled_out(server)
            server.write(TINY, port=1)
            assert "port: cannot be changed" in await rolled_out(server)
            server.write(TINY | {"engine": {"no_such_argument": 1}}, drain_s=30)
            assert "no_such_argument" in await rolled_out(server)
            assert engines(server) == first  # what cannot be used changes nothing

            server.write(TINY | {"max_concurrency": 32}, plain, drain_s=30)
            said = await rolled_out(server)
            assert "model plain is added" in said
            assert not set(engines(server)) & set(first)
            assert served(server) == ["apar-tiny", "plain"]

            server.write(TINY | {"max_concurrency": 32}, drain_s=30)
            kept = engines(server)
            assert "model plain is removed" in await rolled_out(server)
            while len(left := engines(server)) > 1:  # noqa: ASYNC110  # ends in its own time
                await asyncio.sleep(0.2)
            assert set(left) < set(kept)
            assert served(server) == ["apar-tiny"]
        assert load.failures == []
        assert len(load.outcomes) > 20
        server.wait_until_idle(1)


async def test_what_outlasts_the_grace_goes_on_at_the_new_replica(tmp_path: Path) -> None:
    with serving(tmp_path, TINY, drain_s=0.2) as server:
        async with under_load(server.url) as load:
            first = engines(server)
            server.write(TINY | {"max_concurrency": 32}, drain_s=0.2)
            assert "Rolled out" in await rolled_out(server)
            await asyncio.sleep(3)
            assert not set(engines(server)) & set(first)
        assert load.failures == []
        assert any(record["retries"] for record in server.records())
        server.wait_until_idle(1)


async def begun(client: httpx.AsyncClient, started: asyncio.Event) -> str:
    async with client.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        pieces = []
        async for piece in answer.aiter_text():
            started.set()
            pieces.append(piece)
    return "".join(pieces)


async def test_on_sigterm_streams_end_and_new_requests_are_sent_away(tmp_path: Path) -> None:
    with serving(tmp_path, TINY, drain_s=60) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=90) as client:
            started = asyncio.Event()
            stream = asyncio.create_task(begun(client, started))
            await started.wait()
            server.process.terminate()
            await asyncio.to_thread(wait_for, server.log, "Stopping", server.process)
            while (health := await client.get("/health")).status_code == 200:
                assert not stream.done()
            refused = await client.post("/v1/chat/completions", json=LONG)
            live = await client.get("/live")
            text = await stream

    assert health.status_code == 503
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    assert live.status_code == 200
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert '"error"' not in text


@pytest.mark.parametrize(("drain_s", "signals"), [(0.5, 1), (600, 2)])
async def test_what_has_not_ended_in_time_or_at_a_second_signal_ends_with_an_error(
    tmp_path: Path, drain_s: float, signals: int
) -> None:
    with serving(tmp_path, TINY, drain_s=drain_s) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=90) as client:
            started = asyncio.Event()
            streams = [asyncio.create_task(begun(client, started)) for _ in range(12)]
            await started.wait()
            since = time.monotonic()
            for _ in range(signals):
                server.process.terminate()
                await asyncio.to_thread(wait_for, server.log, "Stopping", server.process)
            texts = await asyncio.gather(*streams, return_exceptions=True)
            took_s = time.monotonic() - since
        server.process.wait(timeout=STOP_S)

    assert took_s < 30
    assert not [text for text in texts if '"finish_reason":"length"' in str(text)]
    if signals == 1:
        assert all(isinstance(text, str) and text.endswith("data: [DONE]\n\n") for text in texts)
        assert all('"code": "draining"' in str(text) for text in texts)
    assert server.process.returncode == 0
    assert session_members(server.process.pid) == set()
