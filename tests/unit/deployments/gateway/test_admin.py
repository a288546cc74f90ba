"""Keys and usage through `/admin`, with SQLite and fake replicas."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from deployments.config.key_store import KeyStoreConfig
from deployments.gateway.gateway import Gateway
from deployments.wire.own_routes import OWN_OPERATIONS
from deployments.wire.response import ResponseEnd
from tests.fakes.clock import Clock
from tests.fakes.replicas import CHAT, answering, bearer, client_of, gateway_of, key

ADMIN = bearer("root")
END = ResponseEnd(prompt_tokens=30, generated_tokens=50, threads=4, forks=3)
BODY = {"messages": [{"role": "user", "content": "x" * 40}]}


def gateway(folder: Path, *keys: Any, end: ResponseEnd = END) -> Gateway:
    return gateway_of(
        answering(end=end),
        keys=(key("root", admin=True), *keys),
        key_store=KeyStoreConfig(path=folder / "keys.db"),
    )


async def test_a_key_created_at_run_time_works_until_it_is_revoked(tmp_path: Path) -> None:
    served = gateway(tmp_path)
    http = client_of(served)

    created = await http.post("/admin/keys", json={"name": "alice", "models": ["m"]}, headers=ADMIN)
    token = created.json()["key"]
    asked = await http.post(CHAT, json=BODY, headers=bearer(token))
    listed = await http.get("/admin/keys", headers=ADMIN)
    revoked = await http.delete("/admin/keys/alice", headers=ADMIN)
    refused = await http.post(CHAT, json=BODY, headers=bearer(token))

    assert (created.status_code, asked.status_code) == (201, 200)
    assert token.startswith("apar-")
    own = next(each for each in listed.json()["data"] if each["name"] == "alice")
    assert own["source"] == "store"
    assert own["models"] == ["m"]
    assert own["created_by"] == "root"
    assert token not in listed.text + revoked.text
    assert "sha256" not in listed.text + revoked.text + created.text
    assert revoked.json()["revoked"][0]["id"] == own["id"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    await served.close()


async def test_a_key_revoked_at_one_gateway_stops_at_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gateway(tmp_path), gateway(tmp_path)
    clock = Clock()
    second.callers.ring._clock = clock
    clock.now_s = 1e6
    here, there = client_of(first), client_of(second)
    created = await here.post("/admin/keys", json={"name": "alice"}, headers=ADMIN)
    token = bearer(created.json()["key"])
    assert (await there.post(CHAT, json=BODY, headers=token)).status_code == 200

    await here.delete("/admin/keys/alice", headers=ADMIN)
    clock.now_s += 1.0

    assert (await here.post(CHAT, json=BODY, headers=token)).status_code == 401
    assert (await there.post(CHAT, json=BODY, headers=token)).status_code == 401
    await first.close()
    await second.close()


async def test_answers_are_as_the_openapi_description_says(tmp_path: Path) -> None:
    served = gateway(tmp_path)
    http = client_of(served)
    body = {"name": "a", "models": ["m"], "expires_at": "2100-01-01T00:00:00Z", "weight": 2}
    asked = [
        ("POST", "/admin/keys", body),
        ("GET", "/admin/keys", None),
        ("GET", "/admin/usage", None),
        ("DELETE", "/admin/keys/{name}", None),
        ("GET", "/health", None),
        ("GET", "/health/{model}", None),
        ("GET", "/ready", None),
    ]
    await http.post(CHAT, json=BODY, headers=ADMIN)
    for method, path, sent in asked:
        url = path.format(name="a", model="m")
        answer = await http.request(method, url, json=sent, headers=ADMIN)

        operation = OWN_OPERATIONS[path][method]
        described = operation.get("responses", {"200": {}})[str(answer.status_code)]
        if described:
            schema = described["content"]["application/json"]["schema"]
            Draft202012Validator(schema).validate(answer.json())
        if sent is not None:
            taken = operation["requestBody"]["content"]["application/json"]["schema"]
            Draft202012Validator(taken).validate(sent)
            assert not Draft202012Validator(taken).is_valid(sent | {"hash": "md5:0"})
    # A gateway's process answers `/live` itself.
    others = {"/live", "/v1/models/{model}"}  # the second has a test in test_other_names.py
    # Those of the Batch API have tests in batches/test_api.py.
    own = {path for path in OWN_OPERATIONS if not path.startswith(("/v1/files", "/v1/batches"))}
    assert {path for _, path, _ in asked} | others == own
    await served.close()


async def test_a_client_may_send_the_hash_of_a_key_that_it_made(tmp_path: Path) -> None:
    served = gateway(tmp_path)
    http = client_of(served)
    record = key("alice", "a token").model_dump(mode="json", exclude_unset=True)

    created = await http.post("/admin/keys", json=record, headers=ADMIN)

    assert "key" not in created.json()
    assert (await http.post(CHAT, json=BODY, headers=bearer("a token"))).status_code == 200
    await served.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "named"),
    [
        ("POST", "keys", {"name": "two words"}, 400, None, "name"),
        ("POST", "keys", {"name": ".."}, 400, None, "name"),
        ("POST", "keys", {"name": "a", "tokens_per_day": 0}, 400, None, "tokens_per_day"),
        ("POST", "keys", {"name": "a", "colour": 1}, 400, None, "colour"),
        ("POST", "keys", {"name": "a", "expires_at": "2027-01-01T00:00:00"}, 400, None, "time"),
        ("POST", "keys", {"name": "a", "best_priority": 5}, 400, None, "best_priority"),
        ("POST", "keys", ["a"], 400, None, "JSON object"),
        ("POST", "keys", {"name": "root", "weight": 2}, 409, "conflict", "root"),
        ("DELETE", "keys/root", None, 409, "conflict", "configuration"),
        ("DELETE", "keys/nobody", None, 404, "not_found", "nobody"),
        ("PUT", "keys", None, 405, "method_not_allowed", "PUT"),
        ("GET", "secrets", None, 404, "unknown_url", "secrets"),
        ("GET", "usage?from=yesterday", None, 400, None, "from"),
        ("GET", "usage?from=2026-11-02&to=2026-11-01", None, 400, None, "from"),
        ("GET", "usage?from=2020-01-01", None, 400, None, "400"),
        ("GET", "usage?since=1", None, 400, None, "since"),
    ],
)
async def test_an_invalid_admin_request_names_its_fault(
    tmp_path: Path, method: str, path: str, body: Any, status: int, code: str | None, named: str
) -> None:
    served = gateway(tmp_path)

    answer = await client_of(served).request(method, f"/admin/{path}", json=body, headers=ADMIN)

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert named in answer.json()["error"]["message"]
    await served.close()


async def test_only_admins_may_administer(tmp_path: Path) -> None:
    served = gateway(tmp_path, key("bob"))
    http = client_of(served)
    for method, path in (("GET", "keys"), ("POST", "keys"), ("GET", "usage"), ("GET", "nothing")):
        refused = await http.request(method, f"/admin/{path}", headers=bearer("bob"))
        unknown = await http.request(method, f"/admin/{path}")

        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_required")
        assert unknown.status_code == 401
    open_server = client_of(gateway_of(answering()))
    assert (await open_server.get("/admin/usage")).status_code == 403
    await served.close()


async def test_without_a_store_admin_routes_say_so() -> None:
    http = client_of(gateway_of(answering(), keys=(key("root", admin=True),)))

    answer = await http.get("/admin/usage", headers=ADMIN)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


async def test_usage_is_reported_by_day_key_and_model(tmp_path: Path) -> None:
    served = gateway(tmp_path, key("bob"), key("eve", models=("other",)))
    http = client_of(served)
    for name in ("bob", "bob", "eve"):
        await http.post(CHAT, json=BODY, headers=bearer(name))

    report = (await http.get("/admin/usage", headers=ADMIN)).json()
    of_bob = (await http.get("/admin/usage?key=bob&model=m", headers=ADMIN)).json()["data"]

    assert of_bob == [
        {
            "day": report["to"],
            "key": "bob",
            "model": "m",
            "requests": 2,
            "errors": 0,
            "refused": 0,
            "prompt_tokens": 60,
            "generated_tokens": 100,
            "threads": 8,
            "forks": 6,
        }
    ]
    assert [(row["key"], row["model"], row["refused"]) for row in report["data"]] == [
        ("bob", "m", 0),
        ("eve", "unknown", 1),
    ]
    await served.close()


@pytest.mark.parametrize(
    ("days", "first", "last"),
    [
        ("to=2026-03-31", "2026-03-02", "2026-03-31"),
        ("to=0001-01-05", "0001-01-01", "0001-01-05"),
        ("from=9999-12-31&to=9999-12-31", "9999-12-31", "9999-12-31"),
    ],
)
async def test_a_report_ends_where_the_calendar_does(
    days: str, first: str, last: str, tmp_path: Path
) -> None:
    served = gateway(tmp_path, key("bob"))

    answer = await client_of(served).get(f"/admin/usage?{days}", headers=ADMIN)

    assert answer.status_code == 200, answer.text
    assert (answer.json()["from"], answer.json()["to"]) == (first, last)
    await served.close()


async def test_a_key_over_its_budget_or_expired_is_refused(tmp_path: Path) -> None:
    old = key("old", expires_at="2026-01-01T00:00:00Z")
    served = gateway(tmp_path, key("bob", tokens_per_day=80), old)
    http = client_of(served)

    first = await http.post(CHAT, json=BODY, headers=bearer("bob"))
    over = await http.post(CHAT, json=BODY, headers=bearer("bob"))
    version = await http.get("/version", headers=bearer("bob"))
    expired = await http.post(CHAT, json=BODY, headers=bearer("old"))

    assert (first.status_code, version.status_code) == (200, 200)
    assert (over.status_code, over.json()["error"]["code"]) == (429, "tokens_per_day_exceeded")
    assert 1 <= int(over.headers["retry-after"]) <= 86_400
    assert (expired.status_code, expired.json()["error"]["code"]) == (401, "expired_api_key")
    assert "2026-01-01T00:00:00" in expired.json()["error"]["message"]
    await served.close()


async def test_concurrent_requests_do_not_exceed_a_budget_of_requests(tmp_path: Path) -> None:
    served = gateway(tmp_path, key("bob", requests_per_day=3))
    http = client_of(served)

    async def ask() -> httpx.Response:
        return await http.post(CHAT, json=BODY, headers=bearer("bob"))

    answers = await asyncio.gather(*(ask() for _ in range(2)))
    answers += await asyncio.gather(*(ask() for _ in range(2)))

    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429]
    await served.close()
