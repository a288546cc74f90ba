"""Requests against a real local server: retries, waits, limits, and errors that tell why."""

from __future__ import annotations

import asyncio
import time

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


class Waits(list[float]):
    """Remembers the waits that are asked for, and does not wait."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


async def ask(
    server: JudgeServer, waits: Waits, retries: int = 3, num: int = 1
) -> list[Completion]:
    settings = EndpointSettings(
        url=server.url, model="m", api_key="secret", retries=retries, concurrency=2
    )
    async with ChatEndpoint(settings, sleep=waits) as endpoint:
        return await asyncio.gather(
            *(endpoint.complete(QUESTION, max_tokens=5, temperature=0.0) for _ in range(num))
        )


async def test_an_answer_comes_with_its_tokens() -> None:
    with judge_server(lambda _body, _number: Reply(text="Yes.")) as server:
        [completion] = await ask(server, Waits())

    assert completion == Completion("Yes.", prompt_tokens=100, completion_tokens=10, attempts=1)
    assert server.keys == ["Bearer secret"]
    assert server.requests[0]["messages"] == [{"role": "user", "content": "Hello?"}]
    assert (server.requests[0]["max_tokens"], server.requests[0]["temperature"]) == (5, 0.0)


async def test_server_errors_are_retried_after_growing_waits() -> None:
    waits = Waits()
    with judge_server(lambda _body, number: Reply(500 if number < 3 else 200, "ok")) as server:
        [completion] = await ask(server, waits)

    assert completion.attempts == 4
    assert [1 <= waits[0] <= 1.25, 2 <= waits[1] <= 2.5, 4 <= waits[2] <= 5] == [True] * 3


async def test_a_wait_that_the_server_asks_for_is_kept() -> None:
    waits = Waits()
    limited = Reply(429, "slow down", headers={"retry-after": "7"})
    with judge_server(lambda _body, number: Reply(text="ok") if number else limited) as server:
        await ask(server, waits)

    assert waits == [7.0]


@pytest.mark.parametrize("garbage", ["<html>no JSON</html>", "{}", '{"choices": []}', '"text"'])
async def test_an_answer_that_is_no_completion_is_retried(garbage: str) -> None:
    waits = Waits()
    with judge_server(
        lambda _body, number: Reply(text="ok") if number else Reply(body=garbage)
    ) as server:
        [completion] = await ask(server, waits)

    assert (completion.text, completion.attempts) == ("ok", 2)


async def test_a_request_that_keeps_failing_fails_alone() -> None:
    with (
        judge_server(lambda _body, _number: Reply(503, "overloaded")) as server,
        pytest.raises(RequestFailedError, match=r"3 attempts: HTTP 503, .*overloaded"),
    ):
        await ask(server, Waits(), retries=2)

    assert len(server.requests) == 3


async def test_a_refused_request_is_not_sent_again() -> None:
    with (
        judge_server(lambda _body, _number: Reply(400, "the prompt is too long")) as server,
        pytest.raises(RequestFailedError, match=r"HTTP 400, .*too long"),
    ):
        await ask(server, Waits())

    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "refuses the API key"), (403, "refuses the API key"), (404, "has no model 'm'")],
)
async def test_what_no_retry_can_help_ends_the_run(status: int, message: str) -> None:
    with (
        judge_server(lambda _body, _number: Reply(status, "nope")) as server,
        pytest.raises(EvaluationError, match=message) as caught,
    ):
        await ask(server, Waits())

    assert not isinstance(caught.value, RequestFailedError)
    assert len(server.requests) == 1


async def test_an_address_that_nobody_answers_at_is_given_up_soon() -> None:
    waits = Waits()
    with judge_server(lambda _body, _number: Reply()) as server:
        pass

    with pytest.raises(EvaluationError, match="cannot be reached") as caught:
        await ask(server, waits, retries=5)

    assert not isinstance(caught.value, RequestFailedError)
    assert len(waits) == 2


async def test_no_more_requests_are_under_way_than_allowed() -> None:
    def slowly(_body: object, _number: int) -> Reply:
        time.sleep(0.02)
        return Reply(text="ok")

    with judge_server(slowly) as server:
        completions = await ask(server, Waits(), num=8)

    assert len(completions) == 8
    assert server.most_under_way == 2
