"""The gateway as an ASGI application in front of fake replicas."""

import asyncio
import json
from typing import Any

import pytest

from apar_core.errors import CapacityError
from deployments.config.limits import LimitsConfig
from deployments.wire.errors import BodyTooLargeError, ReplicaLostError
from deployments.wire.response import Piece, ResponseStart
from tests.fakes.replicas import (
    CHAT,
    EVENTS,
    JSON,
    FakeReplicas,
    client,
    client_of,
    gateway_of,
    settings_of,
)

pytestmark = pytest.mark.usefixtures("simulated_time")


async def test_a_whole_answer_is_passed_on_with_its_own_length() -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b'{"a":1}'))

    answer = await client(replicas).post(CHAT, json={"model": "m"}, headers={"x-request-id": "r"})

    assert answer.json() == {"a": 1}
    assert answer.headers["content-length"] == "7"
    (request,) = replicas.requests
    assert json.loads(request.body) == {"model": "m"}
    assert dict(request.headers)[b"x-request-id"] == b"r"
    assert set(dict(request.headers)) == {b"content-type", b"x-request-id"}


async def test_a_stream_is_passed_on() -> None:
    replicas = FakeReplicas(ResponseStart(200, EVENTS, b"data: 1\n\n"), Piece(b"data: [DONE]\n\n"))

    answer = await client(replicas).post(CHAT, json={"stream": True})

    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
    assert answer.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("first", [b"data: 1\n\n", b"data: {cut in ha"])
async def test_a_stream_whose_replica_dies_ends_with_an_error_event(first: bytes) -> None:
    replicas = FakeReplicas(ResponseStart(200, EVENTS, first), ReplicaLostError("dead"))

    events = (await client(replicas).post(CHAT, json={"stream": True})).text.split("\n\n")

    # Half an event is never sent.
    assert [event for event in events if "cut" in event] == []
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert events[-2:] == ["data: [DONE]", ""]


async def test_a_stream_that_was_complete_gets_no_second_end() -> None:
    replicas = FakeReplicas(
        ResponseStart(200, EVENTS, b"data: 1\n\ndata: [DO"),
        Piece(b"NE]\n\n"),
        ReplicaLostError("dead"),
    )

    answer = await client(replicas).post(CHAT, json={"stream": True})

    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_replica_that_dies_before_it_answers_is_a_503(streaming: bool) -> None:
    replicas = FakeReplicas(ReplicaLostError("dead"))

    answer = await client(replicas).post(CHAT, json={"stream": streaming})

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["code"] == "engine_lost"


@pytest.mark.parametrize("error", [AttributeError("a bug"), CapacityError("a bug")])
@pytest.mark.parametrize("streaming", [True, False])
async def test_an_unexpected_failure_is_a_500_with_an_error_body(
    streaming: bool, error: Exception
) -> None:
    replicas = FakeReplicas(error)

    answer = await client(replicas).post(CHAT, json={"stream": streaming})

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "a bug" not in answer.text


@pytest.mark.parametrize(
    # A piece of an earlier version is no part that may be left out silently.
    "part",
    [KeyError("a bug"), (b"data: 2\n\n", (), 1)],
)
async def test_a_stream_that_fails_on_the_way_ends_with_an_error_event(part: Any) -> None:
    replicas = FakeReplicas(ResponseStart(200, EVENTS, b"data: 1\n\n"), part)

    events = (await client(replicas).post(CHAT, json={"stream": True})).text.split("\n\n")

    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert events[2:] == ["data: [DONE]", ""]


