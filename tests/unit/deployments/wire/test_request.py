"""How the terms of a request get into the body that vLLM reads."""

import json
from typing import Any

from deployments.replica.apar_extension import AparExtension
from deployments.wire.request import SCOPE_KEY, RequestTerms, write_terms

TERMS = RequestTerms(key="alice", priority=2, key_max_threads=7, cache_salt="s")


def test_only_the_salt_is_written_into_the_body() -> None:
    body = {"prompt": "Hi", "priority": -9, "vllm_xargs": {"mine": 1}, "cache_salt": "mine"}

    assert write_terms(body, TERMS)

    # The client's own priority stays: it means nothing to the engine.
    assert body == {"prompt": "Hi", "priority": -9, "cache_salt": "s", "vllm_xargs": {"mine": 1}}


def test_without_a_salt_nothing_is_written() -> None:
    body: dict[str, Any] = {"prompt": "Hi", "priority": 3, "cache_salt": "mine"}

    assert not write_terms(body, RequestTerms(request_id="r"))

    assert body == {"prompt": "Hi", "priority": 3, "cache_salt": "mine"}


async def test_the_extension_writes_the_terms_of_its_request() -> None:
    bodies: list[bytes] = []

    class Served:
        terms = TERMS

        def begin(self, engine_request_id: str) -> None:
            assert engine_request_id.startswith("cmpl-")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "x"}'}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    extension = AparExtension(app, frozenset(), lambda request_id: None)
    scope = {"type": "http", "path": "/v1/completions", "headers": [], SCOPE_KEY: Served()}
    await extension(scope, receive, send)

    assert json.loads(bodies[0])["cache_salt"] == "s"
