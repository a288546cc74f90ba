"""Requests to a real local server: retries, limits and error messages."""

from __future__ import annotations

import asyncio
import socket
import threading

import openai
import pytest

from apar_core.errors import EvaluationError
from apar_core.offline.data.records import ChatMessage
from apar_core.offline.evaluation.chat_endpoint import (
    ChatEndpoint,
    Completion,
    EndpointSettings,
    RequestFailedError,
)
from tests.fakes.judge_server import JudgeServer, Reply, judge_server

QUESTION = (ChatMessage("user", "Hello?"),)
# The client waits as long as the server asks for.
SOON = {"retry-after-ms": "10"}


async def ask(server: JudgeServer, retries: int = 3, num: int = 1) -> list[Completion]:
    settings = EndpointSettings(
        url=server.url, model="m", api_key="secret", retries=retries, concurrency=2
    )
    async with ChatEndpoint(settings) as endpoint:
        return await asyncio.gather(
            *(endpoint.complete(QUESTION, max_tokens=5, temperature=0.0) for _ in range(num))
        )


async def test_a_completion_has_the_answer_and_its_token_counts() -> None:
    with judge_server(lambda _body, _number: Reply(text="Yes.")) as server:
        [completion] = await ask(server)

    assert completion == Completion("Yes.", prompt_tokens=100, completion_tokens=10)
    assert server.keys == ["Bearer secret"]
    assert server.requests[0]["messages"] == [{"role": "user", "content": "Hello?"}]
    assert (server.requests[0]["max_tokens"], server.requests[0]["temperature"]) == (5, 0.0)


@pytest.mark.parametrize("status", [408, 429, 500])
async def test_temporary_errors_are_retried(status: int) -> None:
    with judge_server(
        lambda _body, number: Reply(status if number < 3 else 200, "ok", headers=SOON)
    ) as server:
        [completion] = await ask(server)

    assert completion.text == "ok"
    assert len(server.requests) == 4


@pytest.mark.parametrize("garbage", ["<html>no JSON</html>", "{}", '{"choices": []}', '"text"'])
async def test_an_answer_that_is_not_a_completion_fails(garbage: str) -> None:
    with (
        judge_server(lambda _body, _number: Reply(body=garbage)) as server,
        pytest.raises(RequestFailedError),
    ):
        await ask(server)


async def test_a_request_that_keeps_failing_fails_alone() -> None:
    with (
        judge_server(lambda _body, _number: Reply(503, "overloaded", headers=SOON)) as server,
        pytest.raises(RequestFailedError, match=r"HTTP 503, .*overloaded"),
    ):
        await ask(server, retries=2)

    assert len(server.requests) == 3


async def test_a_refused_request_is_not_retried() -> None:
    with (
        judge_server(lambda _body, _number: Reply(400, "the prompt is too long")) as server,
        pytest.raises(RequestFailedError, match=r"HTTP 400, .*too long"),
    ):
        await ask(server)

    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "refuses the API key"), (403, "refuses the API key"), (404, "has no model 'm'")],
)
async def test_a_wrong_key_or_model_ends_the_run(status: int, message: str) -> None:
    with (
        judge_server(lambda _body, _number: Reply(status, "nope")) as server,
        pytest.raises(EvaluationError, match=message) as caught,
    ):
        await ask(server)

    assert not isinstance(caught.value, RequestFailedError)
    assert len(server.requests) == 1


async def test_an_unreachable_address_ends_the_run() -> None:
    with judge_server(lambda _body, _number: Reply()) as server:
        pass

    with pytest.raises(EvaluationError, match="cannot be reached") as caught:
        await ask(server, retries=0)

    assert not isinstance(caught.value, RequestFailedError)


async def test_an_address_that_drops_connections_ends_the_run() -> None:
    with socket.socket() as listener, socket.socket() as queued:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        # The only place in the queue is taken, so further connections are not accepted.
        queued.connect(listener.getsockname())
        settings = EndpointSettings(
            url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1",
            model="m",
            retries=0,
            timeout_s=0.2,
        )
        async with ChatEndpoint(settings) as endpoint:
            with pytest.raises(EvaluationError, match="cannot be reached") as caught:
                await endpoint.complete(QUESTION, max_tokens=5, temperature=0.0)

    assert not isinstance(caught.value, RequestFailedError)


async def test_a_slow_answer_fails_alone() -> None:
    given_up = threading.Event()

    def slowly(_body: object, _number: int) -> Reply:
        given_up.wait()
        return Reply(text="ok")

    with judge_server(slowly) as server:
        settings = EndpointSettings(url=server.url, model="m", retries=0, timeout_s=0.1)
        async with ChatEndpoint(settings) as endpoint:
            # A busy machine may not connect in so short a time.
            limit = openai.Timeout(60, read=settings.timeout_s)
            endpoint._client = endpoint._client.with_options(timeout=limit)
            with pytest.raises(RequestFailedError, match=r"did not answer within 0\.1 s"):
                await endpoint.complete(QUESTION, max_tokens=5, temperature=0.0)
        given_up.set()


async def test_concurrent_requests_are_limited() -> None:
    both = threading.Barrier(2)

    def slowly(_body: object, _number: int) -> Reply:
        both.wait(60)
        return Reply(text="ok")

    with judge_server(slowly) as server:
        completions = await ask(server, num=8)

    assert len(completions) == 8
    assert server.most_under_way == 2
