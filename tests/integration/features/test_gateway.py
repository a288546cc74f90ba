"""A cluster of a base model with an adapter, and an embedding model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.features.tiny_adapter import Adapter
from tests.integration.serving.apar_process import TINY, TOKEN, Server, serving
from tests.integration.serving.shared_server import key

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

QUESTION = "Give me 5 tips for learning guitar."
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
# Without `strict`, vLLM lets a forced call have any JSON as arguments.
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "fit", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(
    adapter: Adapter, encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    plain = {"cpu_threads": 1, "kv_cache_gib": 0.1, "coalesce_s": 0.0}
    base = TINY | {
        "checkpoint": str(adapter.base),
        "name": "base",
        "forks": {"enabled": False},
        "adapters": [{"name": "forking", "path": str(adapter.adapter), "forks": True}],
        "engine": TINY["engine"]
        | {
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "structured_outputs_config": {"disable_any_whitespace": True, "backend": "xgrammar"},
        },
    }
    embedding = plain | {
        "checkpoint": str(encoder),
        "name": "embedding",
        "engine": {"dtype": "float32", "enforce_eager": True},
    }
    keys = [
        key(TOKEN),
        key("narrow", models=["forking"]),
        key("plain-only", models=["base"]),
        key("counted", models=["embedding"], tokens_per_minute=1000),
    ]
    with serving(tmp_path_factory.mktemp("server"), base, embedding, keys=keys) as server:
        yield server


def ask(server: Server, model: str | None, token: str = TOKEN, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 200,
    }
    body |= {} if model is None else {"model": model}
    return server.post("/v1/chat/completions", token=token, json=body | fields)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(server: Server, model: str, **fields: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the deltas of a stream, and its number of forks."""
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    answer = ask(server, model, **usage, **fields)
    assert answer.status_code == 200, answer.text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    [forks] = [each["apar"]["forks"] for each in events if "apar" in each]
    return [each["choices"][0]["delta"] for each in events if each["choices"]], forks


def test_an_adapter_is_a_model_of_its_own(server: Server) -> None:
    cards = {card.id: card for card in server.openai().models.list()}
    base, forking = ask(server, "base"), ask(server, "forking")

    assert list(cards) == ["base", "forking", "embedding"]
    assert (cards["forking"].model_extra or {})["parent"] == "base"
    assert forking.json()["model"] == "forking"
    assert forking.json()["apar"]["forks"] >= 3
    assert base.json()["apar"]["forks"] == 0
    assert text_of(forking) != text_of(base)
    assert text_of(ask(server, "forking", apar={"enabled": False})) != text_of(forking)
    # Each has its part of the prefix cache.
    assert text_of(ask(server, "base")) == text_of(base)
    assert text_of(ask(server, "forking")) == text_of(forking)
    [load] = server.loads("Replica-base")
    assert (load["threads"], load["free_blocks"]) == (0, load["kv_blocks"])
    logged = [record["adapter"] for record in server.records() if record["model"] == "base"]
    assert {None, "forking"} <= set(logged)


def test_a_key_is_limited_to_an_adapter_or_to_its_base_model(server: Server) -> None:
    assert ask(server, "forking", "narrow").status_code == 200
    assert ask(server, "base", "narrow").status_code == 404
    assert ask(server, "forking", "plain-only").status_code == 404
    assert [card.id for card in server.openai("narrow").models.list()] == ["forking"]
    # Without a name a replica would answer with its base model.
    unnamed = ask(server, None, "narrow")
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
    assert ask(server, None, "plain-only").json()["model"] == "base"


