"""What the terms of a key become in the body that vLLM reads."""

import json
from typing import Any

import pytest

from deployments.replica.answering import SCOPE_KEY
from deployments.replica.apar_extension import AparExtension
from deployments.wire.request import RequestTerms
from deployments.wire.terms_in_body import salt_within, write_terms

TERMS = RequestTerms(key="alice", priority=2, key_max_threads=7, cache_salt="s")


def written(body: dict[str, Any], terms: RequestTerms = TERMS) -> dict[str, Any]:
    assert write_terms(body, terms)
    return body


def test_only_the_salt_of_a_key_is_written_into_the_body() -> None:
    body = written({"prompt": "Hi", "priority": -9, "vllm_xargs": {"mine": 1}})

    # The client's own priority stays: it means nothing to the engine.
    assert body == {"prompt": "Hi", "priority": -9, "cache_salt": "s", "vllm_xargs": {"mine": 1}}


def test_a_clients_salt_lies_within_its_keys() -> None:
    own = written({"cache_salt": "mine"})["cache_salt"]
    other = written({"cache_salt": "mine"}, RequestTerms(key="bob", cache_salt="t"))["cache_salt"]

    assert own == salt_within("s", "mine")
    assert len({own, other, "mine", "s", "t"}) == 5


@pytest.mark.parametrize("salt", ["", 5, [], {}])
def test_a_salt_that_is_none_is_left_for_vllm_to_refuse(salt: object) -> None:
    body = {"cache_salt": salt}

    assert not write_terms(body, TERMS)

    assert body == {"cache_salt": salt}


def test_nothing_is_written_for_a_caller_without_a_key() -> None:
    body: dict[str, Any] = {"prompt": "Hi", "priority": 3}

    assert not write_terms(body, RequestTerms(request_id="r"))

    assert body == {"prompt": "Hi", "priority": 3}


async def test_the_extension_writes_the_terms_of_the_request_that_it_serves() -> None:
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
