"""Addresses of servers, and selection of their models."""

import pytest

from apar_core.errors import EvaluationError
from cluster.loadtest.jobs import Target, find_model
from cluster.local_ray import free_port
from tests.fakes.chat_server import Reply, chat_server


def reply(*_: object) -> Reply:
    return Reply()


@pytest.mark.parametrize(
    ("url", "chat_url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1/chat/completions"),
        ("http://host:8000/", "http://host:8000/v1/chat/completions"),
        ("https://api.example.com/v1/", "https://api.example.com/v1/chat/completions"),
    ],
)
def test_an_address_may_have_its_version_or_not(url: str, chat_url: str) -> None:
    assert Target(url=url).chat_url == chat_url


def test_the_only_model_need_not_be_named() -> None:
    with chat_server(reply) as server:
        assert find_model(Target(url=server.url), None).id == "scripted"


def test_one_of_several_models_must_be_selected() -> None:
    models = ({"id": "one"}, {"id": "two", "max_model_len": 512, "root": "/models/two"})
    with chat_server(reply, models=models) as server:
        target = Target(url=server.url)
        card = find_model(target, "two")
        with pytest.raises(EvaluationError, match="has one, two: set --model-name"):
            find_model(target, None)
        with pytest.raises(EvaluationError, match=r"--model-name 'three'.*has one, two"):
            find_model(target, "three")

    assert (card.max_model_len, card.root) == (512, "/models/two")


def test_a_rejected_key_and_an_unreachable_server_are_errors() -> None:
    with chat_server(reply) as server, pytest.raises(EvaluationError, match="rejects the API key"):
        find_model(Target(url=server.url, api_key="wrong"), None)
    with pytest.raises(EvaluationError, match="cannot be reached"):
        find_model(Target(url=f"127.0.0.1:{free_port()}"), "scripted")


def test_a_server_without_a_model_list_needs_a_name() -> None:
    with chat_server(reply, models=({"name": "no id"},)) as server:
        target = Target(url=server.url)
        assert find_model(target, "mine").id == "mine"
        with pytest.raises(EvaluationError, match="lists no models"):
            find_model(target, None)


def test_the_api_key_is_never_written() -> None:
    target = Target(url="http://host", api_key="secret")

    assert "secret" not in target.model_dump_json()
    assert "secret" not in repr(target)
    assert target.headers == {"Authorization": "Bearer secret"}
