"""Limits on request bodies, and the routes that describe the server."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest
from starlette.types import Message

from apar_core.errors import CapacityError
from deployments.config.limits import LimitsConfig
from deployments.gateway.body import MAX_CONTAINERS, MAX_VALUES, BodyBudget, HeldBody
from deployments.wire.errors import ReplicaLostError
from deployments.wire.response import ResponseStart
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

# Otherwise a minute may end between two requests, and the remaining units change.
pytestmark = pytest.mark.usefixtures("advance", "simulated_time")

REMAINING = "x-ratelimit-remaining-requests"


async def test_a_request_over_the_rate_is_refused_before_its_body_is_read() -> None:
    gateway = gateway_of(answering(), keys=(key("a", requests_per_minute=1),))
    sent: list[Message] = []

    async def never() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    async with client_of(gateway) as http:
        assert (await http.post(CHAT, json={}, headers=bearer("a"))).status_code == 200
    headers = [(b"authorization", b"Bearer a")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b""}
    await gateway({**scope, "headers": headers}, never, send)

    assert sent[0]["status"] == 429


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b'{"model": "none"}', 404), (b'{"prompt": "%s"}' % (b"x" * 9000), 400)],
)
async def test_a_request_refused_for_its_content_counts_in_the_rate(
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
async def test_punctuation_in_a_text_does_not_count_as_values(text: str) -> None:
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


def test_no_key_can_use_up_the_budget_of_others() -> None:
    budget = BodyBudget(1200)
    with budget.hold("hog") as hog, budget.hold("second") as second, budget.hold("small") as small:
        for held in (hog, second):
            with pytest.raises(CapacityError, match="of 1200 bytes"):
                fill(held)

        assert budget.num_held_bytes == 600 + 300
        small.add(150)

    assert budget.num_held_bytes == 0


async def test_a_client_that_leaves_releases_the_bytes_of_its_body() -> None:
    replicas = answering()
    replicas.gate.clear()
    limits = LimitsConfig(max_body_bytes=100, max_held_body_bytes=200)
    http = client(replicas, limits=limits, max_queued=5)
    body = {"prompt": "x" * 80}
    tasks = await settled(http, ("a", body), ("a", body))
    refused = await http.post(CHAT, json=body)

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    replicas.gate.set()

    assert refused.status_code == 503
    assert (await http.post(CHAT, json=body)).status_code == 200


def test_the_budget_must_hold_two_bodies_of_the_largest_size() -> None:
    assert LimitsConfig(max_body_bytes=100).held_body_bytes == 1600
    with pytest.raises(ValueError, match="max_held_body_bytes: 199 is less than twice"):
        LimitsConfig(max_body_bytes=100, max_held_body_bytes=199)


async def test_the_parsed_body_is_released_while_a_request_runs() -> None:
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
async def test_a_description_takes_no_place_and_is_asked_for_once(
    path: str,
) -> None:
    full = FakeReplicas(ResponseStart(200, JSON, b'{"version": "1"}'))
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


async def test_the_description_has_the_routes_of_all_models_that_the_key_may_use() -> None:
    def described(path: str, schema: str) -> FakeReplicas:
        operations: dict[str, Any] = {"/a": {"post": {}}, "/b": {"post": {}}}
        operations[path] = {"post": {"requestBody": {"$ref": f"#/components/schemas/{schema}"}}}
        document = {"paths": operations, "components": {"schemas": {schema: {}, "Error": {}}}}
        return FakeReplicas(ResponseStart(200, JSON, json.dumps(document).encode()))

    keys = (key("both"), key("one", models=["m1"]))
    http = client(described("/a", "A"), described("/b", "B"), keys=keys)

    async def paths_with_bodies(name: str) -> tuple[list[str], set[str]]:
        document = (await http.get("/openapi.json", headers=bearer(name))).json()
        found = [path for path, item in document["paths"].items() if "requestBody" in item["post"]]
        return found, set(document["components"]["schemas"])

    assert await paths_with_bodies("both") == (["/a", "/b"], {"A", "B", "Error"})
    assert await paths_with_bodies("one") == (["/b"], {"B", "Error"})


async def test_at_most_one_request_for_a_description_is_at_a_replica() -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    http = client(replicas)

    tasks = [asyncio.create_task(http.get("/version")) for _ in range(5)]
    await asyncio.sleep(0.01)

    assert len(replicas.requests) == 1
    replicas.gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 5
    assert len(replicas.requests) == 1


async def test_a_description_is_asked_for_again_after_a_failure() -> None:
    replicas = FakeReplicas(ReplicaLostError("dead"))
    http = client(replicas, models_wait_s=0.01)

    lost = await http.get("/version")
    replicas.parts = (ResponseStart(200, JSON, b"{}"),)
    replicas.gate.clear()
    late = await http.get("/version")
    replicas.gate.set()
    later = await http.get("/version")

    assert [answer.status_code for answer in (lost, late, later)] == [503, 503, 200]
    assert json.loads(late.content)["error"]["code"] == "not_ready"


async def test_every_route_counts_in_the_rate_of_requests() -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b'{"data": []}'))
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


async def test_a_body_that_arrives_too_slowly_is_refused_and_released() -> None:
    limits = LimitsConfig(body_timeout_s=0.05, max_body_bytes=20, max_held_body_bytes=40)
    gateway = gateway_of(answering(), limits=limits)

    async def slow_body() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(30)

    # Together the bodies exceed the budget.
    for _ in range(5):
        answer = await client_of(gateway).post(CHAT, content=slow_body())

        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "request_timeout"


def test_callers_without_a_key_share_the_whole_budget() -> None:
    budget = BodyBudget(1200)
    with budget.hold(None) as first, budget.hold(None) as second:
        first.add(900)
        second.add(300)
        with pytest.raises(CapacityError, match="take 1200 of 1200 bytes; please"):
            second.add(1)


async def test_a_description_is_asked_of_a_running_model() -> None:
    asleep, awake = (FakeReplicas(ResponseStart(200, JSON, b"{}")) for _ in range(2))
    asleep.num_running = 0

    assert (await client(asleep, awake).get("/version")).status_code == 200

    assert (len(asleep.requests), len(awake.requests)) == (0, 1)


async def test_a_whole_answer_counts_in_the_budget_until_the_client_has_it() -> None:
    large = FakeReplicas(ResponseStart(200, JSON, b"x" * 2500))
    gateway = gateway_of(large, limits=LimitsConfig(max_body_bytes=1000, max_held_body_bytes=4000))
    reading = asyncio.Event()

    async def slow(message: Message) -> None:
        reading.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}

    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
    first = asyncio.create_task(gateway(scope, receive, slow))
    await reading.wait()

    async with client_of(gateway) as http:
        refused = await http.post(CHAT, json={"prompt": "x"})
        first.cancel()
        await asyncio.wait([first])
        served = await http.post(CHAT, json={"prompt": "x"})

    assert (refused.status_code, served.status_code) == (503, 200)
    assert "requests and answers take" in refused.json()["error"]["message"]
