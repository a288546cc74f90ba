"""How much the gateway computes for its queue, counted in instructions of the interpreter."""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from deployments.gateway import accounts, fair_queue, models
from deployments.gateway.accounts import Account
from tests.fakes.replicas import CHAT, answering, bearer, client_of, gateway_of, key

NUM_REQUESTS = 150


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Count the instructions that the queue executes."""
    files = {accounts.__file__, fair_queue.__file__, models.__file__}
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        # Comprehensions are frames of their own.
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)


async def instructions_for(priorities: list[int], max_threads: int | None) -> int:
    """Instructions to queue and serve a request of each priority, all of one key."""
    replicas = answering()
    replicas.gate.clear()
    limited = key("a", best_priority=-1000, max_threads=max_threads)
    gateway = gateway_of(replicas, keys=(limited,), max_queued=NUM_REQUESTS)
    http = client_of(gateway)
    with counted() as count:
        tasks = [
            asyncio.create_task(http.post(CHAT, json={"priority": each}, headers=bearer("a")))
            for each in priorities
        ]
        for _ in range(2000):
            await asyncio.sleep(0.01)
            if gateway.waiting()["Replica-m"].waiting["a"] >= NUM_REQUESTS - 2:
                break
        replicas.gate.set()
        answers = await asyncio.gather(*tasks)
        assert {answer.status_code for answer in answers} == {200}
        return count()


@pytest.mark.parametrize("max_threads", [None, 1])
async def test_requests_of_many_priorities_take_no_more_work_than_those_of_one(
    max_threads: int | None,
) -> None:
    one = await instructions_for([0] * NUM_REQUESTS, max_threads)
    many = await instructions_for([-each for each in range(NUM_REQUESTS)], max_threads)

    assert many < 1.5 * one


async def test_nothing_of_a_key_is_kept_when_its_requests_have_ended() -> None:
    def num_accounts() -> int:
        gc.collect()
        return sum(isinstance(each, Account) for each in gc.get_objects())

    before = num_accounts()
    gateway = gateway_of(answering(), keys=(key("a", best_priority=-1000, max_threads=1),))
    http = client_of(gateway)
    for priority in range(-5, 5):
        answer = await http.post(CHAT, json={"priority": priority}, headers=bearer("a"))
        assert answer.status_code == 200

    assert num_accounts() == before
    assert gateway.waiting()["Replica-m"].running == 0
