"""The only engine's or replica's process is killed under load."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.integration.serving.running_application import RunningApplication, processes

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ENGINE = "VLLM::EngineCore"
REPLICA = "ray::ServeReplica:apar:Replica"
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Give me 5 tips for sleeping well."}],
    "max_tokens": 800,
    "ignore_eos": True,
}
RECOVERY_S = 60.0


async def begun_stream(client: httpx.AsyncClient, begun: asyncio.Semaphore) -> str:
    """The whole text of a stream; releases `begun` at its first piece."""
    pieces: list[str] = []
    async with client.stream(
        "POST", "/v1/chat/completions", json=BODY | {"stream": True}
    ) as answer:
        async for piece in answer.aiter_text():
            if not pieces:
                begun.release()
            pieces.append(piece)
    return "".join(pieces)


async def wait_until_served(client: httpx.AsyncClient) -> float:
    """Seconds until a request is answered again."""
    started = time.monotonic()
    while True:
        answer = await client.post("/v1/chat/completions", json=BODY | {"max_tokens": 5})
        if answer.status_code == 200:
            return time.monotonic() - started
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["type"] == "server_error"
        assert time.monotonic() - started < RECOVERY_S
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("title", [ENGINE, REPLICA])
async def test_requests_outlive_the_only_replica_and_end_at_its_successor(
    application: RunningApplication, title: str
) -> None:
    (victim,) = processes(title)
    begun = asyncio.Semaphore(0)
    async with httpx.AsyncClient(base_url=application.url, timeout=RECOVERY_S) as client:
        streams = [asyncio.create_task(begun_stream(client, begun)) for _ in range(8)]
        whole = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        for _ in streams:
            await begun.acquire()
        victim.kill()
        texts = await asyncio.gather(*streams)
        answer = await whole
        await wait_until_served(client)
        health = await client.get("/health")

    for text in texts:
        events = text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert '"error"' not in text
        assert [event for event in events if '"finish_reason":"length"' in event] == [events[-2]]
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert health.status_code == 200
    application.wait_until_idle()
    assert len(processes(ENGINE)) == 1
