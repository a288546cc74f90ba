"""Which model a request reaches, by the names of models and of their adapters."""

import json

import pytest

from apar_core.errors import RequestError
from deployments.config.keys import KeyConfig, hash_of
from deployments.gateway.callers import EVERYONE, Caller
from deployments.gateway.models import Model, by_name, find_model, list_models
from deployments.gateway.settings import ServedModel
from deployments.wire.errors import UnknownModelError
from deployments.wire.request import RelayedRequest
from deployments.wire.response import ResponseStart
from tests.fakes.replicas import JSON, FakeReplicas

CARDS = {"data": [{"id": "base", "root": "/b"}, {"id": "one", "parent": "base"}]}


def model(name: str, *adapters: str) -> Model:
    settings = ServedModel(
        name=name, adapters=adapters, deployment=name, requests_per_replica=1, max_queued=1
    )
    answer = ResponseStart(200, JSON, json.dumps(CARDS).encode())
    return Model(settings, FakeReplicas(answer))


MODELS = by_name([model("base", "one", "two"), model("other")])


def caller(*models: str) -> Caller:
    return Caller("a", KeyConfig(name="a", hash=hash_of("a"), models=models))


def test_an_adapter_leads_to_the_model_that_serves_it() -> None:
    assert list(MODELS) == ["base", "one", "two", "other"]
    assert find_model(MODELS, "two", EVERYONE, needed=True) is MODELS["base"]
    with pytest.raises(UnknownModelError):
        find_model(MODELS, "two", caller("base", "one"), needed=True)


def test_a_request_without_a_name_never_reaches_a_base_model_through_its_adapter() -> None:
    assert find_model(MODELS, None, caller("base", "one"), needed=True) is MODELS["base"]
    with pytest.raises(RequestError, match="`model` is missing; served here: one"):
        find_model(MODELS, None, caller("one"), needed=True)
    assert find_model(MODELS, None, caller("one"), needed=False) is MODELS["base"]


async def test_the_list_has_the_callers_names_only_with_parents_of_adapters() -> None:
    usable = {name: MODELS[name] for name in ("one", "two")}

    answer = await list_models(
        usable, RelayedRequest("GET", "/v1/models", b"", [], b""), 1.0, created_s=7
    )

    one, two = json.loads(answer.body)["data"]
    assert one == CARDS["data"][1]
    assert (two["id"], two["parent"], two["created"]) == ("two", "base", 7)
