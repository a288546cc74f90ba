"""Kill the only engine, replica or gateway process under load."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from tests.integration.serving.apar_process import ENGINE, GATEWAY, REPLICA, Server

pytestmark = pytest.mark.cluster
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Give me 5 tips for sleeping well."}],
    "max_tokens": 800,
    "ignore_eos": True,
}
RECOVERY_S = 60.0
# HAProxy passes a closed connection on at once; the rest is for a busy machine.
CLOSED_WITHIN_S = 30.0


async def begun_stream(
    client: httpx.AsyncClient, begun: asyncio.Semaphore, body: dict[str, Any] = BODY
) -> str:
    """Return the text of a stream; release `begun` at its first piece."""
    pieces: list[str] = []
    async with client.stream(
        "POST", "/v1/chat/completions", json=body | {"stream": True}
    ) as answer:
        async for piece in answer.aiter_text():
            if not pieces:
                begun.release()
            pieces.append(piece)
    return "".join(pieces)


async def wait_until_served(client: httpx.AsyncClient) -> float:
    """Wait until a request is answered; return the seconds."""
    started = time.monotonic()
    while True:
        answer = await client.post("/v1/chat/completions", json=BODY | {"max_tokens": 5})
        if answer.status_code == 200:
            return time.monotonic() - started
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["type"] == "server_error"
        assert time.monotonic() - started < RECOVERY_S
        await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("title", [ENGINE, REPLICA])
async def test_requests_outlive_the_only_replica_and_end_at_its_successor(
    server: Server, title: str
) -> None:
    (victim,) = server.processes(title)
    begun = asyncio.Semaphore(0)
    async with server.async_client(timeout_s=RECOVERY_S) as client:
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
    server.wait_until_idle()
    assert len(server.processes(ENGINE)) == 1


def wait_for_threads(server: Server, number: int) -> None:
    """Wait until this many threads are alive."""
    deadline = time.monotonic() + RECOVERY_S
    while (load := server.loads()[0])["threads"] < number:
        assert time.monotonic() < deadline, load


async def test_a_killed_gateway_ends_its_requests_and_its_successor_serves_the_next(
    server: Server,
) -> None:
    (victim,) = server.processes(GATEWAY)
    body = BODY | {"max_tokens": 1900}
    begun = asyncio.Semaphore(0)
    async with server.async_client(timeout_s=RECOVERY_S) as client:
        idle = await asyncio.to_thread(server.wait_until_idle)
        streams = [asyncio.create_task(begun_stream(client, begun, body)) for _ in range(8)]
        wholes = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(4)
        ]
        for _ in streams:
            await begun.acquire()
        await asyncio.to_thread(wait_for_threads, server, len(streams) + len(wholes))
        victim.kill()
        async with asyncio.timeout(CLOSED_WITHIN_S):
            texts = await asyncio.gather(*streams, return_exceptions=True)
        answers = await asyncio.gather(*wholes, return_exceptions=True)
        after = await asyncio.to_thread(server.wait_until_idle)
        await wait_until_served(client)
        text = await begun_stream(client, begun, BODY)

    assert [type(error) for error in texts] == [httpx.RemoteProtocolError] * len(streams)
    for answer in answers:
        # HAProxy closes the client's connection where it had used the gateway's one before. Others
        # it sends again, to the successor.
        if not isinstance(answer, httpx.RemoteProtocolError):
            assert isinstance(answer, httpx.Response)
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
                continue
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "not_ready"
    # The engine has stopped long before the requests were complete. Whole answers may have been
    # generated again.
    generated = after["generated_tokens"] - idle["generated_tokens"]
    assert 0 < generated < body["max_tokens"] * (len(streams) / 2 + len(wholes) * 1.5)
    assert text.endswith("data: [DONE]\n\n")
    assert '"error"' not in text
    (successor,) = server.processes(GATEWAY)
    assert successor.pid != victim.pid
    server.wait_until_idle()
