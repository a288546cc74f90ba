"""Clients that disconnect, stop strings across threads, and overload."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.integration.serving.apar_process import ENGINE, Server, held
from tests.integration.serving.shared_server import MAX_CONCURRENCY, MAX_QUEUED

pytestmark = pytest.mark.cluster
LIST_PROMPT = "Give me 5 tips for sleeping well."


def chat_body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": LIST_PROMPT}]
    return {"messages": messages, "temperature": 0, "max_tokens": 500} | fields


async def leave_after(
    client: httpx.AsyncClient, delay_s: float, num_pieces: int = 0, **fields: Any
) -> int:
    """Read part of a stream, close the connection, and return the status."""
    body = chat_body(stream=True, **fields)
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.aiter_raw()
        for _ in range(num_pieces):
            await anext(pieces, None)
        await asyncio.sleep(delay_s)
        return answer.status_code


async def test_two_hundred_clients_that_leave_mid_stream_free_everything(
    server: Server,
) -> None:
    async with server.async_client() as client:
        statuses = await asyncio.gather(
            *(leave_after(client, 0.002 * index, num_pieces=1) for index in range(200))
        )

    assert statuses == [200] * 200
    await asyncio.to_thread(server.wait_until_idle)


async def test_nothing_more_is_generated_for_clients_that_have_left(
    server: Server,
) -> None:
    long = {"max_tokens": 1900, "ignore_eos": True, "apar": {"enabled": False}}
    engines = server.processes(ENGINE)
    before = await asyncio.to_thread(server.wait_until_idle)
    async with server.async_client() as client:
        await asyncio.gather(
            *(leave_after(client, 0.01 * index, num_pieces=1, **long) for index in range(10))
        )
        await asyncio.to_thread(server.wait_until_idle)
        body = chat_body(n=8, **long | {"temperature": 1})
        whole = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not (await asyncio.to_thread(server.loads))[0]["threads"]:
            assert not whole.done()
        with held(engines):
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)

    after = await asyncio.to_thread(server.wait_until_idle)
    generated = after["generated_tokens"] - before["generated_tokens"]
    # Even if they leave late, because the machine is busy.
    assert 11 <= generated < (10 + 8) * 1900 * 0.9


async def test_leaving_at_any_moment_of_a_forking_request_frees_everything(
    server: Server,
) -> None:
    """Clients leave 2 ms apart, less than an engine step, until some have left after a fork."""

    def forks() -> int:
        return int(server.wait_until_idle()["fork_counters"]["forks"])

    before = await asyncio.to_thread(forks)
    first_ms = 0
    async with server.async_client() as client:
        while await asyncio.to_thread(forks) == before:
            num_cancelled = 0
            for moment_ms in range(first_ms, first_ms + 120, 2):
                task = asyncio.create_task(
                    client.post("/v1/chat/completions", json=chat_body(stream=moment_ms % 4 == 0))
                )
                await asyncio.sleep(moment_ms / 1000)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                num_cancelled += task.cancelled()
            # Some left before their answer was complete.
            assert num_cancelled > 0
            first_ms += 120


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_cannot_keep_requests_running_that_it_abandons(
    server: Server, stream: bool
) -> None:
    body = chat_body(stream=stream, max_tokens=1800, ignore_eos=True)
    headers = {"x-request-disconnect-disabled": "?1"}
    engines = server.processes(ENGINE)
    before = await asyncio.to_thread(server.wait_until_idle)
    async with server.async_client() as client:
        tasks = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
            for _ in range(150)
        ]
        while (await asyncio.to_thread(server.loads))[0]["threads"] < 100:
            assert not any(task.done() for task in tasks)
        with held(engines):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    after = await asyncio.to_thread(server.wait_until_idle)
    # Less than half of what the requests asked for.
    assert after["generated_tokens"] - before["generated_tokens"] < 150 * 1800 / 2


async def test_a_stop_string_across_a_fork_boundary_cuts_the_restored_text(
    server: Server,
) -> None:
    async with server.async_client() as client:
        whole = (await client.post("/v1/chat/completions", json=chat_body())).json()
        text: str = whole["choices"][0]["message"]["content"]
        # The second item ends in a child thread, the number of the third comes from the root.
        boundary = text.index("\n3.")
        stop = text[boundary - 4 : boundary + 3]
        cut = (await client.post("/v1/chat/completions", json=chat_body(stop=[stop]))).json()
        async with client.stream(
            "POST", "/v1/chat/completions", json=chat_body(stop=[stop], stream=True)
        ) as answer:
            streamed = "".join([piece async for piece in answer.aiter_text()])

    assert whole["apar"]["threads"] > 3
    assert cut["choices"][0]["message"]["content"] == text[: boundary - 4]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["stop_reason"] == stop
    assert '"finish_reason":"stop"' in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    await asyncio.to_thread(server.wait_until_idle)


async def test_beyond_the_queue_requests_get_503_and_when_to_retry(
    server: Server,
) -> None:
    num_over = 30
    body = chat_body(max_tokens=400, ignore_eos=True)
    engines = server.processes(ENGINE)
    async with server.async_client() as client:
        with held(engines):  # The refused ones are answered first, because no other request ends.
            tasks = [
                asyncio.create_task(client.post("/v1/chat/completions", json=body))
                for _ in range(MAX_CONCURRENCY + MAX_QUEUED + num_over)
            ]
            refused = []
            for next_done in asyncio.as_completed(tasks):
                refused.append(await next_done)
                if len(refused) == num_over:
                    break
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    assert [answer.status_code for answer in refused] == [503] * num_over
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    error = refused[0].json()["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "overloaded"
    await asyncio.to_thread(server.wait_until_idle)


async def test_health_is_ok(server: Server) -> None:
    async with server.async_client() as client:
        assert (await client.get("/health")).status_code == 200
