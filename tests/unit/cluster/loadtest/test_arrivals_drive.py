"""Arrivals of requests, and interrupted runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import pytest

from apar_core.offline.data.records import ChatMessage
from cluster.loadtest.arrivals import AllAtOnce, Arrivals, ClosedLoop
from cluster.loadtest.client import Attempt, LoadClient
from cluster.loadtest.jobs import Job, Target
from cluster.loadtest.load_run import Drive, Stop
from cluster.loadtest.run_file import Answered
from tests.fakes.chat_server import ChatServer, Reply, chat_server
from tests.fakes.clock import Clock
from tests.fakes.waiting import until

BODY = b'{"model": "scripted", "messages": [], "stream": true}'


@dataclass(frozen=True)
class GivenTimes:
    times: list[float]

    def times_s(self, number: int, seed: int) -> list[float]:
        return self.times[:number]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of the load test, which a server may set."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


def jobs(number: int) -> list[Job]:
    return [Job(str(each), "other", (ChatMessage("user", "?"),), BODY) for each in range(number)]


async def drive(
    server: ChatServer,
    arrivals: Arrivals,
    number: int,
    *,
    stop: Stop | None = None,
    longest_s: float = float("inf"),
) -> tuple[list[Answered], float]:
    answers: list[Answered] = []
    async with LoadClient(Target(url=server.url), timeout_s=30) as client:
        repeat = Drive(client, 0, stop or Stop(), answers.append, longest_s)
        seconds = await repeat.run(jobs(number), arrivals, seed=0)
    return answers, seconds


async def test_all_at_once_sends_every_request_immediately(clock: Clock) -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        if number == 39:
            clock.now_s += 0.25
        return Reply(together=40)

    with chat_server(reply) as server:
        answers, seconds = await drive(server, AllAtOnce(), 40)

    assert server.most_under_way == 40
    assert len(answers) == 40
    assert {answer.record.error for answer in answers} == {None}
    assert {answer.record.sent_s for answer in answers} == {0.0}
    assert seconds == 0.25


async def test_a_closed_loop_keeps_as_many_running(clock: Clock) -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        clock.now_s += 0.25
        return Reply(together=4)

    with chat_server(reply) as server:
        answers, seconds = await drive(server, ClosedLoop(4), 12)

    assert server.most_under_way == 4
    assert sorted(answer.record.index for answer in answers) == list(range(12))
    assert all(answer.record.planned_s is None for answer in answers)
    assert seconds == 3.0


class Slow(LoadClient):
    """Answers each request after 10 s, without a server."""

    async def _follow(self, attempt: Attempt) -> None:
        await asyncio.sleep(10)


@pytest.mark.usefixtures("simulated_clocks")
async def test_an_open_loop_sends_at_its_times() -> None:
    times = [0.0, 0.1, 0.1, 0.4]
    answers: list[Answered] = []
    client = Slow(Target(url="http://127.0.0.1:1"), timeout_s=30)

    seconds = await Drive(client, 0, Stop(), answers.append).run(jobs(4), GivenTimes(times), seed=0)

    records = sorted((answer.record for answer in answers), key=lambda record: record.index)
    assert [record.planned_s for record in records] == times
    assert [record.sent_s for record in records] == pytest.approx(times, abs=1e-5)
    assert seconds == pytest.approx(10.4, abs=1e-5)


async def test_an_interrupted_run_sends_nothing_and_waits_for_nothing() -> None:
    stop = Stop()
    times = [0.0] * 5 + [300.0] * 5
    answers: list[Answered] = []
    with chat_server(lambda body, number: Reply(("a",), ending="hang")) as server:
        async with LoadClient(Target(url=server.url), timeout_s=300) as client:
            repeat = Drive(client, 0, stop, answers.append)
            running = asyncio.create_task(repeat.run(jobs(10), GivenTimes(times), seed=0))
            await until(lambda: [each.stream.text for each in client.under_way] == [["a"]] * 5)
            stop.ask()
            seconds = await running

    assert seconds < 300
    assert [answer.record.error for answer in answers] == ["cancelled"] * 5
    assert all(answer.text == "a" for answer in answers)


async def test_an_interrupted_closed_loop_takes_no_more_jobs() -> None:
    stop = Stop()
    with chat_server(lambda body, number: Reply(ending="hang")) as server:
        running = asyncio.create_task(drive(server, ClosedLoop(3), 100, stop=stop))
        await until(lambda: len(server.bodies) == 3)
        stop.ask()
        answers, _ = await running

    assert len(answers) == 3
    assert len(server.bodies) == 3


async def test_an_open_loop_sends_nothing_that_is_planned_after_the_longest_time() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 0.4]
    with chat_server(lambda body, number: Reply()) as server:
        answers, _ = await drive(server, GivenTimes(times), 5, longest_s=0.25)

    assert len(answers) == 3
    assert {answer.record.error for answer in answers} == {None}


async def test_a_closed_loop_sends_nothing_after_the_longest_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead_s, clock = 0.0, time.perf_counter
    monkeypatch.setattr("time.perf_counter", lambda: clock() + ahead_s)

    def reply(body: dict[str, Any], number: int) -> Reply:
        nonlocal ahead_s
        ahead_s += 200
        return Reply()

    with chat_server(reply) as server:
        answers, _ = await drive(server, ClosedLoop(1), 5, longest_s=500)

    assert len(answers) == 3
    assert {answer.record.error for answer in answers} == {None}
