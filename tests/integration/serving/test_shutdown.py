"""Shutdown of a server while it serves requests."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.integration.serving.apar_process import (
    ENGINE,
    STOP_S,
    TINY,
    held,
    ray_folders,
    serving,
    session_members,
    wait_for,
)
from tests.integration.serving.load_clients import chat
from tests.integration.serving.shared_server import SharedServer

# The last tests of the shared server.
pytestmark = [pytest.mark.cluster, pytest.mark.slow]
# Without forks it takes as many steps as tokens.
LONG = chat("Give me 5 tips for sleeping well.", "apar-tiny") | {
    "max_tokens": 800,
    "ignore_eos": True,
    "stream": True,
    "apar": {"enabled": False},
}
NUM_STREAMS = 3


async def begun(client: httpx.AsyncClient, started: asyncio.Event) -> str:
    async with client.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        pieces = []
        async for piece in answer.aiter_text():
            started.set()
            pieces.append(piece)
    return "".join(pieces)


@pytest.mark.ci
async def test_on_sigterm_streams_end_and_new_requests_are_refused(shared: SharedServer) -> None:
    server = shared.server
    members = session_members(server.process.pid)
    (folder,) = ray_folders(members)
    engines = server.processes(ENGINE)
    async with server.async_client() as client:
        started = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(begun(client, each)) for each in started]
        for each in started:
            await each.wait()
        with held(engines):
            # To the whole process group, as supervisors do; Ray's processes must not receive it.
            os.killpg(server.process.pid, signal.SIGTERM)
            await asyncio.to_thread(wait_for, server.log, "Stopping", server.process)
            # Before the server drains, /health waits for the held engine, and may answer 503 too.
            while (health := await client.get("/health")).json().get("error", {}).get(
                "code"
            ) != "draining":
                assert server.process.poll() is None
            refused = await client.post("/v1/chat/completions", json=LONG)
            live = await client.get("/live")
            assert not any(stream.done() for stream in streams)
        texts = await asyncio.gather(*streams)
    await asyncio.to_thread(server.process.wait, timeout=STOP_S)

    assert health.status_code == 503
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    assert live.status_code == 200
    for text in texts:
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in text
        assert '"error"' not in text
    assert server.process.returncode == 0
    assert len(members) > 5
    assert session_members(server.process.pid) == set()
    assert not folder.exists()
    with socket.socket() as probe:
        # Connections of the test may be left, but nobody listens.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))


@pytest.mark.parametrize(("drain_s", "signals"), [(0.5, 1), (3600, 2)])
async def test_requests_that_outlast_the_drain_time_or_a_second_signal_end_with_an_error(
    tmp_path: Path, drain_s: float, signals: int
) -> None:
    with serving(tmp_path, TINY, drain_s=drain_s) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=90) as client:
            engines = server.processes(ENGINE)
            started = [asyncio.Event() for _ in range(12)]
            streams = [asyncio.create_task(begun(client, each)) for each in started]
            for each in started:
                await each.wait()
            with held(engines):
                for _ in range(signals):
                    server.process.terminate()
                    await asyncio.to_thread(wait_for, server.log, "Stopping", server.process)
                texts = await asyncio.gather(*streams, return_exceptions=True)
        server.process.wait(timeout=STOP_S)

    assert not [text for text in texts if isinstance(text, httpx.TimeoutException)]
    assert not [text for text in texts if '"finish_reason":"length"' in str(text)]
    if signals == 1:
        assert all(isinstance(text, str) and text.endswith("data: [DONE]\n\n") for text in texts)
        assert all('"code": "draining"' in str(text) for text in texts)
    assert server.process.returncode == 0
    assert session_members(server.process.pid) == set()
