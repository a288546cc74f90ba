"""Requests to a real server: times, counts, and all failures."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from apar_core.offline.data.records import ChatMessage
from cluster.loadtest.client import LoadClient
from cluster.loadtest.jobs import Job, Target
from cluster.loadtest.run_file import Answered
from cluster.local_ray import free_port
from tests.fakes.chat_server import Reply, chat_server
from tests.fakes.clock import Clock
from tests.fakes.waiting import until

BODY = b'{"model": "scripted", "messages": [], "stream": true}'


def job(text_tokens: int | None = None) -> Job:
    return Job("q1", "other", (ChatMessage("user", "Hello?"),), BODY, text_tokens)


async def ask(
    url: str, *, timeout_s: float = 60.0, key: str | None = None, text_tokens: int | None = None
) -> Answered:
    async with LoadClient(Target(url=url, api_key=key), timeout_s=timeout_s) as client:
        return await client.send(
            job(text_tokens), repeat=0, index=3, start_s=time.perf_counter(), planned_s=0.0
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the load test, which a server may set."""
    clock = Clock(64.0)
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


async def test_a_whole_answer_is_timed_and_counted(clock: Clock) -> None:
    def may_write(num_pieces: int) -> bool:
        """Let an eighth of a second pass when the client has all pieces before."""
        has_all = [len(each.stream.pieces) for each in client.under_way] == [num_pieces]
        clock.now_s += has_all / 8
        return has_all

    reply = Reply(
        ("One\n", "two", " three"), may_write=may_write, tokens=9, apar={"decode_steps": 4}
    )
    with chat_server(lambda body, number: reply) as server:
        async with LoadClient(Target(url=server.url, api_key="secret"), timeout_s=60) as client:
            answered = await client.send(job(), repeat=0, index=3, start_s=60.0, planned_s=0.0)

    record = answered.record
    assert answered.text == "One\ntwo three"
    assert (record.error, record.status, record.finish_reason) == (None, 200, "stop")
    assert (record.prompt_tokens, record.text_tokens, record.counted) == (7, 9, True)
    assert record.apar == {"decode_steps": 4}
    assert record.pieces == [(0.125, 4), (0.25, 3), (0.375, 6)]
    assert (record.sent_s, record.paragraph_s, record.end_s) == (4.0, 0.125, 0.5)
    assert server.keys == ["Bearer secret"]
    assert server.bodies == [{"model": "scripted", "messages": [], "stream": True}]


async def test_apar_text_tokens_take_precedence_over_usage() -> None:
    reply = Reply(tokens=10, apar={"text_tokens": 9})
    with chat_server(lambda body, number: reply) as server:
        assert (await ask(server.url)).record.text_tokens == 9


@pytest.mark.parametrize("apar", ["x", [1], {"text_tokens": "x"}])
async def test_an_invalid_apar_field_fails_its_request_and_names_the_field(apar: Any) -> None:
    with chat_server(lambda body, number: Reply(apar=apar)) as server:
        record = (await ask(server.url)).record

    assert record.error == "not_a_stream"
    assert "apar" in (record.message or "")


async def test_without_usage_chunks_are_counted_and_marked() -> None:
    with chat_server(lambda body, number: Reply(("a", "b", "c"), usage=False)) as server:
        record = (await ask(server.url)).record

    assert (record.text_tokens, record.counted, record.error) == (3, False, None)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (Reply(status=429), "http_429", "scripted"),
        (Reply(status=503), "http_503", "scripted"),
        (Reply(status=404, body="<h1>Not here</h1>"), "http_404", "<h1>Not here</h1>"),
        (Reply(body='{"choices": []}'), "not_a_stream", "text/plain"),
        (Reply(ending="cut"), "cut", ""),
        (Reply(ending="unfinished"), "cut", "ended before the answer"),
        (Reply(ending="error"), "stream_error", "the engine died"),
    ],
)
async def test_every_failure_has_its_kind(
    clock: Clock, reply: Reply, error: str, message: str
) -> None:
    def script(body: dict[str, Any], number: int) -> Reply:
        clock.now_s += 0.25
        return reply

    with chat_server(script) as server:
        record = (await ask(server.url)).record

    assert record.error == error
    assert message in (record.message or "")
    assert record.end_s == 0.25


async def test_a_server_that_hangs_is_a_timeout() -> None:
    with chat_server(lambda body, number: Reply(ending="hang")) as server:
        record = (await ask(server.url, timeout_s=0.5)).record

    assert (record.error, record.message) == ("timeout", "no complete answer within 0.5 s")


async def test_a_server_that_is_down_is_a_connection_error() -> None:
    record = (await ask(f"http://127.0.0.1:{free_port()}")).record

    assert (record.error, record.status, record.pieces) == ("connection", None, [])


async def test_an_invalid_address_is_an_error() -> None:
    assert (await ask("http://256.256.256.256.nowhere:1")).record.error == "connection"


async def test_a_replay_of_other_tokens_is_an_error() -> None:
    with chat_server(lambda body, number: Reply(tokens=5)) as server:
        wrong = (await ask(server.url, text_tokens=6)).record
        right = (await ask(server.url, text_tokens=5)).record

    assert (wrong.error, wrong.message) == ("not_replayed", "5 text tokens instead of 6")
    assert right.error is None


async def test_a_cancelled_request_keeps_its_partial_answer() -> None:
    with chat_server(lambda body, number: Reply(("a", "b"), ending="hang")) as server:
        async with LoadClient(Target(url=server.url), timeout_s=60) as client:
            sending = client.send(job(), repeat=0, index=0, start_s=0.0, planned_s=None)
            asking = asyncio.create_task(sending)
            await until(lambda: [each.stream.text for each in client.under_way] == [["a", "b"]])
            asking.cancel()
            record = (await asking).record

    assert (record.error, len(record.pieces)) == ("cancelled", 2)


async def test_connections_are_reused() -> None:
    with chat_server(lambda body, number: Reply(linger_s=0.1)) as server:
        async with LoadClient(Target(url=server.url), timeout_s=60) as client:
            for index in range(3):
                await client.send(job(), repeat=0, index=index, start_s=0.0, planned_s=None)

    assert len(server.connections) == 1
