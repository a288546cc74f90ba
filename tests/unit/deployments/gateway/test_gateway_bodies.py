"""What a request may cost the gateway before it is let in: its body, and what is parsed of it."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import httpx
import pytest
from starlette.types import Message

from apar_core.errors import CapacityError
from cluster.config.limits import LimitsConfig
from deployments.gateway.body import MAX_CONTAINERS, MAX_VALUES, BodyBudget, HeldBody
from deployments.wire.answer import AnswerStart
from deployments.wire.errors import ReplicaLostError
from tests.fakes.played_replicas import CHAT, JSON, PlayedReplicas, client, gateway_of
from tests.unit.deployments.gateway.test_gateway_keys import answering, bearer, key, settled

REMAINING = "x-ratelimit-remaining-requests"


async def test_a_request_over_the_rate_is_refused_before_its_body_is_read() -> None:
    gateway = gateway_of(answering(), keys=(key("a", requests_per_minute=1),))
    sent: list[Message] = []

    async def never() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    transport = httpx.ASGITransport(app=gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.post(CHAT, json={}, headers=bearer("a"))).status_code == 200
    headers = [(b"authorization", b"Bearer a")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b""}
    await gateway({**scope, "headers": headers}, never, send)

    assert sent[0]["status"] == 429


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b'{"model": "none"}', 404), (b'{"prompt": "%s"}' % (b"x" * 9000), 429)],
)
async def test_a_request_refused_for_what_it_holds_counts_as_one(
    content: bytes, status: int
) -> None:
    limited = key("a", requests_per_minute=2, tokens_per_minute=2000)
    http = client(answering(), keys=(limited,))
    await http.post(CHAT, content=b'{"prompt": "x"}', headers=bearer("a"))

    refused = await http.post(CHAT, content=content, headers=bearer("a"))
    after = await http.post(CHAT, content=content, headers=bearer("a"))

    assert (refused.status_code, refused.headers[REMAINING]) == (status, "0")
    assert (after.status_code, after.json()["error"]["type"]) == (429, "requests")


def body_of(values: str) -> bytes:
    return b'{"messages": [' + values.encode() + b"]}"


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (",".join(["{}"] * MAX_CONTAINERS), f"{MAX_CONTAINERS + 2} objects and lists"),
        (",".join(["[[]]"] * (MAX_CONTAINERS // 2)), f"{MAX_CONTAINERS + 2} objects and lists"),
        ("[" * 2 * MAX_CONTAINERS, "objects and lists, more than"),
        (",".join(["1"] * MAX_VALUES), f"{MAX_VALUES + 1} values"),
        (",".join(['"\\\\"'] * MAX_VALUES), f"{MAX_VALUES + 1} values"),
        (",".join(['""'] * 3 * MAX_VALUES), f"{3 * MAX_VALUES + 1} strings"),
    ],
)
async def test_a_body_of_too_many_values_is_refused(values: str, named: str) -> None:
    replicas = answering()

    answer = await client(replicas).post(CHAT, content=body_of(values))

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert named in answer.json()["error"]["message"]
    assert replicas.requests == []


@pytest.mark.parametrize(
    "text",
    ["{}[]" * MAX_CONTAINERS, "a,b;" * MAX_VALUES, '\\"{[,' * MAX_VALUES, "\\\\" * 9 + '\\",{['],
)
async def test_punctuation_in_a_text_is_no_value(text: str) -> None:
    answer = await client(answering()).post(CHAT, content=body_of(f'{{"content": "{text}"}}'))

    assert answer.status_code == 200


async def test_values_cannot_hide_in_another_encoding() -> None:
    values = '["\\"",' + ",".join(["{}"] * 3 * MAX_CONTAINERS) + "]"

    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        answer = await client(answering()).post(CHAT, content=values.encode(encoding))

        assert answer.status_code == 400
        assert "not valid JSON" in answer.json()["error"]["message"]


async def test_the_bodies_of_all_requests_together_are_bounded() -> None:
    replicas = answering()
    replicas.gate.clear()
    limits = LimitsConfig(max_body_bytes=100, max_held_body_bytes=200)
    http = client(replicas, keys=(key("a", requests_per_minute=9),), limits=limits, max_queued=5)
    body = {"prompt": "x" * 80}
    inside, over, small = await settled(http, ("a", body), ("a", body), ("a", {}))

    assert over.done()
    refused = await over
    replicas.gate.set()
    answers = [await inside, await small, await http.post(CHAT, json=body, headers=bearer("a"))]

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert "take 93 of 200 bytes" in refused.json()["error"]["message"]
    assert refused.headers[REMAINING] == "8"  # It is not the caller's fault.
    assert [answer.status_code for answer in answers] == [200] * 3


def fill(held: HeldBody) -> NoReturn:
    while True:
        held.add(10)


def test_no_key_takes_the_room_that_others_need() -> None:
    budget = BodyBudget(1200)
    with budget.hold("hog") as hog, budget.hold("second") as second, budget.hold("small") as small:
        for held in (hog, second):
            with pytest.raises(CapacityError, match="of 1200 bytes"):
                fill(held)

        assert budget.num_held_bytes == 600 + 300
        small.add(150)

    assert budget.num_held_bytes == 0


async def test_a_client_that_leaves_gives_its_bodys_bytes_back() -> None:
    replicas = answering()
    replicas.gate.clear()
    gateway = gateway_of(replicas, max_queued=5)
    transport = httpx.ASGITransport(app=gateway)
    http = httpx.AsyncClient(transport=transport, base_url="http://gateway")
    tasks = await settled(http, *[("a", {"prompt": "x"})] * 3)
    held = gateway._bodies.num_held_bytes

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert (held, gateway._bodies.num_held_bytes) == (3 * len('{"prompt":"x"}'), 0)


def test_the_bytes_held_are_no_fewer_than_two_bodies_may_have() -> None:
    assert LimitsConfig(max_body_bytes=100).held_body_bytes == 1600
    with pytest.raises(ValueError, match="max_held_body_bytes: 199 is less than twice"):
        LimitsConfig(max_body_bytes=100, max_held_body_bytes=199)


async def test_nothing_parsed_is_kept_while_a_request_runs() -> None:
    replicas = answering()
    replicas.gate.clear()
    http = client(replicas)
    task = asyncio.create_task(http.post(CHAT, content=b'{"messages": [{"marker": "here"}]}'))
    await asyncio.sleep(0.01)
    assert len(replicas.requests) == 1

    def is_marked(value: Any) -> bool:
        return type(value) is dict and value.get("marker") == "here"

    kept = [value for value in gc.get_objects() if is_marked(value)]
    replicas.gate.set()
    await task

    assert kept == []


@pytest.mark.parametrize("path", ["/version", "/openapi.json"])
async def test_a_description_takes_no_place_at_the_replicas_and_is_asked_for_once(
    path: str,
) -> None:
    full = PlayedReplicas(AnswerStart(200, JSON, b'{"version": "1"}'))
    http = client(full)
    assert (await http.get(path)).json() == {"version": "1"}
    full.gate.clear()
    inside = [asyncio.create_task(http.post(CHAT, json={})) for _ in range(2)]
    await asyncio.sleep(0.01)

    answers = await asyncio.gather(*[http.get(path) for _ in range(5)])

    assert [answer.json() for answer in answers] == [{"version": "1"}] * 5
    assert [request.path for request in full.requests] == [path, CHAT, CHAT]
    full.gate.set()
    await asyncio.gather(*inside)


async def test_at_most_one_request_for_a_description_is_at_a_replica() -> None:
    replicas = PlayedReplicas(AnswerStart(200, JSON, b"{}"))
    replicas.gate.clear()
    http = client(replicas)

    tasks = [asyncio.create_task(http.get("/version")) for _ in range(5)]
    await asyncio.sleep(0.01)

    assert len(replicas.requests) == 1
    replicas.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 5
    assert len(replicas.requests) == 1


async def test_a_description_that_no_replica_gives_is_asked_for_again() -> None:
    replicas = PlayedReplicas(ReplicaLostError("dead"))
    http = client(replicas, models_wait_s=0.01)

    lost = await http.get("/version")
    replicas.parts = (AnswerStart(200, JSON, b"{}"),)
    replicas.gate.clear()
    late = await http.get("/version")
    replicas.gate.set()
    later = await http.get("/version")

    assert [answer.status_code for answer in (lost, late, later)] == [503, 503, 200]
    assert json.loads(late.content)["error"]["code"] == "not_ready"


async def test_every_route_counts_in_the_rate_of_requests() -> None:
    replicas = PlayedReplicas(AnswerStart(200, JSON, b'{"data": []}'))
    http = client(replicas, keys=(key("a", requests_per_minute=3),))

    statuses = [
        (await http.get(path, headers=bearer("a"))).status_code
        for path in ("/version", "/openapi.json", "/v1/models", "/version", "/health")
    ]

    assert statuses == [200, 200, 200, 429, 200]


@pytest.mark.parametrize("number", ["9" * 4200, "-" + "9" * 41, "1." + "0" * 50])
async def test_a_number_of_too_many_characters_is_refused(number: str) -> None:
    replicas = answering()

    answer = await client(replicas).post(CHAT, content=body_of(number))

    assert answer.status_code == 400
    assert f"a number of {len(number)} characters" in answer.json()["error"]["message"]
    assert replicas.requests == []


async def test_a_body_that_does_not_arrive_in_time_is_refused_and_its_bytes_given_back() -> None:
    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(30)

    gateway = gateway_of(answering(), limits=LimitsConfig(body_timeout_s=0.05))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": await anext(pieces), "more_body": True}

    pieces, sent = slow_body(), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
    await gateway(scope, receive, send)

    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"
    assert gateway._bodies.num_held_bytes == 0


def test_callers_without_a_key_share_all_of_the_room() -> None:
    budget = BodyBudget(1200)
    with budget.hold(None) as first, budget.hold(None) as second:
        first.add(900)
        second.add(300)
        with pytest.raises(CapacityError, match="take 1200 of 1200 bytes; please"):
            second.add(1)


async def test_a_description_is_asked_of_a_model_that_is_awake() -> None:
    asleep, awake = (PlayedReplicas(AnswerStart(200, JSON, b"{}")) for _ in range(2))
    asleep.num_running = 0

    assert (await client(asleep, awake).get("/version")).status_code == 200

    assert (len(asleep.requests), len(awake.requests)) == (0, 1)
