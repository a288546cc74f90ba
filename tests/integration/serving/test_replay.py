"""Recorded answers through the whole stack: exactly their text, forked and flat."""

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copyfile
from typing import Any

import openai
import pytest

from apar_core.models.apar_tiny import checkpoint_path
from apar_core.offline.evaluation.replay_text import load_text
from apar_core.tree import tree_statistics
from apar_core.workload.replay_answers import ReplayAnswer, replay_answers
from apar_core.workload.trace import read_trace
from tests.integration.serving.apar_process import TINY, Server, serving
from tests.integration.serving.running_application import RunningApplication
from tests.integration.serving.test_continuation import Victims

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
pytestmark = [pytest.mark.cluster, pytest.mark.slow]
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data does not lie beside it")
TEXT = load_text(str(checkpoint_path()))
CONTEXT = 3000
WITHOUT_WEIGHTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas with random weights: of the checkpoint there is no weight at all."""
    folder = tmp_path_factory.mktemp("replay")
    model = folder / "no-weights"
    model.mkdir()
    for name in WITHOUT_WEIGHTS:
        copyfile(checkpoint_path() / name, model / name)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    replaying = TINY | {
        "checkpoint": str(model),
        "replicas": 2,
        "replay": True,
        "engine": {**TINY["engine"], "load_format": "dummy"},
    }
    with serving(folder, replaying) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def answers() -> list[ReplayAnswer]:
    structured = read_trace(DATA / "structured.jsonl", limit=10)
    lines = structured + read_trace(DATA / "mixed.jsonl", limit=3)
    found, _ = replay_answers(lines, TEXT, TEXT.tokens, max_tokens=CONTEXT)
    assert len(found) > 8
    assert any(answer.num_threads == 1 for answer in found)
    return found


def body(answer: ReplayAnswer, *, forked: bool) -> dict[str, Any]:
    return {"extra_body": {"apar": answer.apar_field(forked=forked)}}


def messages(answer: ReplayAnswer) -> Any:
    return [message.as_dict() for message in answer.messages]


def whole(client: openai.OpenAI, answer: ReplayAnswer, *, forked: bool) -> Any:
    return client.chat.completions.create(
        model="no-weights", messages=messages(answer), **body(answer, forked=forked)
    )


def streamed(
    client: openai.OpenAI, answer: ReplayAnswer, *, forked: bool, request_id: str = ""
) -> Any:
    return client.chat.completions.create(
        model="no-weights",
        messages=messages(answer),
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": request_id} if request_id else None,
        **body(answer, forked=forked),
    )


def check_statistics(answer: ReplayAnswer, found: dict[str, int], *, forked: bool) -> None:
    expected = tree_statistics(answer.tree, len(answer.prompt_ids))
    assert found["text_tokens"] == answer.text_tokens
    assert found["threads"] == (answer.num_threads if forked else 1)
    assert found["sequential_steps"] == expected.sequential_steps
    steps = expected.decode_steps if forked else expected.sequential_steps
    assert found["decode_steps"] == steps


@needs_data
@pytest.mark.parametrize("forked", [True, False], ids=["forked", "flat"])
def test_recorded_answers_come_back_to_the_letter(
    client: openai.OpenAI, answers: list[ReplayAnswer], forked: bool
) -> None:
    def ask(answer: ReplayAnswer) -> tuple[Any, list[Any]]:
        return whole(client, answer, forked=forked), list(streamed(client, answer, forked=forked))

    with ThreadPoolExecutor(8) as executor:
        given = list(executor.map(ask, answers))

    for answer, (completion, chunks) in zip(answers, given, strict=True):
        expected = TEXT.decode(answer.flat)
        assert completion.choices[0].message.content == expected
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected
        assert completion.choices[0].finish_reason == "stop"
        assert completion.usage.prompt_tokens == len(answer.prompt_ids)
        for found in (completion.model_extra["apar"], chunks[-1].model_extra["apar"]):
            check_statistics(answer, found, forked=forked)


@needs_data
def test_completions_are_replayed_too(client: openai.OpenAI, answers: list[ReplayAnswer]) -> None:
    for forked in (True, False):
        given = client.completions.create(
            model="no-weights", prompt="The best tea", **body(answers[0], forked=forked)
        )
        assert given.choices[0].text == TEXT.decode(answers[0].flat)


@needs_data
@pytest.mark.parametrize("forked", [True, False], ids=["forked", "flat"])
@pytest.mark.parametrize("kills_replica", [True, False], ids=["replica", "engine"])
def test_a_replay_goes_on_where_a_lost_replica_stopped(
    server: Server,
    client: openai.OpenAI,
    answers: list[ReplayAnswer],
    forked: bool,
    kills_replica: bool,
) -> None:
    answer = max(answers, key=lambda each: each.num_threads)
    server.wait_for_replicas(2)
    victims = Victims(server)
    text, pieces = "", 0
    statistics: dict[str, int] = {}
    request_id = uuid.uuid4().hex

    for chunk in streamed(client, answer, forked=forked, request_id=request_id):
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            pieces += 1
            if pieces == 25:
                victims.kill(replica=kills_replica)
        statistics = (chunk.model_extra or {}).get("apar") or statistics

    assert pieces > 25
    assert server.record(request_id)["continued"] >= 1
    assert text == TEXT.decode(answer.flat)
    check_statistics(answer, statistics, forked=forked)


@pytest.mark.parametrize(
    ("apar", "settings", "message"),
    [
        ({"replay": {"": [5, 999_999]}}, {}, "id 999999"),
        ({"replay": {"": [5, 2], "7": [2]}}, {}, "'7'"),
        ({"replay": {"0": [5]}}, {}, ""),
        ({"replay": {"": "text"}}, {}, "valid list"),
        ({"replay": {"": [5] * 400}}, {"max_tokens": 3}, ""),
    ],
)
def test_a_wrong_replay_gets_a_400_that_names_it(
    client: openai.OpenAI, apar: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        client.completions.create(
            model="no-weights", prompt="Hi", extra_body={"apar": apar}, **settings
        )

    assert str(raised.value.param).startswith("apar.replay")


def test_a_server_does_not_replay_by_itself(application: RunningApplication) -> None:
    client = openai.OpenAI(base_url=f"{application.url}/v1", api_key="none", max_retries=0)
    extra = {"apar": {"replay": {"": [5, TEXT.tokens.end_id]}}}

    with pytest.raises(openai.BadRequestError, match="configured without `replay: true`") as raised:
        client.completions.create(model=application.model, prompt="Hi", extra_body=extra)

    assert raised.value.param == "apar.replay"
