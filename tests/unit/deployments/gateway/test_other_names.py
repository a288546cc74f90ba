"""Aliases of models, and models that answer in the place of others."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.config.key_store import KeyStoreConfig
from deployments.gateway.gateway import Gateway
from deployments.metrics import catalogue
from deployments.wire.response import Piece, ResponseEnd, ResponseStart
from tests.fakes.replicas import (
    CHAT,
    EVENTS,
    JSON,
    FakeReplicas,
    answering,
    bearer,
    client,
    client_of,
    gateway_of,
    key,
)

pytestmark = pytest.mark.usefixtures("simulated_time")
NAMES: dict[str, Any] = {"aliases": {"gpt": "m", "one": "m1"}, "fallback": {"m": "m1"}}


async def test_an_alias_reaches_its_model_under_the_models_name() -> None:
    first, second = answering(), answering()

    await client(first, second, **NAMES).post(CHAT, json={"model": "gpt"})
    await client(first, second, **NAMES).post("/tokenize", json={"model": "one", "prompt": "x"})
    await client(first, second, **NAMES).post(CHAT, json={"model": "m"})

    assert [request.terms.model for request in first.requests] == ["m", None]
    assert [request.terms.model for request in second.requests] == ["m1"]


async def test_an_alias_is_listed_beside_its_model() -> None:
    cards = FakeReplicas(ResponseStart(200, JSON, b'{"data": [{"id": "m", "root": "/m"}]}'))

    listed = (await client(cards, aliases={"gpt": "m"}).get("/v1/models")).json()["data"]

    assert {"id": "gpt", "root": "/m", "alias_of": "m"} in listed


SLASHED: dict[str, Any] = {"aliases": {"org/gpt": "m", "other": "m1"}}


@pytest.mark.parametrize("name", ["m", "org/gpt", "org%2Fgpt", "other"])
async def test_a_model_or_alias_is_found_by_its_name(name: str) -> None:
    cards = FakeReplicas(ResponseStart(200, JSON, b'{"data": [{"id": "m", "root": "/m"}]}'))
    http = client(cards, FakeReplicas(ResponseStart(200, JSON, b'{"data": []}')), **SLASHED)
    listed = (await http.get("/v1/models")).json()["data"]

    found = await http.get(f"/v1/models/{name}")

    assert found.status_code == 200
    (card,) = [card for card in listed if card["id"] == name.replace("%2F", "/")]
    assert found.json() == card


async def test_an_unknown_model_is_a_404_with_the_names_that_the_key_may_use() -> None:
    cards = FakeReplicas(ResponseStart(200, JSON, b'{"data": []}'))
    http = client(cards, cards, keys=(key("a", models=["m"]),), **SLASHED)

    for name in ("nope", "m1", "other", ""):
        refused = await http.get(f"/v1/models/{name}", headers=bearer("a"))

        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        assert refused.json()["error"]["message"] == (
            f"The model `{name}` does not exist or is not served here; served: m, org/gpt."
        )
    assert (await http.get("/v1/models/m")).status_code == 401


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/version", "/openapi.json"])
async def test_head_is_answered_like_get(path: str) -> None:
    replicas = FakeReplicas(ResponseStart(200, JSON, b'{"data": [], "paths": {}}'))
    http = client(replicas)

    answers = [await http.request(method, path) for method in ("GET", "HEAD")]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].headers["content-length"] == answers[1].headers["content-length"]
    assert {request.method for request in replicas.requests} == {"GET"}


async def test_a_key_reaches_an_alias_only_if_it_may_use_the_model() -> None:
    http = client(answering(), answering(), keys=(key("a", models=["m1"]),), **NAMES)

    refused = await http.post(CHAT, json={"model": "gpt"}, headers=bearer("a"))
    allowed = await http.post(CHAT, json={"model": "one"}, headers=bearer("a"))

    assert (refused.status_code, allowed.status_code) == (404, 200)


async def full(gateway: Gateway, replicas: FakeReplicas) -> list[asyncio.Task[Any]]:
    """Fill a model's places, whose queue takes no request."""
    replicas.gate.clear()
    http = client_of(gateway)
    tasks = [asyncio.create_task(http.post(CHAT, json={"model": "m"})) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert len(replicas.requests) == 2
    return tasks


async def test_another_model_answers_when_the_queue_is_full() -> None:
    first, second = answering(), answering()
    gateway = gateway_of(first, second, **NAMES)
    tasks = await full(gateway, first)

    answer = await client_of(gateway).post(CHAT, json={"model": "gpt"})

    assert answer.status_code == 200
    assert answer.headers["x-apar-fallback-of"] == "m"
    assert [request.terms.model for request in second.requests] == ["m1"]
    first.gate.set()
    for task in tasks:
        assert "x-apar-fallback-of" not in (await task).headers
    assert not any(state.running for state in gateway.waiting().values())


@pytest.mark.parametrize("streams", [False, True])
async def test_usage_and_metrics_count_for_the_model_that_answers(
    tmp_path: Path, streams: bool
) -> None:
    end = ResponseEnd(prompt_tokens=30, generated_tokens=50, threads=4, forks=3)
    chunk = Piece(b'data: {"model": "m1"}\n\ndata: [DONE]\n\n', num_tokens=20)
    start = ResponseStart(200, EVENTS, b"") if streams else ResponseStart(200, JSON, b"{}")
    first, second = answering(), FakeReplicas(start, chunk, end=end)
    gateway = gateway_of(
        first,
        second,
        keys=(key("root", admin=True), key("a", requests_per_day=2)),
        key_store=KeyStoreConfig(path=tmp_path / "keys.db"),
        fallback={"m": "m1"},
    )
    http = client_of(gateway)
    first.gate.clear()
    body = {"model": "m", "stream": streams}
    filling = [
        asyncio.create_task(http.post(CHAT, json={"model": "m"}, headers=bearer("root")))
        for _ in range(2)
    ]
    await asyncio.sleep(0.05)

    answers = [await http.post(CHAT, json=body, headers=bearer("a")) for _ in range(3)]
    usage = await http.get("/admin/usage?key=a", headers=bearer("root"))

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    [row] = [each for each in usage.json()["data"] if each["model"] == "m1"]
    assert (row["requests"], row["prompt_tokens"], row["generated_tokens"]) == (2, 60, 100)
    assert (row["threads"], row["forks"], row["errors"]) == (8, 6, 0)
    of_asked = [each for each in usage.json()["data"] if each["model"] == "m"]
    assert not any(each["requests"] or each["generated_tokens"] for each in of_asked)
    metrics, by = gateway.metrics.recorder, {"model": "m1", "key_class": key("a").metrics_class}
    assert metrics.value(catalogue.CHARGED_TOKENS, **by, kind="generated") == 100
    assert metrics.value(catalogue.REQUESTS, **by, outcome="ok") == 2
    first.gate.set()
    await asyncio.gather(*filling)
    await gateway.close()


async def test_if_both_are_full_the_first_ones_refusal_counts() -> None:
    first, second = answering(), answering()
    gateway = gateway_of(first, second, aliases={}, fallback={"m": "m1", "m1": "m"})
    tasks = await full(gateway, first)
    second.gate.clear()
    http = client_of(gateway)
    tasks += [asyncio.create_task(http.post(CHAT, json={"model": "m1"})) for _ in range(2)]
    await asyncio.sleep(0.05)

    answer = await http.post(CHAT, json={"model": "m"})

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "overloaded"
    first.gate.set()
    second.gate.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(("running", "answered_by"), [(1, "first"), (0, "second")])
async def test_another_model_answers_while_all_replicas_are_lost(
    running: int, answered_by: str
) -> None:
    replicas = {"first": answering(), "second": answering()}
    gateway = gateway_of(*replicas.values(), **NAMES)
    for number in (1, running):
        gateway._replicas_changed("Replica-m", number)

    answer = await client_of(gateway).post(CHAT, json={"model": "m"})

    assert answer.status_code == 200
    assert len(replicas[answered_by].requests) == 1


async def test_only_requests_for_text_stream() -> None:
    replicas = answering()

    await client(replicas).post("/v1/messages/count_tokens", json={"stream": True})

    assert [request.streams for request in replicas.requests] == [False]
