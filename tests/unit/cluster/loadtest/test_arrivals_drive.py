"""Arrivals of requests, and interrupted runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import pytest

from apar_core.offline.data.records import ChatMessage
from apar_core.workload.arrivals import AllAtOnce, Arrivals, ClosedLoop
from cluster.loadtest.client import LoadClient
from cluster.loadtest.jobs import Job, Target
from cluster.loadtest.load_run import Drive, Stop
from cluster.loadtest.run_file import Answered
from cluster.loadtest.watches import ClientWatch
from tests.fakes.chat_server import ChatServer, Reply, chat_server
from tests.fakes.waiting import until

BODY = b'{"model": "scripted", "messages": [], "stream": true}'


@dataclass(frozen=True)
class GivenTimes:
    times: list[float]

    def times_s(self, number: int, seed: int) -> list[float]:
        return self.times[:number]


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


async def test_all_at_once_sends_every_request_immediately() -> None:
    started_s = time.perf_counter()
    with chat_server(lambda body, number: Reply(together=40, first_s=0.3)) as server:
        answers, seconds = await drive(server, AllAtOnce(), 40)

    assert server.most_under_way == 40
    assert len(answers) == 40
    assert {answer.record.error for answer in answers} == {None}
    assert 0.3 <= seconds <= time.perf_counter() - started_s


async def test_a_closed_loop_keeps_as_many_running() -> None:
    started_s = time.perf_counter()
    with chat_server(lambda body, number: Reply(together=4, first_s=0.1)) as server:
        answers, seconds = await drive(server, ClosedLoop(4), 12)

    assert server.most_under_way == 4
    assert sorted(answer.record.index for answer in answers) == list(range(12))
    assert all(answer.record.planned_s is None for answer in answers)
    assert 0.3 <= seconds <= time.perf_counter() - started_s


async def test_an_open_loop_sends_at_its_times() -> None:
    times = [0.0, 0.1, 0.1, 0.4]
    watch = ClientWatch()
    with chat_server(lambda body, number: Reply(together=4)) as server:
        async with watch.watching():
            answers, _ = await drive(server, GivenTimes(times), 4)

    records = sorted((answer.record for answer in answers), key=lambda record: record.index)
    assert [record.planned_s for record in records] == times
    # Late only if the event loop was.
    most_late_s = 0.1 + 2 * watch.figures([]).lag_max_s
    for record, time_s in zip(records, times, strict=True):
        assert time_s <= record.sent_s <= time_s + most_late_s
    assert server.most_under_way == 4


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