async def test_an_error_before_a_stream_begins_is_one_json_answer() -> None:
    replicas = FakeReplicas(
        ResponseStart(400, JSON, b'{"error":{"message":"no",'),
        Piece(b'"param":"body.n","code":400}}'),
    )

    answer = await client(replicas).post(CHAT, json={"stream": True})

    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "`n`: no",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"model": ["m"]}, 400, "model"),
        ([], 400, None),
        ("text", 400, None),
    ],
)
async def test_requests_without_a_valid_model_reach_no_replica(
    body: object, status: int, param: str | None
) -> None:
    replicas = FakeReplicas()

    answer = await client(replicas).post(CHAT, json=body)

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert replicas.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 10_000])
async def test_malformed_json_is_a_400(body: bytes) -> None:
    answer = await client(FakeReplicas()).post(CHAT, content=body)

    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_a_413() -> None:
    http = client(FakeReplicas(), limits=LimitsConfig(max_body_bytes=10))
    answer = await http.post(CHAT, json={"model": "m" * 9})

    assert answer.status_code == 413


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_request_too_large_for_ray_serve_is_a_413(streaming: bool) -> None:
    replicas = FakeReplicas(BodyTooLargeError("5 bytes, where 4 are taken"))

    answer = await client(replicas).post(CHAT, json={"stream": streaming})

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert "5 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", CHAT, 405),
        ("HEAD", CHAT, 405),
        ("POST", "/health", 405),
        ("POST", "/live", 405),
        ("PUT", "/v1/models", 405),
        ("DELETE", "/v1/models/m", 405),
    ],
)
async def test_unknown_routes_and_methods(method: str, path: str, status: int) -> None:
    answer = await client(FakeReplicas()).request(method, path)

    assert answer.status_code == status
    allowed = "POST" if path == CHAT else "GET, HEAD"
    assert answer.headers.get("allow") == (allowed if status == 405 else None)
    if method != "HEAD":
        assert (f"does not accept {method}" in answer.text) == (status == 405)
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_full_queue_refuses_requests_until_one_ends() -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    http = client(replicas, max_queued=1)
    inside = [asyncio.create_task(http.post(CHAT, json={})) for _ in range(3)]
    await asyncio.sleep(0.01)

    refused = await http.post(CHAT, json={})
    replicas.gate.set()
    answers = await asyncio.gather(*inside)

    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "overloaded"
    assert [answer.status_code for answer in answers] == [200] * 3
    assert (await http.post(CHAT, json={})).status_code == 200


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_cancels_its_call_and_gives_its_place_back(
    streaming: bool,
) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b"{}"))
    replicas.gate.clear()
    http = client(replicas)
    tasks = [asyncio.create_task(http.post(CHAT, json={"stream": streaming})) for _ in range(2)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert replicas.num_closed == 2
    replicas.gate.set()
    assert (await http.post(CHAT, json={})).status_code == 200


async def test_a_request_goes_to_the_replicas_of_its_model() -> None:
    replicas = [FakeReplicas(ResponseStart(200, JSON, b"[%d]" % number)) for number in range(2)]

    answer = await client(*replicas).post(CHAT, json={"model": "m1"})

    assert answer.json() == [1]
    assert [len(each.requests) for each in replicas] == [0, 1]


async def test_a_full_model_does_not_affect_another() -> None:
    full, free = FakeReplicas(), FakeReplicas(ResponseStart(200, JSON, b"{}"))
    full.gate.clear()
    http = client(full, free)
    inside = [asyncio.create_task(http.post(CHAT, json={"model": "m"})) for _ in range(2)]
    await asyncio.sleep(0.01)

    assert (await http.post(CHAT, json={"model": "m"})).status_code == 503
    assert (await http.post(CHAT, json={"model": "m1"})).status_code == 200
    for task in inside:
        task.cancel()
    await asyncio.gather(*inside, return_exceptions=True)


async def test_a_request_without_a_model_is_refused_if_there_are_several() -> None:
    answer = await client(FakeReplicas(), FakeReplicas()).post(CHAT, json={})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
    assert "m, m1" in answer.json()["error"]["message"]


async def test_the_list_of_models_joins_all_cards_and_asks_for_each_once() -> None:
    replicas = [
        FakeReplicas(ResponseStart(200, JSON, json.dumps({"data": [{"id": name}]}).encode()))
        for name in ("m", "m1")
    ]
    http = client(*replicas)

    answers = [await http.get("/v1/models") for _ in range(2)]

    for answer in answers:
        assert answer.json() == {"object": "list", "data": [{"id": "m"}, {"id": "m1"}]}
    assert [len(each.requests) for each in replicas] == [1, 1]


async def test_the_list_of_models_includes_one_whose_replicas_do_not_answer() -> None:
    alive = FakeReplicas(ResponseStart(200, JSON, b'{"data": [{"id": "m1", "max_model_len": 9}]}'))
    dead = FakeReplicas(ReplicaLostError("dead"))

    answer = await client(dead, alive).get("/v1/models")

    least, whole = answer.json()["data"]
    assert answer.status_code == 200
    assert whole == {"id": "m1", "max_model_len": 9}
    assert least | {"created": 0} == {
        "id": "m",
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
    }


async def test_the_list_of_models_does_not_wait_for_a_starting_replica() -> None:
    alive = FakeReplicas(ResponseStart(200, JSON, b'{"data": [{"id": "m1"}]}'))
    starting = FakeReplicas(ResponseStart(200, JSON, b'{"data": [{"id": "m", "whole": true}]}'))
    starting.gate.clear()
    http = client(starting, alive, models_wait_s=0.01)

    while_it_starts = await http.get("/v1/models")
    starting.gate.set()
    later = await http.get("/v1/models")

    assert [card["id"] for card in while_it_starts.json()["data"]] == ["m", "m1"]
    assert later.json()["data"] == [{"id": "m", "whole": True}, {"id": "m1"}]
    assert starting.num_closed == 2


async def test_the_list_of_models_wakes_no_model_and_keeps_cards_under_new_settings() -> None:
    card, changed = {"id": "m", "max_model_len": 9}, {"id": "m", "max_model_len": 5}
    replicas = FakeReplicas(ResponseStart(200, JSON, json.dumps({"data": [card]}).encode()))
    replicas.num_running = 0
    gateway = gateway_of(replicas)
    http = client_of(gateway)

    async def listed() -> list[Any]:
        data: list[Any] = (await http.get("/v1/models")).json()["data"]
        return data

    [asleep] = await listed()
    assert (asleep["id"], replicas.requests) == ("m", [])
    replicas.num_running = 1
    assert await listed() == [card]

    replicas.num_running = 0
    await gateway.reconfigure(settings_of(1, keys=()), [replicas])
    assert await listed() == [card]
    assert len(replicas.requests) == 1

    replicas.num_running = 1
    replicas.parts = (ResponseStart(200, JSON, json.dumps({"data": [changed]}).encode()),)
    assert await listed() == [changed]


async def test_a_card_requested_before_a_change_is_not_kept() -> None:
    old, new = ({"id": "m", "max_model_len": length} for length in (9, 5))
    replicas = FakeReplicas(ResponseStart(200, JSON, json.dumps({"data": [old]}).encode()))
    replicas.gate.clear()
    gateway = gateway_of(replicas)
    http = client_of(gateway)
    early = [asyncio.create_task(http.get("/v1/models")) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert len(replicas.requests) == 1

    await gateway.reconfigure(settings_of(1, keys=()), [replicas])
    replicas.parts = (ResponseStart(200, JSON, json.dumps({"data": [new]}).encode()),)
    replicas.gate.set()
    await asyncio.gather(*early)

    assert (await http.get("/v1/models")).json()["data"] == [new]
