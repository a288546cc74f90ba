"""Kill the only engine, replica or gateway process under load."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.rogue_peer import RoguePeer
from tests.integration.serving.apar_process import ENGINE, GATEWAY, REPLICA, Server, held

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
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


async def taken_over(victim: psutil.Process, file: Path) -> list[RoguePeer]:
    """Kill a process and take its ports at once."""
    rogues = {
        # Of an IPv6 address, the IPv4 address in it.
        (each.laddr.ip.rpartition(":")[2] or "127.0.0.1", each.laddr.port): RoguePeer(file)
        for each in victim.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    victim.kill()
    async with asyncio.timeout(RECOVERY_S):
        for (host, port), rogue in rogues.items():
            while True:
                try:
                    await rogue.start(host, port)
                    break
                except OSError:
                    await asyncio.sleep(0)
    return list(rogues.values())


async def test_another_process_at_the_ports_of_a_killed_replica_gets_no_prompt(
    server: Server, tmp_path: Path
) -> None:
    (victim,) = server.processes(REPLICA)
    (gateway,) = server.processes(GATEWAY)
    body = BODY | {"messages": [{"role": "user", "content": "My secret is 4711."}], "max_tokens": 5}
    answers: list[httpx.Response] = []
    is_over = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        while not is_over.is_set():
            answers.append(await client.post("/v1/chat/completions", json=body))

    async with server.async_client(timeout_s=RECOVERY_S) as client:
        await wait_until_served(client)
        asking = [asyncio.create_task(ask(client)) for _ in range(20)]
        await asyncio.sleep(0.5)
        # It must not find the port closed, which would tell it that the replica is dead.
        gateway.suspend()
        rogues = await taken_over(victim, tmp_path / "ran")
        gateway.resume()
        await asyncio.sleep(1.0)
        is_over.set()
        await asyncio.gather(*asking)
        for rogue in rogues:
            rogue.close()

    received = [bytes(data) for rogue in rogues for data in rogue.received]
    assert not [data for data in received if b"4711" in data]
    assert not (tmp_path / "ran").exists()
    assert {answer.status_code for answer in answers} == {200}
    server.wait_until_idle()


def wait_for_threads(server: Server, number: int) -> None:
    """Wait until this many threads are alive."""
    deadline = time.monotonic() + RECOVERY_S
    while (load := server.loads()[0])["threads"] < number:
        assert time.monotonic() < deadline, load


@pytest.mark.ci
async def test_a_killed_gateway_ends_its_requests_and_its_successor_serves_the_next(
    server: Server,
) -> None:
    (victim,) = server.processes(GATEWAY)
    engines = server.processes(ENGINE)
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
        with held(engines):
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
