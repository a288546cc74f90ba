"""Deadlines, priority and hints of a request: read, checked, and where they act."""

import asyncio
import json
import time
from typing import Any

import pytest

from apar_core.errors import RequestError
from deployments.gateway.fair_queue import Due, FairQueue
from deployments.gateway.request_options import RequestOptions, read_options
from deployments.wire.errors import DeadlineError
from deployments.wire.response import ResponseEnd, ResponseStart
from tests.fakes.clock import Clock
from tests.fakes.replicas import (
    CHAT,
    JSON,
    FakeReplicas,
    answering,
    bearer,
    client,
    client_of,
    gateway_of,
    key,
    settled,
)

pytestmark = pytest.mark.usefixtures("simulated_clocks")


def test_options_come_from_the_body_headers_and_dynamos_hints() -> None:
    headers = [(b"x-apar-deadline-ms", b"900"), (b"x-apar-expected-tokens", b"7")]
    fields = {
        "apar": {"deadline_ms": 500, "parent_request_id": "agent-1"},
        "nvext": {"agent_hints": {"osl": 40}},
    }

    assert read_options({}, []) == RequestOptions()
    assert read_options({}, headers) == RequestOptions(deadline_ms=900, expected_tokens=7)
    both = read_options(fields, headers)
    assert (both.deadline_ms, both.expected_tokens, both.parent_request_id) == (500, 40, "agent-1")


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"apar": {"deadline_ms": 0}}, [], "apar.deadline_ms"),
        ({"apar": {"deadline_ms": True}}, [], "apar.deadline_ms"),
        ({"apar": {"deadline_ms": 1.5}}, [], "apar.deadline_ms"),
        ({"apar": {"first_token_deadline_ms": 10**9}}, [], "apar.first_token_deadline_ms"),
        ({"apar": {"expected_tokens": "many"}}, [], "apar.expected_tokens"),
        ({"apar": {"parent_request_id": "two words"}}, [], "apar.parent_request_id"),
        ({"nvext": {"agent_hints": {"osl": -1}}}, [], "nvext.agent_hints.osl"),
        ({}, [(b"x-apar-deadline-ms", b"soon")], "x-apar-deadline-ms"),
        ({}, [(b"x-apar-deadline-ms", b"9" * 100)], "x-apar-deadline-ms"),
        ({}, [(b"x-apar-first-token-deadline-ms", b"-5")], "x-apar-first-token-deadline-ms"),
    ],
)
def test_an_invalid_option_is_named(
    fields: dict[str, Any], headers: list[tuple[bytes, bytes]], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_options(fields, headers)

    assert refused.value.param == param
    assert len(str(refused.value)) < 200


async def test_deadlines_and_hints_go_with_the_request() -> None:
    replicas = answering()
    http = client(replicas)
    before_s = time.time()

    await http.post(
        CHAT,
        json={"apar": {"first_token_deadline_ms": 5000, "expected_tokens": 9}},
        headers={"x-apar-deadline-ms": "20000", "x-apar-parent-request-id": "p"},
    )
    await http.post(CHAT, json={}, headers={"x-apar-parent-request-id": "p"})

    first, second = replicas.requests
    assert first.terms.deadlines is not None
    assert first.terms.deadlines.answer_at_s == pytest.approx(before_s + 20)
    assert first.hint.first_token_s == pytest.approx(5)
    assert first.hint.answer_s == pytest.approx(20)
    assert first.hint.expected_tokens == 9
    assert first.hint.family == second.hint.family is not None
    assert second.terms.deadlines is None


async def test_a_request_may_ask_for_a_priority_that_its_key_allows() -> None:
    replicas = answering()
    http = client(replicas, keys=(key("a", priority=5), key("b", priority=5, best_priority=2)))

    def ask(name: str, priority: Any) -> Any:
        return http.post(CHAT, json={"priority": priority}, headers=bearer(name))

    assert (await ask("a", 7)).status_code == 200
    assert (await ask("b", 2)).status_code == 200
    assert [request.terms.priority for request in replicas.requests] == [7, 2]
    for name, priority in (("a", 4), ("b", 1), ("a", 1001), ("a", "high"), ("a", True)):
        refused = await ask(name, priority)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


async def test_a_request_of_less_urgency_waits_behind_others_of_its_key() -> None:
    replicas = answering(end=ResponseEnd(generated_tokens=10))
    replicas.gate.clear()
    http = client(replicas, keys=(key("a", best_priority=-3),), max_queued=10)
    order = [0, 0, 5, 0, -3]
    tasks = await settled(http, *[("a", {"priority": priority}) for priority in order])

    replicas.gate.set()
    await asyncio.gather(*tasks)

    assert [request.terms.priority for request in replicas.requests] == [0, 0, -3, 0, 5]


async def test_all_priorities_of_a_key_share_its_cap() -> None:
    replicas = answering()
    replicas.gate.clear()
    http = client(replicas, keys=(key("a", max_threads=1),), max_queued=10)
    tasks = await settled(http, ("a", {}), ("a", {"priority": 3}))

    assert len(replicas.requests) == 1

    replicas.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200, 200]