@pytest.mark.parametrize("model", ["forking", "base"])
@pytest.mark.parametrize(
    "fields",
    [{"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}],
    ids=["response_format", "structured_outputs"],
)
def test_a_constrained_answer_has_one_thread(
    server: Server, model: str, fields: dict[str, Any]
) -> None:
    answer = ask(server, model, **fields)

    assert json.loads(text_of(answer))["colour"] in ("red", "blue")
    assert answer.json()["apar"]["threads"] == 1
    deltas, forks = streamed(server, model, **fields)
    assert "".join(delta.get("content") or "" for delta in deltas) == text_of(answer)
    assert forks == 0


@pytest.mark.parametrize("model", ["forking", "base"])
@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [({"type": "function", "function": {"name": "weather"}}, "stop"), ("required", "tool_calls")],
    ids=["named", "required"],
)
def test_a_forced_tool_call_is_written_by_one_thread(
    server: Server, model: str, choice: Any, finish_reason: str
) -> None:
    # The grammar of a call allows any white space, which this model only ends with a penalty.
    fields = {
        "tools": [TOOL],
        "tool_choice": choice,
        "frequency_penalty": 2.0,
        "max_tokens": 400,
    }

    answer = ask(server, model, **fields)

    assert answer.status_code == 200, answer.text
    [written] = answer.json()["choices"]
    [call] = written["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    arguments = call["function"]["arguments"]
    assert json.loads(arguments)["colour"] in ("red", "blue")
    assert written["finish_reason"] == finish_reason
    assert answer.json()["apar"]["threads"] == 1
    deltas, forks = streamed(server, model, **fields)
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or ()]
    assert [part["name"] for part in parts if part.get("name")] == ["weather"]
    assert json.loads("".join(part.get("arguments") or "" for part in parts)) == json.loads(
        arguments
    )
    assert forks == 0


def test_an_answer_that_may_call_a_tool_has_one_thread(server: Server) -> None:
    answer = ask(server, "forking", tools=[TOOL])

    # This model has not learned to call tools.
    assert text_of(answer).startswith("Here are 5 tips")
    assert answer.json()["apar"]["threads"] == 1
    assert ask(server, "forking", tools=[TOOL], tool_choice="none").json()["apar"]["forks"] >= 3


@pytest.mark.parametrize("streams", [False, True])
def test_a_constrained_completion_has_one_thread(server: Server, streams: bool) -> None:
    body = {
        "model": "forking", "prompt": QUESTION, "temperature": 0, "max_tokens": 60,
        "structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}, "stream": streams,
        "stream_options": {"include_usage": True} if streams else None,
    }  # fmt: skip
    answer = server.post("/v1/completions", json=body)

    assert answer.status_code == 200, answer.text
    assert '"threads":1,' in answer.text.replace(" ", "")
    assert "error" not in answer.text


def test_an_embedding_model_is_served_beside_the_others(server: Server) -> None:
    client = server.openai()

    found = client.embeddings.create(model="embedding", input=["hello", "you"])
    again = client.embeddings.create(model="embedding", input="hello")

    assert len(found.data) == 2
    assert found.data[0].embedding == pytest.approx(again.data[0].embedding, abs=1e-5)
    assert found.data[0].embedding != pytest.approx(found.data[1].embedding, abs=1e-2)
    assert found.usage.prompt_tokens == len("hello") + len("you")
    with pytest.raises(openai.NotFoundError, match="'base' does not serve /v1/embeddings"):
        client.embeddings.create(model="base", input="hello")
    chat = ask(server, "embedding")
    assert chat.status_code == 404
    assert "'embedding' does not serve /v1/chat/completions" in chat.json()["error"]["message"]


def test_embeddings_are_charged_to_their_key(server: Server) -> None:
    client = server.openai("counted")

    answer = client.embeddings.with_raw_response.create(model="embedding", input="x" * 200)
    later = client.embeddings.with_raw_response.create(model="embedding", input="x")

    record = server.record(answer.headers["x-request-id"])
    assert (record["prompt_tokens"], record["generated_tokens"]) == (200, 0)
    assert int(later.headers["x-ratelimit-remaining-tokens"]) <= 1000 - 200
    long = client.embeddings.with_raw_response
    with pytest.raises(openai.RateLimitError):
        long.create(model="embedding", input="x" * 3900)
    with pytest.raises(openai.BadRequestError, match="`tokens_per_minute` of this key is 1000"):
        long.create(model="embedding", input="x" * 8000)


def test_a_model_of_embeddings_scores_reranks_and_pools(server: Server) -> None:
    def post(path: str, **fields: Any) -> Any:
        answer = server.post(path, json={"model": "embedding"} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    scores = post("/v1/score", queries="hello", documents=["hello", "you"])["data"]
    ranked = post("/v1/rerank", query="hello", documents=["you", "hello"])["results"]
    pooled = post("/pooling", input="hello")["data"]
    [embedded] = server.openai().embeddings.create(model="embedding", input="hello").data

    assert scores[0]["score"] == pytest.approx(1.0, abs=1e-5)
    assert scores[1]["score"] < 0.9
    assert [each["index"] for each in ranked] == [1, 0]
    assert pooled[0]["data"] == pytest.approx(embedded.embedding, abs=1e-5)
    refused = server.post("/v1/score", json={"model": "base", "queries": "a", "documents": "b"})
    assert refused.status_code == 404
    assert "'base' does not serve /v1/score" in refused.json()["error"]["message"]


def test_cards_say_what_forks_mean(server: Server) -> None:
    cards = {
        each["id"]: each["apar"] for each in server.request("GET", "/v1/models").json()["data"]
    }

    assert (cards["base"]["forks"], cards["forking"]["forks"]) == (False, True)
    assert cards["base"]["format"] == "apar"
    assert set(cards["base"]["control_tokens"]) == {"[Fork]", "[Child]"}
    assert "/v1/responses" in cards["forking"]["apis"]
    assert cards["embedding"]["forks"] is False
    assert {"/v1/embeddings", "/v1/score"} <= set(cards["embedding"]["apis"])
