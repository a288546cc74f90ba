"""Keys, limits and request ids in the gateway."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from deployments.config.keys import new_token
from deployments.config.limits import LimitsConfig
from deployments.config.secret import SecretReference
from deployments.routing.shared_router import ROUTERS
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
    settings_of,
    settled,
)

# Otherwise a minute may end between two requests, and the remaining units change.
pytestmark = pytest.mark.usefixtures("advance", "simulated_time")


async def test_a_request_without_a_known_key_reaches_no_replica() -> None:
    replicas = answering()
    http = client(replicas, keys=(key("alice"),))

    answers = [
        await http.post(CHAT, json={}),
        await http.post(CHAT, json={}, headers=bearer("mallory")),
        await http.get("/v1/models"),
        await http.post("/tokenize", content=b"no JSON"),
    ]

    assert [answer.status_code for answer in answers] == [401] * 4
    for answer in answers:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == 'Bearer realm="apar"'
        assert answer.headers["x-request-id"]
    assert replicas.requests == []
    assert (await http.get("/health")).status_code == 200


async def test_the_terms_of_a_key_go_with_its_request() -> None:
    replicas = answering()
    alice = key("alice", priority=3, max_threads=5)
    http = client(replicas, keys=(alice, key("bob")))

    for name in ("alice", "alice", "bob"):
        await http.post(CHAT, json={}, headers=bearer(name))

    first, second, other = (request.terms for request in replicas.requests)
    assert (first.key, first.priority, first.key_max_threads) == ("alice", 3, 5)
    assert (other.key, other.priority, other.key_max_threads) == ("bob", 0, None)
    assert first.cache_salt == second.cache_salt != other.cache_salt
    assert len({first.request_id, second.request_id, other.request_id}) == 3
    assert b"authorization" not in dict(replicas.requests[0].headers)


async def test_a_configured_secret_gives_every_gateway_the_same_salts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    salts = []
    for secret in ("s" * 16, "s" * 16, "t" * 16, None, None):
        replicas = answering()
        monkeypatch.setenv("CACHE", secret or "")
        reference = SecretReference(env="CACHE") if secret else None
        http = client(replicas, keys=(key("a"),), limits=LimitsConfig(cache_secret=reference))
        await http.post(CHAT, json={}, headers=bearer("a"))
        salts.append(replicas.requests[0].terms.cache_salt)

    assert salts[0] == salts[1]
    assert len(set(salts)) == 4
    assert all(salt and len(salt) == 32 for salt in salts)


async def test_keys_share_no_prefix_hashes() -> None:
    replicas = answering()
    http = client(replicas, keys=(key("a"), key("b")))
    body = {"messages": [{"role": "user", "content": "the same"}]}

    for name, salt in (("a", None), ("a", None), ("b", None), ("a", "own"), ("b", "own")):
        fields = body | ({"cache_salt": salt} if salt else {})
        await http.post(CHAT, json=fields, headers=bearer(name))

    prefixes = [request.hint.prefix_hashes for request in replicas.requests]
    assert prefixes[0] == prefixes[1]
    assert len(set(prefixes)) == 4


async def test_requests_over_the_rate_are_refused_with_openais_headers() -> None:
    http = client(answering(), keys=(key("a", requests_per_minute=1),))

    passed = await http.post(CHAT, json={}, headers=bearer("a"))
    refused = await http.post(CHAT, json={}, headers=bearer("a"))

    assert passed.status_code == 200
    assert passed.headers["x-ratelimit-limit-requests"] == "1"
    assert passed.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "requests"
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("streaming", [True, False])
async def test_tokens_are_charged_as_they_come_and_corrected_at_the_end(streaming: bool) -> None:
    end = ResponseEnd(prompt_tokens=30, generated_tokens=50)
    parts = (Piece(b"x", num_tokens=20), Piece(b"y", num_tokens=20)) if streaming else ()
    replicas = FakeReplicas(ResponseStart(200, EVENTS, b"w", num_tokens=10), *parts, end=end)
    http = client(replicas, keys=(key("a", tokens_per_minute=1000),))

    await http.post(CHAT, json={"stream": streaming}, headers=bearer("a"))
    answer = await http.post(CHAT, json={"model": "none"}, headers=bearer("a"))

    assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - 30 - 50)


async def test_a_refused_request_refunds_its_prompt_tokens() -> None:
    replicas = FakeReplicas(ResponseStart(400, JSON, b'{"error":{"message":"no"}}'))
    http = client(replicas, keys=(key("a", tokens_per_minute=1000),))
    body = {"messages": [{"role": "user", "content": "x" * 400}]}

    await http.post(CHAT, json=body | {"stream": True}, headers=bearer("a"))
    answer = await http.post(CHAT, json={"model": "none"}, headers=bearer("a"))

    assert answer.headers["x-ratelimit-remaining-tokens"] == "1000"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user", "content": "x" * 11}]}, "`messages` holds 11"),
        ({"messages": [{"content": "x" * 6}, {"content": [{"text": "x" * 6}]}]}, "holds 12"),
        ({"prompt": ["x" * 6, "x" * 5]}, "`prompt` holds 11"),
        ({"prompt": [1, 2, 3]}, "`prompt` holds 12"),
        ({"prompt": [[1, 2], [3]]}, "`prompt` holds 12"),
        ({"prompt": "x" * 11, "messages": []}, "`prompt` holds 11"),
        ({"prompt": "x" * 6, "messages": [{"content": "x" * 5}]}, "`prompt` hold 11"),
        ({"tools": [{"function": {"description": "x" * 11}}]}, "`tools` holds 30"),
        ({"messages": [{"tool_calls": [{"arguments": "x" * 11}]}]}, "`messages` holds 20"),
        ({"messages": [{"content": [{"type": "refusal", "refusal": "x" * 11}]}]}, "holds 11"),
    ],
)
async def test_a_prompt_over_the_limit_is_refused(body: dict[str, Any], named: str) -> None:
    replicas = answering()
    for settings in (
        {"keys": (key("a", max_prompt_chars=10),)},
        {"keys": (key("a"),), "limits": LimitsConfig(max_prompt_chars=10)},
    ):
        answer = await client(replicas, **settings).post(CHAT, json=body, headers=bearer("a"))

        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert named in answer.json()["error"]["message"]
        assert "max_prompt_chars" in answer.json()["error"]["message"]
    assert replicas.requests == []


async def test_a_deeply_nested_body_does_not_fail_the_gateway() -> None:
    nested = b'{"messages": [{"content": ' + b"[" * 900 + b"]" * 900 + b"}]}"
    http = client(answering(), limits=LimitsConfig(max_prompt_chars=10))

    assert (await http.post(CHAT, content=nested)).status_code == 200


async def test_a_key_sees_only_its_own_models() -> None:
    replicas = [
        FakeReplicas(ResponseStart(200, JSON, json.dumps({"data": [{"id": name}]}).encode()))
        for name in ("m", "m1")
    ]
    http = client(*replicas, keys=(key("a", models=("m1",)), key("b")))

    own = await http.get("/v1/models", headers=bearer("a"))
    all_models = await http.get("/v1/models", headers=bearer("b"))
    refused = await http.post(CHAT, json={"model": "m"}, headers=bearer("a"))
    passed = await http.post(CHAT, json={}, headers=bearer("a"))

    assert [card["id"] for card in own.json()["data"]] == ["m1"]
    assert [card["id"] for card in all_models.json()["data"]] == ["m", "m1"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert passed.status_code == 200
    assert len(replicas[1].requests) == 2


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1._Z", True), ("a b", False), ("x" * 65, False), ("", False), ("é", False)],
)
async def test_a_sane_request_id_is_kept_and_any_other_replaced(given: str, kept: bool) -> None:
    replicas = answering()
    http = client(replicas)
    headers = {b"x-request-id": given.encode()}

    answers = [await http.post(CHAT, json={}, headers=headers) for _ in range(2)]
    lost = await http.get("/nowhere", headers=headers)

    for answer, request in zip(answers, replicas.requests, strict=True):
        own = answer.headers["x-request-id"]
        assert (own == given) is kept
        assert dict(request.headers)[b"x-request-id"] == own.encode()
        assert str(request.terms.request_id).startswith(own)
    assert replicas.requests[0].terms.request_id != replicas.requests[1].terms.request_id
    assert (lost.headers["x-request-id"] == given) is kept


async def test_a_key_in_a_path_or_an_id_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    token = new_token()
    http = client(answering(), keys=(key("a", token),))

    with caplog.at_level(logging.INFO):
        lost = await http.get(f"/v1/{token}", headers=bearer(token))
        asked = await http.post(CHAT, json={}, headers=bearer(token) | {"x-request-id": token})

    assert (lost.status_code, asked.status_code) == (404, 200)
    logged = [vars(record) for record in caplog.records if record.msg == "request"]
    assert [facts["path"] for facts in logged] == ["/v1/apar-...", CHAT]
    assert token not in str(logged)


async def test_waiting_requests_are_ordered_by_class_then_fairness() -> None:
    replicas = answering(end=ResponseEnd(generated_tokens=100))
    replicas.gate.clear()
    keys = (key("urgent", priority=-1), key("heavy"), key("light"))
    http = client(replicas, keys=keys, max_queued=10)
    order = ["heavy"] * 4 + ["light", "urgent"]
    tasks = await settled(http, *[(name, {}) for name in order])

    replicas.gate.set()
    await asyncio.gather(*tasks)

    # Two run at once; the gate lets both go, and then the queue decides.
    names = [request.terms.key for request in replicas.requests]
    assert names == ["heavy", "heavy", "urgent", "light", "heavy", "heavy"]


async def test_a_key_with_more_weight_gets_more_turns() -> None:
    replicas = answering(end=ResponseEnd(generated_tokens=100))
    replicas.gate.clear()
    http = client(replicas, keys=(key("heavy", weight=3.0), key("light")), max_queued=40)
    tasks = await settled(http, *[(name, {}) for name in ["heavy", "light"] * 16])

    replicas.gate.set()
    await asyncio.gather(*tasks)

    names = [request.terms.key for request in replicas.requests[:20]]
    assert 13 <= names.count("heavy") <= 16


async def test_a_flood_of_requests_that_generate_nothing_lets_others_pass() -> None:
    replicas = answering(end=ResponseEnd(generated_tokens=0))
    replicas.gate.clear()
    http = client(replicas, keys=(key("flood"), key("other")), max_queued=20)
    tasks = [
        asyncio.create_task(http.post(path, json={}, headers=bearer(name)))
        for name, path in [("flood", "/tokenize")] * 12 + [("other", CHAT)] * 4
    ]
    await asyncio.sleep(0.05)

    replicas.gate.set()
    await asyncio.gather(*tasks)

    names = [request.terms.key for request in replicas.requests]
    # Two of the flood run when the other key comes; then they take turns.
    assert names[:2] == ["flood"] * 2
    assert names[2:10].count("other") >= 3


async def test_a_request_that_waits_too_long_gets_a_503() -> None:
    replicas = answering()
    replicas.gate.clear()
    gateway = gateway_of(replicas, max_queued=5)
    [model] = settings_of(1, max_queued=5).models
    short = settings_of(1).model_copy(
        update={"models": (model.model_copy(update={"max_queue_s": 0.05}),)}
    )
    await gateway.reconfigure(short, [replicas])
    http = client_of(gateway)
    tasks = await settled(http, *[("a", {})] * 2)

    late = await http.post(CHAT, json={})
    replicas.gate.set()
    await asyncio.gather(*tasks)

    assert (late.status_code, late.json()["error"]["code"]) == (503, "overloaded")
    assert late.headers["retry-after"] == "1"


async def test_a_key_has_no_more_requests_than_threads() -> None:
    replicas = answering()
    replicas.gate.clear()
    http = client(replicas, keys=(key("one", max_threads=1), key("any")), max_queued=5)
    tasks = await settled(http, ("one", {}), ("one", {}), ("any", {}))

    assert [request.terms.key for request in replicas.requests] == ["one", "any"]
    replicas.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}


async def test_routers_set_the_capacity_and_hear_of_every_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[tuple[str, str | None, ResponseEnd | None]] = []
    listeners: dict[str, Any] = {}
    monkeypatch.setattr(ROUTERS, "ended", lambda *args: ended.append(args))
    monkeypatch.setattr(ROUTERS, "listen", listeners.__setitem__)
    replicas = answering(end=ResponseEnd(generated_tokens=7))
    replicas.gate.clear()
    http = client(replicas, keys=(key("a", max_threads=9),), max_queued=5)
    tasks = await settled(http, *[("a", {})] * 3)
    assert len(replicas.requests) == 2

    listeners["Replica-m"](2)
    await asyncio.sleep(0.01)
    assert len(replicas.requests) == 3
    replicas.gate.set()
    await asyncio.gather(*tasks)
    await http.post(CHAT, json={}, headers=bearer("a"))

    assert [request.terms.key_max_threads for request in replicas.requests] == [9, 9, 9, 5]
    assert {name for name, _, _ in ended} == {"Replica-m"}
    assert [id for _, id, _ in ended] == [r.terms.request_id for r in replicas.requests]
    assert {end for _, _, end in ended} == {ResponseEnd(generated_tokens=7)}


async def test_new_settings_apply_to_the_next_request_and_disturb_none(tmp_path: Path) -> None:
    replicas = answering()
    replicas.gate.clear()
    gateway = gateway_of(replicas, max_queued=1)
    http = client_of(gateway)
    tasks = await settled(http, *[("a", {})] * 3)
    assert gateway.waiting()["Replica-m"].waiting == {"anonymous": 1}

    await gateway.reconfigure(settings_of(2, keys=(key("a"),)), [replicas, answering()])
    refused = await http.post(CHAT, json={"model": "m"})
    full = await http.post(CHAT, json={"model": "m"}, headers=bearer("a"))
    added = await http.post(CHAT, json={"model": "m1"}, headers=bearer("a"))
    replicas.gate.set()
    answers = await asyncio.gather(*tasks)

    assert (refused.status_code, full.status_code, added.status_code) == (401, 503, 200)
    assert [answer.status_code for answer in answers] == [200] * 3