@pytest.mark.parametrize(
    ("option", "code"),
    [
        ("deadline_ms", "deadline_exceeded"),
        ("first_token_deadline_ms", "first_token_deadline_exceeded"),
    ],
)
async def test_a_deadline_that_passes_in_the_queue_is_a_503_that_names_it(
    option: str, code: str
) -> None:
    replicas = answering()
    replicas.gate.clear()
    served = gateway_of(replicas, max_queued=10)
    http = client_of(served)
    tasks = [asyncio.create_task(http.post(CHAT, json={})) for _ in range(2)]
    await asyncio.sleep(0.01)

    late = await http.post(CHAT, json={"apar": {option: 30}})

    error = late.json()["error"]
    assert (late.status_code, error["code"], error["param"]) == (503, code, f"apar.{option}")
    assert int(late.headers["retry-after"]) >= 1
    (state,) = served.waiting().values()
    assert (state.running, state.waiting) == (2, {})
    replicas.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200, 200]
    assert len(replicas.requests) == 2


async def test_a_deadline_missed_for_the_keys_own_limit_is_a_429() -> None:
    replicas = answering()
    replicas.gate.clear()
    http = client(replicas, keys=(key("a", max_threads=1),), max_queued=10)
    (first,) = await settled(http, ("a", {}))

    late = await http.post(CHAT, json={"apar": {"deadline_ms": 30}}, headers=bearer("a"))

    assert (late.status_code, late.json()["error"]["code"]) == (429, "deadline_exceeded")
    replicas.gate.set()
    await first


async def test_a_wait_that_is_certainly_too_long_is_refused_at_once() -> None:
    clock = Clock()
    queue = FairQueue(capacity=1, max_waiting=100, max_wait_s=60, clock=clock)
    account = queue.account_of("a")
    ticket = await queue.enter(account)
    waiting = [asyncio.create_task(queue.enter(account)) for _ in range(13)]
    await asyncio.sleep(0)
    # Too little is known: this one waits.
    first = asyncio.create_task(queue.enter(account, Due("deadline_ms", 1.0)))
    await asyncio.sleep(0)
    assert not first.done()
    first.cancel()
    for number in range(10):  # One request a second.
        clock.now_s += 1.0
        ticket.leave()
        ticket = await waiting[number]
    urgent = queue.account_of("b", priority=-1)
    waiting = waiting[10:] + [asyncio.create_task(queue.enter(urgent)) for _ in range(2)]
    await asyncio.sleep(0)

    with pytest.raises(DeadlineError, match=r"5 requests go first, .* and 4\.0 s are left"):
        await queue.enter(account, Due("deadline_ms", 4.0))
    in_time = asyncio.create_task(queue.enter(account, Due("deadline_ms", 40.0)))
    # Only the other urgent requests go before this one for certain.
    soon = asyncio.create_task(queue.enter(urgent, Due("deadline_ms", 4.0)))
    await asyncio.sleep(0)

    assert not in_time.done()
    assert not soon.done()
    for task in (*waiting, in_time, soon):
        task.cancel()
    await asyncio.gather(*waiting, in_time, soon, return_exceptions=True)
    ticket.leave()
    # After an idle hour, nothing is known again.
    clock.now_s += 3600
    account = queue.account_of("a")
    ticket = await queue.enter(account)
    late = asyncio.create_task(queue.enter(account, Due("deadline_ms", 1.0)))
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()
    ticket.leave()


async def test_an_answer_that_its_replica_does_not_end_is_cut_by_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.relay.relay._DEADLINE_GRACE_S", 0.02)
    begun = FakeReplicas(
        ResponseStart(200, [(b"content-type", b"text/event-stream")], b"data: x\n\n")
    )
    silent = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    silent.gate.clear()

    whole = await client(silent).post(CHAT, json={"apar": {"deadline_ms": 20}})
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "deadline_exceeded")

    class Hanging(FakeReplicas):
        async def stream(self, request: Any) -> Any:
            self.requests.append(request)
            try:
                yield self.parts[0]
                await asyncio.Event().wait()
            finally:
                self.num_closed += 1

    hanging = Hanging(*begun.parts)
    streamed = await client(hanging).post(CHAT, json={"stream": True, "apar": {"deadline_ms": 20}})
    events = streamed.text.split("\n\n")
    assert events[0] == "data: x"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert events[2] == "data: [DONE]"
    assert (silent.num_closed, hanging.num_closed) == (1, 1)
